"""[`headroom`]: what can be gained on a task, measured within a number of calls.

Each part that is asked for makes at most `calls` calls of large LLMs:

- **prompts**, of a policy (a chat model or an agent): does a better system prompt exist?
- **signal**, of an untrained agent: would GRPO have a gradient?
- **refinement**, by ProRefine: how many answers does it repair, and how many does it break?
- **requests**, to a large LLM: what would an agent gain that asks perfectly?
- **pool**, of several models: what would a router gain that always picks the right one?
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...data import validate_dataset
from ...llm import ChatModel
from ...llm.loop import run
from ...refine import ProRefiner
from ...refine.templates import DEFAULT_PROMPT
from ..metrics import Metric
from ..systems import Row
from .caller import Caller, MeasurementStopped
from .parts import ChoicePart, PromptPart, RefinePart, SignalPart
from .prompts import TooFewScores, default_delta
from .proposals import DEFAULT_REQUESTS
from .result import Headroom


def headroom(rows: Sequence[Row], **options: Any) -> Headroom:
    """[`aheadroom`], and wait for it. May be called from any thread, also in a notebook.

    Example:

    ```python
    rows = [{"question": f"What is {n} times {n}?", "answers": [str(n * n)]} for n in range(400)]
    found = headroom(rows, policy=OpenAIChat("gpt-4o-mini"), prompts=["Be brief."], reference=OpenAIChat("gpt-4o"))
    print(found.report())
    ```
    """
    return run(aheadroom(rows, **options))


async def aheadroom(
    rows: Sequence[Row],
    *,
    policy: Any = None,
    prompts: Sequence[str] = ("",),
    reference: ChatModel | None = None,
    tried: int = 12,
    agent: Any = None,
    group_size: int = 8,
    reward: Callable[..., Any] | None = None,
    refiner: ProRefiner | None = None,
    llm: ChatModel | None = None,
    requests: Sequence[str] = DEFAULT_REQUESTS,
    pool: Mapping[str, ChatModel] | None = None,
    repeats: int = 4,
    metric: Metric = "exact_match",
    calls: int = 512,
    top_up_calls: int = 0,
    delta: float | None = None,
    seed: int = 0,
    max_in_flight: int = 64,
    sampling: Mapping[str, Any] | None = None,
) -> Headroom:
    """Measure what can be gained on a task before training or searching for prompts.

    A failed call has no score, and its row is left out. An error that no other call can escape (a wrong key, a spent
    budget) ends the measurement; the parts that were complete are returned.

    Args:
        rows (`Sequence[dict]`): Rows with `question` and `answers`, like [`load_task`]'s; `seed` draws from them.
        policy ([`ChatModel`] or [`PromptAgent`], *optional*): Measure a better system prompt for it.
        prompts (`Sequence[str]`, *optional*, defaults to `("",)`): System prompts to compare, yours first. The empty
            one is added.
        reference ([`ChatModel`], *optional*): Writes further prompts, from examples, until there are `tried`.
        tried (`int`, *optional*, defaults to `12`): How many prompts to compare, if a `reference` writes them.
        agent ([`PromptAgent`], *optional*): Measure the signal for GRPO in its rollouts.
        group_size (`int`, *optional*, defaults to `8`): The group size of the planned training (`num_generations`).
        reward (`Callable`, *optional*): The reward function of the planned training, with TRL's signature; a reward of
            1 is right. Defaults to `metric`.
        refiner ([`ProRefiner`], *optional*): Measure what ProRefine gains; it begins with your prompt, or with the
            paper's where that is empty.
        llm ([`ChatModel`], *optional*): Measure what a large LLM answers right if it is asked in the best way.
        requests (`Sequence[str]`, *optional*): The ways, with `{question}`; the plain one first.
        pool (`Mapping[str, ChatModel]`, *optional*): Measure several models, each alone and under an oracle's choice.
        repeats (`int`, *optional*, defaults to `4`): Answers to each request, and of each model of the pool. 1 suffices
            at temperature 0.
        metric (`str`, ...): The score of an answer, between 0 and 1, as in [`evaluate_agent`].
        calls (`int`, *optional*, defaults to `512`): Calls of large LLMs in each part, at most.
        top_up_calls (`int`, *optional*, defaults to `0`): Calls of a second look at the prompts, on other rows, if the
            first cannot tell.
        delta (`float`, *optional*): The smallest gain that is worth it: 0.10, from 2,000 calls on 0.05.
        seed (`int`, *optional*, defaults to `0`): Of rows, ties and samples.
        max_in_flight (`int`, *optional*, defaults to `64`): Calls on their way at once.
        sampling (`Mapping`, *optional*): Sampling arguments of chat models' calls.

    Raises:
        `ValueError`: Before any call: no part is asked for, a row lacks its question or its answers, or calls or rows
            are too few.
    """
    if policy is None and agent is None and refiner is None and llm is None and not pool:
        raise ValueError("say what to measure: policy=, agent=, refiner=, llm= or pool=")
    if isinstance(prompts, str) or not prompts:
        raise ValueError("prompts is a list of system prompts, yours first")
    validate_dataset(rows)
    shuffled = random.Random(seed).sample(list(rows), len(rows))
    caller = Caller(metric, max_in_flight, sampling)
    result = Headroom(delta=default_delta(calls) if delta is None else delta)

    # Each part is checked before the first one makes a call.
    parts: dict[str, Any] = {}
    if policy is not None:
        parts["prompts"] = PromptPart(
            caller,
            shuffled,
            policy,
            prompts,
            reference,
            tried,
            calls,
            top_up_calls,
            result.delta,
            seed,
        )
    if agent is not None:
        parts["signal"] = SignalPart(caller, shuffled, agent, group_size, reward, calls, seed)
    if refiner is not None:
        start = prompts[0] or DEFAULT_PROMPT
        parts["refinement"] = RefinePart(
            caller, shuffled, refiner, start, calls, result.delta, seed
        )
    if llm is not None:
        parts["requests"] = ChoicePart.of_requests(
            caller, shuffled, llm, requests, repeats, calls, seed
        )
    if pool:
        parts["pool"] = ChoicePart.of_models(caller, shuffled, pool, repeats, calls, seed)

    started = time.perf_counter()
    for name, part in parts.items():
        before = caller.calls
        try:
            await part.measure(result)
        except TooFewScores as error:  # of this part; another may ask other models
            cause = (
                f" (the last call that failed: {caller.last_error})" if caller.last_error else ""
            )
            result.stopped = f"{name}: {error}{cause}"
        except MeasurementStopped as error:
            result.stopped = f"{name}: {error}"
            break
        finally:
            result.calls[name] = caller.calls - before
    result.cost_usd = caller.cost_usd
    result.failed = caller.failed
    result.seconds = time.perf_counter() - started
    return result
