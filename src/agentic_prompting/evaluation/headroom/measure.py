"""[`headroom`]: measures the possible gain on a task within a limited number of calls.

Each requested measurement makes at most `calls` calls of large LLMs:

- **prompts** of a policy (a chat model or an agent): is there a better system prompt?
- **signal** of an untrained agent: would GRPO have a gradient?
- **refinement** by ProRefine: how many answers does it repair, and how many does it break?
- **requests** to a large LLM: what would an agent gain that always sends the best request?
- **pool** of several models or workers: what would a router gain that always picks the best one?
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...data import validate_dataset
from ...llm.loop import run
from ...refine.templates import DEFAULT_PROMPT
from ..systems import Row
from .caller import Caller, MeasurementStopped
from .measurements import (
    Measurement,
    MeasurementContext,
    PoolMeasurement,
    PromptMeasurement,
    RefinementMeasurement,
    RequestMeasurement,
    SignalMeasurement,
)
from .prompts import TooFewScores
from .result import Headroom
from .settings import HeadroomSettings


def headroom(
    rows: Sequence[Row], settings: HeadroomSettings | None = None, **options: Any
) -> Headroom:
    """Measure the possible gain on a task before training or searching for prompts.

    For synchronous code; [`aheadroom`] is the same for `async` code. May be called from any thread,
    also in a notebook. A failed call has no score, and its row is left out. An error that affects
    all further calls (a wrong key, a spent budget) ends the call; the completed measurements are
    returned.

    Args:
        rows (`Sequence[dict]`): Rows with `question` and `answers`, as from [`load_task`]. Sampled
            with `seed`.
        settings ([`HeadroomSettings`], *optional*): What to measure, and with how many calls.
        options (`Any`): Fields of the settings as keyword arguments, such as `policy=`. They
            replace those of `settings`.

    Raises:
        `ValueError`: Before any call: if no measurement is requested, a row has no question or no
            answers, or there are too few calls or rows.

    Example:

    ```python
    rows = [{"question": f"What is {n} times {n}?", "answers": [str(n * n)]} for n in range(400)]
    result = headroom(rows, policy=OpenAIChat("gpt-4o-mini"), prompts=["Be brief."], reference=OpenAIChat("gpt-4o"))
    print(result.report())
    ```
    """
    return run(aheadroom(rows, settings, **options))


async def aheadroom(
    rows: Sequence[Row], settings: HeadroomSettings | None = None, **options: Any
) -> Headroom:
    """[`headroom`], whose arguments these are, for `async` code."""
    settings = replace(settings or HeadroomSettings(), **options)
    settings.check()
    validate_dataset(rows)

    # All measurements take their rows from the same order, and share the count of calls.
    caller = Caller(settings.metric, settings.max_in_flight, settings.sampling)
    context = MeasurementContext(
        caller=caller,
        rows=random.Random(settings.seed).sample(list(rows), len(rows)),
        calls=settings.calls,
        delta=settings.smallest_gain,
        seed=settings.seed,
    )
    # All measurements are checked before the first one makes a call.
    measurements = _make_measurements(context, settings)
    result = Headroom(delta=context.delta, asks_once=settings.asks_once)
    await _run_measurements(measurements, caller, result)
    return result


def _make_measurements(
    context: MeasurementContext, settings: HeadroomSettings
) -> dict[str, Measurement]:
    """The requested measurements by name. Constructing a measurement checks it."""
    measurements: dict[str, Measurement] = {}
    if settings.policy is not None:
        measurements["prompts"] = PromptMeasurement(
            context,
            settings.policy,
            settings.prompts,
            settings.reference,
            settings.tried,
            settings.top_up_calls,
        )
    if settings.agent is not None:
        measurements["signal"] = SignalMeasurement(
            context, settings.agent, settings.group_size, settings.reward
        )
    if settings.refiner is not None:
        start_prompt = settings.prompts[0] or DEFAULT_PROMPT
        measurements["refinement"] = RefinementMeasurement(context, settings.refiner, start_prompt)
    if settings.llm is not None:
        measurements["requests"] = RequestMeasurement(
            context, settings.llm, settings.requests, settings.repeats
        )
    if settings.members:
        measurements["pool"] = PoolMeasurement(context, settings.members, settings.repeats)
    return measurements


async def _run_measurements(
    measurements: Mapping[str, Measurement], caller: Caller, result: Headroom
) -> None:
    """Run the measurements in order, and put the results and what they took into `result`."""
    started = time.perf_counter()
    for name, measurement in measurements.items():
        calls_before = caller.calls
        replayed_before = caller.replayed
        cost_before = caller.cost_usd
        try:
            await measurement.measure(result)
        except TooFewScores as error:
            # The others may call other models: they are measured all the same.
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

    # The totals of all measurements.
    result.cost_usd = caller.cost_usd
    result.failed = caller.failed
    result.seconds = time.perf_counter() - started
