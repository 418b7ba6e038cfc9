"""Tiny saved policies, for tests and benchmarks. Imports torch inside functions only."""

from __future__ import annotations

import shutil
from pathlib import Path


def make_tiny_policy(folder: Path) -> Path:
    """A randomly initialised sandbox policy with its tokenizer and spec."""
    from agentic_prompting.sandbox.policy import (
        build_policy,
        sandbox_spec,
        save_policy,
        world_tokenizer,
    )

    tokenizer = world_tokenizer()
    save_policy(build_policy(tokenizer), tokenizer, sandbox_spec(), folder)
    return folder


def make_asking_policy(tiny: Path, folder: Path) -> Path:
    """`tiny` after a warm start of two seconds: it usually asks once and answers with the reply."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentic_prompting.rollout import AgentSpec, ChatFormat, rollout_from_trace
    from agentic_prompting.sandbox import as_rows, make_split
    from agentic_prompting.trainers import warm_start

    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    spec, tokenizer = AgentSpec.load(folder), AutoTokenizer.from_pretrained(folder)
    model, chat_format = (
        AutoModelForCausalLM.from_pretrained(folder),
        ChatFormat(tokenizer, spec.grammar),
    )
    ask = "<think> the language </think> <interaction_prompt> what is the language of Kenya ? </interaction_prompt>"
    end = "<think> done </think> <answer> Swahili </answer>"
    questions = [row["question"] for row in as_rows(make_split(0)[0][:40])] + [
        f"unheard of {i}" for i in range(8)
    ]
    traces = [
        {"question": question, "turns": [ask, end], "observations": ["the answer is Swahili ."]}
        for question in questions
    ]
    rollouts = [rollout_from_trace(trace, spec, chat_format) for trace in traces]
    warm_start(
        model, tokenizer, rollouts, folder / "sft", max_steps=40, per_device_train_batch_size=8, learning_rate=3e-3,
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder
