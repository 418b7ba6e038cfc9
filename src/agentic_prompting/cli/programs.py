"""The training programs: `python -m agentic_prompting.cli.programs prompt-r1 --config FILE`, or `espl`.

Every option of the program's arguments here, of [`PromptR1Config`] or [`ESPLConfig`], and of TRL's `ModelConfig` can
stand in the YAML file or on the command line, where it wins. The same programs for the sandbox on a laptop and for
models of billions on many GPUs.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import Trainer
from trl import ModelConfig, TrlParser, get_peft_config

from ..environments import HTTPRetriever, LLMEnvironment, SearchEnvironment
from ..evolution import SystemPrompt
from ..llm import ChatModel
from ..report import plot_reward
from ..rewards import PromptR1Reward
from ..rollout import Environment, TagGrammar, prompt_r1_template, template_for
from ..sandbox import GuardedReflector, Oracle
from ..sandbox.results import report_guarded_run, report_sandbox_run
from ..sandbox.server import MODEL, OracleServer
from ..sandbox.setup import ROOT, prepare_guarded, prepare_sandbox
from ..trainers import (
    ESPLConfig,
    ESPLTrainer,
    MultiTurnGRPOConfig,
    PromptR1Config,
    PromptR1Trainer,
    TrainingInterrupted,
    TrainingStopped,
)
from ..trainers.callbacks import quiet_libraries
from ..trainers.checkpoints import alone_in
from .findings import missing_extras, misspelt, read_yaml
from .loader import REWARDS, load_environment, load_reward, register_selection, register_selections
from .options import EnvironmentModel, HeldOutRows, ReferenceModel, TaskRows, check_model, setting
from .script import run_script

Report = Callable[[Trainer, float], object]
"""Prints the results of a finished sandbox run, given the trainer and the seconds it took."""


@dataclass
class DataAndEnvironment(TaskRows, EnvironmentModel):
    """Options of both methods."""

    n_test: int = setting("Sandbox: held-out questions.", 256)


@dataclass
class PromptR1Arguments(DataAndEnvironment):
    """The data, the reward and the large LLM."""

    sandbox: bool = setting("Train the tiny policy in the sandbox; no model, no key.", False)
    warm_start_steps: int = setting("Sandbox: supervised steps before GRPO.", 450)
    task: str = setting("A task of load_task.", "prompt_r1")
    environment_temperature: float | None = setting("Sent with every call.")
    share_replies: str | None = setting("never, group or step: who shares the reply to the same conversation.")
    environment: str | None = setting("Instead of a large LLM your own environment: module:name, or file.py:name.")
    reward: str = setting(f"One of {', '.join(REWARDS)}, or your own as module:name.", "prompt_r1")

    def check(self, args: PromptR1Config) -> None:
        """Raise `ValueError` for wrong arguments before anything is loaded."""
        if self.sandbox and self.dataset:
            raise ValueError("--sandbox has rows of its own, and --dataset are yours: leave one of them out")
        if self.environment and (self.environment_model or self.sandbox):
            raise ValueError("--environment takes the place of a large LLM and of the sandbox: leave the others out")
        large_llm = self.environment_model or (self.sandbox and not self.environment_base_url)
        if not self.environment and not large_llm:
            raise ValueError(
                "say which large LLM the agent talks to: --environment_model NAME; or name your own environment: "
                "--environment module:name"
            )
        if self.reward != "prompt_r1" and (self.sandbox or args.gate != PromptR1Config.gate):
            raise ValueError("--reward takes the place of the sandbox's reward and of --gate: leave the others out")

    def large_llm(self, seed: int, stack: ExitStack) -> LLMEnvironment:
        """The large LLM that the agent talks to, closed with the run."""
        model, base_url = self.environment_model, self.environment_base_url
        if self.sandbox and not base_url:
            # The embedded default, through the real client: the oracle as an OpenAI-compatible server on loopback.
            base_url = stack.enter_context(OracleServer(Oracle(seed=seed))).base_url
            model = model or MODEL
        chat, settings = self.connect(stack, model, base_url), {"temperature": self.environment_temperature}
        return self.as_environment(chat, **settings, share_replies=self.share_replies)

    def trainer(self, args: PromptR1Config, model: ModelConfig, stack: ExitStack) -> tuple[Trainer, Report | None]:
        """The trainer of a model on a task of `load_task`, or of the sandbox's policy."""
        environment: Any = load_environment(self.environment) if self.environment else self.large_llm(args.seed, stack)
        common: dict[str, Any] = {"environment": environment, "args": args, "peft_config": get_peft_config(model)}
        if not self.sandbox:
            reward = None if self.reward == "prompt_r1" else load_reward(self.reward)  # `None`: with `args.gate`
            check_first(args, model, environment)
            rows, name = self.load(self.task, args.seed), model.model_name_or_path
            return PromptR1Trainer(model=name, reward_funcs=reward, train_dataset=rows, **common), None
        environment.check()  # a wrong address or key is found before the warm start, not after it
        sandbox = prepare_sandbox(args.output_dir, args.seed, self.n_test, self.warm_start_steps)

        def report(trainer: Trainer, seconds: float) -> None:
            with suppress(ImportError):  # matplotlib comes with an extra: without it no picture, but all the rest
                plot_reward(trainer.state.log_history, f"{args.output_dir}/reward.png", "Prompt-R1 in the sandbox")
            report_sandbox_run(sandbox, environment, trainer, seconds)

        template = sandbox.spec.prompt_template
        return PromptR1Trainer(
            model=str(sandbox.model), train_dataset=sandbox.train, prompt_template=template, **common
        ), report


