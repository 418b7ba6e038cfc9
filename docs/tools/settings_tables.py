"""A hook of `mkdocs.yml` that replaces `<!-- settings: module:Class -->` by a table of the
dataclass's settings.

A table has only the class's own fields; fields of a base class of ours are in that class's table.
The hook also removes the backslash of `\\|` in code within tables, which GitHub needs and the site
would show.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from inspect import cleandoc, get_annotations
from typing import Any, Literal, get_args, get_origin, get_type_hints

DIRECTIVE = re.compile(r"<!-- settings: ([\w.]+):(\w+) -->")
_ARGUMENT = re.compile(r"^    (\w+) \(.*?\):\s+(.+?)(?=^    \w|^\w|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(`[^`]+`)\]")
_TABLE_LINE = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page."""
    text = DIRECTIVE.sub(lambda found: table(getattr(import_module(found[1]), found[2])), markdown)
    return _TABLE_LINE.sub(lambda line: _CODE.sub(_without_backslash, line[0]), text)


def _without_backslash(code: re.Match[str]) -> str:
    return code[0].replace(chr(92) + "|", "|")


def table(settings: type) -> str:
    """A dataclass's own fields: name, type, default, and the text of its docstring, or else of its
    help.

    Raises:
        `KeyError`: A field is described in neither.
    """
    said = {
        name: " ".join(text.split())
        for name, text in _ARGUMENT.findall(cleandoc(settings.__doc__ or ""))
    }
    declared = {one.name: one for one in fields(settings)}
    hints = get_type_hints(settings)
    lines = ["| setting | type | default | |", "|---|---|---|---|"]
    for name in get_annotations(settings):
        one = declared[name]
        what = _LINK.sub(r"\1", said.get(name) or one.metadata["help"])
        literal = get_origin(hints[name]) is Literal
        kind = " | ".join(map(repr, get_args(hints[name]))) if literal else one.type
        cells = (f"`{name}`", f"`{kind}`", f"`{_default(one)}`", what)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _default(one: Field[Any]) -> str:
    value = one.default if one.default_factory is MISSING else one.default_factory()
    if is_dataclass(value):
        return f"{type(value).__name__}()"
    if value is MISSING:
        return "required"
    return repr(value) if isinstance(value, str) else str(value)
