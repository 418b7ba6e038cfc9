"""Scripted conductors in the environment of the conductor's sandbox: what its trained policy is
compared with.

The systems of `agentic_prompting.evaluation.pool_systems` would give other results here: they take
a worker's whole reply as the answer, where a script reads the value in its sentence, they draw by
other seeds, and they ask the workers without the environment, whose outages and prices of a
question these scripts are about.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentic_prompting.evaluation.systems import Answer, Row, System, answer_of_rollout
from agentic_prompting.rewards import exact_match
from agentic_prompting.rollout import AskGrammar, Rollout, Sample
from benchmarks.learning.conductor_world import (
    DESCRIPTION,
    TWIN,
    WORKER_OF,
    PlanStep,
    SandboxWorkers,
    plan_of,
    read_question,
    read_value,
)

TEMPLATE = "question : {question}"
GRAMMAR = AskGrammar()
MAX_TRIES = 4


class Episode:
    """An episode that a script plays: it asks workers, and reads the values in their replies.

    Args:
        environment ([`SandboxWorkers`]): Its workers answer.
        row (`Mapping`): The question, with the seed of its names.
        seed (`int`): Identifies the episode.
    """

    def __init__(self, environment: SandboxWorkers, row: Row, seed: int):
        prompt = [{"role": "user", "content": TEMPLATE.format(question=row["question"])}]
        self.environment = environment
        self.rollout = Rollout([], row=environment.reset({**row, "prompt": prompt}), seed=seed)
        self.question = row["question"]
        self.expression = read_question(row["question"])

    async def ask(self, *calls: tuple[str, str]) -> list[str]:
        """The values in the replies to some calls of one turn, each a worker and a request."""
        names = {worker: name for name, worker in self.rollout.row["workers"].items()}
        tags = [f'<ask to="{names[worker]}">{request}</ask>' for worker, request in calls]
        self.rollout.add_turn(Sample([0]), GRAMMAR.parse(" ".join(tags)))
        observation = await self.environment.step(self.rollout)
        self.rollout.add_observation(observation, [])
        return [read_value(part) or part for part in observation.quotable_texts]

    async def pass_on(self, worker: str) -> str:
        """Ask one worker the whole question."""
        (value,) = await self.ask((worker, self.question))
        return value

    def answer(self, value: str) -> Rollout:
        """End the episode with this answer."""
        self.rollout.add_turn(Sample([0]), GRAMMAR.parse(f"<answer>{value}</answer>"))
        return self.rollout.finish("answered")


Script = Callable[[Episode, random.Random], Awaitable[str]]


class ScriptedSystem(System):
    """A script as a system of `evaluate`; its calls cost what a conductor's calls cost."""

    def __init__(self, name: str, script: Script, environment: SandboxWorkers):
        self.name = name
        self.script = script
        self.environment = environment

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"script": self.name, "environment": dict(self.environment.identity)}

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        episode = Episode(self.environment, row, seed)
        value = await self.script(episode, random.Random(f"{seed} {self.name} {row['question']}"))
        return answer_of_rollout(episode.answer(value), time.perf_counter() - started)


def pass_on_to(worker: str) -> Script:
    """The whole question goes to one worker."""

    async def script(episode: Episode, generator: random.Random) -> str:
        return await episode.pass_on(worker)

    return script


async def route_evenly(episode: Episode, generator: random.Random) -> str:
    """The whole question goes to a worker drawn with equal weights."""
    return await episode.pass_on(generator.choice(list(DESCRIPTION)))


async def route_by_oracle(episode: Episode, generator: random.Random) -> str:
    """The whole question goes to a worker that answers it rightly, if there is one: an upper bound
    of routing.
    """
    answers = episode.rollout.row["answers"]
    for worker in DESCRIPTION:
        reply = episode.environment.pool[worker].model.answer(episode.question)
        if read_value(reply) in answers:
            return await episode.pass_on(worker)
    assert not isinstance(episode.expression, str) and episode.expression is not None
    return await episode.pass_on(WORKER_OF[episode.expression[0]])


