"""A run in the library of invented towns: a real language model learns to ask, and is evaluated before and after.

The model is SmolLM2-135M-Instruct unless another one is named. Its settings (`examples/configs/real.yaml`) were chosen
on the countries; nothing was chosen on a town.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from ..agent import PromptAgent
from ..evaluation import Estimate, paired_difference, wilson_interval
from ..local import small_model
from ..records import atomic_write
from ..rewards import exact_match
from ..rollout import AgentSpec, Rollout
from .library import Library, split_by_subject, town_facts
from .results import conversation

TOWNS = 96
HELD_OUT_TOWNS = 32
_SAMPLED_TOGETHER = 64  # rollouts in one batch


@dataclass(frozen=True)
class LibraryRun:
    """The parts of a run in the library.

    Args:
        model (`str`): The model to train: a folder or its name on the Hub.
        environment ([`Library`]): The library, with the facts of the held-out towns too.
        train (`Dataset`): Questions to train on: `question`, `answers`, `subject`, `relation`.
        test (`Dataset`): Questions about towns that do not occur in `train`.
    """

    model: str
    environment: Library
    train: Dataset
    test: Dataset


def prepare_library(
    model: str | None = None, seed: int = 0, n_test: int | None = None
) -> LibraryRun:
    """Draw the towns, and find the model.

    Args:
        model (`str`, *optional*): A folder or a name on the Hub. Defaults to [`small_model`].
        seed (`int`, *optional*, defaults to `0`): Decides the towns, their facts and the split.
        n_test (`int`, *optional*): Use at most this many of the 192 held-out questions.

    Raises:
        [`SmallModelMissing`]: No model is named, and the small one is not available.
    """
    # The library knows all towns; the questions are split by town.
    facts = town_facts(seed, TOWNS)
    train, test = split_by_subject(facts, HELD_OUT_TOWNS, seed)
    return LibraryRun(
        model=model or str(small_model()),
        environment=Library(facts),
        train=Dataset.from_list([fact.as_row() for fact in train]),
        test=Dataset.from_list([fact.as_row() for fact in test[:n_test]]),
    )


def report_library_run(run: LibraryRun, trainer: Any, seconds: float) -> dict[str, Any]:
    """Ask the model the held-out questions before and after training; print and write the result.

    Writes `summary.json` and `trajectories.json` (one question before and after) to the trainer's `output_dir`.

    Args:
        run ([`LibraryRun`]): The prepared run.
        trainer ([`MultiTurnGRPOTrainer`]): The trainer, after training and `save_model`.
        seconds (`float`): Seconds since the run began.

    Returns:
        `dict`: The summary.
    """
    folder = Path(trainer.args.output_dir)
    # Play in the precision of the training.
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float32
    rows = list(run.test)

    # The same questions for the model before and after training.
    spec = trainer.saved_spec()
    rollouts_by_time = {
        "before": ask(run.model, run, rows, spec, dtype),
        "after": ask(str(folder), run, rows, spec, dtype),
    }
    before, after = rollouts_by_time.values()

    # Failed rollouts: those counted here, and those of training, which logs their share of each batch.
    failed_rollouts = sum(rollout.status == "failed" for rollout in [*before, *after])
    failed_shares = [entry.get("rollout/failed", 0.0) for entry in trainer.state.log_history]
    failed_rollouts += round(sum(failed_shares) * trainer.args.generation_batch_size)

    # The gain, question by question.
    difference = paired_difference(_matches(after), _matches(before)).difference
    summary: dict[str, Any] = {
        "library": True,
        "model": run.model,
        "questions": len(rows),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "failed_rollouts": failed_rollouts,
        "exact_match_difference": _rounded(difference),
    }

    # Both measures before and after. The interval of exact match has the name that all summaries use.
    lines = []
    for time, rollouts in rollouts_by_time.items():
        estimate = asked_share(rollouts)
        summary[f"asked_{time}"] = round(estimate.mean, 4)
        summary[f"asked_interval_{time}"] = _rounded(estimate)[1:]
        lines.append(f"{'asked':12}{time:7}{_with_interval(estimate)}")
    for time, rollouts in rollouts_by_time.items():
        estimate = exact_match_share(rollouts)
        summary[f"exact_match_{time}"] = round(estimate.mean, 4)
        summary[f"interval_{time}"] = _rounded(estimate)[1:]
        lines.append(f"{'exact match':12}{time:7}{_with_interval(estimate)}")
    gain = _with_interval(difference)
    lines.append(f"{'exact match':12}{'gained':7}{gain}, paired over questions")
    # The size of the run.
    towns = {row["subject"] for row in rows}
    lines.append(
        f"{len(rows)} questions about {len(towns)} towns that training never saw, "
        f"{summary['steps']} steps, {seconds:.0f} s, {failed_rollouts} failed rollouts"
    )

    # The dialogues of one question.
    example = _choose_example(before, after)
    dialogues = {
        time: conversation(rollouts[example]) for time, rollouts in rollouts_by_time.items()
    }
    for time, dialogue in dialogues.items():
        lines += ["", f"--- {time} training", *dialogue]

    # Write the files first: the model card reads them.
    atomic_write(folder / "trajectories.json", json.dumps(dialogues, indent=2) + "\n")
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    trainer.create_model_card()  # again: now with these results

    # A model in a folder is called by the name of the folder.
    model_name = Path(run.model).name if Path(run.model).exists() else run.model
    heading = f"{model_name} learns to look facts up"
    print("\n".join(["", heading, "", *lines, "", f"written to {folder}", ""]), flush=True)
    return summary


def ask(
    model: str,
    run: LibraryRun,
    rows: Sequence[dict[str, Any]],
    spec: AgentSpec,
    dtype: torch.dtype,
    seed: int = 0,
) -> list[Rollout]:
    """Play the model's rollouts of some questions, sampled as in training."""
    agent = PromptAgent.from_pretrained(
        model, run.environment, spec, max_batch_size=_SAMPLED_TOGETHER, dtype=dtype
    )
    return agent.answer_all(rows, seed=seed, progress=False)


def asked_share(rollouts: Sequence[Rollout]) -> Estimate:
    """Share of the rollouts that asked the library, with its 95 % interval; failed ones are left out."""
    scored = [rollout for rollout in rollouts if rollout.status != "failed"]
    return wilson_interval(sum(bool(rollout.observations) for rollout in scored), len(scored))


def exact_match_share(rollouts: Sequence[Rollout]) -> Estimate:
    """Share of right answers with its 95 % interval; failed rollouts are left out."""
    matches = _matches(rollouts)
    return wilson_interval(int(sum(matches.values())), len(matches))


def _matches(rollouts: Sequence[Rollout]) -> dict[int, float]:
    """Exact match by the number of the question, of the rollouts that did not fail."""
    matches = {}
    for number, rollout in enumerate(rollouts):
        if rollout.status != "failed":
            matches[number] = exact_match(rollout.answer or "", rollout.row["answers"])
    return matches


def _choose_example(before: Sequence[Rollout], after: Sequence[Rollout]) -> int:
    """Draw the number of a question that was wrong before and is right after, or of any if there is none."""
    matches_before = _matches(before)
    # A question whose rollout failed before training is no example: nothing is known about it.
    learned = [
        number
        for number, match in _matches(after).items()
        if match > matches_before.get(number, 1.0)
    ]
    return random.Random(0).choice(learned or range(len(after)))


def _rounded(estimate: Estimate) -> list[float]:
    return [round(number, 4) for number in (estimate.mean, estimate.low, estimate.high)]


def _with_interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f}   95 % interval {estimate.low:.3f} to {estimate.high:.3f}"
