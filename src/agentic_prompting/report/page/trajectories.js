// The browser of trajectories: filters over the index, texts unpacked when one is opened or searched for.

async function showTrajectories(index, page) {
  const { columns, total } = index;
  const count = columns.step.length;
  const shown = count < total ? `${count.toLocaleString("en")} of ${total.toLocaleString("en")}, drawn over the whole run` : `${count.toLocaleString("en")}`;
  const node = section("trajectories", "Trajectories", `${shown}. In brackets the advantage in the group. Keys: j and k for the next and the one before, / to search.`);
  const chunks = new Chunks("trajectories", index.chunk);
  const only = (values, place) => {
    for (const [name, { control }] of Object.entries(filters)) control.value = values[name] ?? (name === "order" ? "first" : "");
    node.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    return apply(place);
  };
  const open = async (place) => trajectoryDetail(columns, place, await chunks.item(place), groupOf(columns, place, only));
  const browser = new Browser("trajectories", (place) => trajectoryRow(columns, place), open);
  const status = el("p", { class: "note", role: "status" });
  const texts = new Texts(chunks, Math.ceil(count / index.chunk));
  let latest = 0;
  const apply = async (opened) => {
    const turn = ++latest;
    const wanted = read(filters);
    let places = columns.step.map((_, place) => place).filter((place) => fits(columns, place, wanted));
    if (wanted.text) {
      status.textContent = "Searching …";
      const found = await texts.containing(wanted.text);
      if (turn !== latest) return; // the filters have changed since
      places = places.filter((place) => found.has(place));
    }
    places.sort(ORDERS[wanted.order](columns));
    status.textContent = `${places.length.toLocaleString("en")} ${places.length === 1 ? "fits" : "fit"}`;
    await browser.show(places, opened);
  };
  const filters = trajectoryFilters(columns, apply);
  node.append(el("div", { class: "filters" }, ...Object.values(filters).map((one) => one.wrapped)), status, browser.node);
  await apply();
  NAMED.rollout = async (number) => {
    const place = columns.number.indexOf(number);
    if (browser.places.includes(place)) { node.scrollIntoView(); await browser.move(browser.places.indexOf(place)); }
    else if (place >= 0) await only({}, place);
  };
  page.only = only; // to set some filters from elsewhere on the page, for example a step that was clicked on
}

/** The rollouts of the same question in the same step, which GRPO compares with each other. */
function groupOf(columns, place, only) {
  const group = columns.group[place];
  const places = columns.group.map((_, other) => other).filter((other) => columns.group[other] === group);
  if (places.length < 2) return null;
  const link = (other) => (other === place ? "this one" : el("a", { href: `#rollout-${columns.number[other]}`, text: "read" }));
  const rows = places.map((other) => [link(other), columns.reward[other], columns.advantage[other], columns.status[other].replaceAll("_", " ")]);
  const show = el("button", { type: "button", text: `Show these ${places.length} alone`, onclick: () => only({ group: String(group) }) });
  const rollouts = table(["", "reward", "advantage", "outcome"], rows);
  rollouts.classList.add("short");
  return el("div", { class: "group" }, el("h3", { text: "Its group" }), rollouts, show);
}

const ORDERS = {
  first: () => (a, b) => a - b,
  last: () => (a, b) => b - a,
  best: (columns) => (a, b) => (columns.reward[b] ?? -Infinity) - (columns.reward[a] ?? -Infinity) || a - b,
  worst: (columns) => (a, b) => (columns.reward[a] ?? Infinity) - (columns.reward[b] ?? Infinity) || a - b,
  longest: (columns) => (a, b) => columns.turns[b] - columns.turns[a] || a - b,
};

function trajectoryFilters(columns, apply) {
  let waiting;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(apply, 150); };
  const [first, last] = minmax(columns.step);
  const step = { type: "number", min: first, max: last };
  const right = columns.match.map((value) => (value === null ? "" : value ? "right" : "wrong"));
  const filters = {
    status: filter("outcome", counted(columns.status), apply),
    answer: filter("answer", counted(right), apply),
    task: filter("task", counted(columns.task), apply),
    mode: filter("mode", counted(columns.mode), apply),
    prompt: filter("system prompt", counted(columns.prompt), apply),
    from: filter("from step", null, soon, { ...step, placeholder: first }),
    to: filter("to step", null, soon, { ...step, placeholder: last }),
    group: filter("group", null, soon, { type: "number", min: 0 }),
    order: filter("order", [["first", "first steps first"], ["last", "last steps first"], ["best", "best reward first"], ["worst", "worst reward first"], ["longest", "most turns first"]], apply),
    text: filter("text in question, turns or replies", null, soon, { type: "search" }),
  };
  // A filter with nothing to choose from is left out; "all" and one value are no choice.
  for (const name of ["answer", "task", "mode", "prompt"]) if (filters[name].control.options.length < 3) delete filters[name];
  return filters;
}

