"""Prompt-R1's reward against the paper's formula."""

import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.rewards import (
    PromptR1Reward,
    PromptR1Score,
    exact_match_reward,
    token_f1_reward,
)
from agentic_prompting.rollout import TagGrammar, parse_turn
from support.agent_turns import ASK, BARE, END, NILE, WRONG, episode


def score(turns, answers, **arguments) -> PromptR1Score:
    return PromptR1Reward(**arguments).score_turns(turns, answers)


# The golden table of the reference.

GOLDEN = {
    "t, end, right": ([ASK, END], 1.0, 1.0),
    "t, end, wrong": ([ASK, WRONG], 0.0, 0.0),
    "t, bare, right": ([ASK, BARE], -0.1, -0.1),
    "end, right": ([END], -0.4, -0.4),
    "t, t, bare, right": ([ASK, ASK, BARE], 1.0, -0.1),
    "t, t, t, none": ([ASK] * 3, -0.2, -0.6),
    "t, t, t, t, none (the loophole)": ([ASK] * 4, 0.0, -0.6),
}


@pytest.mark.parametrize(("turns", "paper", "strict"), GOLDEN.values(), ids=GOLDEN.keys())
def test_golden_table(turns, paper, strict):
    assert score(turns, NILE).total == pytest.approx(paper, abs=1e-12)
    assert score(turns, NILE, gate="strict").total == pytest.approx(strict, abs=1e-12)


@pytest.mark.parametrize("gate", ["paper", "strict"])
def test_figure_8(gate):
    """Three interactions and an answer: the shape of the paper's case study, in our own words."""
    requests = [
        (
            "This asks for the castle near Nairn where an Earl Cawdor's last-born child came to "
            "the world. Name it."
        ),
        (
            "You named Cawdor Castle. Does it stand in the parish of Cawdor, and did the family "
            "own it?"
        ),
        "So the place and the owners both fit. Do you agree that it is the castle asked for?",
    ]
    turns = [
        f"<think>Step {i}.</think>\n<interaction_prompt>{r}</interaction_prompt>"
        for i, r in enumerate(requests)
    ]
    turns.append("<think>Place and owners are confirmed.</think>\n<answer>Cawdor Castle</answer>")
    assert score(turns, ["Cawdor Castle"], gate=gate) == PromptR1Score(
        total=1.0, format=1.0, answer=1.0
    )


@pytest.mark.parametrize(
    ("turns", "form"),
    [
        ([], 0.0),
        (["no tag at all"], 0.0),
        ([ASK, "<think>cut off"], 0.4),
        ([ASK, "<think>Nothing found.</think><answer></answer>"], 0.4 + 0.25),
        ([ASK, END + " and more"], 0.4 + 0.25 + 0.25),
        (["<interaction_prompt>No thought.</interaction_prompt>", END], 0.6),
        ([END, END], 0.6),  # an answer in the middle is no request
        ([ASK, ASK + END], 0.4),  # both at once parse as neither
    ],
)
def test_format_reward_by_parts(turns, form):
    result = score(turns, NILE)
    assert result.format == pytest.approx(form)
    assert result.total == pytest.approx(form - 1)


def test_the_answer_is_reported_even_where_form_bars_it_from_the_total():
    assert score([END], NILE).answer == 1.0
    assert score([ASK], NILE).answer == 0.0


def test_partial_answers_get_their_f1_over_the_best_reference():
    turns = [ASK, "<think>Known.</think><answer>river Nile</answer>"]
    assert score(turns, ["Danube", "Nile"]).total == pytest.approx(2 / 3)


def test_k_is_reached_within_a_tolerance():
    # 3 * .1 is not .3 in floating point; on paper the format is complete.
    result = score([ASK, END], NILE, alpha=0.1 + 0.1 + 0.1, beta=0.25, gamma=0.25, delta=0.2)
    assert result == (1.0, 1.0, 1.0)
    assert score([ASK, END], NILE, k=2.0).total == pytest.approx(-1.0)


def test_no_answer_is_not_the_answer_nothing():
    """A question without an answer (gold `""`) is not solved by never answering."""
    assert score([ASK] * 4, [""]).answer == 0.0
    assert score([ASK, "<think>None.</think><answer></answer>"], [""]).answer == 1.0


