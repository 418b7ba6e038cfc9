// Curves over training steps. The pointer or the arrow keys read their values.

// The weight of earlier values in the running mean that is drawn; 0 for none.
let smoothing = 0;

/** A slider that smooths all curves of the page. */
function renderSmoothingControl() {
  const range = { type: "range", min: 0, max: 0.95, step: 0.05, value: 0 };
  const slider = createInput("smoothing", range, (event) => {
    smoothing = Number(event.target.value);
    for (const drawing of document.querySelectorAll(".charts svg[tabindex]")) {
      drawing.dispatchEvent(new Event("redraw"));
    }
  });
  return el("div", { class: "filters" }, slider.label);
}

/** The running mean of W&B and TensorBoard, but without a pull towards the first value. */
function smoothPoints(points) {
  let sum = 0;
  let weight = 0;
  return points.map(([x, y]) => {
    sum = smoothing * sum + y;
    weight = smoothing * weight + 1;
    return [x, sum / weight];
  });
}

/** A panel as a figure; `onStep` is called with a step that was clicked on. */
function renderLineChart(panel, entries, dashPatterns, onStep) {
  const series = collectSeries(panel, entries, dashPatterns);
  const points = series.flatMap((line) => line.points);
  const xValues = points.map(([x]) => x);
  const yValues = points.map(([, y]) => y);

  const output = el("output", {});
  const reader = new ChartReader(entries, series, output, onStep);

  const draw = (drawing, width) => {
    const scale = drawAxes(drawing, { xValues, yValues, width });
    for (const line of series) {
      if (smoothing) {
        const faintStyle = { ...line.style, class: `${line.style.class} faint` };
        drawLine(drawing, scale, line.points, faintStyle);
      }
      drawLine(drawing, scale, smoothPoints(line.points), line.style);
    }
    reader.addHairline(drawing, scale);
  };
  const label = `${panel.title}: ${series.map(describeSeries).join("; ")}`;
  const drawing = createDrawing(label, draw, { tabindex: "0" });
  reader.listenTo(drawing);

  const caption = el("figcaption", {}, el("span", { text: panel.title }), output);
  const figure = el("figure", {}, caption, drawing);
  if (Object.keys(panel.keys).length > 1) figure.append(renderLegend(series));
  return figure;
}

/** The lines of a panel: key, label, style and points of each that has values. */
function collectSeries(panel, entries, dashPatterns) {
  const series = [];
  Object.entries(panel.keys).forEach(([key, label], index) => {
    const entriesWithKey = entries.filter((entry) => entry[key] !== undefined);
    const points = entriesWithKey.map((entry) => [entry.step, entry[key]]);
    if (points.length) {
      series.push({ key, label, style: getLineStyle(index, dashPatterns), points });
    }
  });

  // Among several lines, one that is always 0 tells nothing.
  if (series.length < 3) return series;
  return series.filter((line) => line.points.some(([, y]) => y));
}

function describeSeries({ label, points }) {
  const first = points[0][1];
  const last = points.at(-1)[1];
  return `${label} from ${formatNumber(first)} to ${formatNumber(last)}`;
}

/** A hairline that follows the pointer and the arrow keys, and the values at it. */
class ChartReader {
  constructor(entries, series, output, onStep) {
    const hasValue = (entry) => series.some((line) => entry[line.key] !== undefined);
    this.entries = entries.filter(hasValue);
    this.series = series;
    this.output = output;
    this.onStep = onStep;
    this.index = -1; // of the entry at the hairline
  }

  listenTo(drawing) {
    drawing.addEventListener("pointermove", (event) => {
      const x = event.clientX - drawing.getBoundingClientRect().left;
      this.show(this.findNearest(x));
    });
    drawing.addEventListener("pointerleave", () => this.hide());
    drawing.addEventListener("keydown", (event) => this.handleKey(event));
    drawing.addEventListener("click", () => this.selectStep());
  }

  handleKey(event) {
    const targets = {
      ArrowLeft: this.index - 1,
      ArrowRight: this.index + 1,
      Home: 0,
      End: this.entries.length - 1,
    };
    if (event.key in targets) {
      this.show(targets[event.key]);
      event.preventDefault();
    }
    if (event.key === "Enter") this.selectStep();
  }

  /** Adds the hairline to a chart that has just been drawn, hidden at first. */
  addHairline(drawing, scale) {
    this.scale = scale;
    this.hairline = svg("line", {
      class: "hairline",
      y1: CHART.top,
      y2: CHART.height - CHART.bottom,
      visibility: "hidden",
    });
    drawing.append(this.hairline);
  }

  /** The index of the entry that is drawn nearest to a horizontal position. */
  findNearest(x) {
    let nearest = 0;
    let smallestDistance = Infinity;
    this.entries.forEach((entry, index) => {
      const distance = Math.abs(this.scale.x(entry.step) - x);
      if (distance < smallestDistance) {
        smallestDistance = distance;
        nearest = index;
      }
    });
    return nearest;
  }

  /** Moves the hairline to an entry, or to the nearest end, and writes the values there. */
  show(index) {
    this.index = Math.max(0, Math.min(this.entries.length - 1, index));
    const entry = this.entries[this.index];

    const x = this.scale.x(entry.step);
    this.hairline.setAttribute("x1", x);
    this.hairline.setAttribute("x2", x);
    this.hairline.setAttribute("visibility", "visible");

    // Of many lines only those that are not 0 are named.
    const showsZeros = this.series.length < 4;
    const shown = this.series.filter(({ key }) => entry[key] || (showsZeros && entry[key] === 0));
    const values = shown.map(({ key, label }) => {
      const value = formatNumber(entry[key]);
      return this.series.length > 1 ? `${label} ${value}` : value;
    });
    this.output.textContent = `step ${entry.step}: ${values.join(", ") || "0"}`;
  }

  hide() {
    this.hairline?.setAttribute("visibility", "hidden");
    this.output.textContent = "";
  }

  selectStep() {
    if (this.index >= 0) this.onStep?.(this.entries[this.index].step);
  }
}
