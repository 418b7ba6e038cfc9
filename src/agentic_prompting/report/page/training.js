// The training of a run: figures of its result, and its curves.

const CURVE_HEADINGS = {
  train: "Over the training steps",
  eval: "Evaluation during training",
  optimisation: "Optimisation, from the trainer's log",
  evolution: "Over the steps of the evolution",
};

// Scores whose last value is shown above the curves.
const SCORE_NAMES = { exact_match: "exact match", reward: "reward" };

function showTraining(history, page) {
  const { run } = page;
  const trainEntries = history.modes.train ?? [];
  const note = run.rollouts
    ? `Means over the rollouts of each step, from the records in ${run.folder}/rollouts. ` +
      "Click on a step to read its trajectories."
    : `Means over the attempts of each step, from ${run.folder}.`;
  const section = addSection("training", run.rollouts ? "Training" : "Progress", note);

  // The result in figures.
  if (trainEntries.length || run.heldOut.length) section.append(renderTiles(run, trainEntries));
  if (run.gradient) section.append(renderGradientNote(run.gradient));
  // Two held-out results, before and after, are in the tiles already.
  if (run.heldOut.length > 2) section.append(...renderHeldOutTable(run.heldOut));

  // Curves of rollouts, of evaluations and of the trainer's log.
  section.append(renderSmoothingControl());
  const showStep = (step) => page.filterTrajectories({ from: String(step), to: String(step) });
  for (const [mode, entries] of Object.entries(history.modes)) {
    if (!entries.length) continue;
    // The log also has steps that train on the rollouts of an earlier step, without any of their
    // own: its curves open no trajectories.
    const onStep = mode === "train" || mode === "eval" ? showStep : undefined;
    const panels = history.panels.filter((panel) => hasValues(panel, entries));
    const charts = panels.map((panel) => renderLineChart(panel, entries, history.dashes, onStep));
    section.append(el("h3", { text: CURVE_HEADINGS[mode] }));
    section.append(el("div", { class: "charts" }, ...charts));
    section.append(renderValues(entries));
  }
}

function hasValues(panel, entries) {
  const keys = Object.keys(panel.keys);
  return entries.some((entry) => keys.some((key) => entry[key] !== undefined));
}

/** The most important figures of a run. */
function renderTiles(run, entries) {
  const firstEntry = entries[0] ?? {};
  const lastEntry = entries.at(-1) ?? {};
  const tiles = [];

  if (run.heldOut.length) {
    const [, before] = run.heldOut[0];
    const [, after, low, high] = run.heldOut.at(-1);
    const interval = `95 %: ${formatNumber(low)} to ${formatNumber(high)}`;
    tiles.push({
      name: "held-out exact match",
      value: formatNumber(after),
      remark: `${interval}; before ${formatNumber(before)}`,
    });
  }
  for (const [key, name] of Object.entries(SCORE_NAMES)) {
    if (lastEntry[key] === undefined) continue;
    tiles.push({
      name: `${name}, last step`,
      value: formatNumber(lastEntry[key]),
      remark: `first step ${formatNumber(firstEntry[key])}`,
    });
  }
  tiles.push({
    name: "training steps",
    value: formatNumber(entries.length),
    remark: `${formatCount(run.rollouts, "rollout")} in all`,
  });
  if (run.gradient) {
    const { groups, with_gradient: withGradient } = run.gradient;
    tiles.push({
      name: "groups with a gradient",
      value: `${Math.round((100 * withGradient) / groups)} %`,
      remark: `${formatNumber(withGradient)} of ${formatCount(groups, "group")}`,
    });
  }
  const spending = lastEntry["environment/cost_usd"];
  if (spending) tiles.push({ name: "spent on the large LLM", value: formatDollars(spending) });
  if (run.sandbox) {
    tiles.push({ name: "world", value: "sandbox", remark: "says nothing about real models" });
  }
  return el("dl", { class: "tiles" }, ...tiles.map(renderTile));
}

function renderTile({ name, value, remark }) {
  const small = remark ? el("small", { text: remark }) : null;
  return el("div", {}, el("dt", { text: name }), el("dd", { text: value }), small);
}

/** Why some groups train nothing. */
function renderGradientNote({ groups, with_gradient: withGradient, reasons }) {
  const flatGroups = groups - withGradient;
  if (!flatGroups) {
    return renderNote("Every group has a gradient: its rollouts have different rewards.");
  }
  const sorted = Object.entries(reasons).sort(([, count], [, otherCount]) => otherCount - count);
  const causes = sorted.map(([reason, count]) => `${formatNumber(count)} ${toOneLine(reason)}`);
  return renderNote(
    `${formatCount(flatGroups, "group")} without a gradient: equal rewards give advantages of 0, ` +
      `which train nothing. Of them ${causes.join(", ")}.`,
  );
}

/** Exact match of each policy under each prompt on held-out questions. */
function renderHeldOutTable(scores) {
  const rows = scores.map(([name, mean, low, high]) => {
    return [name, mean, `${formatNumber(low)}–${formatNumber(high)}`];
  });
  const table = renderTable(["", "exact match", "95 % interval"], rows);
  return [el("h3", { text: "On held-out questions" }), table];
}

/** The values of curves as a folded table: a long run has thousands of rows. */
function renderValues(entries) {
  const names = [...new Set(entries.flatMap(Object.keys))];
  return renderFoldedTable("The values as a table", names, () =>
    entries.map((entry) => names.map((name) => entry[name] ?? null)),
  );
}
