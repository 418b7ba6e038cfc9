"""A run in the library of invented towns: a real language model learns to ask, and is measured before and after.

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

TOWNS, HELD_OUT_TOWNS = 96, 32
_SAMPLED_TOGETHER = 64


@dataclass(frozen=True)
class LibraryRun:
    """The parts of a run in the library.

    Args:
        model (`str`): The model to train: a folder or its name on the Hub.
        environment ([`Library`]): Knows all facts, those of the held-out towns too.
        train (`Dataset`): Questions to train on: `question`, `answers`, `subject`, `relation`.
        test (`Dataset`): Questions about towns of which no question is in `train`.
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
        [`SmallModelMissing`]: No model is named, and the small one cannot be had.
    """
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
        trainer ([`MultiTurnGRPOTrainer`]): After training and `save_model`.
        seconds (`float`): Since the run began.

    Returns:
        `dict`: The summary.
    """
    folder = Path(trainer.args.output_dir)
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float32
    rows = list(run.test)
    before = ask(run.model, run, rows, trainer.saved_spec(), dtype)
    after = ask(str(folder), run, rows, trainer.saved_spec(), dtype)

    failed_in_training = sum(
        entry.get("rollout/failed", 0.0) for entry in trainer.state.log_history
    )
    failed = sum(rollout.status == "failed" for rollout in [*before, *after])
    difference = paired_difference(_matches(after), _matches(before)).difference
    summary: dict[str, Any] = {
        "library": True,
        "model": run.model,
        "questions": len(rows),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "failed_rollouts": failed + round(failed_in_training * trainer.args.generation_batch_size),
        "exact_match_difference": _rounded(difference),
    }
    lines = []
    for name, measure in (("asked", asked_share), ("exact match", exact_match_share)):
        for when, rollouts in (("before", before), ("after", after)):
            estimate = measure(rollouts)
            key = name.replace(" ", "_")
            summary[f"{key}_{when}"] = round(estimate.mean, 4)
            summary[f"interval_{when}" if key == "exact_match" else f"{key}_interval_{when}"] = (
                _rounded(estimate)[1:]
            )
            lines.append(f"{name:12}{when:7}{_with_interval(estimate)}")
    lines.append(
        f"{'exact match':12}{'gained':7}{_with_interval(difference)}, paired over questions"
    )
    lines.append(
        f"{len(rows)} questions about {len({row['subject'] for row in rows})} towns that training never saw, "
        f"{summary['steps']} steps, {seconds:.0f} s, {summary['failed_rollouts']} failed rollouts"
    )

    examples = dict(zip(("before", "after"), _telling_pair(before, after), strict=True))
    for when, dialogue in examples.items():
        lines += ["", f"--- {when} training", *dialogue]
    atomic_write(folder / "trajectories.json", json.dumps(examples, indent=2) + "\n")
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    trainer.create_model_card()  # again: now with these results
    name = Path(run.model).name if Path(run.model).exists() else run.model
    print(
        "\n".join(
            ["", f"{name} learns to look facts up", "", *lines, "", f"written to {folder}", ""]
        ),
        flush=True,
    )
    return summary


def ask(
    model: str,
    run: LibraryRun,
    rows: Sequence[dict[str, Any]],
    spec: AgentSpec,
    dtype: torch.dtype,
    seed: int = 0,
) -> list[Rollout]:
    """The model's rollouts of some questions, sampled as in training."""
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
    """Exact match by the question's place, of the rollouts that did not fail."""
    return {
        place: exact_match(rollout.answer or "", rollout.row["answers"])
        for place, rollout in enumerate(rollouts)
        if rollout.status != "failed"
    }


def _telling_pair(
    before: Sequence[Rollout], after: Sequence[Rollout]
) -> tuple[list[str], list[str]]:
    """The dialogues of one question, drawn from those that were wrong before and are right after, if there are any."""
    were_right, are_right = _matches(before), _matches(after)
    learned = [place for place in are_right if are_right[place] > were_right.get(place, 1.0)]
    place = random.Random(0).choice(learned or range(len(after)))
    return conversation(before[place]), conversation(after[place])


def _rounded(estimate: Estimate) -> list[float]:
    return [round(number, 4) for number in (estimate.mean, estimate.low, estimate.high)]


def _with_interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f}   95 % interval {estimate.low:.3f} to {estimate.high:.3f}"
