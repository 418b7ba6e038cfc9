// Controls that filter and sort lists. Each comes as its `control` and the `label` around it.

/** A choice between options, which are pairs of value and text. */
function createSelect(name, options, onChange) {
  const optionElements = options.map(([value, text]) => el("option", { value, text }));
  const control = el("select", { "aria-label": name, onchange: onChange }, ...optionElements);
  return { control, label: el("label", {}, name, control) };
}

/** An input with these attributes, such as its `type`. */
function createInput(name, attributes, onInput) {
  const control = el("input", { "aria-label": name, oninput: onInput, ...attributes });
  const style = attributes.type === "search" ? "grow" : null;
  return { control, label: el("label", { class: style }, name, control) };
}

/** The labels of controls in a row. */
function renderFilters(filters) {
  return el("div", { class: "filters" }, ...filters.map((filter) => filter.label));
}

/** "all", then the values that occur, the most frequent first. */
function countOptions(values) {
  const counts = new Map();
  for (const value of values) {
    if (value === "" || value === null) continue;
    counts.set(value, (counts.get(value) ?? 0) + 1);
  }
  const sorted = [...counts].sort(([, count], [, otherCount]) => otherCount - count);
  const options = sorted.map(([value, count]) => [value, `${toWords(String(value))} (${count})`]);
  return [["", "all"], ...options];
}

/**
 * The nodes of a browser below its filters. `columns` has each filter's name and the value of
 * every item; a column with one value for all items is no filter.
 */
function renderFilteredBrowser(browser, columns) {
  const items = Object.values(columns)[0].map((_, index) => index);
  const filters = [];

  const isListed = (item) =>
    filters.every(({ control, values }) => {
      return !control.value || String(values[item]) === control.value;
    });
  const applyFilters = () => browser.showItems(items.filter(isListed));

  for (const [name, values] of Object.entries(columns)) {
    const isVaried = new Set(values).size > 1;
    if (!isVaried) continue;
    filters.push({ values, ...createSelect(name, countOptions(values), applyFilters) });
  }
  applyFilters();
  return [renderFilters(filters), browser.node];
}
