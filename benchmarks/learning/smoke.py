"""Whether learning works at all: continuous integration checks two short runs in the sandbox.

    make demo
    agentic-prompting demo --method espl --output-dir runs/espl --max-steps 10
    python -m benchmarks.learning.smoke runs/demo/summary.json runs/espl/summary.json

Ends with an error unless three things hold. Prompt-R1's exact match on unseen countries rises from at most .5 to at
least .85. E-SPL's policy under its best prompt scores higher than before training, and than under the first prompt,
with intervals that do not overlap. E-SPL's ratings agree with the rewards. `learning_broken.py` shows that the checks
notice a mistake.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

START = 0.5
END = 0.85
# share of pairs; rewards this close are equal
AGREEMENT = 0.75
TIE = 0.01


def agreement(ratings: Mapping[int, float], rollouts: Iterable[Mapping[str, Any]]) -> float:
    """The share of pairs of prompts that the final ratings order as the rewards of their common batch do.

    In a batch all prompts have the same problems and the same weights, so that its rewards compare prompts alone.

    Args:
        ratings (`dict[int, float]`): μ by the prompt's id.
        rollouts (`Iterable[dict]`): The training's records: `mode`, `step`, `system_prompt`, `reward`.
    """
    rewards: dict[int, dict[int, list[float]]] = {}
    for rollout in rollouts:
        if rollout["mode"] == "train" and rollout["reward"] is not None:
            rewards.setdefault(rollout["step"], {}).setdefault(rollout["system_prompt"], []).append(
                rollout["reward"]
            )
    agree = [
        (ratings[better] - ratings[worse]) * (mean[better] - mean[worse]) > 0
        for batch in rewards.values()
        for mean in [{prompt: statistics.fmean(values) for prompt, values in batch.items()}]
        for better, worse in combinations(mean, 2)
        if abs(mean[better] - mean[worse]) > TIE
    ]
    return statistics.fmean(agree) if agree else 0.0


def agreement_in(run: Path) -> float:
    """[`agreement`] in an E-SPL run's folder."""
    from agentic_prompting.rollout import read_rollouts

    members = json.loads((run / "population.json").read_text(encoding="utf-8"))["population"][
        "members"
    ]
    return agreement(
        {member["prompt"]["id"]: member["rating"][0] for member in members},
        read_rollouts(run / "rollouts"),
    )


def problems(demo: Mapping[str, Any], espl: Mapping[str, Any], agree: float) -> list[str]:
    """The problems in the two runs' summaries and in the agreement of the second; an empty list if learning works."""
    before = demo["exact_match_before"]
    after = demo["exact_match_after"]
    start, first, end = (
        espl["exact_match"][f"policy {row} prompt"]
        for row in ("before, initial", "after, initial", "after, best")
    )
    found = []
    if before > START:
        found.append(
            f"Prompt-R1 starts at {before:.3f}, above {START}: there is too little left to learn"
        )
    if after < END:
        found.append(f"Prompt-R1 ends at {after:.3f}, below {END}")
    if demo["failed_rollouts"]:
        found.append(f"{demo['failed_rollouts']} rollouts failed beside an oracle that never does")
    if end[1] <= start[2]:
        found.append(
            f"E-SPL ends at {end}, not above its start, {start}: mean and ends of the interval"
        )
    if end[1] <= first[2]:
        found.append(f"E-SPL's best prompt does no better than its first: {end} and {first}")
    if agree < AGREEMENT:
        found.append(
            f"E-SPL's ratings order {agree:.2f} of the pairs as their rewards do, less than {AGREEMENT}"
        )
    return found


def main() -> None:
    demo, espl = map(Path, sys.argv[1:])
    agree = agreement_in(espl.parent)
    problem_texts = problems(
        *(json.loads(one.read_text(encoding="utf-8")) for one in (demo, espl)), agree
    )
    print(
        "\n".join(problem_texts)
        or "learning works: Prompt-R1's demo and E-SPL's smallest run end above their starts"
    )
    sys.exit(bool(problem_texts))


if __name__ == "__main__":
    main()
