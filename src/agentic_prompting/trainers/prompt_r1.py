"""Prompt-R1: a small agent LLM learns to prompt a large one (arXiv 2511.01016)."""

from __future__ import annotations

from ..rewards import PromptR1Reward
from ..rollout import Environment, Grammar, TagGrammar, prompt_r1_template, template_for
from .config import PromptR1Config
from .grpo import MultiTurnGRPOTrainer
from .reward_functions import RewardFunctions


class PromptR1Trainer(MultiTurnGRPOTrainer):
    """[`MultiTurnGRPOTrainer`] with the paper's template, grammar, reward and values as defaults.

    Args:
        model (`str` or `PreTrainedModel`): The agent S, for example `"Qwen/Qwen3-4B"`.
        reward_funcs (`Callable` or `list[Callable]`, *optional*): Defaults to the
            double-constrained reward of eq 10-13 with `args.gate`.
        args ([`PromptR1Config`], *optional*): Training arguments. By default those of Table 6.
        train_dataset (`Dataset`): Columns `question` and `answers`, as [`load_task`] returns them.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same for evaluation.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The agent's tokenizer. Defaults to
            the model's.
        environment ([`Environment`]): The large LLM L: an [`LLMEnvironment`] with a [`ChatModel`].
        prompt_template (`str`, *optional*): Defaults to the one that the model was saved with. If
            there is none, it is our wording of the role of Table 1 for a large LLM, or describes
            another environment.
        grammar ([`Grammar`], *optional*): Defaults to the environment's if it has one, else to the
            one saved with the model, else to the paper's tags.
        **kwargs: As in [`MultiTurnGRPOTrainer`].

    Raises:
        `ValueError`: As [`MultiTurnGRPOTrainer`]; also if `args.gate` is set and would be ignored,
            because `reward_funcs` is passed.

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
    def _choose_rewards(
        reward_funcs: RewardFunctions | None,
        args: PromptR1Config,
        environment: Environment | None,
    ) -> RewardFunctions | None:
        if environment is not None and environment.plays_whole_episodes:
            raise ValueError(
                "Prompt-R1's prompt and reward need turns in its tags, which a program does not "
                "have: use MultiTurnGRPOTrainer"
            )
        # By default the paper's reward, the only one that reads the gate.
        if reward_funcs is None:
            return PromptR1Reward(gate=args.gate)
        if args.gate != PromptR1Config.gate:
            raise ValueError(
                f"gate={args.gate!r} in args would be ignored, because reward_funcs is passed: "
                f"leave one of them out, or pass PromptR1Reward(gate={args.gate!r}) among the "
                "reward_funcs"
            )
        return reward_funcs

    @staticmethod
    def _default_grammar(environment: Environment | None) -> Grammar:
        """Return the environment's grammar, else the paper's tags, which its reward reads."""
        return getattr(environment, "grammar", None) or TagGrammar()

    @staticmethod
    def _default_template(environment: Environment | None, grammar: Grammar) -> str:
        if environment is None:
            return prompt_r1_template(grammar)
        return template_for(environment, grammar)
