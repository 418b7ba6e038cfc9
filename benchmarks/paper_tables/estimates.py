"""The statistics of the papers' tables beside means and intervals: averages over sets, several trainings, Wald's
interval and its stars."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean, stdev

import numpy as np

from agentic_prompting.evaluation import Estimate, Result, wilson_interval
from agentic_prompting.evaluation.metrics import BINARY


def average_results(results: Sequence[Result], task: str) -> Result:
    """The "Average" row of a table: one system's mean over tasks of its means, each task counting once.

    Intervals as in [`mean_of_means`]; `values` are empty. A metric is averaged over the tasks that report it.

    Args:
        results (`Sequence[Result]`): One system's results on different tasks.
        task (`str`): The row's name.
    """
    values: dict[str, list[list[float]]] = defaultdict(list)
    for result in results:
        for name, of_task in result.values.items():
            if of_task:
                values[name].append(list(of_task.values()))
    joined = _joined(
        results, task, {}, {name: mean_of_means(groups) for name, groups in values.items()}
    )
    return replace(
        joined, fit_calls=max(one.fit_calls for one in results)
    )  # one search may serve several tasks


def over_seeds(results: Sequence[Result]) -> Result:
    """One system on one task, trained (or run) with several seeds, as one result: means with [`seed_interval`].

    Args:
        results (`Sequence[Result]`): One result for each seed, on the same questions.
    """
    names = results[0].estimates
    means = {
        name: [mean.mean for result in results if (mean := result.estimates.get(name)) is not None]
        for name in names
    }
    values = {
        name: {
            place: fmean(
                one.values[name][place] for one in results if place in one.values.get(name, {})
            )
            for place in sorted({place for one in results for place in one.values.get(name, {})})
        }
        for name in results[0].values
    }
    estimates = {
        name: seed_interval(of_seeds) if len(of_seeds) > 1 else None
        for name, of_seeds in means.items()
    }
    return _joined(results, results[0].task, values, estimates)


def _joined(
    results: Sequence[Result],
    task: str,
    values: dict[str, dict[int, float]],
    estimates: dict[str, Estimate | None],
) -> Result:
    return Result(
        system=results[0].system,
        task=task,
        values=values,
        estimates=estimates,
        answers=sum(result.answers for result in results),
        failed=sum(one.failed for one in results),
        ungraded={name: sum(one.ungraded.get(name, 0) for one in results) for name in estimates},
        fit_calls=sum(one.fit_calls for one in results),
        **{
            name: fmean(getattr(one, name) for one in results)
            for name in ("calls", "tokens", "worth_usd", "cost_usd", "seconds")
        },
    )


def wald_interval(successes: int, n: int, level: float = 0.95) -> Estimate:
    """The textbook interval for a share, mean ± z standard errors, as in ProRefine's Table 1.

    It has no width at 0 and n successes and covers too little near them; our own is [`wilson_interval`].

    Args:
        successes (`int`), n (`int`), level (`float`, *optional*, defaults to `0.95`): As in [`wilson_interval`].

    Raises:
        `ValueError`: As in [`wilson_interval`].
    """
    share = wilson_interval(successes, n, level).mean
    half = NormalDist().inv_cdf(0.5 + level / 2) * (share * (1 - share) / n) ** 0.5
    return Estimate(share, max(0.0, share - half), min(1.0, share + half), n)


def mean_of_means(
    groups: Sequence[Sequence[float]], level: float = 0.95, n_resamples: int = 2000
) -> Estimate:
    """The mean of several groups' means, each group counting once; bootstrap interval, resampled within the groups.

    Args:
        groups (`Sequence[Sequence[float]]`): The values of each group, finite, at least one in each.
        level (`float`), n_resamples (`int`): As in [`bootstrap_interval`].
    """
    rng = np.random.default_rng(0)
    samples = [np.asarray(group, dtype=float) for group in groups]
    draws = [
        [sample[rng.integers(0, sample.size, sample.size)].mean() for sample in samples]
        for _ in range(n_resamples)
    ]
    low, high = np.quantile(np.mean(draws, axis=1), [0.5 - level / 2, 0.5 + level / 2])
    return Estimate(fmean(map(fmean, groups)), float(low), float(high), sum(map(len, groups)))


def seed_interval(means: Sequence[float], level: float = 0.95) -> Estimate:
    """Student's interval for the mean over seeds, which covers the spread of trainings and is wide for three.

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
    """A star for each baseline whose interval lies below: with Wald's intervals the marks of ProRefine's Table 1."""
    return "*" * sum(share.low > baseline.high for baseline in baselines)


def wald_of(result: Result) -> Estimate | None:
    """The first metric with its Wald interval; `None` if it is no share of right answers, or missing."""
    metric = next(iter(result.values), "")
    scores = result.values.get(metric, {}).values()
    return wald_interval(round(sum(scores)), len(scores)) if scores and metric in BINARY else None


def wald_column(
    results: Sequence[Result], marks: Mapping[str, Sequence[str]]
) -> Callable[[Result], dict[str, str]]:
    """A column with the first metric's Wald interval and a star for each baseline below it, as ProRefine's Table 1 has.

    Args:
        results (`Sequence[Result]`): All of the table.
        marks (`dict`): For each system the names of its baselines.
    """
    found = {(result.system, result.task): result for result in results}

    def cell(result: Result) -> dict[str, str]:
        share = wald_of(result)
        names = marks.get(result.system, ())
        if share is None:
            return {"Wald": "–"}
        others = [
            wald_of(found[name, result.task]) for name in names if (name, result.task) in found
        ]
        earned = stars(share, [one for one in others if one is not None])
        return {"Wald": f"{share.mean:.3f}{earned} [{share.low:.3f}, {share.high:.3f}]"}

    return cell
