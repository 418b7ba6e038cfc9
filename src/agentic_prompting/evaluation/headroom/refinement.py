"""Headroom of ProRefine: how many wrong answers a refinement repairs, and how many right ones it
breaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from numpy.typing import ArrayLike

from ...llm.numbers import count_in_words
from ..intervals import Estimate
from ..repeats import RIGHT
from .prompts import Verdict, complete_rows, decide, paired_gain, rows_needed


@dataclass(frozen=True)
class RefineHeadroom:
    """The gain of refining the prompt for each question.

    Args:
        gain ([`Estimate`]): Score of refined minus plain answers on the same rows.
        verdict (`str`): Verdict, as in [`PromptHeadroom`].
        delta (`float`): The smallest gain that would be worth it.
        rows_needed (`int`): Number of rows that could show a gain of `delta`, or exclude it if
            there is no gain.
        plain (`float`), refined (`float`): Mean scores.
        wrong (`int`), repaired (`int`): Number of wrong plain answers, and how many the refinement
            repairs.
        right (`int`), broken (`int`): Number of right plain answers, and how many the refinement
            breaks.
    """

    gain: Estimate
    verdict: Verdict
    delta: float
    rows_needed: int
    plain: float
    refined: float
    wrong: int
    repaired: int
    right: int
    broken: int

    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        interval = (
            f"{self.gain.mean:+.3f} [{self.gain.low:+.3f}, {self.gain.high:+.3f}] on "
            f"{count_in_words(self.gain.n, 'row')}"
        )
        counts = (
            f"{self.repaired} of {self.wrong} wrong answers repaired, {self.broken} of "
            f"{self.right} right ones broken"
        )
        if self.verdict == "cannot tell":
            return (
                f"cannot tell at this budget: refining gains {interval}; {counts}; "
                f"{count_in_words(self.rows_needed, 'row')} could tell"
            )
        return f"{self.verdict}: refining gains {interval}; {counts}"


def judge_refinement(scores: ArrayLike, delta: float) -> RefineHeadroom:
    """Return the headroom of ProRefine, computed from the scores of plain and refined answers.

    Args:
        scores (`ArrayLike` of shape (rows, 2)): Scores of plain and refined answers; NaN for a
            missing score, whose row is left out.
        delta (`float`): The smallest gain that would be worth it.

    Raises:
        [`TooFewScores`]: If fewer than two rows have both scores.
    """
    gain = paired_gain(scores)

    # Which answers are right before and after the refinement.
    table = complete_rows(scores)
    plain_right = table[:, 0] >= RIGHT
    refined_right = table[:, 1] >= RIGHT
    # Mean scores before and after the refinement.
    plain, refined = table.mean(axis=0)
    return RefineHeadroom(
        gain=gain.estimate,
        verdict=decide(gain.estimate, delta),
        delta=delta,
        rows_needed=rows_needed(gain.variance, delta),
        plain=float(plain),
        refined=float(refined),
        wrong=int((~plain_right).sum()),
        repaired=int((~plain_right & refined_right).sum()),
        right=int(plain_right.sum()),
        broken=int((plain_right & ~refined_right).sum()),
    )
