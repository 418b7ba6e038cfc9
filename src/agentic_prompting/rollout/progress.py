"""Progress of long work: a bar on a terminal or in a notebook, a line a minute in a file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any


class Seldom:
    """Limits how often a line is printed: `due` returns whether it is time for another.

    Args:
        every (`float`, *optional*, defaults to `60.0`): Seconds between two lines.
        at_once (`bool`, *optional*, defaults to `False`): Whether the first line may come at once.
        clock (`Callable`, *optional*): Returns seconds.
    """

    def __init__(
        self,
        every: float = 60.0,
        at_once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._every, self._clock = every, clock
        self._next = clock() + (0 if at_once else every)

    def due(self) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._every
        return True


class Lines:
    """A replacement for a tqdm bar: prints lines such as `rollouts: 96 of 128, about 20 s left` to standard error."""

    def __init__(self, total: int, what: str, done: int = 0):
        self.total, self.what, self.n = total, what, done
        self._seldom, self._first, self._begun = Seldom(), done, time.monotonic()

    def left(self) -> str:
        """`, about 20 s left`, at the pace until now; empty at the beginning and at the end."""
        done, missing = self.n - self._first, self.total - self.n
        if done <= 0 or missing <= 0:
            return ""
        seconds = (time.monotonic() - self._begun) / done * missing
        return (
            f", about {seconds:.0f} s left"
            if seconds < 100
            else f", about {seconds / 60:.0f} min left"
        )

    def update(self, n: int = 1) -> None:
        self.n += n
        if self._seldom.due():
            print(
                f"{self.what}: {self.n} of {self.total}{self.left()}", file=sys.stderr, flush=True
            )

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """There is nothing to clean up."""


def watched(stream: Any = None) -> bool:
    """Whether a person can see a bar: the stream (by default standard error, where bars are drawn) is a terminal, or
    this is a notebook."""
    if bool(getattr(stream or sys.stderr, "isatty", lambda: False)()):
        return True
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


def progress(total: int, what: str, done: int = 0, shown: bool = True) -> Any:
    """A context manager whose value has `update(n=1)`.

    Args:
        total (`int`): The number of items.
        what (`str`): The items' name, for the bar or the line.
        done (`int`, *optional*, defaults to `0`): The number of items that are done already.
        shown (`bool`, *optional*, defaults to `True`): `False` shows nothing.

    Returns:
        A tqdm bar, which appears after two seconds and disappears at the end; in a file or a pipe [`Lines`].
    """
    if shown and not watched():
        return Lines(total, what, done)
    from tqdm.auto import tqdm

    return tqdm(total=total, initial=done, desc=what, delay=2, disable=not shown, leave=False)
