"""Train under an evolving system prompt (E-SPL): the sandbox on a laptop, maths, agentic search, or Prompt-R1's agent.

Every option of [`ESPLConfig`], TRL's `ModelConfig` and [`ScriptArguments`] can stand in the YAML file or on the
command line, where it wins. Without a reference LLM: `--reflector policy` lets the policy revise its own prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from trl import ModelConfig, get_peft_config

from ..environments import HTTPRetriever, LLMEnvironment, SearchEnvironment
from ..evolution import SystemPrompt
from ..llm import ChatModel
from ..rewards import PromptR1Reward, exact_match_reward, math_reward, search_reward
from ..rollout import Environment, prompt_r1_template
from ..sandbox import GuardedReflector
from ..sandbox.results import report_guarded_run
from ..sandbox.setup import ROOT, GuardedSandbox, prepare_guarded
from ..trainers import ESPLConfig, ESPLTrainer
from .options import DataAndEnvironment, ReferenceModel, setting
from .train import end, parse, run_script, run_training

REWARDS = {
    "prompt_r1": PromptR1Reward(),
    "math": math_reward,
    "search": search_reward,
    "exact_match": exact_match_reward,
}


@dataclass
class ScriptArguments(DataAndEnvironment, ReferenceModel):
    """What is trained on, with which reward, and which LLMs take part."""

    task: str = setting("A task of load_task, or sandbox: no model, no key.", "sandbox")
    warm_start_steps: int = setting("Sandbox: supervised steps before E-SPL.", 450)
    reward: str = setting(f"One of {', '.join(REWARDS)}.", "exact_match")
    initial_prompt: str = setting("The root; lines [G0]. ... are its principles.", "")
    free_text: bool = setting("Edit the prompt by search and replace.", False)
    environment: str = setting("What the policy may ask: none, llm or search.", "none")
    search_url: str | None = setting("A retriever with Search-R1's HTTP contract.")


ARGUMENTS = (ScriptArguments, ESPLConfig, ModelConfig)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save, and in the sandbox show what came of it.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    started = time.perf_counter()
    script, args, model_args = parse(ARGUMENTS, arguments)
    check(script, args)
    with ExitStack() as stack:
        sandbox: GuardedSandbox | None = None
        reference: ChatModel | None = None
        if script.task == "sandbox":
            sandbox = prepare_guarded(args.output_dir, args.seed, script.n_test, script.warm_start_steps)
        if args.evolves and args.reflector == "reference":
            reference = GuardedReflector(seed=args.seed) if sandbox and not script.reference_model else None
            reference = reference or script.reference(stack)
        setting = in_sandbox(sandbox) if sandbox else of_task(script, model_args, args.seed, stack)
        trainer = ESPLTrainer(**setting, reference=reference, args=args, peft_config=get_peft_config(model_args))
        run_training(trainer)
        trainer.save_model(args.output_dir)
        if sandbox and trainer.accelerator.is_main_process:
            report_guarded_run(sandbox, ROOT, trainer, time.perf_counter() - started)
        end(trainer)


def in_sandbox(sandbox: GuardedSandbox) -> dict[str, Any]:
    """What the trainer gets in the sandbox."""
    return {
        "model": str(sandbox.model),
        "reward_funcs": PromptR1Reward(),
        "train_dataset": sandbox.train,
        "initial_prompt": ROOT,
        "environment": LLMEnvironment(sandbox.oracle),
        "prompt_template": sandbox.spec.prompt_template,
    }


def of_task(script: ScriptArguments, model_args: ModelConfig, seed: int, stack: ExitStack) -> dict[str, Any]:
    """What the trainer gets for a task of `load_task`."""
    return {
        "model": model_args.model_name_or_path,
        "reward_funcs": REWARDS[script.reward],
        "train_dataset": script.load(script.task, seed),
        "initial_prompt": SystemPrompt(script.initial_prompt) if script.free_text else script.initial_prompt,
        "environment": environment_of(script, stack),
        "prompt_template": prompt_r1_template() if script.environment == "llm" else "{question}",
    }


def check(script: ScriptArguments, args: ESPLConfig) -> None:
    """Raises what can be seen of the arguments before anything is loaded."""
    if script.reward not in REWARDS:
        raise ValueError(f"reward must be one of {', '.join(REWARDS)}, got {script.reward!r}")
    if script.environment not in ("none", "llm", "search"):
        raise ValueError(f"environment must be none, llm or search, got {script.environment!r}")
    if script.environment == "llm" and not script.environment_model:
        raise ValueError("say which large LLM the policy may ask: --environment_model NAME")
    if script.environment == "search" and not script.search_url:
        raise ValueError("say where to search: --search_url http://host:port/retrieve")
    if script.task != "sandbox" and args.evolves and args.reflector == "reference" and not script.reference_model:
        raise ValueError("say which LLM reflects: --reference_model NAME, or --reflector policy")


def environment_of(script: ScriptArguments, stack: ExitStack) -> Environment | None:
    """What the policy may ask."""
    if script.environment == "llm":
        return script.as_environment(script.connect(stack, script.environment_model, script.environment_base_url))
    return SearchEnvironment(HTTPRetriever(script.search_url or "")) if script.environment == "search" else None


if __name__ == "__main__":
    run_script(main)
