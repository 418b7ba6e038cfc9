"""Reads edits out of the replies of LLMs. Never raises: `problems` lists the parts that cannot be read.

JSON is found (fenced or bare, prose around it, the last block counts), made safe for LaTeX and read; what is not quite
JSON goes through `json-repair`. Search and replace blocks for free text are read as they stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import json_repair

from .system_prompt import Edit

_NAMES = {
    "op": ("op", "operation", "action", "option", "type", "edit"),
    "ids": (
        "ids", "id", "targets", "target", "principle_ids", "principle_id", "merged_from", "modified_from", "from",
        "remove_id", "remove_ids", "modify_id", "merge_ids",
    ),
    "text": ("text", "principle", "new_text", "content", "replace", "replacement", "new", "value", "merged", "to"),
    "search": ("search", "find", "old"),
    "reason": ("reason", "evidence", "rationale", "why", "because", "justification"),
}  # fmt: skip
_OPERATIONS = {
    **dict.fromkeys(("add", "create", "new", "insert", "append"), "add"),
    **dict.fromkeys(("modify", "edit", "update", "revise", "change", "refine", "rewrite"), "modify"),
    **dict.fromkeys(("merge", "combine", "unify"), "merge"),
    **dict.fromkeys(("remove", "delete", "drop"), "remove"),
    **dict.fromkeys(("replace", "search_replace"), "replace"),
}
_BACKSLASH = re.compile(r"\\(\\|\"|/|u[0-9a-fA-F]{4}|[A-Za-z]+|.|$)", re.DOTALL)
# LaTeX commands that begin like a JSON escape for a line break, tab or carriage return. A backspace or form feed is
# never meant in a text, so \beta and \frac need no mention.
_LATEX = re.compile(
    r"n(u|e|eq|eg|i|ot|otin|abla|mid|exists|leq|geq|less|gtr|sim|cong|parallel|subseteq|warrow|earrow|ewcommand)"
    r"|t(o|an|anh|au|ag|op|heta|imes|ext[a-z]*|frac|binom|ilde|riangle[a-z]*|herefore)"
    r"|r(m|ho|oot|ef|ight[a-z]*|angle|floor|ceil|brace|brack|vert|times)"
)
_ID = re.compile(
    r"^[\[(\"'`#\s]*(?:([A-Z])\s*[.:/_-]\s*(?=G))?(?:G[ .:_-]*|principle\s+|)(\d+)[\])\"'`.:\s]*$", re.IGNORECASE
)
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n`]*$", re.MULTILINE)
_JSON = re.compile(r"\[(?=\s*+(?:[\[{\]\"']|//|/\*|#|$))|{(?=\s*+(?:[\"'}/#]|\w{1,40}\s*:|$))")
_SINGLE_QUOTED = re.compile(r"(?<=[\[{,:])(\s*)'((?:\\.|[^\\])*?)'(?=\s*[,:}\]])", re.DOTALL)
_REPAIR_LIMIT = 10_000  # characters; repairing takes quadratic time on some texts, and no edit is this long
_DECODER = json.JSONDecoder(strict=False)
_OWN_MARK = re.compile(r"^\s*(?:\[(?:[A-Z]\.)?G\d+\][.:]?|(?:[A-Z]\.)?G\d+[.:])\s*")
_SEARCH = r"^[ \t]*<{5,9}[ \t]*SEARCH[ \t]*"
_BLOCK = re.compile(
    rf"{_SEARCH}\n(.*?)^[ \t]*={{5,9}}[ \t]*\n(.*?)^[ \t]*>{{5,9}}[ \t]*REPLACE", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class ParsedEdits:
    """The edits of one reply.

    Args:
        edits (`tuple[Edit, ...]`): The edits that could be read, in order; they are not checked against a prompt yet.
        problems (`tuple[str, ...]`): One label for each part that could not: `no_json`, `not_an_edit`,
            `unknown_operation`, `cut_off` (the reply ended inside the last edit, which is left out).
        found (`bool`): Whether there was a block of edits at all. An empty list is one: nothing is to be changed.
    """

    edits: tuple[Edit, ...] = ()
    problems: tuple[str, ...] = ()
    found: bool = False


def parse_edits(text: str) -> ParsedEdits:
    """Read the edits out of a reply (`str`). Never raises."""
    text = _storable(final_text(text)).replace("\r\n", "\n")
    if (blocks := _read_blocks(text)).found:
        return blocks
    last: ParsedEdits | None = None
    for part in _FENCE.split(text):  # so that a block which is never closed cannot swallow the next one
        for values, mended in _values(escape_latex(part)):
            read = _read(values, part.rstrip() if mended else "")
            # The last block that has edits or is an empty list counts; a stray `[G3]` in the prose does not.
            if read.found or last is None:
                last = read
    return last or ParsedEdits(problems=("no_json",))


def final_text(text: str) -> str:
    """The reply of a thinking model without its thoughts: the text behind the last `</think>`."""
    return text.rpartition("</think>")[2].strip()


def principle_id(value: Any) -> str:
    """`3`, `G3`, `[G3]`, `A.G3` as `"G3"`, A being the set that is edited; another set's as `"B.G3"`, so that no edit
    can take it for its own; anything else unchanged, to be refused later."""
    match = _ID.match(str(value))
    if isinstance(value, bool) or match is None:
        return str(value).strip()
    name, letter = f"G{int(match[2])}", (match[1] or "A").upper()
    return name if letter == "A" else f"{letter}.{name}"


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
    if after[:1] in ("n", "r", "t") and (not _LATEX.fullmatch(after) or abbreviation):
        return match[0]
    return "\\" + match[0]


def _values(text: str) -> Iterator[tuple[list[Any], bool]]:
    """The JSON values of a text, in blocks, each with whether its last value had to be repaired. Values with only
    commas between them form one block (JSON lines)."""
    block: list[Any] = []
    end, mended = 0, False
    while (start := _JSON.search(text, end)) is not None:
        if block and text[end : start.start()].strip(" \t\r\n,"):
            yield block, False
            block = []
        try:
            value, end = _DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            value, end, mended = _repair(text[start.start() :]), len(text), True
        block.append(value)
    yield block, mended


def _repair(text: str) -> Any:
    """The value of a text that begins with broken JSON, as far as it can be repaired."""
    if len(text) > _REPAIR_LIMIT:
        return None
    double = {'"': '\\"', "\\'": "'"}
    quoted = lambda found: re.sub(r"\\.|\"", lambda one: double.get(one[0], one[0]), found[2])  # noqa: E731
    try:
        return json_repair.loads(_SINGLE_QUOTED.sub(lambda found: f'{found[1]}"{quoted(found)}"', text))
    except Exception:  # its parser gives up on absurd nesting in several ways; a bad reply is no reason to stop
        return None


def _read(values: list[Any], mended: str) -> ParsedEdits:
    """The edits among JSON values; of values that had to be mended, with the text they were mended from."""
    records = list(_records(values))
    if not records and not any(map(_is_empty_list, values)):
        return ParsedEdits(problems=("not_an_edit",) if values else ("no_json",))
    # Where a text is the end of it all, without its quotation mark, the reply ended inside of it.
    cut_off = bool(records) and mended.endswith(_text([*records[-1].values()][-1]).rstrip() or "\0")
    edits = [_edit(record) for record in (records[:-1] if cut_off else records)]
    problems = ["cut_off"] if cut_off else []
    problems += ["unknown_operation" for edit in edits if edit is None]
    return ParsedEdits(tuple(edit for edit in edits if edit is not None), tuple(problems), True)


def _records(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The edits among parsed JSON: dicts that name an operation (or search), in lists, wrapped, or grouped by it."""
    if isinstance(value, list) and depth <= 6:
        yield from (found for item in value for found in _records(item, depth + 1))
    elif isinstance(value, dict) and depth <= 6:
        record = {str(key).strip().casefold(): item for key, item in value.items()}
        if _field(record, "op") is not None or isinstance(_field(record, "search"), str):
            yield record
            return
        for key, item in record.items():
            yield from _grouped(key, item) if key in ("add", "modify", "merge", "remove") else _records(item, depth + 1)


