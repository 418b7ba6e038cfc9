"""What the runs with SmolLM2 share: imitating demonstrations, training a LoRA adapter, and results
by question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_prompting import OpenAIChat, ReplayCache
from agentic_prompting.evaluation import paired_difference, wilson_interval
from benchmarks.lab import model_folder

ROLLOUTS = 32
"""Rollouts of a step."""


def connect(base_url: str, llm: str, folder: Path, **settings: Any) -> OpenAIChat:
    """A large LLM behind a server on this machine; a request that it has answered before is
    answered by the record.

    Args:
        base_url (`str`), llm (`str`): Its address and its name.
        folder (`Path`): Gets the record, `replies.sqlite`.
        **settings: Further arguments of [`OpenAIChat`], such as `temperature`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cache = ReplayCache(folder / "replies.sqlite")
    return OpenAIChat(
        llm, base_url=base_url, timeout=600, max_concurrency=4, cache=cache, **settings
    )


def load_published() -> tuple[Any, Any]:
    """SmolLM2 as it was published, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = model_folder("smollm2")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(source)


def imitate(
    model: Any,
    tokenizer: Any,
    spec: Any,
    traces: Sequence[Mapping[str, Any]],
    folder: Path,
    seed: int,
    **settings: Any,
) -> Path:
    """Let a model imitate demonstrations, 8 in a step. Returns the folder that it is saved to.

    Args:
        model (`PreTrainedModel`): Changed in place.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        spec ([`AgentSpec`]): The form of the demonstrations.
        traces (`Sequence[Mapping]`): As [`rollout_from_trace`] takes them.
        folder (`Path`): Gets `sft` and `warm_start`.
        seed (`int`): Decides their order.
        **settings: `max_steps`, `learning_rate` and other options of [`warm_start`].
    """
    from agentic_prompting.rollout import rollout_from_trace
    from agentic_prompting.trainers import warm_start

    chat_format = spec.create_format(tokenizer)
    options = {
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-5,
        "lr_scheduler_type": "constant",
        "seed": seed,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        **settings,
    }
    rollouts = [rollout_from_trace(trace, spec, chat_format) for trace in traces]
    warm_start(model, tokenizer, rollouts, folder / "sft", **options)
    saved = folder / "warm_start"
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    return saved


def train_adapter(
    trainer_class: Any,
    config_class: Any,
    model: Path,
    environment: Any,
    reward: Any,
    rows: Sequence[Mapping[str, Any]],
    spec: Any,
    folder: Path,
    seed: int,
    steps: int,
    **settings: Any,
) -> dict[str, Any]:
    """Train a LoRA adapter of a saved model in `folder / "trained"`, 32 rollouts a step, by default
    4 questions of 8.

    Args:
        **settings: Training arguments in place of those below.

    Returns:
        `dict`: `rewards`, the mean of each step, and `failed`, how many rollouts failed.
    """
    from datasets import Dataset
    from peft import LoraConfig

    from agentic_prompting.local import has_bf16_instructions

    arguments = {
        "max_turns": spec.limits.max_turns,
        "max_turn_tokens": spec.limits.max_turn_tokens,
        "max_completion_length": spec.limits.max_tokens,
        "temperature": 0.7,
        "num_generations": 8,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": ROLLOUTS // 8,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "use_cpu": True,
        "bf16": has_bf16_instructions(),
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
    trainer = trainer_class(
        model=str(model),
        environment=environment,
        reward_funcs=reward,
        args=config_class(
            output_dir=str(folder / "trained"),
            overwrite=True,
            seed=seed,
            max_steps=steps,
            **arguments,
        ),
        train_dataset=Dataset.from_list(list(rows)),
        prompt_template=spec.prompt_template,
        grammar=spec.grammar,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model()
    history = trainer.state.log_history
    failed = sum(entry.get("rollout/failed", 0.0) for entry in history) * ROLLOUTS
    return {
        "rewards": [round(entry["reward"], 3) for entry in history if "reward" in entry],
        "failed": round(failed),
    }


def score_cells(right: str, trained: str | None = None) -> tuple[str, str]:
    """Two cells of a table: a score with its 95 % interval, and what the trained model has more.

    Args:
        right (`str`): A character for each question, as in [`by_question`].
        trained (`str`, *optional*): The same of the trained model, paired by question. Without it
            the cell is empty.
    """
    interval = wilson_interval(right.count("1"), len(right))
    score = f"{right.count('1') / len(right):.3f} [{interval.low:.3f}, {interval.high:.3f}]"
    if trained is None:
        return score, ""
    difference = paired_difference(by_question(trained), by_question(right)).difference
    return score, f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def by_question(right: str) -> dict[int, float]:
    """`"01-"` as a score for each question that has one; `-` stands for none."""
    return {number: float(result) for number, result in enumerate(right) if result != "-"}
