"""Headroom of ProRefine: how many wrong answers a refinement repairs, and how many right ones it breaks."""

from __future__ import annotations

from dataclasses import dataclass

from numpy.typing import ArrayLike

from ..repeats import RIGHT
from ..scoring import Estimate
from .prompts import Verdict, complete_rows, decide, paired_gain, rows_needed


@dataclass(frozen=True)
class RefineHeadroom:
    """What refining the prompt for each question gains.

    Args:
        gain ([`Estimate`]): Refined minus plain answers, on the same rows.
        verdict (`str`): As in [`PromptHeadroom`].
        delta (`float`): The smallest gain that would be worth it.
        rows_needed (`int`): Rows at which `delta` could be shown, or excluded where there is no gain.
        plain (`float`), refined (`float`): Mean scores.
        wrong (`int`), repaired (`int`): Plain answers that are not right, and those of them that a refinement repairs.
        right (`int`), broken (`int`): Right plain answers, and those of them that a refinement breaks.
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
        """The verdict in one sentence."""
        interval = f"{self.gain.mean:+.3f} [{self.gain.low:+.3f}, {self.gain.high:+.3f}] on {self.gain.n} rows"
        counts = f"{self.repaired} of {self.wrong} wrong answers repaired, {self.broken} of {self.right} right ones broken"
        if self.verdict == "cannot tell":
            return f"cannot tell at this budget: refining gains {interval}; {counts}; {self.rows_needed} rows could tell"
        return f"{self.verdict}: refining gains {interval}; {counts}"


def judge_refinement(scores: ArrayLike, delta: float) -> RefineHeadroom:
    """The headroom of ProRefine, from the scores of plain and refined answers.

    Args:
        scores (`ArrayLike` of shape (rows, 2)): Plain and refined; NaN where there is none, whose row is left out.
        delta (`float`): The smallest gain that would be worth it.

    Raises:
        [`TooFewScores`]: Fewer than two rows have both scores.
    """
    gain = paired_gain(scores)
    table = complete_rows(scores)
    plain_right = table[:, 0] >= RIGHT
    refined_right = table[:, 1] >= RIGHT
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
