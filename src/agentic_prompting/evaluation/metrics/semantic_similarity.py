"""For `evaluate.load`: semantic similarity."""

from agentic_prompting.evaluation.metric import AnswerMetric
from agentic_prompting.evaluation.similarity import semantic_similarity


class SemanticSimilarity(AnswerMetric):
    """Mean cosine similarity with the nearest accepted answer. Options of `compute`: `encoder`, `batch_size`; see
    [`~evaluation.semantic_similarity`]."""

    scores = staticmethod(semantic_similarity)
