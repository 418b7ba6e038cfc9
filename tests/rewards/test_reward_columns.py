"""The columns that a reward function needs, and where a missing one is."""

import pytest

from agentic_prompting.data import load_task
from agentic_prompting.evolution import EvolveConfig, evolve
from agentic_prompting.rewards.reward_columns import (
    check_columns,
    check_keywords,
    required_columns,
)


def needs_level(completions, level, **columns):
    return [1.0 for _ in level]


def test_parameters_without_default_are_columns():
    def score(completions, rollout, level, bonus=1.0, *, answers, **columns):
        return [bonus] * len(completions)

    assert required_columns(score) == ["level", "answers"]
    assert required_columns(max) == []


def test_a_function_without_kwargs_is_refused():
    def score(completions, answer):
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match=r"score .*prompts.*kwargs"):
        check_keywords(score)
    check_keywords(needs_level)
    check_keywords(max)


@pytest.mark.parametrize(
    "meta", ['{"level": "hard"}', {"level": "hard"}], ids=["as JSON", "as a dict"]
)
def test_a_column_in_meta_is_named(meta):
    with pytest.raises(ValueError, match=r"'level'.* `meta`.*\['level'\]"):
        check_columns(needs_level, {"question": "a ?", "meta": meta})


def test_a_score_is_no_reward():
    def score(answer, answers):
        return 1.0

    with pytest.raises(ValueError, match="score.*--judge.*completions"):
        check_columns(score, {"question": "a ?", "answers": ["b"]})


@pytest.mark.parametrize("meta", [None, "no JSON", "[1]", {"row": 1}])
def test_a_column_that_is_nowhere_names_no_meta(meta):
    with pytest.raises(ValueError, match="'level'") as refused:
        check_columns(needs_level, {"question": "a ?", "meta": meta})
    assert "It is in" not in str(refused.value)


def test_loaded_rows_name_their_meta(tmp_path):
    (tmp_path / "mine.csv").write_text("question,answer,level\na ?,b,hard\n")
    (row,) = load_task(str(tmp_path / "mine.csv"), columns={"level": "level"})
    with pytest.raises(ValueError, match="json.loads"):
        check_columns(needs_level, row)


def test_a_column_that_loading_left_out_is_named(tmp_path):
    (tmp_path / "mine.csv").write_text("question,answer,level\na ?,b,hard\n")
    (row,) = load_task(str(tmp_path / "mine.csv"))
    with pytest.raises(ValueError, match=r"columns=\{'level': 'level'\}"):
        check_columns(needs_level, row)


def test_evolve_refuses_the_missing_column_before_a_call():
    calls = []
    with pytest.raises(ValueError, match="'level'"):
        evolve(
            lambda messages: calls.append(messages) or "b",
            lambda messages: calls.append(messages) or "b",
            [{"question": "a ?", "answers": ["b"], "meta": {"level": "hard"}}],
            needs_level,
            "Answer.",
            EvolveConfig(problems_per_step=1),
        )
    assert not calls
