"""The training programs: `python -m agentic_prompting.cli.programs prompt-r1 --config FILE`, or `espl`, or `agent`.

Every option of the program's arguments here, of [`PromptR1Config`] or [`ESPLConfig`], and of TRL's `ModelConfig` can
stand in the YAML file or on the command line, where it wins. The same programs for the sandbox on a laptop and for
models of billions on many GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import Trainer
from trl import ModelConfig, get_peft_config, get_quantization_config

from ..environments import LLMEnvironment
from ..evolution import SystemPrompt
from ..llm import ChatModel
from ..local import SmallModelMissing
from ..programs import HARNESSES, Program, Workspace, harness
from ..report import plot_reward
from ..rewards import PromptR1Reward
from ..sandbox import GuardedReflector
from ..sandbox.library import brief_answer_reward
from ..sandbox.library_run import prepare_library, report_library_run
from ..sandbox.results import report_guarded_run, report_sandbox_run
from ..sandbox.setup import ROOT, prepare_guarded, prepare_sandbox
from ..trainers import (
    ESPLConfig,
    ESPLTrainer,
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    PromptR1Config,
    PromptR1Trainer,
    TrainingInterrupted,
    TrainingStopped,
)
from ..trainers.callbacks import quiet_libraries
from ..trainers.checkpoints import (
    alone_in,
    asked_to_resume,
    from_first,
    holds_run,
    move_aside,
    occupied,
)
from .arguments import DataAndEnvironment, rewards
from .findings import missing_extras, read_yaml
from .loader import (
    load_object,
    load_reward,
    load_rewards,
    register_selection,
    register_selections,
    text_of,
)
from .options import ReferenceModel, check_model, setting
from .parser import help_of, parse_program
from .script import run_script

Report = Callable[[Trainer, float], object]
"""Prints the results of a finished sandbox run, given the trainer and the seconds it took."""


@dataclass
class PromptR1Arguments(DataAndEnvironment):
    """The data, the reward and the large LLM."""

    sandbox: bool = setting("Train the tiny policy in the sandbox; no model, no key.", False)
    real: bool = setting(
        "Train a real small model to look up invented facts; needs the extra real.", False
    )
    warm_start_steps: int = setting("Sandbox: supervised steps before GRPO.", 450)
    task: str = setting("A task of load_task.", "prompt_r1")
    reward: list[str] = rewards("prompt_r1")

    def check(self, args: PromptR1Config) -> None:
        """Raise `ValueError` for wrong arguments before anything is loaded."""
        if self.sandbox and self.real:
            raise ValueError(
                "--real trains a real model and --sandbox a tiny one: leave one of them out"
            )
        self.check_environment(self.sandbox or self.real)
        large_llm = self.environment_model or (self.sandbox and not self.environment_base_url)
        if not self.real and self.asks == "llm" and not self.own and not large_llm:
            raise ValueError(
                "say which large LLM the agent talks to: --environment_model NAME; or name your own environment: "
                "--environment module:name"
            )
        if self.reward != ["prompt_r1"] and (
            self.sandbox or self.real or args.gate != PromptR1Config.gate
        ):
            raise ValueError(
                "--reward takes the place of the sandbox's reward and of --gate: leave the others out"
            )

    def trainer(
        self, args: PromptR1Config, model: ModelConfig, stack: ExitStack
    ) -> tuple[Trainer, Report | None]:
        """The trainer of a model on a task of `load_task`, or of the sandbox's policy."""
        if self.real:
            return self._library_trainer(args, model)
        asked = self.asked(args.seed, stack, self.sandbox)
        if not self.sandbox:
            own = None if self.reward == ["prompt_r1"] else load_rewards(self.reward)
            check_first(args, model, asked.get("environment"))
            return PromptR1Trainer(reward_funcs=own, **self.front(args, model, asked)), None
        environment = asked["environment"]
        environment.check()  # a wrong address or key is found before the warm start, not after it
        sandbox = prepare_sandbox(args.output_dir, args.seed, self.n_test, self.warm_start_steps)

        def report(trainer: Trainer, seconds: float) -> None:
            with suppress(
                ImportError
            ):  # matplotlib comes with an extra: without it no picture, but all the rest
                plot_reward(
                    trainer.state.log_history,
                    f"{args.output_dir}/reward.png",
                    "Prompt-R1 in the sandbox",
                )
            report_sandbox_run(sandbox, environment, trainer, seconds)

        return PromptR1Trainer(
            model=str(sandbox.model),
            environment=environment,
            args=args,
            train_dataset=sandbox.train,
            prompt_template=sandbox.spec.prompt_template,
            peft_config=get_peft_config(model),
        ), report

    def _library_trainer(self, args: PromptR1Config, model: ModelConfig) -> tuple[Trainer, Report]:
        """The trainer of a real small model that learns to look facts up, and the report of its run."""
        if model.model_name_or_path:
            check_model(model.model_name_or_path)
        try:
            run = prepare_library(model.model_name_or_path, args.seed, self.n_test)
        except (ImportError, SmallModelMissing) as error:
            raise ValueError(str(error)) from None
        trainer = PromptR1Trainer(
            model=run.model,
            reward_funcs=brief_answer_reward,
            environment=run.environment,
            args=args,
            train_dataset=run.train,
            peft_config=get_peft_config(model),
        )

        def report(trainer: Trainer, seconds: float) -> None:
            torch.set_num_threads(os.cpu_count() or 1)  # the other processes are done
            with suppress(ImportError):  # matplotlib comes with an extra
                plot_reward(
                    trainer.state.log_history,
                    f"{args.output_dir}/reward.png",
                    "A small model learns to ask",
                )
            report_library_run(run, trainer, seconds)

        return trainer, report


