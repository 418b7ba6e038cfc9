"""What a terminal shows: models' words, refinements, and that something takes its time. Plain text in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..refine import RefinementResult

_STYLES = {"-": "red", "+": "green", "#": "bold", "": ""}


def show(results: Sequence[RefinementResult], summary: Mapping[str, float]) -> None:
    """One result step by step, with its prompt's changes; many as a summary.

    Args:
        results (`Sequence[RefinementResult]`): Of one run.
        summary (`Mapping[str, float]`): What to print below.
    """
    from rich.console import Console
    from rich.text import Text

    from ..llm.wire import visible
    from ..refine.types import described_lines

    console = Console(soft_wrap=True)
    if len(results) == 1:
        for mark, line in described_lines(results[0]):
            console.print(Text(visible(line), style=_STYLES[mark]))  # Text: brackets in it are no markup
        console.print()
    for name, value in summary.items():
        if value or name == "accuracy":
            console.print(Text(f"{name:28} {value:.4g}"))


def say(text: str) -> None:
    """Print what may hold a model's words: what in it would steer the terminal is shown instead."""
    from ..llm.wire import visible

    print(visible(text))


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Says what takes so long, while it does, on a terminal's error stream; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield
