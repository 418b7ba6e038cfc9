"""The turns and replies of groups in flight, on disk, so that a killed run samples and pays for nothing twice.

An [`EpisodeLog`] stands between one rollout's episode and its policy and environment. It logs every turn and every
reply, and requests none that is in the log: a resumed run replays the episode and goes on from there. [`InFlightFile`]
keeps these entries, one file per process.

Entries are valid only for the run that wrote them. The file's first line identifies that run: the settings that decide
what a group is, and the weights at its beginning. Entries of another run, and damaged lines, are counted in one warning
and not used; they never block a resume.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import uuid
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..llm import LLMError, Reply, Usage
from ..records import RecordFile, atomic_write
from ..rollout import AgentSpec, Environment, Limits, Observation, Rollout, Sample, SampleRequest
from .config import MultiTurnGRPOConfig

logger = logging.getLogger(__name__)


class EpisodeLog(Environment):
    """Policy and environment of one rollout's episode, with a log of every turn and reply.

    Args:
        policy (`Callable`): Samples a turn that is not in the log.
        environment (`Callable`): Answers a turn whose reply is not in the log. Its second argument records the reply
            and must be called in the task that receives it: the episode's own task may be cancelled before it resumes.
        updates (`Callable`): Returns the number of updates of the weights so far.
        keep (`Callable[[dict], None]`): Writes an entry to disk.
        turns (`list[dict]`, *optional*): Turns sampled before a restart, each the fields of a [`Sample`] and the
            request's `seed`.
        replies (`list[dict]`, *optional*): The environment's replies to them, each the fields of an [`Observation`].
        play_episode (`Callable`, *optional*): As [`Environment`]'s. A resumed run runs the program again from its
            beginning. Its calls come in any order, so a logged turn is found by the seed of its request, which is a
            function of the context; a program that asks otherwise than before gets new turns.

    Attributes:
        lasted (`list[int]`): For each turn sampled by this process: the updates while it was sampled.
    """

    described_by = None  # it forwards to the environment, whose call is the tool in traces
    step_timeout = math.inf  # the environment's step has the limit

    def __init__(
        self,
        policy: Callable[[SampleRequest], Awaitable[Sample]],
        environment: Callable[
            [Rollout, Callable[[Observation | None], None]], Awaitable[Observation | None]
        ],
        updates: Callable[[], int],
        keep: Callable[[dict[str, Any]], None],
        turns: Any = (),
        replies: Any = (),
        play_episode: Callable[..., Awaitable[Rollout]] | None = None,
    ):
        self.play_episode = play_episode
        self.policy, self.environment, self.updates, self.keep = policy, environment, updates, keep
        self.turns, self.replies, self.lasted = list(turns), list(replies), list[int]()
        if (
            play_episode is None
        ):  # where a line was lost, later ones belong to another reply or turn
            self.turns = self.turns[: len(self.replies) + 1]
            self.replies = self.replies[: len(self.turns)]
        self._played = 0  # turns since this process began
        self._unasked = (
            {turn["seed"]: turn for turn in self.turns} if play_episode is not None else {}
        )

    async def __call__(self, request: SampleRequest) -> Sample:
        """The next turn: from the log, else from the policy."""
        turn = self._logged(request)
        if turn is None:
            turn = await self._sampled(request)
            self.keep({"at": len(self.turns), "turn": turn})
            self.turns.append(turn)
        return _sample(turn)

    def _logged(self, request: SampleRequest) -> dict[str, Any] | None:
        if self.play_episode is not None:
            return self._unasked.pop(request.seed, None)
        at, self._played = self._played, self._played + 1
        return self.turns[at] if at < len(self.turns) else None

    async def _sampled(self, request: SampleRequest) -> dict[str, Any]:
        asked = self.updates()
        sample = await self.policy(request)
        self.lasted.append(self.updates() - asked)
        if sample.logprobs is None:
            raise ValueError(
                "async_lead > 0 needs a policy that gives the log-probability of each token it samples"
            )
        # Without a report of the policy's updates take those at the request: the turn then counts as older.
        updates = list(sample.updates) or [asked] * len(sample.ids)
        return {**asdict(sample), "updates": updates, "seed": request.seed}

    def asked_turns(self) -> list[dict[str, Any]]:
        """The turns of this episode; without those of an earlier process that its program has not asked for again."""
        unasked = self._unasked.values()
        return [turn for turn in self.turns if turn not in unasked]

    async def step(self, rollout: Rollout) -> Observation | None:
        """The reply to the last turn: from the log, else from the environment. Failures are not logged; a resumed run
        asks again."""
        at = len(rollout.turns) - 1
        if at < len(self.replies):
            return _observation(self.replies[at])
        return await self.environment(rollout, self._record_reply)

    def _record_reply(self, observation: Observation | None) -> None:
        if observation is None or observation.error is None:
            reply = _plain(observation)
            self.keep({"at": len(self.replies), "reply": reply})
            self.replies.append(reply)


class InFlightFile:
    """The log of a process's groups in flight.

    Made while the run's folder is locked: it may delete or replace the file.

    Args:
        path (`Path`): The file.
        identity (`dict`): Plain settings that decide what a group is; see [`InFlightFile.trust`].
        policy (`int`): Fingerprint of the weights that this process starts with; see [`policy_fingerprint`].
        resumes (`bool`): Whether the entries of an earlier process may be used. Otherwise they are deleted.

    Attributes:
        run (`str`): The id of the run. A checkpoint keeps it, to tell its log from another run's.
        groups (`dict[int, dict]`): The entries of the file, by the number of the group.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], policy: int, resumes: bool):
        self.file, self.identity, self.policy = (
            RecordFile(path),
            json.loads(json.dumps(identity)),
            policy,
        )
        self.run, self.groups = uuid.uuid4().hex, dict[int, dict[str, Any]]()
        self._lock, self._failing = threading.Lock(), False
        self._header: dict[str, Any] = {}
        if resumes:
            self._read()
        else:
            path.unlink(missing_ok=True)
        self._began = bool(self._header)

    def trust(self, state: Mapping[str, Any] | None) -> bool:
        """Decide whether the entries belong to this run. Entries of another run are put aside, with one warning.

        Args:
            state (`dict`, *optional*): `run` and `identity` of the checkpoint that is resumed. `None`: there is no
                checkpoint, and the model must still have the weights that the run began with.

        Returns:
            `bool`: Whether the groups in flight of the checkpoint itself may be used.
        """
        settings = self.identity if state is None else state["identity"]
        changed = sorted(
            name for name in self.identity if settings.get(name) != self.identity[name]
        )
        if self._header:
            known = self._header["identity"]
            changed += [name for name in self.identity if known.get(name) != self.identity[name]]
            other = (
                self._header["policy"] != self.policy
                if state is None
                else self._header["run"] != state["run"]
            )
            changed += (
                ["the weights that the run began with" if state is None else "the run"]
                if other
                else []
            )
        if changed and (self._header or state is not None):
            self._put_aside(sorted(set(changed)), len(self.groups))
        elif self._header:
            self.run = self._header["run"]
        elif state is not None:
            self.run = state["run"]
        return not changed

    def write(self, record: Mapping[str, Any]) -> None:
        """Append an entry. When the disk is full, training goes on without the log: a resumed run pays again."""
        with self._lock:
            try:
                header = {"run": self.run, "identity": self.identity, "policy": self.policy}
                self.file.append([record] if self._began else [header, record])
                self._began = True
            except OSError as error:
                if not self._failing:
                    logger.warning(
                        "%s cannot be written, training goes on without: %s", self.file.path, error
                    )
                self._failing = True

    def forget_before(self, number: int) -> None:
        """Delete the entries of groups that no checkpoint needs any more."""
        with (
            self._lock,
            suppress(OSError),
        ):  # a full disk must cost no checkpoint: the next one tries again
            self.file.keep(lambda record: record.get("group", number) >= number)

    # --- reading -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read every line that is whole. The others are counted, and the file is written again without them."""
        path, damaged, good = self.file.path, list[int](), list[bytes]()
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            logger.warning("%s cannot be read, groups in flight are played again: %s", path, error)
            return
        lines = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if self._take(line):
                good.append(line)
            elif number < len(lines):  # the last line has no end: it was cut off by the kill
                damaged.append(number)
        if damaged:
            logger.warning(
                "%s: %d damaged lines are not used, the first is line %d; what they held is sampled and paid again",
                *(path, len(damaged), damaged[0]),
            )
        if not self._header:
            good, self.groups = [], {}
        if (readable := b"".join(line + b"\n" for line in good)) != content:
            atomic_write(path, readable)

    def _take(self, line: bytes) -> bool:
        """Read a line and return whether it could be used."""
        try:
            record = json.loads(line)
            if "identity" in record:
                identity, run, policy = (
                    dict(record["identity"]),
                    str(record["run"]),
                    record["policy"],
                )
                self._header = {"identity": identity, "run": run, "policy": policy}
                return True
            number = _whole_number(record["group"])
            if "prompts" in record:
                _whole_number(record["update"]), _whole_number(record["prompts"])
                self.groups[number] = {
                    **record,
                    "metadata": [dict(one) for one in record["metadata"]],
                    "episodes": {},
                }
                return True
            return number in self.groups and _add(self.groups[number]["episodes"], record)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False

    def _put_aside(self, changed: list[str], groups: int) -> None:
        logger.warning(
            "%s: %d groups in flight are not used, because this run differs in %s; they are played anew, and the file "
            "is kept as %s", self.file.path, groups, ", ".join(changed), _aside(self.file.path).name,
        )  # fmt: skip
        self._header, self.groups, self._began = {}, {}, False
        if self.file.path.exists():
            os.replace(self.file.path, _aside(self.file.path))


