// E-SPL's evolutionary tree (Figure 3): descent over time, ratings with their uncertainty, and the prompt that is chosen.

const TREE = { step: 44, lane: 44, left: 50, top: 34 };
// Cividis: the same order of brightness for every kind of colour vision.
const SHADES = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];

function showLineage(lineage, page) {
  const { nodes } = lineage;
  const window = `the latest ${lineage.window}`;
  const node = section("evolution", "Evolution of the system prompt",
    `${nodes.length} system prompts. Brighter is a higher rating μ; faded is outside of the window (${window}); the ring is the best by μ − 2σ. Choose one to read it.`);
  const detail = el("div", { class: "card", "aria-live": "polite" });
  const marks = new Map();
  const stories = lineage.chunk ? new Chunks("stories", lineage.chunk) : null;
  let chosen = -1;
  const choose = async (place) => {
    chosen = place;
    for (const [other, mark] of marks) mark.classList.toggle("chosen", other === place);
    detail.replaceChildren(...promptDetail(nodes, place, choose, page));
    const story = stories && await stories.item(place);
    if (story && chosen === place) detail.append(...storyDetail(story));
  };
  NAMED.prompt = (place) => { if (nodes[place]) { node.scrollIntoView(); return choose(place); } };
  const tree = el("div", { class: "tree", tabindex: "0", role: "group", "aria-label": "evolutionary tree" }, drawTree(nodes, marks, choose));
  node.append(tree, legend(["mutation", "crossover"].map((operator) => ({ label: operator, line: { class: `edge ${operator}` } }))));
  const measured = nodes.some((one) => one.heldOut);
  node.append(el("div", { class: "two" }, ratingsFigure(nodes, choose), measured ? heldOutFigure(nodes, choose) : null), detail);
  if (lineage.gain) node.append(el("p", { class: "note", text: `The best prompt against the first one on held-out questions: ${lineage.gain}.` }));
  if (lineage.refused.length) node.append(refusedTable(lineage.refused));
  const best = nodes.findIndex((one) => one.best);
  choose(best);
  const dot = marks.get(best).querySelector(".dot");
  tree.scrollTo(dot.getAttribute("cx") - tree.clientWidth / 2, dot.getAttribute("cy") - tree.clientHeight / 2);
}

function drawTree(nodes, marks, choose) {
  // One column per step at which somebody was born: steps without births take no room.
  const births = [...new Set(nodes.map((one) => one.born))].sort((a, b) => a - b);
  const column = new Map(births.map((born, place) => [born, place]));
  const at = (one) => [TREE.left + column.get(one.born) * TREE.step, TREE.top + one.lane * TREE.lane];
  const width = Math.max(320, TREE.left * 2 + (births.length - 1) * TREE.step);
  const height = TREE.top * 2 + Math.max(...nodes.map((one) => one.lane)) * TREE.lane;
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  drawing.append(svg("text", { x: 4, y: height - 6, text: "step" }));
  births.forEach((born, place) => {
    if (births.length < 30 || place % 5 === 0) drawing.append(svg("text", { x: TREE.left + place * TREE.step, y: height - 6, "text-anchor": "middle", text: born }));
  });
  for (const child of nodes) for (const parent of child.parents) drawing.append(edge(at(nodes[parent]), at(child), child.operator));
  const shade = shader(nodes);
  nodes.forEach((one, place) => {
    const mark = treeNode(one, place, at(one), shade(one.mu), choose);
    marks.set(place, mark);
    drawing.append(mark);
  });
  return drawing;
}

