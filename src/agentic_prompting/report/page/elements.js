// Building blocks of the page: HTML and SVG elements, sections and tables.
// Text of a run is set with `textContent` only: no HTML is ever parsed from a string.

function byId(id) {
  return document.getElementById(id);
}

/**
 * Creates an HTML element. `text` becomes its text, `on…` an event handler, and everything else
 * an attribute. Properties and children that are null or undefined are left out.
 */
function el(tag, properties = {}, ...children) {
  return fillElement(document.createElement(tag), properties, children);
}

/** Creates an SVG element in the same way. */
function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return fillElement(element, properties, children);
}

function fillElement(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") {
      element.textContent = value;
    } else if (name.startsWith("on")) {
      element.addEventListener(name.slice("on".length), value);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The value of a `class` attribute; names that are empty or false are left out. */
function joinClasses(...names) {
  return names.filter(Boolean).join(" ");
}

function renderNote(text) {
  return el("p", { class: "note", text });
}

/** Adds a section to the page and its link to the navigation. */
function addSection(id, title, note) {
  byId("contents").append(el("a", { href: `#${id}`, text: title }));
  const section = el("section", { id, "aria-labelledby": `${id}-title` });
  section.append(el("h2", { id: `${id}-title`, text: title }));
  if (note) section.append(renderNote(note));
  byId("main").append(section);
  return section;
}

/** A table. Cells are texts, numbers or elements; missing ones are shown as a dash. */
function renderTable(headings, rows) {
  const columns = headings.map((_, index) => describeColumn(rows, index));

  const headerCells = headings.map((heading, index) => {
    const style = columns[index].isNumeric ? "number" : null;
    return el("th", { scope: "col", class: style, text: heading });
  });
  const head = el("thead", {}, el("tr", {}, ...headerCells));

  const bodyRows = rows.map((row) => {
    const cells = row.map((value, index) => renderCell(value, columns[index].isWhole));
    return el("tr", {}, ...cells);
  });
  const body = el("tbody", {}, ...bodyRows);

  // A table that is wider than the page is scrolled, also with the keyboard.
  const scroller = {
    class: "table-scroller",
    tabindex: "0",
    role: "region",
    "aria-label": "table",
  };
  return el("div", scroller, el("table", {}, head, body));
}

/** Whether a column has numbers, and whether all of them are integers. */
function describeColumn(rows, index) {
  const values = rows.map((row) => row[index]);
  const numbers = values.filter((value) => typeof value === "number");
  return { isNumeric: numbers.length > 0, isWhole: numbers.every(Number.isInteger) };
}

function renderCell(value, isWholeColumn) {
  if (value instanceof Node) return el("td", {}, value);
  if (typeof value !== "number") return el("td", { text: value ?? "–" });

  // If one number of a column has a fraction, all of them have one.
  const isTiny = value !== 0 && Math.abs(value) < 1e-3;
  const text = isWholeColumn || isTiny ? formatNumber(value) : value.toFixed(3);
  return el("td", { class: "number", text });
}

/** A folded table, which is built when it is opened for the first time. */
function renderFoldedTable(summary, headings, buildRows) {
  const details = el("details", {}, el("summary", { text: summary }));
  let isBuilt = false;
  details.addEventListener("toggle", () => {
    if (isBuilt) return;
    isBuilt = true;
    details.append(renderTable(headings, buildRows()));
  });
  return details;
}
