"""For `evaluate.load`: exact match."""

from agentic_prompting.evaluation.metric import AnswerMetric
from agentic_prompting.evaluation.scores import METRICS


class ExactMatch(AnswerMetric):
    """Share of answers equal to an accepted one after SQuAD's normalisation; see [`~rewards.exact_match`]."""

    scores = staticmethod(METRICS["exact_match"])
