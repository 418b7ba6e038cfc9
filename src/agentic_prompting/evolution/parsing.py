"""From what an LLM really sends to edits. Never raises: what cannot be read is said in `problems`.

JSON is found (fenced or bare, prose around it, the last block counts), made safe for LaTeX, and read strictly; only
what is then not JSON (comments, trailing commas, single quotes, a missing bracket) goes through `json-repair`. Search
and replace blocks for free text are read as they stand: there is nothing to escape in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import json_repair

from .edits import Edit
from .spans import Span, json_spans

_NAMES = {
    "op": ("op", "operation", "action", "option", "type", "edit"),
    "ids": ("ids", "id", "targets", "target", "principle_ids", "principle_id", "merged_from", "modified_from", "from"),
    "text": ("text", "principle", "new_text", "content", "replace", "replacement", "new", "value", "merged", "to"),
    "search": ("search", "find", "old"),
    "reason": ("reason", "evidence", "rationale", "why", "because", "justification"),
}
_OPERATIONS = {
    **dict.fromkeys(("add", "create", "new", "insert", "append"), "add"),
    **dict.fromkeys(("modify", "edit", "update", "revise", "change", "refine", "rewrite"), "modify"),
    **dict.fromkeys(("merge", "combine", "unify"), "merge"),
    **dict.fromkeys(("remove", "delete", "drop"), "remove"),
    **dict.fromkeys(("replace", "search_replace"), "replace"),
}
# LaTeX commands that begin like a JSON escape for a line break, tab or carriage return. A backspace or form feed is
# never meant in a text, so \beta and \frac need no list.
_LATEX_WORDS = """
nu neq ne neg ni not notin nabla nmid nexists nless ngtr nleq ngeq nsim ncong nparallel nsubseteq nsupseteq nearrow
nwarrow natural newline newcommand nolimits nonumber normalsize nleftarrow nrightarrow
tau theta times text textbf textit textrm texttt textsf textstyle textcolor tan tanh to top tfrac tbinom tilde
triangle triangleq triangleleft triangleright therefore thinspace thickspace thicksim thickapprox tag twoheadrightarrow
rho right rangle rfloor rceil rightarrow rightharpoonup rightleftharpoons rbrace rbrack rvert rVert real rm root rtimes
ref renewcommand restriction risingdotseq rule rlap
"""
_LATEX = frozenset(_LATEX_WORDS.split())
_BACKSLASH = re.compile(r"\\(\\|\"|/|u[0-9a-fA-F]{4}|[A-Za-z]+|.|$)", re.DOTALL)
_ID = re.compile(
    r"^[\[(\"'`#\s]*(?:([A-Z])\s*[.:/_-]\s*(?=G))?(?:G[ .:_-]*|principle\s+|)(\d+)[\])\"'`.:\s]*$", re.IGNORECASE
)
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n`]*$", re.MULTILINE)
_KEYS = ("add", "modify", "merge", "remove")
_REPAIR_LIMIT = 10_000  # characters; repairing takes quadratic time on some texts, and no edit is this long
_OWN_MARK = re.compile(r"^\s*(?:\[(?:[A-Z]\.)?G\d+\][.:]?|(?:[A-Z]\.)?G\d+[.:])\s*")
_BLOCK = re.compile(
    r"^[ \t]*<{5,9}[ \t]*SEARCH[ \t]*\n(.*?)^[ \t]*={5,9}[ \t]*\n(.*?)^[ \t]*>{5,9}[ \t]*REPLACE",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class ParsedEdits:
    """The edits of one reply.

    Args:
        edits (`tuple[Edit, ...]`): What could be read, in order; nothing is checked against a prompt yet.
        problems (`tuple[str, ...]`): One label for each thing that could not: `no_json`, `not_an_edit`,
            `unknown_operation`, `cut_off` (the reply ended inside the last edit, which is left out).
        found (`bool`): Whether there was a block of edits at all. An empty list is one: nothing is to be changed.
    """

    edits: tuple[Edit, ...] = ()
    problems: tuple[str, ...] = ()
    found: bool = False


def parse_edits(text: str, own_set: str = "A") -> ParsedEdits:
    """Read the edits out of a reply. Never raises.

    Args:
        text (`str`): The reply.
        own_set (`str`, *optional*, defaults to `"A"`): The set that is edited, where principles are written `A.G3`:
            its ids lose the letter. Those of other sets keep it (`B.G3`), so that no edit can take them for its own.
    """
    text = _storable(final_text(text))
    blocks = _read_blocks(text)
    if blocks.found:
        return blocks
    last: ParsedEdits | None = None
    for part in _FENCE.split(text):  # so that a block which is never closed cannot swallow the next one
        for group in _groups(part):
            read = _read_group(group, own_set)
            # The last block that has edits or is an empty list counts; a stray `[G3]` in the prose does not.
            if read.found or last is None:
                last = read
    return last or ParsedEdits(problems=("no_json",))


def final_text(text: str) -> str:
    """What a thinking model says after it has thought: the text behind the last `</think>`."""
    return text.rpartition("</think>")[2].strip()


def principle_id(value: Any, own_set: str = "A") -> str:
    """`3`, `G3`, `[G3]`, `A.G3` as `"G3"`; another set's as `"B.G3"`; anything else unchanged, to be refused later."""
    match = _ID.match(str(value))
    if isinstance(value, bool) or match is None:
        return str(value).strip()
    name = f"G{int(match[2])}"
    letter = (match[1] or own_set).upper()
    return name if letter == own_set.upper() else f"{letter}.{name}"


