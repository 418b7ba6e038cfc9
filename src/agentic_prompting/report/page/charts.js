// Line charts over training steps, drawn as SVG. The pointer or the arrow keys read values off.

const FRAME = { width: 460, height: 220, left: 46, right: 12, top: 10, bottom: 30 };

/** Round values that span low to high, about `count` of them. */
function ticks(low, high, count = 4) {
  if (low === high) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) values.push(+value.toFixed(10));
  return values;
}

/** From data to places in the frame, with a little air above and below. */
function scales(xs, ys, frame = FRAME) {
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  [low, high] = [low >= 0 && low - air < 0 ? 0 : low - air, high <= 1 && high + air > 1 && low >= 0 ? 1 : high + air];
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const wide = frame.width - frame.left - frame.right;
  const tall = frame.height - frame.top - frame.bottom;
  return {
    low, high, first, last,
    x: (value) => frame.left + (last === first ? 0.5 : (value - first) / (last - first)) * wide,
    y: (value) => frame.top + (1 - (value - low) / (high - low)) * tall,
  };
}

function axes(drawing, scale, frame = FRAME, label = "training step", shown = Number.isInteger) {
  for (const value of ticks(scale.low, scale.high)) {
    const y = scale.y(value);
    drawing.append(svg("line", { class: "grid-line", x1: frame.left, x2: frame.width - frame.right, y1: y, y2: y }));
    drawing.append(svg("text", { x: frame.left - 6, y: y + 4, "text-anchor": "end", text: +value.toPrecision(4) }));
  }
  for (const value of ticks(scale.first, scale.last).filter(shown)) {
    drawing.append(svg("text", { x: scale.x(value), y: frame.height - 14, "text-anchor": "middle", text: value }));
  }
  drawing.append(svg("text", { x: frame.width - frame.right, y: frame.height - 2, "text-anchor": "end", text: label }));
}

function drawSeries(drawing, scale, { points, line }) {
  drawing.append(svg("polyline", { ...line, points: points.map(([x, y]) => `${scale.x(x)},${scale.y(y)}`).join(" ") }));
  if (points.length === 1) drawing.append(svg("circle", { ...line, cx: scale.x(points[0][0]), cy: scale.y(points[0][1]), r: 2 }));
}

/** How the line of this place in a panel looks; its colour is the style sheet's, which knows light and dark. */
const lineStyle = (place, dashes) => ({ class: `line line-${place}`, "stroke-dasharray": dashes[1] ? dashes.join(" ") : null });

/** One panel as a figure; `onStep` is called with a step that was clicked on. */
function chart(panel, entries, dashes, onStep) {
  const series = Object.entries(panel.keys).map(([key, label], place) => ({
    key, label, line: lineStyle(place, dashes[place]), points: entries.filter((one) => one[key] !== undefined).map((one) => [one.step, one[key]]),
  })).filter((one) => one.points.length);
  const all = series.flatMap((one) => one.points);
  const scale = scales(all.map(([x]) => x), all.map(([, y]) => y));
  const read = el("output", {});
  const said = series.map((one) => `${one.label} from ${number(one.points[0][1])} to ${number(one.points.at(-1)[1])}`);
  const drawing = svg("svg", {
    viewBox: `0 0 ${FRAME.width} ${FRAME.height}`, role: "img", tabindex: "0", "aria-label": `${panel.title}: ${said.join("; ")}`,
  });
  axes(drawing, scale);
  for (const one of series) drawSeries(drawing, scale, one);
  addReader(drawing, scale, entries, series, read, onStep);
  const figure = el("figure", {}, el("figcaption", {}, el("span", { text: panel.title }), read), drawing);
  if (series.length > 1) figure.append(legend(series));
  return figure;
}

function legend(series) {
  const sample = (line) => svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, svg("line", { ...line, x1: 0, x2: 26, y1: 5, y2: 5 }));
  return el("ul", { class: "legend" }, ...series.map(({ label, line }) => el("li", {}, sample(line), label)));
}

/** A hair line that follows pointer and arrow keys, and the values under it. */
function addReader(drawing, scale, entries, series, read, onStep) {
  const hair = svg("line", { class: "hair", y1: FRAME.top, y2: FRAME.height - FRAME.bottom, visibility: "hidden" });
  drawing.append(hair);
  let place = -1;
  const show = (next) => {
    place = Math.max(0, Math.min(entries.length - 1, next));
    const entry = entries[place];
    const x = scale.x(entry.step);
    for (const end of ["x1", "x2"]) hair.setAttribute(end, x);
    hair.setAttribute("visibility", "visible");
    const values = series.filter((one) => entry[one.key]).map((one) => (series.length > 1 ? `${one.label} ${number(entry[one.key], 2)}` : number(entry[one.key])));
    read.textContent = `step ${entry.step}: ${values.join(", ") || "0"}`;
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * FRAME.width;
    const distances = entries.map((entry) => Math.abs(scale.x(entry.step) - x));
    show(distances.indexOf(Math.min(...distances)));
  });
  drawing.addEventListener("pointerleave", () => {
    hair.setAttribute("visibility", "hidden");
    read.textContent = "";
  });
  drawing.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: entries.length - 1 };
    if (event.key in moves) { show(moves[event.key]); event.preventDefault(); }
    if (event.key === "Enter" && place >= 0) onStep?.(entries[place].step);
  });
  drawing.addEventListener("click", () => place >= 0 && onStep?.(entries[place].step));
}

/** Score against dollars a question: a point with its interval for each system, and a line through those that no other beats in both. */
function showFront(points) {
  const node = section("front", "Score against dollars", "A question's mean, with 95 % intervals. The line joins what no other beats at its price.");
  const scale = scales(points.map((one) => one.usd), points.flatMap((one) => [one.low, one.high]));
  const best = points.filter((one) => one.front);
  const drawing = svg("svg", {
    viewBox: `0 0 ${FRAME.width} ${FRAME.height}`, role: "img", "aria-label": points.map((one) => `${oneLine(one.name)}: ${number(one.mean)} for $${number(one.usd, 6)}`).join("; "),
  });
  axes(drawing, scale, FRAME, "US dollars a question", () => true);
  if (best.length > 1) drawSeries(drawing, scale, { points: best.map((one) => [one.usd, one.mean]), line: lineStyle(0, []) });
  points.forEach((one, place) => {
    const [x, y] = [scale.x(one.usd), scale.y(one.mean)];
    const label = { x: x + (x > FRAME.width / 2 ? -7 : 7), y: y - 6, "text-anchor": x > FRAME.width / 2 ? "end" : "start" };
    drawing.append(svg("line", { class: "hair", x1: x, x2: x, y1: scale.y(one.low), y2: scale.y(one.high) }));
    drawing.append(svg("circle", { class: "line line-0", cx: x, cy: y, r: one.front ? 4 : 2 }), svg("text", { ...label, text: place + 1 }));
  });
  const rows = points.map((one, place) => [place + 1, oneLine(one.name), number(one.usd, 6), number(one.mean), `${number(one.low)}–${number(one.high)}`, one.front ? "yes" : "no"]);
  node.append(el("figure", {}, drawing), table(["", "system", "dollars a question", "score", "95 % interval", "on the front"], rows));
}
