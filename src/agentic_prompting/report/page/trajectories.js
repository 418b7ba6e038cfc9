// The list of trajectories: filtered by an index, whose texts are unpacked when one is opened or
// searched.

async function showTrajectories(index, page) {
  const list = new TrajectoryList(index);
  await list.applyFilters();
  ITEM_OPENERS.set("rollout", (number) => list.openRollout(number));
  page.filterTrajectories = (values) => list.setFilters(values);
}

class TrajectoryList {
  constructor({ columns, total, chunk: chunkSize }) {
    const count = columns.step.length;
    this.columns = columns;
    this.chunks = new ChunkedList("trajectories", chunkSize);
    this.searchIndex = new SearchIndex(this.chunks, Math.ceil(count / chunkSize));
    this.filterRuns = 0; // how often the filters have been applied

    const shownCount =
      count < total
        ? `${formatNumber(count)} of ${formatNumber(total)}, drawn over the whole run`
        : formatNumber(count);
    this.section = addSection(
      "trajectories",
      "Trajectories",
      `${shownCount}. In brackets the advantage in the group. ` +
        "Keys: j and k for the next and the one before, / to search.",
    );
    this.filters = createTrajectoryFilters(columns, () => this.applyFilters());
    this.status = el("p", { class: "note", role: "status" });
    this.browser = new ItemBrowser(
      "trajectories",
      (item) => describeTrajectory(columns, item),
      (item) => this.renderItem(item),
    );
    const controls = renderFilters(Object.values(this.filters));
    this.section.append(controls, this.status, this.browser.node);
  }

  async renderItem(item) {
    const trajectory = await this.chunks.loadItem(item);
    const group = renderGroup(this.columns, item, (values) => this.setFilters(values));
    return renderTrajectory(this.columns, item, trajectory, group);
  }

  /** Lists the trajectories that fit the filters, with `openedItem` open if it is one of them. */
  async applyFilters(openedItem) {
    this.filterRuns += 1;
    const filterRun = this.filterRuns;
    const values = readFilters(this.filters);

    let items = this.columns.step.map((_, item) => item);
    items = items.filter((item) => fitsFilters(this.columns, item, values));
    if (values.text) {
      this.status.textContent = "Searching …";
      const matches = await this.searchIndex.findText(values.text);
      // The filters may have changed since.
      if (filterRun !== this.filterRuns) return;
      items = items.filter((item) => matches.has(item));
    }
    const compare = TRAJECTORY_ORDERS[values.order].compare;
    items.sort((item, other) => compare(this.columns, item, other) || item - other);

    const verb = items.length === 1 ? "fits" : "fit";
    this.status.textContent = `${formatNumber(items.length)} ${verb}`;
    await this.browser.showItems(items, openedItem);
  }

  /** Sets some filters, clears all others, and goes to the list. */
  setFilters(values, openedItem) {
    for (const [name, { control }] of Object.entries(this.filters)) {
      const emptyValue = name === "order" ? "first" : "";
      control.value = values[name] ?? emptyValue;
    }
    const movesLittle = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.section.scrollIntoView({ behavior: movesLittle ? "auto" : "smooth" });
    return this.applyFilters(openedItem);
  }

  /** Opens the rollout with this number, also if the filters have to be cleared for it. */
  async openRollout(number) {
    const item = this.columns.number.indexOf(number);
    const position = this.browser.items.indexOf(item);
    if (position >= 0) {
      this.section.scrollIntoView();
      await this.browser.moveTo(position);
    } else if (item >= 0) {
      await this.setFilters({}, item);
    }
  }
}

