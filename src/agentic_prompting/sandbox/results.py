"""The results of a run in the sandbox: exact match on held-out questions, before and after
training.

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
from ..evolution.run_files import POPULATION_FILE, PROMPT_FILE
from ..records import atomic_write
from ..rewards import exact_match
from ..rollout import AgentSpec, Environment, Rollout
from .setup import SAMPLING, GuardedRun, SandboxRun

# The files of a run that the report names, as far as they exist.
_FILES = (
    "summary.json",
    "trajectories.json",
    PROMPT_FILE,
    POPULATION_FILE,
    "reward.png",
    "rollouts/",
)


def report_sandbox_run(
    sandbox: SandboxRun, environment: Environment, trainer: Any, seconds: float
) -> dict[str, Any]:
    """Evaluate the policy before and after training on the held-out questions; print and write the
    result.

    Writes `summary.json` and `trajectories.json` (one question before and after) to the trainer's
    `output_dir`.

    Args:
        sandbox ([`SandboxRun`]): The prepared run; its `model` is the policy before training.
        environment ([`Environment`]): The agent's environment.
        trainer ([`MultiTurnGRPOTrainer`]): The trainer, after training and `save_model`.
        seconds (`float`): Seconds since the run began.

    Returns:
        `dict`: The summary.
    """
    folder = Path(trainer.args.output_dir)
    rows = list(sandbox.test)

    # The same questions for the policy before and after training.
    rollouts_by_time = {
        "before": PromptAgent.from_pretrained(sandbox.model, environment).answer_all(rows),
        "after": PromptAgent.from_pretrained(folder, environment).answer_all(rows),
    }

    # Exact match before and after, each with its interval.
    summary: dict[str, Any] = {"sandbox": True}
    lines = []
    for time, rollouts in rollouts_by_time.items():
        figures = _rounded(exact_match_of(rollouts))
        summary[f"exact_match_{time}"] = figures[0]
        summary[f"interval_{time}"] = figures[1:]
        result = _with_interval(f"exact match {time:6}", figures)
        lines.append(f"{result}, {len(rows)} held-out questions")

    # Failed rollouts: those counted here, and those of training, which logs their share of each
    # batch.
    failed_rollouts = 0
    for rollouts in rollouts_by_time.values():
        failed_rollouts += sum(rollout.status == "failed" for rollout in rollouts)
    failed_shares = [
        entry["rollout/failed"] for entry in trainer.state.log_history if "reward" in entry
    ]
    failed_rollouts += round(sum(failed_shares) * trainer.args.generation_batch_size)

    # Turns are those of the policy after training.
    turns = sum(len(rollout.turns) for rollout in rollouts_by_time["after"])
    summary |= {
        "questions": len(rows),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "mean_turns": round(turns / len(rows), 3),
        "failed_rollouts": failed_rollouts,
    }
    lines.append(
        f"{summary['steps']} steps, {seconds:.0f} s, {summary['mean_turns']:.1f} turns a question, "
        f"{summary['failed_rollouts']} failed rollouts"
    )

    # One example: the first question that was wrong before and is right after, else the first of
    # all.
    example = 0
    for number in range(len(rows)):
        score_before = exact_match_of([rollouts_by_time["before"][number]]).mean
        score_after = exact_match_of([rollouts_by_time["after"][number]]).mean
        if score_before < score_after:
            example = number
            break
    dialogues = {
        time: conversation(rollouts[example]) for time, rollouts in rollouts_by_time.items()
    }
    atomic_write(folder / "trajectories.json", json.dumps(dialogues, indent=2) + "\n")
    for time, dialogue in dialogues.items():
        lines += ["", f"--- {time} training", *dialogue]

    title = "Prompt-R1 in the sandbox (a tiny policy and a scripted oracle"
    return _publish(trainer, summary, title, lines)


def report_guarded_run(
    sandbox: GuardedRun, initial: SystemPrompt, trainer: Any, seconds: float
) -> dict[str, Any]:
    """Evaluate the initial and the best prompt with the policy before and after; print, and write
    `summary.json`.

    Args:
        sandbox ([`GuardedRun`]): The prepared run; its `model` is the policy before training.
        initial ([`SystemPrompt`]): The root of the evolution.
        trainer ([`ESPLTrainer`]): The trainer, after training and `save_model`.
        seconds (`float`): Seconds since the run began.

    Returns:
        `dict`: The summary.
    """
    best = trainer.population.best()

    # Both policies under both prompts.
    table = {}
    for time, model in (("before", sandbox.model), ("after", trainer.args.output_dir)):
        for prompt_name, prompt in (("initial", initial), ("best", best)):
            estimate = guarded_exact_match(sandbox, model, prompt)
            table[f"policy {time}, {prompt_name} prompt"] = _rounded(estimate)

    # The table, and the size of the run.
    summary = {
        "sandbox": True,
        "exact_match": table,
        "questions": len(sandbox.test),
        "steps": trainer.state.global_step,
        "prompts": len(trainer.population.members),
        "seconds": round(seconds, 1),
    }
    lines = [_with_interval(f"exact match, {name:29}", figures) for name, figures in table.items()]
    lines.append(
        f"{summary['questions']} questions about countries held out, {summary['steps']} steps, "
        f"{summary['prompts']} prompts, {seconds:.0f} s"
    )
    lines += ["", "--- the best prompt", best.text]
    title = "E-SPL in the sandbox (a tiny policy, a scripted oracle and reflector"
    return _publish(trainer, summary, title, lines)


def guarded_exact_match(sandbox: GuardedRun, model: str | Path, prompt: SystemPrompt) -> Estimate:
    """Exact match of a policy under a system prompt on the held-out countries, always at the
    temperature of `SAMPLING`.

    Args:
        sandbox ([`GuardedRun`]): The prepared run, with the questions and the oracle.
        model (`str` or `Path`): Folder of the policy.
        prompt ([`SystemPrompt`]): The system prompt of every question.
    """
    # The policy's own limits and grammar, with this prompt and temperature.
    spec = replace(AgentSpec.load(model), system_prompt=prompt.text, sampling=SAMPLING)
    agent = PromptAgent.from_pretrained(
        model, LLMEnvironment(sandbox.oracle), spec, max_batch_size=256
    )
    return exact_match_of(agent.answer_all(list(sandbox.test), progress=False))


def exact_match_of(rollouts: Sequence[Rollout]) -> Estimate:
    """Return the share of right answers with its 95 % Wilson interval.

    A failed rollout has no answer and is left out.
    """
    # Failures are not the policy's fault.
    scored = [rollout for rollout in rollouts if rollout.status != "failed"]
    right = sum(exact_match(rollout.answer or "", rollout.row["answers"]) for rollout in scored)
    return wilson_interval(int(right), len(scored))


def conversation(rollout: Rollout) -> list[str]:
    """Return a rollout as lines to read."""
    right_answers = " / ".join(rollout.row["answers"])
    lines = [f"question     {rollout.row['question']}   (right: {right_answers})"]
    for number, turn in enumerate(rollout.turns):
        lines.append(f"agent        {turn.text.strip()}")
        # The last turn has no observation.
        if number < len(rollout.observations):
            observation = rollout.observations[number]
            text = observation.text if observation.error is None else f"({observation.error})"
            lines.append(f"environment  {text}")
    return lines


def _rounded(estimate: Estimate) -> list[float]:
    return [round(number, 4) for number in (estimate.mean, estimate.low, estimate.high)]


def _with_interval(name: str, figures: Sequence[float]) -> str:
    mean, low, high = figures
    return f"{name}  {mean:.3f}   95 % interval {low:.3f} to {high:.3f}"


def _publish(
    trainer: Any, summary: dict[str, Any], title: str, lines: Sequence[str]
) -> dict[str, Any]:
    """Write the results to the run's folder and its model card, and print them."""
    folder = Path(trainer.args.output_dir)
    # Write the summary first: the model card reads it.
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    trainer.create_model_card()  # again: now with these results

    written_files = ", ".join(name for name in _FILES if (folder / name).exists())
    heading = f"{title}; says nothing about real models)"
    footer = f"written to {folder}: {written_files}"
    print("\n".join(["", heading, "", *lines, "", footer, ""]))
    return summary
