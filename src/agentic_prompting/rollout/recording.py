"""Records of rollouts: metrics for the logs, each rollout as a JSON line on disk, and back from it.

Each process reduces its rollouts to small [`RolloutFacts`]. The facts of all processes are averaged
once, because an average of averages would give a process with few rollouts the same weight as one
with many.

Each batch is appended as a gzip member of its own (a very large one as several), so a killed run
loses at most the batch being written, and a reader skips an incomplete end. A full disk does not
stop a run: records wait in memory.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import zlib
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..llm import LLMError, Reply, Usage
from .grammar import Grammar, Turn
from .turn_reader import read_call
from .types import Observation, Rollout

logger = logging.getLogger(__name__)

STATUSES = ("answered", "out_of_turns", "truncated", "malformed", "failed")
MAX_BATCH = 2**27
"""Decompressed bytes of a gzip member; a reader skips larger ones."""
MAX_WAITING = 2**26
"""Compressed bytes that wait in memory while the disk is full.

Beyond this the oldest batches are dropped.
"""

_CHUNK = 2**20
_MAX_RETURNED_LENGTH = 10_000  # characters of a value that a program returned, as JSON
_MAX_REQUEST_LENGTH = 10_000  # characters of a program's first request
_ROW_KEYS = ("id", "question", "answers", "task", "environment", "workers", "budget")


@dataclass(frozen=True)
class RolloutFacts:
    """The facts of one rollout from which metrics are computed: picklable, a few hundred bytes."""

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
        """Return the facts of a finished rollout."""
        replies = rollout.replies
        error = rollout.error

        # A program's episode has several token sequences.
        agent_tokens = sum(sum(sequence.mask) for sequence in rollout.sequences)
        response_tokens = sum(len(sequence.mask) for sequence in rollout.sequences)
        return cls(
            status=rollout.status,
            error_kind=error.kind if error else None,
            error=str(error) if error else None,
            fatal=error is not None and error.fatal,
            turns=len(rollout.turns),
            interactions=sum(observation.error is None for observation in rollout.observations),
            agent_tokens=agent_tokens,
            observation_tokens=response_tokens - agent_tokens,
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
    """Return the metrics of a batch.

    `rollout/turns`, `rollout/interactions`: means; `rollout/<status>`: shares, which add up to 1;
    `rollout/agent_tokens`, `rollout/observation_tokens`: means; `environment/calls`, `retries`,
    `cached`, `shared`, `tokens`, `cost_usd`: sums over the batch; `environment/latency_mean`,
    `latency_p95`: seconds per interaction; [`Rollout`]'s `counts`: means over the rollouts that
    have them.
    """
    metrics: dict[str, float] = {}

    # Counts, such as those of a program.
    count_names = dict.fromkeys(chain.from_iterable(fact.counts for fact in facts))
    for name in count_names:
        values = [fact.counts[name] for fact in facts if name in fact.counts]
        metrics[name] = float(np.mean(values))

    # Means per rollout, and the shares of the statuses.
    for name in ("turns", "interactions", "agent_tokens", "observation_tokens"):
        metrics[f"rollout/{name}"] = float(np.mean([getattr(fact, name) for fact in facts]))
    for status in STATUSES:
        metrics[f"rollout/{status}"] = _share_with_status(facts, status)

    # Calls of the environment.
    for name in ("calls", "retries", "cached", "shared", "tokens", "cost_usd"):
        metrics[f"environment/{name}"] = float(sum(getattr(fact, name) for fact in facts))
    # Seconds per interaction; 0 if there was none.
    latencies = list(chain.from_iterable(fact.latencies for fact in facts)) or [0.0]
    metrics["environment/latency_mean"] = float(np.mean(latencies))
    metrics["environment/latency_p95"] = float(np.percentile(latencies, 95))
    return metrics


def metrics_by_environment(
    facts: Sequence[RolloutFacts], rewards: Sequence[float]
) -> dict[str, float]:
    """Return the metrics of a batch for each of several environments.

    They are `environments/NAME/...`: `share` of the rollouts, mean `reward` (of the rollouts with
    one) and `turns`, shares of `answered` and `failed`.

    Args:
        facts (`Sequence[RolloutFacts]`): The facts of a batch; each names its environment.
        rewards (`Sequence[float]`): The rollouts' rewards; NaN for a rollout without one.
    """
    # Sort the rollouts by environment.
    facts_by_name: dict[str, list[RolloutFacts]] = {}
    rewards_by_name: dict[str, list[float]] = {}
    for fact, reward in zip(facts, rewards, strict=True):
        name = str(fact.environment)
        facts_by_name.setdefault(name, []).append(fact)
        if not math.isnan(reward):
            rewards_by_name.setdefault(name, []).append(reward)

    metrics: dict[str, float] = {}
    for name, environment_facts in sorted(facts_by_name.items()):
        prefix = f"environments/{name}"
        metrics[f"{prefix}/share"] = float(len(environment_facts) / len(facts))
        metrics[f"{prefix}/turns"] = float(np.mean([fact.turns for fact in environment_facts]))
        for status in ("answered", "failed"):
            metrics[f"{prefix}/{status}"] = _share_with_status(environment_facts, status)
        # Rollouts without a reward were left out, so there may be none.
        if name in rewards_by_name:
            metrics[f"{prefix}/reward"] = float(np.mean(rewards_by_name[name]))
    return metrics


def _share_with_status(facts: Sequence[RolloutFacts], status: str) -> float:
    return float(np.mean([fact.status == status for fact in facts]))


def group_diversity(texts: Sequence[str]) -> float | None:
    """Return how much texts differ, from 0 (the same word pairs in all) to 1 (none in two).

    It is the chance that a pair of neighbouring words, drawn from a random text, is missing in
    another random text of the group. It takes linear time in the length of the texts.

    Args:
        texts (`Sequence[str]`): The agent's turns of each rollout of a group, joined.

    Returns:
        `float`: `None` for fewer than two texts, or if none of them has a word.
    """
    if len(texts) < 2:
        return None
    # In how many texts each pair of words is.
    counts: Counter[tuple[str, str]] = Counter()
    for text in texts:
        counts.update(_word_pairs(text))
    if not counts:
        return None
    # A pair in `count` texts is found again in `count - 1` of the others.
    found_again = sum(count * (count - 1) for count in counts.values())
    return 1 - found_again / (counts.total() * (len(texts) - 1))


def mean_diversity(groups: Iterable[Sequence[str]]) -> float | None:
    """Return the mean of [`group_diversity`] over the groups that have one; `None` without any."""
    values = [group_diversity(texts) for texts in groups]
    known_values = [value for value in values if value is not None]
    return sum(known_values) / len(known_values) if known_values else None


def _word_pairs(text: str) -> set[tuple[str, str]]:
    words = text.lower().split()
    # The first word has a pair of its own, so that a text of one word has one as well.
    return set(zip(["", *words], words, strict=False))


def question_text(row: Mapping[str, Any]) -> str:
    """Return the question of a row: its `question`, else the text of its `prompt`.

    System messages, which rows usually share, are left out of a `prompt` of messages; the others
    are joined by blank lines.
    """
    prompt = row.get("prompt") or ""
    if row.get("question") or isinstance(prompt, str):
        return str(row.get("question") or prompt)
    texts = [
        message["content"]
        for message in prompt
        if message["role"] != "system" and isinstance(message.get("content"), str)
    ]
    return "\n\n".join(texts)


def shorten_middle(text: str, length: int) -> str:
    """Return a text with its middle left out if it has more than `length` characters."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def rollout_record(rollout: Rollout, **extra: Any) -> dict[str, Any]:
    """Return a rollout as data for JSON.

    Keys: `id`, `question` (of a row that has only a `prompt`: its [`question_text`]), `answers`,
    `task`, `environment`, `workers`, `budget` (if the row has them), `status`, `error`, `answer`,
    `turns` (each `text`, `kind`, `well_formed`, `problem`), `observations` (each `text`, `error`,
    `seconds`, `cached`, `shared`, and `parts` if the agent can refer to them), `tokens` (`agent`,
    `observation`), `cost_usd` (paid), `worth_usd` (including replies that another call or an
    earlier run paid for), `seed`, and the keys of `extra`. The record of an episode with `counts`,
    such as a program's, also has `sequences` (each `role`, `prompt`, `tokens`, `in_loss`), in whose
    order its turns are, and the `counts`. That of a program has its `first_request` (the middle of
    a very long one is left out), what it `returned` besides the answer, and in `not_recorded` the
    names of values that JSON cannot hold, or that are very long.
    """
    facts = RolloutFacts.of(rollout)
    # The caller's keys, and the row's.
    record = dict(extra)
    record |= {key: rollout.row[key] for key in _ROW_KEYS if key in rollout.row}
    if not record.get("question"):
        # By it the rollouts of a group are known, and the row of the data set is found again.
        question = question_text(rollout.row)
        if question:
            record["question"] = question
    record["status"] = rollout.status
    record["error"] = {"kind": facts.error_kind, "what": facts.error} if rollout.error else None
    record["answer"] = rollout.answer
    if rollout.returned is not None:
        record |= _record_returned(rollout.returned)

    # The conversation. That of a program begins with its first request.
    if rollout.first_request:
        record["first_request"] = shorten_middle(rollout.first_request, _MAX_REQUEST_LENGTH)
    record["turns"] = [
        {
            "text": turn.text,
            "kind": turn.kind,
            "well_formed": turn.well_formed,
            "problem": turn.problem,
        }
        for turn in rollout.turns
    ]
    record["observations"] = []
    for observation in rollout.observations:
        observation_record: dict[str, Any] = {
            "text": observation.text,
            "error": str(observation.error) if observation.error else None,
            "seconds": round(observation.seconds, 4),
            "cached": any(reply.cached for reply in observation.replies),
            "shared": any(reply.shared for reply in observation.replies),
        }
        if observation.quotable_texts:
            observation_record["parts"] = list(observation.quotable_texts)
        record["observations"].append(observation_record)

    # Its size and cost.
    record["tokens"] = {"agent": facts.agent_tokens, "observation": facts.observation_tokens}
    record["cost_usd"] = facts.cost_usd
    record["worth_usd"] = sum(reply.worth.cost_usd for reply in rollout.replies)
    record["seed"] = rollout.seed

    # The episode of a program has several token sequences.
    if rollout.counts:
        record["sequences"] = [
            {
                "role": sequence.role,
                "prompt": len(sequence.prompt_ids),
                "tokens": len(sequence.ids),
                "in_loss": sum(sequence.mask),
            }
            for sequence in rollout.sequences
        ]
        record["counts"] = rollout.counts
    return record