// Orders of the list, each with its text and its comparison. A comparison of 0, or of two missing
// rewards (NaN), leaves two items in the order of the run.
const TRAJECTORY_ORDERS = {
  first: { text: "first steps first", compare: () => 0 },
  last: { text: "last steps first", compare: (columns, item, other) => other - item },
  best: {
    text: "best reward first",
    compare: ({ reward }, item, other) =>
      (reward[other] ?? -Infinity) - (reward[item] ?? -Infinity),
  },
  worst: {
    text: "worst reward first",
    compare: ({ reward }, item, other) => (reward[item] ?? Infinity) - (reward[other] ?? Infinity),
  },
  longest: {
    text: "most turns first",
    compare: ({ turns }, item, other) => turns[other] - turns[item],
  },
};

/** The filters by the names of `fitsFilters`; choices with only one value are left out. */
function createTrajectoryFilters(columns, applyFilters) {
  // While somebody is writing, the filters wait.
  let timer;
  const applySoon = () => {
    clearTimeout(timer);
    timer = setTimeout(applyFilters, 150);
  };
  const choose = (name, values) => createSelect(name, countOptions(values), applyFilters);

  const [firstStep, lastStep] = findRange(columns.step);
  const stepRange = { type: "number", min: firstStep, max: lastStep };
  const orders = Object.entries(TRAJECTORY_ORDERS).map(([name, { text }]) => [name, text]);
  const filters = {
    status: choose("outcome", columns.status),
    answer: choose("answer", columns.match.map(judgeAnswer)),
    task: choose("task", columns.task),
    mode: choose("mode", columns.mode),
    prompt: choose("system prompt", columns.prompt),
    from: createInput("from step", { ...stepRange, placeholder: firstStep }, applySoon),
    to: createInput("to step", { ...stepRange, placeholder: lastStep }, applySoon),
    group: createInput("group", { type: "number", min: 0 }, applySoon),
    order: createSelect("order", orders, applyFilters),
    text: createInput("text in question, turns or replies", { type: "search" }, applySoon),
  };

  for (const name of ["answer", "task", "mode", "prompt"]) {
    const optionCount = filters[name].control.options.length; // with "all"
    if (optionCount < 3) delete filters[name];
  }
  return filters;
}

function judgeAnswer(match) {
  if (match === null) return "";
  return match ? "right" : "wrong";
}

function readFilters(filters) {
  const values = {};
  for (const [name, { control }] of Object.entries(filters)) {
    values[name] = control.value.trim();
  }
  return values;
}

/** Whether a trajectory fits all filters but the text. An empty value filters nothing. */
function fitsFilters(columns, item, values) {
  for (const name of ["status", "task", "mode", "prompt"]) {
    if (values[name] && String(columns[name][item]) !== values[name]) return false;
  }
  if (values.answer && judgeAnswer(columns.match[item]) !== values.answer) return false;
  if (values.group && columns.group[item] !== Number(values.group)) return false;
  if (values.from && columns.step[item] < Number(values.from)) return false;
  if (values.to && columns.step[item] > Number(values.to)) return false;
  return true;
}

/** The texts of all trajectories in lower case, which are unpacked at the first search. */
class SearchIndex {
  constructor(chunks, chunkCount) {
    this.chunks = chunks;
    this.chunkCount = chunkCount;
    this.texts = null; // a promise of them
  }

  /** The indices of the trajectories with this text in question, turns or replies. */
  async findText(text) {
    this.texts ??= this.loadTexts();
    const texts = await this.texts;
    const searchedText = text.toLowerCase();

    const matches = new Set();
    texts.forEach((trajectoryText, item) => {
      if (trajectoryText.includes(searchedText)) matches.add(item);
    });
    return matches;
  }

  async loadTexts() {
    const texts = [];
    for (let number = 0; number < this.chunkCount; number++) {
      const trajectories = await this.chunks.loadChunk(number);
      for (const { question, turns, observations } of trajectories) {
        const turnTexts = turns.map((turn) => turn.text);
        const replyTexts = observations.map((observation) => observation.error ?? observation.text);
        const parts = [question ?? "", ...turnTexts, ...replyTexts];
        texts.push(parts.join("\n").toLowerCase());
      }
    }
    return texts;
  }
}
