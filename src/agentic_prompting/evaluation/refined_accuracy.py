"""[`measure_accuracy`]: the accuracy before and after the refinement of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..refine import RefinementResult
from .intervals import Estimate, estimate_mean, paired_difference


def measure_accuracy(
    results: Sequence[RefinementResult], rows: Sequence[Any], score: Callable[..., float]
) -> dict[str, Estimate]:
    """Return the accuracy of refined answers, each figure with its 95 % interval.

    Only rows with accepted answers count, and no failed questions.

    Args:
        results (`Sequence[RefinementResult]`): The result of each row.
        rows (`Sequence`): The rows: mappings with `answers`, or anything else, which is left out.
        score (`Callable[[str, Sequence[str]], float]`): Such as [`exact_match`].

    Returns:
        `dict[str, Estimate]`: `accuracy`, and with a verifier, which judges a first answer,
        `accuracy_before` and the paired difference `accuracy_gained`. Empty if no row counts.
    """
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    for number, (result, row) in enumerate(zip(results, rows, strict=True)):
        if not isinstance(row, Mapping) or not row.get("answers") or result.error is not None:
            continue
        after[number] = float(score(result.answer, row["answers"]))
        if result.initial_answer is not None:
            before[number] = float(score(result.initial_answer, row["answers"]))

    accuracy = {}
    for name, scores in (("accuracy_before", before), ("accuracy", after)):
        estimate = estimate_mean(list(scores.values()), is_share=True)
        if estimate is not None:
            accuracy[name] = estimate
    if before:
        accuracy["accuracy_gained"] = paired_difference(after, before).difference
    return accuracy
