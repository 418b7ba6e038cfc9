"""Results as tables: Markdown, CSV, LaTeX and JSON, from one list of rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ..llm.files import write_whole
from .harness import Evaluation
from .intervals import Estimate
from .runs import Comparison

Table = list[dict[str, str]]
"""Rows with the same columns, cells ready to be shown."""

_LATEX = str.maketrans({character: f"\\{character}" for character in "&%$#_{}"})


def results_table(evaluation: Evaluation) -> Table:
    """One row per task and system: metrics with their intervals, what was left out, what it took.

    `answered` is questions times runs without those that `failed`; failed answers are in no mean.
    """
    metrics = list(dict.fromkeys(name for result in evaluation.results for name in result.estimates))
    tasks = list(dict.fromkeys(result.task for result in evaluation.results))
    rows = []
    for result in sorted(evaluation.results, key=lambda result: tasks.index(result.task)):
        row = {"task": result.task, "system": result.system}
        row |= {metric: _estimate(result.estimates.get(metric)) for metric in metrics}
        row |= {
            "answered": str(result.answers - result.failed),
            "failed": str(result.failed),
            "ungraded": str(max(result.ungraded.values(), default=0)),
            "calls": f"{result.calls:.1f}",
            "calls to make it": str(result.fit_calls),
            "tokens": f"{result.tokens:.0f}",
            "$": f"{result.cost_usd:.5f}",
            "seconds": f"{result.seconds:.2f}",
        }
        rows.append(row)
    return rows


def differences_table(comparisons: Sequence[Comparison]) -> Table:
    """One row per comparison: the difference with its interval, on how many questions who is better, McNemar's p."""
    return [_difference(comparison) for comparison in comparisons]


def _difference(comparison: Comparison) -> dict[str, str]:
    paired = comparison.paired
    return {
        "task": comparison.task,
        "metric": comparison.metric,
        "system": comparison.first,
        "against": comparison.second,
        "difference [95 %]": _estimate(paired.difference, sign="+"),
        "better / worse / same": f"{paired.wins} / {paired.losses} / {paired.ties}",
        "p (McNemar)": f"{paired.p_value:.3g}",
        "left out": str(paired.left_out),
    }


def to_markdown(table: Table) -> str:
    """A Markdown table."""
    if not table:
        return "(nothing)\n"
    head = list(table[0])
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row.values()] for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def to_csv(table: Table) -> str:
    """Comma-separated values with a head line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def to_latex(table: Table) -> str:
    """A `tabular` in booktabs' style, its text escaped."""
    if not table:
        return "% nothing\n"
    lines = [" & ".join(cell.translate(_LATEX) for cell in cells) + r" \\" for cells in [list(table[0])]]
    body = [" & ".join(cell.translate(_LATEX) for cell in row.values()) + r" \\" for row in table]
    begin = rf"\begin{{tabular}}{{{'l' * len(table[0])}}}"
    return "\n".join([begin, r"\toprule", *lines, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def to_json(evaluation: Evaluation, comparisons: Sequence[Comparison] = ()) -> str:
    """Everything in numbers: estimates, counts and differences; scores by question are in the records."""
    results = [
        {name: value for name, value in asdict(result).items() if name != "values"} for result in evaluation.results
    ]
    return json.dumps({"results": results, "comparisons": [asdict(one) for one in comparisons]}, indent=2) + "\n"


def write_tables(
    folder: str | Path, evaluation: Evaluation, comparisons: Sequence[Comparison] = (), title: str = ""
) -> dict[str, Path]:
    """Write `table.md`, `table.csv`, `table.tex` and `table.json`.

    Returns:
        `dict[str, Path]`: The files by kind.
    """
    results, differences = results_table(evaluation), differences_table(comparisons)
    parts: Mapping[str, Callable[[Table], str]] = {"csv": to_csv, "tex": to_latex}
    markdown = f"# {title}\n\n" if title else ""
    markdown += to_markdown(results) + ("\n" + to_markdown(differences) if differences else "")
    texts = {"md": markdown, "json": to_json(evaluation, comparisons)}
    texts |= {kind: render(results) for kind, render in parts.items()}
    paths = {kind: Path(folder) / f"table.{kind}" for kind in texts}
    for kind, text in texts.items():
        write_whole(paths[kind], text)
    return paths


def _estimate(estimate: Estimate | None, sign: str = "") -> str:
    if estimate is None:
        return "–"
    return f"{estimate.mean:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
