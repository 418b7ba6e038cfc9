"""The work that makes children: what of a batch is reflected on, who does it, and when its outcomes are taken.

Either a reference LLM does it, on a thread of its own beside the weight update; or the policy itself, when the children
are due, with the weights of that moment, which a checkpoint has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from accelerate.utils import broadcast_object_list

from ..evolution import (
    Conversation,
    Outcome,
    Reflection,
    Trial,
    breed,
    drive,
    question_of,
    scores_of,
    truth_of,
)
from ..llm import BadRequest, ChatModel, Reply, TimedOut, Usage
from ..rollout import Rollout, SampleRequest, gather, lend, rollout_seed

if TYPE_CHECKING:
    from .espl import ESPLTrainer

logger = logging.getLogger(__name__)


class Reflecting:
    """One batch's work, and where its outcomes will be.

    Args:
        batch (`int`), island (`int`): Where it comes from.
        best ([`Trial`]): The parent of the mutation.
        trials (`Sequence[Trial]`, *optional*): The whole batch, if it crosses.
        scores (`Mapping[int, Sequence[float | None]]`, *optional*): [`scores_of`] the batch, for the journal.
    """

    def __init__(
        self,
        batch: int,
        island: int,
        best: Trial,
        trials: Sequence[Trial] | None,
        scores: Mapping[int, Sequence[float | None]] | None = None,
    ):
        self.batch, self.island, self.best, self.trials = batch, island, best, trials
        self.scores = scores_of([best]) if scores is None else scores
        self.outcomes: Future[list[Outcome]] | None = None

    def to_json(self) -> dict[str, Any]:
        trials = None if self.trials is None else [trial.to_json() for trial in self.trials]
        return {
            "batch": self.batch,
            "island": self.island,
            "best": self.best.to_json(),
            "trials": trials,
            "scores": [[name, list(row)] for name, row in self.scores.items()],
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Reflecting:
        trials = None if saved["trials"] is None else [Trial.from_json(trial) for trial in saved["trials"]]
        scores = dict(saved["scores"]) if "scores" in saved else None  # older checkpoints have none
        return cls(saved["batch"], saved["island"], Trial.from_json(saved["best"]), trials, scores)


class Editor(Protocol):
    """Does the work: is told of it as early as can be, and asked for the outcomes when they are due."""

    def begin(self, work: Reflecting) -> None: ...
    def finish(self, work: Reflecting) -> list[Outcome]:
        """The outcomes, the same on every process. Called on every process alike."""
        ...


class ReferenceEditor:
    """A reference LLM, asked by the first process alone and on a thread of its own.

    Args:
        reference ([`ChatModel`]): π_ref.
        settings ([`Reflection`]): Of the operators.
        seed (`int`): Of the run.
        asks (`bool`): Whether this is the process that asks.
        timeout (`float`): Seconds for the work of one batch.
    """

    def __init__(self, reference: ChatModel, settings: Reflection, seed: int, asks: bool, timeout: float):
        self.reference, self.settings, self.seed, self.asks = reference, settings, seed, asks
        self.timeout = timeout
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="espl-reflection")

    def begin(self, work: Reflecting) -> None:
        if self.asks:
            work.outcomes = self._thread.submit(self._run, work)

    def finish(self, work: Reflecting) -> list[Outcome]:
        if self.asks and work.outcomes is None:
            self.begin(work)
        results: list[Any] = [work.outcomes.result() if work.outcomes is not None else []]
        broadcast_object_list(results)
        return results[0]

    def _run(self, work: Reflecting) -> list[Outcome]:
        """On the thread, which ends with the time that the work has: no model can hold up training or its end."""
        repeat, deadline = rollout_seed(self.seed, "reflection", work.batch), monotonic() + self.timeout

        def answer(conversations: list[Conversation]) -> list[Reply]:
            futures = [self.reference.submit(conversation, repeat=repeat) for conversation in conversations]
            late = wait(futures, max(0.0, deadline - monotonic())).not_done
            if late:
                logger.warning(
                    "the reference LLM did not answer within %g s (%d of %d calls): nothing comes of them in batch %d",
                    self.timeout, len(late), len(futures), work.batch,
                )  # fmt: skip
            error = TimedOut(f"no reply within reflection_timeout={self.timeout:g} s")
            return [Reply(error=error) if future in late else future.result() for future in futures]

        return drive(breed(work.best, work.trials, self.settings), answer)


class PolicyEditor:
    """The policy being trained, which revises the instructions it works under (the paper's Figure 15).

    A reply is one turn of it, as long as `max_turn_tokens` allows. The first process writes, inside a session that all
    enter, and its outcomes are broadcast.

    Args:
        trainer ([`ESPLTrainer`]): Whose sampler, template and limits are used.
        settings ([`Reflection`]): Of the operators.
    """

    def __init__(self, trainer: ESPLTrainer, settings: Reflection):
        self.trainer, self.settings = trainer, settings

    def begin(self, work: Reflecting) -> None:
        """Nothing: the policy is busy learning."""

    def finish(self, work: Reflecting) -> list[Outcome]:
        results: list[Any] = [[]]
        with self.trainer._session():
            if self.trainer.accelerator.is_main_process:
                stage = count()
                seed = rollout_seed(self.trainer.args.seed, "edit", work.batch)
                results = [
                    drive(
                        breed(work.best, work.trials, self.settings),
                        lambda conversations: self._write(conversations, rollout_seed(seed, next(stage))),
                    )
                ]
        broadcast_object_list(results)
        return results[0]

    def _write(self, conversations: Sequence[Conversation], seed: int) -> list[Reply]:
        """One stage: a reply to each conversation, an error where the context has no room for one."""
        chat_format, limits = self.trainer.chat_format, self.trainer.limits
        contexts = [chat_format.prompt_ids(conversation) for conversation in conversations]
        replies = [Reply(error=BadRequest(f"{len(context)} tokens leave no room to write")) for context in contexts]
        requests = {
            number: SampleRequest(context, limits.remaining_tokens(Rollout(context)), rollout_seed(seed, number))
            for number, context in enumerate(contexts)
            if limits.remaining_tokens(Rollout(context)) > 0
        }
        if not requests:
            return replies
        policy = self.trainer.policy
        samples = lend(policy, gather(policy(request) for request in requests.values()))
        for number, sample in zip(requests, samples, strict=True):
            text = chat_format.parse(sample.ids).text
            replies[number] = Reply(text, usage=Usage(len(contexts[number]), len(sample.ids)))
        return replies


def told_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What is reflected on of a rollout: question, accepted answers, the conversation."""
    return question_of(row), truth_of(row), transcript(row["rollout"])


def transcript(rollout: Rollout) -> str:
    """A conversation as text, turn by turn, with the replies that came."""
    pieces = []
    for i, turn in enumerate(rollout.turns):
        pieces.append(turn.text.strip())
        if i < len(rollout.observations) and rollout.observations[i].error is None:
            pieces.append(f"[reply] {rollout.observations[i].text.strip()}")
    return "\n".join(pieces)
