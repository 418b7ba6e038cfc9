"""benchmarks/credit.py without its trainings: what is rewarded, and that the table follows from the records."""

import random

import credit
import pytest

from agentic_prompting.rollout import Rollout, Sample, TagGrammar, parse_turn
from agentic_prompting.sandbox import all_questions, as_rows


def episode(row, *texts):
    rollout = Rollout([1], row=row)
    for text in texts:
        rollout.add_turn(Sample([2]), parse_turn(text, TagGrammar()))
    return rollout.finish("answered")


def test_a_door_is_judged_by_its_word():
    keys = credit.draw_keys(901)
    (row,) = credit.draw_rows(1, random.Random(0))
    right = [credit.ASK.format(keys[colour]) for colour in row["doors"]]
    assert credit.door_rewards(episode(row, *right, credit.END), keys) == [1.0] * 5
    assert credit.door_rewards(episode(row, right[0], credit.ASK.format("x"), credit.END), keys) == [1.0, 0.0, 0.0]
    assert credit.next_door(episode(row, *right[:1])) == credit.NEXT_DOOR.format(row["doors"][1])
    assert credit.next_door(episode(row, *right)) == credit.NO_DOOR
    assert set(keys) == set(credit.COLOURS) and credit.draw_keys(902) != keys


def test_a_country_is_judged_by_the_facts_that_it_takes():
    question = next(one for one in all_questions((2,)))
    (row,) = as_rows([question])
    ask = "<think> a </think> <interaction_prompt> {} </interaction_prompt>"
    facts = [ask.format(text) for text, _ in question.path]
    end = f"<think> a </think> <answer> {question.answer} </answer>"
    assert credit.country_rewards(episode(row, *facts, end)) == [0.25, 0.25, 1.0]
    assert credit.country_rewards(episode(row, facts[0], facts[0], ask.format(question.text), end))[:3] == [0.25, 0, 0]
    assert credit.country_rewards(episode(row, end.replace(question.answer, "nobody"))) == [0.0]


def record(rule, seed, rollouts, reached=True):
    return {"world": "doors", "rule": rule, "seed": seed, "rollouts": rollouts, "reached": reached}


def test_ratios_are_paired_by_seed():
    records = [record("rollout", 1, 640), record("turn", 1, 320), record("rollout", 2, 1280), record("turn", 2, 320)]
    found = credit.ratio(records, "doors", "turn")
    assert found["mean"] == pytest.approx(8**-0.5, abs=1e-3) and found["low"] < found["mean"] < found["high"]
    assert credit.ratio([*records, record("rollout", 3, 64)], "doors", "turn") == found
    assert credit.ratio(records, "doors", "state") is None and credit.ratio(records, "countries", "turn") is None
    shown = credit.table([*records, record("state", 1, 3840, reached=False)])
    assert "| doors | turn | 320 | 0 of 2 | 0.354 [" in shown
    assert "| doors | state | 3840 | 1 of 1 | 6.000 [one seed] |" in shown
