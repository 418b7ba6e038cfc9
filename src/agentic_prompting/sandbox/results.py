"""The results of a run in the sandbox: exact match on held-out questions, before and after training.

The model card and the report read `summary.json`. These numbers say nothing about real models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..agent import PromptAgent
from ..environments import LLMEnvironment
from ..evaluation import Estimate, wilson_interval
from ..evolution import SystemPrompt
from ..records import atomic_write
from ..rewards import exact_match
from ..rollout import AgentSpec, Environment, Rollout
from .setup import SAMPLING, GuardedSandbox, Sandbox

_FILES = (
    "summary.json",
    "trajectories.json",
    "system_prompt.txt",
    "population.json",
    "reward.png",
    "rollouts/",
)


def report_sandbox_run(
    sandbox: Sandbox, environment: Environment, trainer: Any, seconds: float
) -> dict[str, Any]:
    """Evaluate the policy before and after training on the held-out questions; print and write the result.

    Writes `summary.json` and `trajectories.json` (one question before and after) to the trainer's `output_dir`.

    Args:
        sandbox ([`Sandbox`]): The prepared sandbox; its `model` is the policy before.
        environment ([`Environment`]): What the agent asks.
        trainer ([`MultiTurnGRPOTrainer`]): After training and `save_model`.
        seconds (`float`): Since the run began.

    Returns:
        `dict`: The summary.
    """
    folder, rows = Path(trainer.args.output_dir), list(sandbox.test)
    played = {
        when: PromptAgent.from_pretrained(model, environment).answer_all(rows)
        for when, model in (("before", sandbox.model), ("after", folder))
    }
    summary: dict[str, Any] = {"sandbox": True}
    lines = []
    for when, rollouts in played.items():
        row = _row(exact_match_of(rollouts))
        summary |= {f"exact_match_{when}": row[0], f"interval_{when}": row[1:]}
        lines.append(f"{_line(f'exact match {when:6}', row)}, {len(rows)} held-out questions")
    share_failed = sum(
        entry["rollout/failed"] for entry in trainer.state.log_history if "reward" in entry
    )
    failed = sum(rollout.status == "failed" for rollouts in played.values() for rollout in rollouts)
    summary |= {
        "questions": len(rows),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "mean_turns": round(sum(len(rollout.turns) for rollout in played["after"]) / len(rows), 3),
        "failed_rollouts": failed + round(share_failed * trainer.args.generation_batch_size),
    }
    # The first question that was wrong before and is right after; else the first of all.
    scores = [
        [exact_match_of([rollout]).mean for rollout in rollouts] for rollouts in played.values()
    ]
    telling = next((i for i, (old, new) in enumerate(zip(*scores, strict=True)) if old < new), 0)
    examples = {when: conversation(rollouts[telling]) for when, rollouts in played.items()}
    atomic_write(folder / "trajectories.json", json.dumps(examples, indent=2) + "\n")
    lines.append(
        f"{summary['steps']} steps, {seconds:.0f} s, {summary['mean_turns']:.1f} turns a question, "
        f"{summary['failed_rollouts']} failed rollouts"
    )
    for when, said in examples.items():
        lines += ["", f"--- {when} training", *said]
    return _publish(
        trainer, summary, "Prompt-R1 in the sandbox (a tiny policy and a scripted oracle", lines
    )


def report_guarded_run(
    sandbox: GuardedSandbox, initial: SystemPrompt, trainer: Any, seconds: float
) -> dict[str, Any]:
    """Evaluate the initial and the best prompt with the policy before and after; print, and write `summary.json`.

    Args:
        sandbox ([`GuardedSandbox`]): The prepared sandbox; its `model` is the policy before.
        initial ([`SystemPrompt`]): The root of the evolution.
        trainer ([`ESPLTrainer`]): After training and `save_model`.
        seconds (`float`): Since the run began.

    Returns:
        `dict`: The summary.
    """
    best = trainer.population.best()
    table = {
        f"policy {when}, {which} prompt": _row(guarded_exact_match(sandbox, model, prompt))
        for when, model in (("before", sandbox.model), ("after", trainer.args.output_dir))
        for which, prompt in (("initial", initial), ("best", best))
    }
    summary = {
        "sandbox": True,
        "exact_match": table,
        "questions": len(sandbox.test),
        "steps": trainer.state.global_step,
        "prompts": len(trainer.population.members),
        "seconds": round(seconds, 1),
    }
    lines = [_line(f"exact match, {name:29}", row) for name, row in table.items()]
    lines.append(
        f"{summary['questions']} questions about countries held out, {summary['steps']} steps, {summary['prompts']} "
        f"prompts, {seconds:.0f} s"
    )
    lines += ["", "--- the best prompt", best.text]
    return _publish(
        trainer,
        summary,
        "E-SPL in the sandbox (a tiny policy, a scripted oracle and reflector",
        lines,
    )


def guarded_exact_match(
    sandbox: GuardedSandbox, model: str | Path, prompt: SystemPrompt
) -> Estimate:
    """Exact match of a policy under a system prompt on the held-out countries, at the one temperature of `SAMPLING`,
    whatever it was trained at.

    Args:
        sandbox ([`GuardedSandbox`]): Gives the questions and the oracle.
        model (`str` or `Path`): Folder of the policy.
        prompt ([`SystemPrompt`]): The system prompt of every question.
    """
    spec = replace(AgentSpec.load(model), system_prompt=prompt.text, sampling=SAMPLING)
    agent = PromptAgent.from_pretrained(
        model, LLMEnvironment(sandbox.oracle), spec, max_batch_size=256
    )
    return exact_match_of(agent.answer_all(list(sandbox.test), progress=False))


def exact_match_of(rollouts: Sequence[Rollout]) -> Estimate:
    """Share of right answers with its 95 % Wilson interval. A failed rollout has no answer and is left out."""
    scored = [rollout for rollout in rollouts if rollout.status != "failed"]
    right = sum(exact_match(rollout.answer or "", rollout.row["answers"]) for rollout in scored)
    return wilson_interval(int(right), len(scored))


def conversation(rollout: Rollout) -> list[str]:
    """A rollout as lines to read."""
    lines = [
        f"question     {rollout.row['question']}   (right: {' / '.join(rollout.row['answers'])})"
    ]
    for i, turn in enumerate(rollout.turns):
        lines.append(f"agent        {turn.text.strip()}")
        if i < len(rollout.observations):
            observation = rollout.observations[i]
            lines.append(
                f"environment  {observation.text if observation.error is None else f'({observation.error})'}"
            )
    return lines


def _row(found: Estimate) -> list[float]:
    return [round(number, 4) for number in (found.mean, found.low, found.high)]


def _line(what: str, row: Sequence[float]) -> str:
    mean, low, high = row
    return f"{what}  {mean:.3f}   95 % interval {low:.3f} to {high:.3f}"


def _publish(
    trainer: Any, summary: dict[str, Any], what: str, lines: Sequence[str]
) -> dict[str, Any]:
    """Into the run's folder, its model card, and onto the terminal."""
    folder = Path(trainer.args.output_dir)
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    trainer.create_model_card()  # again: now with these results
    files = ", ".join(name for name in _FILES if (folder / name).exists())
    head, foot = f"{what}; says nothing about real models)", f"written to {folder}: {files}"
    print("\n".join(["", head, "", *lines, "", foot, ""]))
    return summary
