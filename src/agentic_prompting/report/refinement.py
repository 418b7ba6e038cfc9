"""What people look at after refining: accuracy as in the paper's Table 1, iterations as in its Figure 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..evaluation import Estimate, bootstrap_interval, wilson_interval
from ..evolution.plotting import LINES, figure_class
from ..refine import RefinementResult
from ..rewards.reasoning import Scorer


def accuracy_of(
    results: Sequence[RefinementResult], rows: Sequence[Mapping[str, Any]], score: Scorer, threshold: float = 1.0
) -> Estimate:
    """Share of right answers with its 95 % Wilson interval. A query that failed is left out: nobody answered it.

    Args:
        results (`Sequence[RefinementResult]`): What [`ProRefiner.refine_all`] returned.
        rows (`Sequence[Mapping]`): The rows it was given, with `answers`.
        score (`Callable[[str, Sequence[str]], float]`): Such as [`integer_match`].
        threshold (`float`, *optional*, defaults to `1.0`): The least score that is right.

    Raises:
        `ValueError`: If every query failed.
    """
    answered = [(result, row) for result, row in zip(results, rows, strict=True) if result.error is None]
    right = sum(score(result.answer, row["answers"]) >= threshold for result, row in answered)
    return wilson_interval(right, len(answered))


def accuracy_table(accuracy: Mapping[str, Mapping[str, Mapping[str, Estimate]]]) -> str:
    """Accuracy as a Markdown table laid out like the paper's Table 1.

    Args:
        accuracy (`Mapping`): By data set, method and task model, in the order to be shown.
    """
    models = list(dict.fromkeys(model for methods in accuracy.values() for row in methods.values() for model in row))
    lines = [f"| data set | method | {' | '.join(models)} |", "|---" * (2 + len(models)) + "|"]
    for name, methods in accuracy.items():
        for method, row in methods.items():
            cells = [f"{e.mean:.3f} [{e.low:.3f}, {e.high:.3f}]" if (e := row.get(model)) else "–" for model in models]
            lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def iterations_of(results: Sequence[RefinementResult]) -> Estimate:
    """Mean number of refinement steps a query, with its 95 % bootstrap interval; 0 where the first answer was taken."""
    return bootstrap_interval([len(result.steps) for result in results])


def plot_iterations(
    results: Mapping[str, Mapping[str, Sequence[RefinementResult]]], path: str | Path, title: str = ""
) -> None:
    """Draw the mean number of refinement iterations, as in the paper's Figure 4.

    Args:
        results (`Mapping`): Results by data set and method.
        path (`str` or `Path`): The PNG to write, with its folders.
        title (`str`, *optional*): Above the bars.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    methods = list(dict.fromkeys(method for by_method in results.values() for method in by_method))
    figure = figure_class()(figsize=(1.5 + 2.2 * len(results), 3.2), layout="constrained")
    axis, width = figure.subplots(), 0.8 / max(1, len(methods))
    for number, method in enumerate(methods):
        sets = [i for i, by_method in enumerate(results.values()) if by_method.get(method)]
        found = [iterations_of(by_method[method]) for by_method in results.values() if by_method.get(method)]
        places = [i + (number - (len(methods) - 1) / 2) * width for i in sets]
        means = [estimate.mean for estimate in found]
        ends = [[e.mean - e.low for e in found], [e.high - e.mean for e in found]]
        bars = axis.bar(
            places,
            means,
            0.92 * width,
            color=LINES[number % len(LINES)][0],
            yerr=ends,
            label=method,
            error_kw={"linewidth": 1},
        )
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize="small")
    axis.set_xticks(range(len(results)), list(results))
    axis.set_ylabel("mean refinement iterations")
    axis.margins(y=0.15)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(methods), fontsize="small", frameon=False)
    axis.set_title(title, fontsize="medium")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
