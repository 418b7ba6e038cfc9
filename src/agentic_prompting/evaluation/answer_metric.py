"""Our metrics as an `evaluate.Metric`: `evaluate.load(METRIC_PATH, "token_f1")`, with or without a
network.

The package does not import this file, because `evaluate` is slow to import. Its imports are
absolute, because `evaluate.load` copies it to a cache and imports it from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from agentic_prompting.evaluation.metrics import METRICS


class AnswerMetric(evaluate.Metric):
    """A mean score of answers: `compute(predictions=[...], references=[[...], ...])`.

    The references are the accepted answers of each prediction. `config_name`, the second argument
    of `evaluate.load`, selects one of [`METRICS`]. `compute` returns the mean under this name; `n`,
    the number of scored answers; and `ungraded`, the number of answers that could not be scored and
    are left out. Further arguments of `compute` are passed to the metric (`encoder` for
    `semantic_similarity`).

    Raises:
        `ValueError`: If there is no such metric.
    """

    def _info(self) -> evaluate.MetricInfo:
        # `evaluate` calls this when the metric is loaded, so a wrong name fails at once.
        if self.config_name not in METRICS:
            raise ValueError(
                f"say which metric as the second argument of `evaluate.load`: {', '.join(METRICS)}"
            )
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description=(
                "predictions: answers; references: the accepted answers of each, a list of texts."
            ),
            # A prediction is compared with a list of accepted answers.
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
        scores = METRICS[self.config_name](predictions, references, **options)
        # Answers that cannot be graded are counted, and left out of the mean.
        scored = [score for score in scores if score is not None]
        mean = sum(scored) / len(scored) if scored else float("nan")
        return {self.config_name: mean, "n": len(scored), "ungraded": len(scores) - len(scored)}