function edge([x1, y1], [x2, y2], operator) {
  const middle = Math.min(x1 + TREE.step / 2, (x1 + x2) / 2);
  return svg("path", { class: `edge ${operator}`, d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}` });
}

function treeNode(one, place, [x, y], colour, choose) {
  const label = `prompt ${place}, ${one.operator}, born at step ${one.born}, rating ${number(one.mu, 1)} plus or minus ${number(one.sigma, 1)}${one.best ? ", the best" : ""}`;
  return svg("g", {
    class: `node ${one.best ? "best" : ""} ${one.alive ? "" : "past"}`, tabindex: "0", role: "button", "aria-label": label,
    onclick: () => choose(place),
    onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(place); } },
  },
    svg("title", { text: label }), svg("circle", { class: "halo", cx: x, cy: y, r: 13, fill: "none" }),
    svg("circle", { class: "under", cx: x, cy: y, r: 9 }), svg("circle", { class: "dot", cx: x, cy: y, r: 9, fill: colour }), svg("text", { class: "over", x, y: y - 16, "text-anchor": "middle", text: place }));
}

function shader(nodes) {
  const [low, high] = minmax(nodes.map((one) => one.mu));
  return (mu) => SHADES[Math.round((high === low ? 0.5 : (mu - low) / (high - low)) * (SHADES.length - 1))];
}

/** Points with whiskers; `value` gives [x, y, lower end, upper end] of a prompt, or null to leave it out. */
function whiskers(title, nodes, value, label, choose) {
  const points = nodes.map((one, place) => [place, value(one, place)]).filter(([, point]) => point);
  const ys = points.flatMap(([, [, , low, high]]) => [low, high]);
  const node = drawing(title, (node, width) => {
    const scale = axes(node, points.map(([, [x]]) => x), ys, width, label);
    for (const [place, [x, y, low, high]] of points) {
      const at = { x1: scale.x(x), x2: scale.x(x) };
      node.append(svg("line", { class: "whisker", ...at, y1: scale.y(low), y2: scale.y(high) }));
      const dot = { cx: scale.x(x), cy: scale.y(y), r: nodes[place].best ? 5.5 : 4, class: `point ${nodes[place].best ? "best" : ""}` };
      node.append(svg("circle", { ...dot, onclick: () => choose(place) }, svg("title", { text: `prompt ${place}` })));
    }
  });
  return el("figure", {}, el("figcaption", {}, title), node);
}

const ratingsFigure = (nodes, choose) => whiskers("Rating μ ± σ of each prompt", nodes, (one, place) => [place, one.mu, one.mu - one.sigma, one.mu + one.sigma], "system prompt", choose);

const heldOutFigure = (nodes, choose) => whiskers("Mean reward on held-out problems, 95 %, against rating", nodes,
  (one) => one.heldOut && [one.mu, one.heldOut.mean, one.heldOut.low, one.heldOut.high], "rating μ", choose);

function promptDetail(nodes, place, choose, page) {
  const one = nodes[place];
  const go = (other) => el("button", { type: "button", text: `prompt ${other}`, onclick: () => choose(other) });
  const children = nodes.map((_, other) => other).filter((other) => nodes[other].parents.includes(place));
  const content = [
    el("h3", {}, `Prompt ${place}${one.best ? " · the best" : ""}`),
    el("p", { class: "note" }, `${one.operator} at step ${one.born} · rating μ ${number(one.mu, 2)}, σ ${number(one.sigma, 2)} after ${plural(one.matches, "comparison")} · ${one.alive ? "in the window" : "no longer selected"} · `, el("a", { href: `#prompt-${place}`, text: "link to this one" })),
    el("p", { class: "filters" }, "parents: ", ...(one.parents.length ? one.parents.map(go) : ["none"]), " children: ", ...(children.length ? children.map(go) : ["none"])),
  ];
  one.diffs.forEach((changes, number) => {
    const what = changes.every(([kind]) => kind === "=") ? "Nothing changed" : "What changed";
    content.push(el("h3", { text: `${what} from prompt ${one.parents[number]}` }), diffed(changes));
  });
  if (!one.diffs.length) content.push(el("h3", { text: "Text" }), one.text ? written(one.text) : el("p", { class: "note", text: "(empty)" }));
  else content.push(el("details", {}, el("summary", { text: "The whole text" }), written(one.text)));
  content.push(...evidence(nodes, place, page));
  return content;
}

/** What an operator did, as sentences. */
function operatorDid(operator, counts) {
  const { calls, failed_calls: failed, proposed, applied } = counts;
  const sentences = [];
  if (calls !== undefined) sentences.push(`The ${oneLine(operator)} took ${plural(calls, "call")} of the reference LLM${failed ? `, of which ${number(failed)} failed` : ""}.`);
  if (proposed !== undefined) sentences.push(`${plural(proposed, "edit")} ${proposed === 1 ? "was" : "were"} proposed for single problems.`);
  if (applied) sentences.push(`${plural(applied, "edit")} of the final plan ${applied === 1 ? "was" : "were"} applied.`);
  const refusals = Object.entries(counts).filter(([name, count]) => name.startsWith("refused/") && count);
  const reasons = refusals.map(([name, count]) => `${number(count)} (${oneLine(name.slice("refused/".length).replaceAll("_", " "))})`);
  if (reasons.length) sentences.push(`Edits refused: ${reasons.join(", ")}.`);
  const known = new Set(["calls", "failed_calls", "proposed", "applied"]);
  for (const [name, count] of Object.entries(counts)) {
    if (!known.has(name) && !name.startsWith("refused/")) sentences.push(`${oneLine(name.replaceAll("_", " "))}: ${number(count)}.`);
  }
  return sentences.join(" ");
}

/** What is known of why this prompt is as it is. */
function evidence(nodes, place, page) {
  const one = nodes[place];
  const content = [];
  if (Object.keys(one.counts ?? {}).length) content.push(el("h3", { text: `How the ${oneLine(one.operator)} was made` }), el("p", { text: operatorDid(one.operator, one.counts) }));
  content.push(...one.parents.filter((parent) => page.prompts.has(parent)).map((parent) => el("button", {
    type: "button", text: `Trajectories under prompt ${parent} before this one was born`, onclick: () => page.only({ prompt: String(parent), to: String(one.born - 1), order: "last" }),
  })));
  return content;
}
