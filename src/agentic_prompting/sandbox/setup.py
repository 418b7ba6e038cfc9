"""The sandbox made ready for a run: data, oracle and a warm-started policy.

What the sandbox shows, it shows of the sandbox: a policy of 390,000 parameters in a world of 150 countries. The code it
runs through is the real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from ..rollout import SPEC_FILE, AgentSpec, ChatFormat, rollout_from_trace
from ..trainers import warm_start
from .oracle import Oracle
from .policy import build_policy, copying_exercises, keep_freed_memory, sandbox_spec, save_policy, world_tokenizer
from .traces import DEFAULT_MIX, Trace, make_traces
from .world import Question, as_rows, make_split


@dataclass(frozen=True)
class Sandbox:
    """What a run in the sandbox needs.

    Args:
        model (`Path`): Folder of the warm-started policy.
        spec ([`AgentSpec`]): How it is asked.
        train (`Dataset`): Questions to train on: `question`, `answers`, ...
        test (`Dataset`): Held-out questions, disjoint from `train`.
    """

    model: Path
    spec: AgentSpec
    train: Dataset
    test: Dataset


def prepare_sandbox(folder: str | Path, seed: int = 0, n_test: int = 256, warm_start_steps: int = 350) -> Sandbox:
    """Build data and policy, and warm-start the policy on traces of mixed quality.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is used again.
        seed (`int`, *optional*, defaults to `0`): Decides split, traces and weights.
        n_test (`int`, *optional*, defaults to `256`): Held-out questions.
        warm_start_steps (`int`, *optional*, defaults to `350`): Supervised steps of 32 traces, after half as many of
            64 copying exercises.
    """
    train, test = make_split(seed, n_test=n_test)
    spec, rng = sandbox_spec(), random.Random(seed)

    def traces() -> list[Trace]:
        return make_traces(train, 20 * warm_start_steps, DEFAULT_MIX, Oracle(seed=seed), rng)

    copying_steps = max(warm_start_steps // 2, 1)
    model = warm_started(folder, spec, world_tokenizer(), traces, warm_start_steps, copying_steps, seed, rng)
    return Sandbox(model, spec, as_dataset(train), as_dataset(test))


def as_dataset(questions: list[Question]) -> Dataset:
    """Questions as a data set."""
    return Dataset.from_list(as_rows(questions))


def warm_started(
    folder: str | Path,
    spec: AgentSpec,
    tokenizer: PreTrainedTokenizerFast,
    traces: Callable[[], Sequence[Mapping[str, Any]]],
    steps: int,
    copying_steps: int,
    seed: int,
    rng: random.Random,
) -> Path:
    """The folder of a new policy that has done copying exercises and then imitated traces.

    Args:
        folder (`str` or `Path`): The policy is saved to `folder/warm_start`; an existing one is used again.
        spec ([`AgentSpec`]): How the policy is asked; saved with it.
        tokenizer (`PreTrainedTokenizerFast`): Its words.
        traces (`Callable`): Writes what to imitate; see [`rollout_from_trace`].
        steps (`int`): Supervised steps of 32 traces.
        copying_steps (`int`): Supervised steps of 64 exercises, before those.
        seed (`int`): Decides the first weights and the order of the batches.
        rng (`random.Random`): Draws the exercises.
    """
    keep_freed_memory()
    model, state = Path(folder) / "warm_start", PartialState()
    if not (model / SPEC_FILE).exists():
        chat_format = ChatFormat(tokenizer, spec.grammar)
        conversations = [rollout_from_trace(trace, spec, chat_format) for trace in traces()]
        policy = build_policy(tokenizer, seed)
        exercises = copying_exercises(tokenizer, 64 * copying_steps, rng)
        for name, rollouts, batch, max_steps in (
            ("copying exercises", exercises, 64, copying_steps),
            ("conversations of mixed quality", conversations, 32, steps),
        ):
            if state.is_main_process:
                print(f"warm start of the tiny policy: {name}", flush=True)
            warm_start(
                policy,
                tokenizer,
                rollouts,
                output_dir=model / "sft",
                max_steps=max_steps,
                per_device_train_batch_size=max(1, batch // state.num_processes),
                learning_rate=3e-3,
                lr_scheduler_type="cosine",
                warmup_steps=20,
                adam_beta2=0.95,  # .999 averages over more steps than there are
                weight_decay=0.0,
                seed=seed,
                bf16=False,
                use_cpu=state.device.type == "cpu",
                gradient_checkpointing=False,
            )
        if state.is_main_process:
            save_policy(policy, tokenizer, spec, model)
    state.wait_for_everyone()
    return model
