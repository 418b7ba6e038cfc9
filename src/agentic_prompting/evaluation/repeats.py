"""Statistics of several answers to one question beyond their mean: pass@k, the majority's answer,
their spread.

Pure functions of scores. A run that failed has no score and does not count as an attempt: a
question with fewer than k scored runs is left out of every statistic that needs k of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from statistics import fmean, stdev
from typing import Any

from ..rewards import normalize_answer
from .answer_records import row_index_of

RIGHT = 1.0 - 1e-6
"""The lowest score of a right answer.

Floating-point sums that stand for 1 are slightly below it.
"""


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the probability that at least one of `k` answers, drawn from `n` without replacement,
    is right.

    The unbiased estimator of pass@k: 1 - C(n - right, k) / C(n, k) (Chen et al. 2021, arXiv
    2107.03374).

    Args:
        n (`int`): Number of answers that have a score.
        right (`int`): Number of right answers.
        k (`int`): Number of answers drawn, from 1 to `n`.

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
    """Return the mean pass@k of groups of scores, or `None` if no group has `k` scores.

    Args:
        groups (`Iterable`): Scores of each question's answers; `None` or NaN for an answer without
            a score.
        k (`int`): Number of answers drawn, as in [`pass_at_k`].
    """
    estimates = []
    # A question with fewer than k scored answers has no pass@k.
    for group in groups:
        scores = [score for score in group if score is not None and score == score]  # not NaN
        if len(scores) >= k:
            estimates.append(pass_at_k(len(scores), _count_right(scores), k))
    return fmean(estimates) if estimates else None


def passes(groups: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """`pass@k` of groups of scores, for k = 1, 2, 4, ... and the size of the largest group.

    Empty if no group has two scores.
    """
    largest = max(map(len, groups), default=0)
    if largest < 2:
        return {}
    # Powers of two up to the largest group, and the largest group itself.
    powers_of_two = {2**power for power in range(largest.bit_length())}
    values = {}
    for k in sorted(powers_of_two | {largest}):
        mean = mean_pass_at(groups, k)
        if mean is not None:
            values[f"pass@{k}"] = mean
    return values


def repeat_values(
    records: Sequence[Mapping[str, Any]], scores: Sequence[float | None], is_binary: bool
) -> dict[str, dict[int, float]]:
    """Statistics of the runs of each question, by name and by the question's index.

    Args:
        records (`Sequence[Mapping]`): Answers, with `run`, `place` (the question's index) and
            `answer`.
        scores (`Sequence`): The score of each answer in one metric; `None` for an answer without a
            score.
        is_binary (`bool`): Whether the metric is 0 or 1. Only such a metric has pass@k and a
            majority.

    Returns:
        `dict[str, dict[int, float]]`: For k runs `pass@1` to `pass@k`; `majority@k`, the score of
            the most frequent answer (answers are equal if [`normalize_answer`] makes them so; of
            several answers that are equally frequent, their mean score); and `spread`, the standard
            deviation of a question's scores (of two or more). Empty for a single run.
    """
    n_runs = len({record["run"] for record in records})
    if n_runs < 2:
        return {}

    # Answers and scores of each question, in the order of the questions.
    answers_by_question: dict[int, list[str | None]] = defaultdict(list)
    scores_by_question: dict[int, list[float]] = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        if score is not None:
            row_index = row_index_of(record)
            answers_by_question[row_index].append(record.get("answer"))
            scores_by_question[row_index].append(score)
    questions = sorted(scores_by_question)

    # The names in the order of the table's columns.
    statistics: dict[str, dict[int, float]] = {}
    if is_binary:
        for k in range(1, n_runs + 1):
            statistics[f"pass@{k}"] = {}
        statistics[f"majority@{n_runs}"] = {}
    statistics["spread"] = {}

    # The statistics of each question, as far as it has enough scored runs.
    for question in questions:
        question_scores = scores_by_question[question]
        n_scores = len(question_scores)
        if n_scores > 1:
            statistics["spread"][question] = stdev(question_scores)
        if not is_binary:
            continue
        n_right = _count_right(question_scores)
        for k in range(1, n_scores + 1):
            statistics[f"pass@{k}"][question] = pass_at_k(n_scores, n_right, k)
        # A majority is taken only over all runs.
        if n_scores == n_runs:
            majority = _score_majority(answers_by_question[question], question_scores)
            statistics[f"majority@{n_runs}"][question] = majority
    return statistics


def _count_right(scores: Iterable[float]) -> int:
    return sum(score >= RIGHT for score in scores)


def _score_majority(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Return the score of the most frequent answer, or 0 if no run has an answer.

    A run without an answer has no vote.
    """
    # The scores of equal answers, by normalised answer.
    votes: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes[normalize_answer(str(answer))].append(score)
    if not votes:
        return 0.0
    # The mean score of the most frequent answer. Several that are equally frequent count equally.
    most_votes = max(map(len, votes.values()))
    return fmean(fmean(scores) for scores in votes.values() if len(scores) == most_votes)
