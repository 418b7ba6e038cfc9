"""DSPy's `GRPO` over our trainer: a provider whose language model is reinforceable (the extra `dspy`).

provider = TrainerProvider(lambda **given: MultiTurnGRPOTrainer(model, args=args, **given))
program.set_lm(provider.lm)
GRPO(metric, adapter=adapter, exclude_demos=True, num_rollouts_per_grpo_step=8).compile(program, trainset)
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dspy
from dspy.clients.provider import Provider, ReinforceJob

from ..llm import Message, Reply
from ..llm.guard import describe
from ..llm.loop import run
from ..local import Sampling, local_policy
from ..rollout import FreeText, Rollout, Sample, SampleRequest, play, rollout_seed
from .dspy import Engine

_ROWS = [{"question": "of DSPy"}] * 1024  # their prompts come later
_MARKERS = re.compile(r"\[\[ ## (\w+) ## \]\]|</?(\w+)>")


class TrainerProvider(Provider):
    """What `dspy.LM(provider=...)` takes, and the language model itself as `lm`.

    DSPy, to which this is a chat model, samples, scores and groups, and hands text back. The trainer, to which it is
    environment, policy and reward, gets the tokens that were sampled. `retokenized` counts the completions that nobody
    sampled as DSPy wrote them.

    Args:
        trainer (`Callable`): Makes a trainer of `train_dataset`, `environment` and `reward_funcs`, which it is given.

    Raises:
        `ValueError`: The trainer has vLLM, several processes, or works ahead of itself (`lead`).
    """

    grammar = FreeText()

    def __init__(self, trainer: Callable[..., Any]):
        super().__init__()
        self.reinforceable, self.ReinforceJob, self.retokenized = True, TrainerJob, 0
        self.asked, self.said = itertools.count(), defaultdict[str, list[Rollout]](list)
        self.open, self.waiting = list[asyncio.Future[list[Message]]](), threading.Event()
        self.samples = defaultdict[tuple[int, ...], deque[Sample]](deque)
        self.rewards = defaultdict[tuple[int, ...], deque[float]](deque)
        self.trainer = made = trainer(train_dataset=_ROWS, environment=self, reward_funcs=self.metric)
        if made.args.use_vllm or made.args.lead or made.accelerator.num_processes > 1:
            raise ValueError("a trainer for DSPy has one process, no vLLM and lead=0")
        self.size, made.policy = made.args.per_device_train_batch_size * made.args.steps_per_generation, self.replay
        sampling, ends = Sampling(**made.spec.sampling), made.chat_format.end_of_turn_ids
        self.policy: Any = local_policy(made.model, made.chat_format.tokenizer, sampling, (), ends, prefix_cache_mb=0)
        self.lm = dspy.LM("agent", engine=Engine(self), provider=self, cache=False)

    def __deepcopy__(self, memo: Any) -> TrainerProvider:
        return self  # DSPy copies programs; there is one trainer

    async def __call__(self, messages: Sequence[Message], **sampling: Any) -> Reply:
        form, number = self.trainer.chat_format, next(self.asked)
        rollout = Rollout(form.prompt_ids(messages), seed=rollout_seed(self.trainer.args.seed, "dspy", number))
        await play(rollout, self.policy, None, form, self.trainer.limits)
        self.said[str(messages)].append(rollout)
        return Reply(rollout.turns[-1].text)

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """As an environment: the row with the prompt of a sample; waits until DSPy has a batch of them."""
        self.open.append(asyncio.get_running_loop().create_future())
        if len(self.open) == self.size:
            self.waiting.set()
        return {**row, "prompt": await self.open[-1]}

    async def step(self, rollout: Rollout) -> None: ...

    async def replay(self, request: SampleRequest) -> Sample:
        return self.samples[tuple(request.context)].popleft()

    def metric(self, rollout: Sequence[Rollout], **columns: Any) -> list[float]:
        return [self.rewards[tuple(one.context)].popleft() for one in rollout]

    async def give(self, prompts: Sequence[list[Message]] | None) -> None:
        """Let the trainer go on, or end it."""
        self.waiting.clear()
        while self.open:
            future = self.open.pop()
            future.cancel() if prompts is None else future.set_result(prompts[len(self.open)])

    def take(self, messages: Sequence[Message], text: str, reward: float) -> None:
        """Find what was sampled for a completion. DSPy pads groups, so that one may be asked for again."""
        said, form = self.said.get(str(messages)), self.trainer.chat_format
        if not said:
            raise ValueError("DSPy trains on messages that were never sent: give GRPO(adapter=...) the program's own")
        place = next((at for at, one in enumerate(said) if _values(one.turns[-1].text) == _values(text)), None)
        if place is not None:
            said.append(said.pop(place))  # next time others of this text come first
        self.retokenized += place is None
        prompt, ids = said[0].prompt_ids, form.turn_ids(text) if place is None else said[-1].ids
        self.samples[tuple(prompt)].append(Sample(ids))
        self.rewards[(*prompt, *ids)].append(reward)


class TrainerJob(ReinforceJob):
    """A run of the trainer; a step is one of its generation batches. Raises a `RuntimeError` where it has ended."""

    def initialize(self) -> None:
        self.provider, self.steps, self.ended = self.lm.provider, 0, ""
        self.n = self.provider.trainer.num_generations
        if (wanted := self.train_kwargs["num_generations"]) != self.n:
            raise ValueError(f"num_rollouts_per_grpo_step={wanted} in DSPy, num_generations={self.n} in the trainer")
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()
        self.provider.waiting.wait()

    def _train(self) -> None:
        try:
            self.provider.trainer.train()
            self.ended = "max_steps"
        except BaseException as error:  # of any kind: DSPy's thread waits for `waiting`
            self.ended = describe(error, 1000)
        self.provider.waiting.set()

    def get_status(self) -> dict[str, Any]:
        if self.ended:
            raise RuntimeError(f"training has ended: {self.ended}")
        return {"pending_batch_ids": [(self.steps, group) for group in range(self.provider.size // self.n)]}

    def step(self, train_data: list[dict[str, Any]], train_data_format: Any = None) -> None:
        entries = [entry for one in train_data for entry in one["group"]]
        for entry in entries:
            self.provider.take(entry["messages"], entry["completion"]["content"], entry["reward"])
        self.provider.said.clear()
        run(self.provider.give([entry["messages"] for entry in entries]))
        self.steps += 1
        self.provider.waiting.wait()
        if self.ended not in ("", "max_steps"):
            self.get_status()

    def terminate(self) -> None:
        run(self.provider.give(None))
        self.thread.join()


def _values(text: str) -> list[str]:  # what DSPy reads in a completion
    return [part.strip() for part in _MARKERS.split(text) if part and part.strip() not in ("", "completed")]
