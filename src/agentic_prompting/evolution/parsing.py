"""Reads edits out of the replies of LLMs.

Never raises: `problems` lists the parts that cannot be read. JSON is found (fenced or bare, with
prose around it; the last block counts), made safe for LaTeX and read; text that is not quite JSON
goes through `json-repair`. Search and replace blocks for free text are read line by line.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import json_repair

from ..llm import strip_thoughts
from ..llm.surrogates import replace_surrogates
from .system_prompt import Edit

# The names that LLMs give to the fields of an edit.
_FIELD_NAMES = {
    "op": ("op", "operation", "action", "option", "type", "edit"),
    "ids": (
        "ids",
        "id",
        "targets",
        "target",
        "principle_ids",
        "principle_id",
        "merged_from",
        "modified_from",
        "from",
        "remove_id",
        "remove_ids",
        "modify_id",
        "merge_ids",
    ),
    "text": (
        "text",
        "principle",
        "new_text",
        "content",
        "replace",
        "replacement",
        "new",
        "value",
        "merged",
        "to",
    ),
    "search": ("search", "find", "old"),
    "reason": ("reason", "evidence", "rationale", "why", "because", "justification"),
}
_OPERATIONS = {
    **dict.fromkeys(("add", "create", "new", "insert", "append"), "add"),
    **dict.fromkeys(
        ("modify", "edit", "update", "revise", "change", "refine", "rewrite"), "modify"
    ),
    **dict.fromkeys(("merge", "combine", "unify"), "merge"),
    **dict.fromkeys(("remove", "delete", "drop"), "remove"),
    **dict.fromkeys(("replace", "search_replace"), "replace"),
}
_BACKSLASH = re.compile(r"\\(\\|\"|/|u[0-9a-fA-F]{4}|[A-Za-z]+|.|$)", re.DOTALL)
# LaTeX commands that begin like a JSON escape for a line break, tab or carriage return. A backspace
# or form feed is never meant in a text, so \beta and \frac need no mention.
_LATEX = re.compile(
    r"n(u|e|eq|eg|i|ot|otin|abla|mid|exists|leq|geq|less|gtr|sim|cong|parallel|subseteq|warrow|earrow|ewcommand)"
    r"|t(o|an|anh|au|ag|op|heta|imes|ext[a-z]*|frac|binom|ilde|riangle[a-z]*|herefore)"
    r"|r(m|ho|oot|ef|ight[a-z]*|angle|floor|ceil|brace|brack|vert|times)"
)
_ID = re.compile(
    r"^[\[(\"'`#\s]*(?:([A-Z])\s*[.:/_-]\s*(?=G))?(?:G[ .:_-]*|principle\s+|)(\d{1,18})[\])\"'`.:\s]*$",
    re.IGNORECASE,
)
# Possessive repeats, because the text after a fence of tildes may begin with tildes.
_FENCE = re.compile(r"^[ \t]*+(?:`{3,}+|~{3,}+)[^\n`]*+$", re.MULTILINE)
_JSON = re.compile(r"\[(?=\s*+(?:[\[{\]\"']|//|/\*|#|$))|{(?=\s*+(?:[\"'}/#]|\w{1,40}\s*:|$))")
_SINGLE_QUOTED = re.compile(r"(?<=[\[{,:])(\s*)'((?:\\.|[^\\])*?)'(?=\s*[,:}\]])", re.DOTALL)
# Repairing takes quadratic time on some texts: half a second for so many characters, and seconds
# with thousands of brackets that are never closed.
_REPAIR_LIMIT = 5_000
_MAX_NEVER_CLOSED = 20
# Attempts to read a value across code fences, each of at most this length in characters.
_MAX_ATTEMPTS = 20
_MAX_VALUE_LENGTH = 100_000
_DECODER = json.JSONDecoder(strict=False)
_PRINCIPLE_MARK = re.compile(r"^\s*(?:\[(?:[A-Z]\.)?G\d+\][.:]?|(?:[A-Z]\.)?G\d+[.:])\s*")
# The lines of a search and replace block.
_SEARCH = re.compile(r"[ \t]*<{5,9}[ \t]*SEARCH[ \t]*")
_DIVIDER = re.compile(r"[ \t]*={5,9}[ \t]*")
_REPLACE = re.compile(r"[ \t]*>{5,9}[ \t]*REPLACE")
# The beginning of edits: tags of thoughts after it belong to their texts.
_PAYLOAD = re.compile(rf"{_JSON.pattern}|^{_SEARCH.pattern}$", re.MULTILINE)


@dataclass(frozen=True)
class ParsedEdits:
    """The edits of one reply.

    Args:
        edits (`tuple[Edit, ...]`): The edits that could be read, in order; they are not checked
            against a prompt yet.
        problems (`tuple[str, ...]`): One label for each part that could not: `no_json`,
            `not_an_edit`, `unknown_operation`, `cut_off` (the reply ended inside the last edit,
            which is left out).
        has_block (`bool`): Whether there was a block of edits at all. An empty list is one: nothing
            is to be changed.
    """

    edits: tuple[Edit, ...] = ()
    problems: tuple[str, ...] = ()
    has_block: bool = False


def parse_edits(text: str) -> ParsedEdits:
    """Read the edits out of a reply (`str`). Never raises."""
    try:
        return _parse(text)
    except RecursionError:  # JSON may be nested almost as deeply as Python can follow
        return ParsedEdits(problems=("no_json",))


def _parse(text: str) -> ParsedEdits:
    text = replace_surrogates(final_text(text)).replace("\r\n", "\n")
    blocks = _read_blocks(text)
    if blocks.has_block:
        return blocks

    # The last block that has edits or is an empty list counts; a stray `[G3]` in the prose does
    # not.
    last: ParsedEdits | None = None
    for values, repaired_text in _find_values(text):
        parsed = _read_values(values, repaired_text)
        if parsed.has_block or last is None:
            last = parsed
    if last is not None and last.edits:
        return last

    # Perhaps the text of an edit has a code block in it, and the JSON seemed to end at its fence.
    for values, repaired_text in _repair_across_fences(text):
        parsed = _read_values(values, repaired_text)
        if parsed.edits:
            return parsed
    return last or ParsedEdits(problems=("no_json",))


def final_text(text: str) -> str:
    """Return a thinking model's reply without thoughts; empty if it was cut off inside of one."""
    return strip_thoughts(text, payload=_PAYLOAD)


