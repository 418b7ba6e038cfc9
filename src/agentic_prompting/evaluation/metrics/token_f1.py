"""For `evaluate.load`: token F1."""

from agentic_prompting.evaluation.metric import AnswerMetric
from agentic_prompting.evaluation.scores import METRICS


class TokenF1(AnswerMetric):
    """Mean token F1, the best over the accepted answers; see [`~rewards.token_f1`]."""

    scores = staticmethod(METRICS["token_f1"])
