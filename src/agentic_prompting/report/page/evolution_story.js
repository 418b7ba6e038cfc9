// The story of a prompt: the edits that were proposed and the problems that its operator was
// shown; and the attempts that gave no prompt.

function renderStory({ operator, edits, evidence }) {
  const content = [];
  if (edits?.length) {
    content.push(el("h3", { text: "The edits that were proposed" }), ...edits.map(renderEdit));
  }
  if (evidence?.length) {
    content.push(el("h3", { text: `What the ${operator} was shown` }));
    content.push(...evidence.map(renderProblem));
  }
  return content;
}

function renderEdit(edit) {
  const source = edit.problem === null ? "final plan" : `from problem ${edit.problem + 1}`;
  const outcome = edit.refused ? `refused: ${toWords(edit.refused)}` : "applied";
  const heading = el(
    "div",
    { class: "speaker" },
    `${[edit.op, ...edit.ids].join(" ")} · ${source}`,
    el("span", { class: edit.refused ? "bad" : "good", text: outcome }),
  );

  const parts = [heading];
  if (edit.search) parts.push(renderNote("in place of"), renderText(edit.search));
  if (edit.text) parts.push(renderText(edit.text));
  if (edit.reason) parts.push(renderNote("because"), renderText(edit.reason));
  return el("div", { class: "message edit" }, ...parts);
}

function renderProblem(problem, index) {
  const scores = Object.entries(problem.scores).map(
    ([prompt, score]) => `prompt ${prompt}: ${formatNumber(score)}`,
  );
  let outcome = "no prompt did better than another";
  if (problem.won.length) {
    outcome = `best under ${problem.won.join(", ")}, worse under ${problem.lost.join(", ")}`;
  }

  const shortQuestion = toOneLine(problem.question).slice(0, 160);
  return el(
    "details",
    { class: "problem" },
    el("summary", { text: `${index + 1}. ${shortQuestion}` }),
    renderNote(`mean reward ${scores.join(", ") || "unknown"}: ${outcome}`),
    renderText(problem.question),
    renderNote("accepted answer"),
    renderText(problem.truth),
    ...problem.reflections.map(renderReflection),
  );
}

function renderReflection({ reward, text }) {
  return renderMessage({
    speaker: "what an attempt did",
    remark: `reward ${formatNumber(reward)}`,
    text,
    isReply: true,
  });
}

/** A folded table of the attempts without a child. */
function renderRefusedAttempts({ refused, refusedWithoutChange }) {
  const attempts = `${formatCount(refused.length, "attempt")} without a child`;
  const remark = refusedWithoutChange
    ? `, ${formatNumber(refusedWithoutChange)} of which proposed no change`
    : "";
  const headings = ["batch", "operator", "why", "parents"];
  return renderFoldedTable(attempts + remark, headings, () =>
    refused.map(({ batch, operator, reason, parents }) => [
      batch,
      operator,
      reason,
      parents.join(", "),
    ]),
  );
}
