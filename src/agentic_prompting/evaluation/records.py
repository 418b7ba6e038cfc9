"""Trajectories on disk: one JSON line per answered question, written as it is there; a run goes on where it was.

A line that a kill cut off is dropped when the file is opened again, and so are failures: those are asked anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..llm.files import write_whole

logger = logging.getLogger(__name__)

Record = dict[str, Any]


class Key(NamedTuple):
    """Which answer: of which task, in which run, to the question at which place of the sample."""

    task: str
    run: int
    place: int


class RecordFile:
    """A JSON-lines file of one system's answers, open for more.

    Args:
        path (`str` or `Path`): The file; made, with its folders, where it is missing.
        settings (`Mapping`): What the system is; see [`System.settings`].

    Attributes:
        done (`dict[Key, dict]`): What was there already, failures left out.

    Raises:
        `ValueError`: If the file holds something else, or another system's answers.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        self.path, self.settings = Path(path), digest(settings)
        self.done: dict[Key, Record] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._read()
        self._file = self.path.open("ab")

    def add(self, record: Record) -> None:
        """Write one answer; with the operating system when this returns."""
        self._file.write(_line({**record, "settings": self.settings}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _read(self) -> None:
        """Read what is there, and write the file anew without what is not worth keeping."""
        lines = self.path.read_bytes().split(b"\n")
        torn = lines.pop()
        kept: list[bytes] = []
        for number, line in enumerate(lines, start=1):
            record = _parsed(line, f"{self.path}, line {number}")
            if record.get("settings") != self.settings:
                raise ValueError(
                    f"{self.path} holds answers of another system or other settings of it: give another output folder, "
                    "or go on with the settings it was begun with"
                )
            key = key_of(record)
            if record.get("error") is None and key not in self.done:
                self.done[key] = record
                kept.append(line + b"\n")
        if torn or len(kept) < len(lines):
            logger.warning(f"{self.path}: {len(kept)} answers are kept; unfinished and failed ones are asked for again")
            write_whole(self.path, b"".join(kept))


def read_records(paths: Iterable[str | Path]) -> list[Record]:
    """All answers in some files; of a question that was asked again the last one.

    Raises:
        `ValueError`: If a line is no record; names it. A torn last line is left out.
    """
    records: dict[tuple[str, Key], Record] = {}
    for path in map(Path, paths):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            record = _parsed(line, f"{path}, line {number}")
            records[(record["system"], key_of(record))] = record
    return list(records.values())


def key_of(record: Mapping[str, Any]) -> Key:
    """Which answer a record is."""
    return Key(record["task"], record["run"], record["place"])


def digest(settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that change with any setting."""
    text = json.dumps(settings, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parsed(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
        key_of(record), record["system"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is no record of an evaluation: {type(error).__name__}: {error}") from error
    return record


def _line(record: Record) -> bytes:
    # A lone surrogate has no UTF-8; written as its backslash form it is JSON's own escape for it.
    return json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"
