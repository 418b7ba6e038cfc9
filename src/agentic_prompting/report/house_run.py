"""What E-SPL's sandbox run prints and writes: exact match under the initial and the best prompt, before and after."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..agent import PromptAgent
from ..environments import LLMEnvironment
from ..evaluation import Estimate
from ..evolution import SystemPrompt
from ..llm.files import write_whole
from ..rollout import AgentSpec
from ..sandbox.house.setup import HouseSandbox
from .sandbox_run import exact_match_of


def report_house_run(sandbox: HouseSandbox, initial: SystemPrompt, trainer: Any, seconds: float) -> dict[str, Any]:
    """Evaluate on the held-out countries, print, and write `summary.json` to the trainer's `output_dir`.

    Args:
        sandbox ([`HouseSandbox`]): The prepared sandbox; its `model` is the policy before.
        initial ([`SystemPrompt`]): The root of the evolution.
        trainer ([`ESPLTrainer`]): After training and `save_model`.
        seconds (`float`): Since the run began.

    Returns:
        `dict`: The summary.
    """
    folder, best = Path(trainer.args.output_dir), trainer.population.best()
    estimates = {
        "policy before, initial prompt": house_exact_match(sandbox, sandbox.model, initial),
        "policy before, best prompt": house_exact_match(sandbox, sandbox.model, best),
        "policy after, initial prompt": house_exact_match(sandbox, folder, initial),
        "policy after, best prompt": house_exact_match(sandbox, folder, best),
    }
    summary = {
        "sandbox": True,
        "exact_match": {name: [round(e.mean, 4), round(e.low, 4), round(e.high, 4)] for name, e in estimates.items()},
        "questions": len(sandbox.test),
        "steps": trainer.state.global_step,
        "prompts": len(trainer.population.members),
        "seconds": round(seconds, 1),
    }
    write_whole(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    trainer.create_model_card()  # again: now with these results
    print(_as_text(summary, best, folder))
    return summary


def house_exact_match(sandbox: HouseSandbox, model: str | Path, prompt: SystemPrompt) -> Estimate:
    """Exact match of a policy under a system prompt on the held-out countries, sampled as in training.

    Args:
        sandbox ([`HouseSandbox`]): Whose questions and oracle.
        model (`str` or `Path`): Folder of the policy.
        prompt ([`SystemPrompt`]): What it is told.
    """
    spec = replace(AgentSpec.load(model), system_prompt=prompt.text)
    agent = PromptAgent.from_pretrained(model, LLMEnvironment(sandbox.oracle), spec, max_batch_size=256)
    return exact_match_of(agent.answer_all(list(sandbox.test), progress=False))


def _as_text(summary: dict[str, Any], best: SystemPrompt, folder: Path) -> str:
    lines = [
        "",
        "E-SPL in the sandbox (a tiny policy, a scripted oracle and reflector; says nothing about real models)",
        "",
    ]
    for name, (mean, low, high) in summary["exact_match"].items():
        lines.append(f"exact match, {name:29}  {mean:.3f}   95 % interval {low:.3f} to {high:.3f}")
    lines += [
        f"{summary['questions']} questions about countries held out, {summary['steps']} steps, {summary['prompts']} "
        f"prompts, {summary['seconds']:.0f} s with the warm start",
        "",
        "--- the best prompt",
        best.text,
        "",
        f"written to {folder}: summary.json, system_prompt.txt, population.json, rollouts/",
        "",
    ]
    return "\n".join(lines)
