"""Finished evaluations: saved beside their answers, loaded again, compared, and shown as tables.

Tables are Markdown, CSV, LaTeX and JSON, from one list of rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from ..records import atomic_write
from .harness import Evaluation, read_records
from .metrics import Encoder, Metric, find_metrics
from .scoring import Estimate, PairedDifference, Result, paired_difference, summarise

_SUMMARY = "run.json"


@dataclass(frozen=True)
class Comparison:
    """Two systems on one task in one metric.

    Args:
        task (`str`), metric (`str`): Which.
        first (`str`), second (`str`): Names for people; a positive difference is the first one's.
        paired ([`PairedDifference`]): The difference.
    """

    task: str
    metric: str
    first: str
    second: str
    paired: PairedDifference


def save_run(folder: str | Path, evaluation: Evaluation) -> None:
    """Write what [`load_run`] needs beside the answers: each task's metrics, the calls each system took to make."""
    summary = {
        "metrics": {
            result.task: [name for name in result.estimates if name not in ("format", "iterations")]
            for result in evaluation.results
        },
        "fit_calls": {result.system: result.fit_calls for result in evaluation.results},
    }
    atomic_write(Path(folder) / _SUMMARY, json.dumps(summary, indent=2) + "\n")


def load_run(
    folder: str | Path,
    encoder: str | Encoder | None = None,
    metrics: Mapping[str, Metric] = MappingProxyType({}),
) -> Evaluation:
    """An evaluation from its folder, scored anew; nothing is asked.

    Args:
        folder (`str` or `Path`): Where [`save_run`] and the answers are.
        encoder (`str` or [`Encoder`], *optional*): For `semantic_similarity`.
        metrics (`dict`, *optional*): By name, those that cannot be loaded by their names: functions and objects.

    Raises:
        `FileNotFoundError`: The folder holds no finished evaluation.
        `ValueError`: One of its files is broken.
    """
    path = Path(folder) / _SUMMARY
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no finished evaluation: there is no {_SUMMARY}")
    summary = json.loads(path.read_text(encoding="utf-8"))
    records = read_records(sorted(Path(folder).rglob("*.jsonl")))
    by_task = {
        task: find_metrics({name: metrics.get(name, name) for name in names}, encoder)
        for task, names in summary["metrics"].items()
    }
    results = []
    for system, fit_calls in summary["fit_calls"].items():
        for task, of_task in by_task.items():
            own = [
                record for record in records if (record["system"], record["task"]) == (system, task)
            ]
            if own:
                results.append(summarise(system, task, own, of_task, fit_calls))
    return Evaluation(results, records)


def compare_systems(evaluation: Evaluation, baseline: str | Mapping[str, str]) -> list[Comparison]:
    """Every other system of an evaluation against one of it, on each task in the metric that counts first.

    Args:
        evaluation ([`Evaluation`]): The results.
        baseline (`str` or `dict`): The system to compare with; or for each system its own, those not named left out.

    Raises:
        `ValueError`: The evaluation has no such system.
    """
    systems = list(dict.fromkeys(result.system for result in evaluation.results))
    against = baseline if isinstance(baseline, Mapping) else dict.fromkeys(systems, baseline)
    for missing in set(against.values()) - set(systems):
        raise ValueError(
            f"there is no system {missing!r} to compare with; there are: {', '.join(systems)}"
        )
    found = {(result.system, result.task): result for result in evaluation.results}
    pairs = [
        (one, found.get((against.get(one.system, ""), one.task))) for one in evaluation.results
    ]
    return _compared(
        (one, other, (one.system, other.system))
        for one, other in pairs
        if other is not None and one is not other
    )


def compare_runs(
    first: Evaluation, second: Evaluation, names: tuple[str, str] = ("first", "second")
) -> list[Comparison]:
    """The systems that two evaluations have in common, on the tasks that they have in common.

    Raises:
        `ValueError`: They have nothing in common, or asked different questions.
    """
    asked = {(record["task"], record["place"]): record["question"] for record in first.records}
    for record in second.records:
        if asked.get((record["task"], record["place"]), record["question"]) != record["question"]:
            raise ValueError(
                f"the runs asked different questions of {record['task']} (place {record['place']}): nothing is paired. "
                "Give both the same n and seed"
            )
    theirs = {(result.system, result.task): result for result in second.results}
    comparisons = _compared(
        (
            one,
            theirs[one.system, one.task],
            (f"{one.system} ({names[0]})", f"{one.system} ({names[1]})"),
        )
        for one in first.results
        if (one.system, one.task) in theirs
    )
    if not comparisons:
        raise ValueError("the two runs have no system on the same task in common")
    return comparisons


def _compared(pairs: Iterable[tuple[Result, Result, tuple[str, str]]]) -> list[Comparison]:
    """In the first metric; those left out that have no question with a score from both."""
    comparisons = []
    for first, second, names in pairs:
        metric = next(iter(first.values), "")
        ours, theirs = first.values.get(metric, {}), second.values.get(metric, {})
        if set(ours) & set(theirs):
            comparisons.append(
                Comparison(first.task, metric, *names, paired_difference(ours, theirs))
            )
    return comparisons


