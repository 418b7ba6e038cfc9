"""SQLite files that many processes use at once, and what is still to be written when one of them ends."""

import atexit
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

BUSY_SECONDS = 30.0


class Owing(Protocol):
    """What keeps in memory what it could not write yet."""

    def settle(self, at_once: bool = False) -> None: ...


OWING: WeakSet[Owing] = WeakSet()


@atexit.register
def _settle_all() -> None:
    for owing in list(OWING):
        owing.settle(at_once=True)


class Connection:
    """The connection of this process: opened at the first use, and again in a forked child.

    Args:
        open (`Callable[[], sqlite3.Connection]`): Opens one.
    """

    def __init__(self, open: Callable[[], sqlite3.Connection]):
        self.lock = threading.RLock()
        self._open = open
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._left_by_fork: list[sqlite3.Connection] = []

    def __call__(self) -> sqlite3.Connection:
        """The open connection. To be called, and what it gives to be used, while holding `lock`."""
        if self._connection is None or self._pid != os.getpid():
            if self._connection is not None:  # SQLite forbids to use or close a connection after a fork: keep it
                self._left_by_fork.append(self._connection)
            self._connection, self._pid = self._open(), os.getpid()
        return self._connection

    def close(self) -> None:
        """Let go of the file. The next use opens it again."""
        with self.lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None


def open_for_writing(path: str | Path, table: str, busy_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    """Open the file at `path`, made with its folders where it is missing, for many writers at once.

    Args:
        path (`str` or `Path`): On a local disk: SQLite's write-ahead log does not work over NFS.
        table (`str`): The `CREATE TABLE IF NOT EXISTS` statement of what is kept in it.
        busy_seconds (`float`, *optional*, defaults to `30`): How long to wait for other writers.

    Raises:
        `sqlite3.DatabaseError`: It is something else than such a file, or cannot be written.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    try:
        _write_ahead(connection, time.monotonic() + busy_seconds)
        connection.execute("PRAGMA synchronous = NORMAL")  # safe against a killed process, and fast
        connection.execute(table)
    except BaseException:
        connection.close()
        raise
    return connection


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
