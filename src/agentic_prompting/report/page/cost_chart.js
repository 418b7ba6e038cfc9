// Scores against dollars: a point for each system, or for each run.

function showCostChart(points) {
  const section = addSection(
    "front",
    "Score against dollars",
    "A question's mean, with 95 % intervals. The line joins what no other beats at its price.",
  );
  const descriptions = points.map(
    (point) =>
      `${toOneLine(point.name)}: ${formatNumber(point.mean)} for $${formatNumber(point.usd, 6)}`,
  );
  const draw = (drawing, width) => drawCostPoints(drawing, points, width);
  const figure = el("figure", {}, createDrawing(descriptions.join("; "), draw));

  const headings = ["", "system", "dollars a question", "score", "95 % interval", "on the front"];
  const rows = points.map((point, index) => [
    index + 1,
    toOneLine(point.name),
    formatNumber(point.usd, 6),
    formatNumber(point.mean),
    `${formatNumber(point.low)}–${formatNumber(point.high)}`,
    point.front ? "yes" : "no",
  ]);
  section.append(figure, renderTable(headings, rows));
}

function drawCostPoints(drawing, points, width) {
  const scale = drawAxes(drawing, {
    xValues: points.map((point) => point.usd),
    yValues: points.flatMap((point) => [point.low, point.high]),
    width,
    label: "US dollars a question",
    isLabelled: () => true,
  });

  // The front joins the points that no other one beats in both score and dollars.
  const front = points.filter((point) => point.front);
  if (front.length > 1) {
    const frontPoints = front.map((point) => [point.usd, point.mean]);
    drawLine(drawing, scale, frontPoints, { class: "line line-0" });
  }

  // Each point has its interval and its number in the table.
  const labels = [];
  points.forEach((point, index) => {
    const x = scale.x(point.usd);
    const y = scale.y(point.mean);
    const label = placeLabel(x, y, width, labels);
    labels.push(label);
    const interval = {
      class: "hairline",
      x1: x,
      x2: x,
      y1: scale.y(point.low),
      y2: scale.y(point.high),
    };
    const dot = { class: "line line-0", cx: x, cy: y, r: point.front ? 4 : 2 };
    drawing.append(svg("line", interval));
    drawing.append(svg("circle", dot), svg("text", { ...label, text: index + 1 }));
  });
}

/** Where the label of a point goes: beside it, towards the middle, below labels it would hide. */
function placeLabel(x, y, width, otherLabels) {
  const isRight = x > width / 2;
  const label = {
    x: x + (isRight ? -7 : 7),
    y: y - 6,
    "text-anchor": isRight ? "end" : "start",
  };
  const isTaken = () =>
    otherLabels.some(
      (other) => Math.abs(other.x - label.x) < 18 && Math.abs(other.y - label.y) < 13,
    );
  while (isTaken()) label.y += 13;
  return label;
}
