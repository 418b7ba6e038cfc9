"""`agentic-prompting evolve`: E-SPL's evolution for a model whose weights nobody can train."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .options import AsJson, ReferenceModel, Spending, TaskRows, setting
from .show import say

if TYPE_CHECKING:
    from ..evolution import EvolveConfig, EvolveResult, StepLog


@dataclass
class ScriptArguments(TaskRows, Spending, ReferenceModel):
    """Which models, on what, with which reward."""

    policy_model: str | None = setting("The model that solves, by its name.")
    policy_base_url: str | None = setting("Its OpenAI-compatible endpoint.")
    sandbox: bool = setting("A tiny agent and a scripted reflector: no key.", False)
    task: str = setting("What it is to solve. `agentic-prompting data list` has all.", "gsm8k")
    reward: Literal["exact_match", "math"] = setting("How answers are judged.", "exact_match")
    initial_prompt: str = setting("Where to begin; lines [G0]. ... are its principles.", "")
    warm_start_steps: int = setting("Sandbox: supervised steps of the tiny agent.", 450)
    output_dir: Path = setting("Folder for state and best prompt.", Path("runs/evolve"))


@dataclass
class EvolveArguments:
    """The settings of the evolution: those of [`EvolveConfig`] that have names on a command line, with its defaults."""

    steps: int = setting("Steps in all.", 20)
    mode: Literal["evolution", "reflection"] = setting("reflection: one prompt, mutation alone.", "evolution")
    prompts_per_step: int = setting("M of the paper.", 3)
    problems_per_step: int = setting("b of the paper.", 10)
    num_generations: int = setting("N of the paper.", 5)
    p_crossover: float = setting("How often prompts cross over.", 0.2)
    window: int = setting("K of the paper.", 10)
    selection: str = setting("top_plus_random, softmax or uniform.", "top_plus_random")
    selection_temperature: float = setting("T of eq 3, for softmax.", 1.0)
    independent_draws: bool = setting("Prompts are drawn independently: one may come twice.", False)
    best_rule: str = setting("The prompt that is kept: conservative, mean or newest.", "conservative")
    reflect_on: str = setting("Problems that are reflected on: mixed (the paper) or imperfect.", "mixed")
    max_words: int = setting("Longer principles are refused.", 32)
    seed: int = setting("Of everything that is drawn.", 0)


def evolve(script: ScriptArguments, options: EvolveArguments, as_json: AsJson = False) -> int:
    """Evolve the system prompt of a closed model (E-SPL without weights); run again, a stopped run goes on."""
    folder = script.output_dir
    try:
        result = evolve_prompt(script, options, None if as_json else show)
    except KeyboardInterrupt:
        print(f"agentic-prompting: stopped; the same command goes on from {folder}", file=sys.stderr)
        return 130
    if as_json:
        usage = {name: asdict(used) for name, used in result.usage.items()}
        shown = {"prompt": result.best.text, "steps": len(result.steps), "usage": usage, "stopped": result.stopped}
        say(json.dumps({**shown, "output_dir": str(folder)}, ensure_ascii=False))
    else:
        say(f"\nthe best of {len(result.population.members)} prompts, by rating:\n{result.best.text}\n")
        say("\n".join(f"{name}: {usage}" for name, usage in result.usage.items()))
        say(f"written to {folder}: system_prompt.txt, state.json")
    if result.stopped:
        print(f"agentic-prompting: stopped early: {result.stopped}; the same command goes on", file=sys.stderr)
    return int(bool(result.stopped))


def main(arguments: Sequence[str] | None = None) -> None:
    """The same as a program: prints a line for each step and the best prompt.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser((ScriptArguments, EvolveArguments))  # type: ignore[arg-type]
    status = evolve(*parser.parse_args_into_dataclasses(args=None if arguments is None else list(arguments)))
    if status:
        raise SystemExit(status)


def evolve_prompt(
    script: ScriptArguments, options: EvolveArguments, on_step: Callable[[StepLog], None] | None
) -> EvolveResult:
    """Evolve; `system_prompt.txt` and `state.json` are then in `script.output_dir`. What was stopped there goes on.

    Raises:
        `ValueError`: A model is missing, or an option is out of range.
    """
    from ..evolution import EvolveConfig, evolve
    from ..records import atomic_write

    config, folder = EvolveConfig(**vars(options)), script.output_dir
    with ExitStack() as stack:
        run = in_sandbox(script, config) if script.sandbox else with_models(script, config, stack)
        folder.mkdir(parents=True, exist_ok=True)
        budget = script.budget(folder / "spending.sqlite")
        result = evolve(**run, on_step=on_step, checkpoint=folder / "state.json", budget=budget)
    atomic_write(folder / "system_prompt.txt", result.best.text)
    return result


def with_models(script: ScriptArguments, config: EvolveConfig, stack: ExitStack) -> dict[str, Any]:
    """What [`evolve`] needs, from real endpoints."""
    if not (script.policy_model and script.reference_model):
        raise ValueError("say which models: --policy-model NAME --reference-model NAME, or --sandbox")
    from ..evolution import SystemPrompt
    from ..rewards import exact_match_reward, math_reward

    rewards = {"exact_match": exact_match_reward, "math": math_reward}
    if script.reward not in rewards:
        raise ValueError(f"reward must be one of {', '.join(rewards)}, got {script.reward!r}")
    text = script.initial_prompt
    return {
        "policy": script.connect(stack, script.policy_model, script.policy_base_url),
        "reference": script.reference(stack),
        "rows": list(script.load(script.task, config.seed)),
        "reward": rewards[script.reward],
        "prompt": SystemPrompt.parse(text) if "[G0]" in text else SystemPrompt(text, ()),
        "config": config,
    }


def in_sandbox(script: ScriptArguments, config: EvolveConfig) -> dict[str, Any]:
    """The same, with a tiny agent whose weights stay as they are, and a scripted reflector."""
    from ..agent import PromptAgent
    from ..environments import LLMEnvironment
    from ..rewards import exact_match_reward
    from ..sandbox import GuardedReflector
    from ..sandbox.setup import ROOT, AgentChat, Transcript, prepare_guarded

    sandbox = prepare_guarded(script.output_dir, config.seed, warm_start_steps=script.warm_start_steps)
    agent = PromptAgent.from_pretrained(sandbox.model, LLMEnvironment(sandbox.oracle), max_batch_size=256)
    own: dict[str, Any] = {"prompt_template": sandbox.spec.prompt_template, "grammar": Transcript()}
    return {
        "policy": AgentChat(agent, config.seed),
        "reference": GuardedReflector(seed=config.seed),
        "rows": list(sandbox.train),
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
