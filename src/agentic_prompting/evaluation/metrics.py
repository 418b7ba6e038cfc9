"""Metrics: ours by name, any of the `evaluate` package, or a function; each scores many answers at once.

The formulas of ours are those of `rewards/`, where training reads them too, and semantic similarity: the cosine of
sentence embeddings, for answers that are right in many wordings (Appendix F, SSim). `answer_metric.py` makes them
loadable by `evaluate`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..rewards import (
    exact_match,
    integer_match,
    letter_match,
    math_match,
    token_f1,
    word_sorting_match,
)

logger = logging.getLogger(__name__)

ItemScore = Callable[[str, Sequence[str]], "float | None"]
"""Maps an answer and the accepted ones to a score; `None` if it cannot be scored."""

Score = Callable[[Sequence[str], Sequence[Sequence[str]]], "Sequence[float | None]"]
"""Maps many answers and the accepted ones of each to their scores, in order."""

Metric = Any
"""A name (ours, or one that `evaluate.load` knows), the path of a metric's script, an `evaluate` object, or a
[`Score`]."""


def each(score: ItemScore) -> Score:
    """A score of one answer as a score of many."""

    def of_all(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> list[float | None]:
        return [
            score(prediction, accepted)
            for prediction, accepted in zip(predictions, answers, strict=True)
        ]

    of_all.__wrapped__ = score  # type: ignore[attr-defined]  # by which `check_answers` finds the rule
    return of_all


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
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    encoder: Encoder | None = None,
    batch_size: int = 64,
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
            raise ValueError(
                f"answers of item {number} must be a list with at least one text, got {accepted!r:.80}"
            )
    texts = list(
        dict.fromkeys([*predictions, *(answer for accepted in answers for answer in accepted)])
    )
    pairs = list(zip(predictions, answers, strict=True))
    if not texts:
        return []
    vectors = np.asarray(
        (encoder or load_encoder()).encode(texts, batch_size=batch_size), dtype=float
    )
    # Normalised here: encoders differ in whether they do.
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    place = {text: number for number, text in enumerate(texts)}

    def cosine(one: str, other: str) -> float:
        if not one.strip() or not other.strip():
            return float(one.strip() == other.strip())
        return float(vectors[place[one]] @ vectors[place[other]])

    return [
        max(cosine(prediction, answer) for answer in accepted) for prediction, accepted in pairs
    ]


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
"""Our metrics by name; the same names as in a data set's record."""


