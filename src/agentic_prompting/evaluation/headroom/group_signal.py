"""Whether GRPO has a signal on a task, estimated from an untrained agent's groups of rollouts.

A group whose rewards are all equal has no advantage and no gradient. From g rollouts of each row,
the share of groups of G <= g rollouts whose rewards differ, and pass@k for k <= g, can be estimated
without bias as shares of subsets of the g (U-statistics, Hoeffding 1948; pass@k as in Chen et al.
2021, arXiv 2107.03374):

    differ(G) = mean over rows of 1 - sum over rewards v of C(c_v, G) / C(g, G)        c_v of the g rewards are v
    pass@k    = mean over rows of 1 - C(g - c, k) / C(g, k)                            c of the g are right

For G > g only bounds are known (Lord 1969): measure with the group size of the planned training.
All intervals are over rows: Wilson's if each row's statistic is 0 or 1, else the t interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance

from ..intervals import Estimate, wilson_interval
from ..repeats import RIGHT, pass_at_k
from .prompts import LEVEL, Verdict, t_quantile

LEAST_SHARE = 0.1
"""Training is worth it if at least a tenth of the groups has a gradient."""

# Statuses of rollouts that ended because of their form, whatever they would have answered.
_LOST_TO_FORM = ("malformed", "truncated")


@dataclass(frozen=True)
class GroupSignal:
    """The signal for GRPO in an untrained agent's rollouts.

    Args:
        group_size (`int`): The planned number of rollouts per group.
        measured_size (`int`): The largest number of scored rollouts of a row.
        rows (`int`), rollouts (`int`): Number of rows with a scored rollout, and of rollouts of all
            rows.
        differing ([`Estimate`], *optional*): Share of groups of the planned size whose rewards
            differ; `None` if nothing was scored.
        extrapolated (`bool`): Whether the planned size is larger than the measured one. The share
            is then a lower bound, and 1 the upper one.
        pass_at (`dict[int, Estimate]`): pass@k, by k.
        always_right (`float`), never_right (`float`): Shares of rows whose rollouts are all right,
            or all wrong.
        lost_to_form ([`Estimate`], *optional*): Share of rollouts that were malformed or truncated.
        failed ([`Estimate`], *optional*): Share of rollouts that ended with an outage.
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
        """`worth it` if the interval of the share with a gradient is above a tenth, `not worth it`
        if below.
        """
        # Without a single reward there is no share.
        if self.differing is None:
            return "cannot tell"
        if self.differing.low > LEAST_SHARE:
            return "worth it"
        if self.differing.high < LEAST_SHARE:
            return "not worth it"
        return "cannot tell"

    def advice(self) -> str:
        """Return the cheapest change that gives more groups a gradient. Empty if none is needed."""
        if self.verdict == "worth it" or self.differing is None:
            return ""
        # The first reason that applies, from the rollouts' form to their number.
        if self.lost_to_form is not None and self.lost_to_form.mean > 0.5:
            return "most rollouts are lost to form: begin with a warm start, or allow longer turns"
        if self.never_right > 0.5:
            return (
                f"{self.never_right:.0%} of the rows are never solved: take easier rows, or a warm "
                "start"
            )
        if self.always_right > 0.5:
            return f"{self.always_right:.0%} of the rows are always solved: take harder rows"
        return "take more rollouts a group, and measure with as many"

    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        if self.differing is None:
            return "cannot tell: no rollout has a reward"
        share = f"{self.differing.mean:.0%} [{self.differing.low:.0%}, {self.differing.high:.0%}]"
        if self.extrapolated:
            share += " or more"
        sentence = (
            f"{self.verdict}: {share} of groups of {self.group_size} have rewards that differ"
        )
        advice = self.advice()
        return f"{sentence}; {advice}" if advice else sentence