const read = (filters) => Object.fromEntries(Object.entries(filters).map(([name, { control }]) => [name, control.value.trim()]));

function fits(columns, place, wanted) {
  const same = (name) => !wanted[name] || String(columns[name][place]) === wanted[name];
  return same("status") && same("task") && same("mode") && same("prompt")
    && (!wanted.answer || columns.match[place] === (wanted.answer === "right" ? 1 : 0))
    && (!wanted.group || columns.group[place] === Number(wanted.group))
    && (!wanted.from || columns.step[place] >= Number(wanted.from))
    && (!wanted.to || columns.step[place] <= Number(wanted.to));
}

/** All that can be searched, in lower case; unpacked at the first search. */
class Texts {
  constructor(chunks, number) {
    Object.assign(this, { chunks, number, kept: null });
  }
  async all() {
    const texts = [];
    for (let chunk = 0; chunk < this.number; chunk++) {
      for (const one of await this.chunks.chunk(chunk)) {
        const parts = [one.question ?? "", ...one.turns.map((turn) => turn.text), ...one.observations.map((reply) => reply.error ?? reply.text)];
        texts.push(parts.join("\n").toLowerCase());
      }
    }
    return texts;
  }
  async containing(text) {
    this.kept ??= this.all();
    const wanted = text.toLowerCase();
    const found = new Set();
    (await this.kept).forEach((one, place) => one.includes(wanted) && found.add(place));
    return found;
  }
}

function trajectoryRow(columns, place) {
  const status = columns.status[place], advantage = columns.advantage[place];
  const answered = status === "answered" && columns.match[place] !== null;
  const outcome = answered ? (columns.match[place] ? "✓ right" : "✗ wrong") : status.replaceAll("_", " ");
  const good = answered ? columns.match[place] : status === "answered";
  const apart = advantage ? ` (${advantage > 0 ? "+" : ""}${advantage.toFixed(2)})` : "";
  const meta = [`step ${columns.step[place]} · `, el("span", { class: good ? "good" : "bad", text: outcome }), ` · reward ${number(columns.reward[place])}${apart} · ${plural(columns.turns[place], "turn")}`];
  return [oneLine(columns.title[place]) || "(no question)", meta];
}

function trajectoryDetail(columns, place, one, group) {
  const status = columns.status[place];
  const facts = [`${columns.mode[place]}, step ${columns.step[place]}`, `${one.tokens?.agent ?? "–"} tokens of the agent, ${one.tokens?.observation ?? "–"} of replies`];
  if (one.cost_usd) facts.push(dollars(one.cost_usd));
  const content = [
    el("h3", { text: "Question" }), written(one.question ?? ""),
    el("p", { class: "note" }, el("span", { class: `tag ${status === "answered" ? "" : "bad"}`, text: status.replaceAll("_", " ") }),
      ` · ${facts.join(" · ")} · seed ${one.seed ?? "–"} · `, el("a", { href: `#rollout-${columns.number[place]}`, text: "link to this one" })),
  ];
  if (one.answers) content.push(pair("accepted", one.answers.join(" / ")), pair("answered", one.answer ?? "nothing"));
  if (one.returned) content.push(el("h3", { text: "What the program returned besides" }), written(one.returned));
  if (one.error) content.push(el("p", { class: "bad" }, "Failed, and left out of training: "), written(`${one.error.kind}: ${one.error.what}`));
  const reward = one.parts.length ? el("div", {}, el("h3", { text: "Reward" }), table(["part", "value"], one.parts)) : null;
  content.push(el("div", { class: "beside" }, reward, group), el("h3", { text: "Conversation" }), ...conversation(one));
  return content;
}

const pair = (name, text) => el("p", { class: "note pair" }, `${name}: `, el("bdi", { class: "text", text: oneLine(text).slice(0, 500) }));

function conversation(one) {
  const said = [];
  const source = one.first_request ? "program" : "environment";
  if (one.first_request) said.push(saying(source, "first request", one.first_request, "said other", false));
  one.turns.forEach((turn, place) => {
    const odd = turn.well_formed ? "" : `not well formed${turn.problem ? `: ${turn.problem}` : ""}`;
    said.push(saying("agent", `turn ${place + 1}${odd ? ` · ${odd}` : ""}`, turn.text, "said", true));
    const reply = one.observations[place];
    if (!reply) return;
    const how = `${number(reply.seconds, 2)} s${reply.cached ? ", recorded" : ""}`;
    said.push(saying(reply.error ? `${source} failed` : source, how, reply.error ?? reply.text, `said other${reply.error ? " failed" : ""}`, false));
  });
  return said;
}

function saying(who, how, text, style, tags) {
  return el("div", { class: style }, el("div", { class: "who" }, who, el("span", { text: how })), written(text, { tags }));
}
