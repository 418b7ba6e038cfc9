"""Semantic similarity: cosine of sentence embeddings, for answers that are right in many wordings (Appendix F, SSim).

Any sentence-transformers model will do (extra `[similarity]`), or anything with an `encode` method like theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
"""The released evaluation's model: 23 M parameters, 384 dimensions; texts are cut at 256 tokens."""


class Encoder(Protocol):
    """Texts to vectors, as sentence-transformers' `SentenceTransformer` does it."""

    @property
    def encode(self) -> Callable[..., Any]: ...


def load_encoder(model: str = DEFAULT_ENCODER, **options: Any) -> Encoder:
    """A sentence-transformers model by hub id or folder.

    Raises:
        `ImportError`: sentence-transformers is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            "semantic similarity needs sentence-transformers: pip install 'agentic-prompting[similarity]'"
        ) from error
    return SentenceTransformer(model, **options)


def semantic_similarity(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], encoder: Encoder | None = None, batch_size: int = 64
) -> list[float]:
    """Cosine similarity of each prediction with the nearest of its accepted answers, in [-1, 1].

    Each different text is encoded once, all of them in batches. An empty text is like nothing but another empty one:
    what an encoder says of it depends on its padding.

    Args:
        predictions (`Sequence[str]`): The answers given.
        answers (`Sequence[Sequence[str]]`): Accepted answers of each, at least one.
        encoder ([`Encoder`], *optional*): Defaults to [`DEFAULT_ENCODER`], loaded anew in each call.
        batch_size (`int`, *optional*, defaults to `64`): Texts encoded at once.

    Raises:
        `ValueError`: The lengths differ, or a prediction has no accepted answers.
    """
    for number, accepted in enumerate(answers):
        if isinstance(accepted, str) or not len(accepted):
            raise ValueError(f"answers of item {number} must be a list with at least one text, got {accepted!r:.80}")
    texts = list(dict.fromkeys([*predictions, *(answer for accepted in answers for answer in accepted)]))
    pairs = list(zip(predictions, answers, strict=True))
    if not texts:
        return []
    vectors = np.asarray((encoder or load_encoder()).encode(texts, batch_size=batch_size), dtype=float)
    # Normalised here: encoders differ in whether they do.
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    place = {text: number for number, text in enumerate(texts)}

    def cosine(one: str, other: str) -> float:
        if not one.strip() or not other.strip():
            return float(one.strip() == other.strip())
        return float(vectors[place[one]] @ vectors[place[other]])

    return [max(cosine(prediction, answer) for answer in accepted) for prediction, accepted in pairs]
