"""Records of rollouts: metrics for the logs, and each rollout as a JSON line on disk for the tools that inspect a run.

Each process reduces its rollouts to small [`RolloutFacts`]. The facts of all processes are averaged once, because an
average of averages would give a process with few rollouts the same weight as one with many.

Each batch is appended as a gzip member of its own (a very large one as several), so a killed run loses at most the
batch being written, and a reader skips an incomplete end. A full disk does not stop a run: records wait in memory.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .types import Rollout

logger = logging.getLogger(__name__)

STATUSES = ("answered", "out_of_turns", "truncated", "malformed", "failed")
MAX_BATCH = 2**27
"""Decompressed bytes of a gzip member; a reader skips larger ones."""
MAX_WAITING = 2**26
"""Compressed bytes that wait in memory while the disk is full; beyond this the oldest batches are dropped."""

_CHUNK = 2**20
_ROW_KEYS = ("id", "question", "answers", "task", "environment", "workers", "budget")


@dataclass(frozen=True)
class RolloutFacts:
    """The numbers of one rollout from which metrics are computed. Picklable, a few hundred bytes."""

    status: str
    error_kind: str | None
    error: str | None
    fatal: bool
    turns: int
    interactions: int
    agent_tokens: int
    observation_tokens: int
    latencies: tuple[float, ...]
    calls: int
    cached: int
    shared: int
    retries: int
    tokens: int
    cost_usd: float
    environment: str | None = None  # its name, where rows name one
    counts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rollout: Rollout) -> RolloutFacts:
        replies, error, masks = (
            rollout.replies,
            rollout.error,
            [one.mask for one in rollout.sequences],
        )
        return cls(
            status=rollout.status,
            error_kind=None if error is None else error.kind,
            error=None if error is None else str(error),
            fatal=error is not None and error.fatal,
            turns=len(rollout.turns),
            interactions=sum(observation.error is None for observation in rollout.observations),
            agent_tokens=sum(map(sum, masks)),
            observation_tokens=sum(map(len, masks)) - sum(map(sum, masks)),
            latencies=tuple(observation.seconds for observation in rollout.observations),
            calls=len(replies),
            cached=sum(reply.cached for reply in replies),
            shared=sum(reply.shared for reply in replies),
            retries=sum(max(reply.attempts - 1, 0) for reply in replies),
            tokens=sum(reply.usage.tokens for reply in replies),
            cost_usd=sum(reply.usage.cost_usd for reply in replies),
            environment=rollout.row.get("environment"),
            counts=rollout.counts,
        )


def rollout_metrics(facts: Sequence[RolloutFacts]) -> dict[str, float]:
    """The metrics of a batch.

    `rollout/turns`, `rollout/interactions`: means; `rollout/<status>`: shares, which add up to 1;
    `rollout/agent_tokens`, `rollout/observation_tokens`: means; `environment/calls`, `retries`, `cached`, `shared`,
    `tokens`, `cost_usd`: sums over the batch; `environment/latency_mean`, `latency_p95`: seconds per interaction;
    [`Rollout`]'s `counts`: means over the rollouts that have them.
    """
    latencies = [seconds for fact in facts for seconds in fact.latencies] or [0.0]
    means = ("turns", "interactions", "agent_tokens", "observation_tokens")
    sums = ("calls", "retries", "cached", "shared", "tokens", "cost_usd")
    names = dict.fromkeys(name for fact in facts for name in fact.counts)
    own = {name: [fact.counts[name] for fact in facts if name in fact.counts] for name in names}
    return {
        **{name: float(np.mean(values)) for name, values in own.items()},
        **{
            f"rollout/{name}": float(np.mean([getattr(fact, name) for fact in facts]))
            for name in means
        },
        **{
            f"rollout/{status}": float(np.mean([fact.status == status for fact in facts]))
            for status in STATUSES
        },
        **{
            f"environment/{name}": float(sum(getattr(fact, name) for fact in facts))
            for name in sums
        },
        "environment/latency_mean": float(np.mean(latencies)),
        "environment/latency_p95": float(np.percentile(latencies, 95)),
    }


def metrics_by_environment(
    facts: Sequence[RolloutFacts], rewards: Sequence[float]
) -> dict[str, float]:
    """The metrics of a batch for each of several environments, as `environments/NAME/...`: `share` of the rollouts,
    mean `reward` (of those that have one) and `turns`, shares of `answered` and `failed`.

    Args:
        facts (`Sequence[RolloutFacts]`): The facts of a batch; each names its environment.
        rewards (`Sequence[float]`): Theirs; NaN where there is none.
    """
    metrics: dict[str, float] = {}
    for name in sorted({str(fact.environment) for fact in facts}):
        own = [
            (fact, reward)
            for fact, reward in zip(facts, rewards, strict=True)
            if fact.environment == name
        ]
        known = [reward for _, reward in own if reward == reward]
        found: dict[str, Any] = {
            "share": len(own) / len(facts),
            "turns": np.mean([fact.turns for fact, _ in own]),
            **{
                status: np.mean([fact.status == status for fact, _ in own])
                for status in ("answered", "failed")
            },
            **({"reward": np.mean(known)} if known else {}),
        }
        metrics |= {f"environments/{name}/{what}": float(value) for what, value in found.items()}
    return metrics


def rollout_record(rollout: Rollout, **extra: Any) -> dict[str, Any]:
    """A rollout as data for JSON.

    Keys: `id`, `question`, `answers`, `task`, `environment`, `workers`, `budget` (those that the row has), `status`,
    `error`, `answer`, `turns` (each `text`, `kind`, `well_formed`, `problem`), `observations` (each `text`, `error`,
    `seconds`, `cached`, `shared`, and `parts` if the agent can refer to them), `tokens` (`agent`, `observation`),
    `cost_usd` (paid), `worth_usd` (including replies that another call or an earlier run paid for), `seed`, and the
    keys of `extra`. The record of an episode that counts something, such as a program's, also has `sequences` (each
    `role`, `prompt`, `tokens`, `in_loss`), in whose order its turns are, and `counts`.
    """
    facts = RolloutFacts.of(rollout)
    return {
        **extra,
        **{key: rollout.row[key] for key in _ROW_KEYS if key in rollout.row},
        "status": rollout.status,
        "error": None if rollout.error is None else {"kind": facts.error_kind, "what": facts.error},
        "answer": rollout.answer,
        "turns": [
            {
                "text": turn.text,
                "kind": turn.kind,
                "well_formed": turn.well_formed,
                "problem": turn.problem,
            }
            for turn in rollout.turns
        ],
        "observations": [
            {
                "text": observation.text,
                "error": None if observation.error is None else str(observation.error),
                "seconds": round(observation.seconds, 4),
                "cached": any(reply.cached for reply in observation.replies),
                "shared": any(reply.shared for reply in observation.replies),
                **({"parts": list(observation.parts)} if observation.parts else {}),
            }
            for observation in rollout.observations
        ],
        "tokens": {"agent": facts.agent_tokens, "observation": facts.observation_tokens},
        "cost_usd": facts.cost_usd,
        "worth_usd": sum(reply.worth.cost_usd for reply in rollout.replies),
        "seed": rollout.seed,
        **({"sequences": _sequences(rollout), "counts": rollout.counts} if rollout.counts else {}),
    }


def _sequences(rollout: Rollout) -> list[dict[str, Any]]:
    """The token sequences of an episode in numbers."""
    return [
        {
            "role": one.role,
            "prompt": len(one.prompt_ids),
            "tokens": len(one.ids),
            "in_loss": sum(one.mask),
        }
        for one in rollout.sequences
    ]


class RolloutLog:
    """Appends records to `folder/rollouts-<process>-<part>.jsonl.gz`.

    Args:
        folder (`str` or `Path`): Created when the first record is written.
        process_index (`int`, *optional*, defaults to `0`): Each process writes files of its own.
        max_mb (`float`, *optional*, defaults to `1024`): Above this size the oldest part of this process is deleted,
            with a warning. 0 writes nothing.
        part_mb (`float`, *optional*, defaults to `32`): A part is closed at this size, or at a quarter of `max_mb`.
    """

    def __init__(
        self, folder: str | Path, process_index: int = 0, max_mb: float = 1024, part_mb: float = 32
    ):
        self.folder, self.process_index = Path(folder), process_index
        self.max_bytes, self.part_bytes = max_mb * 2**20, min(part_mb, max_mb / 4) * 2**20
        self._part: Path | None = (
            None  # each log begins a new part: an earlier one may end in an incomplete batch
        )
        self._waiting: deque[bytes] = deque()
        self._failing, self._lost = False, 0

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Append one batch. If the disk refuses it, it is written with the next one, and one warning is logged."""
        if not self.max_bytes:
            return
        self._waiting += _members(records)
        if not self._waiting:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while self._waiting:
                with open(self._current_part(), "ab") as file:
                    file.write(self._waiting[0])
                self._waiting.popleft()
                self._drop_oldest()
        except OSError as error:  # training does not need the records
            self._part = None  # it may end in an incomplete batch
            if not self._failing:
                logger.warning(
                    "rollouts cannot be written to %s, training goes on without: %s",
                    self.folder,
                    error,
                )
            self._failing = True
            while sum(map(len, self._waiting)) > MAX_WAITING:
                self._waiting.popleft()
                self._lost += 1
        else:
            if self._failing:
                logger.warning(
                    "rollouts are written again to %s; %d batches were lost",
                    self.folder,
                    self._lost,
                )
            self._failing, self._lost = False, 0

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob(f"rollouts-{self.process_index:05d}-*.jsonl.gz"))

    def _current_part(self) -> Path:
        # A part that is missing, or its folder, was moved away during the run: begin a new one.
        if (
            self._part is None
            or not self._part.exists()
            or self._part.stat().st_size >= self.part_bytes
        ):
            parts = self._parts()
            number = int(parts[-1].name.split("-")[2].split(".")[0]) + 1 if parts else 0
            self._part = self.folder / f"rollouts-{self.process_index:05d}-{number:05d}.jsonl.gz"
        return self._part

    def _drop_oldest(self) -> None:
        parts = self._parts()
        while len(parts) > 1 and sum(part.stat().st_size for part in parts) > self.max_bytes:
            logger.warning(
                "rollout log over %.0f MB: dropping %s", self.max_bytes / 2**20, parts[0].name
            )
            parts.pop(0).unlink()


