"""The baselines that are trained: on question and answer alone (SFT), or by reward in a single turn
(GRPO).

Both are TRL's trainers, without an environment. A model that is in its folder is not trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting.cli.example_files import find_example
from agentic_prompting.evaluation.systems import Row
from agentic_prompting.rewards import token_f1_reward
from agentic_prompting.rollout import (
    SPEC_FILE,
    AgentSpec,
    ChatFormat,
    FreeText,
    Limits,
    rollout_from_trace,
)
from agentic_prompting.trainers import MultiTurnGRPOTrainer, PromptR1Config, warm_start
from agentic_prompting.versions import check_inputs, weights_version, write_inputs

NO_EFFECT = (
    "disable_tqdm",
    "logging_steps",
    "report_to",
    "rollouts_max_mb",
    "save_steps",
    "save_strategy",
    "use_cpu",
)
"""Arguments that do not decide what is trained."""


def plain_spec(template: str = "{question}", max_tokens: int = 1024) -> AgentSpec:
    """The spec of a model that answers in one turn, in free text."""
    return AgentSpec(
        template, grammar=FreeText(), limits=Limits(1, max_tokens, max_tokens), stop_at_tags=False
    )


TABLE_7: Mapping[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "num_train_epochs": 3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,  # a share of the steps, where it is below 1
    "bf16": True,
}
"""The SFT baseline of the Prompt-R1 paper (Table 7), with LoRA of rank 8."""


def train_sft(
    base: str | Path,
    rows: Sequence[Row],
    folder: str | Path,
    spec: AgentSpec,
    lora_rank: int | None = 8,
    **arguments: Any,
) -> Path:
    """Imitate the first accepted answer to each question, without seeing how it is found.

    Args:
        base (`str` or `Path`): The model to begin with.
        rows (`Sequence[Mapping]`): `question`, `answers`.
        folder (`str` or `Path`): The folder for the model; a model that is there is used as it is,
            if it was made from the same inputs.
        spec ([`AgentSpec`]): The agent's spec, saved with the model.
        lora_rank (`int`, *optional*, defaults to `8`): The rank of the adapter on all linear
            layers, which is merged after training (Table 7; alpha is twice the rank,
            LLaMA-Factory's default); `None` trains all weights.
        **arguments: Arguments of [`~trl.SFTConfig`] that differ from [`TABLE_7`].
    """
    folder = Path(folder)
    inputs = _list_inputs(base, rows, spec, {**TABLE_7, **arguments, "lora_rank": lora_rank})
    if (folder / SPEC_FILE).exists():
        check_inputs(folder, inputs)
        return folder
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat_format = ChatFormat(tokenizer, spec.grammar, trusted_texts=spec.trusted_texts)
    traces = [{**row, "turns": [row["answers"][0]], "observations": []} for row in rows]
    rollouts = [rollout_from_trace(trace, spec, chat_format) for trace in traces]
    if lora_rank is not None:
        lora = LoraConfig(
            r=lora_rank,
            lora_alpha=2 * lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora)
    warm_start(model, tokenizer, rollouts, folder / "sft", **{**TABLE_7, **arguments})
    if lora_rank is not None:
        model = model.merge_and_unload()
    write_inputs(folder, inputs)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    spec.save(folder)
    return folder


def train_single_turn(
    base: str | Path, rows: Sequence[Row], folder: str | Path, spec: AgentSpec, **arguments: Any
) -> Path:
    """Train with GRPO on the answer's token F1, in one turn and without an environment.

    Args:
        base, rows, folder, spec: As in [`train_sft`].
        **arguments: Arguments of [`PromptR1Config`]; `config`, a YAML file of a Prompt-R1 training,
            gives its hyper-parameters ("the same as Prompt-R1", Appendix G).
    """
    folder = Path(folder)

    # The arguments, and below them the hyper-parameters of another training.
    config = arguments.pop("config", None)
    if config:
        names = {setting.name for setting in fields(PromptR1Config)} - {"output_dir", "max_turns"}
        values = yaml.safe_load(find_example(Path(config)).read_text(encoding="utf-8"))
        hyper_parameters = {name: value for name, value in values.items() if name in names}
        arguments = {**hyper_parameters, **arguments}
    arguments = {"max_turns": 1, "disable_tqdm": True, **arguments}
    inputs = _list_inputs(base, rows, spec, arguments)
    if (folder / SPEC_FILE).exists():
        check_inputs(folder, inputs)
        return folder
    args = PromptR1Config(str(folder / "grpo"), **arguments)

    questions = [{"question": row["question"], "answers": list(row["answers"])} for row in rows]
    trainer = MultiTurnGRPOTrainer(
        model=str(base),
        environment=None,
        args=args,
        train_dataset=Dataset.from_list(questions),
        reward_funcs=token_f1_reward,
        prompt_template=spec.prompt_template,
        grammar=spec.grammar,
    )
    trainer.train()
    write_inputs(folder, inputs)
    trainer.save_model(str(folder))
    return folder


def _list_inputs(
    base: str | Path, rows: Sequence[Row], spec: AgentSpec, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs that decide a trained baseline, under the names that an error gives them."""
    return {
        "base": [str(base), weights_version(base)],
        "rows": [[row["question"], list(row["answers"])] for row in rows],
        "spec": asdict(spec),
        "arguments": {name: value for name, value in arguments.items() if name not in NO_EFFECT},
    }


TRAINED: Mapping[str, Callable[..., Path]] = {
    "sft": train_sft,
    "grpo_single_turn": train_single_turn,
}
"""By the kind of system."""
