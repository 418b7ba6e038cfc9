"""The tables of the conductor's recorded runs, and the figures of its promise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lab import interval, markdown, share, shown
from benchmarks.learning.conductor_baselines import BASELINES
from benchmarks.learning.conductor_variants import VARIANTS

CONDITION_TITLES = {
    ("unchecked", "before"): "the first protocol, untrained",
    ("unchecked", "after"): "the first protocol: one wording, a warm start that is not checked",
    ("unchecked", "replaced"): "the first protocol: digits replaced by a worker of another wording",
    ("references", "after"): "references",
    ("references", "replaced"): "digits replaced by a worker of a seventh wording",
    ("names", "before"): "30 names, untrained",
    ("names", "after"): "30 names",
    ("names", "held-out names"): "30 names in training, ten others",
    ("budget", "before"): "with a twin, budget `high`, untrained",
    ("budget", "low, untrained"): "with a twin, budget `low`, untrained",
    ("budget", "after"): "with a twin, budget `high`",
    ("budget", "low"): "with a twin, budget `low`",
    ("outages", "before"): "digits down half the time and *unavailable*, untrained",
    ("outages", "after"): "digits down half the time and *unavailable*",
    ("outages", "no outages"): "the same conductor without outages",
    ("outages-failed", "after"): "digits down half the time and *failed*, of what was answered",
    ("outages-failed", "no outages"): "the same conductor without outages",
    ("retyping", "after"): "retyping",
    (
        "names-longer",
        "held-out names, untrained",
    ): "third protocol: 30 names, untrained, ten others",
    ("names-longer", "after"): "third protocol: 30 names",
    ("names-longer", "held-out names"): "third protocol: 30 names in training, ten others",
    ("budget-early", "before"): "third protocol: with a twin, budget `high`, untrained",
    ("budget-early", "after"): "third protocol: with a twin, budget `high`",
    ("budget-early", "low"): "third protocol: with a twin, budget `low`",
    ("outages-longer", "before"): "third protocol: digits *unavailable* half the time, untrained",
    ("outages-longer", "after"): "third protocol: digits *unavailable* half the time",
    ("outages-longer", "no outages"): "third protocol: the same conductor without outages",
}
"""What the table of variants calls a condition of a variant."""

PROMISES = {
    ("unchecked", "after"): 0.85,
    ("unchecked", "replaced"): 0.75,
    ("references", "after"): 0.85,
    ("references", "replaced"): 0.75,
    ("names", "held-out names"): 0.75,
    ("budget", "low"): 0.60,
    ("budget", "after"): 0.85,
    ("outages", "after"): 0.80,
    ("names-longer", "held-out names"): 0.75,
    ("budget-early", "low"): 0.60,
    ("budget-early", "after"): 0.85,
    ("outages-longer", "after"): 0.80,
}
"""Exact match that the protocol expects at least."""
RETYPING_LOSSES = {"hands on a value of one word": 0.10, "hands on a record of twelve": 0.50}
"""How much lower the protocol expects retyping to be than references, by what a question hands on."""
MAX_DOLLAR_SHARE = 0.60
"""Dollars under the budget `low` that the protocol expects at most, as a share of those under `high`."""


def of_variant(records: Sequence[Mapping[str, Any]], variant: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record["variant"] == variant]


def by_kind(records: Sequence[Mapping[str, Any]], when: str = "after") -> dict[str, float]:
    """Exact match of each kind of question, over all seeds."""
    results: dict[str, list[int]] = defaultdict(list)
    for record in records:
        for kind, result in zip(record["kinds"], record[when]["correct"], strict=True):
            results[kind].append(int(result))
    return {kind: round(sum(values) / len(values), 3) for kind, values in sorted(results.items())}


def systems_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Score and dollars of the conductor and of the baselines, and the difference to each, paired by seed."""
    records = of_variant(records, "references")
    if not records:
        return "no records"
    after = [share(record["after"]["correct"]) for record in records]
    systems: dict[str, list[Mapping[str, Any]]] = {
        name: [record["baselines"][name] for record in records] for name in BASELINES
    }
    systems["conductor, untrained"] = [record["before"] for record in records]
    systems["conductor, trained"] = [record["after"] for record in records]
    systems["conductor, digits replaced"] = [record["replaced"] for record in records]
    rows = []
    for name, measured in systems.items():
        scores = [share(entry["correct"]) for entry in measured]
        usd = sum(entry["usd"] for entry in measured) / len(measured)
        gains = [ours - score for ours, score in zip(after, scores, strict=True)]
        gain = "" if name == "conductor, trained" else shown(gains, "+")
        rows.append([name, shown(scores), f"{1000 * usd:.2f}", gain])
    return markdown(
        ("system", "exact match", "$ per 1,000 questions", "trained conductor minus it"),
        rows,
    )


