"""Statistics of several answers to one question beyond their mean: pass@k, the majority's answer, and their spread.

Pure functions of scores. A run that failed has no score and is no attempt: a question with fewer than k scored runs is
in no number that takes k of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from statistics import fmean, stdev
from typing import Any

from ..rewards import normalize_answer

RIGHT = 1.0 - 1e-6
"""A score from here on is a right answer; floating-point sums that stand for 1 are a little below."""


def pass_at_k(n: int, right: int, k: int) -> float:
    """The probability that at least one of `k` answers, drawn from `n` without replacement, is right.

    The unbiased estimator of pass@k: 1 - C(n - right, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    Args:
        n (`int`): Answers that have a score.
        right (`int`): How many of them are right.
        k (`int`): Answers drawn, from 1 to `n`.

    Raises:
        `ValueError`: If `right` is not in [0, n] or `k` not in [1, n].

    Example:

        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(
            f"expected 0 <= right <= n and 1 <= k <= n, got n={n}, right={right}, k={k}"
        )
    return 1.0 - comb(n - right, k) / comb(n, k)


def mean_pass_at(groups: Iterable[Sequence[float | None]], k: int) -> float | None:
    """The mean pass@k of groups of scores; `None` if no group has `k` of them.

    Args:
        groups (`Iterable`): The scores of each question's answers; `None` or NaN where an answer has none.
        k (`int`): As in [`pass_at_k`].
    """
    known = [[score for score in group if score is not None and score == score] for group in groups]
    found = [
        pass_at_k(len(one), sum(score >= RIGHT for score in one), k)
        for one in known
        if len(one) >= k
    ]
    return fmean(found) if found else None


def passes(groups: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """`pass@k` of groups of scores, for k = 1, 2, 4, ... and the size of the largest; empty where none has two."""
    most = max(map(len, groups), default=0)
    sizes = sorted({2**power for power in range(most.bit_length())} | {most}) if most > 1 else []
    found = {f"pass@{k}": mean_pass_at(groups, k) for k in sizes}
    return {name: value for name, value in found.items() if value is not None}


def repeat_values(
    records: Sequence[Mapping[str, Any]], scores: Sequence[float | None], is_binary: bool
) -> dict[str, dict[int, float]]:
    """Statistics of the runs of each question, by name and by the question's place.

    Args:
        records (`Sequence[Mapping]`): Answers, with `run`, `place` and `answer`.
        scores (`Sequence`): One metric's score of each; `None` where there is none.
        is_binary (`bool`): Whether the metric is 0 or 1. Only such a metric has pass@k and a majority.

    Returns:
        `dict[str, dict[int, float]]`: For k runs `pass@1` to `pass@k`; `majority@k`, the score of the answer that most
        runs give (equal after [`normalize_answer`]; the mean score of those answers that are given equally often); and
        `spread`, the standard deviation of a question's scores (two at least). Empty for a single run.
    """
    k = len({record["run"] for record in records})
    if k < 2:
        return {}
    runs: dict[int, list[tuple[str | None, float]]] = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        if score is not None:
            runs[record["place"]].append((record.get("answer"), score))
    by_place = dict(sorted(runs.items()))
    values = {
        "spread": {
            at: stdev(score for _, score in one) for at, one in by_place.items() if len(one) > 1
        }
    }
    if not is_binary:
        return values
    passes = {
        f"pass@{j}": {
            at: pass_at_k(len(one), sum(score >= RIGHT for _, score in one), j)
            for at, one in by_place.items()
            if len(one) >= j
        }
        for j in range(1, k + 1)
    }
    return {
        **passes,
        f"majority@{k}": {at: _majority(one) for at, one in by_place.items() if len(one) == k},
        **values,
    }


def _majority(answered: Sequence[tuple[str | None, float]]) -> float:
    """The score of the most frequent answer. A run without an answer has no vote; the score is 0 if no run has one."""
    votes: dict[str, list[float]] = defaultdict(list)
    for answer, score in answered:
        if answer is not None:
            votes[normalize_answer(str(answer))].append(score)
    most = max(map(len, votes.values()), default=0)
    return (
        fmean(fmean(of_one) for of_one in votes.values() if len(of_one) == most) if votes else 0.0
    )
