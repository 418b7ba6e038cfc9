"""Runs the trainer's loop over groups on a virtual clock, so that an hour of training takes
seconds.

The clock jumps to the next event instead of waiting for it. A decoder with a cost per step stands
in for the policy, and the latencies of replies are drawn by seed.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
import statistics
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..rollout import (
    AgentSpec,
    ChatFormat,
    Limits,
    Rollout,
    Sample,
    SampleRequest,
    TagGrammar,
    as_environment,
)
from ..sandbox.policy import world_tokenizer
from ..trainers.async_rollouts import AsyncSource, InFlightFile
from ..trainers.rollouts import BatchPosition, RowPrompts
from ..trainers.row_order import RowStream


@dataclass(frozen=True)
class Pace:
    """The durations of the parts of a step, in seconds. Lengths and latencies are log-normal.

    Args:
        groups (`int`, *optional*, defaults to `16`): Groups in a step.
        rollouts (`int`, *optional*, defaults to `8`): Rollouts in a group.
        turns (`int`, *optional*, defaults to `3`): Turns in a rollout.
        tokens (`float`, *optional*, defaults to `150`): Median of the tokens in a turn.
        tokens_sigma (`float`, *optional*, defaults to `0.6`): Their σ.
        reply (`float`, *optional*, defaults to `2.0`): Median latency of the environment.
        reply_sigma (`float`, *optional*, defaults to `0.6`): Its σ.
        update (`float`, *optional*, defaults to `10.0`): Duration of a weight update.
        step (`float`, *optional*, defaults to `0.012`): Duration of a decoding step.
        step_per_row (`float`, *optional*, defaults to `0.00003`): What each row adds to it.
    """

    groups: int = 16
    rollouts: int = 8
    turns: int = 3
    tokens: float = 150
    tokens_sigma: float = 0.6
    reply: float = 2.0
    reply_sigma: float = 0.6
    update: float = 10.0
    step: float = 0.012
    step_per_row: float = 0.00003


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event instead of waiting for it."""

    def __init__(self) -> None:
        selector = selectors.SelectSelector()
        super().__init__(selector)
        self.now = 0.0
        # Selecting waits until the next event is due, so the jump replaces the wait.
        select = selector.select

        def jump_to_next_event(timeout: float | None = None) -> list:
            if timeout is None:
                # Nothing would ever wake the loop again.
                raise RuntimeError("all tasks wait, and no event is due")
            self.now += timeout
            return select(0)

        selector.select = jump_to_next_event  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now


@dataclass
class DecodingRow:
    """A turn that is being decoded.

    Args:
        tokens_left (`int`): Decoding steps until it ends.
        done (`asyncio.Future`): Resolved when it ends.
    """

    tokens_left: int
    done: asyncio.Future[None]


class Decoder:
    """A policy whose rows each get one token per decoding step, all in the same batch.

    Args:
        pace ([`Pace`]): How long things take.
        has_own_devices (`bool`): Whether it decodes while the trainer updates the weights.
        speed (`float`): Factor on the speed of decoding.
        chat_format ([`ChatFormat`]): Converts turns to tokens.
    """

    def __init__(self, pace: Pace, has_own_devices: bool, speed: float, chat_format: ChatFormat):
        self.pace = pace
        self.has_own_devices = has_own_devices
        self.speed = speed
        self.chat_format = chat_format
        self.rows: list[DecodingRow] = []
        self.trainer_waits = True

    async def __call__(self, request: SampleRequest) -> Sample:
        """Return a request for the environment, or in the last turn an answer, once it is
        decoded."""
        # The seed of a request fixes its length, whatever else is decoded at the time.
        factor = random.Random(request.seed).lognormvariate(0, self.pace.tokens_sigma)
        length = max(1, round(factor * self.pace.tokens))
        row = DecodingRow(length, asyncio.get_running_loop().create_future())
        self.rows.append(row)
        await row.done

        # The transcript tells the number of replies so far: ask again, or answer in the last turn.
        context = self.chat_format.tokenizer.decode(request.context)
        turns_played = context.count("<interaction_response>")
        action = "<interaction_prompt> more </interaction_prompt>"
        if turns_played >= self.pace.turns - 1:
            action = "<answer> done </answer>"
        ids = self.chat_format.turn_ids(f"<think> go on </think> {action}")
        return Sample(ids, [0.0] * len(ids))

    async def run(self) -> None:
        """Decode all rows, step by step, until cancelled."""
        while True:
            # On shared devices, decoding stops while the weights are updated.
            may_decode = self.has_own_devices or self.trainer_waits
            if not self.rows or not may_decode:
                await asyncio.sleep(self.pace.step)
                continue
            # All rows advance by one token in a step; a larger batch makes the step slower.
            step_seconds = self.pace.step + self.pace.step_per_row * len(self.rows)
            await asyncio.sleep(step_seconds / self.speed)
            for row in self.rows:
                row.tokens_left -= 1
                if row.tokens_left == 0:
                    row.done.set_result(None)
            self.rows = [row for row in self.rows if row.tokens_left > 0]


