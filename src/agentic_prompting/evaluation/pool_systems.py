"""Baselines of a conductor over the same pool: a worker alone, routers, best-of-n, random plans.

None of them is trained. [`baselines_of_pool`] makes those that need nothing but the pool, and
[`baselines_at_cost`] those that spend as many dollars as an agent that was evaluated.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

from ..environments.worker import WorkerReply, as_worker
from ..environments.workers import quote
from ..rewards import exact_match, normalize_answer, read_answer
from ..rollout import Rollout, rollout_seed
from .answer_records import is_answered
from .evaluate import Evaluation
from .metrics import ItemScore
from .systems import Answer, Row, System, answer_of_replies, worth_of

MAX_SAMPLES = 64
"""Most calls for one question of the baselines that are made to an agent's cost."""


class PoolSystem(System):
    """A system that asks the workers of a pool. A subclass decides whom.

    Args:
        pool (`Mapping[str, Worker]`): The workers by name, `Workers.pool`.
        max_in_flight (`int`, *optional*, defaults to `64`): Largest number of questions in flight.
    """

    def __init__(self, pool: Mapping[str, Any], max_in_flight: int = 64):
        self.pool = {name: as_worker(worker) for name, worker in pool.items()}
        self.max_in_flight = max_in_flight

    @property
    def settings(self) -> Mapping[str, Any]:
        pool = {name: worker.identity for name, worker in self.pool.items()}
        return {"class": type(self).__name__, "pool": pool}

    async def ask(self, name: str, text: str, row: Row, seed: int, number: int = 0) -> WorkerReply:
        """Send a request to a worker.

        Args:
            name (`str`): The worker.
            text (`str`): The request.
            row (`Mapping`): The question's row.
            seed (`int`): Seed of the run.
            number (`int`, *optional*, defaults to `0`): Tells equal requests of a question apart.
        """
        question_seed = rollout_seed(seed, row["question"])
        return await self.pool[name].answer(
            text,
            seed=rollout_seed(question_seed, number),
            rollout=Rollout([], row=dict(row), seed=question_seed),
            session=f"{question_seed}.{name}",
            send_once=None,
        )


def answer_of_workers(
    replies: Sequence[WorkerReply], chosen: WorkerReply, workers: Sequence[str], started: float
) -> Answer:
    """The answer in one of several replies, with the usage of all of them.

    Args:
        replies (`Sequence[WorkerReply]`): All replies.
        chosen ([`WorkerReply`]): The one whose answer counts.
        workers (`Sequence[str]`): Whose replies they are, for the record.
        started (`float`): `time.perf_counter()` before the first call.
    """
    calls = list(chain.from_iterable(reply.replies for reply in replies))
    # Failed calls of other replies do not make the answer a failed one.
    calls_without_errors = [replace(call, error=None) for call in calls]
    seconds = time.perf_counter() - started
    answer = answer_of_replies(calls_without_errors, seconds, {"workers": list(workers)})
    error = chosen.error
    if error is not None:
        message = f"{error.kind}: {error}"
        return replace(answer, text=None, whole=None, error=message, fatal=error.fatal)
    return replace(answer, text=read_answer(chosen.quotable_text), whole=chosen.quotable_text)


class WorkerSystem(PoolSystem):
    """One worker of a pool, which gets the whole question.

    Args:
        pool (`Mapping[str, Worker]`): The workers.
        worker (`str`): The name of the one to ask.
    """

    def __init__(self, pool: Mapping[str, Any], worker: str, max_in_flight: int = 64):
        super().__init__({worker: pool[worker]}, max_in_flight)
        self.worker = worker

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        reply = await self.ask(self.worker, row["question"], row, seed)
        return answer_of_workers([reply], reply, [self.worker], started)


class RouterSystem(PoolSystem):
    """A router that sends each whole question to a worker drawn by fixed weights.

    Args:
        pool (`Mapping[str, Worker]`): The workers.
        weights (`Mapping[str, float]`, *optional*): The weight of each worker. Equal by default.

    Raises:
        `ValueError`: If a weight is negative, none is positive, or a worker is not in the pool.
    """

    def __init__(
        self,
        pool: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        max_in_flight: int = 64,
    ):
        super().__init__(pool, max_in_flight)
        self.weights = dict.fromkeys(self.pool, 1.0) if weights is None else dict(weights)
        unknown = sorted(set(self.weights) - set(self.pool))
        if unknown:
            raise ValueError(f"weights of workers that are not in the pool: {', '.join(unknown)}")
        if min(self.weights.values()) < 0 or not any(self.weights.values()):
            raise ValueError(f"weights must be at least 0 and one above it, got {self.weights}")

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**super().settings, "weights": self.weights}

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        generator = random.Random(f"router {seed} {row['question']}")
        (worker,) = generator.choices(list(self.weights), list(self.weights.values()))
        reply = await self.ask(worker, row["question"], row, seed)
        return answer_of_workers([reply], reply, [worker], started)


