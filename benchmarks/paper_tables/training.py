"""The baselines that are trained: on question and answer alone (SFT), or by reward in a single turn (GRPO).

Both are TRL's trainers, without an environment. What was trained once is used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting.evaluation.systems import Row
from agentic_prompting.rewards import token_f1_reward
from agentic_prompting.rollout import SPEC_FILE, AgentSpec, ChatFormat, FreeText, Limits, rollout_from_trace
from agentic_prompting.trainers import MultiTurnGRPOTrainer, PromptR1Config, warm_start


def plain_spec(template: str = "{question}", max_tokens: int = 1024) -> AgentSpec:
    """How a model is asked that answers in one turn, in free text."""
    return AgentSpec(template, grammar=FreeText(), limits=Limits(1, max_tokens, max_tokens), stop_at_tags=False)


def train_sft(base: str | Path, rows: Sequence[Row], folder: str | Path, spec: AgentSpec, **arguments: Any) -> Path:
    """Imitate the first accepted answer to each question, without seeing how it is found.

    Args:
        base (`str` or `Path`): The model to begin with.
        rows (`Sequence[Mapping]`): `question`, `answers`.
        folder (`str` or `Path`): Where the model goes; one that is there is used as it is.
        spec ([`AgentSpec`]): How it is asked; saved with it.
        **arguments: Of [`~trl.SFTConfig`].
    """
    folder = Path(folder)
    if (folder / SPEC_FILE).exists():
        return folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    chat_format = ChatFormat(tokenizer, spec.grammar)
    traces = [{**row, "turns": [row["answers"][0]], "observations": []} for row in rows]
    rollouts = [rollout_from_trace(trace, spec, chat_format) for trace in traces]
    warm_start(model, tokenizer, rollouts, folder / "sft", **arguments)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    spec.save(folder)
    return folder


def train_single_turn(
    base: str | Path, rows: Sequence[Row], folder: str | Path, spec: AgentSpec, **arguments: Any
) -> Path:
    """GRPO on the answer's token F1, one turn, nobody to ask.

    Args:
        base, rows, folder, spec: As in [`train_sft`].
        **arguments: Of [`PromptR1Config`].
    """
    folder = Path(folder)
    if (folder / SPEC_FILE).exists():
        return folder
    args = PromptR1Config(str(folder / "grpo"), **{"max_turns": 1, "disable_tqdm": True, **arguments})
    trainer = MultiTurnGRPOTrainer(
        model=str(base),
        environment=None,
        args=args,
        train_dataset=Dataset.from_list(
            [{"question": row["question"], "answers": list(row["answers"])} for row in rows]
        ),
        reward_funcs=token_f1_reward,
        prompt_template=spec.prompt_template,
        grammar=spec.grammar,
    )
    trainer.train()
    trainer.save_model(str(folder))
    return folder


TRAINED: Mapping[str, Any] = {"sft": train_sft, "grpo_single_turn": train_single_turn}
"""By the kind of system."""