def kinds_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Exact match of each kind of question before and after training, over all seeds."""
    records = of_variant(records, "references")
    before = by_kind(records, "before")
    after = by_kind(records)
    rows = [[kind, f"{before[kind]:.2f}", f"{after[kind]:.2f}"] for kind in after]
    return markdown(("kind of question", "untrained", "trained"), rows)


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the promise."""
    summary: dict[str, Any] = {}
    for variant in VARIANTS:
        runs = of_variant(records, variant)
        if runs:
            after = [score_of(run["after"]) for run in runs]
            summary[variant] = {
                "seeds": [run["seed"] for run in runs],
                "lowest": min(after),
                **{name: interval(scores) for name, scores in scores_by_condition(runs).items()},
                "usd": {name: usd_of(runs, name) for name in conditions_of(runs)},
                "by_kind": by_kind(runs),
                "right_worker": [
                    [run[when]["right_worker"] for when in ("before", "after")] for run in runs
                ],
            }
    return summary


def score_of(measured: Mapping[str, Any]) -> float:
    """Exact match over the questions whose rollout did not fail."""
    scored = len(measured["correct"]) - measured.get("failed", 0)
    return measured["correct"].count("1") / max(1, scored)


def conditions_of(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of what each run measured of its conductor: `before`, `after` and the trials."""
    return [
        name for name, value in runs[0].items() if isinstance(value, Mapping) and "correct" in value
    ]


def scores_by_condition(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Exact match of each seed, by condition."""
    return {name: [score_of(run[name]) for run in runs] for name in conditions_of(runs)}


def usd_of(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean dollars of a question under a condition."""
    return round(sum(run[name]["usd"] for run in runs) / len(runs), 6)


def variants_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Score and dollars of each variant's conductor under its conditions, with what the protocol expects."""
    rows = []
    for (variant, condition), title in CONDITION_TITLES.items():
        runs = of_variant(records, variant)
        if not runs:
            continue
        scores = scores_by_condition(runs)[condition]
        promise = PROMISES.get((variant, condition))
        verdict = ""
        if promise is not None:
            kept = sum(scores) / len(scores) >= promise
            verdict = f"at least {promise:.2f}: {'kept' if kept else '**missed**'}"
        usd = f"{1000 * usd_of(runs, condition):.2f}"
        rows.append([title, len(runs), shown(scores), usd, verdict])
    if not rows:
        return "No run of it has been recorded yet."
    return markdown(
        ("conductor", "seeds", "exact match", "$ per 1,000 questions", "protocol"), rows
    )


def handed_on_by(kind: str) -> str:
    """What questions of this kind pass from one worker to the next; empty if they take a single call."""
    if kind == "record":
        return "hands on a record of twelve"
    # A kind has a letter for each of its calls.
    return "hands on a value of one word" if len(kind) > 1 else ""


def retyping_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Exact match with references and with retyping, over the seeds that both have."""
    references = {run["seed"]: run for run in of_variant(records, "references")}
    retyping = {run["seed"]: run for run in of_variant(records, "retyping")}
    seeds = sorted(references.keys() & retyping.keys())
    if not seeds:
        return "No run of it has been recorded yet."
    rows = []
    for handed_on, promised_loss in RETYPING_LOSSES.items():
        scores = []
        for runs in (references, retyping):
            results = [
                int(result)
                for seed in seeds
                for kind, result in zip(
                    runs[seed]["kinds"], runs[seed]["after"]["correct"], strict=True
                )
                if handed_on_by(kind) == handed_on
            ]
            scores.append(sum(results) / len(results))
        loss = scores[0] - scores[1]
        verdict = "kept" if loss >= promised_loss else "**missed**"
        promise = f"at least {promised_loss:.2f} lower: {verdict}"
        rows.append([handed_on, len(seeds), *(f"{score:.2f}" for score in scores), promise])
    return markdown(("question", "seeds", "references", "retyping", "protocol"), rows)


def budget_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Score and dollars of conductor and scripts in the world with a cheap twin, by dollars.

    By the third protocol, if it was run.
    """
    runs = of_variant(records, "budget-early") or of_variant(records, "budget")
    if not runs:
        return "No run of it has been recorded yet."
    titles = {
        "before": "conductor, untrained",
        "low": "conductor, `low`",
        "after": "conductor, `high`",
    }
    systems = {title: [run[condition] for run in runs] for condition, title in titles.items()}
    for name in runs[0]["baselines"]:
        systems[name] = [run["baselines"][name] for run in runs]
    # Order the systems by their dollars.
    usd = {
        name: sum(entry["usd"] for entry in entries) / len(entries)
        for name, entries in systems.items()
    }
    rows = []
    for name in sorted(systems, key=lambda system: usd[system]):
        scores = [score_of(entry) for entry in systems[name]]
        rows.append([name, f"{1000 * usd[name]:.2f}", shown(scores)])
    # The promise of the dollars.
    dollar_share = usd[titles["low"]] / usd[titles["after"]] if usd[titles["after"]] else 1.0
    verdict = "kept" if dollar_share <= MAX_DOLLAR_SHARE else "**missed**"
    promise = f"at most {MAX_DOLLAR_SHARE:.2f}: {verdict}"
    rows.append(["dollars of `low` as a share of `high`", f"{dollar_share:.2f}", promise])
    return markdown(("system", "$ per 1,000 questions", "exact match"), rows)