def _record_returned(returned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a program returned besides its answer, as far as they can be recorded."""
    recorded = {}
    left_out = []
    for name, value in returned.items():
        if name == "answer":
            continue
        # JSON has no NaN, and a value that it holds in another form, such as a tuple, is that form.
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            text = ""
        if text and len(text) <= _MAX_RETURNED_LENGTH:
            recorded[str(name)] = json.loads(text)
        else:
            left_out.append(str(name))
    if left_out:
        return {"returned": recorded, "not_recorded": left_out}
    return {"returned": recorded}


class _RecordedReturn(dict[str, Any]):
    """The recorded part of what a program returned. Reading another field is an error.

    Args:
        values (`Mapping[str, Any]`): The recorded values.
        left_out (`Collection[str]`, *optional*): The names of values that are not recorded; `None`
            if they are not known, as in records of earlier versions.
    """

    def __init__(self, values: Mapping[str, Any], left_out: Collection[str] | None):
        super().__init__(values)
        self.left_out = left_out

    def _check(self, name: object) -> None:
        if super().__contains__(name):
            return
        if self.left_out is None or name in self.left_out:
            reason = "it is too long, or no JSON"
            if self.left_out is None:
                reason = "an earlier version recorded the answer alone"
            raise ValueError(
                f"the program may have returned {name!r}, and the record does not have it: {reason}"
            )

    def __missing__(self, name: str) -> Any:
        self._check(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        self._check(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        # A default would pass for what the program returned.
        self._check(name)
        return super().get(name, default)


def restore_rollout(
    record: Mapping[str, Any], row: Mapping[str, Any], grammar: Grammar | None = None
) -> Rollout:
    """Return the rollout of a record that [`rollout_record`] made.

    Token ids and log-probabilities are not recorded: the rollout has none. Reading a value that a
    program returned and that is not recorded raises a `ValueError`. Each observation has one reply;
    the worth of the rollout is divided equally between them.

    Args:
        record (`Mapping[str, Any]`): The record.
        row (`Mapping[str, Any]`): The row of the rollout.
        grammar ([`Grammar`], *optional*): Reads thoughts and requests in the turns; without one the
            turns have none.
    """
    rollout = Rollout([], row=dict(row), seed=record.get("seed") or 0)
    rollout.turns = [_restore_turn(turn, grammar) for turn in record["turns"]]

    # The answer is recorded apart from the turns: it may be a reference, or that of a program.
    is_answered = record["status"] == "answered"
    if record["status"] != "failed" and record.get("sequences"):
        values = dict(record.get("returned") or {})
        left_out = record.get("not_recorded", ()) if "returned" in record else None
        # A program without an answer has returned nothing, as far as the record says so.
        if is_answered or left_out is None:
            values["answer"] = record["answer"]
        rollout.returned = _RecordedReturn(values, left_out)
    elif is_answered and rollout.turns:
        rollout.turns[-1] = replace(rollout.turns[-1], kind="answer", answer=record["answer"])

    # Observations, each with its share of the price.
    observations = record["observations"]
    worth = (record.get("worth_usd") or 0.0) / max(1, len(observations))
    rollout.observations = [_restore_observation(saved, worth) for saved in observations]

    rollout.counts = dict(record.get("counts") or {})
    rollout.first_request = record.get("first_request") or ""
    rollout.status = record["status"]
    if record.get("error"):
        rollout.error = LLMError(str(record["error"].get("what")))
    return rollout


def _restore_turn(saved: Mapping[str, Any], grammar: Grammar | None) -> Turn:
    turn = Turn(saved["text"], saved["kind"], saved["well_formed"], problem=saved["problem"])
    if grammar is None:
        return turn
    # A turn that was cut off may look like another one: what was recorded counts.
    parsed = grammar.parse(saved["text"])
    if parsed.kind != turn.kind:
        return turn
    return replace(parsed, well_formed=turn.well_formed, problem=turn.problem)


def _restore_observation(saved: Mapping[str, Any], worth: float) -> Observation:
    error = LLMError(saved["error"]) if saved["error"] else None
    reply = Reply(
        text=saved["text"],
        cached=saved.get("cached", False),
        shared=saved.get("shared", False),
        saved=Usage(cost_usd=worth),
    )
    return Observation(
        text=saved["text"],
        error=error,
        replies=(reply,),
        seconds=saved["seconds"],
        quotable_texts=tuple(saved.get("parts") or ()),
    )


def render_messages(
    rollout: Rollout, turn_texts: Sequence[str], grammar: Grammar, tools: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """Return a finished rollout as messages.

    Args:
        rollout ([`Rollout`]): The rollout.
        turn_texts (`Sequence[str]`): The text of each turn.
        grammar ([`Grammar`]): Finds tool calls in a turn, if it has tools.
        tools (`Sequence`, *optional*): The tools' schemas, by which arguments are read.

    Returns:
        `list[dict]`: An `assistant` message for each turn, with its `tool_calls`, and the messages
            of the observations between turns, from a `tool` or the `user`.
    """
    messages: list[dict[str, Any]] = []
    for turn_index, text in enumerate(turn_texts):
        message: dict[str, Any] = {"role": "assistant", "content": text}
        tool_calls = parse_tool_calls(rollout.turns[turn_index].text, grammar, tools)
        if tool_calls:
            message["tool_calls"] = tool_calls
        messages.append(message)

        # An observation after the last turn is not among the rollout's tokens.
        is_last = turn_index + 1 == len(turn_texts)
        if not is_last and turn_index < len(rollout.observations):
            observation = rollout.observations[turn_index].text
            messages += render_observation(observation, tool_calls, grammar)
    return messages


def parse_tool_calls(
    text: str, grammar: Grammar, tools: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """Return the tool calls in a turn as chat templates write them.

    A malformed call has its text as `arguments`.
    """
    # Not every grammar has tool calls: in free text, for example, there are none.
    if not hasattr(grammar, "bodies"):
        return []
    tool_calls = []
    for body in grammar.bodies(text):
        call = read_call(body, tools)
        function = {"name": call.name, "arguments": call.arguments}
        if call.problem:
            function = {"name": "", "arguments": body}
        tool_calls.append({"type": "function", "function": function})
    return tool_calls


def render_observation(
    text: str, tool_calls: Sequence[Mapping[str, Any]], grammar: Grammar
) -> list[dict[str, Any]]:
    """Return an observation as messages: one per tool call, or one from the user."""
    if not tool_calls:
        return [{"role": "user", "content": text}]
    # The results of several calls are joined in one text, in the order of the calls.
    results = [text]
    if len(tool_calls) > 1:
        results = text.split(getattr(grammar, "separator", ""))
    messages = []
    for tool_call, result in zip(tool_calls, results, strict=False):
        messages.append({"role": "tool", "name": tool_call["function"]["name"], "content": result})
    return messages


class RolloutLog:
    """Appends records to `folder/rollouts-<process>-<part>.jsonl.gz`.

    Args:
        folder (`str` or `Path`): Created when the first record is written.
        process_index (`int`, *optional*, defaults to `0`): Each process writes files of its own.
        max_mb (`float`, *optional*, defaults to `1024`): Above this size the oldest part of this
            process is deleted, with a warning. 0 writes nothing.
        part_mb (`float`, *optional*, defaults to `32`): A part is closed at this size, or at a
            quarter of `max_mb`.
    """

    def __init__(
        self, folder: str | Path, process_index: int = 0, max_mb: float = 1024, part_mb: float = 32
    ):
        self.folder = Path(folder)
        self.process_index = process_index
        self.max_bytes = max_mb * 2**20
        self.part_bytes = min(part_mb, max_mb / 4) * 2**20
        # Each log begins a new part: an earlier one may end in an incomplete batch.
        self._part: Path | None = None
        self._waiting: deque[bytes] = deque()
        self._is_failing = False
        self._dropped_batches = 0

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Append one batch.

        If the disk refuses it, it is written with the next batch, and one warning is logged.
        """
        if not self.max_bytes:
            return
        self._waiting += _members(records)
        if not self._waiting:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # A batch leaves the queue once it is written.
            while self._waiting:
                with open(self._current_part(), "ab") as file:
                    file.write(self._waiting[0])
                self._waiting.popleft()
                self._drop_oldest()
        except OSError as error:
            # Training does not need the records. The part may end in an incomplete batch.
            self._part = None
            if not self._is_failing:
                logger.warning(
                    "rollouts cannot be written to %s, training goes on without: %s",
                    self.folder,
                    error,
                )
            self._is_failing = True
            # Limit the memory: drop the oldest batches.
            while sum(map(len, self._waiting)) > MAX_WAITING:
                self._waiting.popleft()
                self._dropped_batches += 1
        else:
            # The disk accepts data again.
            if self._is_failing:
                logger.warning(
                    "rollouts are written again to %s; %d batches were lost",
                    self.folder,
                    self._dropped_batches,
                )
            self._is_failing = False
            self._dropped_batches = 0

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob(f"rollouts-{self.process_index:05d}-*.jsonl.gz"))

    def _current_part(self) -> Path:
        # Begin a new part if the last one is full, or was moved away during the run.
        is_open = self._part is not None and self._part.exists()
        if self._part is None or not is_open or self._part.stat().st_size >= self.part_bytes:
            number = 0
            parts = self._parts()
            if parts:
                # The part in `rollouts-<process>-<part>.jsonl.gz`
                last_number = parts[-1].name.split("-")[2].split(".")[0]
                number = int(last_number) + 1
            self._part = self.folder / f"rollouts-{self.process_index:05d}-{number:05d}.jsonl.gz"
        return self._part

    def _drop_oldest(self) -> None:
        parts = self._parts()
        # The newest part is never dropped, because it is still being written.
        while len(parts) > 1 and sum(part.stat().st_size for part in parts) > self.max_bytes:
            logger.warning(
                "rollout log over %.0f MB: dropping %s", self.max_bytes / 2**20, parts[0].name
            )
            parts.pop(0).unlink()


