// The evolution of a system prompt (E-SPL): its tree, the ratings, and the prompt that is chosen.

function showEvolution(lineage, page) {
  const { nodes } = lineage;
  const section = addSection(
    "evolution",
    "Evolution of the system prompt",
    `${nodes.length} system prompts. Brighter is a higher rating μ; faded is outside of the ` +
      `window (the latest ${lineage.window}); the ring is the best by μ − 2σ. ` +
      "Choose one to read it.",
  );
  const stories = lineage.chunk ? new ChunkedList("stories", lineage.chunk) : null;
  const detail = el("div", { class: "card", "aria-live": "polite" });
  const tree = drawTree(nodes, choosePrompt);

  let chosenId = -1;
  async function choosePrompt(id) {
    chosenId = id;
    tree.marks.forEach((mark, otherId) => mark.classList.toggle("chosen", otherId === id));
    detail.replaceChildren(...renderPrompt(nodes, id, choosePrompt, page));
    if (!stories) return;

    // Another prompt may be chosen while the story is unpacked.
    const story = await stories.loadItem(id);
    if (story && chosenId === id) detail.append(...renderStory(story));
  }

  // The tree with its legend.
  const scroller = el(
    "div",
    { class: "tree", tabindex: "0", role: "group", "aria-label": "evolutionary tree" },
    tree.drawing,
  );
  const operators = ["mutation", "crossover"].map((operator) => ({
    label: operator,
    style: { class: `edge ${operator}` },
  }));
  section.append(scroller, renderLegend(operators));

  // The ratings, and the prompt that is chosen.
  const isMeasured = nodes.some((node) => node.heldOut);
  const heldOutFigure = isMeasured ? renderHeldOutFigure(nodes, choosePrompt) : null;
  const figures = [renderRatingsFigure(nodes, choosePrompt), heldOutFigure];
  section.append(el("div", { class: "figure-pair" }, ...figures), detail);
  if (lineage.gain) {
    const gain = `The best prompt against the first one on held-out questions: ${lineage.gain}.`;
    section.append(renderNote(gain));
  }
  if (lineage.refused.length) section.append(renderRefusedAttempts(lineage));

  // The best prompt is chosen first, in the middle of the tree.
  const bestId = nodes.findIndex((node) => node.best);
  choosePrompt(bestId);
  const [x, y] = tree.positions[bestId];
  scroller.scrollTo(x - scroller.clientWidth / 2, y - scroller.clientHeight / 2);

  ITEM_OPENERS.set("prompt", (id) => {
    if (!nodes[id]) return undefined;
    section.scrollIntoView();
    return choosePrompt(id);
  });
}

function renderRatingsFigure(nodes, choosePrompt) {
  const points = nodes.map(({ mu, sigma }, id) => {
    return { id, x: id, y: mu, low: mu - sigma, high: mu + sigma };
  });
  const title = "Rating μ ± σ of each prompt";
  return renderPromptFigure(title, nodes, points, "system prompt", choosePrompt);
}

function renderHeldOutFigure(nodes, choosePrompt) {
  const points = [];
  nodes.forEach(({ mu, heldOut }, id) => {
    if (heldOut) points.push({ id, x: mu, y: heldOut.mean, low: heldOut.low, high: heldOut.high });
  });
  const title = "Mean reward on held-out problems, 95 %, against rating";
  return renderPromptFigure(title, nodes, points, "rating μ", choosePrompt);
}

/** A point with its interval for each prompt; a click on it chooses the prompt. */
function renderPromptFigure(title, nodes, points, xLabel, choosePrompt) {
  const xValues = points.map((point) => point.x);
  const yValues = points.flatMap((point) => [point.low, point.high]);

  const draw = (drawing, width) => {
    const scale = drawAxes(drawing, { xValues, yValues, width, label: xLabel });
    for (const { id, x, y, low, high } of points) {
      const isBest = nodes[id].best;
      const interval = {
        class: "whisker",
        x1: scale.x(x),
        x2: scale.x(x),
        y1: scale.y(low),
        y2: scale.y(high),
      };
      const dot = {
        cx: scale.x(x),
        cy: scale.y(y),
        r: isBest ? 5.5 : 4,
        class: joinClasses("point", isBest && "best"),
        onclick: () => choosePrompt(id),
      };
      drawing.append(svg("line", interval));
      drawing.append(svg("circle", dot, svg("title", { text: `prompt ${id}` })));
    }
  };
  return el("figure", {}, el("figcaption", {}, title), createDrawing(title, draw));
}