class OracleRouterSystem(PoolSystem):
    """A router that knows the answers: an upper bound of routing whole questions.

    Every worker is asked. The answer is that of the cheapest worker that is right, or of the
    cheapest one if none is; only its calls count.

    Args:
        pool (`Mapping[str, Worker]`): The workers.
        score (`Callable`, *optional*): Maps an answer and the accepted answers to a score. Defaults
            to [`exact_match`].
    """

    def __init__(
        self, pool: Mapping[str, Any], score: ItemScore = exact_match, max_in_flight: int = 64
    ):
        super().__init__(pool, max_in_flight)
        self.score = score

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**super().settings, "score": getattr(self.score, "__qualname__", "score")}

    async def answer(self, row: Row, seed: int) -> Answer:
        # Ask all workers. A failure of one says nothing about the others.
        started = time.perf_counter()
        replies = await asyncio.gather(
            *[self.ask(worker, row["question"], row, seed) for worker in self.pool]
        )
        answers = [
            answer_of_workers([reply], reply, [worker], started)
            for worker, reply in zip(self.pool, replies, strict=True)
        ]
        fatal_answers = [answer for answer in answers if answer.fatal]
        if fatal_answers:
            return fatal_answers[0]
        succeeded_answers = [answer for answer in answers if answer.error is None]
        if not succeeded_answers:
            return answers[0]

        # The highest score first, and of equal ones the cheapest answer.
        def rank(answer: Answer) -> tuple[float, float]:
            score = self.score(answer.text or "", row["answers"]) or 0.0
            return (-score, answer.worth_usd or 0.0)

        return min(succeeded_answers, key=rank)


class BestOfSystem(PoolSystem):
    """The most frequent of several answers of one worker to the whole question.

    Answers are counted as SQuAD normalises them, and of equally frequent ones the first counts.
    Samples that failed are left out.

    Args:
        pool (`Mapping[str, Worker]`): The workers.
        worker (`str`): The name of the one to ask.
        n (`int`): How often it is asked.

    Raises:
        `ValueError`: If `n` is below 1.
    """

    def __init__(self, pool: Mapping[str, Any], worker: str, n: int, max_in_flight: int = 64):
        super().__init__({worker: pool[worker]}, max_in_flight)
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        self.worker = worker
        self.n = n

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**super().settings, "n": self.n}

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        samples = [
            self.ask(self.worker, row["question"], row, seed, number) for number in range(self.n)
        ]
        replies = await asyncio.gather(*samples)
        # An error that affects all further questions is the outcome of this one.
        failed_replies = [reply for reply in replies if reply.error is not None]
        fatal_replies = [reply for reply in failed_replies if reply.error and reply.error.fatal]
        # The most frequent answer among the samples that did not fail.
        succeeded_replies = [reply for reply in replies if reply.error is None]
        if fatal_replies or not succeeded_replies:
            chosen = (fatal_replies or failed_replies)[0]
        else:
            texts = []
            for reply in succeeded_replies:
                texts.append(normalize_answer(read_answer(reply.quotable_text) or ""))
            most_frequent = Counter(texts).most_common(1)[0][0]
            chosen = succeeded_replies[texts.index(most_frequent)]
        return answer_of_workers(replies, chosen, [self.worker] * len(replies), started)