@dataclass
class ESPLArguments(DataAndEnvironment, ReferenceModel):
    """The data, the reward and the LLMs."""

    task: str = setting("A task of load_task, or sandbox: no model, no key.", "sandbox")
    warm_start_steps: int = setting("Sandbox: supervised steps before E-SPL.", 450)
    reward: list[str] = rewards("exact_match")
    initial_prompt: str = setting(
        "The root, or a file of it; lines [G0]. ... are its principles.", ""
    )
    free_text: bool = setting("Edit the prompt by search and replace.", False)
    population: str | None = setting(
        "Instead of an initial prompt: your own Population as module:name."
    )

    ASKS = "none"

    @property
    def in_sandbox(self) -> bool:
        return self.task == "sandbox" and not self.dataset

    def check(self, args: ESPLConfig) -> None:
        """Raise `ValueError` for wrong arguments before anything is loaded."""
        self.check_environment(self.in_sandbox)
        load_rewards(self.reward)
        if self.asks == "llm" and not self.own and not self.environment_model:
            raise ValueError("say which large LLM the policy may ask: --environment_model NAME")
        if (
            not self.in_sandbox
            and args.evolves
            and args.reflector == "reference"
            and not self.reference_model
        ):
            raise ValueError(
                "say which LLM reflects: --reference_model NAME, or --reflector policy"
            )

    def trainer(
        self, args: ESPLConfig, model: ModelConfig, stack: ExitStack
    ) -> tuple[Trainer, Report | None]:
        """The trainer of a model on a task of `load_task`, or of the sandbox's policy."""
        reference: ChatModel | None = None
        if args.evolves and args.reflector == "reference":
            scripted = self.in_sandbox and not self.reference_model
            reference = GuardedReflector(seed=args.seed) if scripted else self.reference(stack)
        if not self.in_sandbox:
            asked, initial = self.asked(args.seed, stack), text_of(self.initial_prompt) or ""
            check_first(args, model, asked.get("environment"), reference)
            return ESPLTrainer(
                reward_funcs=load_rewards(self.reward),
                reference=reference,
                initial_prompt=SystemPrompt(initial) if self.free_text else initial,
                population=load_object(self.population, "population") if self.population else None,
                **self.front(args, model, asked),
            ), None
        sandbox = prepare_guarded(args.output_dir, args.seed, self.n_test, self.warm_start_steps)
        return ESPLTrainer(
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
        ), lambda trainer, seconds: report_guarded_run(sandbox, ROOT, trainer, seconds)


