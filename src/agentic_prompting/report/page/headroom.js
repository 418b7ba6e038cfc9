// What the command `headroom` measured before a run, beside what the run brought.

function showHeadroom({ rows, verdicts }) {
  const section = addSection(
    "headroom",
    "Headroom",
    "Measured before the run, with 95 % intervals, beside what the run brought.",
  );
  const cells = rows.map((row) => [row.name, row.predicted, row.result]);
  section.append(renderTable(["", "headroom said", "the run brought"], cells));

  const items = verdicts.map(([part, sentence]) => {
    return el("li", { text: `${part}: ${toOneLine(sentence)}` });
  });
  section.append(el("ul", {}, ...items));
}