class SlowReplies:
    """An environment that replies after a drawn latency."""

    def __init__(self, pace: Pace):
        self.pace = pace

    async def step(self, rollout: Rollout) -> str:
        """Return the same reply to each request, after its latency."""
        # The seed of a rollout and its turn fix the latency of the reply.
        generator = random.Random(f"{rollout.seed} {len(rollout.turns)}")
        await asyncio.sleep(generator.lognormvariate(0, self.pace.reply_sigma) * self.pace.reply)
        return "noted"


def run_on_virtual_clock(pace: Pace, layout: str, lead: int, steps: int) -> dict[str, Any]:
    """Measure a step of the trainer's own asynchronous loop: wait for groups, then update the
    weights.

    Args:
        pace ([`Pace`]): How long things take.
        layout (`str`): `server`: the policy has its own devices. `two nodes`: one node samples at
            half the speed, the other one trains at half the speed. `one node`: the policy samples
            only while the trainer waits.
        lead (`int`): The option `async_lead`.
        steps (`int`): Steps to run. The second half is measured.

    Returns:
        `dict`: `step_s`, the seconds of a step; `over_bound`, their ratio to the least possible;
            `trainer_idle`, the share of the time that the trainer waits; `age`, the mean age of a
            token in updates.
    """
    # With two nodes, sampling and training have one each, and half of the speed.
    speed = 0.5 if layout == "two nodes" else 1.0
    has_own_devices = layout != "one node"
    with tempfile.TemporaryDirectory() as folder:
        run = play_steps(Path(folder), pace, speed, has_own_devices, lead, steps)
    # The first half fills the pipeline and is not measured.
    half = steps // 2
    step_seconds = (run.end_times[-1] - run.end_times[half - 1]) / (steps - half)

    # The least possible: all rollouts of a step decode in one batch, and no reply is waited for.
    update_seconds = pace.update / speed
    # The expected number of tokens: a log-normal's mean is its median times exp(sigma^2 / 2).
    rows = pace.groups * pace.rollouts
    tokens = rows * pace.turns * pace.tokens * math.exp(pace.tokens_sigma**2 / 2)
    seconds_per_token = (pace.step / (rows * (1 + lead)) + pace.step_per_row) / speed
    sampling_seconds = tokens * seconds_per_token
    # On shared devices, sampling and updating take turns; on separate ones they overlap.
    bound = sampling_seconds + update_seconds
    if has_own_devices:
        bound = max(sampling_seconds, update_seconds)

    return {
        "step_s": round(step_seconds, 2),
        "over_bound": round(step_seconds / bound, 3),
        "trainer_idle": round(1 - update_seconds / step_seconds, 3),
        "age": round(statistics.mean(run.token_ages[half:]), 2),
    }


@dataclass(frozen=True)
class VirtualRun:
    """The result of [`play_steps`].

    Args:
        end_times (`list[float]`): The time at which each step ended.
        token_ages (`list[float]`): The mean age of each step's tokens.
    """

    end_times: list[float]
    token_ages: list[float]


def play_steps(
    folder: Path, pace: Pace, speed: float, has_own_devices: bool, lead: int, steps: int
) -> VirtualRun:
    """Run steps of an [`AsyncSource`] on a virtual clock, with its log in `folder`."""
    loop = VirtualLoop()
    chat_format = ChatFormat(world_tokenizer(), TagGrammar())
    decoder = Decoder(pace, has_own_devices, speed, chat_format)

    # A player on this loop: one process, and no session to open.
    def run_coroutine(coroutine: Coroutine[Any, Any, Any], description: str) -> Any:
        return loop.run_until_complete(coroutine)

    player: Any = SimpleNamespace(
        policy=decoder,
        environment=as_environment(SlowReplies(pace)),
        chat_format=chat_format,
        limits=Limits(pace.turns),
        accelerator=SimpleNamespace(process_index=0, num_processes=1),
        reset_rows=lambda rows, seeds: rows,
        run=run_coroutine,
    )
    # A stream of rows, which the source plays in groups.
    questions = [{"question": str(number)} for number in range(1024)]
    stream = RowStream(questions, seed=0, shuffle=True, groups_per_batch=pace.groups)
    log_file = InFlightFile(folder / "00000.jsonl", {}, 0, resumes=False)
    prompts = RowPrompts(AgentSpec(), pace.rollouts)
    source = AsyncSource(stream, prompts, player, log_file, lead=lead, max_staleness=2 * lead)

    # Keep a reference to the task: the event loop does not.
    decoding = loop.create_task(decoder.run())
    end_times = []
    token_ages = []
    for step in range(steps):
        # Wait for the next groups, as a step of the trainer does.
        decoder.trainer_waits = True
        position = BatchPosition(0, "train", step, batch_index=step, batch_count=10**6)
        groups = source.take_groups(pace.groups, position)
        token_ages.append(source.metrics(groups)["async/token_age"])

        # Then update the weights.
        decoder.trainer_waits = False
        loop.run_until_complete(asyncio.sleep(pace.update / speed))
        end_times.append(loop.now)

    # End the rollouts in flight, so that the loop closes without pending tasks.
    decoding.cancel()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    return VirtualRun(end_times, token_ages)
