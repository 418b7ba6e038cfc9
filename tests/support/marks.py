"""Marks that several rooms' tests share."""

import os

import pytest

LONG = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "AGENTIC_PROMPTING_LONG" not in os.environ,
        reason="takes minutes: set AGENTIC_PROMPTING_LONG=1",
    ),
]


def long(test):
    """A decorator: the whole test is one of those; `LONG` marks some of a test's parameters."""
    for mark in LONG:
        test = mark(test)
    return test
