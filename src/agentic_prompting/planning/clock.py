"""The trainer's own loop over groups on a clock that jumps to the next event, so that an hour takes seconds.

A decoder with a cost per step stands in for the policy, and replies are drawn by seed.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..rollout import AgentSpec, ChatFormat, Limits, Sample, TagGrammar, as_environment
from ..sandbox.policy import world_tokenizer
from ..trainers.ahead import Ahead
from ..trainers.in_flight import InFlightFile
from ..trainers.rollouts import BatchPosition, RowPrompts, RowStream


@dataclass(frozen=True)
class Pace:
    """How long things take, in seconds; the medians of log-normal numbers, and their σ.

    Args:
        groups (`int`), rollouts (`int`): Groups in a step, rollouts in a group.
        turns (`int`): Turns in a rollout.
        tokens (`float`), tokens_sigma (`float`): Tokens in a turn.
        reply (`float`), reply_sigma (`float`): Until the environment answers.
        update (`float`): Seconds of an update of the weights.
        step (`float`), step_per_row (`float`): One decoding step takes `step`, and `step_per_row` more for each row.
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
        self.now, select = 0.0, selector.select

        def jump(timeout: float | None = None) -> list:
            if timeout is None:
                raise RuntimeError("all tasks wait, and no event is due")
            self.now += timeout
            return select(0)

        selector.select = jump  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now


class Decoder:
    """A policy whose rows each get a token per decoding step, all in the same batch."""

    def __init__(self, pace: Pace, own_devices: bool, speed: float, chat_format: Any):
        self.pace, self.own_devices, self.speed, self.format = pace, own_devices, speed, chat_format
        self.rows: list[list[Any]] = []  # tokens left, and the future of the waiting turn
        self.trainer_waits = True

    async def __call__(self, request: Any) -> Any:
        drawn = random.Random(request.seed).lognormvariate(0, self.pace.tokens_sigma)
        length = max(1, round(drawn * self.pace.tokens))
        done = asyncio.get_running_loop().create_future()
        self.rows.append([length, done])
        await done
        asked = self.format.tokenizer.decode(request.context).count("<interaction_response>")
        act = (
            "<answer> done </answer>"
            if asked >= self.pace.turns - 1
            else "<interaction_prompt> more </interaction_prompt>"
        )
        ids = self.format.turn_ids(f"<think> go on </think> {act}")
        return Sample(ids, [0.0] * len(ids))

    async def work(self) -> None:
        while True:
            if not self.rows or not (self.own_devices or self.trainer_waits):
                await asyncio.sleep(self.pace.step)
                continue
            await asyncio.sleep((self.pace.step + self.pace.step_per_row * len(self.rows)) / self.speed)
            for row in self.rows:
                row[0] -= 1
            for _, done in (row for row in self.rows if row[0] <= 0):
                done.set_result(None)
            self.rows = [row for row in self.rows if row[0] > 0]


class Replies:
    """An environment whose replies take their time."""

    def __init__(self, pace: Pace):
        self.pace = pace

    async def step(self, rollout: Any) -> str:
        drawn = random.Random(f"{rollout.seed} {len(rollout.turns)}").lognormvariate(0, self.pace.reply_sigma)
        await asyncio.sleep(drawn * self.pace.reply)
        return "noted"


def on_a_virtual_clock(pace: Pace, layout: str, lead: int, steps: int) -> dict[str, Any]:
    """The seconds of a step of the trainer's own [`Ahead`]: it waits for groups, then an update takes its time.

    Args:
        pace ([`Pace`]): How long things take.
        layout (`str`): `server` (the policy has devices of its own), `two nodes` (one samples at half the speed, the
            other one trains at half the speed) or `one node` (the policy samples only while the trainer waits).
        lead (`int`): `async_lead`.
        steps (`int`): Steps to run; the second half of them counts.

    Returns:
        `dict`: `step_s`; `over_bound`, that divided by the least possible; `trainer_idle`, a share; `age` of a
        token, in updates.
    """
    speed, has_own_devices = 0.5 if layout == "two nodes" else 1.0, layout != "one node"
    with tempfile.TemporaryDirectory() as folder:
        ends, ages = _played(Path(folder), pace, speed, has_own_devices, lead, steps)
    half, update = steps // 2, pace.update / speed
    seconds = (ends[-1] - ends[half - 1]) / (steps - half)
    # The time to sample a step's tokens when all its rollouts decode in one batch.
    rows = pace.groups * pace.rollouts
    sampling = rows * pace.turns * pace.tokens * math.exp(pace.tokens_sigma**2 / 2)
    sampling *= (pace.step / (rows * (1 + lead)) + pace.step_per_row) / speed
    bound = max(sampling, update) if has_own_devices else sampling + update
    row = {"step_s": round(seconds, 2), "over_bound": round(seconds / bound, 3)}
    return row | {"trainer_idle": round(1 - update / seconds, 3), "age": round(statistics.mean(ages[half:]), 2)}


def _played(
    folder: Path, pace: Pace, speed: float, has_own_devices: bool, lead: int, steps: int
) -> tuple[list[float], list[float]]:
    """When each step ended, and the age of its tokens."""
    loop = VirtualLoop()
    chat_format = ChatFormat(world_tokenizer(), TagGrammar())
    decoder = Decoder(pace, has_own_devices, speed, chat_format)
    player: Any = SimpleNamespace(  # on this loop, one process, and no session to open
        policy=decoder, environment=as_environment(Replies(pace)), chat_format=chat_format, limits=Limits(pace.turns),
        accelerator=SimpleNamespace(process_index=0, num_processes=1), reset_rows=lambda rows: rows,
        run=lambda work, what: loop.run_until_complete(work),
    )  # fmt: skip
    stream = RowStream([{"question": str(i)} for i in range(1024)], seed=0, shuffle=True, groups_per_batch=pace.groups)
    file = InFlightFile(folder / "00000.jsonl", {}, 0, resumes=False)
    ahead = Ahead(stream, RowPrompts(AgentSpec(), pace.rollouts), player, file, lead, 2 * lead)
    _working = loop.create_task(decoder.work())  # kept, or it may be collected
    ends, ages = [], []
    for step in range(steps):
        decoder.trainer_waits = True
        taken = ahead.take(pace.groups, BatchPosition(0, "train", step, batch_index=step, batch_count=10**6))
        ages.append(ahead.metrics(taken)["async/token_age"])
        decoder.trainer_waits = False
        loop.run_until_complete(asyncio.sleep(pace.update / speed))
        ends.append(loop.now)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    return ends, ages