def test_no_answer_is_no_exact_match_in_the_logs():
    """To a question that has no answer (SQuAD v2) the answer "" is right; a rollout out of turns
    gave none.
    """
    logged = {}
    PromptR1Reward()(
        [], [], [episode(ASK, status="out_of_turns")], [[""]], log_metric=logged.__setitem__
    )
    assert (logged["exact_match"], logged["f1"]) == (0.0, 0.0)


def test_score_reads_a_rollouts_own_answers():
    rollout = episode(ASK, END)
    rollout.row["answers"] = NILE
    assert PromptR1Reward().score(rollout) == (1.0, 1.0, 1.0)


def test_another_grammar():
    grammar = TagGrammar(think="thought", act="ask", observation="reply", answer="final")
    turns = ["<thought>a</thought><ask>b</ask>", "<thought>c</thought><final>Nile</final>"]
    assert score(turns, NILE, grammar=grammar).total == 1.0
    assert score(turns, NILE).total == -1.0


@given(
    turns=st.lists(
        st.sampled_from([ASK, END, WRONG, BARE, "", "<think>x", "<answer></answer>", "text"])
        | st.text(),
        max_size=8,
    ),
    answers=st.lists(st.text(), min_size=1, max_size=3),
    gate=st.sampled_from(["paper", "strict"]),
)
def test_range(turns, answers, gate):
    result = score(turns, answers, gate=gate)
    assert -1 <= result.total <= 1
    assert 0 <= result.format <= 1
    assert 0 <= result.answer <= 1


@given(turns=st.lists(st.sampled_from([ASK, END, WRONG, BARE, "text"]), max_size=8))
def test_strict_never_pays_more_and_only_pays_for_an_answer(turns):
    paper = score(turns, NILE)
    strict = score(turns, NILE, gate="strict")
    assert strict.total <= paper.total
    assert strict.total < 0 or parse_turn(turns[-1]).kind == "answer"


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="gate"):
        score([END], NILE, gate="lenient")
    with pytest.raises(ValueError, match="gate"):
        PromptR1Reward(gate="")
    with pytest.raises(ValueError, match="answers"):
        score([ASK], [])
    with pytest.raises(ValueError, match="answers"):
        score([END], "Nile")
    with pytest.raises(ValueError, match="alpha"):
        PromptR1Reward(alpha=-1)
    for coefficients in ({"alpha": float("nan")}, {"k": float("nan")}, {"k": float("inf")}):
        with pytest.raises(ValueError, match="alpha"):
            PromptR1Reward(**coefficients)


def test_the_reward_uses_the_turns_as_the_trainer_parsed_them():
    grammar = TagGrammar(act="ask")
    rollout = episode("<think>a</think><ask>b</ask>", END, grammar=grammar)
    assert PromptR1Reward()([], [], [rollout], [NILE]) == [1.0]
    assert PromptR1Reward(grammar=TagGrammar())([], [], [rollout], [NILE]) == [pytest.approx(-0.4)]
    assert PromptR1Reward(grammar=grammar)([], [], [rollout], [NILE]) == [1.0]


def test_the_reward_object():
    strict = PromptR1Reward(gate="strict")
    assert strict([], [], [episode(*[ASK] * 4, status="out_of_turns")], [NILE]) == [
        pytest.approx(-0.6)
    ]
    assert strict.__name__ == PromptR1Reward().__name__ == "prompt_r1_reward"
    assert pickle.loads(pickle.dumps(strict)) == strict != PromptR1Reward()
    with pytest.raises(FrozenInstanceError):
        strict.alpha = 1.0
    with pytest.raises(ValueError, match="answers"):
        strict([], [], [episode(ASK, END)], [[]])
    with pytest.raises(ValueError):  # a batch of unequal columns is a bug, not a shorter batch
        strict([], [], [episode(ASK, END)], [])


def test_trl_names_the_rewards():
    pytest.importorskip("trl")
    from trl.trainer.utils import get_callable_name

    names = [
        get_callable_name(reward)
        for reward in (PromptR1Reward(), exact_match_reward, token_f1_reward)
    ]
    assert names == ["prompt_r1_reward", "exact_match_reward", "token_f1_reward"]
