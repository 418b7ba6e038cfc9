"""Whether learning works at all: continuous integration checks two short runs in the sandbox.

    make demo
    agentic-prompting demo --method espl --output-dir runs/espl --max-steps 10
    python -m benchmarks.learning.smoke runs/demo/summary.json runs/espl/summary.json

Ends with an error unless three things hold. Prompt-R1's exact match on unseen countries rises from
at most .5 to at least .85. E-SPL's policy under its best prompt scores higher than before training,
and than under the first prompt, with intervals that do not overlap. E-SPL's ratings agree with the
rewards. `learning_broken.py` shows that the checks notice a mistake.
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
    """The share of pairs of prompts that the final ratings order as the rewards of their common
    batch do.

    In a batch all prompts have the same problems and the same weights, so that its rewards compare
    prompts alone.

    Args:
        ratings (`dict[int, float]`): μ by the prompt's id.
        rollouts (`Iterable[dict]`): The training's records: `mode`, `step`, `system_prompt`,
            `reward`.
    """
    # By step and prompt the rewards of its rollouts.
    rewards: dict[int, dict[int, list[float]]] = {}
    for rollout in rollouts:
        if rollout["mode"] == "train" and rollout["reward"] is not None:
            of_prompt = rewards.setdefault(rollout["step"], {})
            of_prompt.setdefault(rollout["system_prompt"], []).append(rollout["reward"])

    agrees = []
    for batch in rewards.values():
        means = {prompt: statistics.fmean(values) for prompt, values in batch.items()}
        for prompt, other_prompt in combinations(means, 2):
            reward_gap = means[prompt] - means[other_prompt]
            if abs(reward_gap) > TIE:
                rating_gap = ratings[prompt] - ratings[other_prompt]
                agrees.append(rating_gap * reward_gap > 0)
    return statistics.fmean(agrees) if agrees else 0.0


def agreement_in(run: Path) -> float:
    """[`agreement`] in an E-SPL run's folder."""
    from agentic_prompting.rollout import read_rollouts

    checkpoint = json.loads((run / "population.json").read_text(encoding="utf-8"))
    ratings = {}
    for member in checkpoint["population"]["members"]:
        ratings[member["prompt"]["id"]] = member["rating"][0]
    return agreement(ratings, read_rollouts(run / "rollouts"))


def problems(demo: Mapping[str, Any], espl: Mapping[str, Any], agree: float) -> list[str]:
    """The problems in the two runs' summaries and in the agreement of the second; an empty list if
    learning works.
    """
    before = demo["exact_match_before"]
    after = demo["exact_match_after"]
    # Mean and ends of the interval.
    start = espl["exact_match"]["policy before, initial prompt"]
    first_prompt = espl["exact_match"]["policy after, initial prompt"]
    best_prompt = espl["exact_match"]["policy after, best prompt"]
    complaints = []
    if before > START:
        complaints.append(
            f"Prompt-R1 starts at {before:.3f}, above {START}: there is too little left to learn"
        )
    if after < END:
        complaints.append(f"Prompt-R1 ends at {after:.3f}, below {END}")
    if demo["failed_rollouts"]:
        complaints.append(
            f"{demo['failed_rollouts']} rollouts failed beside an oracle that never does"
        )
    if best_prompt[1] <= start[2]:
        complaints.append(
            f"E-SPL ends at {best_prompt}, not above its start, {start}: mean and ends of the "
            "interval"
        )
    if best_prompt[1] <= first_prompt[2]:
        complaints.append(
            f"E-SPL's best prompt does no better than its first: {best_prompt} and {first_prompt}"
        )
    if agree < AGREEMENT:
        complaints.append(
            f"E-SPL's ratings order {agree:.2f} of the pairs as their rewards do, less than "
            f"{AGREEMENT}"
        )
    return complaints


def main() -> None:
    demo_path, espl_path = map(Path, sys.argv[1:])
    demo = json.loads(demo_path.read_text(encoding="utf-8"))
    espl = json.loads(espl_path.read_text(encoding="utf-8"))
    complaints = problems(demo, espl, agreement_in(espl_path.parent))
    print(
        "\n".join(complaints)
        or "learning works: Prompt-R1's demo and E-SPL's smallest run end above their starts"
    )
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
