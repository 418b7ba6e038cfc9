"""Training that does not wait for stragglers: groups of rollouts that are not done are carried over to later steps.

Rows come from a stream of our own, in the order in which TRL's sampler gives them, so that more groups can be started
than a step consumes: `lead` steps ahead. Each step starts as many as it consumes and trains on the oldest that are
done; one that has reached `max_staleness` is waited for. An episode is a coroutine (`play`), so it outlives the step in
which it began. An [`EpisodeLog`] stands between the episode and the policy and environment. Nothing that was sampled or
paid for is dropped: a run that was killed finds it in the episode logs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from ..llm import Reply, Usage, run
from ..records import RecordFile
from ..rollout import (
    Engine,
    Environment,
    Observation,
    Rollout,
    Sample,
    SampleRequest,
    observe,
    play,
    rollout_seed,
    run_with_engine,
)
from .stopping import TrainingStopped

if TYPE_CHECKING:
    from .config import MultiTurnGRPOConfig
    from .multi_turn_grpo import MultiTurnGRPOTrainer

logger = logging.getLogger(__name__)


class EpisodeLog(Environment):
    """What one rollout's episode is played with: the trainer's policy and environment, every turn and every reply of
    theirs written down. What is on the tape already is not asked for again.

    Args:
        carry_over ([`CarryOver`]): Whose trainer's policy and environment.
        place (`tuple[int, int]`): Number of the group, and which of its rollouts.
        turns (`list[dict]`, *optional*): Turns of an earlier life, a [`Sample`]'s fields each.
        replies (`list[dict]`, *optional*): What the environment said to them, an [`Observation`]'s fields each.
    """

    def __init__(self, carry_over: CarryOver, place: tuple[int, int], turns: Any = (), replies: Any = ()):
        self.carry_over, self.place = carry_over, place
        self.turns, self.replies = list(turns), list(replies)
        self.played = 0  # turns, in this life

    async def __call__(self, request: SampleRequest) -> Sample:
        """The next turn, as a policy gives it."""
        at, self.played = self.played, self.played + 1
        if at == len(self.turns):
            asked = self.carry_over.updates
            sample = await self.carry_over.ask_policy(request)
            self.carry_over.lasted.append(self.carry_over.updates - asked)
            if sample.logprobs is None:
                raise ValueError("lead > 0 needs a policy that gives the log-probability of each token it samples")
            # Where the policy does not say, as of the moment when it was asked: rather too old than too young.
            updates = list(sample.updates) or [asked] * len(sample.ids)
            self._keep(self.turns, "turn", {**asdict(sample), "updates": updates})
        return Sample(**self.turns[at])

    async def step(self, rollout: Rollout) -> Observation | None:
        """What the environment says. Of a failure nothing is kept: in another life it is asked again."""
        at = len(rollout.turns) - 1
        if at == len(self.replies):
            observation = await self.carry_over.ask_environment(rollout)
            if observation is None or observation.error is None:
                self._keep(self.replies, "reply", _plain(observation))
            return observation
        said = self.replies[at]
        if "text" not in said:
            return None
        replies = tuple(
            Reply(**{**reply, **{name: Usage(**reply[name]) for name in ("usage", "saved")}})
            for reply in said["replies"]
        )
        return Observation(said["text"], replies=replies, seconds=said["seconds"])

    def _keep(self, tape: list[dict], kind: str, record: dict[str, Any]) -> None:
        self.carry_over.write({"group": self.place[0], "rollout": self.place[1], "at": len(tape), kind: record})
        tape.append(record)


@dataclass
class Group:
    """The rollouts of one row.

    Args:
        number (`int`): Of the run, all processes together: what its row and its seeds are a function of.
        born (`int`): Updates of the weights before it was started.
        rollouts (`list[Rollout]`): Each `row` has the rendered `prompt`.
        notes (`list[dict]`): The trainer's `metadata` of each, when it was started.
        tapes (`list[EpisodeLog]`): Of each.
        prompts (`int`): A fingerprint of what was rendered.
    """

    number: int
    born: int
    rollouts: list[Rollout]
    notes: list[dict[str, Any]]
    tapes: list[EpisodeLog]
    prompts: int
    tasks: list[asyncio.Task] = field(default_factory=list, repr=False)
    used_at: int = -1

    @property
    def done(self) -> bool:
        return all(rollout.done for rollout in self.rollouts)

    def begun(self) -> dict[str, Any]:
        """How it was started, as plain JSON."""
        return {"group": self.number, "born": self.born, "prompts": self.prompts, "notes": self.notes}


class CarryOver:
    """The groups of a run that are on their way, on this process.

    Args:
        trainer ([`MultiTurnGRPOTrainer`]): Whose policy, environment, rows and settings.
        resumes (`bool`): Whether what an earlier life wrote down is to be used.

    Raises:
        `ValueError`: A process would not hold whole groups, or the rows cannot be counted.
    """

    def __init__(self, trainer: MultiTurnGRPOTrainer, resumes: bool):
        args, repeats = trainer.args, trainer.rollouts_per_row()
        own = args.per_device_train_batch_size * args.steps_per_generation
        if own % repeats or not hasattr(trainer.train_dataset, "__len__"):
            raise ValueError(
                f"with lead > 0 each process must hold whole groups of rows that can be counted: make "
                f"per_device_train_batch_size x steps_per_generation (now {own}) a multiple of {repeats}, and do not "
                "stream train_dataset"
            )
        self.trainer = trainer
        self.updates = 0  # of the weights so far
        self.groups: list[Group] = []  # started and not used yet, by number
        self.used: list[Group] = []  # by the step at hand, which a checkpoint in the middle of it begins again
        self.started: int | None = None  # groups of this process so far
        self.file = RecordFile(
            Path(trainer.args.output_dir, "in_flight", f"{trainer.accelerator.process_index:05d}.jsonl")
        )
        self._writing, self._failing = threading.Lock(), False
        self._earlier = _by_group(self.file) if resumes else {}
        self._saved: list[int] = []  # numbers of the groups that a checkpoint held
        self._floor = 0  # the oldest group that the checkpoint before the last one may need
        if not resumes:
            self.file.path.unlink(missing_ok=True)
        self._landing = False
        self._asking: set[Any] = set()  # tasks that the environment owes a reply
        self.lasted: list[int] = []  # updates that came while a turn was sampled, of each turn since the last step
        self._clock = _Clock()
        self._order: tuple[int, list[int]] = (-1, [])
        self._groups_a_step = trainer.args.generation_batch_size // trainer.rollouts_per_row()  # of all processes

    # --- starting ------------------------------------------------------------------------------------------------

    def _start(self, wanted: int) -> None:
        """One more group: the next row of this process's share, as TRL deals them out."""
        assert self.started is not None
        accelerator, (block, within) = self.trainer.accelerator, divmod(self.started, wanted)
        self.started += 1
        number = (block * accelerator.num_processes + accelerator.process_index) * wanted + within
        self.groups.append(self._group(number))

    def _group(self, number: int) -> Group:
        """A group as an earlier life left it, or a new one."""
        trainer, row = self.trainer, self._row(number)
        kept = self._kept(number, row)
        indices = range(trainer.rollouts_per_row())
        notes = kept.get("notes") or [trainer.metadata(i) for i in indices]
        prompts: list[Any] = kept.get("rendered") or [trainer.prompt_messages(row, i) for i in indices]
        seeds = [rollout_seed(trainer.args.seed, "group", number, i) for i in range(len(prompts))]
        tapes = [EpisodeLog(self, (number, i), **kept.get("tapes", {}).get(i, {})) for i in range(len(prompts))]
        batch = f"{trainer.args.seed}.lead.{number // self._groups_a_step}"  # as those that share replies know it
        rollouts = [
            Rollout(trainer.chat_format.prompt_ids(begun["prompt"]), begun, seed, batch=batch, group=number)
            for begun, seed in zip(trainer.begun([{**row, "prompt": prompt} for prompt in prompts]), seeds, strict=True)
        ]
        born = min(kept.get("born", self.updates), self.updates)
        group = Group(number, born, rollouts, notes, tapes, _fingerprint(prompts))
        if not kept:
            self.write(group.begun())
        return group

    def _kept(self, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """What an earlier life left of a group; nothing if it was of other data or under other prompts."""
        kept = self._earlier.pop(number, {})
        environment = self.trainer.environment
        if environment is not None and environment.has_reset:  # what its episodes have done to it is not on the tapes
            return {}
        try:
            rendered = [self.trainer.prompt_under(row, note) for note in kept.get("notes", ())]
        except LookupError:
            return {}
        return {**kept, "rendered": rendered} if kept.get("prompts") == _fingerprint(rendered) else {}

    def _row(self, number: int) -> dict[str, Any]:
        trainer, rows = self.trainer, self.trainer.train_dataset
        batch = self._groups_a_step
        epoch, place = divmod(number, len(rows) // batch * batch)
        if self._order[0] != epoch:
            order = list(range(len(rows)))
            if trainer.shuffle_dataset:
                generator = torch.Generator().manual_seed(trainer.args.seed + epoch)
                order = torch.randperm(len(rows), generator=generator).tolist()
            self._order = epoch, order
        return dict(rows[self._order[1][place]])

    # --- a step --------------------------------------------------------------------------------------------------

    def take(self, wanted: int) -> list[Group]:
        """Start a step's worth of groups, wait until as many are done, those that may get no older among them, and
        give the oldest of them."""
        trainer, args = self.trainer, self.trainer.args
        self.updates = trainer.state.global_step
        self.used = [group for group in self.used if group.used_at == self.updates]
        block = args.steps_per_generation * trainer.num_iterations
        calls, last = trainer._step // block, -(-trainer.state.max_steps * args.gradient_accumulation_steps // block)
        if self.started is None:
            self.started = calls * wanted
        self.groups += [self._group(number) for number in self._saved]
        self._saved = []
        while len(self.groups) < wanted + round(args.lead * wanted) and self.started < last * wanted:
            self._start(wanted)
        if hasattr(trainer.policy, "updates"):
            trainer.policy.updates = self.updates
        self._clock.tick(lending=True)
        trainer.run_sampling(lambda listen: run_with_engine(trainer.policy, self._enough(wanted), listen))
        self._clock.tick(lending=False)
        taken = [group for group in self.groups if group.done][:wanted]
        self.groups = [group for group in self.groups if group not in taken]
        for group in taken:
            group.used_at = self.updates
        self.used += taken
        self._log(taken)
        return taken

    async def _enough(self, wanted: int) -> None:
        trainer = self.trainer
        for group in self.groups:
            group.tasks = group.tasks or [
                asyncio.create_task(play(rollout, tape, tape, trainer.chat_format, trainer.limits))
                for rollout, tape in zip(group.rollouts, group.tapes, strict=True)
            ]
        due = [group for group in self.groups if self.updates - group.born >= trainer.args.max_staleness]
        tasks = [task for group in self.groups for task in group.tasks]
        while True:
            for task in tasks:
                if task.done():
                    task.result()  # an engine that fails is everybody's failure
            if all(group.done for group in due) and sum(group.done for group in self.groups) >= wanted:
                return
            await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)

    async def ask_policy(self, request: SampleRequest) -> Sample:
        if self._landing:
            raise asyncio.CancelledError
        policy = self.trainer.policy
        self._clock.needs_thread = isinstance(policy, Engine) and policy.on_callers_thread
        self._clock.tick(turns=1)
        try:
            return await policy(request)
        finally:
            self._clock.tick(turns=-1)

    async def ask_environment(self, rollout: Rollout) -> Observation | None:
        if self._landing:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        self._asking.add(task)
        try:
            return await observe(self.trainer.environment, rollout)
        finally:
            self._asking.discard(task)

    def _log(self, taken: list[Group]) -> None:
        turns = [turn for group in taken for tape in group.tapes for turn in tape.turns]
        ages = [max(self.updates - updates, 0) for turn in turns for updates in turn["updates"]]
        waiting, idle = self._clock.shares()
        lasted, self.lasted = self.lasted, []
        facts = gather_object(
            [(sum(ages), len(ages), max(ages), sum(lasted), len(lasted), len(self.groups), waiting, idle)]
        )
        sums, tokens, oldest, lasting, ended, flying, waited, idled = zip(*facts, strict=True)
        for name, value in {
            "token_age": sum(sums) / sum(tokens), "token_age_max": max(oldest),
            "turn_age": sum(lasting) / max(sum(ended), 1), "groups_in_flight": sum(flying),
            "trainer_idle": sum(waited) / len(facts), "policy_idle": sum(idled) / len(facts),
        }.items():  # fmt: skip
            self.trainer._metrics["train"][f"async/{name}"].append(float(value))

    # --- what outlives the process -------------------------------------------------------------------------------

    def write(self, record: Mapping[str, Any]) -> None:
        """Onto the disk, at once. What a full one does not take is missing in another life: no reason to end this."""
        with self._writing:
            try:
                self.file.append([record])
            except OSError as error:
                if not self._failing:
                    logger.warning("%s cannot be written, training goes on without: %s", self.file.path, error)
                self._failing = True

    def state_dict(self) -> dict[str, Any]:
        """What is in flight, as plain data: complete up to the turns and replies that are under way."""
        again = [group for group in self.used if group.used_at == self.trainer.state.global_step]
        groups = [*again, *self.groups]
        with (
            self._writing
        ):  # the checkpoint before this one is whole and may be gone back to; what it does not need goes
            self.file.keep(lambda record: record["group"] >= self._floor)
        self._floor = min((group.number for group in groups), default=self._floor)
        return {
            "started": self.started,
            "groups": [
                {**group.begun(), "tapes": [{"turns": list(t.turns), "replies": list(t.replies)} for t in group.tapes]}
                for group in groups
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a [`CarryOver.state_dict`], and what was written down after it."""
        self.started = state["started"]
        for held in state["groups"]:
            number = held["group"]
            tapes, written = dict(enumerate(held["tapes"])), self._earlier.get(number, {})
            if written.get("prompts") == held["prompts"]:
                tapes |= {i: tape for i, tape in written["tapes"].items() if _length(tape) > _length(tapes[i])}
            self._earlier[number] = {**held, "tapes": tapes}
            self._saved.append(number)

    @contextmanager
    def flying(self) -> Iterator[None]:
        """Around training. Afterwards the replies under way are waited for and written down, unless it broke off."""
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


class _Clock:
    """How much of the time from one step to the next the trainer waited, and the policy had a turn to sample."""

    def __init__(self) -> None:
        self.began = self.at = time.monotonic()
        self.waited = self.worked = 0.0
        self.lending, self.turns, self.needs_thread = False, 0, False

    def tick(self, lending: bool | None = None, turns: int = 0) -> None:
        """Something changes: the trainer begins or ends to wait, turns are asked for or there."""
        now = time.monotonic()
        past, self.at = now - self.at, now
        self.waited += past * self.lending
        self.worked += past * (self.turns > 0 and (self.lending or not self.needs_thread))
        self.lending = self.lending if lending is None else lending
        self.turns += turns

    def shares(self) -> tuple[float, float]:
        """Idle shares of trainer and policy since the last time."""
        past = max(self.at - self.began, 1e-9)
        shares = self.waited / past, 1 - self.worked / past
        self.began, self.waited, self.worked = self.at, 0.0, 0.0
        return shares


def count_clipped(batch: Mapping[str, torch.Tensor], args: MultiTurnGRPOConfig) -> torch.Tensor:
    """How many tokens (sequences, where ratios are theirs) of a batch have an importance ratio out of bounds, and how
    many there are."""
    mask = batch["completion_mask"] * batch["tool_mask"]
    log_ratio = ((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask).nan_to_num(0.0)
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        log_ratio, mask = log_ratio.sum(1), (mask.sum(1) > 0).long()
    high, low = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    outside = (log_ratio.exp() > (math.inf if high is None else high)) | (log_ratio.exp() < (low or 0.0))
    return torch.stack([(outside * mask).sum(), mask.sum()]).double()


def _plain(observation: Observation | None) -> dict[str, Any]:
    """What was said, as plain JSON; nothing where the environment declared the episode over."""
    if observation is None:
        return {}
    paid = [asdict(reply) for reply in observation.replies if reply.error is None]
    return {"text": observation.text, "seconds": observation.seconds, "replies": paid}


def _fingerprint(prompts: Any) -> int:
    return zlib.crc32(json.dumps(prompts, default=str).encode())


def _length(tape: Mapping[str, Any]) -> int:
    return len(tape["turns"]) + len(tape["replies"])


def _by_group(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """What was written down, by the number of the group."""
    groups: dict[int, dict[str, Any]] = {}
    for record in records:
        if "prompts" in record:
            groups[record["group"]] = {**record, "tapes": {}}
        elif record["group"] in groups:
            tape = groups[record["group"]]["tapes"].setdefault(record["rollout"], {"turns": [], "replies": []})
            kind = "turn" if "turn" in record else "reply"
            if record["at"] == len(tape[plural := {"turn": "turns", "reply": "replies"}[kind]]):
                tape[plural].append(record[kind])
    return groups
