"""What the metrics in `metrics/` share, and how to load one. Imports `evaluate`, which is slow: import it when needed.

Each file there is a whole metric for `evaluate.load(path)`, with or without a network; the scores are `scores.py`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import evaluate

from .scores import METRICS


class AnswerMetric(evaluate.Metric, ABC):
    """A mean score of answers. `compute(predictions=[...], references=[[...], ...])`; references are accepted answers.

    Gives the mean under the metric's name, `n`, the answers it is over, and `ungraded`, those that could not be
    scored and are left out (a grader that gave up).
    """

    # Abstract, so that `evaluate.load` takes the class of the file and not this one for the metric.
    @property
    @abstractmethod
    def scores(self) -> Callable[..., Sequence[float | None]]:
        """The function of [`METRICS`]: predictions and references to a score each."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="predictions: answers; references: the accepted answers of each, a list of texts.",
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.List(datasets.Value("string")),
                }
            ),
        )

    def _compute(
        self, *, predictions: Sequence[str], references: Sequence[Sequence[str]], **options: Any
    ) -> dict[str, float]:
        given = self.scores(predictions, references, **options)
        scored = [score for score in given if score is not None]
        mean = sum(scored) / len(scored) if scored else float("nan")
        return {str(self.name): mean, "n": len(scored), "ungraded": len(given) - len(scored)}


def metric_path(name: str) -> str:
    """The file of a metric, for `evaluate.load`.

    Raises:
        `ValueError`: There is none of this name.
    """
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}; known: {', '.join(METRICS)}")
    return str(Path(__file__).parent / "metrics" / f"{name}.py")


def load_metric(name: str, **options: Any) -> AnswerMetric:
    """A metric as an `evaluate.Metric`; `options` go to `evaluate.load`."""
    return evaluate.load(metric_path(name), **options)
