"""Files that survive a crash: one written all or nothing, records appended as JSON Lines, SQLite shared by processes,
and the lock of those that only one process may write.

In the topmost room, so that every room can use it. A process that is killed while it appends leaves half a line;
readers skip it, and the next append removes it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

Record = dict[str, Any]
FILE_ERRORS = (
    sqlite3.Error,
    OSError,
    TypeError,
    ValueError,
)  # all errors of a file that is out of reach or damaged
_AGAIN_SECONDS = 5.0  # until a shared file out of reach is tried again
_SHARED: WeakSet[SharedFile] = WeakSet()


def only_a_folder(name: str) -> bool:
    """Whether a model's name can only be a folder. A hub id has one slash, and its first part is no folder here."""
    sure = name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
    return "/" in name and (sure or Path(name).parent.is_dir())


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write `content` to `path` (text in UTF-8), all or nothing: a crash in the middle leaves what was there before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    os.replace(temporary, path)


def digest(settings: Any) -> str:
    """16 hexadecimal digits that change with any of the settings: whether a file of results may be continued."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode()).hexdigest()[
        :16
    ]


@contextmanager
def only_writer(path: str | Path, busy: str = "") -> Iterator[None]:
    """Within it no other process writes `path`, a file or something of a folder. Enter it before anything is touched.

    The lock, `<path>.lock`, is the system's: it ends with the process, and a file left behind locks nothing.

    Args:
        path (`str` or `Path`): The file or folder.
        busy (`str`, *optional*): The error's words, if others fit better.

    Raises:
        `ValueError`: Another process is writing there.
    """
    path = Path(path)
    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        instead = f"another process is writing {path}: wait for it, end it, or choose another place to write to"
        raise ValueError(busy or instead) from None
    except (
        OSError,
        NotImplementedError,
    ) as error:  # a disk without locks, or one that may not be written to
        logger.warning(
            "%s cannot be locked (%s): start no second run that writes there", path, error
        )
    try:
        yield
    finally:
        lock.release()


class RecordFile:
    """JSON Lines that a crash cannot spoil. For one writer at a time; iterate over it to read the records.

    Args:
        path (`str` or `Path`): The file; made, with its folders, by the first record.
        sync (`bool`, *optional*, defaults to `False`): [`RecordFile.append`] returns when the records are on the disk,
            so that they survive a power failure.
    """

    def __init__(self, path: str | Path, sync: bool = False):
        self.path, self.sync = Path(path), sync
        self._mended = (
            False  # whether what an earlier process left is known to end with a whole line
        )

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records in one write. Values that JSON does not know are written as text."""
        lines = b"".join(map(_line, records))
        if not lines:
            return
        if not self._mended:
            self._mend()
        self._mended = False  # until these are there whole: a full disk tears a line as a kill does
        with self.path.open("ab") as file:
            file.write(lines)
            if self.sync:
                file.flush()
                os.fsync(file.fileno())
        self._mended = True

    def keep(self, wanted: Callable[[Record], object]) -> list[Record]:
        """Remove the records that are not wanted.

        Returns:
            `list[dict]`: Those that stay, in order.
        """
        records = list(self)
        kept = [record for record in records if wanted(record)]
        if len(kept) < len(records):
            atomic_write(self.path, b"".join(map(_line, kept)))
        return kept

    def __iter__(self) -> Iterator[Record]:
        """The records, oldest first; none where there is no file.

        Raises:
            `ValueError`: A line that was written to its end is no JSON object; names file and line.
        """
        for number, line in enumerate(self._whole_lines(), start=1):
            yield self._record(line, number)

    def _record(self, line: bytes, number: int) -> Record:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path}, line {number} is no record: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(
                f"{self.path}, line {number} is no record: it holds a {type(record).__name__}"
            )
        return record

    def _whole_lines(self) -> Iterator[bytes]:
        """The lines that were written to their ends."""
        if not self.path.exists():
            return
        end, size = (
            0,
            self.path.stat().st_size,
        )  # measured first: a run that is being watched writes on
        with self.path.open("rb") as file:
            for line in (
                file
            ):  # of bytes, which are split at \n alone: texts may hold other line separators
                if line.endswith(b"\n"):
                    end += len(line)
                    yield line
        if (lost := size - end) > 0:
            logger.warning(
                "%s: skipped the last %d bytes, cut off while being written", self.path, lost
            )

    def _mend(self) -> None:
        """Remove a torn end: a record appended to it would be lost with it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            os.truncate(self.path, sum(map(len, self._whole_lines())))
        self._mended = True


def _line(record: Mapping[str, Any]) -> bytes:
    # A lone surrogate has no UTF-8; written as its backslash form it is JSON's own escape for it.
    return (
        json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")
        + b"\n"
    )


class SharedFile:
    """An SQLite file that many processes use at once, on a local disk: its write-ahead log does not work over NFS.

    No reply and no checkpoint fails because of it: records that cannot be written (locked, no space) wait in memory for
    a later call, at the latest for the end of the process. Subclasses write their records in `_write`.

    Args:
        path (`Path`): The file; made, with its folders, when it is first written.
        table (`str`): Its `CREATE TABLE IF NOT EXISTS` statement.
        busy_seconds (`float`): How long to wait for another process to release it.
    """

    path: Path | None

    def __init__(self, path: Path | None, table: str, busy_seconds: float):
        self.path, self._table, self._busy_seconds = path, table, busy_seconds
        self._file_lock = threading.RLock()  # held while the disk is waited for
        self._fault: Exception | None = None
        self._failing_since = self._again_at = 0.0
        self._connection: sqlite3.Connection | None = None
        self._left_by_fork: list[sqlite3.Connection | None] = []
        _SHARED.add(self)

    def settle(self, at_once: bool = False) -> None:
        """Write all waiting records; with `at_once` even if that failed a moment ago. Never raises."""
        with self._file_lock:
            if time.monotonic() < self._again_at and not at_once:
                return
            try:
                self._write()
                self._fault = None
            except FILE_ERRORS as error:
                if self._fault is None:
                    self._failing_since = time.monotonic()
                    logger.warning(
                        "%s is out of reach, what belongs in it is kept in memory: %s",
                        self.path,
                        error,
                    )
                self._fault, self._again_at = error, time.monotonic() + _AGAIN_SECONDS
                self._let_go()

    def _write(self) -> None:
        raise NotImplementedError

    def _connected(self) -> sqlite3.Connection:
        """The connection of this process. Call it, and use the connection, while holding `_file_lock`."""
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _begin_fork(self) -> None:
        """In a forked child: leave what is the parent's. SQLite forbids to use or close its connection: keep it."""
        self._left_by_fork.append(self._connection)
        self._connection, self._file_lock = None, threading.RLock()

    def _open(self) -> sqlite3.Connection:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        seconds = self._busy_seconds
        connection = sqlite3.connect(
            self.path, timeout=seconds, isolation_level=None, check_same_thread=False
        )
        try:
            _write_ahead(connection, time.monotonic() + seconds)
            connection.execute(
                "PRAGMA synchronous = NORMAL"
            )  # safe against a killed process, and fast
            connection.execute(self._table)
        except BaseException:
            connection.close()
            raise
        return connection

    def _let_go(self) -> None:
        """Close the file. The next use opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _write_ahead(connection: sqlite3.Connection, deadline: float) -> None:
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # Of processes that make the file at the same moment one switches the mode, and now and then SQLite fails
            # another at once instead of letting it wait (seen once in 40 starts of ten processes).
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@atexit.register
def _settle_all() -> None:
    for file in list(_SHARED):
        file.settle(at_once=True)


def _begin_forks() -> None:
    for file in list(_SHARED):
        file._begin_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_forks)
