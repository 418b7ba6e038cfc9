"""Children that copy a training problem are marked in the journal, and refused above a limit."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.evolution import (
    EvolveConfig,
    ProblemResult,
    SystemPrompt,
    evolve,
    read_journal,
)
from agentic_prompting.evolution.copied_text import RUN_LENGTH, find_copied_problem
from agentic_prompting.evolution.operators import FAILURES_IN_WORDS
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.rewards import exact_match_reward
from support.evolving import ROOT, ROWS, SETTINGS, Policy

LONG = "A train leaves Lyon at nine and meets another one from Paris at half past eleven."
SHORT = "What is 17 plus 4?"


def find(principle, *questions, parents=(ROOT,), preamble="Answer."):
    child = SystemPrompt(preamble, (principle,))
    return find_copied_problem(
        child, parents, [ProblemResult(question, "21") for question in questions]
    )


def test_a_copied_problem_is_found_whatever_its_case():
    copied = find(f"If asked: {LONG.upper()} say ten.", LONG, SHORT)
    assert (copied.question, copied.share) == (LONG, 1.0)
    assert find("To 'what is 17 plus 4' say 21.", SHORT).share == 1.0


def test_a_line_from_a_long_problem_is_a_copy():
    passage = f"{LONG} " + " ".join(f"word{number}" for number in range(400))
    assert find(LONG, passage).share == 1.0


@pytest.mark.parametrize(
    "principle",
    [
        "Add the two numbers.",
        "Find out when both trains leave before you compare them.",
        "17 plus 4",
    ],
)
def test_advice_is_no_copy(principle):
    assert find(principle, LONG, SHORT) is None


def test_a_part_is_a_share():
    words = LONG.split()
    half = " ".join(words[: (len(words) + RUN_LENGTH) // 2]) + " " + "and so on " * 10
    assert 0.3 < find(half, LONG).share < 0.7


def test_what_a_parent_says_is_not_new():
    parent = SystemPrompt("Answer.", (LONG,))
    assert find(LONG, LONG, parents=[ROOT, parent]) is None


def test_instructions_that_every_problem_has_are_no_copy():
    shared = "Think step by step and put the final answer into a box at the end."
    questions = [f"{shared} What is the capital of {name}?" for name in ("Kenya", "Peru")]
    assert find(shared, *questions) is None
    assert find(shared, questions[0]) is not None


@given(st.text(max_size=60), st.text(max_size=60))
def test_a_share_is_between_0_and_1(principle, question):
    copied = find(principle or "x", question) if principle.strip() else None
    assert copied is None or 0 < copied.share <= 1


def copying_reflector(messages):
    """A reference LLM that puts a problem and its answer into the prompt."""
    text = messages[0]["content"]
    if text.startswith("Task: revise"):
        return json.dumps([{"op": "add", "text": f"To '{ROWS[0]['question']}' say river 0."}])
    return "[]"


def evolve_with_copies(folder, **changes):
    config = replace(
        SETTINGS,
        steps=2,
        problems_per_step=len(ROWS),
        p_crossover=0.0,
        reflection="one_call",
        **changes,
    )
    return evolve(
        Policy(),
        ScriptedChat(copying_reflector),
        ROWS,
        exact_match_reward,
        ROOT,
        config,
        checkpoint=folder / "state.json",
    )


def test_a_copying_child_is_refused(tmp_path, caplog):
    result = evolve_with_copies(tmp_path)
    assert len(result.population.members) == 1
    (operator,) = result.steps[0].operators
    assert operator["reason"] == "copied" and operator["counts"]["copied"] == 1
    assert FAILURES_IN_WORDS["copied"] in result.why_nothing_learned
    attempt = read_journal(tmp_path / "state.evolution.jsonl")[0]
    assert attempt["reason"] == "copied" and attempt["child"] is None
    assert attempt["copied"] == {"question": ROWS[0]["question"], "share": 1.0}


def test_a_limit_of_one_only_marks(tmp_path):
    result = evolve_with_copies(tmp_path, max_copied_share=1.0)
    assert len(result.population.members) > 1
    attempts = read_journal(tmp_path / "state.evolution.jsonl")
    assert attempts[0]["child"] == 1 and attempts[0]["copied"]["share"] == 1.0


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_the_limit_is_a_share(share):
    with pytest.raises(ValueError, match="max_copied_share"):
        EvolveConfig(max_copied_share=share)
