"""The parts of a measurement: system prompts, groups of rollouts, refinements, and choices of requests or models.

A part is checked when it is made, and makes its calls in `measure`, which puts its result into a [`Headroom`].
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...llm import ChatModel
from ...refine import ProRefiner
from ...rollout import Rollout, fill_template, rollout_seed
from ...rollout.spec import check_template
from ..scoring import score_records, score_rollouts
from ..systems import ProRefineSystem, Row, System, answer_of_replies, answer_of_rollout
from .caller import Caller, MeasurementStopped, max_calls_per_answer, record_of
from .ceiling import measure_ceiling
from .group_signal import measure_groups
from .prompts import (
    Table,
    TooFewScores,
    choose_challenger,
    expect_further,
    judge_prompts,
    plan_stages,
)
from .proposals import DEFAULT_REQUESTS, ask_for_prompts, read_prompts
from .refinement import judge_refinement
from .result import FURTHER, Headroom

MOST_SIGNAL_ROWS = 64
_ROWS_AT_ONCE = 8  # of the signal, between two looks at the budget
_MOST_EXAMPLES = 8


class PromptPart:
    """Two stages over system prompts: some rows choose, fresh rows measure. The arguments are [`aheadroom`]'s."""

    def __init__(
        self,
        caller: Caller,
        rows: Sequence[Row],
        policy: Any,
        prompts: Sequence[str],
        reference: ChatModel | None,
        tried: int,
        calls: int,
        top_up_calls: int,
        delta: float,
        seed: int,
    ):
        self.caller = caller
        self.policy = policy
        self.texts = list(dict.fromkeys([*prompts, ""]))
        self.reference = reference
        self.delta = delta
        self.seed = seed
        self.to_write = max(0, tried - len(self.texts)) if reference is not None else 0
        # An answer of an agent may take several calls: the plan counts the most that it can.
        self.calls_per_answer = max(1, max_calls_per_answer(policy))
        self.top_up_answers = top_up_calls // self.calls_per_answer
        answers = (calls - (1 if self.to_write else 0)) // self.calls_per_answer
        self.plan = plan_stages(answers, len(self.texts) + self.to_write, len(rows))

        # Three sets of rows that share none: for choosing, for measuring, and for a second look.
        fresh_from = self.plan.choosing_rows
        fresh_to = fresh_from + self.plan.fresh_rows
        self.choosing_rows = rows[:fresh_from]
        self.fresh_rows = rows[fresh_from:fresh_to]
        self.unused_rows = rows[fresh_to:]

    async def measure(self, result: Headroom) -> None:
        generator = np.random.default_rng(self.seed)
        if self.to_write:
            await self._write_prompts()
        result.texts = self.texts
        choosing = await self._table(self.texts, self.choosing_rows, repeats=1)
        chosen = choose_challenger(choosing, generator)
        pair = [self.texts[0], self.texts[chosen]]
        fresh = await self._table(pair, self.fresh_rows, self.plan.repeats)
        result.prompts = judge_prompts(choosing, chosen, fresh, self.delta)
        if len(self.texts) > 3 and result.prompts.test is not None:
            result.further = expect_further(choosing, FURTHER, generator)

        # A second look, if it is allowed and large enough to see more than the first.
        wanted = min(result.prompts.rows_needed, self.top_up_answers // 2, len(self.unused_rows))
        if result.prompts.verdict == "cannot tell" and wanted >= len(self.fresh_rows):
            top_up = await self._table(pair, self.unused_rows[:wanted], repeats=1)
            result.prompts = judge_prompts(choosing, chosen, fresh, self.delta, top_up)

    async def _write_prompts(self) -> None:
        """Let the reference LLM write prompts from the rows that choose, which measure nothing."""
        assert self.reference is not None
        examples = self.choosing_rows[:_MOST_EXAMPLES]
        reply = await ask_for_prompts(self.reference, self.texts[0], examples, self.to_write)
        self.caller.count([answer_of_replies([reply], reply.seconds)])
        written = [text for text in read_prompts(reply.text) if text not in self.texts]
        self.texts += written[: self.to_write]
        if len(self.texts) < 2:
            raise MeasurementStopped(
                f"the reference LLM wrote no prompt: {reply.error or reply.text[:200]!r}"
            )

    async def _table(self, texts: Sequence[str], rows: Sequence[Row], repeats: int) -> Table:
        """Scores by row and prompt, means over the repeats that have one."""
        columns = []
        for text in texts:
            system = self.caller.system_of(self.policy, text)
            scores = [
                await self.caller.score(system, rows, self.seed + repeat)
                for repeat in range(repeats)
            ]
            columns.append(_mean_without_missing(np.array(scores)))
            if np.isnan(
                columns[0]
            ).all():  # without the start prompt there is nothing to compare with
                raise TooFewScores("no answer under the start prompt has a score")
        return np.column_stack(columns)


class SignalPart:
    """Groups of rollouts of an untrained agent. The arguments are [`aheadroom`]'s."""

    def __init__(
        self,
        caller: Caller,
        rows: Sequence[Row],
        agent: Any,
        group_size: int,
        reward: Callable[..., Any] | None,
        calls: int,
        seed: int,
    ):
        self.caller = caller
        self.rows = rows[:MOST_SIGNAL_ROWS]
        self.agent = agent
        self.group_size = group_size
        self.reward = reward
        self.calls = calls
        self.seed = seed
        self.calls_per_row = group_size * max_calls_per_answer(agent)
        if group_size < 2:
            raise ValueError(f"a group has two rollouts at least, got {group_size}")
        if self.calls_per_row > calls:
            raise ValueError(
                f"calls={calls} are too few for one group of {group_size} rollouts, which may make "
                f"{self.calls_per_row}: allow more, or a smaller group_size"
            )

    async def measure(self, result: Headroom) -> None:
        rewards: list[list[float | None]] = []
        statuses: list[list[str]] = []
        before = self.caller.calls
        while len(rewards) < len(self.rows):
            # As many rows as surely fit into the calls that are left.
            left = self.calls - (self.caller.calls - before)
            fitting = left // self.calls_per_row if self.calls_per_row else _ROWS_AT_ONCE
            batch = self.rows[len(rewards) :][: min(fitting, _ROWS_AT_ONCE)]
            if not batch:
                break
            rollouts = await self._play(batch, len(rewards))
            scores = await self._reward(rollouts)
            for begin in range(0, len(rollouts), self.group_size):
                group = slice(begin, begin + self.group_size)
                rewards.append(scores[group])
                statuses.append([rollout.status for rollout in rollouts[group]])
            result.signal = measure_groups(rewards, self.group_size, statuses)

    async def _play(self, rows: Sequence[Row], number: int) -> list[Rollout]:
        repeated = [row for row in rows for _ in range(self.group_size)]
        seed = rollout_seed(self.seed, "headroom", number)
        rollouts = await asyncio.to_thread(
            self.agent.answer_all, repeated, seed=seed, progress=False
        )
        self.caller.count([answer_of_rollout(rollout, 0.0) for rollout in rollouts])
        return rollouts

    async def _reward(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        if self.reward is not None:
            scores = await score_rollouts(self.reward, rollouts)
        else:
            records = [
                record_of(answer_of_rollout(rollout, 0.0), rollout.row) for rollout in rollouts
            ]
            (scores,) = (
                await asyncio.to_thread(score_records, records, self.caller.metrics)
            ).values()
        self.caller.failed += list(scores).count(None)
        return list(scores)


class RefinePart:
    """Plain and refined answers to the same rows. The arguments are [`aheadroom`]'s."""

    def __init__(
        self,
        caller: Caller,
        rows: Sequence[Row],
        refiner: ProRefiner,
        prompt: str,
        calls: int,
        delta: float,
        seed: int,
    ):
        self.caller = caller
        self.rows = rows
        self.calls = calls
        self.delta = delta
        self.seed = seed
        self.plain = caller.system_of(refiner.task, prompt)
        self.refined = ProRefineSystem(refiner, prompt)
        # The plain answer; the first one and its verdict; three calls a step; the final answer.
        self.calls_per_row = 1 + 2 + 3 * refiner.max_steps + 1
        if 2 * self.calls_per_row > calls:
            raise ValueError(
                f"calls={calls} are too few to refine two rows, which may take {2 * self.calls_per_row}: allow more, "
                "or fewer max_steps of the refiner"
            )

    async def measure(self, result: Headroom) -> None:
        plain: list[float] = []
        refined: list[float] = []
        before = self.caller.calls
        while len(plain) < len(self.rows):
            # As many rows as surely fit into the calls that are left.
            left = self.calls - (self.caller.calls - before)
            batch = self.rows[len(plain) :][: left // self.calls_per_row]
            if not batch:
                break
            plain += await self.caller.score(self.plain, batch, self.seed)
            refined += await self.caller.score(self.refined, batch, self.seed)
        result.refinement = judge_refinement(np.column_stack([plain, refined]), self.delta)


class ChoicePart:
    """Several ways to get an answer to each row, asked several times each.

    Args:
        caller ([`Caller`]): Asks.
        field_name (`str`): The field of [`Headroom`] that gets the result.
        choices (`Mapping[str, Callable]`): By name, the plain one first: a system, and the row as it is asked.
        rows (`Sequence[dict]`), repeats (`int`), calls (`int`), seed (`int`): As in [`aheadroom`].
    """

    def __init__(
        self,
        caller: Caller,
        field_name: str,
        choices: Mapping[str, tuple[System, Callable[[Row], Row]]],
        rows: Sequence[Row],
        repeats: int,
        calls: int,
        seed: int,
    ):
        if repeats < 1 or len(choices) < 2:
            raise ValueError(f"{field_name} needs two choices and one repeat at least")
        self.caller = caller
        self.field_name = field_name
        self.choices = choices
        self.repeats = repeats
        self.seed = seed
        self.rows = rows[: calls // (len(choices) * repeats)]
        if len(self.rows) < 2:
            raise ValueError(
                f"calls={calls} and {len(rows)} rows are too few for {len(choices)} choices x {repeats} repeats on two "
                "rows"
            )

    @classmethod
    def of_requests(
        cls,
        caller: Caller,
        rows: Sequence[Row],
        llm: ChatModel,
        requests: Sequence[str],
        repeats: int,
        calls: int,
        seed: int,
    ) -> ChoicePart:
        """One large LLM, asked in several ways."""
        choices: dict[str, tuple[System, Callable[[Row], Row]]] = {}
        for number, request in enumerate(requests):
            check_template(request)
            name = "the plain request" if number == 0 else f"request {number + 1}"
            choices[name] = (caller.system_of(llm, ""), partial(_fill_question, request))
        return cls(caller, "requests", choices, rows, repeats, calls, seed)

    @classmethod
    def of_models(
        cls,
        caller: Caller,
        rows: Sequence[Row],
        pool: Mapping[str, ChatModel],
        repeats: int,
        calls: int,
        seed: int,
    ) -> ChoicePart:
        """Several models, each asked the plain question."""
        ask = partial(_fill_question, DEFAULT_REQUESTS[0])
        choices = {name: (caller.system_of(model, ""), ask) for name, model in pool.items()}
        return cls(caller, "pool", choices, rows, repeats, calls, seed)

    async def measure(self, result: Headroom) -> None:
        table = np.empty((len(self.rows), len(self.choices), self.repeats))
        for place, (system, ask) in enumerate(self.choices.values()):
            asked = [ask(row) for row in self.rows]
            for repeat in range(self.repeats):
                table[:, place, repeat] = await self.caller.score(system, asked, self.seed + repeat)
        setattr(result, self.field_name, measure_ceiling(table, list(self.choices)))


def _fill_question(template: str, row: Row) -> dict[str, Any]:
    return {**row, "question": fill_template(template, row["question"])}


def _mean_without_missing(scores: Table) -> Table:
    """The mean over the repeats (the first axis) that have a score; NaN where none has."""
    counts = (~np.isnan(scores)).sum(axis=0)
    totals = np.nansum(scores, axis=0)
    return np.divide(totals, counts, out=np.full(scores.shape[1], math.nan), where=counts > 0)
