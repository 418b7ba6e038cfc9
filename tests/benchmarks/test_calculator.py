"""The task of benchmarks/real/calculator.py: its questions, its tool and its demonstrations."""

import json
import random

import pytest

from benchmarks.real.calculator import calculate, demonstrate, draw_rows, table


def test_questions_are_different_and_have_their_answers():
    rows = draw_rows(7, 300)
    assert len({row["question"] for row in rows}) == 300
    for row in rows:
        assert row["answers"] == [str(eval(row["expression"]))]


@pytest.mark.parametrize(
    "expression",
    ["2 ** 9", "10 / 3", "x + 1", "__import__('os')", "1.5 * 2", "", "1 + " * 30 + "1"],
)
def test_the_tool_refuses_what_is_no_arithmetic(expression):
    with pytest.raises((ValueError, SyntaxError)):
        calculate(expression)


def test_demonstrations_are_of_mixed_quality():
    generator = random.Random(7)
    guesses = right = 0
    for row in draw_rows(7, 300):
        shown = demonstrate(row, generator)
        if not shown["observations"]:
            guesses += 1
            continue
        call = json.loads(shown["turns"][0].splitlines()[1])
        value = calculate(call["arguments"]["expression"])
        assert shown["observations"] == [value] == [shown["turns"][1]]
        right += value == row["answers"][0]
    assert 90 < guesses < 150 and 60 < right < 120


def test_the_table_shows_a_seed_at_every_stage():
    record = {
        "seed": 7,
        "seconds": 90,
        "failed_in_training": 0,
        "before": {"called": "0000", "right": "0000"},
        "warm": {"called": "1100", "right": "010-"},
        "after": {"called": "1111", "right": "1111"},
    }
    row = table([record]).splitlines()[-1]
    assert "| 0.000 → 0.667 → 1.000 | 0.000 → 0.333 → 1.000 |" in row
    # A question that failed is left out of the pairs, and counted.
    assert "+0.667" in row and "| 1 | 1.5 |" in row
