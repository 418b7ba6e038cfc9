"""Our episodes under TRL's `AsyncGRPOTrainer`, which needs a GPU, FSDP2 and a vLLM server.

Masks, failures, budgets and replay are ours; batches, weights and loss are TRL's. The trainer is
experimental in TRL 1.16 and stable from 1.18 on, where it has moved: both places are looked at.
This file was tested against the protocol and the queue of TRL 1.16, not on a GPU. For training that
does not wait, with any policy, see the option `async_lead` of our own trainers.

    PYTHONPATH=examples/contrib accelerate launch train.py

    # train.py
    from rollout_worker import RolloutWorker worker = RolloutWorker(policy, environment, spec,
    tokenizer, reward_funcs, dataset) AsyncGRPOTrainer(model="Qwen/Qwen3-4B",
    reward_funcs=reward_funcs, rollout_worker=worker).train()
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
from datasets import Dataset

from agentic_prompting.environments import as_environment
from agentic_prompting.llm import gather, start
from agentic_prompting.rollout import (
    AgentSpec,
    Policy,
    Rollout,
    RolloutFacts,
    play,
    rollout_metrics,
    rollout_seed,
)
from agentic_prompting.trainers.batch_monitor import FailureWatch
from agentic_prompting.trainers.checkpointing.stop_training import TrainingStopped
from agentic_prompting.trainers.reward_functions import render_completion

ASYNC_GRPO_MODULES = (
    "trl.trainer.async_grpo_trainer",  # TRL 1.18 and later
    "trl.experimental.async_grpo.async_grpo_trainer",
    "trl.experimental.async_grpo.async_rollout_worker",
)
"""Where the classes of TRL's asynchronous trainer are, the stable place first."""


def find_in_trl(name: str) -> Any:
    """Return a class of TRL's asynchronous trainer by its name.

    Raises:
        `ImportError`: The installed version of TRL has it in none of [`ASYNC_GRPO_MODULES`].
    """
    for module_name in ASYNC_GRPO_MODULES:
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            # A package that the module imports may be missing, which is another error.
            if not module_name.startswith(str(error.name)):
                raise
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(
        f"TRL {version('trl')} has no {name} in {', '.join(ASYNC_GRPO_MODULES)}: "
        "this file works with TRL 1.16 to 1.18"
    )


