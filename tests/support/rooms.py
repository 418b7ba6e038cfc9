"""The rooms of the package in their order, and the imports of each module, read from its source."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "agentic_prompting"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE
ABOVE_THE_TORCH_LINE = (
    "records",
    "versions",
    "llm",
    "data",
    "rollout",
    "environments",
    "programs",
    "rewards",
    "evolution",
    "refine",
    "evaluation",
)
BELOW_THE_TORCH_LINE = (
    "harnesses",
    "local",
    "interop",
    "trainers",
    "agent",
    "sandbox",
    "planning",
    "report",
    "serve",
    "cli",
)
ROOMS = ABOVE_THE_TORCH_LINE + BELOW_THE_TORCH_LINE
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate"}
MODULES = sorted(
    path
    for path in SOURCE.rglob("*.py")
    if path.parent != SOURCE or path.stem not in ("__init__", "__main__")
)


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, package: str, types: bool = False) -> Iterator[str]:
    """The absolute names that a module imports; those under `TYPE_CHECKING` only with `types`.

    `from .. import llm` gives `agentic_prompting.llm`, and `from torch import nn` gives `torch.nn`:
    a name one level too deep does no harm, one too shallow would hide the room.
    """
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):  # parents come before their children
        if node in skipped:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not types:
            for statement in node.body:
                skipped.update(ast.walk(statement))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = []
            if node.level:
                parents = package.split(".")
                base += parents[: len(parents) - node.level + 1]
            if node.module:
                base.append(node.module)
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imports_of(path: Path, types: bool = False) -> list[str]:
    """As [`imports`], of one module of the package."""
    name = dotted(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(imports(path.read_text(encoding="utf-8"), package, types))


def imported_files(path: Path) -> set[str]:
    """The modules of the package that a file imports, dotted; those under `TYPE_CHECKING` and
    inside functions count.

    A package's `__init__.py` only passes on names of its files, so an import from a package is none
    of a file.
    """
    files = {dotted(other) for other in MODULES if other.name != "__init__.py"}
    names = set(imports_of(path, types=True))
    modules = {name.rpartition(".")[0] for name in names}
    return files & (names | modules)


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The sets of names that can be reached from each other, sorted."""

    def reach(start: str) -> set[str]:
        reachable = set()
        todo = [start]
        while todo:
            new = arrows.get(todo.pop(), set()) - reachable
            reachable |= new
            todo.extend(new)
        return reachable

    reached = {name: reach(name) for name in arrows}
    groups = set()
    for name in arrows:
        groups.add(frozenset(other for other in reached[name] if name in reached.get(other, ())))
    return sorted(sorted(group) for group in groups if len(group) > 1)
