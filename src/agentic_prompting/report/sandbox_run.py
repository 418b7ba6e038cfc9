"""What `make demo` prints and writes: exact match before and after, a picture, and one trajectory of each."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ..agent import PromptAgent
from ..evaluation import Estimate, wilson_interval
from ..llm.files import write_whole
from ..rewards import exact_match
from ..rollout import Environment, Rollout
from ..sandbox.setup import Sandbox
from .curves import plot_reward


def report_sandbox_run(sandbox: Sandbox, environment: Environment, trainer: Any, seconds: float) -> dict[str, Any]:
    """Evaluate the policy before and after training on the held-out questions; print and write the result.

    Writes `summary.json`, `trajectories.json` and, with matplotlib, `reward.png` to the trainer's `output_dir`.

    Args:
        sandbox ([`Sandbox`]): The prepared sandbox; its `model` is the policy before.
        environment ([`Environment`]): What the agent asks.
        trainer ([`MultiTurnGRPOTrainer`]): After training and `save_model`.
        seconds (`float`): Since the run began.

    Returns:
        `dict`: The summary.
    """
    folder = Path(trainer.args.output_dir)
    rows = list(sandbox.test)
    before = PromptAgent.from_pretrained(sandbox.model, environment).answer_all(rows)
    after = PromptAgent.from_pretrained(folder, environment).answer_all(rows)
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    em_before, em_after = exact_match_of(before), exact_match_of(after)
    summary = {
        "sandbox": True,
        "exact_match_before": round(em_before.mean, 4),
        "exact_match_after": round(em_after.mean, 4),
        "interval_before": [round(em_before.low, 4), round(em_before.high, 4)],
        "interval_after": [round(em_after.low, 4), round(em_after.high, 4)],
        "questions": len(rows),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "mean_turns": round(sum(len(rollout.turns) for rollout in after) / len(after), 3),
        "failed_rollouts": sum(rollout.status == "failed" for rollout in [*before, *after])
        + round(sum(entry["rollout/failed"] for entry in history) * trainer.args.generation_batch_size),
    }
    index = _telling_question(before, after)
    examples = {"before": conversation(before[index]), "after": conversation(after[index])}
    write_whole(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    trainer.create_model_card()  # again: now with these results
    write_whole(folder / "trajectories.json", json.dumps(examples, indent=2) + "\n")
    files = ["summary.json", "trajectories.json", "rollouts/"]
    with contextlib.suppress(ImportError):  # matplotlib comes with an extra: without it no picture, but all the rest
        plot_reward(trainer.state.log_history, folder / "reward.png", title="Prompt-R1 in the sandbox")
        files.insert(2, "reward.png")
    print(_as_text(summary, examples, folder, files))
    return summary


def exact_match_of(rollouts: list[Rollout]) -> Estimate:
    """Share of right answers with its 95 % Wilson interval. A failed rollout is left out: nobody answered."""
    scored = [rollout for rollout in rollouts if rollout.status != "failed"]
    right = sum(exact_match(rollout.answer or "", rollout.row["answers"]) for rollout in scored)
    return wilson_interval(int(right), len(scored))


def conversation(rollout: Rollout) -> list[str]:
    """A rollout as lines to read."""
    lines = [f"question     {rollout.row['question']}   (right: {' / '.join(rollout.row['answers'])})"]
    for i, turn in enumerate(rollout.turns):
        lines.append(f"agent        {turn.text.strip()}")
        if i < len(rollout.observations):
            observation = rollout.observations[i]
            lines.append(f"environment  {observation.text if observation.error is None else f'({observation.error})'}")
    return lines


def _telling_question(before: list[Rollout], after: list[Rollout]) -> int:
    """The first question that was wrong before and is right after; else the first of all."""
    pairs = enumerate(zip(before, after, strict=True))
    return next((i for i, (old, new) in pairs if exact_match_of([old]).mean < exact_match_of([new]).mean), 0)


def _as_text(summary: dict[str, Any], examples: dict[str, list[str]], folder: Path, files: list[str]) -> str:
    lines = ["", "Prompt-R1 in the sandbox (a tiny policy and a scripted oracle; says nothing about real models)", ""]
    for when in ("before", "after"):
        low, high = summary[f"interval_{when}"]
        lines.append(
            f"exact match {when:6}  {summary[f'exact_match_{when}']:.3f}   95 % interval {low:.3f} to {high:.3f}, "
            f"{summary['questions']} held-out questions"
        )
    lines.append(
        f"{summary['steps']} steps, {summary['seconds']:.0f} s with the warm start, "
        f"{summary['mean_turns']:.1f} turns a question, {summary['failed_rollouts']} failed rollouts"
    )
    for when in ("before", "after"):
        lines += ["", f"--- {when} training", *examples[when]]
    lines += ["", f"written to {folder}: {', '.join(files)}", ""]
    return "\n".join(lines)
