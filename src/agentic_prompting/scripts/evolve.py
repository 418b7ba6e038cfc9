"""Evolve the system prompt of a model whose weights nobody can train, with E-SPL's evolution alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..data import load_task
from ..evolution import ESPLSettings, EvolveConfig, EvolveResult, StepLog, SystemPrompt, evolve
from ..llm import Budget, ChatModel, OpenAIChat, ReplayCache
from ..records import atomic_write
from ..rewards import exact_match_reward, math_reward

REWARDS = {"exact_match": exact_match_reward, "math": math_reward}


@dataclass
class ScriptArguments:
    """Which models, on what, with which reward."""

    sandbox: bool = field(default=False, metadata={"help": "A tiny agent and a scripted reflector instead of LLMs."})
    policy_model: str | None = field(default=None, metadata={"help": "The model that solves, by its name."})
    policy_base_url: str | None = field(default=None, metadata={"help": "Any OpenAI-compatible endpoint."})
    reference_model: str | None = field(default=None, metadata={"help": "The model that reflects and edits."})
    reference_base_url: str | None = field(default=None, metadata={"help": "Any OpenAI-compatible endpoint."})
    task: str = field(default="gsm8k", metadata={"help": "A task of load_task."})
    task_split: str = field(default="train", metadata={"help": "Its split."})
    task_rows: int | None = field(default=None, metadata={"help": "Sample this many rows; all by default."})
    data_files: str | None = field(default=None, metadata={"help": "Local files instead of the hub."})
    reward: str = field(default="exact_match", metadata={"help": f"One of {', '.join(REWARDS)}."})
    initial_prompt: str = field(default="", metadata={"help": "The root; lines [G0]. ... are its principles."})
    output_dir: str = field(default="runs/evolve", metadata={"help": "For the state and the best prompt."})
    budget_usd: float | None = field(default=None, metadata={"help": "What all models together may spend, in US $."})
    budget_tokens: int | None = field(default=None, metadata={"help": "The same in tokens, read and written."})
    replay_cache: str | None = field(default=None, metadata={"help": "SQLite file to record replies to and reuse."})
    warm_start_steps: int = field(default=450, metadata={"help": "Sandbox: supervised steps of the tiny agent."})


@dataclass
class EvolveArguments(ESPLSettings):
    """The settings of the evolution: those of [`EvolveConfig`] that have names on a command line."""

    steps: int = field(default=20, metadata={"help": "Steps in all."})
    mode: Literal["evolution", "reflection"] = field(default="evolution", metadata={"help": "reflection: one prompt."})
    problems_per_step: int = field(default=10, metadata={"help": "b."})
    seed: int = field(default=0, metadata={"help": "Of everything that is drawn."})


def main(arguments: Sequence[str] | None = None) -> None:
    """Evolve, and print a line for each step and the best prompt.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser((ScriptArguments, EvolveArguments))  # type: ignore[arg-type]
    script, options = parser.parse_args_into_dataclasses(args=None if arguments is None else list(arguments))
    result = evolve_prompt(script, options, show)
    print(as_text(result, Path(script.output_dir)))
    if result.stopped:
        raise SystemExit(f"stopped early: {result.stopped}; start again to go on")


def evolve_prompt(
    script: ScriptArguments, options: EvolveArguments, on_step: Callable[[StepLog], None] | None = None
) -> EvolveResult:
    """Evolve; `system_prompt.txt` and `state.json` are then in `script.output_dir`. What was stopped there goes on.

    Args:
        script ([`ScriptArguments`]): Models and task.
        options ([`EvolveArguments`]): Sizes.
        on_step (`Callable`, *optional*): Called after each step.

    Raises:
        `ValueError`: A model is missing, or an option is out of range.
    """
    config = EvolveConfig(**vars(options))
    folder = Path(script.output_dir)
    with ExitStack() as stack:
        run = in_sandbox(script, config, stack) if script.sandbox else with_models(script, config, stack)
        folder.mkdir(parents=True, exist_ok=True)
        budget = Budget(script.budget_usd, script.budget_tokens, folder / "spending.sqlite")
        result = evolve(**run, on_step=on_step, checkpoint=folder / "state.json", budget=budget)
    atomic_write(folder / "system_prompt.txt", result.best.text)
    return result


def with_models(script: ScriptArguments, config: EvolveConfig, stack: ExitStack) -> dict[str, Any]:
    """What [`evolve`] needs, from real endpoints."""
    if not (script.policy_model and script.reference_model):
        raise ValueError("say which models: --policy-model NAME --reference-model NAME, or --sandbox")
    if script.reward not in REWARDS:
        raise ValueError(f"reward must be one of {', '.join(REWARDS)}, got {script.reward!r}")
    cache = ReplayCache(script.replay_cache) if script.replay_cache else None

    def connect(model: str, base_url: str | None) -> ChatModel:
        return stack.enter_context(OpenAIChat(model, base_url=base_url, cache=cache))

    text = script.initial_prompt
    return {
        "policy": connect(script.policy_model, script.policy_base_url),
        "reference": connect(script.reference_model, script.reference_base_url),
        "rows": list(
            load_task(script.task, script.task_split, script.task_rows, config.seed, data_files=script.data_files)
        ),
        "reward": REWARDS[script.reward],
        "prompt": SystemPrompt.parse(text) if "[G0]" in text else SystemPrompt(text, ()),
        "config": config,
    }


def in_sandbox(script: ScriptArguments, config: EvolveConfig, stack: ExitStack) -> dict[str, Any]:
    """The same, with a tiny agent whose weights stay as they are, and a scripted reflector."""
    from ..agent import PromptAgent
    from ..environments import LLMEnvironment
    from ..sandbox.house import HouseReflector
    from ..sandbox.house.setup import ROOT, prepare_house
    from ..sandbox.house.visitor import Transcript, Visitor

    house = prepare_house(script.output_dir, config.seed, warm_start_steps=script.warm_start_steps)
    agent = PromptAgent.from_pretrained(house.model, LLMEnvironment(house.oracle), max_batch_size=256)
    own: dict[str, Any] = {"prompt_template": house.spec.prompt_template, "grammar": Transcript()}
    return {
        "policy": Visitor(agent, config.seed),
        "reference": HouseReflector(seed=config.seed),
        "rows": list(house.train),
        "reward": exact_match_reward,
        "prompt": ROOT,
        "config": replace(config, reflect_on="imperfect", **own),
    }


def show(log: StepLog) -> None:
    """A line for a step."""
    values = ", ".join(
        f"{name}: {value:.2f}" for name, value in zip(log.prompts, log.values, strict=True) if value is not None
    )
    born = [str(operator["child"]) for operator in log.operators if operator["child"] is not None]
    print(f"step {log.step}: prompt {values}{'; born: ' + ', '.join(born) if born else ''}", flush=True)


def as_text(result: EvolveResult, folder: Path) -> str:
    """What is printed at the end."""
    lines = ["", f"the best of {len(result.population.members)} prompts, by rating:", result.best.text, ""]
    lines += [f"{name}: {usage}" for name, usage in result.usage.items()]
    return "\n".join([*lines, f"written to {folder}: system_prompt.txt, state.json"])


if __name__ == "__main__":
    from .running import run_script

    run_script(main)