def principle_id(value: object) -> str:
    """Return the id of a principle in its one form.

    `3`, `G3`, `[G3]`, `A.G3` become `"G3"`, A being the set that is edited. An id of another set
    becomes `"B.G3"`, so no edit confuses the two; anything else stays, to be refused later.
    """
    match = _ID.match(str(value))
    if isinstance(value, bool) or match is None:
        return str(value).strip()
    # Only the ids of other sets than A keep their letter.
    letter = (match[1] or "A").upper()
    prefix = "" if letter == "A" else f"{letter}."
    return f"{prefix}G{int(match[2])}"


def escape_latex(text: str) -> str:
    """Return JSON text in which LaTeX's single backslashes are doubled.

    These are `\\frac`, `\\nu`, `\\(`, but not `\\n`.

    A backslash in front of b, f or of a known command that begins with n, r or t is LaTeX;
    otherwise `\\n`, `\\r` and `\\t` are the control characters, `\\u` with four hex digits a
    character, and anything else LaTeX again.
    """
    return _BACKSLASH.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    after = match[1]
    if after in ("\\", '"', "/", "'") or re.fullmatch(r"u[0-9a-fA-F]{4}", after):
        return match[0]
    if after[:1] in ("n", "r", "t"):
        # A new line may begin with "e.g." or "i.e.".
        is_abbreviation = match.string.startswith((".g.", ".e."), match.end())
        if is_abbreviation or not _LATEX.fullmatch(after):
            return match[0]
    return "\\" + match[0]


def _find_values(text: str) -> Iterator[tuple[list[Any], str]]:
    """Yield the JSON values of a text, in blocks.

    Values with only commas between them form one block (JSON lines).

    A value that cannot be read ends at the next code fence, so that a block which is never closed
    cannot swallow the next one, and is repaired.

    Yields:
        `tuple[list, str]`: The values of a block, and the text that its last value was repaired
        from, if it was.
    """
    reader = _ValueReader(text)
    block: list[Any] = []
    end = 0
    while (match := _JSON.search(reader.escaped, end)) is not None:
        start = match.start()
        # Text between two values ends the block.
        if block and reader.escaped[end:start].strip(" \t\r\n,"):
            yield block, ""
            block = []
        try:
            value, end = reader.read(start)
            block.append(value)
        except (ValueError, RecursionError):
            value, repaired_text = reader.repair(start)
            yield [*block, value], repaired_text
            block = []
            end = reader.part_end
    yield block, ""


