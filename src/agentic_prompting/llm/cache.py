"""Record and replay of replies: repeats a run without paying twice, or without a server at all.

The recording is one SQLite file. Each reply is committed as it arrives, so a killed run loses none,
and several processes may write at once. The file contains a hash of each request, the reply and its
token counts. It contains no request, no address (a recording is replayed without the server) and no
key.

Failures are never recorded: the next run asks again. Each reply has a checksum, because SQLite does
not notice every damage to a file; a reply whose checksum does not match is requested again.
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
from typing import Literal, NamedTuple, TypeAlias

from ..records import FILE_ERRORS, SharedFile
from .types import Message, Misconfigured, Reply, Usage

logger = logging.getLogger(__name__)

Mode = Literal["record", "replay", "off"]

SampleKey: TypeAlias = tuple[bytes, int]
"""The digest of a request and the number of the sample."""

# The key comes first in one clustered tree: a look-up is one descent, whatever the number of
# entries.
_TABLE = """
CREATE TABLE IF NOT EXISTS replies (
    key BLOB NOT NULL, repeat INTEGER NOT NULL, model TEXT NOT NULL,
    text TEXT NOT NULL, finish_reason TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    recorded_at REAL NOT NULL, checksum INTEGER,
    PRIMARY KEY (key, repeat)
) WITHOUT ROWID
"""
_INSERT = "INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_BUSY_SECONDS = 10.0  # wait while another process has locked the file


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


class _RecordedReply(NamedTuple):
    """A row of the file."""

    key: bytes
    repeat: int
    model: str
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    recorded_at: float
    checksum: int | None

    @property
    def is_intact(self) -> bool:
        # In a damaged file a column may have another type.
        return isinstance(self.text, str) and self.checksum == _checksum(
            self.key, self.repeat, self.text, self.finish_reason
        )


class ReplayCache(SharedFile):
    """Replies on disk, one per request and repeat.

    Args:
        path (`str` or `Path`): The file; created, with its folders, if it is missing and `mode` is
            `"record"`. It must be on a local disk: SQLite's write-ahead log does not work over
            network file systems such as NFS.
        mode (`str`, *optional*, defaults to `"record"`):
            `"record"`: recorded replies are used, others are requested and added. `"replay"`: a
            reply that was not recorded is an error, and no request is sent. `"off"`: as if there
            were no cache.

    Raises:
        `ValueError`: `mode` is none of these, or the file is not a recording.
        `FileNotFoundError`: There is nothing to replay at `path`.
    """

    path: Path

    def __init__(self, path: str | Path, mode: Mode = "record"):
        if mode not in ("record", "replay", "off"):
            raise ValueError(f'mode must be "record", "replay" or "off", not {mode!r}')
        super().__init__(Path(path), _TABLE, _BUSY_SECONDS)
        self.mode = mode
        self._lock = threading.Lock()
        self._sample_counts: dict[bytes, int] = {}  # by digest, for calls without `repeat`
        self._unwritten: dict[SampleKey, _RecordedReply] = {}
        if mode != "off":
            with self._file_lock:
                self._connected()  # a wrong path fails now, not hours into the run

    def key(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Mapping[str, object],
        repeat: int | None = None,
    ) -> CacheKey:
        """Return the key of one request.

        With `repeat=None` each call counts: the n-th one returns the key of sample n - 1.

        Args:
            model (`str`): The model's name.
            messages (`Sequence[Message]`): The whole conversation, system prompt included.
            sampling (`Mapping`): Every parameter that is sent to the endpoint.
            repeat (`int`, *optional*): The number of the sample.

        Raises:
            `TypeError`, `ValueError`: Something in the request cannot be written as JSON.
        """
        # Equal requests have one canonical text, whatever the order of their parameters.
        request = {
            "model": model,
            "messages": list(messages),
            "sampling": _normalize_floats(sampling),
        }
        canonical = json.dumps(request, sort_keys=True, separators=(",", ":"), allow_nan=False)
        digest = hashlib.sha256(canonical.encode()).digest()

        # Without a number, each call is the next sample of its request.
        if repeat is None:
            with self._lock:
                repeat = self._sample_counts.get(digest, 0)
                self._sample_counts[digest] = repeat + 1

        # The label helps to find the request that a message is about.
        label = str(messages[-1]["content"])[:60] if messages else ""
        return CacheKey(digest, repeat, model, label)

    def get(self, key: CacheKey) -> Reply | None:
        """Return the recorded reply.

        If there is none, or it is damaged: `None`, in replay mode a [`Misconfigured`] reply.
        """
        if self.mode == "off":
            return None
        problem = "no recorded reply"
        try:
            with self._file_lock:
                recorded = self._unwritten.get(key[:2]) or self._read(key)
            if recorded is not None and recorded.is_intact:
                return Reply(
                    text=recorded.text,
                    finish_reason=recorded.finish_reason,
                    cached=True,
                    # Without its cost: the client knows the price.
                    saved=Usage(recorded.prompt_tokens, recorded.completion_tokens),
                    attempts=0,
                )
            # A row that is there, but not as it was written.
            if recorded is not None:
                problem = self._report_damage(key, "the checksum does not match")
        except FILE_ERRORS as error:
            problem = self._report_damage(key, str(error))

        # When recording, the reply is requested; when replaying, its absence is an error.
        if self.mode == "record":
            return None
        missing = Misconfigured(
            f"replay: {problem} for sample {key.repeat} of {key.label!r}, recorded file "
            f"{self.path}: "
            'record it first (mode="record"), with the same model, prompts and sampling',
            key.model,
            attempts=0,
        )
        return Reply(error=missing, attempts=0)

    def put(self, key: CacheKey, reply: Reply) -> None:
        """Record `reply`; it is on disk when this returns.

        Errors and empty texts are not recorded, and a second reply under the same key is ignored.

        Never raises an error of the file: a reply that cannot be written (file locked, disk full)
        stays in memory, where `get` finds it, and is written with a later one.
        """
        if self.mode != "record" or reply.error is not None or not reply.text:
            return
        recorded = _RecordedReply(
            key=key.digest,
            repeat=key.repeat,
            model=key.model,
            text=reply.text,
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.usage.prompt_tokens,
            completion_tokens=reply.usage.completion_tokens,
            recorded_at=time.time(),
            checksum=_checksum(key.digest, key.repeat, reply.text, reply.finish_reason),
        )
        with self._file_lock:
            self._unwritten.setdefault(key[:2], recorded)
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

    def __reduce__(self) -> tuple[type[ReplayCache], tuple[Path, Mode]]:
        # A copy in another process opens its own connection.
        return type(self), (self.path, self.mode)

    def _write(self) -> None:
        row_error: sqlite3.Error | None = None
        for sample, recorded in list(self._unwritten.items()):
            try:
                self._connected().execute(_INSERT, recorded)
                del self._unwritten[sample]
            except sqlite3.OperationalError:
                raise  # locked, or no space: the other rows would fail too
            except sqlite3.Error as error:
                # This row cannot be written: go on with the others, and report it after them.
                row_error = error
        if row_error is not None:
            raise row_error

    def _read(self, key: CacheKey) -> _RecordedReply | None:
        query = "SELECT * FROM replies WHERE key = ? AND repeat = ?"
        row = self._connected().execute(query, key[:2]).fetchone()
        return None if row is None else _RecordedReply(*row)

    def _report_damage(self, key: CacheKey, reason: str) -> str:
        """Log that a reply is damaged, and remove it if it can be recorded again.

        Returns a description of the problem.
        """
        logger.warning(
            "%s is damaged (%s): sample %d of %r cannot be read",
            self.path,
            reason,
            key.repeat,
            key.label,
        )
        # Make room for the reply that is requested again.
        if self.mode == "record":
            query = "DELETE FROM replies WHERE key = ? AND repeat = ?"
            try:
                with self._file_lock:
                    self._connected().execute(query, key[:2])
            except FILE_ERRORS:
                logger.debug(
                    "a damaged entry could not be removed from %s", self.path, exc_info=True
                )
        return f"the recording is damaged ({reason}), no reply"

    def _open(self) -> sqlite3.Connection:
        if self.mode == "replay" and not self.path.is_file():
            raise FileNotFoundError(
                f'nothing to replay: {self.path} does not exist, record it first (mode="record")'
            )
        try:
            connection = self._open_for_replay() if self.mode == "replay" else super()._open()
            # Reads the schema, and no page that may be damaged.
            connection.execute("EXPLAIN SELECT checksum FROM replies")
            return connection
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} cannot be used as a replay cache: {error}") from error

    def _open_for_replay(self) -> sqlite3.Connection:
        # In a read-only folder SQLite cannot create the files of a write-ahead log; but no other
        # process can change the recording there either.
        access = "mode=ro" if os.access(self.path.parent, os.W_OK) else "immutable=1"
        return sqlite3.connect(
            f"{self.path.resolve().as_uri()}?{access}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )


def _checksum(digest: bytes, repeat: int, text: str, finish_reason: str) -> int:
    content = f"{digest.hex()} {repeat} {finish_reason} {text}"
    return zlib.crc32(content.encode("utf-8", "replace"))


def _normalize_floats(value: object) -> object:
    """Replace 1.0 by 1: a temperature of 0 and of 0.0 is the same request."""
    if isinstance(value, Mapping):
        return {key: _normalize_floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normalize_floats(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