class RandomPlanSystem(PoolSystem):
    """Random workers one after the other; the last one answers.

    Each gets the question and all earlier replies. Tools and search engines, which cannot read
    quotations, get the question alone.

    Args:
        pool (`Mapping[str, Worker]`): The workers.
        calls (`int`): How many calls a question gets.

    Raises:
        `ValueError`: If `calls` is below 1.
    """

    def __init__(self, pool: Mapping[str, Any], calls: int, max_in_flight: int = 64):
        super().__init__(pool, max_in_flight)
        if calls < 1:
            raise ValueError(f"calls must be at least 1, got {calls}")
        self.calls = calls

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**super().settings, "calls": self.calls}

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        generator = random.Random(f"plan {seed} {row['question']}")
        plan = [generator.choice(list(self.pool)) for _ in range(self.calls)]
        replies: list[WorkerReply] = []
        for number, worker in enumerate(plan):
            text = row["question"]
            if not self.pool[worker].substitutes_references:
                quotations = {
                    position: reply.quotable_text for position, reply in enumerate(replies, 1)
                }
                text = quote(quotations, text)
            replies.append(await self.ask(worker, text, row, seed, number))
            # Without a reply the plan cannot go on.
            if replies[-1].error is not None:
                break
        return answer_of_workers(replies, replies[-1], plan[: len(replies)], started)


def baselines_of_pool(
    pool: Mapping[str, Any], score: ItemScore = exact_match, max_in_flight: int = 64
) -> dict[str, System]:
    """The baselines that need nothing but a pool: each worker alone, an even and an oracle router.

    Args:
        pool (`Mapping[str, Worker]`): The workers by name, `Workers.pool`.
        score (`Callable`, *optional*): What the oracle router knows; [`exact_match`] by default.
        max_in_flight (`int`, *optional*, defaults to `64`): Largest number of questions in flight.
    """
    systems: dict[str, System] = {}
    for name in pool:
        systems[name_alone(name)] = WorkerSystem(pool, name, max_in_flight)
    systems["even router"] = RouterSystem(pool, max_in_flight=max_in_flight)
    systems["oracle router"] = OracleRouterSystem(pool, score, max_in_flight)
    return systems


def baselines_at_cost(
    pool: Mapping[str, Any], evaluation: Evaluation, agent: str, max_in_flight: int = 64
) -> dict[str, System]:
    """Baselines that spend about as many dollars a question as an agent.

    They are best-of-n of the best worker, and a random plan. Where nothing costs dollars, they make
    as many calls as the agent.

    Args:
        pool (`Mapping[str, Worker]`): The workers by name.
        evaluation ([`Evaluation`]): Has the agent and each worker alone, of [`baselines_of_pool`].
            The best worker is the one with the highest mean in the first metric, over all tasks.
        agent (`str`): The agent's name in the evaluation.
        max_in_flight (`int`, *optional*, defaults to `64`): Largest number of questions in flight.

    Raises:
        `KeyError`: If a system is not in the evaluation.
    """
    workers = {name: _measure(evaluation, name_alone(name)) for name in pool}
    goal = _measure(evaluation, agent)
    best = max(workers, key=lambda name: workers[name].score)
    mean_usd = fmean(worker.usd for worker in workers.values())

    # As many calls as the agent's dollars pay for.
    samples = _count_calls(goal, workers[best].usd)
    plan_calls = _count_calls(goal, mean_usd)
    return {
        f"best of {samples}, {best}": BestOfSystem(pool, best, samples, max_in_flight),
        f"random plan of {plan_calls}": RandomPlanSystem(pool, plan_calls, max_in_flight),
    }


def name_alone(worker: str) -> str:
    """The name of a worker alone among the systems."""
    return f"{worker} alone"


@dataclass(frozen=True)
class _QuestionMeans:
    """Means of a system over its questions. Failed answers are left out."""

    score: float
    usd: float
    calls: float


def _measure(evaluation: Evaluation, system: str) -> _QuestionMeans:
    results = [result for result in evaluation.results if result.system == system]
    if not results:
        raise KeyError(f"the evaluation has no system {system!r}")
    # Each task weighs the same. A system without a score is worse than any other.
    means = []
    for result in results:
        estimate = next(iter(result.estimates.values()))
        means.append(float("-inf") if estimate is None else estimate.mean)
    records = [
        record
        for record in evaluation.records
        if record["system"] == system and is_answered(record)
    ]
    dollars = [worth_of(record) for record in records]
    calls = [record.get("calls") or 0 for record in records]
    return _QuestionMeans(
        score=fmean(means),
        usd=fmean(dollars) if dollars else 0.0,
        calls=fmean(calls) if calls else 0.0,
    )


def _count_calls(goal: _QuestionMeans, usd_per_call: float) -> int:
    """Calls that cost what an agent costs; as many as the agent makes where a call is free."""
    calls = goal.usd / usd_per_call if usd_per_call > 0 else goal.calls
    return min(MAX_SAMPLES, max(1, round(calls)))
