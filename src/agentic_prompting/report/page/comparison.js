// Several runs: their scores, and their curves in the same charts with a line for each run.

function showComparison(comparison) {
  const folders = comparison.folders.join(" and ");
  const section = addSection("comparison", "Comparison", `Of ${folders}.`);

  if (comparison.intervals.length) {
    const charts = comparison.intervals.map(renderIntervals);
    section.append(el("div", { class: "charts" }, ...charts));
  }
  if (comparison.heldOut.length) {
    const headings = ["run", "", "exact match", "95 %: from", "to"];
    section.append(el("h3", { text: "On held-out questions" }));
    section.append(renderTable(headings, comparison.heldOut));
  }
  section.append(...renderDifferences(comparison.differences));
  if (comparison.panels.length) {
    const charts = comparison.panels.map((panel) => {
      return renderLineChart(panel, comparison.entries, comparison.dashes);
    });
    section.append(el("h3", { text: "Curves" }), renderSmoothingControl());
    section.append(el("div", { class: "charts" }, ...charts));
  }
}
