// Parts of all charts: drawings that follow the width of the page, their axes and lines.

const CHART = { height: 232, right: 14, top: 12, bottom: 44 };

/**
 * An SVG that is drawn again when its width changes, so that its text has the same size at every
 * width. `draw(drawing, width)` fills it.
 */
function createDrawing(label, draw, properties = {}, height = CHART.height) {
  const drawing = svg("svg", { role: "img", "aria-label": label, ...properties });
  let width = 0;

  const redraw = () => {
    if (!width) return;
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.replaceChildren();
    draw(drawing, width);
  };

  const observer = new ResizeObserver(([{ contentRect }]) => {
    const newWidth = Math.round(contentRect.width);
    if (newWidth && newWidth !== width) {
      width = newWidth;
      redraw();
    }
  });
  observer.observe(drawing);
  drawing.addEventListener("redraw", redraw);
  return drawing;
}

/**
 * Draws axes into a drawing that is `width` pixels wide. Returns the scale: functions `x` and `y`
 * from values to pixels. `isLabelled` tells which values of the x axis may have a label.
 */
function drawAxes(
  drawing,
  { xValues, yValues, width, label = "training step", isLabelled = Number.isInteger },
) {
  const [low, high] = findAxisLimits(yValues);
  const yTicks = labelTicks(chooseTicks(low, high));
  const [first, last] = findRange(xValues);

  // The labels of the y axis need room on the left.
  const longestLabel = Math.max(...yTicks.map((tick) => tick.text.length));
  const left = 14 + 7 * longestLabel;
  const right = width - CHART.right;
  const bottom = CHART.height - CHART.bottom;

  const x = (value) => {
    const share = last === first ? 0.5 : (value - first) / (last - first);
    return left + share * (right - left);
  };
  const y = (value) => {
    const share = 1 - (value - low) / (high - low);
    return CHART.top + share * (bottom - CHART.top);
  };

  for (const { value, text } of yTicks) {
    const line = { class: "grid-line", x1: left, x2: right, y1: y(value), y2: y(value) };
    drawing.append(svg("line", line));
    drawing.append(svg("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end", text }));
  }

  const tickCount = Math.min(8, Math.round(width / 60));
  const xTicks = labelTicks(chooseTicks(first, last, tickCount).filter(isLabelled));
  let endOfLastLabel = -Infinity;
  for (const { value, text } of xTicks) {
    // A label that sticks out or touches the one before it is left out.
    const halfWidth = 4 * text.length;
    if (x(value) + halfWidth > width || x(value) - halfWidth < endOfLastLabel + 4) continue;
    endOfLastLabel = x(value) + halfWidth;
    drawing.append(svg("text", { x: x(value), y: bottom + 18, "text-anchor": "middle", text }));
  }

  const title = { x: (left + right) / 2, y: CHART.height - 8, "text-anchor": "middle" };
  drawing.append(svg("text", { ...title, text: label }));
  return { x, y };
}

/** The ends of a y axis: a little more than the values need. */
function findAxisLimits(values) {
  const [low, high] = findRange(values);

  // A constant is drawn from 0, so that one sees how large it is.
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= 1e-9 * size) {
    return size ? [Math.min(0, 2 * low), Math.max(0, 2 * high)] : [0, 1];
  }

  // Values that are never negative start at 0 at the lowest; shares end at 1 at the highest.
  const margin = (high - low) * 0.06;
  const isPositive = low >= 0;
  const isShare = isPositive && high <= 1;
  const bottom = isPositive && low - margin < 0 ? 0 : low - margin;
  const top = isShare && high + margin > 1 ? 1 : high + margin;
  return [bottom, top];
}

/** Round values from low to high, about `count` of them. */
function chooseTicks(low, high, count = 4) {
  if (low === high) return [low];
  const exactStep = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(exactStep));
  const roundSteps = [1, 2, 2.5, 5, 10].map((factor) => factor * power);
  const step = roundSteps.find((roundStep) => roundStep >= exactStep);

  const values = [];
  const firstMultiple = Math.ceil(low / step);
  for (let multiple = firstMultiple; multiple * step <= high + step / 1e6; multiple++) {
    values.push(Number((multiple * step).toPrecision(10)));
  }
  return values;
}

/** Each value with its text, which has as many digits as it takes to tell the values apart. */
function labelTicks(values) {
  let texts = [];
  for (let digits = 4; digits < 12; digits++) {
    texts = values.map((value) => formatTick(value, digits));
    if (new Set(texts).size === values.length) break;
  }
  return values.map((value, index) => ({ value, text: texts[index] }));
}

function formatTick(value, digits) {
  const size = Math.abs(value);
  const rounded = Number(value.toPrecision(digits));
  const isPlain = size === 0 || (size >= 1e-3 && size < 1e5);
  return isPlain ? String(rounded) : rounded.toExponential().replace("e+", "e");
}

/** Draws a line through points of data; a single point becomes a dot. */
function drawLine(drawing, scale, points, style) {
  const positions = points.map(([x, y]) => [scale.x(x), scale.y(y)]);
  drawing.append(svg("polyline", { ...style, points: positions.join(" ") }));
  if (positions.length === 1) {
    const [[cx, cy]] = positions;
    drawing.append(svg("circle", { ...style, cx, cy, r: 2.5 }));
  }
}

/**
 * The attributes of a chart's line. Its colour is in the style sheet, for light and dark;
 * `dashPatterns` has the dashes for each colour. If there are more lines, styles are repeated.
 */
function getLineStyle(index, dashPatterns) {
  const number = index % dashPatterns.length;
  const dashes = dashPatterns[number];
  return {
    class: `line line-${number}`,
    "stroke-dasharray": dashes[1] ? dashes.join(" ") : null,
  };
}

/** The names of lines, each with a sample; `lines` are pairs of label and attributes. */
function renderLegend(lines) {
  const items = lines.map(({ label, style }) => {
    const sample = svg("line", { ...style, x1: 0, x2: 26, y1: 5, y2: 5 });
    const picture = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, sample);
    return el("li", {}, picture, label);
  });
  return el("ul", { class: "legend" }, ...items);
}
