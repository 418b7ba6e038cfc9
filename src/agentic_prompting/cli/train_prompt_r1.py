"""`agentic-prompting train prompt-r1`: its options, and the trainer that they describe."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Trainer
from trl import ModelConfig, get_peft_config

from ..local import SmallModelMissing
from ..report import plot_reward
from ..sandbox.library import brief_answer_reward
from ..sandbox.library_run import (
    WARM_START_STEPS,
    LibraryRun,
    prepare_library,
    report_library_run,
)
from ..sandbox.results import report_sandbox_run
from ..sandbox.setup import prepare_sandbox
from ..trainers import PromptR1Config, PromptR1Trainer
from .hub import check_model
from .loader import load_rewards
from .options import MissingOption, option, refuse_options
from .train_options import (
    DataAndEnvironment,
    check_before_loading,
    refuse_model,
    reward_option,
)

SANDBOX_WARM_START_STEPS = 450

Report = Callable[[Trainer, float], object]
"""Prints the results of a finished sandbox run, given the trainer and the seconds it took."""


@dataclass
class PromptR1Arguments(DataAndEnvironment):
    """The data, the reward and the large LLM."""

    sandbox: bool = option("Train the tiny policy in the sandbox; no model, no key.", False)
    real: bool = option(
        "Train a real small model to look up invented facts; needs the extra real.", False
    )
    warm_start_steps: int | None = option(
        f"Supervised steps before GRPO: {SANDBOX_WARM_START_STEPS} in the sandbox, "
        f"{WARM_START_STEPS} with --real."
    )
    task: str = option("Name of a built-in task.", "prompt_r1")
    reward: list[str] = reward_option("prompt_r1")

    @property
    def supervised_steps(self) -> int:
        """The steps of the warm start: those of the option, or the default of the run."""
        if self.warm_start_steps is not None:
            return self.warm_start_steps
        return WARM_START_STEPS if self.real else SANDBOX_WARM_START_STEPS

    def check(self, args: PromptR1Config) -> None:
        """Raise `ValueError` for wrong arguments before anything is loaded."""
        if self.sandbox and self.real:
            raise ValueError(
                "--real trains a real model and --sandbox a tiny one: leave one of them out"
            )
        self.check_environment(self.sandbox or self.real)
        if self.sandbox or self.real:
            refuse_options(self, ("task",), "the run asks questions of its own; leave it out")
        if self.real:
            refuse_options(
                self,
                (*self.LARGE_LLM_OPTIONS, "replay_cache"),
                "the facts of --real are looked up on this machine; leave it out",
            )
        # The large LLM has to be named, unless the run in the sandbox or with --real brings it.
        if not self.asks_large_llm:
            refuse_options(
                self, ("replay_cache",), "it records the large LLM, which this run does not ask"
            )
        has_large_llm = self.environment_model or (self.sandbox and not self.environment_base_url)
        if self.asks_large_llm and not has_large_llm and not self.real:
            raise MissingOption(
                "name the large LLM that the agent talks to",
                "--environment_model NAME; or your own environment: --environment module:name",
            )
        # The gate is a setting of the default reward.
        replaces_reward = self.reward != ["prompt_r1"]
        has_gate = args.gate != PromptR1Config.gate
        if replaces_reward and (self.sandbox or self.real or has_gate):
            raise ValueError(
                "--reward takes the place of the sandbox's reward and of --gate: leave the others "
                "out"
            )

    def build_trainer(
        self, args: PromptR1Config, model: ModelConfig, stack: ExitStack
    ) -> tuple[Trainer, Report | None]:
        """The trainer, and a report of the finished run in the sandbox."""
        # Two runs that bring their own data and environment.
        if self.real:
            return self._build_library_trainer(args, model)
        if self.sandbox:
            return self._build_sandbox_trainer(args, model, stack)
        # A run on your own data: its environment, its reward, its rows.
        environment = self.build_environment(args.seed, stack)
        rewards = None  # the trainer's own, with its gate
        if self.reward != ["prompt_r1"]:
            rewards = load_rewards(self.reward)
        # Endpoints and model are checked before the rows are loaded.
        check_before_loading(args, model, environment.get("environment"))
        trainer = PromptR1Trainer(
            reward_funcs=rewards,
            **environment,
            **self.trainer_arguments(args, model, self.task),
        )
        return trainer, None

    def _build_sandbox_trainer(
        self, args: PromptR1Config, model: ModelConfig, stack: ExitStack
    ) -> tuple[Trainer, Report]:
        """The trainer of the sandbox's tiny policy."""
        refuse_model(model)
        environment = self.connect_large_llm(args.seed, stack, sandbox=True)
        environment.check()  # a wrong address or key is found before the warm start, not after it
        sandbox = prepare_sandbox(args.output_dir, args.seed, self.n_test, self.supervised_steps)

        # Called after training, with the seconds since the program started.
        def report(trainer: Trainer, seconds: float) -> None:
            _plot_reward(trainer, args.output_dir, "Prompt-R1 in the sandbox")
            report_sandbox_run(sandbox, environment, trainer, seconds)

        trainer = PromptR1Trainer(
            model=str(sandbox.model),
            environment=environment,
            args=args,
            train_dataset=sandbox.train,
            prompt_template=sandbox.spec.prompt_template,
            peft_config=get_peft_config(model),
        )
        return trainer, report

    def _build_library_trainer(
        self, args: PromptR1Config, model: ModelConfig
    ) -> tuple[Trainer, Report]:
        """The trainer of a real small model that learns to look facts up."""
        if model.model_name_or_path:
            check_model(model.model_name_or_path)
        run = self.prepare_library(args.output_dir, model.model_name_or_path, args.seed)

        def report(trainer: Trainer, seconds: float) -> None:
            torch.set_num_threads(os.cpu_count() or 1)  # the other processes have ended
            _plot_reward(trainer, args.output_dir, "A small model learns to ask")
            report_library_run(run, trainer, seconds)

        trainer = PromptR1Trainer(
            model=run.model,
            reward_funcs=brief_answer_reward,
            environment=run.environment,
            args=args,
            train_dataset=run.train,
            peft_config=get_peft_config(model),
        )
        return trainer, report

    def prepare_library(self, folder: str | Path, model: str | None, seed: int) -> LibraryRun:
        """The run with `--real`.

        The small model comes out of a package, unless another one is named.
        """
        try:
            return prepare_library(folder, model, seed, self.n_test, self.supervised_steps)
        except (ImportError, SmallModelMissing) as error:
            raise ValueError(str(error)) from None


def _plot_reward(trainer: Trainer, folder: str, title: str) -> None:
    """Draw the reward, if matplotlib is installed, which comes with an extra."""
    with suppress(ImportError):
        plot_reward(trainer.state.log_history, f"{folder}/reward.png", title)