Table = list[dict[str, str]]
"""Rows with the same columns, cells ready to be shown."""

Extra = Callable[[Result], Mapping[str, str]]


def results_table(evaluation: Evaluation, extra: Extra = lambda result: {}) -> Table:
    """One row per task and system: metrics with their intervals, what was left out, what it took.

    `answered` is questions times runs without those that `failed`; failed answers are in no mean.

    Args:
        evaluation ([`Evaluation`]): The results.
        extra (`Callable[[Result], dict[str, str]]`, *optional*): Further cells of a row, behind the metrics.
    """
    metrics = list(
        dict.fromkeys(name for result in evaluation.results for name in result.estimates)
    )
    tasks = list(dict.fromkeys(result.task for result in evaluation.results))
    return [
        {
            "task": result.task,
            "system": result.system,
            **{metric: _estimate(result.estimates.get(metric)) for metric in metrics},
            **extra(result),
            "answered": str(result.answers - result.failed),
            "failed": str(result.failed),
            "ungraded": str(max(result.ungraded.values(), default=0)),
            "calls": f"{result.calls:.1f}",
            "calls to make it": str(result.fit_calls),
            "tokens": f"{result.tokens:.0f}",
            "$": f"{result.cost_usd:.5f}",
            "seconds": f"{result.seconds:.2f}",
        }
        for result in sorted(evaluation.results, key=lambda result: tasks.index(result.task))
    ]


def differences_table(comparisons: Sequence[Comparison]) -> Table:
    """One row per comparison: the difference with its interval, questions on which each is better, McNemar's p."""
    return [
        {
            "task": one.task,
            "metric": one.metric,
            "system": one.first,
            "against": one.second,
            "difference [95 %]": _estimate(one.paired.difference, sign="+"),
            "better / worse / same": f"{one.paired.wins} / {one.paired.losses} / {one.paired.ties}",
            "p (McNemar)": f"{one.paired.p_value:.3g}",
            "left out": str(one.paired.left_out),
        }
        for one in comparisons
    ]


def repeats_table(evaluation: Evaluation) -> Table:
    """One row per task, system and metric of several runs: pass@k, majority@k and the spread between runs, each with
    its interval over the questions. Empty where each question was asked once."""
    found = [
        (result, metric, one)
        for result in evaluation.results
        for metric, one in result.repeated.items()
    ]
    fullest = sorted(
        (one for _, _, one in found), key=len, reverse=True
    )  # has all names, in their order
    names = list(dict.fromkeys(name for one in fullest for name in one))
    return [
        {
            "task": result.task,
            "system": result.system,
            "metric": metric,
            **{name: _estimate(one.get(name)) for name in names},
        }
        for result, metric, one in found
    ]


def to_markdown(table: Table) -> str:
    """A Markdown table."""
    if not table:
        return "(nothing)\n"
    head = list(table[0])
    lines = [
        head,
        ["---"] * len(head),
        *([cell.replace("|", "\\|") for cell in row.values()] for row in table),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def to_json(evaluation: Evaluation, comparisons: Sequence[Comparison] = ()) -> str:
    """Everything in numbers: estimates, counts and differences; scores by question are in the records."""
    results = [asdict(result) for result in evaluation.results]
    for result in results:
        del result["values"]
    return (
        json.dumps(
            {"results": results, "comparisons": [asdict(one) for one in comparisons]}, indent=2
        )
        + "\n"
    )


def write_tables(
    folder: str | Path,
    evaluation: Evaluation,
    comparisons: Sequence[Comparison] = (),
    title: str = "",
    extra: Extra = lambda result: {},
) -> dict[str, Path]:
    """Write `table.md`, `table.csv`, `table.tex` (a `tabular` in booktabs' style) and `table.json`.

    `extra`: as in [`results_table`].

    Returns:
        `dict[str, Path]`: The files by kind.
    """
    import pandas as pd

    results, differences = results_table(evaluation, extra), differences_table(comparisons)
    frame = pd.DataFrame(results)
    markdown = f"# {title}\n\n" if title else ""
    markdown += to_markdown(results)
    markdown += "".join(
        f"\n{to_markdown(one)}" for one in (repeats_table(evaluation), differences) if one
    )
    texts = {"md": markdown, "json": to_json(evaluation, comparisons)}
    texts |= {"csv": frame.to_csv(index=False), "tex": frame.to_latex(index=False, escape=True)}
    paths = {kind: Path(folder) / f"table.{kind}" for kind in texts}
    for kind, text in texts.items():
        atomic_write(paths[kind], text)
    return paths


def _estimate(estimate: Estimate | None, sign: str = "") -> str:
    if estimate is None:
        return "–"
    return f"{estimate.mean:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
