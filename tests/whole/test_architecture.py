"""The house holds: every room imports only from rooms above it, and what is above the torch line
needs no torch.

The order is that of docs/architecture.md, as data. Imports are read from the source, so one inside
a function counts as well. Those under `TYPE_CHECKING` count too, except above the torch line, where
types of torch may be named.
"""

import ast
import subprocess
import sys

import pytest

from support.rooms import (
    ABOVE_THE_TORCH_LINE,
    HEAVY,
    MODULES,
    PACKAGE,
    ROOMS,
    SOURCE,
    circles,
    dotted,
    imported_files,
    imports,
    imports_of,
    room,
)


def test_the_reading_of_imports():
    source = (
        "from __future__ import annotations\nimport a.b, c\nfrom ..llm import Reply\nfrom .. import rollout\n"
        "from . import other\nif TYPE_CHECKING:\n    import torch\nelse:\n    import d\ndef f():\n    from e import g\n"
    )
    expected = [
        "__future__.annotations",
        "a.b",
        "c",
        "p.llm.Reply",
        "p.rollout",
        "p.refine.other",
        "d",
        "e.g",
    ]
    assert list(imports(source, "p.refine")) == expected
    assert list(imports(source, "p.refine", types=True)) == [*expected[:6], "torch", *expected[6:]]


def test_there_is_a_house():
    assert MODULES


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_come_from_above(path):
    assert room(path) in ROOMS, (
        f"{path.name} is in no room of the house; give it one here and in docs/architecture.md"
    )
    own = ROOMS.index(room(path))
    for name in imports_of(path, types=True):
        if name.split(".")[0] != PACKAGE:
            continue
        target = [*name.split("."), ""][1]
        assert target in ROOMS, (
            f"{dotted(path)} imports {name}: import from the room, not from the package's front "
            "door"
        )
        assert ROOMS.index(target) <= own, f"{dotted(path)} imports {name}, which lies below it"


def test_circles_are_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e", "a"}}
    assert circles(arrows) == [["a", "b", "c"], ["e", "f"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_no_files_import_each_other_in_a_circle():
    """Within a room and between rooms, imports for types and inside functions too."""
    assert circles({dotted(path): imported_files(path) for path in MODULES}) == []


def test_only_trainers_import_a_trainer():
    """The parts of a trainer know none: in `trainers/` only the classes that inherit from a trainer
    import one, and the room's front door. A trainer class is one that inherits from TRL's trainer,
    directly or not.
    """
    classes: dict[str, str] = {}
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in MODULES
        if room(path) == "trainers"
    }
    defined = [
        (path, node)
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    known = {"GRPOTrainer"}
    for _ in defined:  # a base may be defined in a file that is read later
        for path, node in defined:
            if known & {ast.unparse(base).split("[")[0] for base in node.bases}:
                known.add(node.name)
                classes[node.name] = path.stem
    trainer_files = set(classes.values())
    assert "grpo" in trainer_files
    for path in trees:
        if path.stem in {*trainer_files, "__init__"}:
            continue
        taken = {name.rpartition(".")[2] for name in imports_of(path, types=True)}
        assert not taken & set(classes), f"{dotted(path)} imports a trainer class"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if room(path) in ABOVE_THE_TORCH_LINE], ids=dotted
)
def test_no_torch_above_the_line(path):
    assert not HEAVY & {name.split(".")[0] for name in imports_of(path)}


def test_only_the_trainers_and_their_programs_import_trl():
    """The programs take TRL's parser and model arguments, which are public."""
    assert {
        room(path) for path in MODULES if "trl" in {name.split(".")[0] for name in imports_of(path)}
    } <= {
        "trainers",
        "cli",
    }


_BLOCK_AND_IMPORT = f"""
import importlib, sys

class NotInstalled:
    # A finder without these packages. It does not raise: libraries ask whether torch is there, and go on without.
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        heavy = name.split(".")[0] in {sorted(HEAVY)!r}
        return None if heavy else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [NotInstalled(finder) for finder in sys.meta_path]
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def python(code: str, *args: str) -> str:
    """Run code in a process of its own with the package on its path."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(SOURCE.parent), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_above_the_line_imports_without_torch():
    python(
        _BLOCK_AND_IMPORT,
        PACKAGE,
        *(dotted(path) for path in MODULES if room(path) in ABOVE_THE_TORCH_LINE),
    )


def test_the_front_door_is_light():
    """`import agentic_prompting` is lazy: it loads one module, its own, and otherwise what comes
    with Python.
    """
    code = (
        f"import sys; before = set(sys.modules); import {PACKAGE}; print(*(set(sys.modules) - "
        "before))"
    )
    loaded = set(python(code).split())
    assert {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names} == {
        PACKAGE
    }


def test_every_export_is_there_and_typed():
    """The table of lazy exports, the names themselves, and the block that type checkers read say
    the same.
    """
    import agentic_prompting

    for name in agentic_prompting.__all__:
        assert getattr(agentic_prompting, name) is not None
    typed = {
        alias.asname
        for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    assert typed == set(agentic_prompting.__all__) - {"__version__"}