def measure_groups(
    rewards: Sequence[Sequence[float | None]],
    group_size: int,
    statuses: Sequence[Sequence[str]] | None = None,
) -> GroupSignal:
    """Measure the signal in the rewards of several rollouts of each row.

    Args:
        rewards (`Sequence[Sequence[float]]`): By row, the reward of each rollout; `None` or NaN for
            a rollout without a reward. A reward of 1 is right.
        group_size (`int`): The planned number of rollouts per group, at least two.
        statuses (`Sequence[Sequence[str]]`, *optional*): The `status` of each [`Rollout`].

    Raises:
        `ValueError`: If `group_size` is less than two, or there are no rows.
    """
    if group_size < 2:
        raise ValueError(f"a group has two rollouts at least, got {group_size}")
    if not rewards:
        raise ValueError("there are no rows")

    # The rewards of each row that has any.
    scored_rows: list[list[float]] = []
    for row in rewards:
        scores = [float(reward) for reward in row if reward is not None and reward == reward]
        if scores:
            scored_rows.append(scores)
    n_rows = len(scored_rows)
    measured_size = max(map(len, scored_rows), default=0)

    # How the rollouts ended.
    lost_to_form = None
    failed = None
    if statuses is not None:
        played_rows = [row for row in statuses if row]
        lost_to_form = mean_over_rows([_share_of(row, _LOST_TO_FORM) for row in played_rows])
        failed = mean_over_rows([_share_of(row, ("failed",)) for row in played_rows])

    always_right = sum(min(scores) >= RIGHT for scores in scored_rows)
    never_right = sum(max(scores) < RIGHT for scores in scored_rows)
    return GroupSignal(
        group_size=group_size,
        measured_size=measured_size,
        rows=n_rows,
        rollouts=sum(map(len, rewards)),
        differing=_estimate_differing(scored_rows, group_size, measured_size),
        extrapolated=measured_size < group_size,
        pass_at=_estimate_passes(scored_rows, measured_size),
        always_right=always_right / n_rows if n_rows else 0.0,
        never_right=never_right / n_rows if n_rows else 0.0,
        lost_to_form=lost_to_form,
        failed=failed,
    )


def _estimate_differing(
    scored_rows: Sequence[Sequence[float]], group_size: int, measured_size: int
) -> Estimate | None:
    """Return the share of groups whose rewards differ; a lower bound if the planned size was not
    measured.
    """
    # A row with fewer scored rollouts than a group is left out.
    size = min(group_size, measured_size)
    shares = []
    for scores in scored_rows:
        if len(scores) >= size >= 2:
            shares.append(share_of_differing_groups(scores, size))
    if not shares:
        return None
    differing = mean_over_rows(shares)
    if measured_size < group_size:
        return Estimate(differing.mean, differing.low, 1.0, differing.n)
    return differing


def _estimate_passes(
    scored_rows: Sequence[Sequence[float]], measured_size: int
) -> dict[int, Estimate]:
    """Return pass@k by k, over the rows with at least k scored rollouts."""
    passes: dict[int, list[float]] = {k: [] for k in range(1, measured_size + 1)}
    for scores in scored_rows:
        n_right = sum(score >= RIGHT for score in scores)
        for k in range(1, len(scores) + 1):
            passes[k].append(pass_at_k(len(scores), n_right, k))
    return {k: mean_over_rows(row_passes) for k, row_passes in passes.items()}


def share_of_differing_groups(rewards: Sequence[float], size: int) -> float:
    """Return the share of the groups of `size` rewards, drawn from these, that are not all equal.

    Args:
        rewards (`Sequence[float]`): Rewards of one row, at least `size` of them.
        size (`int`): Size of the groups, at least 1.

    Raises:
        `ValueError`: If there are fewer rewards than `size`.
    """
    # A group has equal rewards if all are drawn from the rollouts with the same reward.
    n_rewards = len(rewards)
    if not 1 <= size <= n_rewards:
        raise ValueError(f"a group of {size} cannot be drawn from {n_rewards} rewards")
    equal_groups = sum(math.comb(count, size) for count in Counter(rewards).values())
    return 1 - equal_groups / math.comb(n_rewards, size)


def mean_over_rows(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Return a mean of shares with an interval over rows: Wilson's if all are 0 or 1, else the t
    interval.

    The variance of the t interval is at least that of a sample in which one row differs, so
    the interval of a sample without any difference has a width.

    Args:
        values (`Sequence[float]`): One share per row, at least one.
        level (`float`, *optional*, defaults to `0.95`): Nominal coverage.

    Raises:
        `ValueError`: If there is no value.
    """
    n = len(values)
    if not n:
        raise ValueError("there are no rows")
    # The share of a row is 0 or 1 if its groups have as many rollouts as it has.
    if set(values) <= {0.0, 1.0}:
        return wilson_interval(round(sum(values)), n, level)
    mean = fmean(values)
    # A single row says nothing about the variance between rows.
    if n == 1:
        return Estimate(mean, 0.0, 1.0, 1)
    # With n rows of which one differs, the variance between them is 1 / n.
    half_width = t_quantile(level, n - 1) * math.sqrt(max(variance(values), 1 / n) / n)
    return Estimate(mean, max(0.0, mean - half_width), min(1.0, mean + half_width), n)


def _share_of(statuses: Sequence[str], counted: Sequence[str]) -> float:
    return sum(status in counted for status in statuses) / len(statuses)
