"""The held-out scores of evolved prompts: the interval of each, and the best prompt against the
first one on the same questions.
"""

from __future__ import annotations

import math

from ..evolution import Member
from ..llm.numbers import count_in_words
from .intervals import Estimate, PairedDifference, estimate_mean, paired_difference


def estimate_held_out(member: Member) -> Estimate | None:
    """Return a prompt's mean reward on held-out questions with its 95 % interval.

    Returns:
        [`Estimate`]: `None` without a measurement. Files of older versions have no scores by
            question: the interval is then mean ± 1.96 standard errors, or the mean alone.
    """
    if member.held_out is None:
        return None
    if member.held_out_scores is not None:
        scores = [score for score in member.held_out_scores if score is not None]
        return estimate_mean(scores, is_share=True)
    mean = member.held_out["mean"]
    n = int(member.held_out.get("n", 1))
    half_width = 1.96 * member.held_out.get("deviation", 0.0) / math.sqrt(n)
    return Estimate(mean, mean - half_width, mean + half_width, n)


def measure_held_out_gain(first: Member, best: Member) -> PairedDifference | None:
    """Return the paired difference of two prompts' mean rewards on held-out questions, best -
    first.

    Args:
        first ([`Member`]), best ([`Member`]): The prompts that a run began and ended with.

    Returns:
        [`PairedDifference`]: `None` if one of them has no scores by question (files of older
            versions have none), or if they share no scored question.
    """
    if first.held_out_scores is None or best.held_out_scores is None:
        return None
    scores: list[dict[int, float]] = []
    for member_scores in (best.held_out_scores, first.held_out_scores):
        scores.append(
            {number: score for number, score in enumerate(member_scores) if score is not None}
        )
    best_scores, first_scores = scores
    if not set(best_scores) & set(first_scores):
        return None
    return paired_difference(best_scores, first_scores)


def describe_held_out_gain(first: Member, best: Member) -> str:
    """Return the paired difference and what it shows, on one line; empty if it is not known."""
    paired = measure_held_out_gain(first, best)
    if paired is None:
        return ""
    if first.prompt.id == best.prompt.id:
        return "no gain was shown: the best prompt is still the first one"
    difference = paired.difference
    text = (
        f"difference, paired: {difference.mean:+.3f} [{difference.low:+.3f}, "
        f"{difference.high:+.3f}] over {count_in_words(difference.n, 'question')}, {paired.wins} "
        f"better, {paired.losses} worse, {paired.ties} the same"
    )
    if difference.high < 0:
        return f"{text}; the best prompt by rating is worse than the first one"
    if difference.low <= 0:
        return f"{text}; no gain was shown: the interval contains 0"
    return text
