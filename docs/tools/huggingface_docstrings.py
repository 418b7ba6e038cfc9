"""Docstrings in the Hugging Face format, for griffe, which reads Google's.

Used by `mkdocs.yml`, not by the package.

A setting of a dataclass, `_setting(5, "...")`, is shown as its value, 5.

The two formats differ in three places: types stand in backticks with `*optional*, defaults to ...`
behind them (griffe takes the default from the signature), errors and results too, and objects are
named as [`Name`].
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROOMS = (
    *("llm", "rollout", "environments", "rewards", "evolution", "refine", "data", "evaluation"),
    *("local", "trainers", "agent", "report", "serve"),
)

HIDDEN = {"__getstate__", "__setstate__", "__reduce__", "__del__"}
"""What Python calls and no reader does."""

# "a (`int`): ..." or "a (`int`), b (`str`): ..."
_ITEMS = re.compile(r"( +)(\w+ \(.+\))(?:, \*optional\*)?:(.*)")
_OUTCOME = re.compile(r"^( +)((?:\[?`[^`]+`\]?(?:, | or )?)+):")
_NAMED = re.compile(r"\[`~?([\w.]+)`\](?!\[|\()")


class HuggingFaceDocstrings(griffe.Extension):
    """Rewrites each docstring when the package is loaded, and links [`Name`] to its place in the
    reference.
    """

    def __init__(self) -> None:
        self.pages: dict[str, str] = {}

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self.pages = _public_names(pkg)
        _rewrite(pkg, self.pages)


def _public_names(package: griffe.Module) -> dict[str, str]:
    """For each public name the path under which its reference page shows it."""
    paths = {}
    for room in ROOMS:
        module = package[room]
        names = [str(name) for name in module.exports or ()] or [
            name for name, member in module.members.items() if isinstance(member, griffe.Class)
        ]
        paths.update({name: f"{module.path}.{name}" for name in names})
        # A function named like its file (`evolve`): the page shows it under the file's path.
        paths.update(
            {
                n: f"{module.path}.{n}.{n}"
                for n in names
                if isinstance(module.members[n], griffe.Module)
            }
        )
    return paths


def _rewrite(thing: griffe.Object, pages: dict[str, str]) -> None:
    for name in HIDDEN & thing.members.keys():
        thing.del_member(name)
    if thing.docstring is not None:
        thing.docstring.value = google(thing.docstring.value, pages)
    if isinstance(thing, griffe.Attribute):
        thing.value = _value(thing.value)
    for parameter in thing.parameters if isinstance(thing, griffe.Function) else ():
        parameter.default = _value(parameter.default)
    for member in thing.members.values():
        if isinstance(member, griffe.Object):
            _rewrite(member, pages)


def _value(default: Any) -> Any:
    """The value in a call of `_setting` or `setting`; any other default as it is."""
    if isinstance(default, griffe.ExprCall) and str(default.function).endswith("setting"):
        return default.arguments[0]
    return default


def google(text: str, pages: dict[str, str]) -> str:
    """`text` in Google's format, its links resolved by `pages`.

    Args:
        text (`str`): A docstring.
        pages (`dict[str, str]`): Public name -> path.
    """
    lines = []
    section = ""
    for line in text.split("\n"):
        heading = re.fullmatch(r"(\w+):", line)
        if heading:
            section = heading[1]
        elif line and not line.startswith(" "):
            section = ""
        lines.append(_in_google_format(line, section))
    return _NAMED.sub(lambda name: _link(name[1], pages), "\n".join(lines))


def _in_google_format(line: str, section: str) -> str:
    """A line of a section; the text outside of the sections and their headings stay as they are."""
    if section in ("Args", "Attributes"):
        return "\n".join(_items(line))
    if section in ("Raises", "Returns", "Yields"):
        return _OUTCOME.sub(lambda item: f"{item[1]}{_type(item[2])}:", line)
    return line


def _items(line: str) -> list[str]:
    """The parameters that a line begins to describe, one line each; any other line as it is."""
    found = _ITEMS.fullmatch(line)
    if not found:
        return [line]
    indent, named, description = found.groups()
    pairs = [part.split(" (", 1) for part in re.split(r"(?<=\)), (?=\w+ \()", named)]
    return [f"{indent}{name} ({_type(kind[:-1])}):{description}" for name, kind in pairs]


def _type(text: str) -> str:
    """ "`str` or [`Message`], *optional*, defaults to `x`" -> "str | Message"."""
    text = re.sub(r",? ?\*optional\*.*$", "", text)
    return (
        re.sub(r", (?=\[?`)| or ", " | ", text)
        .replace("[`", "")
        .replace("`]", "")
        .replace("`", "")
        .replace("~", "")
    )


def _link(name: str, pages: dict[str, str]) -> str:
    first, _, rest = name.partition(".")
    path = pages.get(first)
    return f"[`{name}`][{path}{'.' + rest if rest else ''}]" if path else f"`{name}`"
