"""Comparisons of systems, in one evaluation or in two, question by question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .answer_records import row_index_of
from .evaluate import Evaluation
from .intervals import PairedDifference, paired_difference
from .scoring import Result


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