class _ValueReader:
    """Reads JSON values in a text with code fences.

    Attributes:
        escaped (`str`): The text with LaTeX escaped, to which all positions belong.
    """

    def __init__(self, text: str):
        self.escaped = escape_latex(text)
        self._text = text
        # Escaping changes no fence: the n-th one in either text is the same.
        self._fences = _fence_positions(text)
        self._escaped_fences = _fence_positions(self.escaped)
        # The part between two fences that was read last. It is cut out once for all of its values.
        self._part = -1
        self._part_text = ""
        self._attempts = 0  # to read a value across fences

    def read(self, start: int) -> tuple[Any, int]:
        """Return the value that begins at a position, and its end.

        Raises:
            `ValueError` or `RecursionError`: It cannot be read.
        """
        self._go_to_part(start)
        part_start = self._escaped_fences[self._part]
        try:
            value, length = _DECODER.raw_decode(self._part_text, start - part_start)
            return value, part_start + length
        except json.JSONDecodeError as error:
            # The fence may stand in the text of an edit. A few attempts of limited length take
            # constant time.
            if not error.msg.startswith("Unterminated string") or self._attempts == _MAX_ATTEMPTS:
                raise
        self._attempts += 1
        value, length = _DECODER.raw_decode(self.escaped[start : start + _MAX_VALUE_LENGTH])
        return value, start + length

    def repair(self, start: int) -> tuple[Any, str]:
        """Return the value from a position to the next fence, and the text between the fences."""
        self._go_to_part(start)
        part_text = self._text[self._fences[self._part] : self._fences[self._part + 1]]
        return _repair(self.escaped[start : self.part_end]), part_text.rstrip()

    @property
    def part_end(self) -> int:
        """The fence after the value that was read last."""
        return self._escaped_fences[self._part + 1]

    def _go_to_part(self, position: int) -> None:
        if self._part >= 0 and position < self.part_end:
            return
        self._part = bisect_right(self._escaped_fences, position) - 1
        self._part_text = self.escaped[self._escaped_fences[self._part] : self.part_end]


def _fence_positions(text: str) -> list[int]:
    """The start and the end of a text, and between them its code fences."""
    return [0, *(match.start() for match in _FENCE.finditer(text)), len(text)]


def _repair_across_fences(text: str) -> Iterator[tuple[list[Any], str]]:
    """Yield the first value of a text with fences, repaired up to the last fence and to the end."""
    # Only a value that begins in front of a fence can go across it.
    fences = [match.start() for match in _FENCE.finditer(text)]
    match = _JSON.search(text)
    if match is None or not fences or fences[-1] < match.start():
        return
    for end in (fences[-1], len(text)):
        value_text = text[match.start() : end].rstrip()
        if len(value_text) <= _REPAIR_LIMIT:
            yield [_repair(escape_latex(value_text))], value_text


def _repair(text: str) -> Any:
    """Return the value of a text that begins with broken JSON, as far as it can be repaired."""
    never_closed = max(text.count("[") - text.count("]"), text.count("{") - text.count("}"))
    if len(text) > _REPAIR_LIMIT or never_closed > _MAX_NEVER_CLOSED:
        return None
    try:
        return json_repair.loads(_SINGLE_QUOTED.sub(_double_quote, text))
    except Exception:  # its parser gives up on absurd nesting in several ways
        return None


def _double_quote(match: re.Match[str]) -> str:
    """Return a text in single quotes in double quotes."""
    replacements = {'"': '\\"', "\\'": "'"}
    content = re.sub(r"\\.|\"", lambda escape: replacements.get(escape[0], escape[0]), match[2])
    return f'{match[1]}"{content}"'


