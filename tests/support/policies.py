"""Tiny saved policies, for tests and benchmarks. Imports torch inside functions only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from agentic_prompting.environments import Worker, Workers


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
    spec = AgentSpec.load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat_format = ChatFormat(tokenizer, spec.grammar)
    ask = (
        "<think> the language </think> <interaction_prompt> what is the language of Kenya ? "
        "</interaction_prompt>"
    )
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
        model,
        tokenizer,
        rollouts,
        folder / "sft",
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    model.save_pretrained(folder)
    return folder


def make_conductor_policy(folder: Path, positions: int = 4096) -> Path:
    """A randomly initialised policy of any text, with the prompt and the grammar of `Workers`."""
    from agentic_prompting.environments.workers import WORKERS_TEMPLATE
    from agentic_prompting.rollout import AgentSpec, AskGrammar
    from agentic_prompting.sandbox.policy import build_policy, save_policy
    from support.tokenizers_for_tests import tokenizer_for

    tokenizer = tokenizer_for("chatml")
    policy = build_policy(tokenizer)
    policy.config.max_position_embeddings = positions
    save_policy(policy, tokenizer, AgentSpec(WORKERS_TEMPLATE, grammar=AskGrammar()), folder)
    return folder


def conductor_pool(chat: Any, environment: type[Workers] = Workers) -> Workers:
    """Two workers of one model; their order is drawn for each group."""
    return environment({"language": Worker(chat, usd=0.01), "country": Worker(chat, usd=0.02)})


def make_asking_conductor(folder: Path) -> Path:
    """A tiny policy that usually asks both workers of [`conductor_pool`] at once.

    Its warm start takes two seconds.
    """
    from tokenizers import AddedToken

    from agentic_prompting.rollout import AgentSpec, AskGrammar, ChatFormat, rollout_from_trace
    from agentic_prompting.sandbox import as_rows, load_world, make_split, vocabulary
    from agentic_prompting.sandbox.policy import (
        SANDBOX_TEMPLATE,
        build_policy,
        build_tokenizer,
        save_policy,
    )
    from agentic_prompting.trainers import warm_start

    grammar = AskGrammar()
    world = load_world()
    names = [name for values in world.values.values() for name in values]
    tokenizer = build_tokenizer([*vocabulary(world, grammar), "#1", "#2"], names, grammar)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ('<ask to="', '">')])
    spec = AgentSpec(SANDBOX_TEMPLATE, grammar=grammar)
    chat_format = ChatFormat(tokenizer, grammar)
    policy = build_policy(tokenizer)
    ask = (
        '<think> the language </think> <ask to=" language "> what is the language of Kenya ? </ask> '
        '<ask to=" country "> what is the language of #1 ? </ask>'
    )
    end = "<think> done </think> <answer> Swahili </answer>"
    shown = "#1 : the answer is Swahili .\n#2 : i do not understand ."
    environment = conductor_pool(lambda messages: "")
    rollouts = []
    for row in as_rows(make_split(0)[0][:48]):
        prompt = [{"role": "user", "content": SANDBOX_TEMPLATE.format(question=row["question"])}]
        row = environment.reset({**row, "prompt": prompt, "reset_seed": len(rollouts)})
        trace = {**row, "turns": [ask, end], "observations": [shown]}
        rollouts.append(rollout_from_trace(trace, spec, chat_format))
    warm_start(
        policy,
        tokenizer,
        rollouts,
        folder / "sft",
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    save_policy(policy, tokenizer, spec, folder)
    return folder
