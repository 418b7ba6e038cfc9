// ProRefine: a list of queries, and each step of the chosen one as a diff of its prompt.

async function showRefinements({ columns, chunk: chunkSize }) {
  const section = addSection(
    "refinements",
    "Refined prompts",
    `${columns.title.length} queries. In each step the critic comments on an unfinished answer ` +
      "and the optimizer rewrites the prompt.",
  );
  const chunks = new ChunkedList("refinements", chunkSize);
  const browser = new ItemBrowser(
    "refined queries",
    (item) => describeRefinement(columns, item),
    async (item) => renderRefinement(columns, item, await chunks.loadItem(item)),
  );
  const filters = {
    ended: columns.stop,
    "prompt changed": columns.changed.map((count) => (count ? "yes" : "no")),
  };
  section.append(...renderFilteredBrowser(browser, filters));
}

/** The row of a query in the list. */
function describeRefinement(columns, item) {
  const facts = [toWords(columns.stop[item])];
  if (columns.verdict[item]) facts.push(`first answer judged ${columns.verdict[item]}`);
  facts.push(formatCount(columns.steps[item], "step"));
  facts.push(formatCount(columns.changed[item], "change"));
  return { title: toOneLine(columns.title[item]), details: [facts.join(" · ")] };
}

function renderRefinement(columns, item, refinement) {
  const content = [el("h3", { text: "Query" }), renderText(refinement.query)];
  if (refinement.error) {
    content.push(el("h3", { text: "Error" }), renderText(refinement.error));
  }
  content.push(el("h3", { text: "Answer" }), renderText(refinement.answer));
  if (refinement.first !== null) {
    const verdict = columns.verdict[item] ?? "by nobody";
    const summary = el("summary", { text: `The first answer, judged ${verdict}` });
    content.push(el("details", {}, summary, renderText(refinement.first)));
  }
  content.push(el("h3", { text: "The prompt, from first to last" }));
  content.push(renderDiff(refinement.diff));
  content.push(...refinement.steps.map(renderRefinementStep));
  return content;
}

function renderRefinementStep(step, index) {
  const node = el("div", {}, el("h3", { text: `Step ${index + 1}` }));
  if (step.output !== null) {
    const remark = step.complete ? "complete" : "cut off";
    node.append(renderMessage({ speaker: "task model", remark, text: step.output }));
  }
  if (step.feedback !== null) {
    const message = { speaker: "critic", remark: "", text: step.feedback, isReply: true };
    node.append(renderMessage(message));
  }
  if (step.diff) {
    node.append(el("div", { class: "card" }, renderDiff(step.diff)));
  } else {
    const problem = step.problem ? `: ${step.problem}` : "";
    node.append(renderNote(`The prompt was kept${problem}.`));
  }
  return node;
}
