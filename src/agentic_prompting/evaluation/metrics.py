"""Metrics: ours by name, those of the `evaluate` package, and functions.

Each scores many answers at once.

The formulas of ours are in `rewards/`, because training uses them too, except for semantic
similarity: the cosine of sentence embeddings, for answers that can be worded in many ways (Appendix
F, SSim). `answer_metric.py` makes them loadable by `evaluate`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
"""Maps an answer and its accepted answers to a score, or to `None` if it cannot be scored."""

Score = Callable[[Sequence[str], Sequence[Sequence[str]]], "Sequence[float | None]"]
"""Maps many answers and the accepted answers of each to their scores, in order."""

Metric = Any
"""A name (one of ours, or one for `evaluate.load`), the path of a metric's script, an `evaluate`
object, or a [`Score`].
"""


def each(score: ItemScore) -> Score:
    """Turn a score of a single answer into a score of many answers."""

    def score_all(
        predictions: Sequence[str], answers: Sequence[Sequence[str]]
    ) -> list[float | None]:
        pairs = zip(predictions, answers, strict=True)
        return [score(prediction, accepted) for prediction, accepted in pairs]

    score_all.__wrapped__ = score  # type: ignore[attr-defined]  # `check_answers` reads the rule from it
    return score_all


DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
"""The released evaluation's model: 23 M parameters, 384 dimensions; texts are truncated to 256
tokens.
"""


class Encoder(Protocol):
    """Encodes texts as vectors, with the interface of sentence-transformers'
    `SentenceTransformer`.
    """

    @property
    def encode(self) -> Callable[..., Any]: ...


def load_encoder(model: str = DEFAULT_ENCODER, **options: Any) -> Encoder:
    """Load a sentence-transformers model from a hub id or a folder.

    Raises:
        `ImportError`: If sentence-transformers is not installed.
    """
    # An optional dependency, imported only when it is used.
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            "semantic similarity needs sentence-transformers: pip install "
            "'agentic-prompting[similarity]'"
        ) from error
    return SentenceTransformer(model, **options)


def semantic_similarity(
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    encoder: Encoder | None = None,
    batch_size: int = 64,
) -> list[float]:
    """Cosine similarity of each prediction with the nearest of its accepted answers, in [-1, 1].

    Each distinct text is encoded once, all of them in batches. The similarity of an empty text is 1
    with another empty text and 0 with any other, because the encoder's vector for it depends on the
    padding.

    Args:
        predictions (`Sequence[str]`): Predicted answers.
        answers (`Sequence[Sequence[str]]`): Accepted answers of each prediction, at least one.
        encoder ([`Encoder`], *optional*): Defaults to [`DEFAULT_ENCODER`], loaded in each call.
        batch_size (`int`, *optional*, defaults to `64`): Number of texts encoded at once.

    Raises:
        `ValueError`: If the lengths differ, or a prediction has no accepted answers.
    """
    # A single text would pass for a list of its letters.
    for number, accepted in enumerate(answers):
        if isinstance(accepted, str) or not len(accepted):
            raise ValueError(
                f"answers of item {number} must be a list with at least one text, got "
                f"{accepted!r:.80}"
            )
    pairs = list(zip(predictions, answers, strict=True))

    # The distinct texts, in the order in which they occur.
    texts = list(predictions)
    for accepted in answers:
        texts.extend(accepted)
    texts = list(dict.fromkeys(texts))
    if not texts:
        return []

    # The vectors are normalised here, because not every encoder does it.
    if encoder is None:
        encoder = load_encoder()
    vectors = np.asarray(encoder.encode(texts, batch_size=batch_size), dtype=float)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    index_of = {text: index for index, text in enumerate(texts)}

    def cosine(prediction: str, answer: str) -> float:
        if not prediction.strip() or not answer.strip():
            return float(prediction.strip() == answer.strip())
        return float(vectors[index_of[prediction]] @ vectors[index_of[answer]])

    similarities = []
    for prediction, accepted in pairs:
        similarities.append(max(cosine(prediction, answer) for answer in accepted))
    return similarities


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
"""Our metrics by name. The records of data sets use the same names."""


def judged(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the metric named `judged`: the judge's score in the record of each answer
    ([`Answer`]'s `judged`).
    """
    return [record.get("judged") for record in records]


