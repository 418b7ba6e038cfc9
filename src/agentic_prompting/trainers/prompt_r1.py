"""Prompt-R1: a small agent LLM learns to prompt a large one (arXiv 2511.01016)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from ..data import validate_dataset
from ..rewards import PromptR1Reward
from ..rollout import Environment, TagGrammar, prompt_r1_template
from .config import PromptR1Config
from .multi_turn_grpo import MultiTurnGRPOTrainer


class PromptR1Trainer(MultiTurnGRPOTrainer):
    """[`MultiTurnGRPOTrainer`] with the paper's template, grammar, reward and values filled in.

    Args:
        model (`str` or `PreTrainedModel`):
            The agent S, for example `"Qwen/Qwen3-4B"`.
        environment ([`Environment`]):
            The large LLM L: [`LLMEnvironment`] around a [`ChatModel`].
        args ([`PromptR1Config`], *optional*):
            Training arguments; Table 6 by default.
        train_dataset (`Dataset`):
            Columns `question` and `answers`, as [`load_task`] gives.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*):
            The same for evaluation.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Defaults to the double-constrained reward of eq 10-13 with `args.gate`.
        prompt_template (`str`, *optional*):
            Defaults to our wording of the role of Table 1, with the grammar's tags.
        grammar ([`TagGrammar`], *optional*):
            Defaults to the paper's tags.
        **kwargs:
            As in [`MultiTurnGRPOTrainer`].

    Example:

    ```python
    trainer = PromptR1Trainer(
        model="Qwen/Qwen3-4B",
        environment=LLMEnvironment(OpenAIChat("gpt-4o-mini", budget_usd=20)),
        args=PromptR1Config(output_dir="runs/hotpot"),
        train_dataset=load_task("hotpotqa", split="train", n=5120),
    )
    trainer.train()
    ```
    """

    _name = "Prompt-R1"

    def __init__(
        self,
        model: Any,
        environment: Environment | None,
        args: PromptR1Config | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        reward_funcs: Any = None,
        prompt_template: str | None = None,
        grammar: TagGrammar | None = None,
        **kwargs: Any,
    ):
        args = args if args is not None else PromptR1Config("prompt_r1_output")
        grammar = grammar or TagGrammar()
        super().__init__(
            model=model,
            environment=environment,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            reward_funcs=reward_funcs if reward_funcs is not None else PromptR1Reward(gate=args.gate),
            prompt_template=prompt_template if prompt_template is not None else prompt_r1_template(grammar),
            grammar=grammar,
            **kwargs,
        )

    @staticmethod
    def _validate(dataset: Any) -> None:
        """The reward compares answers, so every row needs some."""
        validate_dataset(dataset)
