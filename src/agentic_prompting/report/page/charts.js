// Line charts over training steps, drawn as SVG. The pointer or the arrow keys read values off.

const FRAME = { height: 232, right: 14, top: 12, bottom: 44 };

/** A drawing that is made anew when its width changes, so that its text has the same size at every width. */
function drawing(label, draw, properties = {}, height = FRAME.height) {
  const node = svg("svg", { role: "img", "aria-label": label, ...properties });
  let width = 0;
  const again = () => {
    node.setAttribute("viewBox", `0 0 ${width} ${height}`);
    node.replaceChildren();
    draw(node, width);
  };
  new ResizeObserver(([{ contentRect }]) => {
    const now = Math.round(contentRect.width);
    if (now && now !== width) { width = now; again(); }
  }).observe(node);
  node.addEventListener("again", () => width && again());
  return node;
}

/** Round values that span low to high, about `count` of them. */
function ticks(low, high, count = 4) {
  if (low === high) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const values = [];
  for (let place = Math.ceil(low / step); place * step <= high + step / 1e6; place++) values.push(+(place * step).toPrecision(10));
  return values;
}

/** Axes of a drawing so many pixels wide, and how to get from data to places in it, with a little air above and below. */
function axes(node, xs, ys, width, label = "training step", shown = Number.isInteger) {
  const [low, high] = limits(ys);
  const rows = labelled(ticks(low, high));
  const left = 14 + 7 * Math.max(...rows.map(([, text]) => text.length));
  const [first, last] = minmax(xs);
  const right = width - FRAME.right, bottom = FRAME.height - FRAME.bottom;
  const x = (value) => left + (last === first ? 0.5 : (value - first) / (last - first)) * (right - left);
  const y = (value) => FRAME.top + (1 - (value - low) / (high - low)) * (bottom - FRAME.top);
  for (const [value, text] of rows) {
    node.append(svg("line", { class: "grid-line", x1: left, x2: right, y1: y(value), y2: y(value) }));
    node.append(svg("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end", text }));
  }
  let end = -Infinity; // of the label before
  for (const [value, text] of labelled(ticks(first, last, Math.min(8, Math.round(width / 60))).filter(shown))) {
    const half = 4 * text.length;
    if (x(value) + half > width || x(value) - half < end + 4) continue;
    end = x(value) + half;
    node.append(svg("text", { x: x(value), y: bottom + 18, "text-anchor": "middle", text }));
  }
  node.append(svg("text", { x: (left + right) / 2, y: FRAME.height - 8, "text-anchor": "middle", text: label }));
  return { x, y };
}

/** The ends of an axis: a little air around the values; a constant is drawn from 0, so that its size is seen. */
function limits(values) {
  const [low, high] = minmax(values);
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= 1e-9 * size) return size ? [Math.min(0, 2 * low), Math.max(0, 2 * high)] : [0, 1];
  const air = (high - low) * 0.06;
  const bottom = low >= 0 && low - air < 0 ? 0 : low - air;
  return [bottom, low >= 0 && high <= 1 && high + air > 1 ? 1 : high + air];
}

/** Each value with a text of as many digits as it takes to tell the values apart. */
function labelled(values) {
  for (let digits = 4; digits < 12; digits++) {
    const texts = values.map((value) => short(value, digits));
    if (new Set(texts).size === values.length || digits === 11) return values.map((value, place) => [value, texts[place]]);
  }
  return [];
}

/** A number of an axis. */
function short(value, digits = 4) {
  const size = Math.abs(value);
  const rounded = +value.toPrecision(digits);
  return size && (size < 1e-3 || size >= 1e5) ? rounded.toExponential().replace("e+", "e") : String(rounded);
}

const SMOOTHING = { of: 0 };

/** The running mean of W&B and TensorBoard, without their pull towards the first value. */
function smoothed(points) {
  let sum = 0, weight = 0;
  return points.map(([x, y]) => {
    [sum, weight] = [SMOOTHING.of * sum + y, SMOOTHING.of * weight + 1];
    return [x, sum / weight];
  });
}

/** For all charts of the page. */
function smoothingControl() {
  const change = (event) => {
    SMOOTHING.of = Number(event.target.value);
    for (const node of document.querySelectorAll(".charts svg[tabindex]")) node.dispatchEvent(new Event("again"));
  };
  const { wrapped } = filter("smoothing", null, change, { type: "range", min: 0, max: 0.95, step: 0.05, value: 0 });
  return el("div", { class: "filters" }, wrapped);
}

function drawLine(node, scale, points, line, faint = false) {
  const places = points.map(([x, y]) => [scale.x(x), scale.y(y)]);
  const style = faint ? { ...line, class: `${line.class} faint` } : line;
  node.append(svg("polyline", { ...style, points: places.join(" ") }));
  if (places.length === 1) node.append(svg("circle", { ...style, cx: places[0][0], cy: places[0][1], r: 2.5 }));
}

/** How the line of this place in a panel looks; its colour is the style sheet's, which knows light and dark. */
const lineStyle = (place, dashes) => ({ class: `line line-${place}`, "stroke-dasharray": dashes[1] ? dashes.join(" ") : null });

