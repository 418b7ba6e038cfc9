"""The measurements: system prompts, groups of rollouts, refinements, and choices of requests or
models.

The constructor of a measurement checks its arguments. `measure` makes the calls and puts the result
into a [`Headroom`].
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...environments import Worker
from ...llm import ChatModel
from ...refine import ProRefiner
from ...rollout import Rollout, fill_template, rollout_seed
from ...rollout.spec import check_template
from ..pool_systems import WorkerSystem
from ..scoring import score_rollouts
from ..systems import (
    Agent,
    ProRefineSystem,
    Row,
    System,
    answer_of_replies,
    answer_of_rollout,
)
from .caller import (
    Caller,
    MeasurementStopped,
    max_calls_of_worker,
    max_calls_per_answer,
    record_of,
)
from .ceiling import Ceiling, measure_ceiling
from .group_signal import measure_groups
from .prompts import (
    ScoreTable,
    TooFewScores,
    choose_challenger,
    expect_further,
    judge_prompts,
    plan_stages,
    route_prompts,
)
from .proposals import DEFAULT_REQUESTS, ask_for_prompts, read_proposals
from .refinement import judge_refinement
from .result import FURTHER, Headroom

logger = logging.getLogger(__name__)

MAX_SIGNAL_ROWS = 64
_SIGNAL_BATCH_ROWS = 8
"""Rows of the signal between two checks of the budget."""
_MAX_EXAMPLES = 8


@dataclass(frozen=True)
class MeasurementContext:
    """What all measurements share: the caller, the rows and some settings.

    Args:
        caller ([`Caller`]): Makes the calls and counts them.
        rows (`Sequence[dict]`): All rows, in the order in which measurements take them.
        calls (`int`): Largest number of calls of each measurement.
        delta (`float`): The smallest gain that is worth it.
        seed (`int`): Seed of ties and samples.
    """

    caller: Caller
    rows: Sequence[Row]
    calls: int
    delta: float
    seed: int


class Measurement(ABC):
    """Answers one question about the possible gain, and counts its calls with the caller of its
    context.
    """

    @abstractmethod
    async def measure(self, result: Headroom) -> None:
        """Make the calls, and store the outcome in `result`, as far as it is known if a call stops
        them.
        """


class PromptMeasurement(Measurement):
    """Two stages over system prompts: some rows choose a challenger, fresh rows measure its gain.

    The arguments after `context` are fields of [`HeadroomSettings`].
    """

    def __init__(
        self,
        context: MeasurementContext,
        policy: Any,
        prompts: Sequence[str],
        reference: ChatModel | None,
        tried: int,
        top_up_calls: int,
    ):
        self.caller = context.caller
        self.policy = policy
        # The empty prompt is always compared; duplicates are removed.
        self.texts = list(dict.fromkeys([*prompts, ""]))
        repeated = len(prompts) - len(set(prompts))
        if repeated:
            logger.warning(
                "%d of the %d prompts to compare repeat others: each text is compared once",
                repeated,
                len(prompts),
            )
        self.reference = reference
        self.delta = context.delta
        self.seed = context.seed

        # The reference LLM writes the missing prompts in one call.
        self.prompts_to_write = 0
        if reference is not None:
            self.prompts_to_write = max(0, tried - len(self.texts))
        calls = context.calls
        if self.prompts_to_write:
            calls -= 1

        # An answer of an agent may take several calls: plan with the largest number.
        self.calls_per_answer = max(1, max_calls_per_answer(policy))
        self.top_up_answers = top_up_calls // self.calls_per_answer
        answers = calls // self.calls_per_answer
        rows = context.rows
        self.plan = plan_stages(answers, len(self.texts) + self.prompts_to_write, len(rows))

        # Three disjoint sets of rows: for choosing, for measuring, and for a second look.
        fresh_start = self.plan.choosing_rows
        fresh_end = fresh_start + self.plan.fresh_rows
        self.choosing_rows = rows[:fresh_start]
        self.fresh_rows = rows[fresh_start:fresh_end]
        self.unused_rows = rows[fresh_end:]

    async def measure(self, result: Headroom) -> None:
        rng = np.random.default_rng(self.seed)
        if self.prompts_to_write:
            await self._write_prompts()
        result.texts = self.texts

        # The first stage chooses a challenger.
        (choosing,) = await self._score_prompts(self.texts, self.choosing_rows, repeats=1)
        chosen = choose_challenger(choosing, rng)

        # The second stage measures it against the start prompt.
        pair = [self.texts[0], self.texts[chosen]]
        tables = await self._score_prompts(pair, self.fresh_rows, self.plan.repeats)
        fresh = _mean_without_missing(tables)
        result.prompts = judge_prompts(choosing, chosen, fresh, self.delta)
        # Two answers to each row also say whether some rows want the one prompt and some the other.
        if len(tables) > 1:
            result.router = route_prompts(tables[0], tables[1], rng)
        if len(self.texts) > 3 and result.prompts.test is not None:
            result.further = expect_further(choosing, FURTHER, rng)

        # A second look, if it is allowed and has at least as many rows as the first.
        n_rows = min(result.prompts.rows_needed, self.top_up_answers // 2, len(self.unused_rows))
        if result.prompts.verdict == "cannot tell" and n_rows >= len(self.fresh_rows):
            (top_up,) = await self._score_prompts(pair, self.unused_rows[:n_rows], repeats=1)
            result.prompts = judge_prompts(choosing, chosen, fresh, self.delta, top_up)

    async def _write_prompts(self) -> None:
        """Let the reference LLM write prompts.

        Its examples are choosing rows, which do not measure the gain.
        """
        assert self.reference is not None
        examples = self.choosing_rows[:_MAX_EXAMPLES]
        reply = await ask_for_prompts(
            self.reference, self.texts[0], examples, self.prompts_to_write
        )
        self.caller.count([answer_of_replies([reply], reply.seconds)])
        if reply.error is not None:
            raise MeasurementStopped(f"the reference LLM did not answer: {reply.error}")
        # The reply may repeat prompts, its own or those that are compared already, or contain too
        # many.
        proposed_texts = read_proposals(reply.text)
        new_texts = [text for text in dict.fromkeys(proposed_texts) if text not in self.texts]
        self.texts += new_texts[: self.prompts_to_write]
        # The empty prompt alone is not a challenger: a verdict on it would say nothing of others.
        if not any(self.texts[1:]) and proposed_texts:
            raise MeasurementStopped(
                "the reference LLM proposed no change: it wrote the start prompt again and no "
                "other one, so there is nothing to compare; name `prompts` of your own, or use "
                "another model"
            )
        if not any(self.texts[1:]):
            # The same command would read a recorded reply again.
            advice = "; the reply was recorded earlier: another seed or replay cache asks anew"
            beginning = " ".join(reply.text[:200].split())
            raise MeasurementStopped(
                "the reference LLM wrote no prompt between <prompt> and </prompt>, but: "
                f"{beginning}{advice if reply.cached else ''}"
            )
        if len(new_texts) < len(proposed_texts):
            logger.warning(
                "%d of the %d prompts that the reference LLM wrote repeat others: %d prompts are "
                "compared, the start prompt and the empty one among them",
                len(proposed_texts) - len(new_texts),
                len(proposed_texts),
                len(self.texts),
            )
        # Too few different ones, as of a reply that was cut off.
        if 2 * len(new_texts) < self.prompts_to_write:
            logger.warning(
                "the reference LLM wrote %d new ones of the %d prompts that it was asked for: the "
                "verdict is about these alone; lower tried, raise its max_tokens, or use another "
                "model",
                len(new_texts),
                self.prompts_to_write,
            )

    async def _score_prompts(
        self, texts: Sequence[str], rows: Sequence[Row], repeats: int
    ) -> list[ScoreTable]:
        """A table of scores by row and prompt for each repeat, the start prompt first."""
        tables = np.empty((repeats, len(rows), len(texts)))
        for column, text in enumerate(texts):
            system = self.caller.system_of(self.policy, text)
            for repeat in range(repeats):
                scores = await self.caller.score(system, rows, self.seed + repeat)
                tables[repeat, :, column] = scores
            # Without scores of the start prompt, further calls are useless.
            if np.isnan(tables[:, :, 0]).all():
                raise TooFewScores("no answer under the start prompt has a score")
        return list(tables)


class SignalMeasurement(Measurement):
    """Groups of rollouts of an untrained agent.

    The arguments after `context` are fields of [`HeadroomSettings`].
    """

    def __init__(
        self,
        context: MeasurementContext,
        agent: Agent,
        group_size: int,
        reward: Callable[..., Any] | None,
    ):
        self.caller = context.caller
        self.rows = context.rows[:MAX_SIGNAL_ROWS]
        self.agent = agent
        self.group_size = group_size
        self.reward = reward
        self.calls = context.calls
        self.seed = context.seed
        self.calls_per_row = group_size * max_calls_per_answer(agent)
        # Check that at least one group fits into the calls.
        if group_size < 2:
            raise ValueError(f"a group has two rollouts at least, got {group_size}")
        if self.calls_per_row > self.calls:
            raise ValueError(
                f"calls={self.calls} are too few for one group of {group_size} rollouts, which may "
                f"make {self.calls_per_row}: allow more, or a smaller group_size"
            )

    async def measure(self, result: Headroom) -> None:
        rewards: list[list[float | None]] = []
        statuses: list[list[str]] = []
        calls_before = self.caller.calls
        while len(rewards) < len(self.rows):
            # As many rows as certainly fit into the remaining calls.
            batch_size = _SIGNAL_BATCH_ROWS
            if self.calls_per_row:
                remaining_calls = self.calls - (self.caller.calls - calls_before)
                batch_size = min(batch_size, remaining_calls // self.calls_per_row)
            batch = self.rows[len(rewards) :][:batch_size]
            if not batch:
                break

            # Play a group of rollouts for each row. After every batch the result is complete.
            rollouts = await self._play(batch, len(rewards))
            scores = await self._score_rollouts(rollouts)
            for start in range(0, len(rollouts), self.group_size):
                group = slice(start, start + self.group_size)
                rewards.append(scores[group])
                statuses.append([rollout.status for rollout in rollouts[group]])
            result.signal = measure_groups(rewards, self.group_size, statuses)

    async def _play(self, rows: Sequence[Row], first_row: int) -> list[Rollout]:
        """Play the groups of some rows. `first_row` is the index of the first of them."""
        group_rows: list[Row] = []
        for row in rows:
            group_rows += [row] * self.group_size
        seed = rollout_seed(self.seed, "headroom", first_row)
        rollouts = await asyncio.to_thread(
            self.agent.answer_all, group_rows, seed=seed, progress=False
        )
        self.caller.count([answer_of_rollout(rollout, 0.0) for rollout in rollouts])
        return rollouts

    async def _score_rollouts(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """The reward of each rollout: the reward function's, or without one the metric's."""
        if self.reward is not None:
            scores = await score_rollouts(self.reward, rollouts)
            self.caller.failed += scores.count(None)
            return scores
        # Without a reward function, an episode is scored like any other answer.
        records = []
        for rollout in rollouts:
            records.append(record_of(answer_of_rollout(rollout, 0.0), rollout.row))
        return await self.caller.score_answers(records)


class RefinementMeasurement(Measurement):
    """Plain and refined answers to the same rows.

    Args:
        context ([`MeasurementContext`]): What all measurements share.
        refiner ([`ProRefiner`]): Refines the prompt.
        prompt (`str`): The prompt before refinement.
    """

    def __init__(self, context: MeasurementContext, refiner: ProRefiner, prompt: str):
        self.caller = context.caller
        self.rows = context.rows
        self.calls = context.calls
        self.delta = context.delta
        self.seed = context.seed

        # Both systems start from the same prompt.
        self.plain = self.caller.system_of(refiner.task, prompt)
        self.refined = ProRefineSystem(refiner, prompt)
        # The plain answer; the refiner's first answer and its verdict; three calls per step; the
        # final answer.
        self.calls_per_row = 1 + 2 + 3 * refiner.max_steps + 1
        if 2 * self.calls_per_row > self.calls:
            raise ValueError(
                f"calls={self.calls} are too few to refine two rows, which may take "
                f"{2 * self.calls_per_row}: allow more, or fewer max_steps of the refiner"
            )

    async def measure(self, result: Headroom) -> None:
        plain: list[float] = []
        refined: list[float] = []
        calls_before = self.caller.calls
        while len(plain) < len(self.rows):
            # As many rows as certainly fit into the remaining calls.
            remaining_calls = self.calls - (self.caller.calls - calls_before)
            batch = self.rows[len(plain) :][: remaining_calls // self.calls_per_row]
            if not batch:
                break

            # Both answers to each row.
            plain += await self.caller.score(self.plain, batch, self.seed)
            refined += await self.caller.score(self.refined, batch, self.seed)
        # (rows, 2), the plain answer first.
        result.refinement = judge_refinement(np.column_stack([plain, refined]), self.delta)


@dataclass(frozen=True)
class Choice:
    """One way to get an answer.

    Args:
        system ([`System`]): The system to ask.
        template (`str`): The request, with `{question}`.
        calls (`int`, *optional*, defaults to `1`): The largest number of calls for one answer.
    """

    system: System
    template: str
    calls: int = 1

    def fill_row(self, row: Row) -> Row:
        """The row with the request in place of its question."""
        return {**row, "question": fill_template(self.template, row["question"])}


class ChoiceMeasurement(Measurement):
    """Several ways to get an answer to each row, asked several times each.

    Args:
        context ([`MeasurementContext`]): What all measurements share.
        name (`str`): The name of the measurement, for errors.
        choices (`Mapping[str, Choice]`): Choices by name, the plain one first.
        repeats (`int`): Number of answers of each choice to a row.
    """

    def __init__(
        self,
        context: MeasurementContext,
        name: str,
        choices: Mapping[str, Choice],
        repeats: int,
    ):
        # An oracle with a single choice has nothing to choose.
        if repeats < 1 or len(choices) < 2:
            raise ValueError(f"{name} needs two choices and one repeat at least")

        # As many rows as fit into the calls.
        self.caller = context.caller
        self.choices = choices
        self.repeats = repeats
        self.seed = context.seed
        calls_per_row = repeats * sum(choice.calls for choice in choices.values())
        self.rows = context.rows[: context.calls // calls_per_row]
        if len(self.rows) < 2:
            raise ValueError(
                f"calls={context.calls} and {len(context.rows)} rows are too few for "
                f"{len(choices)} choices x {repeats} repeats on two rows"
            )

    async def measure_choices(self) -> Ceiling:
        """Ask all choices, and return the score of the best one for each row."""
        # (rows, choices, repeats)
        table = np.empty((len(self.rows), len(self.choices), self.repeats))
        for column, choice in enumerate(self.choices.values()):
            requests = [choice.fill_row(row) for row in self.rows]
            for repeat in range(self.repeats):
                scores = await self.caller.score(choice.system, requests, self.seed + repeat)
                table[:, column, repeat] = scores
        return measure_ceiling(table, list(self.choices))


class RequestMeasurement(ChoiceMeasurement):
    """One large LLM, asked in several ways.

    The arguments after `context` are fields of [`HeadroomSettings`].
    """

    def __init__(
        self, context: MeasurementContext, llm: ChatModel, requests: Sequence[str], repeats: int
    ):
        choices = {}
        for number, request in enumerate(requests):
            # A request must contain the question.
            check_template(request)
            # The plain request is the first one; the others are numbered from 2.
            name = "the plain request" if number == 0 else f"request {number + 1}"
            choices[name] = Choice(context.caller.system_of(llm, ""), request)
        super().__init__(context, "requests", choices, repeats)

    async def measure(self, result: Headroom) -> None:
        result.requests = await self.measure_choices()


class PoolMeasurement(ChoiceMeasurement):
    """Several models or workers, each asked the plain question.

    Args:
        context ([`MeasurementContext`]): What all measurements share.
        members (`Mapping`): Models or workers by name, the plain one first.
        repeats (`int`): Number of answers of each member to a row.
    """

    def __init__(self, context: MeasurementContext, members: Mapping[str, Any], repeats: int):
        choices = {}
        for name, member in members.items():
            choices[name] = self._choice_of_member(context.caller, name, member)
        super().__init__(context, "pool", choices, repeats)

    @staticmethod
    def _choice_of_member(caller: Caller, name: str, member: Any) -> Choice:
        # The request says to a chat model how to mark its answer.
        if not isinstance(member, Worker):
            return Choice(caller.system_of(member, ""), DEFAULT_REQUESTS[0])
        # A tool, a search engine or an agent reads the question alone.
        template = DEFAULT_REQUESTS[0] if member.is_chat else "{question}"
        return Choice(WorkerSystem({name: member}, name), template, max_calls_of_worker(member))

    async def measure(self, result: Headroom) -> None:
        result.pool = await self.measure_choices()


def _mean_without_missing(tables: Sequence[ScoreTable]) -> ScoreTable:
    """The mean over the repeats that have a score; NaN if none has."""
    scores = np.array(tables)
    counts = (~np.isnan(scores)).sum(axis=0)
    totals = np.nansum(scores, axis=0)
    return np.divide(totals, counts, out=np.full(totals.shape, math.nan), where=counts > 0)
