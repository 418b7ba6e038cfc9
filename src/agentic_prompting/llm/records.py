"""Records that survive a crash: JSON lines, each written when it is there; a run that was stopped goes on where it was.

A line that a kill cut off is dropped when the file is opened again, and so are failures: they are done anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from .files import write_whole

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RecordFile(Generic[T]):
    """A JSON-lines file of the records of one setting, open for more.

    Args:
        path (`str` or `Path`): The file; made, with its folders, where it is missing.
        settings (`str`): What identifies the settings, a digest for example; in every line.
        read (`Callable[[dict], tuple[Hashable, T] | None]`): Key and value of a line that is there already; `None` for
            a failure, which is done again. Raises `KeyError`, `TypeError` or `ValueError` if it is something else.
        what (`str`): What one record is, for messages.

    Attributes:
        done (`dict[Hashable, T]`): What was there already, by key; failures left out.

    Raises:
        `ValueError`: If the file holds something else, or records of other settings. It is left as it is.
    """

    def __init__(
        self,
        path: str | Path,
        settings: str,
        read: Callable[[dict[str, Any]], tuple[Hashable, T] | None],
        what: str = "record",
    ):
        self.path, self.settings, self.what = Path(path), settings, what
        self.done: dict[Hashable, T] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._read(read)
        self._file = self.path.open("ab")

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one record; with the operating system when this returns."""
        line = json.dumps({**record, "settings": self.settings}, ensure_ascii=False)
        # A lone surrogate has no UTF-8; written as its backslash form it is JSON's own escape for it.
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordFile[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, read: Callable[[dict[str, Any]], tuple[Hashable, T] | None]) -> None:
        """Read what is there, and write the file anew without what is not worth keeping."""
        lines = self.path.read_bytes().split(b"\n")  # not `splitlines`: texts may hold other line separators
        torn = lines.pop()
        kept: list[bytes] = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                settings = record.pop("settings")
                found = read(record) if settings == self.settings else None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"line {number} of {self.path} is no {self.what}: give another file as output ({error})"
                ) from error
            if settings != self.settings:
                raise ValueError(
                    f"{self.path} holds results of other settings or models: give another file as output, or go on "
                    "with the settings it was begun with"
                )
            if found is not None and found[0] not in self.done:
                self.done[found[0]] = found[1]
                kept.append(line + b"\n")
        if torn or len(kept) < len(lines):
            logger.warning(f"{self.path}: {len(kept)} results are kept; unfinished and failed ones are done again")
            write_whole(self.path, b"".join(kept))
