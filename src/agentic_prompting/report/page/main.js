// Draws the page: a section for each kind of data that the run has.

// Each section's block of data and the function that shows it, in the order of the page.
const SECTIONS = [
  { block: "comparison", show: showComparison },
  { block: "headroom", show: showHeadroom },
  { block: "front", show: showCostChart },
  { block: "history", show: showTraining },
  { block: "lineage", show: showEvolution },
  { block: "refinements", show: showRefinements },
  { block: "evaluation", show: showEvaluation },
  { block: "trajectories", show: showTrajectories },
];

const WATCH_INTERVAL = 10_000; // milliseconds between two reloads
const IDLE_TIME = 60_000; // milliseconds after which a page counts as unused

async function main() {
  const run = await unpack("run");
  byId("loading").remove();
  byId("run-name").textContent = toOneLine(run.name);
  const blocks = new Map();
  for (const { block, data } of await Promise.all(SECTIONS.map(unpackSection))) {
    blocks.set(block, data);
  }

  // What sections share: the trajectories replace the function that filters them with their own.
  const page = {
    run,
    recordedPrompts: new Set(blocks.get("trajectories")?.columns.prompt),
    filterTrajectories: () => {},
  };
  for (const { block, show } of SECTIONS) {
    const data = blocks.get(block);
    if (data) await show(data, page);
  }

  if (run.watch) reloadWhileIdle();
  followSections();
  addEventListener("hashchange", openAddressedItem);
  await openAddressedItem();

  // After two frames the drawings know their width.
  for (let frame = 0; frame < 2; frame++) {
    await new Promise(requestAnimationFrame);
  }
  document.documentElement.dataset.ready = "yes";
}

async function unpackSection({ block }) {
  return { block, data: await unpack(block) };
}

/** Marks the section in sight in the navigation. */
function followSections() {
  const links = new Map();
  for (const link of byId("contents").children) {
    links.set(link.hash.slice(1), link);
  }

  const markLinks = (entries) => {
    for (const { target, isIntersecting } of entries) {
      const link = links.get(target.id);
      link.toggleAttribute("data-here", isIntersecting);
      // The navigation may be wider than the screen.
      if (isIntersecting) link.parentNode.scrollLeft = link.offsetLeft - 30;
    }
  };
  // A section is in sight if it covers the line a quarter below the top.
  const observer = new IntersectionObserver(markLinks, { rootMargin: "-25% 0px -74% 0px" });
  for (const id of links.keys()) {
    observer.observe(byId(id));
  }
}

/** Loads the page of a run that goes on again, unless somebody is using it. */
function reloadWhileIdle() {
  let lastUse = 0;
  const noteUse = () => {
    lastUse = Date.now();
  };
  for (const type of ["pointerdown", "keydown", "wheel", "input"]) {
    addEventListener(type, noteUse, { passive: true });
  }
  setInterval(() => {
    if (Date.now() - lastUse > IDLE_TIME) location.reload();
  }, WATCH_INTERVAL);
}

main().catch((error) => {
  document.documentElement.dataset.ready = "failed";
  const message = `This page could not be drawn: ${error}`;
  byId("main").append(el("p", { class: "bad", role: "alert", text: message }));
  throw error;
});
