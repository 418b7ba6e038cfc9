"""From what an LLM really sends to edits. Never raises: what cannot be read is said in `problems`.

JSON is found (fenced or bare, prose around it, the last block counts), made safe for LaTeX, and read strictly; what is
then not JSON (comments, trailing commas, single quotes, a missing bracket) goes through `json-repair`. Search and
replace blocks for free text are read as they stand: there is nothing to escape in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import json_repair
from pydantic import AliasChoices, BaseModel, Field, ValidationError, field_validator, model_validator

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
_KEYS = ("add", "modify", "merge", "remove")
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
_SKIPPED = r"(?>\s|//[^\n]*|\#[^\n]*|/\*.*?(?:\*/|\Z))*+"  # white space and comments
_JSON = re.compile(rf"\[{_SKIPPED}(?=[\[{{\]\"']|$)|{{{_SKIPPED}(?=[\"'}}]|\w{{1,40}}\s*:|$)", re.DOTALL)
_SINGLE_QUOTED = re.compile(r"(?<=[\[{,:])(\s*)'((?:\\.|[^\\])*?)'(?=\s*[,:}\]])", re.DOTALL)
_REPAIR_LIMIT = 10_000  # characters; repairing takes quadratic time on some texts, and no edit is this long
_DECODER = json.JSONDecoder(strict=False)
_OWN_MARK = re.compile(r"^\s*(?:\[(?:[A-Z]\.)?G\d+\][.:]?|(?:[A-Z]\.)?G\d+[.:])\s*")
_BLOCK = re.compile(
    r"^[ \t]*<{5,9}[ \t]*SEARCH[ \t]*\n(.*?)^[ \t]*={5,9}[ \t]*\n(.*?)^[ \t]*>{5,9}[ \t]*REPLACE",
    re.DOTALL | re.MULTILINE,
)


class ProposedEdit(BaseModel):
    """An edit as an LLM writes it, under any of the names that are met for its fields."""

    op: Literal["add", "modify", "merge", "remove", "replace"] = Field(validation_alias=AliasChoices(*_NAMES["op"]))
    ids: list[str] = Field([], validation_alias=AliasChoices(*_NAMES["ids"]))
    text: str = Field("", validation_alias=AliasChoices(*_NAMES["text"]))
    search: str = Field("", validation_alias=AliasChoices(*_NAMES["search"]))
    reason: str = Field("", validation_alias=AliasChoices(*_NAMES["reason"]))

    @model_validator(mode="before")
    @classmethod
    def _said(cls, record: dict[str, Any]) -> dict[str, Any]:
        said = {name: value for name, value in record.items() if value is not None}
        return said if _has(said, "op") else {**said, "op": "replace"}

    @field_validator("op", mode="before")
    @classmethod
    def _operation(cls, value: Any) -> Any:
        return _OPERATIONS.get(_text(value).strip().casefold(), value)

    @field_validator("ids", mode="before")
    @classmethod
    def _several(cls, value: Any) -> list[str]:
        if isinstance(value, str):
            value = [part for part in re.split(r"[,;&+]|\band\b", value.strip("[]() ")) if part.strip()]
        return [str(item) for item in (value if isinstance(value, list) else [value])]

    @field_validator("text", "search", "reason", mode="before")
    @classmethod
    def _words(cls, value: Any) -> str:
        return _text(value)


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
        for values, unclosed in _values(escape_latex(part)):
            read = _read(values, unclosed, own_set)
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
    if after[:1] in ("n", "r", "t") and (not _LATEX.fullmatch(after) or abbreviation):
        return match[0]
    return "\\" + match[0]


def _values(text: str) -> Iterator[tuple[list[Any], str]]:
    """What JSON a text holds, in blocks (neighbours with nothing but commas between them are one: JSON lines), each
    with the text that it was mended from if a string in it was never closed."""
    block: list[Any] = []
    end = 0
    while (start := _JSON.search(text, end)) is not None:
        if block and text[end : start.start()].strip(" \t\r\n,"):
            yield block, ""
            block = []
        try:
            value, end = _DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            repaired, unclosed = _repair(text[start.start() :])
            yield [*block, *repaired], unclosed
            return
        block.append(value)
    if block:
        yield block, ""


def _repair(text: str) -> tuple[list[Any], str]:
    """What can be made of text that begins with broken JSON, and the text if a string in it was never closed."""
    if len(text) > _REPAIR_LIMIT:
        return [], ""
    text = _SINGLE_QUOTED.sub(lambda match: match[1] + _double_quoted(match[2]), text)
    try:
        mended: Any = json_repair.loads(text, logging=True)
    except Exception:  # its parser gives up on absurd nesting in several ways; a bad reply is no reason to stop
        return [], ""
    value, log = mended
    return [value], text if any("missed the closing quote" in one["text"] for one in log) else ""


def _double_quoted(inside: str) -> str:
    """A single-quoted string's inside as JSON has it."""
    return '"' + re.sub(r"\\.|\"", lambda found: {'"': '\\"', "\\'": "'"}.get(found[0], found[0]), inside) + '"'


def _read(values: list[Any], unclosed: str, own_set: str) -> ParsedEdits:
    records = list(_records(values))
    if not records and not any(map(_is_empty_list, values)):
        return ParsedEdits(problems=("not_an_edit",))
    # A string that runs to the end of the reply: the reply ended inside of it.
    cut_off = bool(unclosed and records) and unclosed.rstrip().endswith(_text([*records[-1].values()][-1]).rstrip())
    problems = ["cut_off"] if cut_off else []
    edits = [_edit(record, own_set) for record in (records[:-1] if cut_off else records)]
    problems += ["unknown_operation" for edit in edits if edit is None]
    return ParsedEdits(tuple(edit for edit in edits if edit is not None), tuple(problems), True)


def _records(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The edits among parsed JSON: dicts that name an operation (or search), in lists, wrapped, or grouped by it."""
    if depth > 6:
        return
    if isinstance(value, dict):
        record = {str(key).strip().casefold(): item for key, item in value.items()}
        if _has(record, "op") or any(isinstance(record.get(name), str) for name in _NAMES["search"]):
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


def _has(record: dict[str, Any], field: str) -> bool:
    return any(record.get(name) is not None for name in _NAMES[field])


def _is_empty_list(value: Any) -> bool:
    return value == [] or (isinstance(value, dict) and len(value) == 1 and next(iter(value.values())) == [])


def _edit(record: dict[str, Any], own_set: str) -> Edit | None:
    try:
        said = ProposedEdit.model_validate(record)
    except ValidationError:
        return None
    ids = tuple(principle_id(name, own_set) for name in said.ids)
    if said.op == "replace" and (said.search or not ids):
        return Edit("replace", text=said.text, search=said.search, reason=said.reason)
    op = "modify" if said.op == "replace" else said.op  # "replace G3 by ..."
    return Edit(op, ids, _OWN_MARK.sub("", said.text), reason=said.reason)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return _storable(value) if isinstance(value, str) else str(value)


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