BINARY = (frozenset(_ITEM_SCORES) | {"judged"}) - {"token_f1"}
"""Metrics that are 0 or 1: their repeats have pass@k and a majority."""

METRIC_PATH = str(Path(__file__).with_name("answer_metric.py"))
"""The script of our metrics, for `evaluate.load(METRIC_PATH, "token_f1")`."""


def find_metrics(
    metrics: Sequence[Metric] | Mapping[str, Metric], encoder: str | Encoder | None = None
) -> dict[str, Score]:
    """Find metrics and return them as functions of answers, by name.

    Args:
        metrics (`list` or `dict`): Names of [`METRICS`]; names or paths for `evaluate.load`;
            objects that it returns; functions from answers and accepted answers to one score per
            answer. If a metric of `evaluate` returns several numbers, select one: `"rouge:rougeL"`,
            or by its key in a `dict`, `{"rougeL": evaluate.load("rouge")}`.
        encoder (`str` or [`Encoder`], *optional*): Encoder for `semantic_similarity`, loaded once
            for all calls.

    Raises:
        `ValueError`: If a metric does not exist (the message lists those that do), does not compare
            texts, or returns several numbers.
        `ImportError`: If a metric needs a package that is not installed.
    """
    # In a list, each metric goes by its own name.
    if isinstance(metrics, Mapping):
        metrics_by_name = dict(metrics)
    else:
        metrics_by_name = {}
        for metric in metrics:
            name = _name_of(metric)
            if metrics_by_name.setdefault(name, metric) is not metric:
                raise ValueError(
                    f"two metrics are called {name!r}: pass a dict, with a name for each"
                )

    scores: dict[str, Score] = {}
    for name, metric in metrics_by_name.items():
        score = _find_score(name, metric)
        if score is semantic_similarity and encoder is not None:
            # Load the encoder once, not in each call of the metric.
            loaded_encoder = load_encoder(encoder) if isinstance(encoder, str) else encoder
            score = partial(semantic_similarity, encoder=loaded_encoder)
        scores[name] = score
    return scores


def _name_of(metric: Metric) -> str:
    if isinstance(metric, str):
        return metric
    return str(getattr(metric, "name", None) or metric.__name__)


def _find_score(name: str, metric: Metric) -> Score:
    # Objects: a metric of `evaluate`, or a function.
    if hasattr(metric, "compute"):
        return EvaluateScore(metric, hint=name)
    if callable(metric):
        return metric  # type: ignore[no-any-return]  # assumed to be a Score

    # Names: ours first, then those of `evaluate`, with a key after a colon.
    if metric in METRICS:
        return METRICS[metric]
    if metric == "judged":
        return judged  # type: ignore[return-value]  # scores records: `score_records` passes them
    import evaluate

    base, key = re.fullmatch(r"(.+?)(?::(\w+))?", metric, re.DOTALL).groups()  # type: ignore[union-attr]
    hint = name if name != metric else Path(base).stem
    try:
        return EvaluateScore(evaluate.load(base), key, hint=hint)
    except FileNotFoundError as error:
        raise ValueError(
            f"unknown metric {metric!r}; known: {', '.join(METRICS)}; `evaluate` has none either: "
            f"{error} A function of your own is named with --judge module:name, in headroom with "
            "--score"
        ) from None


_LOWER_IS_BETTER = frozenset({"wer", "cer", "mer", "ter"})
"""Error rates: of several accepted answers, the one with the lowest rate counts."""