@dataclass
class ESPLArguments(DataAndEnvironment, ReferenceModel, HeldOutRows):
    """The data, the reward and the LLMs."""

    task: str = setting("A task of load_task, or sandbox: no model, no key.", "sandbox")
    warm_start_steps: int = setting("Sandbox: supervised steps before E-SPL.", 450)
    reward: str = setting(f"One of {', '.join(REWARDS)}, or your own as module:name.", "exact_match")
    initial_prompt: str = setting("The root; lines [G0]. ... are its principles.", "")
    free_text: bool = setting("Edit the prompt by search and replace.", False)
    environment: str = setting("What the policy may ask: none, llm, search, or your own as module:name.", "none")
    search_url: str | None = setting("A retriever with Search-R1's HTTP contract.")

    @property
    def in_sandbox(self) -> bool:
        return self.task == "sandbox" and not self.dataset

    def check(self, args: ESPLConfig) -> None:
        """Raise `ValueError` for wrong arguments before anything is loaded."""
        known = ("none", "llm", "search")
        if self.environment not in known and ":" not in self.environment:
            raise ValueError(f"environment must be one of {', '.join(known)}, or module:name, got {self.environment!r}")
        load_reward(self.reward)
        if self.environment == "llm" and not self.environment_model:
            raise ValueError("say which large LLM the policy may ask: --environment_model NAME")
        if self.environment == "search" and not self.search_url:
            raise ValueError("say where to search: --search_url http://host:port/retrieve")
        if not self.in_sandbox and args.evolves and args.reflector == "reference" and not self.reference_model:
            raise ValueError("say which LLM reflects: --reference_model NAME, or --reflector policy")

    def asked(self, stack: ExitStack) -> Environment | None:
        """The environment of the policy, if any."""
        if self.environment == "llm":
            return self.as_environment(self.connect(stack, self.environment_model, self.environment_base_url))
        if self.environment == "search":
            return SearchEnvironment(HTTPRetriever(self.search_url or ""))
        return load_environment(self.environment) if self.environment != "none" else None

    def template(self, environment: Any) -> str:
        """The user message: it speaks of a large LLM or of your own environment; else it is the bare question."""
        if self.environment == "llm":
            return prompt_r1_template()
        own = getattr(environment, "grammar", None) or TagGrammar()
        return template_for(environment, own) if ":" in self.environment else "{question}"

    def trainer(self, args: ESPLConfig, model: ModelConfig, stack: ExitStack) -> tuple[Trainer, Report | None]:
        """The trainer of a model on a task of `load_task`, or of the sandbox's policy."""
        reference: ChatModel | None = None
        if args.evolves and args.reflector == "reference":
            scripted = self.in_sandbox and not self.reference_model
            reference = GuardedReflector(seed=args.seed) if scripted else self.reference(stack)
        common: dict[str, Any] = {"reference": reference, "args": args, "peft_config": get_peft_config(model)}
        if not self.in_sandbox:
            environment = self.asked(stack)
            check_first(args, model, environment, reference)
            return ESPLTrainer(
                model=model.model_name_or_path,
                reward_funcs=load_reward(self.reward),
                train_dataset=self.load(self.task, args.seed),
                eval_dataset=self.held_out(args.seed),
                initial_prompt=SystemPrompt(self.initial_prompt) if self.free_text else self.initial_prompt,
                environment=environment,
                prompt_template=self.template(environment),
                **common,
            ), None
        sandbox = prepare_guarded(args.output_dir, args.seed, self.n_test, self.warm_start_steps)
        return ESPLTrainer(
            model=str(sandbox.model),
            reward_funcs=PromptR1Reward(),
            train_dataset=sandbox.train,
            eval_dataset=sandbox.test if args.eval_strategy != "no" else None,
            initial_prompt=ROOT,
            environment=LLMEnvironment(sandbox.oracle),
            prompt_template=sandbox.spec.prompt_template,
            **common,
        ), lambda trainer, seconds: report_guarded_run(sandbox, ROOT, trainer, seconds)


