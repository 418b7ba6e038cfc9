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
from transformers import PreTrainedTokenizerFast

from ..rollout import SPEC_FILE, AgentSpec, ChatFormat, Rollout, rollout_from_trace
from ..trainers import warm_start
from .oracle import Oracle
from .policy import build_policy, copying_exercises, keep_freed_memory, sandbox_spec, save_policy, world_tokenizer
from .traces import DEFAULT_MIX, make_traces
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
        seed (`int`, *optional*, defaults to `0`): Of split, traces and weights.
        n_test (`int`, *optional*, defaults to `256`): Held-out questions.
        warm_start_steps (`int`, *optional*, defaults to `350`): Supervised steps of 32 traces, after half as many of
            64 copying exercises.
    """
    keep_freed_memory()
    train, test = make_split(seed, n_test=n_test)
    spec, model = sandbox_spec(), Path(folder) / "warm_start"
    if not (model / SPEC_FILE).exists():
        _warm_start(model, spec, train, seed, warm_start_steps)
    PartialState().wait_for_everyone()
    return Sandbox(model, spec, as_dataset(train), as_dataset(test))


def as_dataset(questions: list[Question]) -> Dataset:
    """Questions as a data set."""
    return Dataset.from_list(as_rows(questions))


def _warm_start(folder: Path, spec: AgentSpec, questions: list[Question], seed: int, steps: int) -> None:
    tokenizer, rng = world_tokenizer(), random.Random(seed)
    chat_format = ChatFormat(tokenizer, spec.grammar)
    traces = make_traces(questions, 20 * steps, DEFAULT_MIX, Oracle(seed=seed), rng)
    conversations = [rollout_from_trace(trace, spec, chat_format) for trace in traces]
    imitate(folder, spec, tokenizer, conversations, steps, max(steps // 2, 1), seed, rng)


def imitate(
    folder: Path,
    spec: AgentSpec,
    tokenizer: PreTrainedTokenizerFast,
    conversations: list[Rollout],
    steps: int,
    copying_steps: int,
    seed: int,
    rng: random.Random,
) -> None:
    """Make a policy, let it do copying exercises, then imitate conversations, and save it.

    Args:
        folder (`Path`): Where to.
        spec ([`AgentSpec`]): How the policy is asked; saved with it.
        tokenizer (`PreTrainedTokenizerFast`): Its words.
        conversations (`list[Rollout]`): What to imitate.
        steps (`int`): Of 32 conversations.
        copying_steps (`int`): Of 64 exercises.
        seed (`int`): Of the weights and of the order.
        rng (`random.Random`): Of the exercises.
    """
    policy, state = build_policy(tokenizer, seed), PartialState()
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
