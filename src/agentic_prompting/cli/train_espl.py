"""`agentic-prompting train espl`: its options, and the trainer that they describe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from transformers import Trainer
from trl import ModelConfig, get_peft_config

from ..environments import LLMEnvironment
from ..evolution import SystemPrompt
from ..llm import ChatModel
from ..rewards import PromptR1Reward
from ..sandbox import GuardedReflector
from ..sandbox.results import report_guarded_run
from ..sandbox.setup import ROOT, prepare_guarded
from ..trainers import ESPLConfig, ESPLTrainer
from .loader import load_object, load_rewards, register_selection, text_or_file
from .options import MissingOption, ReferenceModel, option, refuse_options
from .train_options import (
    DataAndEnvironment,
    check_before_loading,
    refuse_model,
    reward_option,
)


@dataclass
class ESPLRunConfig(ESPLConfig):
    """[`ESPLConfig`] with a selection rule that may be named by module:name."""

    def __post_init__(self) -> None:
        # A rule of your own has to be known before its name is checked.
        register_selection(self.selection)
        super().__post_init__()


@dataclass
class ESPLArguments(DataAndEnvironment, ReferenceModel):
    """The data, the reward and the LLMs."""

    task: str = option("Name of a built-in task, or sandbox: no model, no key.", "sandbox")
    warm_start_steps: int = option("Supervised steps before E-SPL in the sandbox.", 450)
    reward: list[str] = reward_option("exact_match")
    initial_prompt: str = option(
        "The first system prompt, or a file of it; lines [G0]. ... are its principles.", ""
    )
    free_text: bool = option("Edit the prompt by search and replace.", False)
    population: str | None = option(
        "Your own Population as module:name, instead of an initial prompt."
    )

    DEFAULT_ENVIRONMENT = "none"

    @property
    def is_in_sandbox(self) -> bool:
        return self.task == "sandbox" and not self.dataset

    def check(self, args: ESPLConfig) -> None:
        """Raise `ValueError` for wrong arguments before anything is loaded."""
        self.check_environment(self.is_in_sandbox)
        # A wrong reward is found here; the trainer's is loaded later.
        load_rewards(self.reward)
        if self.is_in_sandbox:
            reason = "the sandbox has its own; leave it out, or name your rows with --dataset"
            prompts = ("reward", "initial_prompt", "free_text", "population")
            refuse_options(self, (*self.LARGE_LLM_OPTIONS, *prompts), reason)
            if not self.reference_model:
                refuse_options(
                    self,
                    ("reference_base_url", "reference_client", "replay_cache"),
                    "a script reflects in the sandbox; name another model with --reference-model",
                )
        if self.population:
            refuse_options(
                self, ("initial_prompt", "free_text"), f"{self.population} brings its own prompts"
            )
        # Each LLM that takes part has to be named.
        if self.asks_large_llm and not self.environment_model:
            raise MissingOption(
                "name the large LLM that the policy may ask", "--environment_model NAME"
            )
        # The policy may reflect itself, and the sandbox has a scripted reflector.
        needs_reference = args.evolves and args.reflector == "reference"
        if needs_reference and not self.is_in_sandbox and not self.reference_model:
            raise MissingOption(
                "name the LLM that reflects", "--reference_model NAME, or --reflector policy"
            )

    def build_trainer(
        self, args: ESPLConfig, model: ModelConfig, stack: ExitStack
    ) -> tuple[Trainer, Callable[[Trainer, float], object] | None]:
        """The trainer, and a report of the finished run in the sandbox."""
        # The reference LLM, unless the policy reflects itself.
        reference: ChatModel | None = None
        if args.evolves and args.reflector == "reference":
            if self.is_in_sandbox and not self.reference_model:
                reference = GuardedReflector(seed=args.seed)
            else:
                reference = self.connect_role(stack, "reference")
        if self.is_in_sandbox:
            return self._build_sandbox_trainer(args, model, reference)

        # Everything that can be wrong is found before data or weights are loaded.
        environment = self.build_environment(args.seed, stack)
        check_before_loading(args, model, environment.get("environment"), reference)
        # The evolution begins with a population of your own, or with a root prompt.
        text = text_or_file(self.initial_prompt) or ""
        population = None
        if self.population:
            population = load_object(self.population, "population")
        rewards = load_rewards(self.reward)
        trainer = ESPLTrainer(
            reward_funcs=rewards,
            reference=reference,
            initial_prompt=SystemPrompt(text) if self.free_text else text,
            population=population,
            **environment,
            **self.trainer_arguments(args, model, self.task),
        )
        return trainer, None

    def _build_sandbox_trainer(
        self, args: ESPLConfig, model: ModelConfig, reference: ChatModel | None
    ) -> tuple[Trainer, Callable[[Trainer, float], object]]:
        """The trainer of the sandbox's tiny policy."""
        refuse_model(model)
        sandbox = prepare_guarded(args.output_dir, args.seed, self.n_test, self.warm_start_steps)

        # Called after training, with the seconds since the program started.
        def report(trainer: Trainer, seconds: float) -> None:
            report_guarded_run(sandbox, ROOT, trainer, seconds)

        trainer = ESPLTrainer(
            model=str(sandbox.model),
            reward_funcs=PromptR1Reward(),
            reference=reference,
            args=args,
            train_dataset=sandbox.train,
            eval_dataset=sandbox.test if args.eval_strategy != "no" else None,
            initial_prompt=ROOT,
            environment=LLMEnvironment(sandbox.oracle),
            prompt_template=sandbox.spec.prompt_template,
            peft_config=get_peft_config(model),
        )
        return trainer, report