PROGRAMS: dict[str, tuple[type, type, type]] = {
    "prompt-r1": (PromptR1Arguments, PromptR1Config, ModelConfig),
    "espl": (ESPLArguments, ESPLConfig, ModelConfig),
}
"""The dataclasses of each method's command line."""


def main(method: str, arguments: Sequence[str] | None = None) -> None:
    """Train, save, and in the sandbox print the results.

    Args:
        method (`str`): `prompt-r1` or `espl`.
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    started = time.perf_counter()
    script, args, model = parse(PROGRAMS[method], arguments)
    script.check(args)
    for missing in missing_extras({**vars(args), **vars(script)}):
        if missing.level == "problem":
            raise ValueError(f"{missing.says}: {missing.fix}")
    folder = Path(args.output_dir)
    with ExitStack() as stack:
        with alone_in(folder, PartialState()):  # `train` locks it again: before and after it files are written, too
            trainer, report = script.trainer(args, model, stack)
        run_training(trainer)
        with alone_in(folder, trainer.accelerator):
            trainer.save_model(args.output_dir)
            if report is not None and trainer.accelerator.is_main_process:
                report(trainer, time.perf_counter() - started)
        trainer.accelerator.end_training()  # without it gloo may abort at exit


def check_first(args: MultiTurnGRPOConfig, model: ModelConfig, *asked: Any) -> None:
    """Check endpoints and model, in the order of `doctor`, before data or weights are loaded."""
    if args.check_environment and args.process_index == 0:
        for one in asked:
            if hasattr(one, "check"):
                one.check()
    if not model.model_name_or_path:
        raise ValueError("say which model to train: --model_name_or_path FOLDER or a name on the hub")
    check_model(model.model_name_or_path)


def parse(kinds: Sequence[type], arguments: Sequence[str] | None) -> tuple[Any, ...]:
    """One object of each kind, from the command line or from `arguments`, and from the file of `--config`.

    Raises:
        `ValueError`: A name in the file is no option; checked before the values are used.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    register_selections(words)
    for file in [after for word, after in pairwise(words) if word == "--config"]:
        values = read_yaml(Path(file))
        if isinstance(values, dict) and isinstance(values.get("selection"), str):
            register_selection(values["selection"])
        fields = {"env", *(name for kind in kinds for name in vars(kind)["__dataclass_fields__"])}
        for wrong in misspelt(values if isinstance(values, dict) else {}, fields, f"{file}: ", "this program"):
            raise ValueError(f"{wrong.says}: {wrong.fix}")
    # About transformers' own renamed arguments, which TRL still sets under the old names; nothing a user can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    quiet_libraries()
    try:
        return TrlParser(kinds).parse_args_and_config(arguments)
    except ValueError as error:
        if "bf16" in str(error):  # transformers' own words name one of the two options that are needed
            raise ValueError(f"{error} On a machine without a GPU: --use_cpu true --bf16 false") from None
        raise


def run_training(trainer: Trainer) -> None:
    """Train, or go on from `args.resume_from_checkpoint`; Ctrl-C ends it with a checkpoint.

    `--resume_from_checkpoint true` is the newest checkpoint, and the beginning where there is none. The log of the run
    is in the output folder afterwards, as `trainer_state.json`.

    Raises:
        [`TrainingInterrupted`]: After Ctrl-C.
        `SystemExit`: With status 1 and the reason, where training stopped because of the environment.
    """
    given = trainer.args.resume_from_checkpoint  # text, as it stands on a command line
    resumed = {"true": True, "false": None}.get(str(given).lower(), given)
    try:
        trainer.train(resume_from_checkpoint=resumed)
    except TrainingStopped as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except TrainingInterrupted:
        trainer.accelerator.end_training()
        raise
    trainer.save_state()


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1], sys.argv[2:]))