def _grouped(op: str, value: Any) -> Iterator[dict[str, Any]]:
    """Edits grouped by operation: `{"add": ["..."], "modify": [{"id": "G1", "text": "..."}], "remove": ["G2"]}`."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            yield {"op": op, **{str(key).strip().casefold(): part for key, part in item.items()}}
        elif isinstance(item, (str, int)):
            yield {"op": op, "ids" if op == "remove" else "text": item}


def _field(record: dict[str, Any], field: str) -> Any:
    """The value of a field under any of its names."""
    return next((record[name] for name in _NAMES[field] if record.get(name) is not None), None)


def _is_empty_list(value: Any) -> bool:
    return value == [] or (isinstance(value, dict) and [] in value.values())


def _edit(record: dict[str, Any]) -> Edit | None:
    op = _OPERATIONS.get(_text(_field(record, "op") or "replace").strip().casefold())
    text, search, reason = (_text(_field(record, field)) for field in ("text", "search", "reason"))
    ids = _field(record, "ids")
    if isinstance(ids, str):
        ids = [part for part in re.split(r"[,;&+]|\band\b", ids.strip("[]() ")) if part.strip()]
    names = tuple(principle_id(name) for name in (ids if isinstance(ids, list) else [ids]) if name is not None)
    if op == "replace" and (search or not names):
        return Edit("replace", text=text, search=search, reason=reason)
    op = "modify" if op == "replace" else op  # "replace G3 by ..."
    return None if op is None else Edit(op, names, _OWN_MARK.sub("", text), reason=reason)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return "" if value is None else _storable(str(value))


def _storable(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can write (`\\ud800`) and no file or tokenizer can take."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_blocks(text: str) -> ParsedEdits:
    blocks = ((old.removesuffix("\n"), new.removesuffix("\n")) for old, new in _BLOCK.findall(text))
    edits = tuple(Edit("replace", text=new, search=old) for old, new in blocks)
    cut = len(re.findall(_SEARCH, text, re.MULTILINE)) > len(edits)
    return ParsedEdits(edits, ("cut_off",) if cut else (), bool(edits) or cut)
