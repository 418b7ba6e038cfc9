"""One canonical text for equal numbers, and texts that are nothing but a number."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy
import pandas
import pytest
from hypothesis import given, strategies as st

from agentic_prompting.llm.numbers import (
    finite_float,
    is_missing,
    is_number,
    number_text,
    read_plain_number,
    value_text,
)

EQUAL = {
    "4": [
        4,
        4.0,
        Decimal("4.00"),
        Fraction(8, 2),
        numpy.int8(4),
        numpy.float32(4),
        numpy.longdouble(4),
    ],
    "2.5": [2.5, Decimal("2.50"), Fraction(5, 2), numpy.float16(2.5)],
    "0.1": [0.1, Decimal("0.1"), Fraction(1, 10), numpy.float32(0.1), numpy.float16(0.1)],
    "0.0000001": [1e-7, Decimal("1E-7"), Fraction(1, 10**7)],
    "-3": [-3, -3.0, Decimal("-3")],
    "0": [0, 0.0, -0.0, Decimal("0E-9"), Fraction(0)],
    "1000000000000000000000000": [10**24, 1e24, Decimal("1e24")],
    "1/3": [Fraction(1, 3)],
    "9007199254740993": [2**53 + 1],
}


@pytest.mark.parametrize(("text", "numbers"), EQUAL.items(), ids=EQUAL)
def test_equal_numbers_have_one_text(text, numbers):
    assert {number_text(number) for number in numbers} == {text}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_read_back_from_its_text(number):
    assert float(number_text(number)) == number


@given(st.fractions())
def test_a_fraction_is_read_back_from_its_text(fraction):
    assert Fraction(number_text(fraction)) == fraction


@pytest.mark.parametrize(
    "number", [math.inf, -math.inf, Decimal("Infinity"), numpy.float32("inf"), math.nan]
)
def test_what_is_not_finite_has_no_text(number):
    with pytest.raises(ValueError, match="finite"):
        number_text(number)
    assert value_text(math.inf) == "inf"


def test_missing_values_of_all_kinds():
    missing = [None, math.nan, numpy.float32("nan"), Decimal("nan"), pandas.NA, pandas.NaT]
    assert all(map(is_missing, missing)) and {value_text(value) for value in missing} == {""}
    assert not any(map(is_missing, [0, "", 10**400, Decimal(0), Fraction(1, 3), [], False]))
    assert not is_number(True) and not is_number(numpy.bool_(True)) and not is_number("4")


PLAIN = {
    "25": 25,
    "2.5": 2.5,
    "-5": -5,
    "−5": -5,
    "$5": 5,
    "1,000.5": 1000.5,
    "25%": 25,
    "5.": 5,
    ".5": 0.5,
    " 7 ": 7,
}


@pytest.mark.parametrize(("text", "number"), PLAIN.items(), ids=PLAIN)
def test_plain_numbers_are_read(text, number):
    assert read_plain_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "-", "$", "x", "1 000", "1,00", "007", "1e3", "1/2", "5 apples", "9" * 5000]
)
def test_other_texts_are_no_plain_number(text):
    assert read_plain_number(text) is None


def test_rewards_are_finite_in_single_precision():
    assert finite_float(10**400) is None
    assert finite_float(1e39) is None
    assert finite_float(math.nan) is None
    assert finite_float(-math.inf) is None and finite_float(numpy.float32(0.5)) == 0.5
    with pytest.raises(ValueError):
        finite_float("good")
