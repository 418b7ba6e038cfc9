"""The work that makes children: what of a batch is reflected on, who does it, and when its outcomes are taken.

Either a reference LLM does it, on the background loop beside the weight update; or the policy itself, when the children
are due, with the weights of that moment, which a checkpoint has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from ..evolution import Outcome, PromptResult, Rating, propose_children
from ..llm import BadRequest, Message, Reply, TimedOut, Usage, as_chat, start
from ..rollout import Rollout, SampleRequest, rollout_seed, run_with_engine

if TYPE_CHECKING:
    from .espl import ESPLTrainer

logger = logging.getLogger(__name__)


@dataclass
class ReflectionJob:
    """One batch's work, and where its outcomes will be."""

    batch: int  # where it comes from
    best: PromptResult  # the parent of the mutation
    crossing: Sequence[PromptResult] | None  # the whole batch, if it crosses
    scores: Mapping[int, Sequence[float | None]] = field(default_factory=dict)  # `scores_of` the batch, for the journal
    # Of the prompts of the batch as it left them, by id: what the children inherit, although their parents may have
    # played again when they join.
    ratings: Mapping[int, Rating] = field(default_factory=dict)
    outcomes: Future[list[Outcome]] | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        crossing = None if self.crossing is None else [result.to_json() for result in self.crossing]
        return {
            "batch": self.batch,
            "best": self.best.to_json(),
            "trials": crossing,
            "scores": [[name, list(row)] for name, row in self.scores.items()],
            "ratings": [[name, rating.mu, rating.sigma] for name, rating in self.ratings.items()],
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> ReflectionJob:
        crossing = None if saved["trials"] is None else [PromptResult.from_json(one) for one in saved["trials"]]
        ratings = {name: Rating(mu, sigma) for name, mu, sigma in saved["ratings"]}
        return cls(saved["batch"], PromptResult.from_json(saved["best"]), crossing, dict(saved["scores"]), ratings)


class ReferenceReflector:
    """A reference LLM, asked by the first process alone while the weights are updated."""

    def __init__(self, trainer: ESPLTrainer):
        self.reference, self.args = trainer.reference, trainer.args
        self.asks = trainer.accelerator.is_main_process

    def begin(self, job: ReflectionJob) -> None:
        """Start the work, as early as can be."""
        if self.asks:
            job.outcomes = start(self._run(job))

    def finish(self, job: ReflectionJob) -> list[Outcome]:
        """The outcomes, the same on every process. Called on every process alike."""
        if self.asks and job.outcomes is None:
            self.begin(job)
        results: list[Any] = [job.outcomes.result() if job.outcomes is not None else []]
        broadcast_object_list(results)
        return results[0]

    async def _run(self, job: ReflectionJob) -> list[Outcome]:
        """Ends with the time that the job has: no model can hold up training or its end."""
        seconds, late = self.args.reflection_timeout, 0
        deadline = asyncio.get_running_loop().time() + seconds

        async def in_time(messages: Sequence[Message], **options: Any) -> Reply:
            nonlocal late
            try:
                async with asyncio.timeout_at(deadline):
                    return await as_chat(self.reference)(messages, **options)
            except TimeoutError:
                late += 1
                return Reply(error=TimedOut(f"no reply within reflection_timeout={seconds:g} s"))

        repeat = rollout_seed(self.args.seed, "reflection", job.batch)
        sampling: Any = self.args.reference_sampling or {}
        outcomes = await propose_children(in_time, job.best, job.crossing, self.args, repeat=repeat, **sampling)
        if late:
            logger.warning(
                "the reference LLM did not answer within %g s (%d calls): nothing comes of them in batch %d",
                seconds, late, job.batch,
            )  # fmt: skip
        return outcomes


class PolicyReflector:
    """The policy being trained, which revises the instructions it works under (the paper's Figure 15).

    A reply is one turn of it, as long as `max_turn_tokens` allows. The first process writes, inside a session that all
    enter, and its outcomes are broadcast.
    """

    def __init__(self, trainer: ESPLTrainer):
        self.trainer = trainer

    def begin(self, job: ReflectionJob) -> None:
        """Nothing: the policy is busy learning."""

    def finish(self, job: ReflectionJob) -> list[Outcome]:
        results: list[Any] = [[]]
        trainer = self.trainer
        with trainer.backend.session():
            if trainer.accelerator.is_main_process:
                work = propose_children(self.write, job.best, job.crossing, trainer.args, repeat=job.batch)
                results = [run_with_engine(trainer.policy, work)]
        broadcast_object_list(results)
        return results[0]

    async def write(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Reply:
        """The policy as a [`ChatModel`]: one turn, an error where the context has no room for one."""
        chat_format = self.trainer.chat_format
        context = chat_format.prompt_ids(messages)
        room = self.trainer.limits.remaining_tokens(Rollout(context))
        if room < 1:
            return Reply(error=BadRequest(f"{len(context)} tokens leave no room to write"))
        seed = rollout_seed(self.trainer.args.seed, "reflect", repeat, messages[-1]["content"])
        sample = await self.trainer.policy(SampleRequest(context, room, seed))
        return Reply(chat_format.parse(sample.ids).text, usage=Usage(len(context), len(sample.ids)))