def read_rollouts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield all records under `folder`, oldest first for each process.

    An incomplete end of a file is skipped. Steps that a resumed run played again are there twice:
    the records with the larger `run` count.
    """
    return (json.loads(line) for _, _, line in rollout_lines(folder))


def rollout_lines(folder: str | Path) -> Iterator[tuple[Path, int, str]]:
    """Yield the records of [`read_rollouts`] unparsed: the file, line number and text of each."""
    for part in sorted(Path(folder).glob("rollouts-*.jsonl.gz")):
        for number, line in enumerate(_whole_lines(part), start=1):
            yield part, number, line


def _members(records: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """Compress a batch to one gzip member, or to several if one would be too large for a reader."""
    lines: list[str] = []
    size = 0
    for record in records:
        line = json.dumps(record, ensure_ascii=False, default=str) + "\n"
        if lines and size + len(line) > MAX_BATCH // 4:  # a character has up to four bytes
            yield gzip.compress("".join(lines).encode("utf-8", "replace"), compresslevel=6)
            lines = []
            size = 0
        lines.append(line)
        size += len(line)
    if lines:
        yield gzip.compress("".join(lines).encode("utf-8", "replace"), compresslevel=6)


def _whole_lines(part: Path) -> Iterator[str]:
    """Yield the lines of all complete gzip members, in bounded memory."""
    with open(part, "rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        data = file.read(_CHUNK)
        while data:
            # Read one batch; the rest of the file is lost if it is incomplete.
            unread_bytes = file_size - file.tell() + len(data)
            try:
                text, data = _decompress_member(file, data)
            except (zlib.error, EOFError):
                logger.warning(
                    "%s: skipped the last %d bytes, a batch cut off while being written",
                    part,
                    unread_bytes,
                )
                return
            if text is None:
                logger.warning(
                    "%s: skipped a batch of more than %d bytes, decompressed", part, MAX_BATCH
                )
            else:
                yield from text.decode("utf-8", "replace").split("\n")[:-1]


def _decompress_member(file: BinaryIO, data: bytes) -> tuple[bytes | None, bytes]:
    """Decompress the gzip member that begins with `data` and continues in `file`.

    Returns:
        `tuple`: Its text, or `None` if that is too large; and the bytes read after it.

    Raises:
        `EOFError` or `zlib.error`: The member is incomplete.
    """
    # 31: a window of 32 KiB, in the gzip format
    member = zlib.decompressobj(wbits=31)
    pieces: list[bytes] = []
    size = 0
    while not member.eof:
        piece = member.decompress(data, _CHUNK)
        size += len(piece)
        # Keep at most `MAX_BATCH` bytes in memory, but read to the end of the member.
        if size > MAX_BATCH:
            pieces.clear()
        else:
            pieces.append(piece)
        # Either the bytes after the member, or those that are not decompressed yet.
        data = member.unused_data if member.eof else member.unconsumed_tail
        if not data:
            data = file.read(_CHUNK)
        # The file ends inside of the member.
        if not piece and not data and not member.eof:
            raise EOFError
    text = b"".join(pieces) if size <= MAX_BATCH else None
    return text, data
