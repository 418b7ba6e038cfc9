"""Saves, loads and compares finished evaluations, and shows them as tables.

Tables are Markdown, CSV, LaTeX and JSON, all made from the same list of rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from ..records import atomic_write
from .answer_records import read_records, row_index_of
from .evaluate_agent import Evaluation
from .intervals import Estimate, PairedDifference, paired_difference
from .metrics import Encoder, Metric, find_metrics
from .scoring import Result, summarise

_SUMMARY = "run.json"

_UNSAVED_METRICS = ("format", "iterations")
"""Metrics that [`summarise`] adds by itself to the results of some systems."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two systems on one task in one metric.

    Args:
        task (`str`), metric (`str`): Names of the task and the metric.
        first (`str`), second (`str`): Display names of the systems. A positive difference means
            that the first one is better.
        paired ([`PairedDifference`]): The difference.
    """

    task: str
    metric: str
    first: str
    second: str
    paired: PairedDifference


def save_run(folder: str | Path, evaluation: Evaluation) -> None:
    """Save what [`load_run`] needs besides the answers: metrics of each task, calls to make each
    system.
    """
    # Metrics by task, and the calls to make each system, in a form that JSON can hold.
    metric_names: dict[str, list[str]] = {}
    fit_calls: dict[str, int] = {}
    for result in evaluation.results:
        metric_names[result.task] = [
            name for name in result.estimates if name not in _UNSAVED_METRICS
        ]
        fit_calls[result.system] = result.fit_calls
    summary = {"metrics": metric_names, "fit_calls": fit_calls}
    atomic_write(Path(folder) / _SUMMARY, json.dumps(summary, indent=2) + "\n")


def load_run(
    folder: str | Path,
    encoder: str | Encoder | None = None,
    metrics: Mapping[str, Metric] = MappingProxyType({}),
) -> Evaluation:
    """Load an evaluation from its folder and score it again. No question is asked.

    Args:
        folder (`str` or `Path`): Folder with the answers and the file of [`save_run`].
        encoder (`str` or [`Encoder`], *optional*): Encoder for `semantic_similarity`.
        metrics (`dict`, *optional*): Metrics that cannot be loaded by name (functions and objects),
            by name.

    Raises:
        `FileNotFoundError`: If the folder contains no finished evaluation.
        `ValueError`: If one of its files is broken.
    """
    # Read the summary that `save_run` wrote, and the answers.
    path = Path(folder) / _SUMMARY
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no finished evaluation: there is no {_SUMMARY}")
    summary = json.loads(path.read_text(encoding="utf-8"))
    records = read_records(sorted(Path(folder).rglob("*.jsonl")))

    # The metrics of each task: objects passed by the caller, the others by their names.
    metrics_by_task = {}
    for task, names in summary["metrics"].items():
        task_metrics = {name: metrics.get(name, name) for name in names}
        metrics_by_task[task] = find_metrics(task_metrics, encoder)

    # One result per system and task that have records.
    results = []
    for system, fit_calls in summary["fit_calls"].items():
        system_records = [record for record in records if record["system"] == system]
        for task, scores in metrics_by_task.items():
            task_records = [record for record in system_records if record["task"] == task]
            if task_records:
                results.append(summarise(system, task, task_records, scores, fit_calls))
    return Evaluation(results, records)


def compare_systems(evaluation: Evaluation, baseline: str | Mapping[str, str]) -> list[Comparison]:
    """Compare each system of an evaluation with a baseline, on each task in its main metric.

    Args:
        evaluation ([`Evaluation`]): The results.
        baseline (`str` or `dict`): The system to compare with, or a different one for each system
            by name. Systems that the `dict` does not contain are left out.

    Raises:
        `ValueError`: If the evaluation does not contain a baseline.
    """
    systems = list(dict.fromkeys(result.system for result in evaluation.results))
    # A single baseline applies to all systems.
    if isinstance(baseline, Mapping):
        baselines = dict(baseline)
    else:
        baselines = dict.fromkeys(systems, baseline)
    for missing in set(baselines.values()) - set(systems):
        raise ValueError(
            f"there is no system {missing!r} to compare with; there are: {', '.join(systems)}"
        )

    # Pair each result with its baseline's on the same task.
    results = {(result.system, result.task): result for result in evaluation.results}
    comparisons = []
    for result in evaluation.results:
        baseline_result = results.get((baselines.get(result.system, ""), result.task))
        if baseline_result is None or baseline_result is result:
            continue
        comparison = _compare(result, baseline_result, result.system, baseline_result.system)
        if comparison is not None:
            comparisons.append(comparison)
    return comparisons


def compare_runs(
    first: Evaluation, second: Evaluation, names: tuple[str, str] = ("first", "second")
) -> list[Comparison]:
    """Compare the systems that two evaluations share, on the tasks that they share.

    If each has a single system, these are compared whatever their names: an agent before and after
    training, for example.

    Raises:
        `ValueError`: If the evaluations share nothing, or asked different questions.
    """
    # Results are paired by the question's index: it must be the same question in both.
    questions: dict[tuple[str, int], str] = {}
    for record in first.records:
        questions[record["task"], row_index_of(record)] = record["question"]
    for record in second.records:
        row_index = row_index_of(record)
        question = questions.get((record["task"], row_index), record["question"])
        if question != record["question"]:
            raise ValueError(
                f"the runs asked different questions of {record['task']} (question {row_index} "
                "differs): nothing is paired. Give both the same n and seed"
            )

    # Pair the results of a system on a task. What only one of the runs has is left out.
    second_results = {(result.system, result.task): result for result in second.results}
    first_systems = sorted({result.system for result in first.results})
    second_systems = sorted({result.system for result in second.results})
    is_single_pair = len(first_systems) == len(second_systems) == 1
    comparisons = []
    for first_result in first.results:
        second_system = second_systems[0] if is_single_pair else first_result.system
        second_result = second_results.get((second_system, first_result.task))
        if second_result is None:
            continue
        comparison = _compare(
            first_result,
            second_result,
            f"{first_result.system} ({names[0]})",
            f"{second_system} ({names[1]})",
        )
        if comparison is not None:
            comparisons.append(comparison)
    if not comparisons:
        raise ValueError(
            "the two runs have no system on the same task in common: "
            f"{_describe_contents(first)}, and {_describe_contents(second)}"
        )
    return comparisons


def _describe_contents(evaluation: Evaluation) -> str:
    systems = sorted({result.system for result in evaluation.results})
    tasks = sorted({result.task for result in evaluation.results})
    return f"{', '.join(systems) or 'no system'} on {', '.join(tasks) or 'no task'}"


def _compare(first: Result, second: Result, first_name: str, second_name: str) -> Comparison | None:
    """Compare two results in their main metric; `None` if they share no scored question."""
    # The main metric of a task is its first.
    metric = next(iter(first.values), "")
    first_values = first.values.get(metric, {})
    second_values = second.values.get(metric, {})
    # A difference needs at least one question that both systems have a score for.
    if not set(first_values) & set(second_values):
        return None
    difference = paired_difference(first_values, second_values)
    return Comparison(first.task, metric, first_name, second_name, difference)


Table = list[dict[str, str]]
"""Rows with the same columns. The cells are formatted."""

Extra = Callable[[Result], Mapping[str, str]]
"""Further cells of a result's row."""


def results_table(evaluation: Evaluation, extra: Extra = lambda result: {}) -> Table:
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
            "$": f"{result.worth_usd:.5f}",
            **({"$ paid": f"{result.cost_usd:.5f}"} if has_replayed else {}),
            "seconds": f"{result.seconds:.2f}",
        }
        table.append(cells)
    return table


def differences_table(comparisons: Sequence[Comparison]) -> Table:
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


def repeats_table(evaluation: Evaluation) -> Table:
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


def to_markdown(table: Table) -> str:
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
    extra: Extra = lambda result: {},
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
