"""For `evaluate.load`: ProRefine integer rule."""

from agentic_prompting.evaluation.metric import AnswerMetric
from agentic_prompting.evaluation.scores import METRICS


class IntegerMatch(AnswerMetric):
    """Share of texts whose last number, as ProRefine reads it, is right; see [`~rewards.integer_match`]."""

    scores = staticmethod(METRICS["integer_match"])
