// A list of any length beside the item that is open: only the rows in sight exist. Used for trajectories and refinements.

const ROW = 80; // as in the style sheet

class Browser {
  /**
   * @param name   what the items are called, for screen readers
   * @param row    place of an item -> [title, what stands below it] of its row
   * @param open   place of an item -> what the detail pane shows (or a promise of it)
   */
  constructor(name, row, open) {
    Object.assign(this, { row, open, places: [], chosen: -1 });
    this.spacer = el("div", { class: "spacer" });
    this.list = el("div", { class: "list", role: "listbox", tabindex: "0", "aria-label": name }, this.spacer);
    this.detail = el("div", { class: "detail", tabindex: "0", role: "region", "aria-label": `chosen: ${name}`, "aria-live": "polite" });
    this.node = el("div", { class: "browser" }, this.list, this.detail);
    this.list.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()));
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.node.addEventListener("focusin", () => { Browser.used = this; });
    Browser.used = this;
    new ResizeObserver(() => this.draw()).observe(this.list);
  }

  /** Show these items, this one of them opened, or the first. */
  show(places, place) {
    this.places = places;
    this.spacer.style.height = `${places.length * ROW}px`;
    this.list.scrollTop = 0;
    return this.move(Math.max(0, places.indexOf(place)));
  }

  async choose(position) {
    this.chosen = Math.max(0, Math.min(this.places.length - 1, position));
    this.draw();
    if (!this.places.length) {
      this.detail.replaceChildren(el("p", { class: "empty", text: "Nothing fits these filters." }));
      return;
    }
    const place = this.places[this.chosen];
    const content = await this.open(place);
    if (this.places[this.chosen] !== place) return; // another one was chosen meanwhile
    this.detail.replaceChildren(...content);
    this.detail.scrollTop = 0;
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.places.length) return;
    event.preventDefault();
    this.move(this.chosen + moves[event.key]);
  }

  /** Open the item at this position, or at the nearest end, and bring its row into sight. */
  move(position) {
    const opened = this.choose(position);
    const top = this.chosen * ROW;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    else if (top + ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW - this.list.clientHeight;
    return opened;
  }

  draw() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 4);
    const last = Math.min(this.places.length, first + Math.ceil((this.list.clientHeight || 600) / ROW) + 8);
    const rows = [];
    for (let position = first; position < last; position++) rows.push(this.drawn(position));
    this.list.replaceChildren(this.spacer, ...rows);
    const chosen = rows.find((row) => row.getAttribute("aria-selected") === "true");
    if (chosen) this.list.setAttribute("aria-activedescendant", chosen.id);
    else this.list.removeAttribute("aria-activedescendant");
  }

  drawn(position) {
    const [title, meta] = this.row(this.places[position]);
    const row = el("div", {
      class: "row", role: "option", id: `${this.list.getAttribute("aria-label").replace(/\W/g, "-")}-${position}`,
      "aria-selected": String(position === this.chosen), "aria-setsize": this.places.length, "aria-posinset": position + 1,
      onclick: () => this.choose(position),
    }, el("span", { class: "title", text: title, dir: "auto" }), el("span", { class: "meta" }, ...[meta].flat()));
    row.style.top = `${position * ROW}px`;
    return row;
  }
}

// j and k go through the list that was used last, from anywhere on the page but where one writes; / goes to the search.
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  if (event.key === "j" || event.key === "k") Browser.used?.move(Browser.used.chosen + (event.key === "j" ? 1 : -1));
  const search = event.key === "/" && document.querySelector("input[type=search]");
  if (search) { event.preventDefault(); search.focus(); }
});

/** A labelled filter; `changed` is called when it is used. Without options it is an input of the given type. */
function filter(label, options, changed, properties = {}) {
  const control = options
    ? el("select", { "aria-label": label, onchange: changed, ...properties }, ...options.map(([value, text]) => el("option", { value, text })))
    : el("input", { "aria-label": label, oninput: changed, ...properties });
  const wrapped = el("label", { class: properties.type === "search" ? "grow" : null }, label, control);
  return { wrapped, control };
}

/** Options for the values that occur, with how often; "all" in front. */
function counted(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  const sorted = [...counts].filter(([value]) => value !== "" && value !== null).sort((a, b) => b[1] - a[1]);
  return [["", "all"], ...sorted.map(([value, count]) => [value, `${String(value).replaceAll("_", " ")} (${count})`])];
}

/** A browser below its filters: by label the value that each item has, to choose from where there is more than one. */
function listing(browser, choices) {
  const all = Object.values(choices)[0].map((_, place) => place);
  const apply = () => browser.show(all.filter((place) => filters.every(({ control, values }) => !control.value || String(values[place]) === control.value)));
  const varied = Object.entries(choices).filter(([, values]) => new Set(values).size > 1);
  const filters = varied.map(([label, values]) => ({ values, ...filter(label, counted(values), apply) }));
  apply();
  return [el("div", { class: "filters" }, ...filters.map((one) => one.wrapped)), browser.node];
}