def judged(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """The judge's score of each answer, recorded with it ([`Answer`]'s `judged`); the metric named `judged`."""
    return [record.get("judged") for record in records]


BINARY = (frozenset(_ITEM_SCORES) | {"judged"}) - {"token_f1"}
"""Metrics that are 0 or 1: shares, which get Wilson's interval."""

METRIC_PATH = str(Path(__file__).with_name("answer_metric.py"))
"""The script of our metrics, for `evaluate.load(METRIC_PATH, "token_f1")`."""


def find_metrics(
    metrics: Sequence[Metric] | Mapping[str, Metric], encoder: str | Encoder | None = None
) -> dict[str, Score]:
    """Metrics as functions of answers, by name.

    Args:
        metrics (`list` or `dict`): Names of [`METRICS`]; names or paths for `evaluate.load`; objects it gave; functions
            from answers and accepted answers to a score each. Where a metric of `evaluate` gives several numbers, say
            which: `"rouge:rougeL"`, or in a `dict` its name, `{"rougeL": evaluate.load("rouge")}`.
        encoder (`str` or [`Encoder`], *optional*): For `semantic_similarity`: loaded once for all calls.

    Raises:
        `ValueError`: A metric does not exist (names those there are), does not compare texts, or gives several numbers.
        `ImportError`: One needs a package that is not installed.
    """
    named = (
        metrics
        if isinstance(metrics, Mapping)
        else {_name_of(metric): metric for metric in metrics}
    )
    found = {name: _score(name, metric) for name, metric in named.items()}
    for name, score in found.items():
        if score is semantic_similarity and encoder is not None:
            loaded = load_encoder(encoder) if isinstance(encoder, str) else encoder
            found[name] = partial(semantic_similarity, encoder=loaded)
    return found


def _name_of(metric: Metric) -> str:
    return (
        metric if isinstance(metric, str) else str(getattr(metric, "name", None) or metric.__name__)
    )


def _score(name: str, metric: Metric) -> Score:
    if hasattr(metric, "compute"):
        return EvaluateScore(metric, hint=name)
    if callable(metric):
        return metric  # type: ignore[no-any-return]  # assumed to be a Score
    if metric in METRICS:
        return METRICS[metric]
    if metric == "judged":
        return judged  # type: ignore[return-value]  # of records: `score_records` knows
    import evaluate

    base, key = re.fullmatch(r"(.+?)(?::(\w+))?", metric, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        return EvaluateScore(
            evaluate.load(base), key, hint=name if name != metric else Path(base).stem
        )
    except FileNotFoundError as error:
        known = ", ".join(METRICS)
        raise ValueError(
            f"unknown metric {metric!r}; known: {known}; `evaluate` has none either: {error}"
        ) from None


_LOWER_IS_BETTER = frozenset(
    {"wer", "cer", "mer", "ter"}
)  # where several accepted answers differ, the least counts


class EvaluateScore:
    """A metric of the `evaluate` package as a [`Score`]: a number for each answer, so that its mean has an interval.

    Of several accepted answers the one that suits best counts. A metric that gives one number for many answers is
    asked about each by itself: of a corpus's score (BLEU) the mean over answers is reported, which is not the corpus's.

    Args:
        module (`evaluate.EvaluationModule`): As `evaluate.load` gives it.
        key (`str`, *optional*): Which of the numbers it gives; a metric with one of its own name needs none.
        hint (`str`, *optional*): The key, if it has such a number.

    Raises:
        `ValueError`: It compares something else than texts, or it is not clear which number is meant.
    """

    def __init__(self, module: Any, key: str | None = None, hint: str | None = None):
        if not hasattr(module, "features"):
            raise ValueError(
                "a combination of metrics is given one by one, each with a name of its own"
            )
        self.module = module
        formats = module.features if isinstance(module.features, list) else [module.features]
        ours = [
            one
            for one in formats
            if set(one) == {"predictions", "references"} and _is_text(one["predictions"])
        ]
        if not ours:
            raise ValueError(f"the metric {module.name} does not compare texts, but {formats[0]}")
        self.takes_all = any(
            not _is_text(one["references"]) for one in ours
        )  # accepted answers in one list
        self.key, self.one_by_one = self._probed(key, hint)

    def _probed(self, key: str | None, hint: str | None) -> tuple[str, bool]:
        """Which number counts, and whether it is one for all answers: seen in what it says of two."""
        references = [["a b"], ["a b"]] if self.takes_all else ["a b", "a b"]
        computed = self._computed(["a b", "a c"], references)
        numbers = [
            name for name, value in computed.items() if _is_number(value) or _are_numbers(value, 2)
        ]
        usual = (
            hint,
            self.module.name,
            self.module.config_name,
            "score",
            *(numbers if len(numbers) == 1 else ()),
        )
        for name in (key,) if key else usual:
            if name in numbers:
                return name, _is_number(computed[name])
        known = ", ".join(numbers)
        raise ValueError(
            f"the metric {self.module.name} gives {known or 'no number'}"
            + (
                f", and no {key}"
                if key
                else f": say which, as in '{self.module.name}:{known.split(', ')[0]}'"
            )
        )

    def __call__(
        self, predictions: Sequence[str], answers: Sequence[Sequence[str]]
    ) -> list[float | None]:
        best = min if self.key in _LOWER_IS_BETTER else max
        references = [[accepted] if self.takes_all else accepted for accepted in answers]
        numbers = self._numbers(
            [
                prediction
                for prediction, accepted in zip(predictions, references, strict=True)
                for _ in accepted
            ],
            [list(one) if self.takes_all else one for accepted in references for one in accepted],
        )
        scores = [list(islice(numbers, len(accepted))) for accepted in references]
        return [best((one for one in scored if one is not None), default=None) for scored in scores]

    def _numbers(self, predictions: list[str], references: list[Any]) -> Iterator[float | None]:
        if predictions and not self.one_by_one:
            yield from map(_finite, self._computed(predictions, references)[self.key])
            return
        for prediction, reference in zip(predictions, references, strict=True):
            try:
                yield _finite(self._computed([prediction], [reference])[self.key])
            except Exception as error:  # others' code: an answer that it cannot score is no zero
                logger.warning(
                    "the metric %s cannot score %.80r: %s", self.module.name, prediction, error
                )
                yield None

    def _computed(self, predictions: list[str], references: list[Any]) -> Mapping[str, Any]:
        scores = self.module.compute(predictions=predictions, references=references)
        return (
            scores if isinstance(scores, Mapping) else {self.module.name: scores}
        )  # `wer` gives a bare number


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real)  # numpy's numbers are


def _are_numbers(value: Any, n: int) -> bool:
    return (
        isinstance(value, (list, tuple, np.ndarray))
        and len(value) == n
        and all(map(_is_number, value))
    )


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
