// A list of any length beside the item that is open. Only the rows in sight exist.

const ROW_HEIGHT = 80; // as in the style sheet
const ROWS_AROUND_SIGHT = 4; // drawn above the rows in sight, and as many below

class ItemBrowser {
  /**
   * @param name       what the items are called, for screen readers
   * @param describe   function of an item's index that returns its row: `title` and `details`,
   *                   the nodes or texts below the title
   * @param open       function of an item's index that returns the nodes to show when it is
   *                   chosen, or a promise of them
   */
  constructor(name, describe, open) {
    this.describe = describe;
    this.open = open;
    this.items = []; // indices of the items in the list
    this.position = -1; // of the chosen item in the list
    this.rowId = name.replace(/\W/g, "-");

    this.spacer = el("div", { class: "spacer" });
    this.list = el(
      "div",
      { class: "list", role: "listbox", tabindex: "0", "aria-label": name },
      this.spacer,
    );
    this.detail = el("div", {
      class: "detail",
      tabindex: "0",
      role: "region",
      "aria-label": `chosen: ${name}`,
      "aria-live": "polite",
    });
    this.node = el("div", { class: "browser" }, this.list, this.detail);

    this.list.addEventListener("scroll", () => requestAnimationFrame(() => this.drawRows()));
    this.list.addEventListener("keydown", (event) => this.handleKey(event));
    new ResizeObserver(() => this.drawRows()).observe(this.list);
    // The keys j and k move through the browser that was used last.
    this.node.addEventListener("focusin", () => {
      ItemBrowser.lastUsed = this;
    });
    ItemBrowser.lastUsed = this;
  }

  /** Lists these items and opens one of them, by default the first. */
  showItems(items, openedItem) {
    this.items = items;
    this.spacer.style.height = `${items.length * ROW_HEIGHT}px`;
    this.list.scrollTop = 0;
    return this.moveTo(Math.max(0, items.indexOf(openedItem)));
  }

  /** Opens the item at a position, or at the nearest end, and brings its row into sight. */
  moveTo(position) {
    const isOpen = this.choose(position);
    const { list } = this;
    const top = this.position * ROW_HEIGHT;
    const bottom = top + ROW_HEIGHT;
    if (top < list.scrollTop) {
      list.scrollTop = top;
    } else if (bottom > list.scrollTop + list.clientHeight) {
      list.scrollTop = bottom - list.clientHeight;
    }
    return isOpen;
  }

  moveBy(rows) {
    return this.moveTo(this.position + rows);
  }

  /** Opens the item at a position without scrolling. */
  async choose(position) {
    this.position = Math.max(0, Math.min(this.items.length - 1, position));
    this.drawRows();
    if (!this.items.length) {
      const note = el("p", { class: "empty", text: "Nothing fits these filters." });
      this.detail.replaceChildren(note);
      return;
    }

    const item = this.items[this.position];
    const content = await this.open(item);
    // Another item may have been chosen while this one was unpacked.
    if (this.items[this.position] !== item) return;
    this.detail.replaceChildren(...content);
    this.detail.scrollTop = 0;
  }

  handleKey(event) {
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW_HEIGHT) - 1);
    const moves = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: page,
      PageUp: -page,
      Home: -Infinity,
      End: Infinity,
    };
    if (!(event.key in moves) || !this.items.length) return;
    event.preventDefault();
    this.moveBy(moves[event.key]);
  }

  drawRows() {
    // The rows in sight; a list that is not laid out yet has no height.
    const { scrollTop, clientHeight } = this.list;
    const rowsInSight = Math.ceil((clientHeight || 600) / ROW_HEIGHT);
    const first = Math.max(0, Math.floor(scrollTop / ROW_HEIGHT) - ROWS_AROUND_SIGHT);
    const end = Math.min(this.items.length, first + rowsInSight + 2 * ROWS_AROUND_SIGHT);

    const rows = [];
    for (let position = first; position < end; position++) {
      rows.push(this.renderRow(position));
    }
    this.list.replaceChildren(this.spacer, ...rows);

    // Screen readers are told which row is chosen, if it is in sight.
    const chosenRow = rows.find((row) => row.getAttribute("aria-selected") === "true");
    if (chosenRow) {
      this.list.setAttribute("aria-activedescendant", chosenRow.id);
    } else {
      this.list.removeAttribute("aria-activedescendant");
    }
  }

  renderRow(position) {
    const { title, details } = this.describe(this.items[position]);
    const properties = {
      class: "row",
      role: "option",
      id: `${this.rowId}-${position}`,
      "aria-selected": String(position === this.position),
      "aria-setsize": this.items.length,
      "aria-posinset": position + 1,
      onclick: () => this.choose(position),
    };
    const row = el(
      "div",
      properties,
      el("span", { class: "title", text: title, dir: "auto" }),
      el("span", { class: "meta" }, ...details),
    );
    row.style.top = `${position * ROW_HEIGHT}px`;
    return row;
  }
}

// From anywhere on the page but a field that one writes in: j and k move through the list that
// was used last, and / goes to the search.
addEventListener("keydown", (event) => {
  const hasModifier = event.ctrlKey || event.metaKey || event.altKey;
  if (hasModifier || event.target.matches("input, select, textarea")) return;

  if (event.key === "j") ItemBrowser.lastUsed?.moveBy(1);
  if (event.key === "k") ItemBrowser.lastUsed?.moveBy(-1);
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (!search) return;
    event.preventDefault();
    search.focus();
  }
});
