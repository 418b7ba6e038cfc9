// An evaluation: its tables, its intervals as charts, and every answer beside those of the other
// systems.

async function showEvaluation(evaluation) {
  const section = addSection(
    "evaluation",
    "Evaluation",
    "Means with their 95 % intervals; failed answers are in no mean.",
  );

  // Charts and tables.
  const charts = evaluation.intervals.map(renderIntervals);
  section.append(el("div", { class: "charts" }, ...charts));
  section.append(renderPrintedTable(evaluation.results));
  section.append(...renderOptimisedPrompts(evaluation.prompts));
  if (evaluation.repeats.length) section.append(renderPrintedTable(evaluation.repeats));
  section.append(...renderDifferences(evaluation.differences));

  // The answers.
  const { columns } = evaluation;
  const answers = {
    columns,
    chunks: new ChunkedList("answers", evaluation.chunk),
    hasSeveralTasks: new Set(columns.task).size > 1,
    hasSeveralRuns: new Set(columns.run).size > 1,
  };
  const browser = new ItemBrowser(
    "answers",
    (item) => describeAnswer(answers, item),
    (item) => renderAnswer(answers, item),
  );
  const filters = {
    system: columns.system,
    "task of the evaluation": columns.task,
    judged: columns.match.map(judgeScore),
  };
  section.append(...renderFilteredBrowser(browser, filters));
}

/** The row of an answer in the list. */
function describeAnswer({ columns, hasSeveralTasks, hasSeveralRuns }, item) {
  const score = columns.match[item];
  const origin = [columns.system[item]];
  if (hasSeveralTasks) origin.push(columns.task[item]);
  if (hasSeveralRuns) origin.push(`run ${columns.run[item] + 1}`);
  return {
    title: toOneLine(columns.title[item]),
    details: [
      el("span", { class: score ? "good" : "bad", text: formatScore(score) }),
      ` · ${origin.join(" · ")}`,
    ],
  };
}

function formatScore(score) {
  if (score === null) return "failed";
  if (score === 1) return "✓ right";
  return score ? `scored ${formatNumber(score)}` : "✗ wrong";
}

function judgeScore(score) {
  if (score === null) return "failed";
  if (score === 1) return "right";
  return score ? "partly" : "wrong";
}

/** The nodes of an open answer. */
async function renderAnswer(answers, item) {
  const { columns, chunks } = answers;
  const answer = await chunks.loadItem(item);
  const content = [
    el("h3", { text: "Question" }),
    renderText(answer.question),
    renderField("accepted", answer.answers.join(" / ")),
    renderField("answered", answer.answer ?? "nothing"),
  ];

  const costs = [
    `${formatNumber(answer.calls ?? 0)} calls`,
    `${formatNumber(answer.tokens ?? 0)} tokens`,
    formatDollars(answer.cost_usd ?? 0),
    `${(answer.seconds ?? 0).toFixed(2)} s`,
  ];
  content.push(renderNote(`${columns.system[item]}: ${costs.join(", ")}`));

  if (answer.whole && answer.whole !== answer.answer) {
    content.push(el("h3", { text: "The whole reply" }), renderText(answer.whole));
  }
  if (answer.returned) {
    content.push(el("h3", { text: "What the program returned besides" }));
    content.push(renderText(answer.returned));
  }
  content.push(el("h3", { text: "What each system said" }));
  content.push(await renderAnswersOfAll(answers, item));
  return content;
}

/** The answers of all systems to the question of one answer. */
async function renderAnswersOfAll({ columns, chunks, hasSeveralRuns }, item) {
  const rows = [];
  for (let other = 0; other < columns.row.length; other++) {
    const isSameTask = columns.task[other] === columns.task[item];
    const isSameQuestion = isSameTask && columns.row[other] === columns.row[item];
    if (!isSameQuestion) continue;

    const answer = await chunks.loadItem(other);
    const run = hasSeveralRuns ? `, run ${columns.run[other] + 1}` : "";
    rows.push([columns.system[other] + run, summariseAnswer(answer), columns.match[other]]);
  }
  return renderTable(["system", "answer", "score"], rows);
}

function summariseAnswer({ answer, error }) {
  if (error) return `failed: ${error.what ?? error}`;
  return toOneLine(answer ?? "nothing").slice(0, 300);
}

/** The prompts that the optimisers of a table found. */
function renderOptimisedPrompts(prompts) {
  if (!prompts.length) return [];
  const foldedPrompts = prompts.map(([system, prompt]) => {
    const summary = el("summary", { text: toOneLine(system) });
    return el("details", {}, summary, prompt ? renderText(prompt) : renderNote("(empty)"));
  });
  return [el("h3", { text: "The optimised prompts" }), ...foldedPrompts];
}

/** The systems of a task below each other, each with its mean and interval. */
function renderIntervals({ task, metric, systems }) {
  const height = Math.max(CHART.height, CHART.top + 34 * systems.length + CHART.bottom);
  const bottom = height - CHART.bottom;

  const draw = (drawing, width) => {
    const x = (share) => 10 + share * (width - 20);
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const position = x(share);
      const line = { class: "grid-line", x1: position, x2: position, y1: CHART.top, y2: bottom };
      const label = { x: position, y: bottom + 18, "text-anchor": "middle", text: share };
      drawing.append(svg("line", line));
      drawing.append(svg("text", label));
    }
    const title = `mean ${toWords(metric)}, 95 % interval`;
    drawing.append(svg("text", { x: x(0.5), y: height - 8, "text-anchor": "middle", text: title }));

    const maxNameLength = Math.max(12, Math.floor((width - 80) / 7));
    const rowHeight = (bottom - CHART.top) / systems.length;
    systems.forEach(([name, mean, low, high], index) => {
      const y = CHART.top + (index + 0.7) * rowHeight;
      const shortName = toOneLine(name).slice(0, maxNameLength);
      const meanLabel = { x: x(1), y: y - 10, "text-anchor": "end", text: formatNumber(mean) };
      drawing.append(svg("text", { class: "outlined", x: x(0), y: y - 10, text: shortName }));
      drawing.append(svg("text", { class: "outlined", ...meanLabel }));
      drawing.append(svg("line", { class: "whisker", x1: x(low), x2: x(high), y1: y, y2: y }));
      drawing.append(svg("circle", { class: "point", cx: x(mean), cy: y, r: 5 }));
    });
  };

  const means = systems.map(([name, mean]) => `${name} ${formatNumber(mean)}`);
  const drawing = createDrawing(`${metric} of ${task}: ${means.join("; ")}`, draw, {}, height);
  return el("figure", {}, el("figcaption", {}, toOneLine(task)), drawing);
}

function renderDifferences(rows) {
  if (!rows.length) return [];
  return [el("h3", { text: "Paired on the same questions" }), renderPrintedTable(rows)];
}

/** A table as the command line prints it; columns of zeros are left out. */
function renderPrintedTable(rows) {
  const headings = Object.keys(rows[0] ?? {}).filter((name) => {
    return name === "answered" || rows.some((row) => Number(row[name]) !== 0);
  });
  const cells = rows.map((row) => headings.map((name) => row[name]));
  const table = renderTable(headings, cells);
  table.classList.add("printed");
  return table;
}