@dataclass(eq=False)
class RolloutWorker:
    """A `rollout_worker` for TRL's `AsyncGRPOTrainer`, in the trainer's process, on the background
    loop.

    A failed rollout has no part in its group's baseline and no gradient. The trainer drops samples
    that are older than its own `max_staleness`, so keep `max_groups` and the buffer small.

    Args:
        policy ([`Policy`]): A vLLM server that the trainer pushes weights to; returns
            log-probabilities.
        environment ([`Environment`] or `Callable`): Answers the agent's requests.
        spec ([`AgentSpec`]): Template, grammar and limits.
        tokenizer (`PreTrainedTokenizerBase`): The agent's tokenizer.
        reward_funcs (`list[Callable]`): Functions with TRL's signature; they get `rollout` as in
            [`MultiTurnGRPOTrainer`].
        dataset (`Dataset`): Rows with a `question` or a `prompt`.
        num_generations (`int`, *optional*, defaults to `8`): Rollouts of a group.
        max_groups (`int`, *optional*, defaults to `16`): Groups in flight at once.
        buffer_size (`int`, *optional*, defaults to `256`): Samples that wait for the trainer; while
            there are more, no new group starts.
        seed (`int`, *optional*, defaults to `0`): The seed of the order of rows and of the
            rollouts.
        max_failed_share (`float`, *optional*, defaults to `0.5`), failure_window (`int`,
            *optional*, defaults to `3`): `check_health` raises when a larger share of the rollouts
            of this many groups failed.
    """

    policy: Policy
    environment: Any
    spec: AgentSpec
    tokenizer: Any
    reward_funcs: Sequence[Callable[..., Any]]
    dataset: Dataset
    num_generations: int = 8
    max_groups: int = 16
    buffer_size: int = 256
    seed: int = 0
    max_failed_share: float = 0.5
    failure_window: int = 3

    def __post_init__(self) -> None:
        self.environment = as_environment(self.environment)
        self.chat_format = self.spec.create_format(self.tokenizer)
        self.rollout_buffer, self.metrics_queue = (
            queue.Queue[Any](),
            queue.Queue[dict[str, float]](),
        )
        self.version, self._alive = 0, time.monotonic()
        self._failures = FailureWatch(self.failure_window, self.max_failed_share)
        self._work: Future[None] | None = None

    def start(self) -> None:
        """Start generating."""
        self._work = start(self._play_on())

    def stop(self) -> None:
        """Cancel the groups in flight."""
        if self._work is not None:
            self._work.cancel()

    def update_model_version(self, model_version: int) -> None:
        """Set the version of the weights that the policy has from now on."""
        self.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Called by the trainer while it waits.

        Raises:
            [`TrainingStopped`]: Too many rollouts failed.
            `RuntimeError`: No group has finished for that many seconds, or the policy or a reward
            raised.
        """
        if self._work is not None and self._work.done() and not self._work.cancelled():
            error = self._work.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise (
                error
                if isinstance(error, TrainingStopped)
                else RuntimeError(f"rollouts ended: {error!r}")
            ) from error
        if time.monotonic() - self._alive > stale_after_s:
            raise RuntimeError(f"no group has finished for {stale_after_s:g} s")

    async def _play_on(self) -> None:
        places = asyncio.Semaphore(self.max_groups)
        order, number = np.random.default_rng(self.seed).permutation(len(self.dataset)), 0
        async with asyncio.TaskGroup() as groups:
            while True:
                await places.acquire()
                while self.rollout_buffer.qsize() >= self.buffer_size:
                    self._alive = time.monotonic()
                    await asyncio.sleep(0.05)  # the queue cannot be awaited
                group = groups.create_task(
                    self._group(number, dict(self.dataset[int(order[number % len(order)])]))
                )
                group.add_done_callback(lambda _: places.release())
                number += 1

    async def _group(self, number: int, row: dict[str, Any]) -> None:
        """Play the rollouts of a row, score them, and put them into the trainer's buffer."""
        # The weights may change while the rollouts are played.
        version = self.version
        spec = self.spec
        prompt = self.chat_format.prompt(spec.messages(row))
        rollouts = [
            Rollout(
                self.chat_format.prompt_ids(prompt),
                {**row, "prompt": prompt},
                rollout_seed(self.seed, number, i),
            )
            for i in range(self.num_generations)
        ]
        await gather(
            play(rollout, self.policy, self.environment, self.chat_format, spec.limits)
            for rollout in rollouts
        )
        facts = [RolloutFacts.of(rollout) for rollout in rollouts]
        self.metrics_queue.put(
            {name: float(value) for name, value in rollout_metrics(facts).items()}
        )
        if why := self._failures.check_batch(facts):
            raise TrainingStopped(why)
        columns = self._reward_columns(rollouts)
        scores = []
        for function in self.reward_funcs:
            values = await asyncio.to_thread(function, **columns)
            scores.append(await values if inspect.isawaitable(values) else values)
        by_function = np.array(scores, dtype=float)  # functions x rollouts; `None` becomes NaN
        by_function[:, [rollout.status == "failed" for rollout in rollouts]] = np.nan
        scored = ~np.isnan(by_function).all(0)
        rewards = np.nansum(by_function, 0)
        for i in np.flatnonzero(scored):
            self.rollout_buffer.put(
                self._sample(rollouts[i], rewards[i], rewards[scored], version, number)
            )
        self._alive = time.monotonic()

    def _reward_columns(self, rollouts: list[Rollout]) -> dict[str, Any]:
        """The arguments of a reward function, besides those that TRL adds."""
        columns: dict[str, Any] = {
            name: [rollout.row[name] for rollout in rollouts] for name in rollouts[0].row
        }
        prompts = columns.pop("prompt")
        completions = [render_completion(rollout, self.chat_format) for rollout in rollouts]
        ids = [rollout.ids for rollout in rollouts]
        return {
            **columns,
            "prompts": prompts,
            "completions": completions,
            "completion_ids": ids,
            "rollout": rollouts,
        }

    def _sample(
        self, rollout: Rollout, reward: float, group: np.ndarray, version: int, number: int
    ) -> Any:
        sample_class = find_in_trl("RolloutSample")
        if rollout.logprobs is None:
            raise ValueError(
                "the policy returns no log-probabilities, which AsyncGRPOTrainer needs for its "
                "correction"
            )
        before = [0] * len(rollout.prompt_ids)
        return sample_class(
            prompt=rollout.row["prompt"],
            completion=render_completion(rollout, self.chat_format),
            input_ids=np.asarray(rollout.context, dtype=np.int64),
            completion_mask=np.asarray(before + rollout.mask, dtype=np.int64),
            old_log_probs=np.asarray(before + rollout.logprobs, dtype=np.float32),
            advantage=float((reward - group.mean()) / (group.std() + 1e-8)),
            model_version=version,
            group_id=number,
            metrics={"reward": float(reward), "reward_std": float(group.std())},
            enqueued_at=time.time(),
        )