def identity_of(
    spec: AgentSpec,
    limits: Limits,
    environment: Any,
    rollouts_per_row: int,
    args: MultiTurnGRPOConfig,
) -> dict[str, Any]:
    """The settings that decide what a group in flight is: with others its entries would describe another rollout.

    Args:
        spec ([`AgentSpec`]): The form of the agent.
        limits ([`Limits`]): Turn and token limits of a rollout.
        environment ([`Environment`], *optional*): Identified by its name, that of its large LLM and its `identity`.
        rollouts_per_row (`int`): Rollouts of a group.
        args ([`MultiTurnGRPOConfig`]): The run's.
    """
    parts = (
        list(getattr(environment, "by_name", {"": environment}).values())
        if environment is not None
        else []
    )
    chats = [getattr(one, "chat", None) for one in parts]
    grammars = [one.grammar for one in spec.each() or [spec]]
    own_identity = {} if environment is None else dict(environment.identity)
    return {
        "seed": args.seed,
        "num_generations": args.num_generations,
        "rollouts_per_row": rollouts_per_row,
        "generation_batch_size": args.generation_batch_size,
        "processes": args.world_size,
        "limits": _limits_on_tokens(limits),
        "grammar": ", ".join(f"{type(one).__name__} {one}" for one in grammars),
        "sampling": dict(spec.sampling),
        "chat_template_kwargs": json.dumps(spec.chat_template_kwargs, sort_keys=True, default=str),
        "environment": ", ".join(one.described_by.__qualname__ for one in parts),
        "model": ", ".join(
            str(getattr(one, "model", type(one).__qualname__)) for one in chats if one is not None
        ),
        # Left out where there are none, as in the logs of runs before there were any.
        **({"environment_settings": own_identity} if own_identity else {}),
    }


