"""The library of invented facts: its demonstrations, and the summary of a run before, between and after."""

import pytest

from agentic_prompting.rollout import SPEC_FILE
from agentic_prompting.sandbox import library_run
from agentic_prompting.sandbox.library import (
    country_facts,
    town_facts,
    uneven_demonstrations,
)
from agentic_prompting.sandbox.library_run import prepare_library


def test_half_of_the_demonstrations_ask_and_fewer_end_right():
    facts = town_facts(seed=1, count=60)
    traces = uneven_demonstrations(facts, count=300, seed=1)
    asks = [trace for trace in traces if trace["observations"]]
    right = [trace for trace in asks if trace["turns"][-1] == trace["answers"][0]]
    assert 0.4 < len(asks) / len(traces) < 0.6
    assert 0.08 < len(right) / len(traces) < 0.25
    # What the library replies is true, also where the agent then repeats it.
    documents = {fact.question: fact.document for fact in facts}
    assert all(trace["observations"] == [documents[trace["question"]]] for trace in asks)


def test_demonstrations_are_decided_by_the_seed():
    facts = country_facts()
    assert uneven_demonstrations(facts, 8, 3) == uneven_demonstrations(facts, 8, 3)
    assert uneven_demonstrations(facts, 8, 3) != uneven_demonstrations(facts, 8, 4)


def test_more_demonstrations_than_facts_are_an_error():
    facts = town_facts(count=2)
    with pytest.raises(ValueError, match="12"):
        uneven_demonstrations(facts, 13)


def test_demonstrations_are_about_towns_of_the_training(tiny_policy, tmp_path, monkeypatch):
    """No held-out town is in a demonstration; and a finished warm start is used again."""
    seen = []

    def imitate(model, tokenizer, rollouts, output_dir, **arguments):
        seen.append([rollout.row["subject"] for rollout in rollouts])
        return model

    monkeypatch.setattr(library_run, "warm_start", imitate)
    run = prepare_library(tmp_path, str(tiny_policy), seed=2)
    again = prepare_library(tmp_path, str(tiny_policy), seed=2)
    assert len(seen) == 1 and not set(seen[0]) & set(run.test["subject"])
    assert run.model == again.model == str(tmp_path / "warm_start") != run.base_model
    assert (tmp_path / "warm_start" / SPEC_FILE).exists()
    assert prepare_library(tmp_path, str(tiny_policy), warm_start_steps=0).model == str(tiny_policy)
