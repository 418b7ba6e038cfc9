"""Training that does not wait for stragglers: groups of rollouts in flight are carried over to later steps.

Rows come from a stream of our own, in the order of TRL's sampler, so that more groups can be started than a step uses:
`async_lead` steps ahead. Each step starts as many groups as it uses and trains on the oldest ones that are done; it
waits for groups that later steps could not use within `max_staleness`. An episode is a coroutine (`play`), so it may
last longer than the step in which it was started. Nothing that was sampled or paid for is dropped: after a kill it is
in the [`InFlightFile`].
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from ..llm import run
from ..llm.guard import contain
from ..rollout import (
    AgentSpec,
    Engine,
    Observation,
    Rollout,
    Sample,
    SampleRequest,
    observe,
    play,
    rollout_seed,
)
from ..rollout.environment import same_columns
from .config import MultiTurnGRPOConfig
from .in_flight import EpisodeLog, InFlightFile, identity_of, length_of, policy_fingerprint
from .rollouts import Batch, BatchPosition, Prompts, RolloutPlayer, RowStream
from .stopping import TrainingStopped


@dataclass
class Group:
    """The rollouts of one row.

    Args:
        number (`int`): Counts the groups of the run, all processes together. Its row and its seeds are functions of it.
        update (`int`): Updates of the weights before the group was started.
        rollouts (`list[Rollout]`): Each `row` has the rendered `prompt`.
        metadata (`list[dict]`): The metadata of each rollout when the group was started.
        episodes (`list[EpisodeLog]`): The log of each rollout's episode.
        prompts (`int`): A fingerprint of the rendered prompts.
    """

    number: int
    update: int
    rollouts: list[Rollout]
    metadata: list[dict[str, Any]]
    episodes: list[EpisodeLog]
    prompts: int
    tasks: list[asyncio.Task] = field(default_factory=list, repr=False)
    used_at: int = -1

    @property
    def done(self) -> bool:
        return all(rollout.done for rollout in self.rollouts)

    def start_record(self) -> dict[str, Any]:
        """The facts about the start of the group, as plain JSON."""
        return {
            "group": self.number,
            "update": self.update,
            "prompts": self.prompts,
            "metadata": self.metadata,
        }


class Ahead:
    """A [`BatchSource`] that plays groups `async_lead` steps ahead of the weights.

    Args:
        rows ([`RowStream`]): The rows, one for each group.
        prompts ([`Prompts`]): Renders the rows.
        player ([`RolloutPlayer`]): Has the policy and the environment of the episodes.
        file ([`InFlightFile`]): Stores turns and replies.
        lead (`float`): Steps' worth of groups to play beyond the step's own.
        max_staleness (`int`): The most updates between a group's start and its use; a step waits for groups that
            later steps could not use within this limit.
        updates_per_batch (`int`, *optional*, defaults to `1`): Updates that learn from a batch.

    Attributes:
        updates (`int`): Updates of the weights before the current batch.
        groups (`list[Group]`): Started and not used yet, by number.
    """

    def __init__(
        self,
        rows: RowStream,
        prompts: Prompts,
        player: RolloutPlayer,
        file: InFlightFile,
        lead: float,
        max_staleness: int,
        updates_per_batch: int = 1,
    ):
        self.rows, self.prompts, self.player, self.file = rows, prompts, player, file
        self.lead, self.max_staleness, self.updates_per_batch = (
            lead,
            max_staleness,
            updates_per_batch,
        )
        self.updates = 0
        self.groups: list[Group] = []
        self._used: list[
            Group
        ] = []  # by the current step, which is repeated after a checkpoint in the middle of it
        self._started: int | None = None  # groups of this process so far
        self._saved: dict[
            int, int
        ] = {}  # numbers of the groups that the checkpoint held, and the steps that used them
        self._floor = 0  # the oldest group that the checkpoint before the last one may need
        self._trusts: bool | None = (
            None  # whether the file's entries belong to this run; decided at the first batch
        )
        self._anew = (
            0  # rollouts that an earlier process had begun, and that are played from the beginning
        )
        self._landing = False  # whether training is over, so that episodes send no further requests
        self._asking: set[Any] = set()  # tasks that wait for a reply of the environment
        self._clock = _Clock()

    def next_batch(self, rows: Sequence[dict[str, Any]], position: BatchPosition) -> Batch:
        """A batch of whole groups of this process that are done, whenever they were started. Only the number of `rows`
        is used."""
        groups = self.take(len(rows) // self.prompts.rollouts_per_row, position)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        metadata = [one for group in groups for one in group.metadata]
        rows_played = same_columns(
            [rollout.row for rollout in rollouts]
        )  # each group began by itself
        return Batch(
            position, rows_played, metadata, rollouts, off_policy=True, metrics=self.metrics(groups)
        )

    def take(self, wanted: int, position: BatchPosition) -> list[Group]:
        """Start a step's worth of groups, wait until as many are done, and enough of the old ones among them, and
        return the oldest ones that are done."""
        self.updates = position.step
        self._used = [group for group in self._used if group.used_at == self.updates]
        if self._trusts is None:
            self._trusts = self.file.trust(None)
        if self._started is None:
            self._started = position.batch_index * wanted
        numbers, self._saved = (
            sorted(n for n, used_at in self._saved.items() if used_at in (-1, self.updates)),
            {},
        )
        most = wanted + round(self.lead * wanted)
        while (
            len(self.groups) + len(numbers) < most and self._started < position.batch_count * wanted
        ):
            numbers.append(self._next_number(wanted))
        self.groups += self._begun(numbers)
        self._clock.tick(waits=True)
        self.player.run(self._enough(wanted), position.description)
        self._clock.tick(waits=False)
        taken = [group for group in self.groups if group.done][:wanted]
        self.groups = [group for group in self.groups if group not in taken]
        for group in taken:
            group.used_at = self.updates
        self._used += taken
        return taken

    # --- starting ------------------------------------------------------------------------------------------------

    def _next_number(self, wanted: int) -> int:
        """The number of one more group: the next row of this process's share, in the order of TRL's sampler."""
        assert self._started is not None
        accelerator, (block, within) = self.player.accelerator, divmod(self._started, wanted)
        self._started += 1
        return (block * accelerator.num_processes + accelerator.process_index) * wanted + within

    def _begun(self, numbers: Sequence[int]) -> list[Group]:
        """Groups that an earlier process has begun, and new ones; the environment starts all episodes at once."""
        kept, repeats = [self._kept(number) for number in numbers], self.prompts.rollouts_per_row
        rows = [
            {**self.rows[number], "prompt": self.player.chat_format.prompt(messages)}
            for number, one in zip(numbers, kept, strict=True)
            for messages in one["rendered"]
        ]
        seeds = [rollout_seed(self.rows.seed, "reset", number) for number in numbers]
        rows = self.player.reset_rows(rows, [seed for seed in seeds for _ in range(repeats)])
        return [
            self._group(number, one, rows[i * repeats : (i + 1) * repeats])
            for i, (number, one) in enumerate(zip(numbers, kept, strict=True))
        ]

    def _group(self, number: int, kept: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> Group:
        seed, batch = (
            self.rows.seed,
            f"{self.rows.seed}.lead.{number // self.rows.groups_per_batch}",
        )
        form = self.player.chat_format
        rollouts = [
            Rollout(
                form.of(row).prompt_ids(row["prompt"]),
                row,
                rollout_seed(seed, "group", number, i),
                batch,
                number,
            )
            for i, row in enumerate(rows)
        ]
        episodes = [self._episode(number, i, kept["episodes"].get(i, {})) for i in range(len(rows))]
        update = min(kept.get("update", self.updates), self.updates)
        group = Group(
            number, update, rollouts, kept["metadata"], episodes, _fingerprint(kept["rendered"])
        )
        if "update" not in kept:
            self.file.write(group.start_record())
        return group

    def _episode(self, number: int, place: int, kept: Mapping[str, Any]) -> EpisodeLog:
        def keep(entry: dict[str, Any]) -> None:
            self.file.write({"group": number, "rollout": place, **entry})

        environment = self.player.environment
        plays = None if environment is None else environment.play_episode
        return EpisodeLog(
            self._ask_policy,
            self._ask_environment,
            lambda: self.updates,
            keep,
            **kept,
            play_episode=plays,
        )

    def _kept(self, number: int) -> dict[str, Any]:
        """The entries of an earlier process about a group, with its prompts as `rendered`; those of a new group if
        there are none, or its data or prompts were others."""
        row, kept, repeats = (
            self.rows[number],
            self.file.groups.pop(number, {}),
            self.prompts.rollouts_per_row,
        )
        environment = self.player.environment
        if kept and environment is not None:
            # The log does not hold how an episode changed the environment.
            is_lost = environment.has_reset and not environment.repeatable_reset
            if is_lost or environment.play_episode is not None:
                self._anew += repeats
            if is_lost:
                kept = {}
        with suppress(LookupError):
            rendered = [self.prompts.render_messages(row, one) for one in kept.get("metadata", ())]
            if len(rendered) == repeats and kept["prompts"] == _fingerprint(rendered):
                return {**kept, "rendered": rendered}
        metadata = [self.prompts.choose_metadata(i, training=True) for i in range(repeats)]
        rendered = [self.prompts.render_messages(row, one) for one in metadata]
        return {"metadata": metadata, "rendered": rendered, "episodes": {}}

    # --- waiting -------------------------------------------------------------------------------------------------

    async def _enough(self, wanted: int) -> None:
        player = self.player
        for group in self.groups:
            group.tasks = group.tasks or [
                asyncio.create_task(
                    contain(play(rollout, log, log, player.chat_format, player.limits))
                )
                for rollout, log in zip(group.rollouts, group.episodes, strict=True)
            ]
        tasks = [task for group in self.groups for task in group.tasks]
        while True:
            for task in tasks:
                if task.done():
                    task.result()  # raises if the engine has failed, which concerns all episodes
            if self._may_go_on(wanted):
                return
            await asyncio.wait(
                [task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )

    def _may_go_on(self, wanted: int) -> bool:
        """Whether enough groups are done, and so many of the old ones that later batches can use the others in time."""
        done = 0
        for place, group in enumerate(sorted(self.groups, key=lambda group: group.update), 1):
            done += group.done
            batches_left = (
                max(self.max_staleness - self.updates + group.update, 0) // self.updates_per_batch
            )
            if done < min(wanted, place - batches_left * wanted):
                return False
        return done >= wanted

    async def _ask_policy(self, request: SampleRequest) -> Sample:
        if self._landing:
            raise asyncio.CancelledError
        policy = self.player.policy
        self._clock.needs_thread = isinstance(policy, Engine) and policy.on_callers_thread
        self._clock.tick(turns=1)
        try:
            return await policy(request)
        finally:
            self._clock.tick(turns=-1)

    async def _ask_environment(
        self, rollout: Rollout, record: Callable[[Observation | None], None]
    ) -> Observation | None:
        if self._landing:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        self._asking.add(task)
        try:
            limits = self.player.limits.of(rollout.row)
            return await observe(self.player.environment, rollout, limits.step_timeout, record)
        finally:
            self._asking.discard(task)

    def metrics(self, taken: list[Group]) -> dict[str, float]:
        """Ages in updates, groups in flight, repeated rollouts, and idle shares, over all processes, once a batch."""
        episodes = [log for group in (*taken, *self.groups) for log in group.episodes]
        lasted = [updates for log in episodes for updates in log.lasted]
        for log in episodes:
            log.lasted.clear()
        turns = [turn for group in taken for log in group.episodes for turn in log.asked_turns()]
        ages = [max(self.updates - updates, 0) for turn in turns for updates in turn["updates"]]
        waiting, idle = self._clock.shares()
        facts = gather_object(
            [(
                sum(ages), len(ages), max(ages, default=0), sum(lasted), len(lasted), len(self.groups), waiting, idle,
                self._anew,
            )]
        )  # fmt: skip
        self._anew = 0
        sums, tokens, oldest, lasting, ended, flying, waited, idled, anew = zip(*facts, strict=True)
        return {
            "async/played_anew": float(sum(anew)),
            "async/token_age": sum(sums) / max(sum(tokens), 1), "async/token_age_max": float(max(oldest)),
            "async/turn_age": sum(lasting) / max(sum(ended), 1), "async/groups_in_flight": float(sum(flying)),
            "async/trainer_idle": sum(waited) / len(facts), "async/policy_idle": sum(idled) / len(facts),
        }  # fmt: skip

    # --- checkpoints, and the end of training --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The groups in flight as plain data, without the turns and replies that have not arrived yet; and those that
        the latest step has used, because a checkpoint in the middle of a step repeats it."""
        groups = [*self._used, *self.groups]
        # The checkpoint before this one is whole and may be resumed from: delete only entries that it does not need.
        self.file.forget_before(self._floor)
        self._floor = min((group.number for group in groups), default=self._floor)
        return {
            "run": self.file.run,
            "identity": dict(self.file.identity),
            "started": self._started,
            "groups": [
                {
                    **group.start_record(),
                    "used_at": group.used_at,
                    "episodes": [
                        {"turns": list(log.turns), "replies": list(log.replies)}
                        for log in group.episodes
                    ],
                }
                for group in groups
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from an [`Ahead.state_dict`], and from the entries that were written after it."""
        self._trusts = self.file.trust(state)
        if not self._trusts:
            return
        self._started = state["started"]
        for held in state["groups"]:
            number = held["group"]
            episodes, written = dict(enumerate(held["episodes"])), self.file.groups.get(number, {})
            if written.get("prompts") == held["prompts"]:
                for i, one in written["episodes"].items():
                    if i in episodes and length_of(one) > length_of(episodes[i]):
                        episodes[i] = one
            self.file.groups[number] = {**held, "episodes": episodes}
            self._saved[number] = held.get("used_at", -1)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context around training. At its end the replies that were requested are awaited and logged, unless
        training raised an error."""
        waits = False
        try:
            yield
            waits = True
        except TrainingStopped:
            waits = True
            raise
        finally:
            run(self._land(waits))

    async def _land(self, waits: bool) -> None:
        self._landing = True
        tasks = [task for group in self.groups for task in group.tasks]
        for task in tasks:
            if not (waits and task in self._asking):
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ahead_of(
    args: MultiTurnGRPOConfig,
    rows: Any,
    prompts: Prompts,
    player: RolloutPlayer,
    spec: AgentSpec,
    model: torch.nn.Module,
    resumes: bool,
) -> Ahead:
    """An [`Ahead`] with the settings of a run. A resumed run goes on with the groups in flight, including entries that
    were written to `output_dir/in_flight` after the checkpoint.

    Raises:
        `ValueError`: A process cannot hold whole groups.
    """
    repeats, own = (
        prompts.rollouts_per_row,
        args.per_device_train_batch_size * args.steps_per_generation,
    )
    if own % repeats or not hasattr(rows, "__len__"):
        raise ValueError(
            f"with async_lead > 0 each process must hold whole groups of rows that can be counted: make "
            f"per_device_train_batch_size x steps_per_generation (now {own}) a multiple of {repeats}, and do not "
            "stream train_dataset"
        )
    path = Path(args.output_dir, "in_flight", f"{args.process_index:05d}.jsonl")
    identity = identity_of(spec, player.limits, player.environment, repeats, args)
    file = InFlightFile(path, identity, policy_fingerprint(model), resumes)
    stream = RowStream(rows, args.seed, args.shuffle_dataset, args.generation_batch_size // repeats)
    assert args.max_staleness is not None  # set where `async_lead` is
    return Ahead(
        stream, prompts, player, file, args.async_lead, args.max_staleness, args.steps_per_batch
    )


class _Clock:
    """Measures the shares of the time between two batches in which the trainer waited, and the policy was sampling."""

    def __init__(self) -> None:
        self.since = self.at = time.monotonic()
        self.waited = self.worked = 0.0
        self.waits, self.turns, self.needs_thread = False, 0, False

    def tick(self, waits: bool | None = None, turns: int = 0) -> None:
        """Record a change: the trainer begins or ends to wait, turns are requested or arrive."""
        now = time.monotonic()
        past, self.at = now - self.at, now
        self.waited += past * self.waits
        self.worked += past * (self.turns > 0 and (self.waits or not self.needs_thread))
        self.waits = self.waits if waits is None else waits
        self.turns += turns

    def shares(self) -> tuple[float, float]:
        """Idle shares of trainer and policy since the last call."""
        past = max(self.at - self.since, 1e-9)
        shares = self.waited / past, 1 - self.worked / past
        self.since, self.waited, self.worked = self.at, 0.0, 0.0
        return shares


def _fingerprint(prompts: Any) -> int:
    return zlib.crc32(json.dumps(prompts, default=str).encode())
