"""The first league of E-SPL, of 2026-11-22: its tables, from its records.

`league.py` is the second.

Its records say at which commit each cell ran; the methods as they were then are in that commit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.lab import interval, markdown, share, shown

WORLDS = ("rules", "habits", "misleading")
METHODS = (
    "joint",
    "rl",
    "evolution",
    "GEPA, then GRPO",
    "warm start",
    "GRPO, then GEPA",
    "alternating",
    "joint, then distillation",
    "joint, mutation only",
    "reflection",
)
# The methods in the worlds after the first.
CORE = METHODS[:5]

# The outcomes that the protocol counts against us: the world, the outcome, and the test on
# differences from `joint`.
AGAINST: list[tuple[str, str, tuple[str, ...], Callable[[Mapping[str, float]], bool]]] = [
    (
        "rules",
        "joint training is not above RL and evolution alone",
        ("rl", "evolution"),
        lambda row: row["high"] >= 0,
    ),
    (
        "rules",
        "GEPA and then GRPO, or phases in turn, are as good",
        ("GEPA, then GRPO", "alternating"),
        lambda row: row["high"] >= 0,
    ),
    ("habits", "joint training is more than .05 below RL", ("rl",), lambda row: row["mean"] > 0.05),
    (
        "misleading",
        "joint training ends below its warm start",
        ("warm start",),
        lambda row: row["mean"] > 0,
    ),
    (
        "rules",
        "without crossover it is as good",
        ("joint, mutation only",),
        lambda row: row["high"] >= 0,
    ),
]


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Exact match, difference from `joint` paired by seed, and mean rollouts and calls of each
    world and method.
    """
    scores: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for record in records:
        methods = scores.setdefault(record["world"], {})
        methods.setdefault(record["method"], {})[record["seed"]] = record
    summary = {}
    for world, methods in scores.items():
        joint = methods.get("joint", {})
        summary[world] = {method: _row(by_seed, joint) for method, by_seed in methods.items()}
    return summary


def _row(
    of_seed: Mapping[int, Mapping[str, Any]], joint: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    shares = {seed: share(record["correct"]) for seed, record in of_seed.items()}
    differences = []
    for seed, score in shares.items():
        if seed in joint:
            differences.append(score - share(joint[seed]["correct"]))
    return {
        **interval(list(shares.values())),
        "minus_joint": interval(differences) if differences else None,
        "seeds": sorted(shares),
        "rollouts": round(statistics.fmean(record["rollouts"] for record in of_seed.values())),
        "calls": round(statistics.fmean(record["calls"] for record in of_seed.values())),
    }


def table(worlds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The worlds as a Markdown table."""
    rows = []
    for world, methods in worlds.items():
        for method in sorted(methods, key=METHODS.index):
            row = methods[method]
            cost = [f"{row['rollouts']:,}", f"{row['calls']:,}"]
            rows.append([world, method, shown(row), shown(row["minus_joint"], "+"), *cost])
        rows += [[world, method, "not run", *[""] * 3] for method in missing(world, methods)]
    return markdown(
        ("world", "method", "exact match [95 %]", "minus joint [95 %]", "rollouts", "calls"),
        rows,
    )


def verdicts(worlds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The place of joint training in each world, and whether the outcomes of `AGAINST` came true."""
    lines = []
    for world, methods in worlds.items():
        if "joint" in methods:
            order = sorted(methods, key=lambda method: -methods[method]["mean"])
            rank = order.index("joint") + 1
            standing = f"first of {len(order)}"
            if rank > 1:
                standing = f"not first but number {rank} of {len(order)}; first is {order[0]}"
            lines.append(f"- *{world}*: joint training is {standing}.")

    for world, outcome, compared_methods, counts_against in AGAINST:
        # Each method's difference from joint training; without an interval nothing is decided.
        differences: dict[str, Mapping[str, float]] = {}
        for method in compared_methods:
            row = worlds.get(world, {}).get(method, {})
            difference = row.get("minus_joint")
            if difference is not None and difference["low"] is not None:
                differences[method] = difference
        if len(differences) < len(compared_methods):
            lines.append(f"- Not decided yet: {outcome}.")
            continue
        came_true = any(map(counts_against, differences.values()))
        verdict = "**Against us**" if came_true else "Not so"
        listed = ", ".join(f"{method} {shown(row, '+')}" for method, row in differences.items())
        lines.append(f"- {verdict}: {outcome}. Minus joint: {listed}.")
    return "\n".join(lines)


def missing(world: str, methods: Iterable[str]) -> list[str]:
    """The protocol's methods for a world that are missing among `methods`."""
    expected = METHODS if world == WORLDS[0] else CORE
    return [method for method in expected if method not in methods]
