"""`validate_dataset`."""

import pytest
from datasets import Dataset

from agentic_prompting.data import (
    validate_dataset,
)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the dataset is empty"),
        ([{"question": "q", "answer": "a"}], "no column 'answers'; it has: question, answer"),
        ([{"prompt": "q"}], "no column 'question', 'answers'; it has: prompt"),
        ([{"text": "q", "answers": ["a"]}], "no column 'question'; it has: text, answers"),
        (
            [{"question": "q", "answers": ["a"]}, {"question": "r", "answers": []}],
            "row 1 .*`answers` is empty",
        ),
        ([{"question": "q", "answers": "a"}], "row 0 .*must be a list of strings, got 'a'"),
        ([{"question": "q", "answers": [1]}], "row 0 .*must be a list of strings"),
        ([{"question": "q", "answers": None}], "row 0 .*must be a list of strings, got None"),
        ([{"question": "q", "answers": ["a", None]}], "row 0 .*must be a list of strings"),
        ([{"question": " ", "answers": ["a"]}], "row 0 .*`question` must be a text"),
        ([{"question": 3, "answers": ["a"]}], "row 0 .*`question` must be a text"),
    ],
)
def test_validate_dataset_names_what_is_wrong(rows, message):
    with pytest.raises(ValueError, match=message) as caught:
        validate_dataset(Dataset.from_list(rows))
    assert "\n" not in str(caught.value)


def test_validate_dataset_lets_good_ones_pass():
    good = Dataset.from_list([{"question": "q", "answers": [""], "context": "long"}])
    validate_dataset(good)
    validate_dataset(good.to_iterable_dataset())


def test_validate_dataset_with_other_columns():
    rendered = Dataset.from_list([{"prompt": "rendered", "answers": []}])
    validate_dataset(rendered, columns=("prompt",))
    with pytest.raises(ValueError, match="row 0 .*`answers` is empty"):
        validate_dataset(rendered, columns=("prompt", "answers"))
    with pytest.raises(ValueError, match="no column 'level'; it has: prompt, answers"):
        validate_dataset(rendered, columns=("prompt", "level"))


def test_validate_dataset_of_nothing():
    with pytest.raises(ValueError, match="train_dataset is missing"):
        validate_dataset(None)
