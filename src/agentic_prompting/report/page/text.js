// Text of models and people, shown exactly as it is, and numbers in words.

const MAX_SHOWN_CHARACTERS = 20000;

// Characters that cannot be seen or that change the direction of text. They are shown as their
// code, so that a reader sees what the text really holds.
const INVISIBLE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/;
// Split by this, a text gives its visible parts and the invisible characters between them.
const INVISIBLE_PARTS = new RegExp(`(${INVISIBLE.source})`);

const TAG = /(<\/?[A-Za-z][\w-]*>)/;

/** A text as it was written. `marksTags` dims tags; the rest of a very long text needs a click. */
function renderText(text, { marksTags = false } = {}) {
  const block = el("div", { class: "text", dir: "auto" });
  appendText(block, text.slice(0, MAX_SHOWN_CHARACTERS), marksTags);
  if (text.length <= MAX_SHOWN_CHARACTERS) return block;

  const button = el("button", {
    type: "button",
    text: `Show all ${formatNumber(text.length)} characters`,
    onclick: () => {
      appendText(block, text.slice(MAX_SHOWN_CHARACTERS), marksTags);
      button.remove();
    },
  });
  return el("div", {}, block, button);
}

function appendText(block, text, marksTags) {
  if (!marksTags) {
    appendVisible(block, text);
    return;
  }
  for (const piece of text.split(TAG)) {
    if (TAG.test(piece)) {
      block.append(el("span", { class: "mark", text: piece }));
    } else {
      appendVisible(block, piece);
    }
  }
}

/** Appends a text with each invisible character replaced by its code. */
function appendVisible(block, text) {
  if (!INVISIBLE.test(text)) {
    block.append(text);
    return;
  }
  for (const piece of text.split(INVISIBLE_PARTS)) {
    if (INVISIBLE.test(piece)) {
      block.append(renderInvisible(piece));
    } else if (piece) {
      block.append(piece);
    }
  }
}

function renderInvisible(character) {
  const code = character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
  return el("span", { class: "invisible", text: `U+${code}`, title: "an invisible character" });
}

/** A text on one line, without invisible characters. */
function toOneLine(text) {
  const visible = text.split(INVISIBLE).join("");
  return visible.replace(/\s+/g, " ").trim();
}

/** A name such as `out_of_turns` in words. */
function toWords(name) {
  return name.replaceAll("_", " ");
}

/** A diff as one text: added parts as <ins>, removed parts as <del>. */
function renderDiff(changes) {
  const block = el("div", { class: "text", dir: "auto" });
  for (const [operation, text] of changes) {
    if (operation === "=") {
      appendVisible(block, text);
      continue;
    }
    const change = el(operation === "+" ? "ins" : "del");
    appendVisible(change, text);
    block.append(change);
  }
  return block;
}

function formatNumber(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toFixed(digits);
}

/** "1 rollout", "2 rollouts". */
function formatCount(count, noun) {
  const ending = count === 1 ? "" : "s";
  return `${formatNumber(count)} ${noun}${ending}`;
}

function formatDollars(value) {
  const amount = value < 0.01 ? Number(value.toPrecision(2)) : value.toFixed(2);
  return `$${amount}`;
}