def escape_latex(text: str) -> str:
    """JSON text in which single backslashes that are LaTeX's are doubled: `\\frac`, `\\nu`, `\\(`, but not `\\n`.

    A backslash in front of b, f or of a known command that begins with n, r or t is LaTeX; otherwise `\\n`, `\\r` and
    `\\t` are the control characters, `\\u` with four hex digits a character, and anything else LaTeX again.
    """
    return _BACKSLASH.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    after = match[1]
    if after in ("\\", '"', "/", "'") or re.fullmatch(r"u[0-9a-fA-F]{4}", after):
        return match[0]
    abbreviation = match.string.startswith((".g.", ".e."), match.end())  # a new line that begins with e.g. or i.e.
    if after[:1] in ("n", "r", "t") and (after not in _LATEX or abbreviation):
        return match[0]
    return "\\" + match[0]


def _groups(text: str) -> Iterator[list[Span]]:
    """The JSON spans of the text; neighbours with nothing but commas between them are one block (JSON lines)."""
    group: list[Span] = []
    for span in json_spans(text):
        if group and text[group[-1].end : span.start].strip(" \t\r\n,"):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _read_group(group: list[Span], own_set: str) -> ParsedEdits:
    edits: list[Edit] = []
    problems: list[str] = []
    found = False
    for span in group:
        value = _load(span.text)
        records = list(_records(value))
        if span.cut_off and records:
            records.pop()
            problems.append("cut_off")
        found = found or bool(records) or span.cut_off or _is_empty_list(value)
        for record in records:
            edit = _edit(record, own_set)
            if edit is None:
                problems.append("unknown_operation")
            else:
                edits.append(edit)
    if not found:
        problems.append("not_an_edit")
    return ParsedEdits(tuple(edits), tuple(problems), found)


def _load(text: str) -> Any:
    """JSON, or what can be made of it: a broken list object by object, so that one of them cannot spoil the others."""
    text = escape_latex(text)
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    objects = [span.text for span in json_spans(text[1:]) if span.text.startswith("{")] if text[0] == "[" else []
    return [_repair(piece) for piece in objects] if objects else _repair(text)


def _repair(text: str) -> Any:
    if len(text) > _REPAIR_LIMIT:
        return None
    try:
        return json_repair.loads(text)
    except Exception:  # its parser gives up on absurd nesting in several ways; a bad reply is no reason to stop
        return None


def _records(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The edits among parsed JSON: dicts that name an operation (or search), in lists, wrapped, or grouped by it."""
    if depth > 5:
        return
    if isinstance(value, dict):
        record = {str(key).strip().casefold(): item for key, item in value.items()}
        if _first(record, "op") is not None or isinstance(_first(record, "search"), str):
            yield record
        else:
            for key, item in record.items():
                yield from _under_operation(key, item) if key in _KEYS else _records(item, depth + 1)
    elif isinstance(value, list):
        yield from (found for item in value for found in _records(item, depth + 1))


def _under_operation(op: str, value: Any) -> Iterator[dict[str, Any]]:
    """Edits grouped by operation: `{"add": ["..."], "modify": [{"id": "G1", "text": "..."}], "remove": ["G2"]}`."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            yield {"op": op, **{str(key).strip().casefold(): part for key, part in item.items()}}
        elif isinstance(item, (str, int)):
            yield {"op": op, "ids" if op == "remove" else "text": item}


def _is_empty_list(value: Any) -> bool:
    return value == [] or (isinstance(value, dict) and len(value) == 1 and next(iter(value.values())) == [])


def _edit(record: dict[str, Any], own_set: str) -> Edit | None:
    search = _text(_first(record, "search"))
    op = _OPERATIONS.get(_text(_first(record, "op") or "replace").strip().casefold())
    if op is None:
        return None
    text, reason = _text(_first(record, "text")), _text(_first(record, "reason"))
    ids = _ids(_first(record, "ids"), own_set)
    if op == "replace" and (search or not ids):
        return Edit(op, text=text, search=search, reason=reason)
    op = "modify" if op == "replace" else op  # "replace G3 by ..."
    return Edit(op, ids, _OWN_MARK.sub("", text), reason=reason)


def _first(record: dict[str, Any], field: str) -> Any:
    """The value under the first of the field's names that has one. A field's value may be empty, not `None`."""
    return next((record[name] for name in _NAMES[field] if record.get(name) is not None), None)


def _ids(value: Any, own_set: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [part for part in re.split(r"[,;&+]|\band\b", value.strip("[]() ")) if part.strip()]
    values = value if isinstance(value, list) else [value]
    return tuple(principle_id(item, own_set) for item in values)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return _storable(value) if isinstance(value, str) else "" if value is None else str(value)


def _storable(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can write (`\\ud800`) and no file or tokenizer can take."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_blocks(text: str) -> ParsedEdits:
    text = text.replace("\r\n", "\n")
    edits = [Edit("replace", text=_line(new), search=_line(old)) for old, new in _BLOCK.findall(text)]
    cut = len(re.findall(r"^[ \t]*<{5,9}[ \t]*SEARCH", text, re.MULTILINE)) > len(edits)
    return ParsedEdits(tuple(edits), ("cut_off",) if cut else (), bool(edits) or cut)


def _line(block: str) -> str:
    """The lines of a block without the line break that ends the last one."""
    return block.removesuffix("\n")
