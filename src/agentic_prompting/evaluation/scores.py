"""The metrics by name, as functions of many answers: what the harness calls.

The formulas are those of `rewards/`, where training reads them too. `metrics/` wraps the same functions as
`evaluate.Metric`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..rewards import exact_match, integer_match, letter_match, math_match, token_f1, word_sorting_match
from .similarity import Encoder, load_encoder, semantic_similarity

ItemScore = Callable[[str, Sequence[str]], "float | None"]
"""One answer and the accepted ones to a score; `None` where none can be told."""

Score = Callable[[Sequence[str], Sequence[Sequence[str]]], "Sequence[float | None]"]
"""Many answers and the accepted ones of each to a score each, in order."""


def each(score: ItemScore) -> Score:
    """A score of one answer as a score of many."""

    def of_all(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> list[float | None]:
        return [score(prediction, accepted) for prediction, accepted in zip(predictions, answers, strict=True)]

    return of_all


_ITEM_SCORES: Mapping[str, ItemScore] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
    "math_match": math_match,
    "integer_match": integer_match,
    "letter_match": letter_match,
    "word_sorting_match": word_sorting_match,
}

METRICS: Mapping[str, Score] = {
    **{name: each(score) for name, score in _ITEM_SCORES.items()},
    "semantic_similarity": semantic_similarity,
}
"""Every metric by its name; the same names as in a data set's record and of the modules in `metrics/`."""

BINARY = frozenset(_ITEM_SCORES) - {"token_f1"}
"""Metrics that are 0 or 1: shares, which get Wilson's interval."""


def find_metrics(names: Sequence[str], encoder: str | Encoder | None = None) -> dict[str, Score]:
    """Metrics by name.

    Args:
        names (`Sequence[str]`): Of [`METRICS`].
        encoder (`str` or [`Encoder`], *optional*): For `semantic_similarity`: loaded once for all calls.

    Raises:
        `ValueError`: A metric does not exist; names those there are.
        `ImportError`: One needs a package that is not installed.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(f"unknown metric {', '.join(map(repr, unknown))}; known: {', '.join(METRICS)}")
    found = {name: METRICS[name] for name in names}
    if "semantic_similarity" in found and encoder is not None:
        loaded = load_encoder(encoder) if isinstance(encoder, str) else encoder
        found["semantic_similarity"] = partial(semantic_similarity, encoder=loaded)
    return found
