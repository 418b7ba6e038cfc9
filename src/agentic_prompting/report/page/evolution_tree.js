// E-SPL's evolutionary tree (Figure 3): prompts from left to right by birth, brighter if better.

const TREE = { columnWidth: 44, laneHeight: 44, left: 50, top: 34 };

// Cividis: its order of brightness is the same for every kind of colour vision.
const RATING_COLOURS = [
  "#00224e",
  "#123570",
  "#3b496c",
  "#575d6d",
  "#707173",
  "#8a8678",
  "#a59c74",
  "#c3b369",
  "#e1cc55",
  "#fee838",
];

/**
 * Draws the tree. Returns the drawing, and by prompt its mark in the drawing and its position.
 */
function drawTree(nodes, choosePrompt) {
  // A column for each step at which a prompt was born: other steps take no room.
  const births = [...new Set(nodes.map((node) => node.born))].sort((a, b) => a - b);
  const columns = new Map(births.map((born, column) => [born, column]));
  const positions = nodes.map((node) => [
    TREE.left + columns.get(node.born) * TREE.columnWidth,
    TREE.top + node.lane * TREE.laneHeight,
  ]);

  const [, lastLane] = findRange(nodes.map((node) => node.lane));
  const width = Math.max(320, TREE.left * 2 + (births.length - 1) * TREE.columnWidth);
  const height = TREE.top * 2 + lastLane * TREE.laneHeight;
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });

  // The steps below; of many only each fifth.
  const labelInterval = births.length < 30 ? 1 : 5;
  drawing.append(svg("text", { x: 4, y: height - 6, text: "step" }));
  births.forEach((born, column) => {
    if (column % labelInterval !== 0) return;
    const x = TREE.left + column * TREE.columnWidth;
    drawing.append(svg("text", { x, y: height - 6, "text-anchor": "middle", text: born }));
  });

  // Edges come first, so that the prompts lie over them.
  nodes.forEach((node, id) => {
    for (const parent of node.parents) {
      drawing.append(drawEdge(positions[parent], positions[id], node.operator));
    }
  });

  const [lowest, highest] = findRange(nodes.map((node) => node.mu));
  const marks = nodes.map((node, id) => {
    const colour = chooseColour(node.mu, lowest, highest);
    return drawPrompt(node, id, positions[id], colour, choosePrompt);
  });
  for (const mark of marks) drawing.append(mark);
  return { drawing, marks, positions };
}

function chooseColour(mu, lowest, highest) {
  const share = highest === lowest ? 0.5 : (mu - lowest) / (highest - lowest);
  return RATING_COLOURS[Math.round(share * (RATING_COLOURS.length - 1))];
}

function drawEdge([x1, y1], [x2, y2], operator) {
  const middle = Math.min(x1 + TREE.columnWidth / 2, (x1 + x2) / 2);
  const curve = `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
  return svg("path", { class: `edge ${operator}`, d: curve });
}

function drawPrompt(node, id, [x, y], colour, choosePrompt) {
  const rating = `${formatNumber(node.mu, 1)} plus or minus ${formatNumber(node.sigma, 1)}`;
  const facts = [`prompt ${id}`, node.operator, `born at step ${node.born}`, `rating ${rating}`];
  if (node.best) facts.push("the best");
  const label = facts.join(", ");

  const properties = {
    class: joinClasses("node", node.best && "best", !node.alive && "outside-window"),
    tabindex: "0",
    role: "button",
    "aria-label": label,
    onclick: () => choosePrompt(id),
    onkeydown: (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choosePrompt(id);
    },
  };
  return svg(
    "g",
    properties,
    svg("title", { text: label }),
    svg("circle", { class: "halo", cx: x, cy: y, r: 13, fill: "none" }),
    svg("circle", { class: "base", cx: x, cy: y, r: 9 }),
    svg("circle", { class: "dot", cx: x, cy: y, r: 9, fill: colour }),
    svg("text", { class: "outlined", x, y: y - 16, "text-anchor": "middle", text: id }),
  );
}
