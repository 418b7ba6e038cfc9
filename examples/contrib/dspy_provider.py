"""DSPy's `GRPO` through our trainers: a provider whose language model can be reinforced.

pip install 'agentic-prompting[dspy]'
PYTHONPATH=examples/contrib python train_a_program.py

# train_a_program.py
from dspy_provider import TrainerProvider provider = TrainerProvider(lambda **arguments:
MultiTurnGRPOTrainer(model, args=args, **arguments)) program.set_lm(provider.lm) GRPO(metric,
adapter=adapter, exclude_demos=True, num_rollouts_per_grpo_step=8).compile(program, trainset)
provider.trainer.save_model()
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

from agentic_prompting.interop.dspy import DSPyEngine
from agentic_prompting.llm import BadRequest, Message, Reply, run
from agentic_prompting.llm.guard import describe
from agentic_prompting.local import Sampling, local_policy
from agentic_prompting.rollout import FreeText, Rollout, Sample, SampleRequest, play, rollout_seed

_ROWS = [{"question": "of DSPy"}] * 1024  # placeholders: DSPy sends the prompts
_MARKERS = re.compile(r"\[\[ ## (\w+) ## \]\]|</?(\w+)>")


class TrainerProvider(Provider):
    """A provider for `dspy.LM(provider=...)`, with the language model itself as `lm`.

    DSPy, for which this is a chat model, samples, scores and groups, and returns text. The trainer,
    for which it is environment, policy and reward, gets the tokens that were sampled. `retokenized`
    counts the completions that DSPy changed after they were sampled; their tokens are made from the
    changed text.

    Args:
        trainer (`Callable`): Makes a trainer; gets `train_dataset`, `environment` and
            `reward_funcs`.

    Raises:
        `ValueError`: The trainer uses vLLM, several processes, or `async_lead`.
    """

    grammar = FreeText()

    def __init__(self, trainer: Callable[..., Any]):
        super().__init__()
        self.reinforceable = True
        self.ReinforceJob = TrainerJob
        self.retokenized = 0
        self.calls = itertools.count()
        self.sampled = defaultdict[str, list[Rollout]](list)
        self.waiting_prompts = list[asyncio.Future[list[Message]]]()
        self.batch_wanted = threading.Event()
        self.samples = defaultdict[tuple[int, ...], deque[Sample]](deque)
        self.rewards = defaultdict[tuple[int, ...], deque[float]](deque)
        self.trainer = trainer(train_dataset=_ROWS, environment=self, reward_funcs=self.metric)
        args = self.trainer.args
        if args.use_vllm or args.async_lead or self.trainer.accelerator.num_processes > 1:
            raise ValueError("a trainer for DSPy has one process, no vLLM and async_lead=0")
        self.size = args.per_device_train_batch_size * args.steps_per_generation
        self.trainer.policy = self.replay
        chat_format = self.trainer.chat_format
        self.policy: Any = local_policy(
            self.trainer.model,
            chat_format.tokenizer,
            Sampling(**self.trainer.spec.sampling),
            (),
            chat_format.end_of_turn_ids,
            prefix_cache_mb=0,
        )
        self.lm = dspy.LM("agent", engine=DSPyEngine(self), provider=self, cache=False)

    def __deepcopy__(self, memo: Any) -> TrainerProvider:
        return self  # DSPy copies programs; there is one trainer

    async def __call__(self, messages: Sequence[Message], **sampling: Any) -> Reply:
        """As a chat model: sample a turn, and remember its tokens."""
        chat_format = self.trainer.chat_format
        number = next(self.calls)
        rollout = Rollout(
            chat_format.prompt_ids(messages),
            seed=rollout_seed(self.trainer.args.seed, "dspy", number),
        )
        await play(rollout, self.policy, None, chat_format, self.trainer.limits)
        if not rollout.turns:
            length = len(rollout.prompt_ids)
            return Reply(
                error=BadRequest(
                    f"the maximum context length is reached: the messages have {length} tokens"
                )
            )
        self.sampled[str(messages)].append(rollout)
        return Reply(
            rollout.turns[-1].text,
            finish_reason="length" if rollout.status == "truncated" else "stop",
        )

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """As an environment: the row with the prompt of a sample; waits until DSPy has sent a
        batch.
        """
        self.waiting_prompts.append(asyncio.get_running_loop().create_future())
        if len(self.waiting_prompts) == self.size:
            self.batch_wanted.set()
        return {**row, "prompt": await self.waiting_prompts[-1]}

    async def step(self, rollout: Rollout) -> None: ...

    async def replay(self, request: SampleRequest) -> Sample:
        """As a policy: the sample that DSPy returned for this prompt."""
        return self.samples[tuple(request.context)].popleft()

    def metric(self, rollout: Sequence[Rollout], **columns: Any) -> list[float]:
        """As a reward function: the rewards that DSPy returned for these tokens."""
        return [self.rewards[tuple(played.context)].popleft() for played in rollout]

    async def send(self, prompts: Sequence[list[Message]] | None) -> None:
        """Send the trainer a batch of prompts, or end it with `None`."""
        self.batch_wanted.clear()
        while self.waiting_prompts:
            future = self.waiting_prompts.pop()
            future.cancel() if prompts is None else future.set_result(
                prompts[len(self.waiting_prompts)]
            )

    def add(self, messages: Sequence[Message], text: str, reward: float) -> None:
        """Find the sampled tokens of a completion.

        DSPy pads groups, so a completion may come twice.
        """
        sampled = self.sampled.get(str(messages))
        chat_format = self.trainer.chat_format
        if not sampled:
            raise ValueError(
                "DSPy trains on messages that were never sent: pass GRPO(adapter=...) the "
                "program's own"
            )
        ids = None
        for position, rollout in enumerate(sampled):
            if _values(rollout.turns[-1].text) == _values(text):
                ids = rollout.ids
                sampled.append(sampled.pop(position))  # next time others of this text come first
                break
        if ids is None:
            ids = chat_format.turn_ids(text)
            self.retokenized += 1
        prompt = sampled[0].prompt_ids
        self.samples[tuple(prompt)].append(Sample(ids))
        self.rewards[(*prompt, *ids)].append(reward)


class TrainerJob(ReinforceJob):
    """A run of the trainer; a step is one of its generation batches.

    Raises a `RuntimeError` once it has ended.
    """

    def initialize(self) -> None:
        self.provider = self.lm.provider
        self.steps = 0
        self.ended = ""
        self.n = self.provider.trainer.num_generations
        if (wanted := self.train_kwargs["num_generations"]) != self.n:
            raise ValueError(
                f"num_rollouts_per_grpo_step={wanted} in DSPy, num_generations={self.n} in the "
                "trainer"
            )
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()
        self.provider.batch_wanted.wait()

    def _train(self) -> None:
        try:
            self.provider.trainer.train()
            self.ended = "max_steps"
        except BaseException as error:  # of any kind: DSPy's thread waits for `batch_wanted`
            self.ended = describe(error, 1000)
        self.provider.batch_wanted.set()

    def get_status(self) -> dict[str, Any]:
        if self.ended:
            raise RuntimeError(f"training has ended: {self.ended}")
        return {
            "pending_batch_ids": [
                (self.steps, group) for group in range(self.provider.size // self.n)
            ]
        }

    def step(self, train_data: list[dict[str, Any]], train_data_format: Any = None) -> None:
        entries = [entry for group in train_data for entry in group["group"]]
        try:
            for entry in entries:
                self.provider.add(
                    entry["messages"], entry["completion"]["content"], entry["reward"]
                )
        except ValueError:
            self.terminate()  # DSPy ends here, and the training must not wait for it
            raise
        self.provider.sampled.clear()
        run(self.provider.send([entry["messages"] for entry in entries]))
        self.steps += 1
        self.provider.batch_wanted.wait()
        if self.ended not in ("", "max_steps"):
            self.get_status()

    def terminate(self) -> None:
        run(self.provider.send(None))
        self.thread.join()


def _values(text: str) -> list[str]:
    """The values that DSPy reads in a completion."""
    return [
        part.strip()
        for part in _MARKERS.split(text)
        if part and part.strip() not in ("", "completed")
    ]
