"""The results of ProRefine as in its paper: accuracy (Table 1) and iterations (Figure 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..evaluation import Estimate, bootstrap_interval, wilson_interval
from ..evolution.lineage import LINES, figure_class
from ..refine import RefinementResult
from ..rewards.reasoning import Scorer


def accuracy_of(
    results: Sequence[RefinementResult],
    rows: Sequence[Mapping[str, Any]],
    score: Scorer,
    threshold: float = 1.0,
) -> Estimate:
    """Return the share of right answers with its 95 % Wilson interval. Failed queries are left out.

    Args:
        results (`Sequence[RefinementResult]`): What [`ProRefiner.refine_all`] returned.
        rows (`Sequence[Mapping]`): The rows it was given, with `answers`.
        score (`Callable[[str, Sequence[str]], float]`): Such as [`integer_match`].
        threshold (`float`, *optional*, defaults to `1.0`): The least score that is right.

    Raises:
        `ValueError`: If every query failed.
    """
    # Score the queries that did not fail.
    scores = []
    for result, row in zip(results, rows, strict=True):
        if result.error is None:
            scores.append(score(result.answer, row["answers"]))
    right = sum(value >= threshold for value in scores)
    return wilson_interval(right, len(scores))


def accuracy_table(accuracy: Mapping[str, Mapping[str, Mapping[str, Estimate]]]) -> str:
    """Return accuracy as a Markdown table laid out like the paper's Table 1.

    Args:
        accuracy (`Mapping`): By data set, method and task model, in the order to be shown.
    """
    # The columns: every model that any row has.
    models: dict[str, None] = {}
    for methods in accuracy.values():
        for row in methods.values():
            models |= dict.fromkeys(row)
    # The head of the table, then a row for each data set and method.
    lines = [f"| data set | method | {' | '.join(models)} |", "|---" * (2 + len(models)) + "|"]
    for name, methods in accuracy.items():
        for method, row in methods.items():
            cells = [_format_cell(row.get(model)) for model in models]
            lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_cell(estimate: Estimate | None) -> str:
    if estimate is None:  # the method was not run with the model
        return "–"
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def iterations_of(results: Sequence[RefinementResult]) -> Estimate:
    """Return the mean number of refinement steps a query, with its 95 % bootstrap interval; 0 where
    the first answer was taken.
    """
    return bootstrap_interval([len(result.steps) for result in results])


def plot_iterations(
    results: Mapping[str, Mapping[str, Sequence[RefinementResult]]],
    path: str | Path,
    title: str = "",
) -> None:
    """Draw the mean number of refinement iterations, as in the paper's Figure 4.

    Args:
        results (`Mapping`): Results by data set and method.
        path (`str` or `Path`): The PNG to write, with its folders.
        title (`str`, *optional*): Above the bars.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    # Every method that any data set has.
    methods: dict[str, None] = {}
    for method_results in results.values():
        methods |= dict.fromkeys(method_results)
    figure = figure_class()(figsize=(1.5 + 2.2 * len(results), 3.2), layout="constrained")
    axis = figure.subplots()
    # The bars of a data set share 0.8 of the distance to the next one.
    width = 0.8 / max(1, len(methods))
    for number, method in enumerate(methods):
        # Bars stand side by side, centred on their data set.
        offset = (number - (len(methods) - 1) / 2) * width
        # A data set without results of the method has no bar.
        positions = []
        estimates = []
        for position, method_results in enumerate(results.values()):
            if method_results.get(method):
                positions.append(position + offset)
                estimates.append(iterations_of(method_results[method]))
        # Bars with their 95 % intervals.
        means = [estimate.mean for estimate in estimates]
        below = [estimate.mean - estimate.low for estimate in estimates]
        above = [estimate.high - estimate.mean for estimate in estimates]
        colour, _ = LINES[number % len(LINES)]
        bars = axis.bar(
            positions,
            means,
            0.92 * width,
            yerr=[below, above],
            label=method,
            color=colour,
            error_kw={"linewidth": 1},
        )
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize="small")
    # Labels, grid and legend.
    axis.set_xticks(range(len(results)), list(results))
    axis.set(ylabel="mean refinement iterations", axisbelow=True)
    axis.set_title(title, fontsize="medium")
    axis.margins(y=0.15)
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(methods), fontsize="small", frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
