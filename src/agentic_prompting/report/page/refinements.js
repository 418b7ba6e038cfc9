// ProRefine: queries in a list, the steps of the chosen one as diffs of its prompt.

async function showRefinements(index) {
  const { columns } = index;
  const node = section("refinements", "Refined prompts", `${columns.title.length} queries. In each step the critic comments on an unfinished answer and the optimizer rewrites the prompt.`);
  const chunks = new Chunks("refinements", index.chunk);
  const browser = new Browser("refined queries", (place) => refinementRow(columns, place), async (place) => refinementDetail(columns, place, await chunks.item(place)));
  const changed = columns.changed.map((count) => (count ? "yes" : "no"));
  node.append(...listing(browser, { ended: columns.stop, "prompt changed": changed }));
}

function refinementRow(columns, place) {
  const verdict = columns.verdict[place] ? ` · first answer judged ${columns.verdict[place]}` : "";
  return [oneLine(columns.title[place]), `${columns.stop[place].replaceAll("_", " ")}${verdict} · ${plural(columns.steps[place], "step")} · ${plural(columns.changed[place], "change")}`];
}

function refinementDetail(columns, place, one) {
  const content = [el("h3", { text: "Query" }), written(one.query)];
  if (one.error) content.push(el("h3", { text: "Error" }), written(one.error));
  content.push(el("h3", { text: "Answer" }), written(one.answer));
  if (one.first !== null) content.push(el("details", {}, el("summary", { text: `The first answer, judged ${columns.verdict[place] ?? "by nobody"}` }), written(one.first)));
  content.push(el("h3", { text: "The prompt, from first to last" }), diffed(one.diff));
  one.steps.forEach((step, number) => content.push(refinementStep(step, number + 1)));
  return content;
}

function refinementStep(step, number) {
  const node = el("div", {}, el("h3", { text: `Step ${number}` }));
  if (step.output !== null) node.append(saying("task model", step.complete ? "complete" : "cut off", step.output, "said", false));
  if (step.feedback !== null) node.append(saying("critic", "", step.feedback, "said other", false));
  if (step.diff) node.append(el("div", { class: "card" }, diffed(step.diff)));
  else node.append(el("p", { class: "note", text: step.problem ? `The prompt was kept: ${step.problem}.` : "The prompt was kept." }));
  return node;
}
