"""Files that survive a crash: atomic writes, records as JSON Lines, SQLite shared by processes, and
write locks.

At the top of the package, so that every folder can use it. A process that is killed while it
appends leaves an incomplete line; readers skip it, and the next append removes it.
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

FILE_ERRORS = (sqlite3.Error, OSError, TypeError, ValueError)
"""All errors of a file that is out of reach or damaged."""

_AGAIN_SECONDS = 5.0
"""Delay before a shared file that was out of reach is tried again."""

_SHARED: WeakSet[SharedFile] = WeakSet()
"""All shared files of this process."""


def only_a_folder(name: str) -> bool:
    """Return whether the name of a model can only be a folder.

    A hub id has exactly one slash, and its first part is not a local folder.
    """
    # Some hub ids, such as `gpt2`, have no slash.
    if "/" not in name:
        return False
    has_path_form = name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
    return has_path_form or Path(name).parent.is_dir()


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write `content` to `path` atomically (text as UTF-8).

    A crash during the write leaves the old content.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a file can be replaced atomically only within a file system.
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    os.replace(temporary, path)


def digest(settings: Any) -> str:
    """Return a hash of settings, 16 hexadecimal digits.

    Results may be resumed only if it is equal.
    """
    content = json.dumps(settings, sort_keys=True, default=repr)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@contextmanager
def only_writer(path: str | Path, busy: str = "") -> Iterator[None]:
    """Lock a file or folder against other writing processes. Enter it before the first write.

    The lock, `<path>.lock`, belongs to the operating system: it ends with the process, and a lock
    file that is left behind locks nothing.

    Args:
        path (`str` or `Path`): The file or folder.
        busy (`str`, *optional*): Error message that replaces the default one.

    Raises:
        `ValueError`: If another process is writing there.
    """
    path = Path(path)
    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Do not wait: the other process may run for days.
        lock.acquire(timeout=0)
    except Timeout:
        message = (
            f"another process is writing {path}: wait for it, end it, or choose another place to "
            "write to"
        )
        raise ValueError(busy or message) from None
    except (OSError, NotImplementedError) as error:
        # The disk has no locks, or is read-only.
        logger.warning(
            "%s cannot be locked (%s): start no second run that writes there", path, error
        )
    try:
        yield
    finally:
        lock.release()


class RecordFile:
    """A file of JSON Lines that survives a crash.

    For one writer at a time; iterate over it to read the records.

    Args:
        path (`str` or `Path`): The file. It is created, with its folders, by the first record.
        sync (`bool`, *optional*, defaults to `False`): [`RecordFile.append`] returns when the
            records are on the disk, so that they survive a power failure.
    """

    def __init__(self, path: str | Path, sync: bool = False):
        self.path = Path(path)
        self.sync = sync
        # Whether the file is certain to end with a complete line.
        self._ends_complete = False

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records in one write. Values that JSON does not support are written as text."""
        lines = b"".join(map(_encode_line, records))
        if not lines:
            return
        if not self._ends_complete:
            self._remove_incomplete_line()
        # Not certain during the write: a full disk leaves an incomplete line too.
        self._ends_complete = False
        with self.path.open("ab") as file:
            file.write(lines)
            if self.sync:
                file.flush()
                os.fsync(file.fileno())
        self._ends_complete = True

    def keep(self, predicate: Callable[[Record], object]) -> list[Record]:
        """Remove all records for which the predicate is false.

        Returns:
            `list[dict]`: The remaining records, in order.
        """
        # Rewrite the file only if there is something to remove.
        records = list(self)
        remaining = [record for record in records if predicate(record)]
        if len(remaining) < len(records):
            atomic_write(self.path, b"".join(map(_encode_line, remaining)))
        return remaining

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records, oldest first. A missing file has none.

        Raises:
            `ValueError`: If a complete line is not a JSON object. The message names the file and
                the line.
        """
        for number, line in enumerate(self._read_complete_lines(), start=1):
            yield self._decode_line(line, number)

    def _decode_line(self, line: bytes, number: int) -> Record:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path}, line {number} is no record: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(
                f"{self.path}, line {number} is no record: it holds a {type(record).__name__}"
            )
        return record

    def _read_complete_lines(self) -> Iterator[bytes]:
        """Yield the lines that end with a line break."""
        if not self.path.exists():
            return
        # The size before reading, because another process may be appending.
        size = self.path.stat().st_size
        complete_size = 0
        with self.path.open("rb") as file:
            # Bytes are split at \n only, while texts may contain other line separators.
            for line in file:
                if line.endswith(b"\n"):
                    complete_size += len(line)
                    yield line
        # What follows the last line break was cut off, or is being written at this moment.
        skipped = size - complete_size
        if skipped > 0:
            logger.warning(
                "%s: skipped the last %d bytes, cut off while being written", self.path, skipped
            )

    def _remove_incomplete_line(self) -> None:
        """Remove an incomplete last line. A record appended to it would be lost with it."""
        # A first record creates the folders of the file.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            complete_size = sum(len(line) for line in self._read_complete_lines())
            os.truncate(self.path, complete_size)
        self._ends_complete = True


def _encode_line(record: Mapping[str, Any]) -> bytes:
    # A lone surrogate has no UTF-8 form. Its backslash form is JSON's escape for it.
    text = json.dumps(record, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace") + b"\n"


class SharedFile:
    """An SQLite file that several processes share, on a local disk: its write-ahead log does not
    work over NFS.

    An unwritable file never fails a call or a checkpoint: records that cannot be written (locked,
    no space) stay in memory until a later call, at the latest until the end of the process.
    Subclasses write their records in `_write`.

    Args:
        path (`Path`): The file. It is created, with its folders, by the first write.
        table (`str`): The `CREATE TABLE IF NOT EXISTS` statement.
        busy_seconds (`float`): How long to wait for another process to release the file.
    """

    path: Path | None

    def __init__(self, path: Path | None, table: str, busy_seconds: float):
        self.path = path
        self._table = table
        self._busy_seconds = busy_seconds
        self._file_lock = threading.RLock()  # held during disk access

        # The error of the last write, when the first of a row of errors occurred, and when to try
        # again.
        self._fault: Exception | None = None
        self._failing_since = 0.0
        self._again_at = 0.0

        # A forked child keeps its parent's connections, because it may neither use nor close them.
        self._connection: sqlite3.Connection | None = None
        self._left_by_fork: list[sqlite3.Connection | None] = []
        _SHARED.add(self)

    def settle(self, at_once: bool = False) -> None:
        """Write all waiting records. Never raises a file error.

        Args:
            at_once (`bool`, *optional*, defaults to `False`): Try again even if the last attempt
                has just failed.
        """
        with self._file_lock:
            # After an error, the file is left alone for a while.
            if time.monotonic() < self._again_at and not at_once:
                return
            try:
                self._write()
                self._fault = None
            except FILE_ERRORS as error:
                # Warn about the first of a row of errors, and open the file again later.
                if self._fault is None:
                    self._failing_since = time.monotonic()
                    logger.warning(
                        "%s is out of reach, what belongs in it is kept in memory: %s",
                        self.path,
                        error,
                    )
                self._fault = error
                self._again_at = time.monotonic() + _AGAIN_SECONDS
                self._let_go()

    def _write(self) -> None:
        raise NotImplementedError

    def _connected(self) -> sqlite3.Connection:
        """Return the connection of this process.

        Call this and use the connection while holding `_file_lock`.
        """
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _begin_fork(self) -> None:
        """Drop the parent's connection in a forked child.

        SQLite forbids the child to use or close it.
        """
        self._left_by_fork.append(self._connection)
        self._connection = None
        # Another thread of the parent may have held the lock when the process was forked.
        self._file_lock = threading.RLock()

    def _open(self) -> sqlite3.Connection:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        seconds = self._busy_seconds
        # Autocommit, and open to all threads, which take turns by `_file_lock`.
        connection = sqlite3.connect(
            self.path, timeout=seconds, isolation_level=None, check_same_thread=False
        )
        try:
            _enable_write_ahead_log(connection, time.monotonic() + seconds)
            # Fast, and safe if the process is killed.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(self._table)
        except BaseException:
            connection.close()
            raise
        return connection

    def _let_go(self) -> None:
        """Close the connection. The next use opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _enable_write_ahead_log(connection: sqlite3.Connection, deadline: float) -> None:
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # If several processes create the file at the same time, one of them switches the mode.
            # SQLite then sometimes fails another one immediately instead of letting it wait (once
            # in 40 starts of ten processes).
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@atexit.register
def _settle_all() -> None:
    # What still waits at the end of the process is written now or lost.
    for file in list(_SHARED):
        file.settle(at_once=True)


def _begin_forks() -> None:
    for file in list(_SHARED):
        file._begin_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_forks)
