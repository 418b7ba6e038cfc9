"""For `evaluate.load`: maths equivalence."""

from agentic_prompting.evaluation.metric import AnswerMetric
from agentic_prompting.evaluation.scores import METRICS


class MathMatch(AnswerMetric):
    """Share of answers mathematically equal to an accepted one (extra `[math]`); see [`~rewards.math_match`]."""

    scores = staticmethod(METRICS["math_match"])
