"""Where the files of `examples/` and `benchmarks/` are: in the package, in a clone, or beside an
installed wheel.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

EXAMPLES = Path(__file__).parent / "examples"
"""Configurations of training: those of the repository's `examples/`, which no wheel has."""

CLONE = Path(__file__).parents[3]
"""The clone that the package is installed from, if it is (`pip install -e`)."""


def find_example(file: Path | None) -> Path | None:
    """The file; outside of a clone `examples/...` is the one that came with the package."""
    if file is None or file.is_file():
        return file
    # The copy inside the package comes first.
    for root in (EXAMPLES.parent, CLONE, find_shared_folder()):
        if root is not None and (root / file).is_file():
            return root / file
    return file


def find_shared_folder() -> Path | None:
    """The folder in which a wheel installs tables and their configurations, laid out as in a clone."""
    try:
        installed = files("agentic-prompting") or ()
    except PackageNotFoundError:
        return None
    # The shared folder is the one that holds `benchmarks/`.
    for file in installed:
        if file.match("benchmarks/paper_tables/__init__.py"):
            return Path(str(file.locate())).resolve().parents[2]
    return None
