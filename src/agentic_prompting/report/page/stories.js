// What led to a child prompt: the edits that were proposed, and the problems that its operator was shown.

function storyDetail(story) {
  const content = [];
  const edits = story.edits ?? [];
  if (edits.length) content.push(el("h3", { text: "The edits that were proposed" }), ...edits.map(proposedEdit));
  const problems = story.evidence ?? [];
  if (problems.length) content.push(el("h3", { text: `What the ${story.operator} was shown` }), ...problems.map(shownProblem));
  return content;
}

function proposedEdit(edit) {
  const source = edit.problem === null ? "final plan" : `from problem ${edit.problem + 1}`;
  const fate = edit.refused ? `refused: ${edit.refused.replaceAll("_", " ")}` : "applied";
  const parts = [el("div", { class: "who" }, `${[edit.op, ...edit.ids].join(" ")} · ${source}`, el("span", { class: edit.refused ? "bad" : "good", text: fate }))];
  if (edit.search) parts.push(el("p", { class: "note", text: "in place of" }), written(edit.search));
  if (edit.text) parts.push(written(edit.text));
  if (edit.reason) parts.push(el("p", { class: "note", text: "because" }), written(edit.reason));
  return el("div", { class: "said edit" }, ...parts);
}

function shownProblem(problem, place) {
  const scores = Object.entries(problem.scores).map(([prompt, value]) => `prompt ${prompt}: ${number(value)}`);
  const outcome = problem.won.length ? `best under ${prompts(problem.won)}, worse under ${prompts(problem.lost)}` : "no prompt did better than another";
  const reflections = problem.reflections.map(({ reward, text }) => el("div", { class: "said other" }, el("div", { class: "who" }, "what an attempt did", el("span", { text: `reward ${number(reward)}` })), written(text)));
  return el("details", { class: "problem" },
    el("summary", { text: `${place + 1}. ${oneLine(problem.question).slice(0, 160)}` }),
    el("p", { class: "note", text: `mean reward ${scores.join(", ") || "unknown"}: ${outcome}` }),
    written(problem.question), el("p", { class: "note", text: "accepted answer" }), written(problem.truth), ...reflections);
}

const prompts = (ids) => ids.join(", ");

function refusedTable(refused) {
  const words = { no_change: "no change proposed", call_failed: "no reply", unreadable: "not readable", unchanged: "same as its parent", known: "same as another prompt", copied: "repeats a question" };
  const why = (reason) => words[reason] ?? reason.replaceAll("_", " ");
  const rows = refused.map(([step, operator, reason, parents]) => [step, operator, why(reason), parents.join(", ")]);
  const idle = refused.filter(([, , reason]) => reason === "no_change").length;
  const summary = `${plural(refused.length, "attempt")} without a child${idle ? `, ${number(idle)} of which proposed no change` : ""}`;
  const details = el("details", {}, el("summary", { text: summary }));
  details.addEventListener("toggle", () => details.children.length < 2 && details.append(table(["batch", "operator", "why", "parents"], rows)));
  return details;
}
