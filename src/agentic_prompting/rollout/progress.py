"""Progress of long work: a bar on a terminal or in a notebook, else a line a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO


class PrintInterval:
    """Limits how often a line is printed.

    Args:
        every (`float`, *optional*, defaults to `60.0`): Seconds between two lines.
        at_once (`bool`, *optional*, defaults to `False`): Whether the first line may be printed at
            once.
        clock (`Callable`, *optional*): Returns seconds.
    """

    def __init__(
        self,
        every: float = 60.0,
        at_once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._every = every
        self._clock = clock
        self._due_at = clock() + (0 if at_once else every)

    def is_due(self) -> bool:
        """Return whether a line may be printed now; if so, the next interval begins."""
        now = self._clock()
        if now < self._due_at:
            return False
        # The interval is counted from this line, even if it comes late.
        self._due_at = now + self._every
        return True


class ProgressLines:
    """A replacement for a tqdm bar that prints lines to standard error.

    A line reads `rollouts: 96 of 128, about 20 s left`.

    Args:
        total (`int`): The number of items.
        label (`str`): The items' name.
        done (`int`, *optional*, defaults to `0`): The number of items that are done already.
        share_before_estimate (`float`, *optional*, defaults to 1/3): The share of the other items
            that must be done before the time left is estimated. Items that are worked on together
            end at nearly the same time, so that the first ones say little about the pace.
    """

    def __init__(self, total: int, label: str, done: int = 0, share_before_estimate: float = 1 / 3):
        self.total = total
        self.label = label
        self.n = done  # the name that tqdm has for it
        self._done_before = done
        self._share_before_estimate = share_before_estimate
        self._print_interval = PrintInterval()
        self._started_at = time.monotonic()

    def time_left(self) -> str:
        """Return `, about 20 s left`, at the pace so far; empty at the beginning and at the end."""
        finished = self.n - self._done_before
        remaining = self.total - self.n
        if finished <= 0 or remaining <= 0:
            return ""
        if finished < self._share_before_estimate * (finished + remaining):
            return ""
        # The pace counts only the items of this run, not those that were done before.
        seconds = (time.monotonic() - self._started_at) / finished * remaining
        if seconds < 100:
            return f", about {seconds:.0f} s left"
        return f", about {seconds / 60:.0f} min left"

    def update(self, n: int = 1) -> None:
        self.n += n
        if self._print_interval.is_due():
            line = f"{self.label}: {self.n} of {self.total}{self.time_left()}"
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """There is nothing to clean up."""


def is_watched(stream: TextIO | None = None) -> bool:
    """Return whether a person can see a bar.

    The stream (by default standard error, where bars are drawn) is a terminal, or this is a
    notebook.
    """
    # On a terminal a person sees the bar.
    isatty = getattr(stream or sys.stderr, "isatty", None)
    if isatty is not None and isatty():
        return True
    if "IPython" not in sys.modules:
        return False
    # In a notebook the shell belongs to an IPython kernel.
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def show_progress(total: int, label: str, done: int = 0, shown: bool = True) -> Any:
    """Return a context manager whose value has `update(n=1)`.

    Args:
        total (`int`): The number of items.
        label (`str`): The items' name, for the bar or the line.
        done (`int`, *optional*, defaults to `0`): The number of items that are done already.
        shown (`bool`, *optional*, defaults to `True`): `False` shows nothing.

    Returns:
        A tqdm bar, which appears after two seconds and disappears at the end; in a file or a pipe
        [`ProgressLines`].
    """
    # In a file a bar would repeat itself with each update.
    if shown and not is_watched():
        return ProgressLines(total, label, done)
    from tqdm.auto import tqdm

    return tqdm(total=total, initial=done, desc=label, delay=2, disable=not shown, leave=False)