class EvaluateScore:
    """A metric of the `evaluate` package as a [`Score`]: one number per answer, so its mean
    has an interval.

    The accepted answer with the best score counts. A metric that returns one number for many
    answers is computed for each answer separately. For a corpus score such as BLEU this is the mean
    over answers, not the score of the corpus.

    Args:
        module (`evaluate.EvaluationModule`): An object that `evaluate.load` returned.
        key (`str`, *optional*): The number to use, if the metric returns several. Not needed if one
            of them has the metric's name.
        hint (`str`, *optional*): The key to use if the metric returns such a number.

    Raises:
        `ValueError`: If the metric does not compare texts, or it is not clear which number to use.
    """

    def __init__(self, module: Any, key: str | None = None, hint: str | None = None):
        if not hasattr(module, "features"):
            raise ValueError(
                "a combination of metrics is not supported: pass its metrics separately, each by "
                "its name"
            )
        self.module = module

        # The input formats of the metric that compare a text with a text, or with a list of texts.
        formats = module.features if isinstance(module.features, list) else [module.features]
        text_formats = []
        for features in formats:
            has_both_inputs = set(features) == {"predictions", "references"}
            if has_both_inputs and _is_text(features["predictions"]):
                text_formats.append(features)
        if not text_formats:
            raise ValueError(f"the metric {module.name} does not compare texts, but {formats[0]}")
        self.takes_all = any(not _is_text(features["references"]) for features in text_formats)
        self.key, self.one_by_one = self._probe(key, hint)

    def _probe(self, key: str | None, hint: str | None) -> tuple[str, bool]:
        """Find the number to use, and whether the metric returns one for all answers, by scoring
        two answers.
        """
        # Two answers tell a metric with a number for each from one with a number for all.
        references = [["a b"], ["a b"]] if self.takes_all else ["a b", "a b"]
        computed = self._compute(["a b", "a c"], references)
        numbers = []
        for name, value in computed.items():
            if _is_number(value) or _are_numbers(value, 2):
                numbers.append(name)

        # Without a key: the hint, the metric's own names, or the only number that there is.
        candidates: list[str | None] = [key]
        if not key:
            candidates = [hint, self.module.name, self.module.config_name, "score"]
            if len(numbers) == 1:
                candidates += numbers
        for candidate in candidates:
            if candidate is not None and candidate in numbers:
                return candidate, _is_number(computed[candidate])

        # No candidate fits: the message lists the numbers that there are.
        listed = ", ".join(numbers)
        message = f"the metric {self.module.name} gives {listed or 'no number'}"
        if key:
            raise ValueError(f"{message}, and no {key}")
        example = f"{self.module.name}:{listed.split(', ')[0]}"
        raise ValueError(f"{message}: say which, as in '{example}'")

    def __call__(
        self, predictions: Sequence[str], answers: Sequence[Sequence[str]]
    ) -> list[float | None]:
        # Each prediction is scored against all its accepted answers at once, or against each of
        # them.
        repeated_predictions: list[str] = []
        references: list[Any] = []
        counts = []
        for prediction, accepted in zip(predictions, answers, strict=True):
            targets = [list(accepted)] if self.takes_all else list(accepted)
            repeated_predictions += [prediction] * len(targets)
            references += targets
            counts.append(len(targets))
        numbers = iter(self._compute_numbers(repeated_predictions, references))

        # The best of each prediction's numbers counts.
        choose_best = min if self.key in _LOWER_IS_BETTER else max
        scores: list[float | None] = []
        for count in counts:
            candidates = [next(numbers) for _ in range(count)]
            scored = [number for number in candidates if number is not None]
            scores.append(choose_best(scored, default=None))
        return scores

    def _compute_numbers(self, predictions: list[str], references: list[Any]) -> list[float | None]:
        """Return one number per prediction; `None` if the metric cannot score it."""
        # The metric returns a number for each answer, so one call computes them all.
        if predictions and not self.one_by_one:
            computed: Iterable[Any] = self._compute(predictions, references)[self.key]
            return [_finite(value) for value in computed]
        # Otherwise it returns one number for all answers, so each answer needs a call.
        numbers: list[float | None] = []
        for prediction, reference in zip(predictions, references, strict=True):
            # The metric is third-party code: an answer on which it fails has no score, rather than
            # 0.
            try:
                numbers.append(_finite(self._compute([prediction], [reference])[self.key]))
            except Exception as error:
                logger.warning(
                    "the metric %s cannot score %.80r: %s", self.module.name, prediction, error
                )
                numbers.append(None)
        return numbers

    def _compute(self, predictions: list[str], references: list[Any]) -> Mapping[str, Any]:
        scores = self.module.compute(predictions=predictions, references=references)
        # Some metrics, such as `wer`, return a bare number.
        return scores if isinstance(scores, Mapping) else {self.module.name: scores}


def _is_text(feature: object) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_number(value: object) -> bool:
    return isinstance(value, Real)  # numpy's numbers are


def _are_numbers(value: object, n: int) -> bool:
    if not isinstance(value, (list, tuple, np.ndarray)) or len(value) != n:
        return False
    return all(map(_is_number, value))


def _finite(value: float) -> float | None:
    """Return a number as a plain float, or `None` if it is infinite or NaN."""
    return float(value) if math.isfinite(value) else None
