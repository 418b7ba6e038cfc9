"""For `evaluate.load`: word order."""

from agentic_prompting.evaluation.metric import AnswerMetric
from agentic_prompting.evaluation.scores import METRICS


class WordSortingMatch(AnswerMetric):
    """Share of texts whose words after `Answer:` are in the right order; see [`~rewards.word_sorting_match`]."""

    scores = staticmethod(METRICS["word_sorting_match"])