def vote_of(worker: str, n: int) -> Script:
    """The most frequent of `n` samples of a worker that gets the whole question."""

    async def script(episode: Episode, generator: random.Random) -> str:
        values: list[str] = []
        while len(values) < n:
            # A turn holds a limited number of calls.
            count = min(n - len(values), episode.environment.max_calls)
            values += await episode.ask(*[(worker, episode.question)] * count)
        return most_frequent(values)

    return script


def most_frequent(values: Sequence[str]) -> str:
    """The most frequent value, the first of several."""
    return Counter(values).most_common(1)[0][0]


def follow_plan(choose_worker: Callable[[PlanStep, random.Random], str], tries: int = 1) -> Script:
    """The right plan, step by step, with references.

    Args:
        choose_worker (`Callable`): Returns the worker that gets a step.
        tries (`int`, *optional*, defaults to `1`): How often a worker that is unavailable is asked.
    """

    async def script(episode: Episode, generator: random.Random) -> str:
        value = ""
        references: list[str] = []
        for step in plan_of(episode.expression):
            worker = choose_worker(step, generator)
            for _ in range(tries):
                (value,) = await episode.ask((worker, step.request(references)))
                # An unavailable worker leaves no value.
                if value:
                    break
            references.append(f"#{len(episode.rollout.quotable_texts)}")
        return value

    return script


def follow_plan_by_vote(worker: str, n: int) -> Script:
    """The right plan, with `n` samples of one worker for each step about facts; a value is handed
    on as text.
    """

    async def script(episode: Episode, generator: random.Random) -> str:
        values: list[str] = []
        for step in plan_of(episode.expression):
            request = step.request(values)
            expert = WORKER_OF[step.operation]
            if expert == "facts":
                samples = await episode.ask(*[(worker, request)] * n)
                values.append(most_frequent(samples))
            else:
                values += await episode.ask((expert, request))
        return values[-1]

    return script


def choose_expert(step: PlanStep, generator: random.Random) -> str:
    """The worker that knows a step's operation."""
    return WORKER_OF[step.operation]


def choose_any(step: PlanStep, generator: random.Random) -> str:
    """A worker drawn with equal weights."""
    return generator.choice(list(DESCRIPTION))


def choose_twin(step: PlanStep, generator: random.Random) -> str:
    """The cheap twin in the place of the worker that knows facts."""
    expert = WORKER_OF[step.operation]
    return TWIN if expert == "facts" else expert


BASELINES: Mapping[str, Script] = {
    **{f"{worker} alone": pass_on_to(worker) for worker in DESCRIPTION},
    "even router": route_evenly,
    "oracle router": route_by_oracle,
    "best of two, facts": vote_of("facts", 2),
    "right plan, random workers": follow_plan(choose_any),
    "right plan": follow_plan(choose_expert),
}

# With the cheap twin: four samples cost as much as an answer under the budget `low`, nine as one
# under `high`.
BUDGET_BASELINES: Mapping[str, Script] = {
    "facts alone": pass_on_to("facts"),
    "rumours alone": pass_on_to(TWIN),
    "best of four, rumours": vote_of(TWIN, 4),
    "best of nine, rumours": vote_of(TWIN, 9),
    "right plan, rumours": follow_plan(choose_twin),
    "right plan, best of three rumours": follow_plan_by_vote(TWIN, 3),
    "right plan": follow_plan(choose_expert),
}

OUTAGE_BASELINES: Mapping[str, Script] = {
    "right plan, asks once": follow_plan(choose_expert),
    "right plan, asks up to four times": follow_plan(choose_expert, tries=MAX_TRIES),
}


def measure_scripts(
    scripts: Mapping[str, Script], rows: Sequence[Row], environment: SandboxWorkers, seed: int
) -> dict[str, dict[str, Any]]:
    """Right answers (`0110`) and dollars a question of scripted conductors."""
    measured = {}
    for name, script in scripts.items():
        answers = ScriptedSystem(name, script, environment)(list(rows), seed=seed)
        flags = ""
        for answer, row in zip(answers, rows, strict=True):
            flags += str(int(exact_match(answer.text or "", row["answers"])))
        usd = sum(answer.worth_usd or 0.0 for answer in answers) / len(rows)
        measured[name] = {"correct": flags, "usd": round(usd, 6)}
    return measured