def _read_values(values: list[Any], repaired_text: str) -> ParsedEdits:
    """Return the edits among JSON values.

    Args:
        values (`list`): A block of values.
        repaired_text (`str`): The text that the last value was repaired from, if it was.
    """
    records = list(_find_records(values))
    if not records and not any(map(_is_empty_list, values)):
        return ParsedEdits(problems=("not_an_edit",) if values else ("no_json",))

    # An empty list says that nothing is to be changed only if the reply has closed it.
    is_open = repaired_text.count("[") > repaired_text.count("]")
    if not records and is_open and _is_empty_list(values[-1]):
        return ParsedEdits(problems=("cut_off",))

    # If the last text ends the reply, without its quotation mark, the reply was cut off inside it.
    problems = []
    if records and repaired_text:
        *_, last_value = records[-1].values()
        last_text = _text_of(last_value).rstrip()
        if last_text and repaired_text.endswith(last_text):
            problems.append("cut_off")
            records.pop()

    edits = []
    for record in records:
        edit = _read_edit(record)
        if edit is None:
            problems.append("unknown_operation")
        else:
            edits.append(edit)
    return ParsedEdits(tuple(edits), tuple(problems), has_block=True)


def _find_records(value: object, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the edits among parsed JSON.

    They are dicts that name an operation (or search), in lists, wrapped, or grouped by it.
    """
    if depth > 6:
        return
    if isinstance(value, list):
        for item in value:
            yield from _find_records(item, depth + 1)
    elif isinstance(value, dict):
        # A dict that names an operation is an edit.
        record = {str(key).strip().casefold(): item for key, item in value.items()}
        has_operation = _read_field(record, "op") is not None
        if has_operation or isinstance(_read_field(record, "search"), str):
            yield record
            return

        # Others may group edits by operation, or wrap a list of them.
        for key, item in record.items():
            if key in ("add", "modify", "merge", "remove"):
                yield from _read_group(key, item)
            else:
                yield from _find_records(item, depth + 1)


def _read_group(op: str, value: object) -> Iterator[dict[str, Any]]:
    """Yield edits grouped by operation: `{"add": ["..."], "modify": [{...}], "remove": ["G2"]}`."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            yield {"op": op, **{str(key).strip().casefold(): part for key, part in item.items()}}
        elif isinstance(item, (str, int)):
            # A plain value is the id to remove, or the new text.
            yield {"op": op, "ids" if op == "remove" else "text": item}


def _read_field(record: dict[str, Any], field: str) -> Any:
    """Return the value of a field under any of its names."""
    for name in _FIELD_NAMES[field]:
        if record.get(name) is not None:
            return record[name]
    return None


def _is_empty_list(value: object) -> bool:
    return value == [] or (isinstance(value, dict) and [] in value.values())


def _read_edit(record: dict[str, Any]) -> Edit | None:
    """Return the edit of a record; `None` if its operation is unknown."""
    op = _OPERATIONS.get(_text_of(_read_field(record, "op") or "replace").strip().casefold())
    text = _text_of(_read_field(record, "text"))
    search = _text_of(_read_field(record, "search"))
    reason = _text_of(_read_field(record, "reason"))

    # Ids are a list, one id, or several in one text.
    values = _read_field(record, "ids")
    if isinstance(values, str):
        parts = re.split(r"[,;&+]|\band\b", values.strip("[]() "))
        values = [part for part in parts if part.strip()]
    elif not isinstance(values, list):
        values = [values]
    ids = tuple(principle_id(value) for value in values if value is not None)

    if op == "replace":
        if search or not ids:
            return Edit("replace", text=text, search=search, reason=reason)
        op = "modify"  # "replace G3 by ..."
    if op is None:
        return None
    return Edit(op, ids, _PRINCIPLE_MARK.sub("", text), reason=reason)


def _text_of(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_text_of, value))
    return "" if value is None else replace_surrogates(str(value))


def _read_blocks(text: str) -> ParsedEdits:
    """Return the edits in search and replace blocks, line by line."""
    edits: list[Edit] = []
    opened = 0
    # The lines of the block's two parts; `None` outside.
    search: list[str] | None = None
    replacement: list[str] | None = None
    for line in text.split("\n"):
        if search is None:
            if _SEARCH.fullmatch(line):
                opened += 1
                search = []
        elif replacement is None:
            if _DIVIDER.fullmatch(line):
                replacement = []
            else:
                search.append(line)
        elif _REPLACE.match(line):
            edits.append(Edit("replace", text="\n".join(replacement), search="\n".join(search)))
            search = replacement = None
        else:
            replacement.append(line)
    is_cut_off = opened > len(edits)
    return ParsedEdits(tuple(edits), ("cut_off",) if is_cut_off else (), opened > 0)
