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
"""Dollars under the budget `low` that the protocol expects at most, as a share of those under
`high`.
"""


def of_variant(records: Sequence[Mapping[str, Any]], variant: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record["variant"] == variant]


def by_kind(records: Sequence[Mapping[str, Any]], when: str = "after") -> dict[str, float]:
    """Exact match of each type of question, over all seeds."""
    results: dict[str, list[int]] = defaultdict(list)
    for record in records:
        for question_type, result in zip(record["kinds"], record[when]["correct"], strict=True):
            results[question_type].append(int(result))
    scores = {}
    for question_type in sorted(results):
        values = results[question_type]
        scores[question_type] = round(sum(values) / len(values), 3)
    return scores


def systems_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Score and dollars of the conductor and of the baselines, and the difference to each, paired
    by seed.
    """
    records = of_variant(records, "references")
    if not records:
        return "no records"
    after = [share(record["after"]["correct"]) for record in records]
    systems: dict[str, list[Mapping[str, Any]]] = {}
    for name in BASELINES:
        systems[name] = [record["baselines"][name] for record in records]
    systems["conductor, untrained"] = [record["before"] for record in records]
    systems["conductor, trained"] = [record["after"] for record in records]
    systems["conductor, digits replaced"] = [record["replaced"] for record in records]
    rows = []
    for name, measured in systems.items():
        scores = [share(entry["correct"]) for entry in measured]
        usd = sum(entry["usd"] for entry in measured) / len(measured)
        gains = [ours - score for ours, score in zip(after, scores, strict=True)]
        row = [name, shown(scores), f"{1000 * usd:.2f}", shown(gains, "+")]
        if name == "conductor, trained":
            row[-1] = ""
        rows.append(row)
    return markdown(
        ("system", "exact match", "$ per 1,000 questions", "trained conductor minus it"),
        rows,
    )


def kinds_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Exact match of each type of question before and after training, over all seeds."""
    records = of_variant(records, "references")
    before = by_kind(records, "before")
    after = by_kind(records)
    rows = [[name, f"{before[name]:.2f}", f"{score:.2f}"] for name, score in after.items()]
    return markdown(("kind of question", "untrained", "trained"), rows)


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the promise."""
    summary: dict[str, Any] = {}
    for variant in VARIANTS:
        runs = of_variant(records, variant)
        if not runs:
            continue
        scores = scores_by_condition(runs)
        right_worker = []
        for run in runs:
            right_worker.append([run["before"]["right_worker"], run["after"]["right_worker"]])
        summary[variant] = {
            "seeds": [run["seed"] for run in runs],
            "lowest": min(scores["after"]),
            **{condition: interval(values) for condition, values in scores.items()},
            "usd": {condition: usd_of(runs, condition) for condition in scores},
            "by_kind": by_kind(runs),
            "right_worker": right_worker,
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
    scores = {}
    for condition in conditions_of(runs):
        scores[condition] = [score_of(run[condition]) for run in runs]
    return scores


def usd_of(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean dollars of a question under a condition."""
    return round(sum(run[name]["usd"] for run in runs) / len(runs), 6)


def variants_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Score and dollars of each variant's conductor under its conditions, with what the protocol
    expects.
    """
    rows = []
    for (variant, condition), title in CONDITION_TITLES.items():
        runs = of_variant(records, variant)
        if not runs:
            continue
        scores = scores_by_condition(runs)[condition]
        promise = PROMISES.get((variant, condition))
        verdict = ""
        if promise is not None:
            mean_score = sum(scores) / len(scores)
            verdict = f"at least {promise:.2f}: {judge_promise(mean_score >= promise)}"
        usd = f"{1000 * usd_of(runs, condition):.2f}"
        rows.append([title, len(runs), shown(scores), usd, verdict])
    if not rows:
        return "No run of it has been recorded yet."
    return markdown(
        ("conductor", "seeds", "exact match", "$ per 1,000 questions", "protocol"), rows
    )


def judge_promise(is_kept: bool) -> str:
    """The table's word for a promise of the protocol."""
    return "kept" if is_kept else "**missed**"


def handed_on_by(question_type: str) -> str:
    """What questions of this type pass from one worker to the next; empty if they take a single
    call.
    """
    if question_type == "record":
        return "hands on a record of twelve"
    # The name of a type has a letter for each of its calls.
    return "hands on a value of one word" if len(question_type) > 1 else ""


def score_of_type(runs: Sequence[Mapping[str, Any]], handed_on: str) -> float:
    """Exact match after training on the questions that hand on the same, over some runs."""
    results = []
    for run in runs:
        for question_type, result in zip(run["kinds"], run["after"]["correct"], strict=True):
            if handed_on_by(question_type) == handed_on:
                results.append(int(result))
    return sum(results) / len(results)


def retyping_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Exact match with references and with retyping, over the seeds that both have."""
    references = {run["seed"]: run for run in of_variant(records, "references")}
    retyping = {run["seed"]: run for run in of_variant(records, "retyping")}
    seeds = sorted(references.keys() & retyping.keys())
    if not seeds:
        return "No run of it has been recorded yet."
    rows = []
    for handed_on, promised_loss in RETYPING_LOSSES.items():
        reference_score = score_of_type([references[seed] for seed in seeds], handed_on)
        retyping_score = score_of_type([retyping[seed] for seed in seeds], handed_on)
        verdict = judge_promise(reference_score - retyping_score >= promised_loss)
        scores = [f"{reference_score:.2f}", f"{retyping_score:.2f}"]
        promise = f"at least {promised_loss:.2f} lower: {verdict}"
        rows.append([handed_on, len(seeds), *scores, promise])
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
    systems = {}
    for condition, title in titles.items():
        systems[title] = [run[condition] for run in runs]
    for name in runs[0]["baselines"]:
        systems[name] = [run["baselines"][name] for run in runs]

    # Order the systems by their dollars.
    usd = {}
    for name, entries in systems.items():
        usd[name] = sum(entry["usd"] for entry in entries) / len(entries)
    rows = []
    for name in sorted(systems, key=lambda system: usd[system]):
        scores = [score_of(entry) for entry in systems[name]]
        rows.append([name, f"{1000 * usd[name]:.2f}", shown(scores)])

    # The promise of the dollars.
    dollar_share = 1.0
    if usd[titles["after"]]:
        dollar_share = usd[titles["low"]] / usd[titles["after"]]
    verdict = judge_promise(dollar_share <= MAX_DOLLAR_SHARE)
    promise = f"at most {MAX_DOLLAR_SHARE:.2f}: {verdict}"
    rows.append(["dollars of `low` as a share of `high`", f"{dollar_share:.2f}", promise])
    return markdown(("system", "$ per 1,000 questions", "exact match"), rows)