def _limits_on_tokens(limits: Limits) -> dict[str, Any]:
    """The limits without those on time, which may change between two starts of a run."""
    saved = asdict(limits)
    for own in (saved, *saved["environments"].values()):
        own.pop("step_timeout", None)
    return saved


def policy_fingerprint(model: torch.nn.Module) -> int:
    """A number that differs for other weights, made of 64 elements of each parameter (of this process's shard).

    Args:
        model (`torch.nn.Module`): Whole, or cut into shards by ZeRO-3 or FSDP2.
    """
    found = 0
    for name, parameter in model.named_parameters():
        own = getattr(parameter, "ds_tensor", parameter)
        own = own.to_local() if hasattr(own, "to_local") else own
        flat = own.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // 64)][:64].float().cpu()
        found = zlib.crc32(name.encode() + picked.numpy().tobytes(), found)
    return found


def length_of(episode: Mapping[str, Any]) -> int:
    """The number of turns and replies in an episode's entries."""
    return len(episode["turns"]) + len(episode["replies"])


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.stem}.unused{path.suffix}")


def _add(episodes: dict[int, dict[str, list]], record: Mapping[str, Any]) -> bool:
    """Append a turn or reply to its episode and return whether it was whole and in order. It replaces what an earlier
    process had written at its place and after it."""
    kind = "turn" if "turn" in record else "reply"
    entry, place, at = record[kind], _whole_number(record["rollout"]), _whole_number(record["at"])
    if kind == "turn":
        _whole_number(entry["seed"])
        sample = _sample(entry)
        if not len(sample.ids) == len(sample.logprobs or ()) == len(sample.updates) > 0:
            return False
        for one in (*sample.ids, *sample.updates):
            _whole_number(one)
        if not all(isinstance(one, float | int) for one in sample.logprobs or ()):
            return False
    elif (observation := _observation(entry)) is not None and not isinstance(observation.text, str):
        return False
    episode = episodes.setdefault(place, {"turns": [], "replies": []})
    if at > len(entries := episode["turns" if kind == "turn" else "replies"]):
        return False
    entries[at:] = [entry]
    if kind == "turn":
        del episode["replies"][at:]
    else:
        del episode["turns"][at + 1 :]
    return True


def _whole_number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _sample(turn: Mapping[str, Any]) -> Sample:
    return Sample(**{name: value for name, value in turn.items() if name != "seed"})


def _plain(observation: Observation | None) -> dict[str, Any]:
    """A reply as plain JSON; empty where the environment ended the episode."""
    if observation is None:
        return {}
    # Failed replies too: rewards and environments count them, and a resumed run must count the same.
    replies = [_saved_reply(reply) for reply in observation.replies]
    entry = {"text": observation.text, "seconds": observation.seconds, "replies": replies}
    if observation.parts:
        entry["parts"] = list(observation.parts)
    return entry


def _observation(entry: Mapping[str, Any]) -> Observation | None:
    if "text" not in entry:
        return None
    replies = tuple(_loaded_reply(saved) for saved in entry["replies"])
    parts = tuple(str(part) for part in entry.get("parts", ()))
    return Observation(entry["text"], replies=replies, seconds=float(entry["seconds"]), parts=parts)


def _saved_reply(reply: Reply) -> dict[str, Any]:
    """A reply as plain JSON."""
    error = None if reply.error is None else reply.error.to_json()
    return {**asdict(replace(reply, error=None)), "error": error}


def _loaded_reply(saved: Mapping[str, Any]) -> Reply:
    error = None if saved["error"] is None else LLMError.from_json(saved["error"])
    usage, saved_usage = Usage(**saved["usage"]), Usage(**saved["saved"])
    return Reply(**{**saved, "error": error, "usage": usage, "saved": saved_usage})