/** One panel as a figure; `onStep` is called with a step that was clicked on. */
function chart(panel, entries, dashes, onStep) {
  const series = Object.entries(panel.keys).map(([key, label], place) => ({
    key, label, line: lineStyle(place, dashes[place]), points: entries.filter((one) => one[key] !== undefined).map((one) => [one.step, one[key]]),
  })).filter((one) => one.points.length).filter((one, _, all) => one.points.some(([, y]) => y) || all.length < 3); // zeros are no news
  const all = series.flatMap((one) => one.points);
  const output = el("output", {});
  const said = series.map((one) => `${one.label} from ${number(one.points[0][1])} to ${number(one.points.at(-1)[1])}`);
  const reader = new Reader(entries, series, output, onStep);
  const node = drawing(`${panel.title}: ${said.join("; ")}`, (node, width) => {
    const scale = axes(node, all.map(([x]) => x), all.map(([, y]) => y), width);
    for (const one of series) {
      if (SMOOTHING.of) drawLine(node, scale, one.points, one.line, true);
      drawLine(node, scale, smoothed(one.points), one.line);
    }
    reader.drawn(node, scale);
  }, { tabindex: "0" });
  reader.listen(node);
  const figure = el("figure", {}, el("figcaption", {}, el("span", { text: panel.title }), output), node);
  if (Object.keys(panel.keys).length > 1) figure.append(legend(series));
  return figure;
}

function legend(series) {
  const sample = (line) => svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, svg("line", { ...line, x1: 0, x2: 26, y1: 5, y2: 5 }));
  return el("ul", { class: "legend" }, ...series.map(({ label, line }) => el("li", {}, sample(line), label)));
}

/** A hair line that follows pointer and arrow keys, and the values under it. */
class Reader {
  constructor(entries, series, output, onStep) {
    const read = entries.filter((entry) => series.some((one) => entry[one.key] !== undefined));
    Object.assign(this, { entries: read, series, output, onStep, place: -1 });
  }
  drawn(node, scale) {
    this.scale = scale;
    this.hair = svg("line", { class: "hair", y1: FRAME.top, y2: FRAME.height - FRAME.bottom, visibility: "hidden" });
    node.append(this.hair);
  }
  show(next) {
    this.place = Math.max(0, Math.min(this.entries.length - 1, next));
    const entry = this.entries[this.place];
    for (const end of ["x1", "x2"]) this.hair.setAttribute(end, this.scale.x(entry.step));
    this.hair.setAttribute("visibility", "visible");
    const few = this.series.length < 4; // of many, those that are not 0
    const known = this.series.filter((one) => entry[one.key] || (few && entry[one.key] === 0));
    const values = known.map((one) => (this.series.length > 1 ? `${one.label} ${number(entry[one.key])}` : number(entry[one.key])));
    this.output.textContent = `step ${entry.step}: ${values.join(", ") || "0"}`;
  }
  hide() {
    this.hair?.setAttribute("visibility", "hidden");
    this.output.textContent = "";
  }
  listen(node) {
    node.addEventListener("pointermove", (event) => {
      const x = event.clientX - node.getBoundingClientRect().left;
      const distances = this.entries.map((entry) => Math.abs(this.scale.x(entry.step) - x));
      this.show(distances.indexOf(Math.min(...distances)));
    });
    node.addEventListener("pointerleave", () => this.hide());
    node.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: this.place - 1, ArrowRight: this.place + 1, Home: 0, End: this.entries.length - 1 };
      if (event.key in moves) { this.show(moves[event.key]); event.preventDefault(); }
      if (event.key === "Enter") this.chosen();
    });
    node.addEventListener("click", () => this.chosen());
  }
  chosen() {
    if (this.place >= 0) this.onStep?.(this.entries[this.place].step);
  }
}

/** Score against dollars a question: a point with its interval for each system, and a line through those that no other beats in both. */
function showFront(points) {
  const node = section("front", "Score against dollars", "A question's mean, with 95 % intervals. The line joins what no other beats at its price.");
  const best = points.filter((one) => one.front);
  const said = points.map((one) => `${oneLine(one.name)}: ${number(one.mean)} for $${number(one.usd, 6)}`);
  const chart = drawing(said.join("; "), (node, width) => {
    const scale = axes(node, points.map((one) => one.usd), points.flatMap((one) => [one.low, one.high]), width, "US dollars a question", () => true);
    if (best.length > 1) drawLine(node, scale, best.map((one) => [one.usd, one.mean]), lineStyle(0, []));
    const labels = [];
    points.forEach((one, place) => {
      const [x, y] = [scale.x(one.usd), scale.y(one.mean)];
      const label = { x: x + (x > width / 2 ? -7 : 7), y: y - 6, "text-anchor": x > width / 2 ? "end" : "start" };
      while (labels.some((other) => Math.abs(other.x - label.x) < 18 && Math.abs(other.y - label.y) < 13)) label.y += 13;
      labels.push(label);
      node.append(svg("line", { class: "hair", x1: x, x2: x, y1: scale.y(one.low), y2: scale.y(one.high) }));
      node.append(svg("circle", { class: "line line-0", cx: x, cy: y, r: one.front ? 4 : 2 }), svg("text", { ...label, text: place + 1 }));
    });
  });
  const rows = points.map((one, place) => [place + 1, oneLine(one.name), number(one.usd, 6), number(one.mean), `${number(one.low)}–${number(one.high)}`, one.front ? "yes" : "no"]);
  node.append(el("figure", {}, chart), table(["", "system", "dollars a question", "score", "95 % interval", "on the front"], rows));
}