/** The nodes of the chosen prompt. */
function renderPrompt(nodes, id, choosePrompt, page) {
  const node = nodes[id];
  const content = [
    el("h3", {}, `Prompt ${id}${node.best ? " · the best" : ""}`),
    renderPromptFacts(node, id),
    renderRelatives(nodes, id, choosePrompt),
  ];

  // What it changed of each of its parents.
  node.diffs.forEach((changes, index) => {
    const isUnchanged = changes.every(([operation]) => operation === "=");
    const heading = isUnchanged ? "Nothing changed" : "What changed";
    content.push(el("h3", { text: `${heading} from prompt ${node.parents[index]}` }));
    content.push(renderDiff(changes));
  });

  // The text, which is folded if the changes tell most of it.
  if (node.diffs.length) {
    const summary = el("summary", { text: "The whole text" });
    content.push(el("details", {}, summary, renderText(node.text)));
  } else {
    const text = node.text ? renderText(node.text) : renderNote("(empty)");
    content.push(el("h3", { text: "Text" }), text);
  }

  // How it was made, and the trajectories that its operator has seen.
  if (Object.keys(node.counts ?? {}).length) {
    content.push(el("h3", { text: `How the ${toOneLine(node.operator)} was made` }));
    content.push(el("p", { text: describeOperator(node.operator, node.counts) }));
  }
  for (const parent of node.parents) {
    if (page.recordedPrompts.has(parent)) content.push(renderParentButton(node, parent, page));
  }
  return content;
}

function renderPromptFacts(node, id) {
  const rating = `rating μ ${formatNumber(node.mu, 2)}, σ ${formatNumber(node.sigma, 2)}`;
  const facts = [
    `${node.operator} at step ${node.born}`,
    `${rating} after ${formatCount(node.matches, "comparison")}`,
    node.alive ? "in the window" : "no longer selected",
  ];
  const link = el("a", { href: `#prompt-${id}`, text: "link to this one" });
  return el("p", { class: "note" }, `${facts.join(" · ")} · `, link);
}

/** Buttons that choose the parents and the children of a prompt. */
function renderRelatives(nodes, id, choosePrompt) {
  const renderButtons = (ids) => {
    if (!ids.length) return ["none"];
    return ids.map((otherId) =>
      el("button", {
        type: "button",
        text: `prompt ${otherId}`,
        onclick: () => choosePrompt(otherId),
      }),
    );
  };

  const { parents } = nodes[id];
  const children = [];
  nodes.forEach((node, otherId) => {
    if (node.parents.includes(id)) children.push(otherId);
  });
  return el(
    "p",
    { class: "filters" },
    "parents: ",
    ...renderButtons(parents),
    " children: ",
    ...renderButtons(children),
  );
}

/** A button that lists the trajectories of a parent from which a prompt was made. */
function renderParentButton(node, parent, page) {
  const filters = { prompt: String(parent), to: String(node.born), order: "last" };
  return el("button", {
    type: "button",
    text: `Trajectories under prompt ${parent} before this one was born`,
    onclick: () => page.filterTrajectories(filters),
  });
}

/** What an operator did, as sentences. */
function describeOperator(operator, counts) {
  const { calls, failed_calls: failedCalls, proposed, applied, ...otherCounts } = counts;
  const sentences = [];
  if (calls !== undefined) {
    const failures = failedCalls ? `, of which ${formatNumber(failedCalls)} failed` : "";
    const callCount = formatCount(calls, "call");
    sentences.push(`The ${toOneLine(operator)} took ${callCount} of the reference LLM${failures}.`);
  }
  if (proposed !== undefined) {
    const verb = proposed === 1 ? "was" : "were";
    sentences.push(`${formatCount(proposed, "edit")} ${verb} proposed for single problems.`);
  }
  if (applied) {
    const verb = applied === 1 ? "was" : "were";
    sentences.push(`${formatCount(applied, "edit")} of the final plan ${verb} applied.`);
  }

  // Refused edits by their reason, then counts that are not known here.
  const refusals = [];
  const remarks = [];
  for (const [name, count] of Object.entries(otherCounts)) {
    if (!name.startsWith("refused/")) {
      remarks.push(`${toOneLine(toWords(name))}: ${formatNumber(count)}.`);
    } else if (count) {
      const reason = toOneLine(toWords(name.slice("refused/".length)));
      refusals.push(`${formatNumber(count)} (${reason})`);
    }
  }
  if (refusals.length) sentences.push(`Edits refused: ${refusals.join(", ")}.`);
  sentences.push(...remarks);
  return sentences.join(" ");
}
