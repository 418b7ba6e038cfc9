// What the page shows, in order: whatever the run has data blocks for.

/** A section is a block of data and the function that shows it; the second argument is what sections share. */
const SECTIONS = [
  ["comparison", showComparison], ["headroom", showHeadroom], ["front", showFront], ["history", showCurves], ["lineage", showLineage], ["refinements", showRefinements],
  ["evaluation", showEvaluation], ["trajectories", showTrajectories],
];

async function main() {
  const run = await unpack("run");
  byId("loading").remove();
  byId("run-name").textContent = oneLine(run.name);
  const found = await Promise.all(SECTIONS.map(([name]) => unpack(name)));
  // `only` sets filters of the trajectories; they come last, and then put their own in its place
  const page = { run, prompts: new Set(found.at(-1)?.columns.prompt), only: () => {} };
  for (const [place, [, show]] of SECTIONS.entries()) if (found[place]) await show(found[place], page);
  if (run.watch) watchRun();
  followSections();
  addEventListener("hashchange", openNamed);
  await openNamed();
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame); // the drawings know their width
  document.documentElement.dataset.ready = "yes";
}

/** The entry of the section in sight is marked in the navigation. */
function followSections() {
  const links = new Map([...byId("contents").children].map((link) => [link.hash.slice(1), link]));
  const mark = (seen) => {
    for (const { target, isIntersecting } of seen) {
      const link = links.get(target.id);
      link.toggleAttribute("data-here", isIntersecting);
      if (isIntersecting) link.parentNode.scrollLeft = link.offsetLeft - 30; // where the navigation is wider than the screen
    }
  };
  const observer = new IntersectionObserver(mark, { rootMargin: "-25% 0px -74% 0px" });
  for (const id of links.keys()) observer.observe(byId(id));
}

/** What `headroom` measured before the run, beside what the run brought. */
function showHeadroom({ rows, verdicts }) {
  const node = section("headroom", "Headroom", "Measured before the run, with 95 % intervals, beside what the run brought.");
  node.append(table(["", "headroom said", "the run brought"], rows.map((row) => [row.name, row.predicted, row.result])));
  node.append(el("ul", {}, ...verdicts.map(([part, sentence]) => el("li", { text: `${part}: ${oneLine(sentence)}` }))));
}

const HEADINGS = { train: "Over the training steps", eval: "Evaluation during training", optimisation: "Optimisation, from the trainer's log", evolution: "Over the steps of the evolution" };

function showCurves(history, page) {
  const { run } = page;
  const onStep = (step) => page.only({ from: String(step), to: String(step) });
  const trained = history.modes.train ?? [];
  const about = run.rollouts ? `Means over the rollouts of each step, from the records in ${run.folder}/rollouts. Click on a step to read its trajectories.` : `Means over the attempts of each step, from ${run.folder}.`;
  const node = section("training", run.rollouts ? "Training" : "Progress", about);
  if (trained.length || run.heldOut.length) node.append(tiles(run, trained));
  if (run.gradient) node.append(gradientNote(run.gradient));
  node.append(...(run.heldOut.length > 2 ? heldOut(run.heldOut) : []), smoothingControl());
  const panels = (entries) => history.panels.filter((panel) => entries.some((entry) => Object.keys(panel.keys).some((key) => entry[key] !== undefined)));
  for (const [mode, entries] of Object.entries(history.modes)) {
    if (!entries.length) continue;
    node.append(el("h3", { text: HEADINGS[mode] }));
    // The log counts a step when it is over, the records when it begins, so that a click would open the wrong one.
    const clicked = mode === "train" || mode === "eval" ? onStep : undefined;
    node.append(el("div", { class: "charts" }, ...panels(entries).map((panel) => chart(panel, entries, history.dashes, clicked))));
    node.append(values(entries));
  }
}

function tiles(run, entries) {
  const [first, last] = [entries[0] ?? {}, entries.at(-1) ?? {}];
  const shown = [];
  if (run.heldOut.length) {
    const [[, before], [, after, low, high]] = [run.heldOut[0], run.heldOut.at(-1)];
    shown.push(["held-out exact match", number(after), `95 %: ${number(low)} to ${number(high)}; before ${number(before)}`]);
  }
  for (const [key, name] of [["exact_match", "exact match"], ["reward", "reward"]]) {
    if (last[key] !== undefined) shown.push([`${name}, last step`, number(last[key]), `first step ${number(first[key])}`]);
  }
  shown.push(["training steps", number(entries.length), `${plural(run.rollouts, "rollout")} in all`]);
  if (run.gradient) shown.push(["groups with a gradient", `${Math.round(100 * run.gradient.with_gradient / run.gradient.groups)} %`, `${number(run.gradient.with_gradient)} of ${plural(run.gradient.groups, "group")}`]);
  if (last["environment/cost_usd"]) shown.push(["spent on the large LLM", dollars(last["environment/cost_usd"])]);
  if (run.sandbox) shown.push(["world", "sandbox", "says nothing about real models"]);
  const tile = ([name, value, small]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }), small ? el("small", { text: small }) : null);
  return el("dl", { class: "tiles" }, ...shown.map(tile));
}

/** Why some groups train nothing. */
function gradientNote({ groups, with_gradient, reasons }) {
  const flat = groups - with_gradient;
  if (!flat) return el("p", { class: "note", text: "Every group has a gradient: its rollouts have different rewards." });
  const causes = Object.entries(reasons).sort(([, one], [, other]) => other - one).map(([reason, count]) => `${number(count)} ${oneLine(reason)}`);
  return el("p", { class: "note", text: `${plural(flat, "group")} without a gradient: equal rewards give advantages of 0, which train nothing. Of them ${causes.join(", ")}.` });
}

/** Exact match of each policy under each prompt, where there is more to say than before and after. */
function heldOut(rows) {
  const shown = rows.map(([name, mean, low, high]) => [name, mean, `${number(low)}–${number(high)}`]);
  return [el("h3", { text: "On held-out questions" }), table(["", "exact match", "95 % interval"], shown)];
}

function values(entries) {
  const names = [...new Set(entries.flatMap(Object.keys))];
  const details = el("details", {}, el("summary", { text: "The values as a table" }));
  // Drawn when it is opened: a long run has thousands of rows.
  details.addEventListener("toggle", () => details.children.length < 2 && details.append(table(names, entries.map((entry) => names.map((name) => entry[name] ?? null)))));
  return details;
}

/** A page of a run that goes on loads itself again, unless somebody is using it. */
function watchRun() {
  let used = 0;
  for (const kind of ["pointerdown", "keydown", "wheel", "input"]) addEventListener(kind, () => { used = Date.now(); }, { passive: true });
  setInterval(() => { if (Date.now() - used > 60000) location.reload(); }, 10000);
}

main().catch((error) => {
  document.documentElement.dataset.ready = "failed";
  byId("main").append(el("p", { class: "bad", role: "alert", text: `This page could not be drawn: ${error}` }));
  throw error;
});
