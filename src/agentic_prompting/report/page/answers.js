// An evaluation: its tables as they are printed, paired tests, and every answer beside what the others said.

async function showEvaluation(found) {
  const node = section("evaluation", "Evaluation", "Means with their 95 % intervals; failed answers are in no mean.");
  node.append(el("div", { class: "charts" }, ...found.intervals.map(intervals)), printed(found.results), ...optimisedPrompts(found.prompts), ...(found.repeats.length ? [printed(found.repeats)] : []), ...paired(found.differences));
  const { columns } = found;
  const [tasks, runs] = [new Set(columns.task).size, new Set(columns.run).size];
  const chunks = new Chunks("answers", found.chunk);
  const same = (place) => columns.place.map((_, other) => other).filter((other) => columns.task[other] === columns.task[place] && columns.place[other] === columns.place[place]);
  const row = (place) => {
    const score = columns.match[place];
    const right = score === null ? "failed" : score === 1 ? "✓ right" : score ? `scored ${number(score)}` : "✗ wrong";
    const where = [columns.system[place], ...(tasks > 1 ? [columns.task[place]] : []), ...(runs > 1 ? [`run ${columns.run[place] + 1}`] : [])];
    return [oneLine(columns.title[place]), [el("span", { class: score ? "good" : "bad", text: right }), ` · ${where.join(" · ")}`]];
  };
  const browser = new Browser("answers", row, async (place) => {
    const one = await chunks.item(place);
    const others = await Promise.all(same(place).map(async (other) => [other, await chunks.item(other)]));
    const said = others.map(([other, its]) => [columns.system[other] + (runs > 1 ? `, run ${columns.run[other] + 1}` : ""), its.error ? `failed: ${its.error.what ?? its.error}` : oneLine(its.answer ?? "nothing").slice(0, 300), columns.match[other]]);
    const content = [el("h3", { text: "Question" }), written(one.question), pair("accepted", one.answers.join(" / ")), pair("answered", one.answer ?? "nothing")];
    content.push(el("p", { class: "note", text: `${columns.system[place]}: ${number(one.calls ?? 0)} calls, ${number(one.tokens ?? 0)} tokens, ${dollars(one.cost_usd ?? 0)}, ${(one.seconds ?? 0).toFixed(2)} s` }));
    if (one.whole && one.whole !== one.answer) content.push(el("h3", { text: "The whole reply" }), written(one.whole));
    if (one.returned) content.push(el("h3", { text: "What the program returned besides" }), written(one.returned));
    content.push(el("h3", { text: "What each system said" }), table(["system", "answer", "score"], said));
    return content;
  });
  const judged = columns.match.map((value) => (value === null ? "failed" : value === 1 ? "right" : value ? "partly" : "wrong"));
  node.append(...listing(browser, { system: columns.system, "task of the evaluation": columns.task, judged }));
}

/** The prompt that each optimiser of the table found. */
function optimisedPrompts(prompts) {
  if (!prompts.length) return [];
  const cards = prompts.map(([system, prompt]) => el("details", {}, el("summary", { text: oneLine(system) }), prompt ? written(prompt) : el("p", { class: "note", text: "(empty)" })));
  return [el("h3", { text: "The optimised prompts" }), ...cards];
}

/** The systems of a task below each other, each with its interval. */
function intervals({ task, metric, systems }) {
  const said = systems.map(([name, mean]) => `${name} ${number(mean)}`).join("; ");
  const height = Math.max(FRAME.height, FRAME.top + 34 * systems.length + FRAME.bottom);
  const node = drawing(`${metric} of ${task}: ${said}`, (node, width) => {
    const bottom = height - FRAME.bottom;
    const x = (value) => 10 + value * (width - 20);
    for (const value of [0, 0.25, 0.5, 0.75, 1]) {
      node.append(svg("line", { class: "grid-line", x1: x(value), x2: x(value), y1: FRAME.top, y2: bottom }));
      node.append(svg("text", { x: x(value), y: bottom + 18, "text-anchor": "middle", text: value }));
    }
    node.append(svg("text", { x: x(0.5), y: height - 8, "text-anchor": "middle", text: `mean ${metric.replaceAll("_", " ")}, 95 % interval` }));
    systems.forEach(([name, mean, low, high], place) => {
      const y = FRAME.top + (place + 0.7) * ((bottom - FRAME.top) / systems.length);
      node.append(svg("text", { class: "over", x: x(0), y: y - 10, text: oneLine(name).slice(0, Math.max(12, Math.floor((width - 80) / 7))) }));
      node.append(svg("text", { class: "over", x: x(1), y: y - 10, "text-anchor": "end", text: number(mean) }));
      node.append(svg("line", { class: "whisker", x1: x(low), x2: x(high), y1: y, y2: y }), svg("circle", { class: "point", cx: x(mean), cy: y, r: 5 }));
    });
  }, {}, height);
  return el("figure", {}, el("figcaption", {}, oneLine(task)), node);
}

/** A table of cells that are texts already; columns of zeros are left out. */
function printed(rows) {
  const names = Object.keys(rows[0] ?? {}).filter((name) => name === "answered" || rows.some((row) => Number(row[name]) !== 0));
  const node = table(names, rows.map((row) => names.map((name) => row[name])));
  node.classList.add("printed");
  return node;
}

const paired = (rows) => (rows.length ? [el("h3", { text: "Paired on the same questions" }), printed(rows)] : []);

/** Several runs: their curves in the same charts, a line for each. */
function showComparison(found) {
  const node = section("comparison", "Comparison", `Of ${found.folders.join(" and ")}.`);
  if (found.intervals.length) node.append(el("div", { class: "charts" }, ...found.intervals.map(intervals)));
  if (found.heldOut.length) node.append(el("h3", { text: "On held-out questions" }), table(["run", "", "exact match", "95 %: from", "to"], found.heldOut));
  node.append(...paired(found.differences));
  if (found.panels.length) node.append(el("h3", { text: "Curves" }), smoothingControl(), el("div", { class: "charts" }, ...found.panels.map((panel) => chart(panel, found.entries, found.dashes))));
}
