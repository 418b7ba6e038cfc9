"""The statistics of the papers' tables beside means and intervals: averages over sets, several
trainings, Wald's interval and its stars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean, stdev

import numpy as np

from agentic_prompting.evaluation import Estimate, Result, wilson_interval
from agentic_prompting.evaluation.metrics import BINARY


def average_results(results: Sequence[Result], task: str) -> Result:
    """The "Average" row of a table: one system's mean over tasks of its means, each task counting
    once.

    Intervals as in [`mean_of_means`]; `values` are empty. A metric is averaged over the tasks that
    report it.

    Args:
        results (`Sequence[Result]`): One system's results on different tasks.
        task (`str`): The row's name.
    """
    values: dict[str, list[list[float]]] = defaultdict(list)
    for result in results:
        for name, of_task in result.values.items():
            if of_task:
                values[name].append(list(of_task.values()))
    estimates = {name: mean_of_means(groups) for name, groups in values.items()}
    joined = _joined(results, task, {}, estimates)
    # One search may serve several tasks.
    return replace(joined, fit_calls=max(result.fit_calls for result in results))


def over_seeds(results: Sequence[Result]) -> Result:
    """One system on one task, trained (or run) with several seeds, as one result: means with
    [`seed_interval`].

    Args:
        results (`Sequence[Result]`): One result for each seed, on the same questions.
    """
    # Each question's mean over the seeds that have a value for it.
    values = {}
    for name in results[0].values:
        values_of_questions: dict[int, list[float]] = defaultdict(list)
        for result in results:
            for question, value in result.values.get(name, {}).items():
                values_of_questions[question].append(value)
        values[name] = {
            question: fmean(values_of_questions[question])
            for question in sorted(values_of_questions)
        }

    # The interval over the seeds' means.
    estimates: dict[str, Estimate | None] = {}
    for name in results[0].estimates:
        estimates_of_seeds = [result.estimates.get(name) for result in results]
        means = [estimate.mean for estimate in estimates_of_seeds if estimate is not None]
        estimates[name] = seed_interval(means) if len(means) > 1 else None
    return _joined(results, results[0].task, values, estimates)


def _joined(
    results: Sequence[Result],
    task: str,
    values: dict[str, dict[int, float]],
    estimates: dict[str, Estimate | None],
) -> Result:
    ungraded = {}
    for name in estimates:
        ungraded[name] = sum(result.ungraded.get(name, 0) for result in results)
    return Result(
        system=results[0].system,
        task=task,
        values=values,
        estimates=estimates,
        answers=sum(result.answers for result in results),
        failed=sum(result.failed for result in results),
        ungraded=ungraded,
        fit_calls=sum(result.fit_calls for result in results),
        calls=fmean(result.calls for result in results),
        tokens=fmean(result.tokens for result in results),
        worth_usd=fmean(result.worth_usd for result in results),
        cost_usd=fmean(result.cost_usd for result in results),
        seconds=fmean(result.seconds for result in results),
    )


def wald_interval(successes: int, n: int, level: float = 0.95) -> Estimate:
    """The textbook interval for a share, mean ± z standard errors, as in ProRefine's Table 1.

    It has no width at 0 and n successes and covers too little near them; our own is
    [`wilson_interval`].

    Args:
        successes (`int`), n (`int`), level (`float`, *optional*, defaults to `0.95`): As in
            [`wilson_interval`].

    Raises:
        `ValueError`: As in [`wilson_interval`].
    """
    share = wilson_interval(successes, n, level).mean
    half = NormalDist().inv_cdf(0.5 + level / 2) * (share * (1 - share) / n) ** 0.5
    return Estimate(share, max(0.0, share - half), min(1.0, share + half), n)


def mean_of_means(
    groups: Sequence[Sequence[float]], level: float = 0.95, n_resamples: int = 2000
) -> Estimate:
    """The mean of several groups' means, each group counting once; bootstrap interval, resampled
    within the groups.

    Args:
        groups (`Sequence[Sequence[float]]`): The values of each group, finite, at least one in
            each.
        level (`float`), n_resamples (`int`): As in [`bootstrap_interval`].
    """
    rng = np.random.default_rng(0)
    samples = [np.asarray(group, dtype=float) for group in groups]
    draws = []
    for _ in range(n_resamples):
        resamples = [sample[rng.integers(0, sample.size, sample.size)] for sample in samples]
        draws.append([resample.mean() for resample in resamples])
    low, high = np.quantile(np.mean(draws, axis=1), [0.5 - level / 2, 0.5 + level / 2])
    return Estimate(fmean(map(fmean, groups)), float(low), float(high), sum(map(len, groups)))


def seed_interval(means: Sequence[float], level: float = 0.95) -> Estimate:
    """Student's interval for the mean over seeds, which covers the spread of trainings and is wide
    for three.

    Args:
        means (`Sequence[float]`): One figure for each seed, at least two.
        level (`float`, *optional*, defaults to `0.95`): The coverage aimed at.
    """
    n = len(means)
    half = _student(level, n - 1) * stdev(means) / n**0.5
    return Estimate(fmean(means), fmean(means) - half, fmean(means) + half, n)


def _student(level: float, freedom: int) -> float:
    """The quantile of Student's t within which a share `level` lies, by integration over its angle."""
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    share = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(freedom**0.5 * np.tan(np.interp(level, share / share[-1], angles)))


def stars(share: Estimate, baselines: Sequence[Estimate]) -> str:
    """A star for each baseline whose interval lies below: with Wald's intervals the marks of
    ProRefine's Table 1.
    """
    return "*" * sum(share.low > baseline.high for baseline in baselines)


def wald_of(result: Result) -> Estimate | None:
    """The first metric with its Wald interval; `None` if it is no share of right answers, or
    missing.
    """
    metric = next(iter(result.values), "")
    scores = result.values.get(metric, {}).values()
    if not scores or metric not in BINARY:
        return None
    return wald_interval(round(sum(scores)), len(scores))


def wald_column(
    results: Sequence[Result], marks: Mapping[str, Sequence[str]]
) -> Callable[[Result], dict[str, str]]:
    """A column with the first metric's Wald interval and a star for each baseline below it, as
    ProRefine's Table 1 has.

    Args:
        results (`Sequence[Result]`): All of the table.
        marks (`dict`): For each system the names of its baselines.
    """
    by_system_and_task = {(result.system, result.task): result for result in results}

    def cell(result: Result) -> dict[str, str]:
        share = wald_of(result)
        names = marks.get(result.system, ())
        if share is None:
            return {"Wald": "–"}
        baselines = []
        for name in names:
            baseline = by_system_and_task.get((name, result.task))
            estimate = wald_of(baseline) if baseline is not None else None
            if estimate is not None:
                baselines.append(estimate)
        earned = stars(share, baselines)
        return {"Wald": f"{share.mean:.3f}{earned} [{share.low:.3f}, {share.high:.3f}]"}

    return cell
