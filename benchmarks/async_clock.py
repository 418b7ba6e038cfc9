"""The trainer's own loop over groups on a clock that jumps to the next event, so that an hour takes seconds.

`async_training.py` runs it. A decoder with a cost per step stands in for the policy, and replies are drawn by seed.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GROUPS, ROLLOUTS = 16, 8
TOKENS, TOKENS_SIGMA, REPLY, REPLY_SIGMA, UPDATE = 150, 0.6, 2.0, 0.6, 10.0
STEP, STEP_PER_ROW = 0.012, 0.00003
TURNS = 3


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now, select = 0.0, self._selector.select

        def jump(timeout: float | None = None) -> list:
            if timeout is None:
                raise RuntimeError("all tasks wait, and no event is due")
            self.now += timeout
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self.now


class Decoder:
    """A policy whose rows each get a token per decoding step, all in the same batch."""

    def __init__(self, own_devices: bool, speed: float, chat_format: Any):
        self.own_devices, self.speed, self.format = own_devices, speed, chat_format
        self.rows: list[list[Any]] = []  # tokens left, and the future of the waiting turn
        self.lending, self.tokens, self.busy = not own_devices, 0, 0.0

    async def __call__(self, request: Any) -> Any:
        from agentic_prompting.rollout import Sample

        length = max(1, round(random.Random(request.seed).lognormvariate(0, TOKENS_SIGMA) * TOKENS))
        done = asyncio.get_running_loop().create_future()
        self.rows.append([length, done])
        await done
        asked = self.format.tokenizer.decode(request.context).count("<interaction_response>")
        act = "<answer> done </answer>" if asked >= TURNS - 1 else "<interaction_prompt> more </interaction_prompt>"
        ids = self.format.turn_ids(f"<think> go on </think> {act}")
        return Sample(ids, [0.0] * len(ids))

    async def work(self) -> None:
        while True:
            if not self.rows or not (self.own_devices or self.lending):
                await asyncio.sleep(STEP)
                continue
            seconds = (STEP + STEP_PER_ROW * len(self.rows)) / self.speed
            await asyncio.sleep(seconds)
            self.busy, self.tokens = self.busy + seconds, self.tokens + len(self.rows)
            for row in self.rows:
                row[0] -= 1
            for _, done in (row for row in self.rows if row[0] <= 0):
                done.set_result(None)
            self.rows = [row for row in self.rows if row[0] > 0]


class Replies:
    async def step(self, rollout: Any) -> str:
        await asyncio.sleep(
            random.Random(f"{rollout.seed} {len(rollout.turns)}").lognormvariate(0, REPLY_SIGMA) * REPLY
        )
        return "noted"


def on_a_virtual_clock(folder: Path, policy: Path, layout: str, lead: int, steps: int) -> dict[str, Any]:
    """The seconds of a step of the trainer's own [`Ahead`]: it waits for groups, then an update takes its time."""
    from transformers import AutoTokenizer

    from agentic_prompting.rollout import AgentSpec, ChatFormat, Limits, TagGrammar, as_environment
    from agentic_prompting.trainers.ahead import Ahead, RowStream
    from agentic_prompting.trainers.batch import Place
    from agentic_prompting.trainers.in_flight import InFlightFile
    from agentic_prompting.trainers.prompts import RowPrompts

    loop, speed = VirtualLoop(), 0.5 if layout == "two nodes" else 1.0
    update = UPDATE / speed
    chat_format = ChatFormat(AutoTokenizer.from_pretrained(policy), TagGrammar())
    decoder = Decoder(layout != "one node", speed, chat_format)
    player: Any = SimpleNamespace(  # on this loop, one process, and no session to open
        policy=decoder, environment=as_environment(Replies()), chat_format=chat_format, limits=Limits(TURNS),
        accelerator=SimpleNamespace(process_index=0, num_processes=1), prompt=chat_format.prompt,
        prompt_ids=chat_format.prompt_ids, reset=lambda rows: rows,
        run=lambda work, what: loop.run_until_complete(work),
    )  # fmt: skip
    rows = RowStream([{"question": str(i)} for i in range(1024)], seed=0, shuffle=True, groups_per_batch=GROUPS)
    file = InFlightFile(folder / f"{layout} {lead}" / "00000.jsonl", {}, 0, resumes=False)
    logged: list[Any] = []
    ahead = Ahead(
        rows, RowPrompts(AgentSpec(), ROLLOUTS), player, file, lead, 2 * lead, updates_now=lambda: 0, log=logged.append
    )
    working = loop.create_task(decoder.work())
    ends = []
    for step in range(steps):
        decoder.lending = True
        ahead.take(GROUPS, Place(0, "train", step, number=step, last=10**6))
        decoder.lending = False
        loop.run_until_complete(asyncio.sleep(update))
        ends.append(loop.now)
    ages = [metrics["async/token_age"] for metrics in logged]
    for task in asyncio.all_tasks(loop):
        task.cancel()
    working.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    half = steps // 2
    seconds = (ends[-1] - ends[half - 1]) / (steps - half)
    # The time to sample a step's tokens when all its rollouts decode in one batch.
    sampling = GROUPS * ROLLOUTS * TURNS * TOKENS * 2.718281828 ** (TOKENS_SIGMA**2 / 2)
    sampling *= (STEP / (GROUPS * ROLLOUTS * (1 + lead)) + STEP_PER_ROW) / speed
    bound = max(sampling, update) if decoder.own_devices else sampling + update
    row = {"step_s": round(seconds, 2), "over_bound": round(seconds / bound, 3)}
    row |= {"trainer_idle": round(1 - update / seconds, 3), "age": round(statistics.mean(ages[half:]), 2)}
    print(f"virtual, {layout}, lead {lead}: {row}", flush=True)
    return row
