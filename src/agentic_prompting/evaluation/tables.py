"""Shows evaluations as tables: Markdown, CSV, LaTeX and JSON, all made from the same list of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ..llm.numbers import format_usd
from ..records import atomic_write
from .comparisons import Comparison
from .evaluate import Evaluation
from .intervals import Estimate
from .scoring import Result

FormattedTable = list[dict[str, str]]
"""Rows with the same columns. The cells are formatted."""

ExtraCells = Callable[[Result], Mapping[str, str]]
"""Further cells of a result's row."""


def results_table(evaluation: Evaluation, extra: ExtraCells = lambda result: {}) -> FormattedTable:
    """Return one row per task and system: metrics with their intervals, numbers of answers, cost.

    `answered` is the number of questions times runs minus the answers that `failed`; a failed
    answer is not part of any mean. `$` is the price of all calls of a question; where some of them
    were replayed, `$ paid` is what was paid here.

    Args:
        evaluation ([`Evaluation`]): The results.
        extra (`Callable[[Result], dict[str, str]]`, *optional*): Further cells of a row, after the
            metrics.
    """
    # Columns: all metrics of all tasks, in the order in which they occur.
    metrics: list[str] = []
    tasks: list[str] = []
    for result in evaluation.results:
        tasks.append(result.task)
        metrics.extend(result.estimates)
    metrics = list(dict.fromkeys(metrics))

    has_replayed = any(result.cost_usd != result.worth_usd for result in evaluation.results)

    # Rows: by task, in the order of the evaluation.
    table = []
    for result in sorted(evaluation.results, key=lambda result: tasks.index(result.task)):
        cells = {"task": result.task, "system": result.system}
        for metric in metrics:
            cells[metric] = _format_estimate(result.estimates.get(metric))
        cells |= extra(result)
        cells |= {
            "answered": str(result.answers - result.failed),
            "failed": str(result.failed),
            "ungraded": str(max(result.ungraded.values(), default=0)),
            "calls": f"{result.calls:.1f}",
            "calls to make it": str(result.fit_calls),
            "tokens": f"{result.tokens:.0f}",
            "$": format_usd(result.worth_usd, decimals=5),
            **({"$ paid": format_usd(result.cost_usd, decimals=5)} if has_replayed else {}),
            "seconds": f"{result.seconds:.2f}",
        }
        table.append(cells)
    return table


def differences_table(comparisons: Sequence[Comparison]) -> FormattedTable:
    """Return one row per comparison: the difference with its interval, wins, losses and ties, and
    McNemar's p.
    """
    table = []
    # The first system minus the second one, so a positive difference is in favour of the first.
    for comparison in comparisons:
        paired = comparison.paired
        cells = {
            "task": comparison.task,
            "metric": comparison.metric,
            "system": comparison.first,
            "against": comparison.second,
            "difference [95 %]": _format_estimate(paired.difference, sign="+"),
            "better / worse / same": f"{paired.wins} / {paired.losses} / {paired.ties}",
            "p (McNemar)": f"{paired.p_value:.3g}",
            "left out": str(paired.left_out),
        }
        table.append(cells)
    return table


def repeats_table(evaluation: Evaluation) -> FormattedTable:
    """Statistics of several runs: one row per task, system and metric.

    The columns are pass@k, majority@k and the spread between runs, each with its interval over the
    questions. Empty if each question was asked once.
    """
    # The metric with the most statistics determines the order of the columns.
    statistics_of_metrics: list[dict[str, Estimate]] = []
    for result in evaluation.results:
        statistics_of_metrics.extend(result.repeated.values())
    names: dict[str, None] = {}
    for statistics in sorted(statistics_of_metrics, key=len, reverse=True):
        names |= dict.fromkeys(statistics)

    # A metric without one of the statistics gets a dash in its column.
    table = []
    for result in evaluation.results:
        for metric, statistics in result.repeated.items():
            cells = {"task": result.task, "system": result.system, "metric": metric}
            for name in names:
                cells[name] = _format_estimate(statistics.get(name))
            table.append(cells)
    return table


def to_markdown(table: FormattedTable) -> str:
    """Format a table as Markdown."""
    if not table:
        return "(nothing)\n"
    # The header, the rule below it, and the rows. A bar in a cell would end the cell.
    columns = list(table[0])
    lines = [columns, ["---"] * len(columns)]
    for cells in table:
        lines.append([cell.replace("|", "\\|") for cell in cells.values()])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def to_json(evaluation: Evaluation, comparisons: Sequence[Comparison] = ()) -> str:
    """Format estimates, counts and differences as JSON. Scores by question are in the records."""
    # Scores by question would be as long as the records.
    results = [asdict(result) for result in evaluation.results]
    for result in results:
        del result["values"]
    content = {
        "results": results,
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
    return json.dumps(content, indent=2) + "\n"


def write_tables(
    folder: str | Path,
    evaluation: Evaluation,
    comparisons: Sequence[Comparison] = (),
    title: str = "",
    extra: ExtraCells = lambda result: {},
) -> dict[str, Path]:
    """Write `table.md`, `table.csv`, `table.tex` (a booktabs `tabular`) and `table.json`.

    Args:
        folder (`str` or `Path`): Folder of the tables.
        evaluation ([`Evaluation`]): The results.
        comparisons (`Sequence[Comparison]`, *optional*): Comparisons of systems.
        title (`str`, *optional*): Title of `table.md`.
        extra (`Callable`, *optional*): Further cells of a row, as in [`results_table`].

    Returns:
        `dict[str, Path]`: The files by suffix.
    """
    # pandas is slow to import and needed for the formatting only.
    import pandas as pd

    results = results_table(evaluation, extra)

    # The Markdown file has all tables, the other files only the results.
    markdown = f"# {title}\n\n" if title else ""
    markdown += to_markdown(results)
    for table in (repeats_table(evaluation), differences_table(comparisons)):
        if table:
            markdown += f"\n{to_markdown(table)}"
    frame = pd.DataFrame(results)
    contents = {
        "md": markdown,
        "json": to_json(evaluation, comparisons),
        "csv": frame.to_csv(index=False),
        "tex": frame.to_latex(index=False, escape=True),
    }

    # Each file is written atomically, under the same name with its own suffix.
    paths = {}
    for suffix, content in contents.items():
        paths[suffix] = Path(folder) / f"table.{suffix}"
        atomic_write(paths[suffix], content)
    return paths


def _format_estimate(estimate: Estimate | None, sign: str = "") -> str:
    if estimate is None:
        return "–"
    return f"{estimate.mean:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
