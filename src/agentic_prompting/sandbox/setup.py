"""The sandbox made ready for a run: data, oracle and a warm-started policy.

What the sandbox shows, it shows of the sandbox: a policy of 390,000 parameters in a world of 150 countries. The code it
runs through is the real one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset

from ..rollout import SPEC_FILE, AgentSpec, ChatFormat, rollout_from_trace
from ..trainers import warm_start
from .oracle import Oracle
from .policy import build_policy, copying_exercises, sandbox_spec, save_policy, world_tokenizer
from .questions import Question, as_rows, make_split
from .traces import DEFAULT_MIX, make_traces


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
        seed (`int`, *optional*, defaults to `0`): Of split, traces and weights.
        n_test (`int`, *optional*, defaults to `256`): Held-out questions.
        warm_start_steps (`int`, *optional*, defaults to `350`): Supervised steps of 32 traces, after half as many of
            64 copying exercises.
    """
    train, test = make_split(seed, n_test=n_test)
    spec, model = sandbox_spec(), Path(folder) / "warm_start"
    if not (model / SPEC_FILE).exists():
        _warm_start(model, spec, train, seed, warm_start_steps)
    PartialState().wait_for_everyone()
    return Sandbox(model, spec, _dataset(train), _dataset(test))


def _dataset(questions: list[Question]) -> Dataset:
    return Dataset.from_list(as_rows(questions))


def _warm_start(folder: Path, spec: AgentSpec, questions: list[Question], seed: int, steps: int) -> None:
    tokenizer = world_tokenizer()
    policy = build_policy(tokenizer, seed)
    chat_format, rng, state = ChatFormat(tokenizer, spec.grammar), random.Random(seed), PartialState()
    traces = make_traces(questions, 20 * steps, DEFAULT_MIX, Oracle(seed=seed), rng)
    conversations = [rollout_from_trace(trace, spec, chat_format) for trace in traces]
    exercises = copying_exercises(tokenizer, 64 * max(steps // 2, 1), rng)
    for name, rollouts, batch, max_steps in (
        ("copying exercises", exercises, 64, max(steps // 2, 1)),
        ("conversations of mixed quality", conversations, 32, steps),
    ):
        if state.is_main_process:
            print(f"warm start of the tiny policy: {name}", flush=True)
        warm_start(
            policy,
            tokenizer,
            rollouts,
            output_dir=folder / "sft",
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
        save_policy(policy, tokenizer, spec, folder)