def read_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """All records under `folder`, oldest first for each process. A torn end of a file is skipped."""
    return (json.loads(line) for _, _, line in rollout_lines(folder))


def rollout_lines(folder: str | Path) -> Iterator[tuple[Path, int, str]]:
    """The records of [`read_rollouts`] unparsed: the file, line and text of each."""
    for part in sorted(Path(folder).glob("rollouts-*.jsonl.gz")):
        for number, line in enumerate(_whole_lines(part), start=1):
            yield part, number, line


def _members(records: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """A batch as gzip members: one, unless it would be too large for a reader."""
    lines: list[str] = []
    size = 0
    for record in records:
        line = json.dumps(record, ensure_ascii=False, default=str) + "\n"
        if lines and size + len(line) > MAX_BATCH // 4:  # a character has up to four bytes
            yield gzip.compress("".join(lines).encode("utf-8", "replace"), compresslevel=6)
            lines, size = [], 0
        lines.append(line)
        size += len(line)
    if lines:
        yield gzip.compress("".join(lines).encode("utf-8", "replace"), compresslevel=6)


def _whole_lines(part: Path) -> Iterator[str]:
    """The lines of all complete gzip members, in bounded memory whatever their decompressed size."""
    with open(part, "rb") as file:
        rest, size = file.read(_CHUNK), os.fstat(file.fileno()).st_size
        while rest:
            left = size - file.tell() + len(rest)
            try:
                text, rest = _unfold(file, rest)
            except (zlib.error, EOFError):
                logger.warning(
                    "%s: skipped the last %d bytes, a batch cut off while being written", part, left
                )
                return
            if text is None:
                logger.warning(
                    "%s: skipped a batch of more than %d bytes, decompressed", part, MAX_BATCH
                )
            else:
                yield from text.decode("utf-8", "replace").split("\n")[:-1]


def _unfold(file: BinaryIO, data: bytes) -> tuple[bytes | None, bytes]:
    """One gzip member that begins with `data` and continues in `file`: its text, or `None` if that is too large; and
    the bytes read after it. Raises `EOFError` or `zlib.error` if the member is incomplete."""
    member, size = zlib.decompressobj(wbits=31), 0
    pieces: list[bytes] = []
    while not member.eof:
        piece = member.decompress(data, _CHUNK)
        size += len(piece)
        if size > MAX_BATCH:
            pieces.clear()
        else:
            pieces.append(piece)
        data = (member.unused_data if member.eof else member.unconsumed_tail) or file.read(_CHUNK)
        if not (piece or data or member.eof):
            raise EOFError
    return (b"".join(pieces) if size <= MAX_BATCH else None), data
