"""The rooms of the package in their order, and the imports of each module, read from its source."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "agentic_prompting"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE
ABOVE_THE_TORCH_LINE = (
    "records",
    "llm",
    "rollout",
    "environments",
    "rewards",
    "evolution",
    "refine",
    "data",
    "evaluation",
)
BELOW_THE_TORCH_LINE = ("local", "interop", "trainers", "agent", "sandbox", "report", "serve", "cli")
ROOMS = ABOVE_THE_TORCH_LINE + BELOW_THE_TORCH_LINE
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate"}
MODULES = sorted(
    path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem not in ("__init__", "__main__")
)


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, package: str) -> Iterator[str]:
    """The absolute names that a module imports, except those under `TYPE_CHECKING`.

    `from .. import llm` gives `agentic_prompting.llm`, and `from torch import nn` gives `torch.nn`: a name one level
    too deep does no harm, one too shallow would hide the room.
    """
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):  # parents come before their children
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for statement in node.body:
                skipped.update(ast.walk(statement))
        elif node in skipped:
            continue
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = [*parents, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imports_of(path: Path) -> list[str]:
    name = dotted(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(imports(path.read_text(encoding="utf-8"), package))
