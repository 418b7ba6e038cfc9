// What every part of the page uses: elements, packed data, and text that somebody else wrote.
// Text of a run goes through `textContent` only; nothing on this page is ever built from a string of HTML.

const byId = (id) => document.getElementById(id);

/** An element. `class`, `text` and `on…` handlers are set as such, everything else as an attribute. */
function el(tag, properties = {}, ...children) {
  return dress(document.createElement(tag), properties, children);
}

/** The same for a part of a drawing. */
function svg(tag, properties = {}, ...children) {
  return dress(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function dress(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** The data of a block, or null if the page has no such block. */
async function unpack(name) {
  const block = byId(`data-${name}`);
  if (!block) return null;
  const bytes = Uint8Array.from(atob(block.textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

/** A list whose items lie in chunks, which are unpacked when one of their items is asked for. */
class Chunks {
  constructor(name, size) {
    Object.assign(this, { name, size, kept: new Map() });
  }
  chunk(number) {
    if (!this.kept.has(number)) this.kept.set(number, unpack(`${this.name}-${number}`));
    return this.kept.get(number);
  }
  async item(place) {
    return (await this.chunk(Math.floor(place / this.size)))[place % this.size];
  }
}

const LONGEST_SHOWN = 20000;
// Characters that change the direction of text or cannot be seen: shown by their number, so that what is read is what
// is there.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/;
const MARK = /(<\/?[A-Za-z][\w-]*>)/;

/** Text that a model or a person wrote, as it is; very long text is cut until somebody asks for the rest. */
function written(text, { tags = false } = {}) {
  const node = el("div", { class: "text", dir: "auto" });
  fillText(node, text.slice(0, LONGEST_SHOWN), tags);
  if (text.length <= LONGEST_SHOWN) return node;
  const more = el("button", {
    type: "button",
    text: `Show all ${text.length.toLocaleString("en")} characters`,
    onclick: () => {
      fillText(node, text.slice(LONGEST_SHOWN), tags);
      more.remove();
    },
  });
  return el("div", {}, node, more);
}

function fillText(node, text, tags) {
  for (const piece of tags ? text.split(MARK) : [text]) {
    if (tags && MARK.test(piece)) node.append(el("span", { class: "mark", text: piece }));
    else appendVisible(node, piece);
  }
}

function appendVisible(node, text) {
  if (!ODD.test(text)) {
    node.append(text);
    return;
  }
  for (const piece of text.split(new RegExp(`(${ODD.source})`))) {
    if (piece.length === 1 && ODD.test(piece)) {
      const number = piece.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
      node.append(el("span", { class: "odd", text: `U+${number}`, title: "an invisible character" }));
    } else if (piece) node.append(piece);
  }
}

/** On one line, for lists: invisible characters left out. */
const oneLine = (text) => text.split(new RegExp(ODD.source)).join("").replace(/\s+/g, " ").trim();

/** A diff as text with what is new and what is gone marked, in colour and as <ins> and <del>. */
function diffed(changes) {
  const node = el("div", { class: "text", dir: "auto" });
  for (const [kind, text] of changes) {
    const target = kind === "=" ? node : el(kind === "+" ? "ins" : "del");
    appendVisible(target, text);
    if (target !== node) node.append(target);
  }
  return node;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toFixed(digits);
}

/** Smallest and largest, without spreading a long array over a call. */
const minmax = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

/** What opens the item that an address names: `#rollout-17` is `NAMED.rollout(17)`. */
const NAMED = {};

function openNamed() {
  const [, kind, name] = /^#(\w+)-(\d+)$/.exec(location.hash) ?? [];
  return NAMED[kind]?.(Number(name));
}

/** A section of the page with its entry in the navigation. */
function section(id, title, note) {
  byId("contents").append(el("a", { href: `#${id}`, text: title }));
  const node = el("section", { id, "aria-labelledby": `${id}-title` });
  node.append(el("h2", { id: `${id}-title`, text: title }));
  if (note) node.append(el("p", { class: "note", text: note }));
  byId("main").append(node);
  return node;
}

const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const dollars = (value) => `$${value < 0.01 ? +value.toPrecision(2) : value.toFixed(2)}`;

/** Cells are texts, numbers or elements; in a column all numbers have a fraction if one has. */
function table(heads, rows) {
  const whole = heads.map((_, column) => rows.every((row) => typeof row[column] !== "number" || Number.isInteger(row[column])));
  const cell = (value, column) => {
    if (value instanceof Node) return el("td", {}, value);
    if (typeof value !== "number") return el("td", { text: value ?? "–" });
    return el("td", { class: "number", text: whole[column] || Math.abs(value) < 1e-3 && value ? number(value) : value.toFixed(3) });
  };
  const numeric = (column) => rows.some((row) => typeof row[column] === "number");
  const head = el("thead", {}, el("tr", {}, ...heads.map((name, column) => el("th", { scope: "col", class: numeric(column) ? "number" : null, text: name }))));
  const body = el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell))));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "table" }, el("table", {}, head, body));
}