@dataclass
class AgentArguments(DataAndEnvironment):
    """The agent program, its tasks and its reward."""

    harness: str | None = setting(
        f"A command-line agent with known settings: {', '.join(HARNESSES)}."
    )
    dialect: str = setting(
        "Of a harness that speaks several: chat, responses, messages or google.", ""
    )
    ask: str = setting(
        "What a harness is asked, as a template over the columns of a row.", "{question}"
    )
    program: str | None = setting("Instead of a harness: your own agent or Program as module:name.")
    keep_failed: str | None = setting("Folder for the work folders of failed rollouts.")
    source: str | None = setting("The folder that paths in the columns files and tests lie in.")
    shows: list[str] | None = setting("Files and folders that a harness can read beside its own.")
    isolation: str = setting(
        "bwrap, or none: what the policy writes runs with all rights of this user.", "bwrap"
    )
    task: str = setting("A task of load_task.", "")
    reward: list[str] = rewards("exact_match")

    ASKS = "none"
    OTHERS = (
        "environment",
        "tools",
        "environment_factory",
        "grammar",
        "prompt_template",
        "environment_model",
    )

    def check(self, args: MultiTurnGRPOConfig) -> None:
        """Raise `ValueError` for wrong arguments before anything is loaded."""
        if (self.harness is None) == (self.program is None):
            raise ValueError("say which agent to train: --harness NAME, or --program module:name")
        if given := [name for name in self.OTHERS if getattr(self, name)]:
            raise ValueError(f"an agent program has its own: leave out --{', --'.join(given)}")
        if not self.dataset and not self.task:
            raise ValueError(
                "say which tasks: --dataset tasks.jsonl, with files and tests for the work folder"
            )

    def load(self, task: str, seed: int) -> Any:
        """The rows, with every column: a program reads what it likes."""
        if self.dataset and self.dataset.endswith(".jsonl"):
            with open(self.dataset, encoding="utf-8") as file:
                return [json.loads(line) for line in file if line.strip()][: self.task_rows]
        return super().load(task, seed)

    def trainer(
        self, args: MultiTurnGRPOConfig, model: ModelConfig, stack: ExitStack
    ) -> tuple[Trainer, None]:
        """The trainer of a model inside an agent program."""
        functions = [load_reward(name) for name in self.reward]
        of_folder = [one for one in functions if "folder" in signature(one).parameters]
        if of_folder and len(functions) > 1:
            raise ValueError(
                "a reward that reads the work folder stands alone: leave the others out"
            )
        program = self.agent_program(of_folder[0] if of_folder else None)
        program.keep_private([self.dataset] if self.dataset else [])
        check_first(args, model, program)
        rewards = None if of_folder else functions
        return MultiTurnGRPOTrainer(
            reward_funcs=rewards, **self.front(args, model, {"environment": program})
        ), None  # fmt: skip

    def agent_program(self, reward: Callable[..., Any] | None = None) -> Program:
        """The program that the options name."""
        if self.program is not None:
            made = load_object(self.program, "program")
            return made if isinstance(made, Program) else Program(made)
        workspace = Workspace(
            source=self.source,
            keep_failed=self.keep_failed,
            shows=self.shows or (),
            isolation=self.isolation,  # type: ignore[arg-type]  # which checks it
        )
        return Program(
            harness(str(self.harness), self.dialect, self.ask), workspace=workspace, reward=reward
        )


PROGRAMS: dict[str, tuple[type, type, type]] = {
    "prompt-r1": (PromptR1Arguments, PromptR1Config, ModelConfig),
    "agent": (AgentArguments, MultiTurnGRPOConfig, ModelConfig),
    "espl": (ESPLArguments, ESPLConfig, ModelConfig),
}
"""The dataclasses of each method's command line."""


