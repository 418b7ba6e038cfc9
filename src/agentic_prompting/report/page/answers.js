// An evaluation: its tables as they are printed, paired tests, and every answer beside what the others said.

async function showEvaluation(found) {
  const node = section("evaluation", "Evaluation", "Means with their 95 % intervals; failed answers are in no mean.");
  node.append(printed(found.results), ...paired(found.differences));
  const { columns } = found;
  const chunks = new Chunks("answers", found.chunk);
  const same = (place) => columns.place.map((_, other) => other).filter((other) => columns.task[other] === columns.task[place] && columns.place[other] === columns.place[place]);
  const row = (place) => {
    const right = columns.match[place] === null ? "failed" : columns.match[place] === 1 ? "✓ right" : columns.match[place] ? `scored ${number(columns.match[place])}` : "✗ wrong";
    return [oneLine(columns.title[place]), `${columns.system[place]} · ${columns.task[place]} · run ${columns.run[place] + 1} · ${right}`];
  };
  const browser = new Browser("answers", row, async (place) => {
    const one = await chunks.item(place);
    const others = await Promise.all(same(place).map(async (other) => [other, await chunks.item(other)]));
    const said = others.map(([other, its]) => [columns.system[other], columns.run[other] + 1, its.error ? `failed: ${its.error.what ?? its.error}` : oneLine(its.answer ?? "nothing").slice(0, 300), columns.match[other]]);
    const content = [el("h3", { text: "Question" }), written(one.question), pair("accepted", one.answers.join(" / ")), pair("answered", one.answer ?? "nothing")];
    content.push(el("p", { class: "note", text: `${columns.system[place]}: ${number(one.calls ?? 0)} calls, ${number(one.tokens ?? 0)} tokens, $${number(one.cost_usd ?? 0, 4)}, ${number(one.seconds ?? 0, 2)} s` }));
    if (one.whole && one.whole !== one.answer) content.push(el("h3", { text: "The whole reply" }), written(one.whole));
    content.push(el("h3", { text: "What each system said" }), table(["system", "run", "answer", "score"], said));
    return content;
  });
  const right = columns.match.map((value) => (value === null ? "failed" : value === 1 ? "right" : value ? "partly" : "wrong"));
  const apply = () => browser.show(columns.place.map((_, place) => place).filter((place) =>
    (!filters.system.control.value || columns.system[place] === filters.system.control.value)
    && (!filters.task.control.value || columns.task[place] === filters.task.control.value)
    && (!filters.answer.control.value || right[place] === filters.answer.control.value)));
  const filters = { system: filter("system", counted(columns.system), apply), task: filter("task of the evaluation", counted(columns.task), apply), answer: filter("judged", counted(right), apply) };
  node.append(el("div", { class: "filters" }, ...Object.values(filters).map((one) => one.wrapped)), browser.node);
  apply();
}

/** A table of cells that are texts already. */
function printed(rows) {
  const node = table(Object.keys(rows[0] ?? {}), rows.map(Object.values));
  node.classList.add("printed");
  return node;
}

const paired = (rows) => (rows.length ? [el("h3", { text: "Paired on the same questions" }), printed(rows)] : []);

/** Several runs: their curves in the same charts, a line for each. */
function showComparison(found) {
  const node = section("comparison", "Comparison", `Of ${found.folders.join(" and ")}.`);
  node.append(smoothingControl(), el("div", { class: "charts" }, ...found.panels.map((panel) => chart(panel, found.entries, found.dashes))));
  if (found.heldOut.length) node.append(el("h3", { text: "On held-out questions" }), table(["run", "", "exact match", "95 %: from", "to"], found.heldOut));
  node.append(...paired(found.differences));
}
