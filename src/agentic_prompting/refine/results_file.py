"""Results as JSON lines, written as they finish; a run that was stopped goes on where it was.

Each line is a result and the key of its query. A line that a kill cut off is dropped when the file is opened again, and
so are queries that ended with an error: they are done anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..llm.files import write_whole
from .result import RefinementResult

logger = logging.getLogger(__name__)


class ResultsFile:
    """A JSON-lines file of results of one setting, open for more.

    Args:
        path (`str` or `Path`): The file; made, with its folders, where it is missing.
        settings (`str`): What identifies the settings; see [`RefineSettings.digest`].

    Attributes:
        done (`dict[str, RefinementResult]`): Results that were there already, by key; those with an error left out.

    Raises:
        `ValueError`: If the file holds something else, or results of other settings.
    """

    def __init__(self, path: str | Path, settings: str):
        self.path, self.settings = Path(path), settings
        self.done: dict[str, RefinementResult] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._read()
        self._file = self.path.open("ab")

    def add(self, key: str, result: RefinementResult) -> None:
        """Write one result; with the operating system when this returns."""
        self._file.write(_line({"key": key, "settings": self.settings, **result.to_dict()}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _read(self) -> None:
        """Read what is there, and write the file anew without what is not worth keeping."""
        lines = self.path.read_bytes().split(b"\n")  # not `splitlines`: texts may hold other line separators
        torn = lines.pop()
        kept: list[bytes] = []
        for number, line in enumerate(lines, start=1):
            saved = self._saved(line, number)
            key = saved.pop("key")
            result = RefinementResult.from_dict(saved)
            if result.error is None and key not in self.done:
                self.done[key] = result
                kept.append(line + b"\n")
        if torn or len(kept) < len(lines):
            logger.warning(f"{self.path}: {len(kept)} results are kept; unfinished and failed ones are done again")
            write_whole(self.path, b"".join(kept))

    def _saved(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            saved = json.loads(line)
        except ValueError:
            saved = None
        if not isinstance(saved, Mapping) or not {"key", "settings"} <= set(saved):
            raise ValueError(f"line {number} of {self.path} is no refinement result: give another file as output")
        if saved["settings"] != self.settings:
            raise ValueError(
                f"{self.path} holds results of other settings or models: give another file as output, or go on with "
                "the settings it was begun with"
            )
        return {name: value for name, value in saved.items() if name != "settings"}


def _line(values: Mapping[str, Any]) -> bytes:
    # A lone surrogate has no UTF-8; written as its backslash form it is JSON's own escape for it.
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
