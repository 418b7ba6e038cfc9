"""Every metric of ours as an `evaluate.Metric`: `evaluate.load(METRIC_PATH, "token_f1")`, with or without a network.

Imports `evaluate`, which is slow: nothing here imports this file. It imports by absolute names, as `evaluate.load`
copies it to its cache and imports it from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from agentic_prompting.evaluation.metrics import METRICS


class AnswerMetric(evaluate.Metric):
    """A mean score of answers. `compute(predictions=[...], references=[[...], ...])`; references are accepted answers.

    Its `config_name`, the second argument of `evaluate.load`, says which of [`METRICS`]. Gives the mean under this
    name, `n`, the answers it is over, and `ungraded`, those that could not be scored and are left out. What else
    `compute` is given goes to the metric (`encoder`, for `semantic_similarity`).

    Raises:
        `ValueError`: There is no such metric.
    """

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS:
            raise ValueError(
                f"say which metric as the second argument of `evaluate.load`: {', '.join(METRICS)}"
            )
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
        given = METRICS[self.config_name](predictions, references, **options)
        scored = [score for score in given if score is not None]
        mean = sum(scored) / len(scored) if scored else float("nan")
        return {self.config_name: mean, "n": len(scored), "ungraded": len(given) - len(scored)}
