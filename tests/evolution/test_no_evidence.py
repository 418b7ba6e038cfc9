"""Why a step had nothing to reflect on."""

import random

from agentic_prompting.evolution import EvolveConfig, evolve
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.rewards import exact_match_reward
from agentic_prompting.rollout import FreeText
from support.evolving import ROOT, ROWS, Policy, reflect


def test_a_deterministic_policy_is_told(caplog):
    """Nothing to compare, so nothing to learn from: said at once, and what to do about it."""
    same = ScriptedChat(lambda messages: "<answer>river 1</answer>")
    result = evolve(
        same, ScriptedChat(reflect), ROWS, exact_match_reward, ROOT, EvolveConfig(steps=3)
    )
    assert {
        o["reason"] for log in result.steps for o in log.operators if o["operator"] == "mutation"
    } == {"no_evidence"}
    assert all(
        "gave the same reply in all 5 attempts" in log.note and "temperature" in log.note
        for log in result.steps
    )
    assert [record.message for record in caplog.records if "evidence" in record.message] == [
        f"no evidence at step 1: {result.steps[0].note}",
        f"nothing was learned: no step had evidence; {result.steps[0].note}",
    ]
    untagged = ScriptedChat(lambda messages: random.choice(["a", "b"]))
    note = (
        evolve(
            untagged, ScriptedChat(reflect), ROWS, exact_match_reward, ROOT, EvolveConfig(steps=1)
        )
        .steps[0]
        .note
    )
    assert "found no answer in any reply" in note and "grammar" in note
    assert EvolveConfig(grammar="free").grammar == FreeText()
    right = lambda **columns: [1.0] * len(columns["completions"])  # noqa: E731
    note = (
        evolve(Policy(), ScriptedChat(reflect), ROWS, right, ROOT, EvolveConfig(steps=1))
        .steps[0]
        .note
    )
    assert "every attempt at every problem got the reward 1" in note
    half = lambda **columns: [0.5] * len(columns["completions"])  # noqa: E731
    note = (
        evolve(Policy(), ScriptedChat(reflect), ROWS, half, ROOT, EvolveConfig(steps=1))
        .steps[0]
        .note
    )
    assert "same reward" in note
