"""Train a Prompt-R1 agent: the same program for the sandbox on a laptop and for Qwen3-4B on eight GPUs.

Every option of [`PromptR1Config`], TRL's `ModelConfig` and [`ScriptArguments`] can stand in the YAML file or on the
command line, where it wins.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from trl import ModelConfig, get_peft_config

from ..environments import LLMEnvironment
from ..report import plot_reward
from ..sandbox import Oracle
from ..sandbox.results import report_sandbox_run
from ..sandbox.server import MODEL, OracleServer
from ..sandbox.setup import Sandbox, prepare_sandbox
from ..trainers import PromptR1Config, PromptR1Trainer
from .options import DataAndEnvironment, setting
from .train import end, parse, run_script, run_training


@dataclass
class ScriptArguments(DataAndEnvironment):
    """What is trained on, and with which large LLM."""

    sandbox: bool = setting("Train the tiny policy in the sandbox; no model, no key.", False)
    warm_start_steps: int = setting("Sandbox: supervised steps before GRPO.", 350)
    task: str = setting("A task of load_task.", "prompt_r1")
    environment_temperature: float | None = setting("Sent with every call.")


ARGUMENTS = (ScriptArguments, PromptR1Config, ModelConfig)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save, and in the sandbox show what came of it.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    started = time.perf_counter()
    script, args, model_args = parse(ARGUMENTS, arguments)
    check(script, args)
    with ExitStack() as stack:
        environment = connect(script, args.seed, stack)
        sandbox = None
        if script.sandbox:
            environment.check()  # a wrong address or key is found before the warm start, not after it
            sandbox = prepare_sandbox(args.output_dir, args.seed, script.n_test, script.warm_start_steps)
        trainer = make_trainer(script, args, model_args, environment, sandbox)
        run_training(trainer)
        trainer.save_model(args.output_dir)
        if sandbox and trainer.accelerator.is_main_process:
            with suppress(ImportError):  # matplotlib comes with an extra: without it no picture, but all the rest
                plot_reward(trainer.state.log_history, f"{args.output_dir}/reward.png", "Prompt-R1 in the sandbox")
            report_sandbox_run(sandbox, environment, trainer, time.perf_counter() - started)
        end(trainer)


def check(script: ScriptArguments, args: PromptR1Config) -> None:
    """Raises what can be seen of the arguments before anything is loaded."""
    if not script.environment_model and (not script.sandbox or script.environment_base_url):
        raise ValueError("say which large LLM the agent talks to: --environment_model NAME")


def connect(script: ScriptArguments, seed: int, stack: ExitStack) -> LLMEnvironment:
    """The large LLM that the agent talks to, closed with the run."""
    model, base_url = script.environment_model, script.environment_base_url
    if script.sandbox and not base_url:
        # The embedded default, through the real client: the oracle as an OpenAI-compatible server on loopback.
        base_url = stack.enter_context(OracleServer(Oracle(seed=seed))).base_url
        model = model or MODEL
    return script.as_environment(script.connect(stack, model, base_url), temperature=script.environment_temperature)


def make_trainer(
    script: ScriptArguments,
    args: PromptR1Config,
    model_args: ModelConfig,
    environment: LLMEnvironment,
    sandbox: Sandbox | None,
) -> PromptR1Trainer:
    """The trainer of the sandbox's policy, or of a model for a task of [`load_task`]."""
    if sandbox:
        model, rows, template = str(sandbox.model), sandbox.train, sandbox.spec.prompt_template
    else:
        model, template = model_args.model_name_or_path, None
        rows = script.load(script.task, args.seed)
    return PromptR1Trainer(
        model=model,
        environment=environment,
        args=args,
        train_dataset=rows,
        prompt_template=template,
        peft_config=get_peft_config(model_args),
    )


if __name__ == "__main__":
    run_script(main)
