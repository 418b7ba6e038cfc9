"""Record and replay of replies: a run can be repeated without paying twice, or without a server at all.

The recording is one SQLite file. Each reply is committed as it arrives, so a killed run loses none, and several
processes may write at once. The file holds a hash of each request, the reply and its token counts. It holds no request,
no address (a recording is replayed without the server) and no key.

Failures are never recorded: the next run asks again. Each reply has a checksum, because SQLite does not notice every
damage to a file; a reply whose checksum does not match is requested again.
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

from ..records import FILE_ERRORS, SharedFile
from .types import Message, Misconfigured, Reply, Usage

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
_BUSY_SECONDS = 10.0  # to wait while another process has locked the file


class CacheKey(NamedTuple):
    """One sample of one request.

    Args:
        digest (`bytes`): SHA-256 of the request, 32 bytes.
        repeat (`int`): The number of the sample, from 0.
        model (`str`): The model's name, for people who look into the file.
        label (`str`): The beginning of the last message, for error messages; not recorded.
    """

    digest: bytes
    repeat: int
    model: str
    label: str


class ReplayCache(SharedFile):
    """Replies on disk, one per request and repeat.

    Args:
        path (`str` or `Path`): The file; created, with its folders, if it is missing and `mode` is `"record"`. It must
            be on a local disk: SQLite's write-ahead log does not work over network file systems such as NFS.
        mode (`str`, *optional*, defaults to `"record"`):
            `"record"`: recorded replies are used, others are requested and added. `"replay"`: a reply that was not
            recorded is an error, and no request is sent. `"off"`: as if there were no cache.

    Raises:
        `ValueError`: `mode` is none of these, or the file is no recording.
        `FileNotFoundError`: There is nothing to replay at `path`.
    """

    path: Path

    def __init__(self, path: str | Path, mode: Mode = "record"):
        if mode not in ("record", "replay", "off"):
            raise ValueError(f'mode must be "record", "replay" or "off", not {mode!r}')
        super().__init__(Path(path), _TABLE, _BUSY_SECONDS)
        self.mode = mode
        self._lock = threading.Lock()
        self._asked: dict[bytes, int] = {}
        self._unwritten: dict[tuple[bytes, int], tuple[Any, ...]] = {}
        if mode != "off":
            with self._file_lock:
                self._connected()  # a wrong path fails now, not hours into the run

    def key(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Mapping[str, Any],
        repeat: int | None = None,
    ) -> CacheKey:
        """The key of one request. With `repeat=None` each call counts: the n-th one returns the key of sample n - 1.

        Args:
            model (`str`): The model's name.
            messages (`Sequence[Message]`): The whole conversation, system prompt included.
            sampling (`Mapping`): Every parameter that is sent to the endpoint.
            repeat (`int`, *optional*): The number of the sample.

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
        return CacheKey(
            digest, repeat, model, str(messages[-1]["content"])[:60] if messages else ""
        )

    def get(self, key: CacheKey) -> Reply | None:
        """The recorded reply. If there is none, or it is damaged: `None`, in replay mode a [`Misconfigured`] reply."""
        if self.mode == "off":
            return None
        what = "no recorded reply"
        try:
            with self._file_lock:
                row = self._unwritten.get(key[:2]) or self._read(key)
            if row is not None and isinstance(row[3], str) and row[8] == _checksum(key, *row[3:5]):
                saved = Usage(row[5], row[6])  # the client knows the price
                return Reply(
                    text=row[3], finish_reason=row[4], cached=True, saved=saved, attempts=0
                )
            if row is not None:
                what = self._damaged(key, "the checksum does not match")
        except FILE_ERRORS as error:
            what = self._damaged(key, str(error))
        if self.mode == "record":
            return None
        what = (
            f"replay: {what} for sample {key.repeat} of {key.label!r}, recorded file {self.path}: "
            'record it first (mode="record"), with the same model, prompts and sampling'
        )
        return Reply(error=Misconfigured(what, key.model, attempts=0), attempts=0)

    def put(self, key: CacheKey, reply: Reply) -> None:
        """Record `reply`; it is on disk when this returns. Errors and empty texts are not recorded, and a second reply
        under the same key is ignored.

        Never raises an error of the file: a reply that cannot be written (file locked, no space) stays in memory, where
        `get` finds it, and is written with a later one.
        """
        if self.mode != "record" or reply.error is not None or not reply.text:
            return
        used = reply.usage
        counts = (used.prompt_tokens, used.completion_tokens, time.time())
        row = (
            *key[:3],
            reply.text,
            reply.finish_reason,
            *counts,
            _checksum(key, reply.text, reply.finish_reason),
        )
        with self._file_lock:
            self._unwritten.setdefault(key[:2], row)
        self.settle()

    def __len__(self) -> int:
        if self.mode == "off":
            return 0
        with self._file_lock:
            return int(self._connected().execute("SELECT COUNT(*) FROM replies").fetchone()[0])

    def __bool__(self) -> bool:
        return True  # an empty cache is still a cache: `if cache` must not depend on its length

    def close(self) -> None:
        """Close the file. The next use opens it again."""
        with self._file_lock:
            self.settle(at_once=True)
            self._let_go()

    def __repr__(self) -> str:
        return f"ReplayCache({str(self.path)!r}, mode={self.mode!r})"

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # a copy in another process starts with its own connection
        return type(self), (self.path, self.mode)

    def _write(self) -> None:
        damage: sqlite3.Error | None = None
        for place, row in list(self._unwritten.items()):
            try:
                self._connected().execute(_INSERT, row)
                del self._unwritten[place]
            except sqlite3.OperationalError:
                raise  # locked, or no space: the other rows would fail too
            except sqlite3.Error as error:
                damage = error
        if damage is not None:
            raise damage

    def _read(self, key: CacheKey) -> tuple[Any, ...] | None:
        query = "SELECT * FROM replies WHERE key = ? AND repeat = ?"
        return self._connected().execute(query, key[:2]).fetchone()

    def _damaged(self, key: CacheKey, how: str) -> str:
        logger.warning(
            "%s is damaged (%s): sample %d of %r is not there",
            self.path,
            how,
            key.repeat,
            key.label,
        )
        if self.mode == "record":
            try:  # make room for the reply that is requested again
                with self._file_lock:
                    self._connected().execute(
                        "DELETE FROM replies WHERE key = ? AND repeat = ?", key[:2]
                    )
            except FILE_ERRORS:
                logger.debug(
                    "a damaged entry could not be removed from %s", self.path, exc_info=True
                )
        return f"the recording is damaged ({how}), no reply"

    def _open(self) -> sqlite3.Connection:
        if self.mode == "replay" and not self.path.is_file():
            raise FileNotFoundError(
                f'nothing to replay: {self.path} does not exist, record it first (mode="record")'
            )
        try:
            if self.mode == "record":
                connection = super()._open()
            else:
                # In a read-only folder SQLite cannot create the files of a write-ahead log; no other process can change
                # the recording there either.
                how = "mode=ro" if os.access(self.path.parent, os.W_OK) else "immutable=1"
                uri = f"{self.path.resolve().as_uri()}?{how}"
                connection = sqlite3.connect(
                    uri, uri=True, isolation_level=None, check_same_thread=False
                )
            connection.execute(
                "EXPLAIN SELECT checksum FROM replies"
            )  # reads the schema, and no page that may be damaged
            return connection
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} cannot be used as a replay cache: {error}") from error


def _checksum(key: CacheKey, text: str, finish_reason: str) -> int:
    return zlib.crc32(
        f"{key.digest.hex()} {key.repeat} {finish_reason} {text}".encode("utf-8", "replace")
    )


def _plain(value: Any) -> Any:
    """`value` with 1.0 as 1: a temperature of 0 and of 0.0 is the same request."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
