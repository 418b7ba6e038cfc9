"""For `evaluate.load`: choice letter."""

from agentic_prompting.evaluation.metric import AnswerMetric
from agentic_prompting.evaluation.scores import METRICS


class LetterMatch(AnswerMetric):
    """Share of texts whose option letter after `Answer:` is right; see [`~rewards.letter_match`]."""

    scores = staticmethod(METRICS["letter_match"])
