"""The figures of `headroom` from before a run, beside the results of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..evaluation import wilson_interval
from ..evaluation.held_out_gain import measure_held_out_gain
from ..llm.numbers import count_in_words
from ..llm.types import cost_in_words
from .rollout_records import gradient_counts
from .run_summary import RunSummary

UNKNOWN = "–"


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of `headroom` beside what the run brought: a row of the table.

    Args:
        name (`str`): The name of the measured quantity.
        predicted (`str`): The figure of `headroom`, with its interval.
        result (`str`): What the run brought.
    """

    name: str
    predicted: str
    result: str


def compare_with_headroom(run: RunSummary) -> list[ComparedFigure]:
    """The figures of a run's `headroom.json`, each beside the run's own; none without the file."""
    headroom = run.headroom
    if headroom is None:
        return []
    # The results of the run, by the key of the figure that they belong to.
    results = {
        "floor": _first_score(run),
        "ceiling": _last_score(run),
        "best_of_group": _last_score(run),
        "differing": _gradient_share(run),
        "prompt_gain": _evolution_gain(run),
    }
    rows = []
    for figure in headroom.measured:
        rows.append(ComparedFigure(figure.name, str(figure), results.get(figure.key, UNKNOWN)))
    rows.append(ComparedFigure("calls and dollars", headroom.spending, _spending(run)))
    return rows


def _first_score(run: RunSummary) -> str:
    """The score before training: on held-out questions, else of the first step."""
    if len(run.held_out) > 1:
        first = run.held_out[0]
        return f"{first.mean:.3f} [{first.low:.3f}, {first.high:.3f}], {first.name}"
    return _score_of_step(run, 0, "in the first step")


def _last_score(run: RunSummary) -> str:
    """The score after training: on held-out questions, else of the last step."""
    if len(run.held_out) > 1:
        last = run.held_out[-1]
        return f"{last.mean:.3f} [{last.low:.3f}, {last.high:.3f}], {last.name}"
    return _score_of_step(run, -1, "in the last step")


def _score_of_step(run: RunSummary, position: int, when: str) -> str:
    history = run.history.get("train") or []
    if not history or "exact_match" not in history[position]:
        return UNKNOWN
    return f"{history[position]['exact_match']:.3f} exact match {when}"


def _gradient_share(run: RunSummary) -> str:
    counts = gradient_counts(run.rollouts)
    if counts is None:
        return UNKNOWN
    share = wilson_interval(counts["with_gradient"], counts["groups"])
    return f"{share.mean:.3f} [{share.low:.3f}, {share.high:.3f}] of {share.n} groups"


def _evolution_gain(run: RunSummary) -> str:
    """The held-out reward of an evolution's best prompt minus that of its first one, if both were
    measured on the same number of rows; else the last reward of its steps minus the first."""
    history = run.history.get("evolution") or []
    nodes = run.lineage.nodes if history and run.lineage is not None else []
    best = next((node for node in nodes if node.best), None)
    if best is not None:
        before = nodes[0].member.held_out
        after = best.member.held_out
        paired = measure_held_out_gain(nodes[0].member, best.member)
        if paired is not None:
            difference = paired.difference
            return (
                f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}] from the "
                f"first to the best prompt, on {difference.n} held-out rows"
            )
        if before is not None and after is not None and before["n"] == after["n"]:
            gain = after["mean"] - before["mean"]
            return f"{gain:+.3f} from the first to the best prompt, on {after['n']} held-out rows"
    for key, where in (
        ("evolution/held_out", "held out"),
        ("evolution/reward", "on the rows of the steps"),
    ):
        values = [entry[key] for entry in history if key in entry]
        if len(values) > 1:
            return f"{values[-1] - values[0]:+.3f} from the first to the last step, {where}"
    return UNKNOWN


def _spending(run: RunSummary) -> str:
    """The requests and dollars of the whole run, as far as its records know them."""
    if not run.rollouts:
        return UNKNOWN
    observations: list[Mapping[str, Any]] = []
    for record in run.rollouts:
        observations += record.get("observations") or ()
    dollars = sum(float(record.get("cost_usd") or 0) for record in run.rollouts)
    # Replayed requests cost nothing, whatever the price.
    was_used = any(not observation.get("cached") for observation in observations)
    cost = cost_in_words(dollars, was_used)
    return f"{count_in_words(len(observations), 'request')} of the agent, {cost}"
