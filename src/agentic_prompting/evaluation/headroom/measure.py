"""[`headroom`]: measures the possible gain on a task within a limited number of calls.

Each requested part makes at most `calls` calls of large LLMs:

- **prompts** of a policy (a chat model or an agent): is there a better system prompt?
- **signal** of an untrained agent: would GRPO have a gradient?
- **refinement** by ProRefine: how many answers does it repair, and how many does it break?
- **requests** to a large LLM: what would an agent gain that always sends the best request?
- **pool** of several models or workers: what would a router gain that always picks the best one?
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...data import validate_dataset
from ...environments import Worker, Workers
from ...llm import ChatModel
from ...llm.loop import run
from ...refine import ProRefiner
from ...refine.templates import DEFAULT_PROMPT
from ..metrics import Metric
from ..systems import Agent, Row
from .caller import Caller, MeasurementStopped
from .parts import ChoicePart, Measurement, PromptPart, RefinePart, SignalPart
from .prompts import TooFewScores, default_delta
from .proposals import DEFAULT_REQUESTS
from .result import Headroom


class MeasurementPart(Protocol):
    """A part of a measurement."""

    async def measure(self, result: Headroom) -> None:
        """Make the calls, and put the result into a field of `result`."""
        ...


def headroom(rows: Sequence[Row], **options: Any) -> Headroom:
    """[`aheadroom`] for synchronous code. May be called from any thread, also in a notebook.

    Example:

    ```python
    rows = [{"question": f"What is {n} times {n}?", "answers": [str(n * n)]} for n in range(400)]
    result = headroom(rows, policy=OpenAIChat("gpt-4o-mini"), prompts=["Be brief."], reference=OpenAIChat("gpt-4o"))
    print(result.report())
    ```
    """
    return run(aheadroom(rows, **options))


async def aheadroom(
    rows: Sequence[Row],
    *,
    policy: ChatModel | Agent | None = None,
    prompts: Sequence[str] = ("",),
    reference: ChatModel | None = None,
    tried: int = 12,
    agent: Agent | None = None,
    group_size: int = 8,
    reward: Callable[..., Any] | None = None,
    refiner: ProRefiner | None = None,
    llm: ChatModel | None = None,
    requests: Sequence[str] = DEFAULT_REQUESTS,
    pool: Mapping[str, ChatModel | Worker] | Workers | None = None,
    repeats: int = 4,
    metric: Metric = "exact_match",
    calls: int = 512,
    top_up_calls: int = 0,
    delta: float | None = None,
    seed: int = 0,
    max_in_flight: int = 64,
    sampling: Mapping[str, Any] | None = None,
) -> Headroom:
    """Measure the possible gain on a task before training or searching for prompts.

    A failed call has no score, and its row is left out. An error that affects all further calls (a wrong key,
    a spent budget) ends the measurement; the completed parts are returned.

    Args:
        rows (`Sequence[dict]`): Rows with `question` and `answers`, as from [`load_task`]. Sampled with `seed`.
        policy ([`ChatModel`] or [`PromptAgent`], *optional*): Measure the gain of a better system prompt for
            this policy.
        prompts (`Sequence[str]`, *optional*, defaults to `("",)`): System prompts to compare, the current one
            first. The empty prompt is added.
        reference ([`ChatModel`], *optional*): Writes further prompts from examples, until there are `tried`.
        tried (`int`, *optional*, defaults to `12`): Number of prompts to compare if a `reference` writes them.
        agent ([`PromptAgent`], *optional*): Measure the signal for GRPO in the rollouts of this agent.
        group_size (`int`, *optional*, defaults to `8`): Group size of the planned training
            (`num_generations`).
        reward (`Callable`, *optional*): Reward function of the planned training, with TRL's signature. A reward
            of 1 is right. Defaults to `metric`.
        refiner ([`ProRefiner`], *optional*): Measure the gain of ProRefine. It starts from the first of
            `prompts`, or from the paper's prompt if that is empty.
        llm ([`ChatModel`], *optional*): Measure the score of a large LLM under the best request.
        requests (`Sequence[str]`, *optional*): Templates of requests with `{question}`, the plain one first.
        pool (`Mapping[str, ChatModel | Worker]` or [`Workers`], *optional*): Measure several models or workers,
            each alone and under an oracle's choice. Defaults to the workers of the agent, if its environment is
            [`Workers`] and has two or more.
        repeats (`int`, *optional*, defaults to `4`): Number of answers to each request, and of each model of
            the pool. 1 suffices at temperature 0.
        metric (`str`, ...): Metric that scores an answer between 0 and 1, as in [`evaluate_agent`].
        calls (`int`, *optional*, defaults to `512`): Largest number of calls of large LLMs in each part.
        top_up_calls (`int`, *optional*, defaults to `0`): Calls of a second look at the prompts, on other rows,
            if the first one is inconclusive.
        delta (`float`, *optional*): The smallest gain that is worth it. Defaults to 0.10, and to 0.05 from
            2,000 calls on.
        seed (`int`, *optional*, defaults to `0`): Seed of rows, ties and samples.
        max_in_flight (`int`, *optional*, defaults to `64`): Largest number of calls in flight.
        sampling (`Mapping`, *optional*): Sampling arguments for the calls of chat models.

    Raises:
        `ValueError`: Before any call: if no part is requested, a row has no question or no answers, or there
            are too few calls or rows.
    """
    # Checks that do not depend on the parts.
    members = _members_of(pool, agent)
    if policy is None and agent is None and refiner is None and llm is None and not members:
        raise ValueError("say what to measure: policy=, agent=, refiner=, llm= or pool=")
    if isinstance(prompts, str) or not prompts:
        raise ValueError("prompts is a list of system prompts, yours first")
    validate_dataset(rows)

    # All parts take their rows from the same order, and share the count of calls.
    caller = Caller(metric, max_in_flight, sampling)
    measurement = Measurement(
        caller=caller,
        rows=random.Random(seed).sample(list(rows), len(rows)),
        calls=calls,
        delta=default_delta(calls) if delta is None else delta,
        seed=seed,
    )
    result = Headroom(
        delta=measurement.delta,
        asks_once=agent is not None and _asks_once(agent),
    )

    # Constructing a part checks it. All parts are checked before the first one makes a call.
    parts: dict[str, MeasurementPart] = {}
    # Is there a better system prompt?
    if policy is not None:
        parts["prompts"] = PromptPart(measurement, policy, prompts, reference, tried, top_up_calls)
    # Would GRPO have a gradient?
    if agent is not None:
        parts["signal"] = SignalPart(measurement, agent, group_size, reward)
    # How many answers does ProRefine repair, and how many does it break?
    if refiner is not None:
        parts["refinement"] = RefinePart(measurement, refiner, prompts[0] or DEFAULT_PROMPT)
    # What does the best request to a large LLM gain?
    if llm is not None:
        parts["requests"] = ChoicePart.of_requests(measurement, llm, requests, repeats)
    # What does the best model for each question gain?
    if members:
        parts["pool"] = ChoicePart.of_models(measurement, members, repeats)

    # Measure part by part. One with too few scores does not end the others, which may call other models.
    started = time.perf_counter()
    for name, part in parts.items():
        calls_before = caller.calls
        replayed_before = caller.replayed
        cost_before = caller.cost_usd
        try:
            await part.measure(result)
        except TooFewScores as error:
            result.stopped = f"{name}: {error}"
            if caller.last_error:
                result.stopped += f" (the last call that failed: {caller.last_error})"
        except MeasurementStopped as error:
            result.stopped = f"{name}: {error}"
            break
        finally:
            result.calls[name] = caller.calls - calls_before
            result.replayed[name] = caller.replayed - replayed_before
            result.costs[name] = caller.cost_usd - cost_before

    # What all parts took.
    result.cost_usd = caller.cost_usd
    result.failed = caller.failed
    result.seconds = time.perf_counter() - started
    return result


def _members_of(
    pool: Mapping[str, ChatModel | Worker] | Workers | None, agent: Agent | None
) -> Mapping[str, Any]:
    """The models or workers to measure alone: those of the pool, else those that the agent leads."""
    if isinstance(pool, Workers):
        return pool.pool
    if pool is not None:
        return pool
    environment = getattr(agent, "environment", None)
    # An oracle that chooses needs two workers.
    if isinstance(environment, Workers) and len(environment.pool) > 1:
        return environment.pool
    return {}


def _asks_once(agent: Any) -> bool:
    """Whether an agent has one turn to ask in, before the turn of its answer."""
    limits = getattr(agent, "limits", None)
    return limits is not None and limits.max_turns <= 2
