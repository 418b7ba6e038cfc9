"""Does GRPO have a signal here? What an untrained agent's groups of rollouts say about it.

A group whose rewards are all the same has no advantage and no gradient. From g rollouts of each row the share of groups
of G <= g rollouts that differ, and pass@k for k <= g, are known without bias: they are the shares of subsets of the g
(U-statistics, Hoeffding 1948; pass@k as in Chen et al. 2021, arXiv 2107.03374):

    differ(G) = mean over rows of 1 - sum over rewards v of C(c_v, G) / C(g, G)        c_v of the g rewards are v
    pass@k    = mean over rows of 1 - C(g - c, k) / C(g, k)                            c of the g are right

For G > g only bounds are known (Lord 1969): measure with the group size that training will have. Rows are the sample of
every interval: Wilson's where each row's statistic is 0 or 1, else the t interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance

from ..repeats import RIGHT, pass_at_k
from ..scoring import Estimate, wilson_interval
from .prompts import LEVEL, Verdict, t_quantile

LEAST_SHARE = 0.1
"""Training is worth it where at least a tenth of the groups has a gradient."""

_LOST_TO_FORM = ("malformed", "truncated")


@dataclass(frozen=True)
class GroupSignal:
    """The signal for GRPO in an untrained agent's rollouts.

    Args:
        group_size (`int`): The planned number of rollouts of a group.
        measured_size (`int`): The largest number of scored rollouts that a row has.
        rows (`int`), rollouts (`int`): Rows with a scored rollout, and rollouts of all rows.
        differing ([`Estimate`], *optional*): The share of groups of the planned size whose rewards differ; `None` if
            nothing was scored.
        extrapolated (`bool`): Whether the planned size is larger than the measured one. The share is then a lower
            bound, and 1 the upper one.
        pass_at (`dict[int, Estimate]`): pass@k, by k.
        always_right (`float`), never_right (`float`): Shares of rows whose rollouts are all right, or all not.
        lost_to_form ([`Estimate`], *optional*): The share of rollouts that were malformed or cut off.
        failed ([`Estimate`], *optional*): The share of rollouts that an outage ended.
    """

    group_size: int
    measured_size: int
    rows: int
    rollouts: int
    differing: Estimate | None
    extrapolated: bool
    pass_at: dict[int, Estimate] = field(default_factory=dict)
    always_right: float = 0.0
    never_right: float = 0.0
    lost_to_form: Estimate | None = None
    failed: Estimate | None = None

    @property
    def verdict(self) -> Verdict:
        """`worth it` where surely a tenth of the groups has a gradient, `not worth it` where surely fewer have."""
        if self.differing is None:
            return "cannot tell"
        if self.differing.low > LEAST_SHARE:
            return "worth it"
        if self.differing.high < LEAST_SHARE:
            return "not worth it"
        return "cannot tell"

    def advice(self) -> str:
        """What would have to change for more groups to have a gradient, the cheapest first; may be empty."""
        if self.verdict == "worth it" or self.differing is None:
            return ""
        if self.lost_to_form is not None and self.lost_to_form.mean > 0.5:
            return "most rollouts are lost to form: begin with a warm start, or allow longer turns"
        if self.never_right > 0.5:
            return f"{self.never_right:.0%} of the rows are never solved: take easier rows, or a warm start"
        if self.always_right > 0.5:
            return f"{self.always_right:.0%} of the rows are always solved: take harder rows"
        return "take more rollouts a group, and measure with as many"

    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.differing is None:
            return "cannot tell: no rollout has a reward"
        share = f"{self.differing.mean:.0%} [{self.differing.low:.0%}, {self.differing.high:.0%}]"
        bound = " or more" if self.extrapolated else ""
        advice = self.advice()
        return (
            f"{self.verdict}: {share}{bound} of groups of {self.group_size} have rewards that differ"
            f"{f'; {advice}' if advice else ''}"
        )


def measure_groups(
    rewards: Sequence[Sequence[float | None]],
    group_size: int,
    statuses: Sequence[Sequence[str]] | None = None,
) -> GroupSignal:
    """The signal in the rewards of several rollouts of each row.

    Args:
        rewards (`Sequence[Sequence[float]]`): By row, the reward of each rollout; `None` or NaN where it has none. A
            reward of 1 is right.
        group_size (`int`): The planned number of rollouts of a group; two at least.
        statuses (`Sequence[Sequence[str]]`, *optional*): How each of these rollouts ended ([`Rollout`]'s `status`).

    Raises:
        `ValueError`: A group of fewer than two, or no rows.
    """
    if group_size < 2:
        raise ValueError(f"a group has two rollouts at least, got {group_size}")
    if not rewards:
        raise ValueError("there are no rows")
    scored = [
        [float(reward) for reward in row if reward is not None and reward == reward]
        for row in rewards
    ]
    scored = [row for row in scored if row]
    measured_size = max(map(len, scored), default=0)

    # A row with fewer scored rollouts than the subsets take is in no number that takes them.
    size = min(group_size, measured_size)
    shares = [share_of_differing_groups(row, size) for row in scored if len(row) >= size >= 2]
    differing = mean_over_rows(shares) if shares else None
    extrapolated = measured_size < group_size
    if differing is not None and extrapolated:
        differing = Estimate(differing.mean, differing.low, 1.0, differing.n)

    right = [sum(reward >= RIGHT for reward in row) for row in scored]
    pass_at = {}
    for k in range(1, measured_size + 1):
        passes = [
            pass_at_k(len(row), c, k) for row, c in zip(scored, right, strict=True) if len(row) >= k
        ]
        pass_at[k] = mean_over_rows(passes)

    lost_to_form, failed = None, None
    if statuses is not None:
        lost_to_form = mean_over_rows([_share_of(row, _LOST_TO_FORM) for row in statuses if row])
        failed = mean_over_rows([_share_of(row, ("failed",)) for row in statuses if row])
    n = len(scored)
    return GroupSignal(
        group_size=group_size,
        measured_size=measured_size,
        rows=n,
        rollouts=sum(map(len, rewards)),
        differing=differing,
        extrapolated=extrapolated,
        pass_at=pass_at,
        always_right=sum(c == len(row) for row, c in zip(scored, right, strict=True)) / n
        if n
        else 0.0,
        never_right=sum(c == 0 for c in right) / n if n else 0.0,
        lost_to_form=lost_to_form,
        failed=failed,
    )


def share_of_differing_groups(rewards: Sequence[float], size: int) -> float:
    """The share of the groups of `size` out of these rewards that are not all the same.

    Args:
        rewards (`Sequence[float]`): Of one row, `size` at least.
        size (`int`): From 1.

    Raises:
        `ValueError`: There are fewer rewards than that.
    """
    g = len(rewards)
    if not 1 <= size <= g:
        raise ValueError(f"a group of {size} cannot be drawn from {g} rewards")
    alike = sum(math.comb(count, size) for count in Counter(rewards).values())
    return 1 - alike / math.comb(g, size)


def mean_over_rows(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """A mean of shares with an interval over rows: Wilson's if all are 0 or 1, else the t interval.

    The variance of the t interval is at least that of a sample in which one row differs, so that a sample without any
    difference is not certain.

    Args:
        values (`Sequence[float]`): One share for each row, at least one.
        level (`float`, *optional*, defaults to `0.95`): The coverage aimed at.

    Raises:
        `ValueError`: There is no value.
    """
    n = len(values)
    if not n:
        raise ValueError("there are no rows")
    if set(values) <= {0.0, 1.0}:
        return wilson_interval(round(sum(values)), n, level)
    mean = fmean(values)
    if n == 1:
        return Estimate(mean, 0.0, 1.0, 1)
    half = t_quantile(level, n - 1) * math.sqrt(max(variance(values), 1 / n) / n)
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half), n)


def _share_of(statuses: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(status in wanted for status in statuses) / len(statuses)
