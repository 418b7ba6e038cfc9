"""Digests of what a stored result depends on besides its settings: a user's code, and weights.

Names do not change when a file is edited or a model is trained again, so results keep a digest of
the content beside the name. A result without one, of an older version, is not compared.
"""

from __future__ import annotations

import ast
import inspect
import json
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

from .records import atomic_write, digest

_INPUTS_FILE = "made_from.json"
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
# The package, and the tables of the papers that are installed beside it.
_LIBRARY = ("agentic_prompting", "paper_tables")


def code_version(part: Any) -> str | None:
    """Return a digest of a user's function, class or object; `None` if its code is not the user's.

    The whole file counts, because a function may call others in it, and so do the files beside it
    that it imports. In a script or a notebook only the function or class itself counts: the rest of
    it often changes from run to run. Comments and formatting do not count.

    Args:
        part (`object`): A function, a class, or an object, which stands for its class.
    """
    definition = _find_definition(part)
    module_name = getattr(definition, "__module__", None) or ""
    # This library has a version of its own.
    if module_name.partition(".")[0] in _LIBRARY:
        return None
    try:
        file = Path(inspect.getfile(definition))
        if module_name == "__main__" or not file.is_file():
            return _text_version(dedent(inspect.getsource(definition)))
    except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
        # A notebook may have lost the cell, a function written in C has no source, and the file
        # may hold something else by now, or never was Python.
        return None
    return None if _is_installed(file) else file_version(file)


def file_version(file: Path) -> str | None:
    """Return a digest of a source file, without its comments and formatting; `None` if it is gone.

    The files beside it that it imports count as well, and those that they import.
    """
    texts: dict[Path, str] = {}
    remaining_files = [file]
    while remaining_files:
        next_file = remaining_files.pop()
        if next_file in texts:
            continue
        try:
            texts[next_file] = next_file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            if next_file == file:
                return None
            continue
        remaining_files += _imported_files(next_file, texts[next_file])
    versions = {str(path.name): _text_version(text) for path, text in texts.items()}
    # A file that imports none beside it has the digest of its text alone.
    return versions[file.name] if len(versions) == 1 else digest(versions)


def weights_version(folder: str | Path, extra_files: Iterable[str] = ()) -> list[list[object]]:
    """Return name, size and time of each weight file of a folder; an empty list if there is none.

    Weights are not read, because that would take long.

    Args:
        folder (`str` or `Path`): The folder of a model, or the name of one on the Hub.
        extra_files (`Iterable[str]`, *optional*): Names of other files that count.
    """
    states: list[list[object]] = []
    for pattern in (*_WEIGHT_PATTERNS, *extra_files):
        for file in sorted(Path(folder).glob(pattern)):
            state = file.stat()
            states.append([file.name, state.st_size, state.st_mtime_ns])
    return states


def row_version(row: Mapping[str, Any], columns: Iterable[str]) -> str:
    """Return a digest of some columns of a row.

    In the `meta` of [`load_task`] only the user's own columns count, not where the row is from.

    Args:
        row (`Mapping[str, Any]`): The row.
        columns (`Iterable[str]`): The names of the columns. Those that the row lacks do not count.
    """
    values = {}
    for name in columns:
        value = row.get(name)
        if name == "meta":
            value = _named_columns(value)
        # What JSON cannot hold, such as an image, has no text that stays the same.
        if value is not None and _is_json(value):
            values[name] = value
    return digest(values)


def write_inputs(folder: str | Path, inputs: Mapping[str, Any]) -> None:
    """Record what a folder is made from, for [`check_inputs`]."""
    digests = {name: digest(value) for name, value in inputs.items()}
    atomic_write(Path(folder) / _INPUTS_FILE, json.dumps(digests, indent=1) + "\n")


def check_inputs(folder: str | Path, inputs: Mapping[str, Any]) -> None:
    """Check that a folder that is to be used again was made from these inputs.

    A folder of an older version, which does not say, is taken as it is.

    Args:
        folder (`str` or `Path`): The folder.
        inputs (`Mapping[str, Any]`): As for [`write_inputs`], by names for the error.

    Raises:
        `ValueError`: Some of them differ. Names them.
    """
    path = Path(folder) / _INPUTS_FILE
    if not path.is_file():
        return
    saved = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name in inputs if saved.get(name, "") != digest(inputs[name])]
    if changed:
        raise ValueError(
            f"{folder} was made from other inputs ({', '.join(changed)}), and is not used again: "
            "choose another output folder, delete it to have it made anew, or undo the change"
        )


def combine_versions(versions: Iterable[object]) -> str | None:
    """Return one digest of several versions; `None` if all of them are empty."""
    known = list(versions)
    return digest(known) if any(known) else None


def _find_definition(part: Any) -> Any:
    """Return the function or class that defines a part: that within a wrapper, or its class."""
    while isinstance(part, partial):
        part = part.func
    if callable(part):
        part = inspect.unwrap(part)
    part = getattr(part, "__func__", part)
    is_definition = inspect.isclass(part) or inspect.isroutine(part)
    return part if is_definition else type(part)


def _is_installed(file: Path) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    is_package = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    return is_package or file.is_relative_to(sysconfig.get_path("stdlib"))


def _imported_files(file: Path, text: str) -> list[Path]:
    """Return the modules in the folder of a Python file that it imports anywhere in it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []  # not Python
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            # `from . import helper`
            names |= {alias.name for alias in node.names if node.level}
    paths = [file.with_name(f"{name.partition('.')[0]}.py") for name in sorted(names) if name]
    return [path for path in paths if path.is_file()]


def _named_columns(meta: object) -> object:
    """Return the columns in `meta` that the user has named."""
    if isinstance(meta, str):
        with suppress(ValueError):
            meta = json.loads(meta)
    if not isinstance(meta, Mapping):
        return meta
    columns = {name: meta[name] for name in meta if name not in ("row", "source", "sample")}
    return columns or None


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _text_version(text: str) -> str:
    # Python code without comments and formatting; anything else as it is.
    with suppress(SyntaxError, ValueError, RecursionError):
        text = ast.unparse(ast.parse(text))
    return digest(text)