def main(method: str, arguments: Sequence[str] | None = None) -> None:
    """Train, save, and in the sandbox print the results.

    Args:
        method (`str`): `prompt-r1`, `espl` or `agent`.
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    started = time.perf_counter()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"--help", "-h", "--help-all"} & set(words):
        print(help_of(PROGRAMS[method], method, everything="--help-all" in words))
        return
    script, args, model = parse(
        PROGRAMS[method], ["--model_name_or_path" if w == "--model" else w for w in words]
    )
    script.check(args)
    for missing in missing_extras({**vars(args), **vars(script)}):
        if missing.level == "problem":
            raise ValueError(f"{missing.says}: {missing.fix}")
    args.model_init_kwargs = {**_loading(model), **(args.model_init_kwargs or {})} or None
    folder, state = Path(args.output_dir), PartialState()
    with ExitStack() as stack:
        stack.enter_context(
            alone_in(folder, state)
        )  # to the end: before and after training files are written, too
        if not asked_to_resume(args) and from_first(state, lambda: holds_run(folder)):
            if not args.overwrite:
                raise ValueError(occupied(folder, as_options=True))
            from_first(state, lambda: move_aside(folder, model.model_name_or_path))
        trainer, report = script.trainer(args, model, stack)
        trainer.locks_folder = False
        run_training(trainer)
        trainer.save_model(args.output_dir)
        if report is not None and trainer.accelerator.is_main_process:
            report(trainer, time.perf_counter() - started)
        trainer.accelerator.end_training()  # without it gloo may abort at exit


def _loading(model: ModelConfig) -> dict[str, Any]:
    """The arguments of `from_pretrained` that options name."""
    names = {
        "model_revision": "revision",
        "dtype": "dtype",
        "attn_implementation": "attn_implementation",
    }
    loading = {theirs: getattr(model, ours) for ours, theirs in names.items()}
    plain = {theirs: getattr(ModelConfig, ours) for ours, theirs in names.items()}
    if (quantization := get_quantization_config(model)) is not None:
        loading["quantization_config"] = quantization
    return {name: value for name, value in loading.items() if value != plain.get(name)}


def check_first(args: MultiTurnGRPOConfig, model: ModelConfig, *asked: Any) -> None:
    """Check endpoints and model, in the order of `doctor`, before data or weights are loaded."""
    if args.check_environment and args.process_index == 0:
        for one in asked:
            if hasattr(one, "check"):
                one.check()
    if not model.model_name_or_path:
        raise ValueError(
            "say which model to train: --model_name_or_path FOLDER or a name on the hub"
        )
    check_model(model.model_name_or_path)


def parse(kinds: Sequence[type], words: Sequence[str]) -> tuple[Any, ...]:
    """One object of each kind, from a command line and the file of its `--config`.

    Raises:
        `ValueError`: In one line: a name is no option, or a value cannot be taken.
    """
    register_selections(words)
    for file in [after for word, after in pairwise(words) if word == "--config"]:
        values = read_yaml(Path(file))
        if isinstance(values, dict) and isinstance(values.get("selection"), str):
            register_selection(values["selection"])
    # About transformers' own renamed arguments, which TRL still sets under the old names; nothing a user can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    quiet_libraries()
    try:
        return parse_program(kinds, words)
    except ValueError as error:
        if "bf16" in str(
            error
        ):  # transformers' own words name one of the two options that are needed
            raise ValueError(
                f"{error} On a machine without a GPU: --use_cpu true --bf16 false"
            ) from None
        raise


def run_training(trainer: Trainer) -> None:
    """Train, or go on from `args.resume_from_checkpoint`; Ctrl-C ends it with a checkpoint.

    `--resume_from_checkpoint true` is the newest checkpoint, and the beginning where there is none. The log of the run
    is in the output folder afterwards, as `trainer_state.json`.

    Raises:
        [`TrainingInterrupted`]: After Ctrl-C.
        `SystemExit`: With status 1 and the reason, where training stopped because of the environment.
    """
    try:
        trainer.train()
    except TrainingStopped as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except TrainingInterrupted:
        trainer.accelerator.end_training()
        raise
    trainer.save_state()


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1], sys.argv[2:]))
