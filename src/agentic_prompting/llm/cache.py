"""Record and replay of replies: a run can be repeated without paying twice, or without a server at all.

One SQLite file. Each reply is committed as it arrives, so that a run that is killed loses none, and several processes
may write at once. What is in it: a hash of each request, the reply, its token counts. What is not: the request, the
address it went to (a recording is replayed without the server), and any key.

Failures are never recorded: the next run asks again. Nor is a damaged file believed: SQLite does not notice every
change, so each reply has a checksum, and one that does not match is asked anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import Misconfigured
from .files import BUSY_SECONDS, OWING, Connection, open_for_writing
from .types import Message, Reply

logger = logging.getLogger(__name__)

Mode = Literal["record", "replay", "off"]

# The key comes first in one clustered tree: a look-up is one descent, whatever the number of entries.
_TABLE = """
CREATE TABLE IF NOT EXISTS replies (
    key BLOB NOT NULL, repeat INTEGER NOT NULL, model TEXT NOT NULL,
    text TEXT NOT NULL, finish_reason TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, recorded_at REAL NOT NULL, checksum INTEGER,
    PRIMARY KEY (key, repeat)
) WITHOUT ROWID
"""
_INSERT = "INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_BUSY_SECONDS = 10.0  # for another process to let go of the file, when a reply is to be recorded
_AGAIN_SECONDS = 5.0  # until a file that could not be written is tried again


class CacheKey(NamedTuple):
    """One sample of one request.

    Args:
        digest (`bytes`): SHA-256 of the request, 32 bytes.
        repeat (`int`): Which sample of it, from 0.
        model (`str`): The model asked, for people who look into the file.
        label (`str`): The beginning of the last message, for error messages; not recorded.
    """

    digest: bytes
    repeat: int
    model: str
    label: str


class ReplayCache:
    """Replies on disk, one per request and repeat.

    Args:
        path (`str` or `Path`): The file; made, with its folders, where it is missing and `mode` is `"record"`. On a
            local disk: SQLite's write-ahead log does not work over network file systems such as NFS.
        mode (`str`, *optional*, defaults to `"record"`):
            `"record"`: what is there is used, what is not is asked and added. `"replay"`: what is not there is an
            error, nothing is ever asked. `"off"`: as if there were no cache.

    Raises:
        `ValueError`: `mode` is none of these, or the file is no recording.
        `FileNotFoundError`: There is nothing to replay at `path`.
    """

    def __init__(self, path: str | Path, mode: Mode = "record"):
        if mode not in ("record", "replay", "off"):
            raise ValueError(f'mode must be "record", "replay" or "off", not {mode!r}')
        self.path, self.mode = Path(path), mode
        self._lock = threading.Lock()
        self._asked: dict[bytes, int] = {}
        self._unwritten: dict[tuple[bytes, int], tuple[Any, ...]] = {}
        self._again_at = 0.0
        OWING.add(self)
        self._file = Connection(lambda: _open(Path(path), mode))
        if mode != "off":
            with self._file.lock:
                self._file()  # a wrong path fails here, not hours into the run

    def key(
        self, model: str, messages: Sequence[Message], sampling: Mapping[str, Any], repeat: int | None = None
    ) -> CacheKey:
        """The key of one request. Asking for it counts: with `repeat=None` the n-th call gives sample n - 1.

        Args:
            model (`str`): The model asked.
            messages (`Sequence[Message]`): The whole conversation, system prompt included.
            sampling (`Mapping`): Every parameter that goes to the endpoint.
            repeat (`int`, *optional*): Which sample of this request.

        Raises:
            `TypeError`, `ValueError`: Something in the request is not JSON.
        """
        request = {"model": model, "messages": list(messages), "sampling": _plain(sampling)}
        canonical = json.dumps(request, sort_keys=True, separators=(",", ":"), allow_nan=False)
        digest = hashlib.sha256(canonical.encode()).digest()
        if repeat is None:
            with self._lock:
                repeat = self._asked.get(digest, 0)
                self._asked[digest] = repeat + 1
        return CacheKey(digest, repeat, model, str(messages[-1]["content"])[:60] if messages else "")

    def get(self, key: CacheKey) -> Reply | None:
        """The recorded reply, `None` where there is none or it is damaged; in replay mode a [`Misconfigured`] reply."""
        if self.mode == "off":
            return None
        what = "no recorded reply"
        try:
            with self._file.lock:
                row = self._row(key)
            if row is not None and isinstance(row[0], str) and row[2] in (None, _checksum(key, *row[:2])):
                return Reply(text=row[0], finish_reason=row[1], cached=True, attempts=0)
            if row is not None:
                what = self._damaged(key, "the checksum does not match")
        except (sqlite3.Error, OSError, ValueError) as error:
            what = self._damaged(key, str(error))
        if self.mode == "record":
            return None
        what = (
            f"replay: {what} for sample {key.repeat} of {key.label!r}, recorded file {self.path}: "
            'record it first (mode="record"), with the same model, prompts and sampling'
        )
        return Reply(error=Misconfigured(what, key.model, attempts=0), attempts=0)

    def put(self, key: CacheKey, reply: Reply) -> None:
        """Record `reply`, on disk when this returns. Errors and empty texts are not recorded; the first one stays.

        Never raises for the file's sake: what cannot be written (locked, no space) is kept in memory, where it is found
        as well, and written with a later reply.
        """
        if self.mode != "record" or reply.error is not None or not reply.text:
            return
        used = reply.usage
        counts = (used.prompt_tokens, used.completion_tokens, time.time())
        row = (*key[:3], reply.text, reply.finish_reason, *counts, _checksum(key, reply.text, reply.finish_reason))
        with self._file.lock:
            self._unwritten.setdefault(key[:2], row)
        self.settle()

    def settle(self, at_once: bool = False) -> None:
        """Write down what could not be written before; `at_once` also where that failed a moment ago."""
        with self._file.lock:
            if not self._unwritten or (time.monotonic() < self._again_at and not at_once):
                return
            for place, row in list(self._unwritten.items()):
                try:
                    self._file().execute(_INSERT, row)
                    del self._unwritten[place]
                except (sqlite3.Error, OSError, ValueError) as error:
                    if time.monotonic() >= self._again_at:
                        logger.warning("a reply could not be recorded in %r, it is kept in memory: %s", self, error)
                    self._again_at = time.monotonic() + _AGAIN_SECONDS
                    if isinstance(error, sqlite3.OperationalError):
                        return  # locked, or no space: so it is for the others

    def __len__(self) -> int:
        if self.mode == "off":
            return 0
        with self._file.lock:
            return int(self._file().execute("SELECT COUNT(*) FROM replies").fetchone()[0])

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache: `if cache` must not depend on its length

    def close(self) -> None:
        """Let go of the file. The next use opens it again."""
        self.settle(at_once=True)
        self._file.close()

    def __repr__(self) -> str:
        return f"ReplayCache({str(self.path)!r}, mode={self.mode!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "mode": self.mode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy in another process starts with its own connection

    def _row(self, key: CacheKey) -> tuple[str, str, int | None] | None:
        """Text, finish reason and checksum; `None` for the last in recordings of before there were any."""
        waiting = self._unwritten.get(key[:2])
        if waiting is not None:
            return waiting[3], waiting[4], waiting[8]
        query = "SELECT * FROM replies WHERE key = ? AND repeat = ?"
        row = self._file().execute(query, key[:2]).fetchone()
        return None if row is None else (row[3], row[4], row[8] if len(row) > 8 else None)

    def _damaged(self, key: CacheKey, how: str) -> str:
        logger.warning("%s is damaged (%s): sample %d of %r is not there", self.path, how, key.repeat, key.label)
        if self.mode == "record":
            try:  # make room for the reply that is asked anew
                with self._file.lock:
                    self._file().execute("DELETE FROM replies WHERE key = ? AND repeat = ?", key[:2])
            except sqlite3.Error:
                logger.debug("a damaged entry could not be removed from %s", self.path, exc_info=True)
        return f"the recording is damaged ({how}), no reply"


def _checksum(key: CacheKey, text: str, finish_reason: str) -> int:
    return zlib.crc32(f"{key.digest.hex()} {key.repeat} {finish_reason} {text}".encode("utf-8", "replace"))


def _open(path: Path, mode: Mode) -> sqlite3.Connection:
    if mode == "replay" and not path.is_file():
        raise FileNotFoundError(f'nothing to replay: {path} does not exist, record it first (mode="record")')
    try:
        return _open_replay(path) if mode == "replay" else _open_recording(path)
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} cannot be used as a replay cache: {error}") from error


def _open_recording(path: Path) -> sqlite3.Connection:
    connection = open_for_writing(path, _TABLE)
    if len(connection.execute("PRAGMA table_info (replies)").fetchall()) == 8:  # of before there were checksums
        try:
            connection.execute("ALTER TABLE replies ADD COLUMN checksum INTEGER")
        except sqlite3.OperationalError as error:
            if "duplicate" not in str(error):  # another process was first
                raise
    connection.execute(f"PRAGMA busy_timeout = {int(1000 * _BUSY_SECONDS)}")
    return connection


def _open_replay(path: Path) -> sqlite3.Connection:
    # In a folder that cannot be written SQLite cannot make the files beside a write-ahead log; nobody else can
    # change the recording there either.
    fixed = not os.access(path.parent, os.W_OK)
    uri = f"{path.resolve().as_uri()}?{'immutable=1' if fixed else 'mode=ro'}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("SELECT 1 FROM replies LIMIT 1")
    return connection


def _plain(value: Any) -> Any:
    """`value` with 1.0 as 1: a temperature of 0 and of 0.0 is the same request."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
