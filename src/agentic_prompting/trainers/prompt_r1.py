"""Prompt-R1: a small agent LLM learns to prompt a large one (arXiv 2511.01016)."""

from __future__ import annotations

from typing import Any

from ..rewards import PromptR1Reward
from ..rollout import Grammar, TagGrammar, prompt_r1_template, template_for
from .config import PromptR1Config
from .grpo import MultiTurnGRPOTrainer


class PromptR1Trainer(MultiTurnGRPOTrainer):
    """[`MultiTurnGRPOTrainer`] with the paper's template, grammar, reward and values filled in.

    Args:
        model (`str` or `PreTrainedModel`): The agent S, for example `"Qwen/Qwen3-4B"`.
        reward_funcs (`Callable` or `list[Callable]`, *optional*): Defaults to the double-constrained reward of eq 10-13
            with `args.gate`.
        args ([`PromptR1Config`], *optional*): Training arguments; Table 6 by default.
        train_dataset (`Dataset`): Columns `question` and `answers`, as [`load_task`] gives.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same for evaluation.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The agent's tokenizer. Defaults to the model's.
        environment ([`Environment`]): The large LLM L: [`LLMEnvironment`] around a [`ChatModel`].
        prompt_template (`str`, *optional*): Defaults to the one that the model was saved with; else to our wording of
            the role of Table 1 where the environment is a large LLM, or to one that describes the environment.
        grammar ([`Grammar`], *optional*): Defaults to the environment's where it has one, else to the one that the
            model was saved with, else to the paper's tags.
        **kwargs: As in [`MultiTurnGRPOTrainer`].

    Raises:
        `ValueError`: As [`MultiTurnGRPOTrainer`]; and if `args.gate` is set and would be ignored, because
            `reward_funcs` are given.

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

    method = "Prompt-R1"
    _config = PromptR1Config
    _default_output = "prompt_r1_output"

    @staticmethod
    def _choose_rewards(reward_funcs: Any, args: PromptR1Config, environment: Any) -> Any:
        if environment is not None and environment.play_episode is not None:
            raise ValueError(
                "Prompt-R1's prompt and reward are about turns in its own tags, which a program has none of: train it "
                "with MultiTurnGRPOTrainer"
            )
        if reward_funcs is None:
            return PromptR1Reward(gate=args.gate)
        if args.gate != PromptR1Config.gate:
            raise ValueError(
                f"gate={args.gate!r} in args would be ignored beside reward_funcs: leave one of them out, or pass "
                f"PromptR1Reward(gate={args.gate!r}) among the reward_funcs"
            )
        return reward_funcs

    @staticmethod
    def _default_grammar(environment: Any) -> Grammar:
        """The paper's tags, with any environment, because its reward reads them."""
        return getattr(environment, "grammar", None) or TagGrammar()

    @staticmethod
    def _default_template(environment: Any, grammar: Any) -> str:
        return (
            template_for(environment, grammar)
            if environment is not None
            else prompt_r1_template(grammar)
        )
