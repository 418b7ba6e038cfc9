"""The source of batches that are played ahead: a step does not wait for its slowest rollouts.

A [`RowStream`] has the rows of the whole run in the order of TRL's sampler, so groups of rollouts
can be started `async_lead` steps ahead. Each step starts as many groups as it uses, and trains on
the oldest finished ones. Groups that are not finished are carried over to later steps: an episode
is a coroutine (`play`), so it may last longer than the step in which it was started. A step waits
only for groups that no later step could use within `max_staleness`. How the groups in flight
survive a restart is described in the docstring of this folder.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...llm import run
from ...llm.guard import await_contained
from ...rollout import (
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
from ...rollout.environment import same_columns
from ..checkpointing.stop_training import TrainingStopped
from ..config import MultiTurnGRPOConfig
from ..rollouts import Batch, BatchPosition, Prompts, RolloutPlayer
from ..row_order import RowStream
from .episode_log import EpisodeLog, LoggedEnvironment, RecordReply
from .in_flight_file import InFlightFile, SavedEpisode, SavedGroup
from .lead_stats import IdleClock, LeadStats, gather_lead_metrics
from .run_identity import describe_run, fingerprint_prompts, fingerprint_weights

NOT_USED = -1  # the `used_at` of a group that no step has used yet


@dataclass
class RolloutGroup:
    """The rollouts of one row, from their start to the step that trains on them.

    Args:
        number (`int`): Counts the groups of the run over all processes. The group's row and seeds
            are functions of it.
        started_at (`int`): Weight updates before the group was started.
        rollouts (`list[Rollout]`): Each `row` has the rendered `prompt`.
        metadata (`list[dict]`): What [`Prompts.choose_metadata`] returned for each rollout when the
            group was started.
        episode_logs (`list[EpisodeLog]`): The log of each rollout's episode.
        prompts_fingerprint (`int`): A resumed run sees by it whether the rendered prompts are still
            the same.
        tasks (`list[asyncio.Task]`): The running episodes.
        used_at (`int`): Weight updates before the step that used the group; `NOT_USED` before.
    """

    number: int
    started_at: int
    rollouts: list[Rollout]
    metadata: list[dict[str, Any]]
    episode_logs: list[EpisodeLog]
    prompts_fingerprint: int
    tasks: list[asyncio.Task[Rollout]] = field(default_factory=list, repr=False)
    used_at: int = NOT_USED

    @property
    def is_done(self) -> bool:
        return all(rollout.done for rollout in self.rollouts)

    def start_record(self) -> dict[str, Any]:
        """Return the facts about the start of the group, as plain JSON."""
        return {
            "group": self.number,
            "update": self.started_at,
            "prompts": self.prompts_fingerprint,
            "metadata": self.metadata,
        }


@dataclass
class GroupPlan:
    """A group about to be started.

    Args:
        number (`int`): The number of the group.
        metadata (`list[dict]`): The metadata of each rollout.
        prompts (`list`): The rendered messages of each rollout.
        saved_group ([`SavedGroup`], *optional*): The group as an earlier process started it.
    """

    number: int
    metadata: list[dict[str, Any]]
    prompts: list[Any]
    saved_group: SavedGroup | None = None


class AsyncSource:
    """A [`BatchSource`] that plays groups `async_lead` steps ahead of the weights.

    Args:
        rows ([`RowStream`]): The rows, one for each group.
        prompts ([`Prompts`]): Renders the rows.
        player ([`RolloutPlayer`]): Has the policy and the environment of the episodes.
        in_flight_file ([`InFlightFile`]): Keeps turns and replies on disk.
        lead (`float`): Steps' worth of groups to play beyond the step's own; `async_lead` of the
            settings.
        max_staleness (`int`): The most weight updates between a group's start and its use; a step
            waits for groups that later steps could not use within this limit.
        updates_per_batch (`int`, *optional*, defaults to `1`): Weight updates that learn from a
            batch.

    Attributes:
        updates (`int`): Weight updates before the current batch.
        groups_in_flight (`list[RolloutGroup]`): Started and not used yet, by number.
    """

    def __init__(
        self,
        rows: RowStream,
        prompts: Prompts,
        player: RolloutPlayer,
        in_flight_file: InFlightFile,
        lead: float,
        max_staleness: int,
        updates_per_batch: int = 1,
    ):
        self.rows = rows
        self.prompts = prompts
        self.player = player
        self.in_flight_file = in_flight_file
        self.lead = lead
        self.max_staleness = max_staleness
        self.updates_per_batch = updates_per_batch

        self.updates = 0
        self.groups_in_flight: list[RolloutGroup] = []
        # Groups that the current step used. A checkpoint in the middle of a step repeats it.
        self._used_groups: list[RolloutGroup] = []
        # Groups that this process has started so far. `None` until a checkpoint is loaded or the
        # first batch begins.
        self._started_count: int | None = None
        # Whether a checkpoint was loaded, even one that cannot be continued.
        self._has_loaded_checkpoint = False
        # `used_at` of the groups of the resumed checkpoint, by number. The next batch starts them.
        self._checkpoint_groups: dict[int, int] = {}
        # The number of the oldest group that the latest checkpoint may need. Entries before it are
        # deleted after the next checkpoint.
        self._oldest_needed_group = 0
        # Rollouts of an earlier process that are replayed from the start, since the last batch.
        self._played_anew_count = 0
        # Whether training is over, so that episodes send no further requests.
        self._is_ending = False
        self._tasks_awaiting_replies: set[asyncio.Task[Any] | None] = set()
        self._idle_clock = IdleClock()

    def next_batch(self, rows: Sequence[dict[str, Any]], position: BatchPosition) -> Batch:
        """Return a batch of finished groups of this process, whenever they were started.

        Args:
            rows (`list[dict]`): The rows that TRL has drawn. Only their number is used: the groups
                in flight have rows of the [`RowStream`].
            position ([`BatchPosition`]): The position of the batch in the run.
        """
        groups = self.take_groups(len(rows) // self.prompts.rollouts_per_row, position)
        # Put the rollouts of all groups into one batch.
        rollouts = []
        metadata = []
        for group in groups:
            rollouts += group.rollouts
            metadata += group.metadata
        # Groups were started separately, so the environment may have given their rows other
        # columns.
        played_rows = same_columns([rollout.row for rollout in rollouts])
        metrics = self.metrics(groups)
        return Batch(position, played_rows, metadata, rollouts, off_policy=True, metrics=metrics)

    def take_groups(self, group_count: int, position: BatchPosition) -> list[RolloutGroup]:
        """Start a step's worth of groups, wait for as many, and return the oldest finished ones."""
        self.updates = position.step
        # Keep only groups used by an earlier batch of this same step, which a resume plays again.
        self._used_groups = [group for group in self._used_groups if group.used_at == self.updates]
        if self._started_count is None:
            self._begin_run(group_count, position)

        # Start groups.
        numbers = self._take_checkpoint_numbers()
        numbers += self._take_new_numbers(group_count, position, len(numbers))
        self.groups_in_flight += self._start_groups(numbers)

        # Play all groups in flight until the step has enough.
        self._idle_clock.set_trainer_waits(True)
        self.player.run(self._wait_for_groups(group_count), position.description)
        self._idle_clock.set_trainer_waits(False)
        return self._use_finished_groups(group_count)

    def metrics(self, used_groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Return the metrics of a batch of groups. Called on every process, once for each batch."""
        return gather_lead_metrics(self._collect_stats(used_groups))

    # --- starting ------------------------------------------------------------------------------

    def _begin_run(self, group_count: int, position: BatchPosition) -> None:
        """Decide where to begin, at a first batch without a checkpoint that could be continued."""
        # A checkpoint that could not be continued has put the file's entries aside.
        if not self._has_loaded_checkpoint:
            self.in_flight_file.adopt_or_put_aside(None)
        self._started_count = position.batch_index * group_count

    def _take_checkpoint_numbers(self) -> list[int]:
        """Return the numbers of the groups that the resumed checkpoint had started, at most once.

        Those are groups that were not used yet, or were used by this step, which is played again.
        """
        checkpoint_groups = self._checkpoint_groups
        self._checkpoint_groups = {}
        return sorted(
            number
            for number, used_at in checkpoint_groups.items()
            if used_at in (NOT_USED, self.updates)
        )

    def _take_new_numbers(
        self, group_count: int, position: BatchPosition, checkpoint_count: int
    ) -> list[int]:
        """Return the numbers of new groups to start, up to the lead or the end of the run.

        Args:
            group_count (`int`): Groups of a batch.
            position ([`BatchPosition`]): The position of the batch in the run.
            checkpoint_count (`int`): Groups of the checkpoint that are started with them.
        """
        assert self._started_count is not None
        max_in_flight = group_count + round(self.lead * group_count)
        room_in_flight = max_in_flight - len(self.groups_in_flight) - checkpoint_count
        left_in_run = position.batch_count * group_count - self._started_count
        new_count = min(room_in_flight, left_in_run)
        return [self._next_group_number(group_count) for _ in range(new_count)]

    def _next_group_number(self, group_count: int) -> int:
        """Return the number of the next group of this process, in the order of TRL's sampler."""
        assert self._started_count is not None
        # The sampler deals each batch to the processes in blocks of `group_count` groups.
        batch_index, index_in_batch = divmod(self._started_count, group_count)
        self._started_count += 1
        accelerator = self.player.accelerator
        block = batch_index * accelerator.num_processes + accelerator.process_index
        return block * group_count + index_in_batch

    def _start_groups(self, numbers: Sequence[int]) -> list[RolloutGroup]:
        """Return started groups. The environment starts the episodes of all of them at once."""
        plans = [self._plan_group(number) for number in numbers]

        # Render all rows, and let the environment start their episodes.
        rows = []
        reset_seeds = []
        for plan in plans:
            reset_seed = rollout_seed(self.rows.seed, "reset", plan.number)
            for messages in plan.prompts:
                reset_seeds.append(reset_seed)
                prompt = self.player.chat_format.prompt(messages)
                rows.append({**self.rows[plan.number], "prompt": prompt})
        rows = self.player.reset_rows(rows, reset_seeds)

        # Split the rows into groups again.
        groups = []
        for index, plan in enumerate(plans):
            start = index * self.prompts.rollouts_per_row
            group_rows = rows[start : start + self.prompts.rollouts_per_row]
            groups.append(self._start_group(plan, group_rows))
        return groups

    def _plan_group(self, number: int) -> GroupPlan:
        """Return the plan of a group: as an earlier process started it if possible, else anew."""
        row = self.rows[number]
        rollouts_per_row = self.prompts.rollouts_per_row
        saved_group = self.in_flight_file.saved_groups.pop(number, None)

        # Some rollouts are replayed from the start. A program finds its turns in the log. What an
        # environment's `reset` has changed is not in the log, so unless the reset can be repeated
        # the saved group is lost.
        environment = self.player.environment
        if saved_group is not None and environment is not None:
            is_lost = environment.has_reset and not environment.repeatable_reset
            if is_lost or environment.plays_whole_episodes:
                self._played_anew_count += rollouts_per_row
            if is_lost:
                saved_group = None

        # The saved group is continued if its prompts are still the same.
        if saved_group is not None:
            with suppress(LookupError):
                prompts = [
                    self.prompts.render_messages(row, metadata) for metadata in saved_group.metadata
                ]
                is_same = saved_group.prompts_fingerprint == fingerprint_prompts(prompts)
                if len(prompts) == rollouts_per_row and is_same:
                    return GroupPlan(number, saved_group.metadata, prompts, saved_group)

        # Otherwise plan a new group: E-SPL chooses its system prompts now.
        new_metadata = [
            self.prompts.choose_metadata(index, training=True) for index in range(rollouts_per_row)
        ]
        prompts = [self.prompts.render_messages(row, metadata) for metadata in new_metadata]
        return GroupPlan(number, new_metadata, prompts)

    def _start_group(self, plan: GroupPlan, rows: Sequence[dict[str, Any]]) -> RolloutGroup:
        """Return the group of a plan. `rows` are those of its episodes."""
        # Groups of one batch's worth share replies.
        sharing_key = f"{self.rows.seed}.lead.{plan.number // self.rows.groups_per_batch}"
        saved_episodes = plan.saved_group.episodes if plan.saved_group is not None else {}
        rollouts = []
        episode_logs = []
        for index, row in enumerate(rows):
            chat_format = self.player.chat_format.for_row(row)
            rollout = Rollout(
                chat_format.prompt_ids(row["prompt"]),
                row=row,
                seed=rollout_seed(self.rows.seed, "group", plan.number, index),
                batch=sharing_key,
                group=plan.number,
            )
            rollouts.append(rollout)
            saved_episode = saved_episodes.get(index, SavedEpisode())
            episode_logs.append(self._make_episode_log(plan.number, index, saved_episode))

        # A group counts as old as its first start.
        started_at = self.updates
        if plan.saved_group is not None:
            started_at = min(plan.saved_group.started_at, self.updates)
        group = RolloutGroup(
            number=plan.number,
            started_at=started_at,
            rollouts=rollouts,
            metadata=plan.metadata,
            episode_logs=episode_logs,
            prompts_fingerprint=fingerprint_prompts(plan.prompts),
        )
        if plan.saved_group is None:
            self.in_flight_file.write(group.start_record())
        return group

    def _make_episode_log(
        self, group_number: int, rollout_index: int, saved_episode: SavedEpisode
    ) -> EpisodeLog:
        # An entry says where it belongs, because one file has all groups of the process.
        def write_entry(entry: dict[str, Any]) -> None:
            self.in_flight_file.write({"group": group_number, "rollout": rollout_index, **entry})

        environment = self.player.environment
        return EpisodeLog(
            ask_policy=self._ask_policy,
            ask_environment=self._ask_environment,
            count_updates=lambda: self.updates,
            write_entry=write_entry,
            turns=saved_episode.turns,
            replies=saved_episode.replies,
            is_program=environment is not None and environment.plays_whole_episodes,
        )

    # --- waiting -------------------------------------------------------------------------------

    async def _wait_for_groups(self, group_count: int) -> None:
        """Play the groups in flight until the step may take `group_count` of them."""
        player = self.player
        environment = player.environment
        play_episode = None if environment is None else environment.play_episode
        # Start the episodes of new groups; those of earlier steps are still running. The log stands
        # in front of the policy and the environment.
        tasks = []
        for group in self.groups_in_flight:
            if not group.tasks:
                for rollout, log in zip(group.rollouts, group.episode_logs, strict=True):
                    episode = play(
                        rollout,
                        policy=log.sample,
                        environment=LoggedEnvironment(log, play_episode),
                        chat_format=player.chat_format,
                        limits=player.limits,
                    )
                    group.tasks.append(asyncio.create_task(await_contained(episode)))
            tasks += group.tasks

        # Check after each finished episode.
        while True:
            for task in tasks:
                if task.done():
                    task.result()  # raises if the engine has failed, which concerns all episodes
            if self._has_enough_groups(group_count):
                return
            unfinished = [task for task in tasks if not task.done()]
            await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)

    def _use_finished_groups(self, group_count: int) -> list[RolloutGroup]:
        """Return the oldest finished groups; the others stay in flight."""
        finished_groups = [group for group in self.groups_in_flight if group.is_done]
        used_groups = finished_groups[:group_count]
        self.groups_in_flight = [
            group for group in self.groups_in_flight if group not in used_groups
        ]
        for group in used_groups:
            group.used_at = self.updates
        self._used_groups += used_groups
        return used_groups

    def _has_enough_groups(self, group_count: int) -> bool:
        """Return whether `group_count` groups are done and the others can wait.

        Later steps must be able to use the others within `max_staleness`.
        """
        # Go through the groups from the oldest on, which are the first to become too stale.
        done_count = 0
        oldest_first = sorted(self.groups_in_flight, key=lambda group: group.started_at)
        for position, group in enumerate(oldest_first, 1):
            if group.is_done:
                done_count += 1
            updates_left = max(self.max_staleness - (self.updates - group.started_at), 0)
            batches_left = updates_left // self.updates_per_batch
            # Later batches can still take some of the groups up to this one: the others must be
            # done.
            later_count = batches_left * group_count
            due_count = position - later_count
            if done_count < min(group_count, due_count):
                return False
        return done_count >= group_count

    async def _ask_policy(self, request: SampleRequest) -> Sample:
        # Training is over: the episode ends before its next turn.
        if self._is_ending:
            raise asyncio.CancelledError
        policy = self.player.policy
        self._idle_clock.needs_trainer_thread = (
            isinstance(policy, Engine) and policy.on_callers_thread
        )
        self._idle_clock.turn_started()
        try:
            return await policy(request)
        finally:
            self._idle_clock.turn_ended()

    async def _ask_environment(self, rollout: Rollout, record: RecordReply) -> Observation | None:
        # Training is over: the episode ends before it pays for another reply.
        if self._is_ending:
            raise asyncio.CancelledError
        # Mark the episode as one that awaits a reply, which is paid for and worth logging.
        task = asyncio.current_task()
        self._tasks_awaiting_replies.add(task)
        try:
            limits = self.player.limits.for_row(rollout.row)
            return await observe(self.player.environment, rollout, limits.step_timeout, record)
        finally:
            self._tasks_awaiting_replies.discard(task)

    def _collect_stats(self, used_groups: Sequence[RolloutGroup]) -> LeadStats:
        """Return this process's facts about the batch, and reset those that are read once."""
        # The age of every token that the step trains on.
        token_ages: Counter[int] = Counter()
        for group in used_groups:
            for log in group.episode_logs:
                for turn in log.requested_turns():
                    token_ages.update(max(self.updates - update, 0) for update in turn["updates"])

        # Turns that ended since the last batch, of groups in flight too.
        updates_during_turns = []
        for group in (*used_groups, *self.groups_in_flight):
            for log in group.episode_logs:
                updates_during_turns += log.updates_during_turns
                log.updates_during_turns.clear()

        trainer_idle, policy_idle = self._idle_clock.read_idle_shares()
        played_anew = self._played_anew_count
        self._played_anew_count = 0
        return LeadStats(
            token_ages=token_ages,
            updates_during_turns=updates_during_turns,
            groups_in_flight=len(self.groups_in_flight),
            trainer_idle=trainer_idle,
            policy_idle=policy_idle,
            played_anew=played_anew,
        )

    # --- checkpoints, and the end of training --------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the groups in flight as plain data, without turns and replies still to arrive.

        Includes the groups that the latest step used, because a checkpoint in the middle of a step
        repeats it. The state of each group is what its log holds.
        """
        group_states = []
        for group in [*self._used_groups, *self.groups_in_flight]:
            episodes = [
                {"turns": list(log.turns), "replies": list(log.replies)}
                for log in group.episode_logs
            ]
            group_states.append(
                {**group.start_record(), "used_at": group.used_at, "episodes": episodes}
            )
        return {
            "run": self.in_flight_file.run_id,
            "identity": dict(self.in_flight_file.identity),
            "started": self._started_count,
            "groups": group_states,
        }

    def release_old_entries(self) -> None:
        """Delete entries in the file that this checkpoint and the one before it do not need.

        Called when a checkpoint with this state is complete. The one before it can still be
        resumed. An even older one has the logs of its own groups, and pays again for what arrived
        after it.
        """
        self.in_flight_file.delete_groups_before(self._oldest_needed_group)
        numbers = [group.number for group in (*self._used_groups, *self.groups_in_flight)]
        self._oldest_needed_group = min(numbers, default=self._oldest_needed_group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`AsyncSource.state_dict`] and entries that were written after it."""
        self._has_loaded_checkpoint = True
        if not self.in_flight_file.adopt_or_put_aside(state):
            return
        # Note the groups of the checkpoint; the next batch starts them.
        self._started_count = state["started"]
        for group_state in state["groups"]:
            number = group_state["group"]
            self.in_flight_file.saved_groups[number] = SavedGroup(
                number=number,
                started_at=group_state["update"],
                prompts_fingerprint=group_state["prompts"],
                metadata=group_state["metadata"],
                episodes=self._restore_episodes(group_state),
            )
            self._checkpoint_groups[number] = group_state.get("used_at", NOT_USED)

    def _restore_episodes(self, group_state: Mapping[str, Any]) -> dict[int, SavedEpisode]:
        """Return a group's episodes, each from the checkpoint or from the file's longer log."""
        episodes = {}
        for index, episode_state in enumerate(group_state["episodes"]):
            episodes[index] = SavedEpisode(**episode_state)

        logged_group = self.in_flight_file.saved_groups.get(group_state["group"])
        if logged_group is None or logged_group.prompts_fingerprint != group_state["prompts"]:
            return episodes
        for index, episode in logged_group.episodes.items():
            if index in episodes and len(episode) > len(episodes[index]):
                episodes[index] = episode
        return episodes

    @contextmanager
    def finish_requests_on_exit(self) -> Iterator[None]:
        """The context around training.

        At its end the replies that were requested are awaited and logged, unless training raised
        an error.
        """
        # Replies are not awaited after an error or a second Ctrl-C.
        awaits_replies = False
        try:
            yield
            awaits_replies = True
        except TrainingStopped:
            awaits_replies = True
            raise
        finally:
            run(self._end_episodes(awaits_replies))

    async def _end_episodes(self, awaits_replies: bool) -> None:
        self._is_ending = True
        tasks = []
        for group in self.groups_in_flight:
            tasks += group.tasks

        # Episodes that wait for the policy are cancelled: their turns cost nothing. The others end
        # at their next request.
        for task in tasks:
            if not (awaits_replies and task in self._tasks_awaiting_replies):
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_async_source(
    args: MultiTurnGRPOConfig,
    rows: Any,
    prompts: Prompts,
    player: RolloutPlayer,
    spec: AgentSpec,
    model: torch.nn.Module,
    resumes: bool,
) -> AsyncSource:
    """Return an [`AsyncSource`] with the settings of a run.

    A resumed run continues with the groups in flight, including entries that were written to
    `output_dir/in_flight` after the checkpoint.

    Args:
        args ([`MultiTurnGRPOConfig`]): The settings.
        rows (`Dataset`): The training rows.
        prompts ([`Prompts`]): Renders the rows.
        player ([`RolloutPlayer`]): Has the policy and the environment.
        spec ([`AgentSpec`]): The form of the agent.
        model (`torch.nn.Module`): The model in training.
        resumes (`bool`): Whether the run continues an earlier one.

    Raises:
        `ValueError`: If a process cannot hold whole groups, or the rows cannot be counted.
    """
    # A group is started by one process.
    rollouts_per_row = prompts.rollouts_per_row
    rollouts_per_process = args.per_device_train_batch_size * args.steps_per_generation
    if rollouts_per_process % rollouts_per_row:
        raise ValueError(
            "async_lead > 0 needs whole groups on each process: make per_device_train_batch_size x "
            f"steps_per_generation (now {rollouts_per_process}) a multiple of {rollouts_per_row}"
        )
    if not hasattr(rows, "__len__"):
        raise ValueError(
            "async_lead > 0 needs a train_dataset with a length: do not stream it, or set "
            "async_lead=0"
        )

    # Open this process's log, and the rows in the order of TRL's sampler.
    path = Path(args.output_dir, "in_flight", f"{args.process_index:05d}.jsonl")
    identity = describe_run(spec, player.limits, player.environment, rollouts_per_row, args)
    file = InFlightFile(path, identity, fingerprint_weights(model), resumes)
    groups_per_batch = args.generation_batch_size // rollouts_per_row
    stream = RowStream(rows, args.seed, args.shuffle_dataset, groups_per_batch)
    assert args.max_staleness is not None  # set by the config, since `async_lead` is
    return AsyncSource(
        stream,
        prompts,
        player,
        file,
        lead=args.async_lead,
        max_staleness=args.max_staleness,
        updates_per_batch=args.steps_per_batch,
    )
