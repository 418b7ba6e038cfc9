"""`agentic-prompting evolve`: a better system prompt for a model whose weights nobody can train."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from .options import option

Reward = Literal["exact_match", "math"]
Mode = Literal["evolution", "reflection"]

_MODELS, _TASK, _LOOP = "Models", "Task", "Evolution"


def evolve(
    policy_model: Annotated[str | None, option("The model that solves, by its name.", _MODELS)] = None,
    policy_base_url: Annotated[str | None, option("Its OpenAI-compatible endpoint.", _MODELS)] = None,
    reference_model: Annotated[str | None, option("The model that reflects and edits.", _MODELS)] = None,
    reference_base_url: Annotated[str | None, option("Its endpoint.", _MODELS)] = None,
    replay_cache: Annotated[Path | None, option("SQLite file: replies in it are not paid twice.", _MODELS)] = None,
    budget_usd: Annotated[float | None, option("What all models together may spend.", _MODELS)] = None,
    budget_tokens: Annotated[int | None, option("The same in tokens.", _MODELS)] = None,
    sandbox: Annotated[bool, option("A tiny agent and a scripted reflector: no key.", _MODELS, "--sandbox")] = False,
    task: Annotated[str, option("What it is to solve: gsm8k. `agentic-prompting data list` has all.", _TASK)] = "gsm8k",
    task_split: Annotated[str, option("Its split: train.", _TASK)] = "train",
    task_rows: Annotated[int | None, option("Take so many rows of it; all by default.", _TASK)] = None,
    data_files: Annotated[str | None, option("Local files instead of the hub.", _TASK)] = None,
    reward: Annotated[Reward, option("How answers are judged.", _TASK)] = "exact_match",
    initial_prompt: Annotated[str, option("Where to begin; lines [G0]. ... are its principles.", _TASK)] = "",
    steps: Annotated[int, option("Steps in all: 20.", _LOOP)] = 20,
    mode: Annotated[Mode, option("reflection: one prompt, mutation alone.", _LOOP)] = "evolution",
    prompts_per_step: Annotated[int, option("M of the paper: 3.", _LOOP)] = 3,
    problems_per_step: Annotated[int, option("b of the paper: 10.", _LOOP)] = 10,
    num_generations: Annotated[int, option("N of the paper: 5.", _LOOP)] = 5,
    p_crossover: Annotated[float, option("How often prompts cross over: 0.2.", _LOOP)] = 0.2,
    window: Annotated[int, option("K of the paper: 10.", _LOOP)] = 10,
    seed: Annotated[int, option("Of everything that is drawn: 0.", _LOOP)] = 0,
    warm_start_steps: Annotated[int, option("Sandbox: supervised steps of the tiny agent: 450.", _LOOP)] = 450,
    output_dir: Annotated[Path, option("Folder for state and best prompt: runs/evolve.", _LOOP)] = Path("runs/evolve"),
    as_json: Annotated[bool, option("Print one JSON object at the end instead of text.", _LOOP, "--json")] = False,
) -> int:
    """Evolve the system prompt of a closed model (E-SPL without weights); run again, a stopped run goes on."""
    given: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    from ..scripts import evolve as script

    settings = script.ScriptArguments(**{name: given[name] for name in script.ScriptArguments.__dataclass_fields__})
    options = script.EvolveArguments(
        **{name: given[name] for name in script.EvolveArguments.__dataclass_fields__ if name in given}
    )
    try:
        result = script.evolve_prompt(settings, options, None if as_json else script.show)
    except KeyboardInterrupt:
        print(f"agentic-prompting: stopped; the same command goes on from {output_dir}", file=sys.stderr)
        return 130
    if as_json:
        usage = {name: asdict(used) for name, used in result.usage.items()}
        shown = {"prompt": result.best.text, "steps": len(result.steps), "usage": usage, "stopped": result.stopped}
        print(json.dumps({**shown, "output_dir": str(output_dir)}, ensure_ascii=False))
    else:
        print(script.as_text(result, output_dir))
    if result.stopped:
        print(f"agentic-prompting: stopped early: {result.stopped}; the same command goes on", file=sys.stderr)
    return int(bool(result.stopped))
