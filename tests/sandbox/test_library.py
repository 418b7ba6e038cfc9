"""The library of invented facts: its demonstrations, and the summary of a run before, between and
after.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from agentic_prompting.rollout import SPEC_FILE, Observation, Rollout, Turn
from agentic_prompting.sandbox import library_run
from agentic_prompting.sandbox.library import (
    country_facts,
    town_facts,
    uneven_demonstrations,
)
from agentic_prompting.sandbox.library_run import (
    LibraryRun,
    prepare_library,
    report_library_run,
)


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


def rollout_of(row, answer, asks):
    """A rollout that ends with this answer; `None` if it failed."""
    rollout = Rollout([1], row=row)
    if asks:
        rollout.turns.append(Turn("ask", "act", True))
        rollout.observations.append(Observation("document"))
    if answer is None:
        return rollout.finish("failed")
    rollout.turns.append(Turn(answer, "answer", True, answer=answer))
    return rollout.finish("answered")


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_run_is_summed_up_by_stage(tmp_path, monkeypatch, capsys, is_warm):
    rows = [
        {"question": f"q{number}", "answers": ["yes"], "subject": f"town {number // 2}"}
        for number in range(6)
    ]
    rights = {"base": 1, "warm": 3, str(tmp_path): 5}  # of six; the last one fails before

    def ask(model, run, rows, *settings):
        answers = ["yes"] * rights[model] + ["no"] * (6 - rights[model])
        if model == "base":
            answers[5] = None
        pairs = zip(rows, answers, strict=True)
        return [rollout_of(row, answer, asks=answer == "yes") for row, answer in pairs]

    monkeypatch.setattr(library_run, "ask", ask)
    cards = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path), bf16=False, generation_batch_size=8),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        state=SimpleNamespace(global_step=7, log_history=[{"rollout/failed": 0.25}, {}]),
        saved_spec=lambda: None,
        create_model_card=lambda: cards.append((tmp_path / "summary.json").exists()),
    )
    test = Dataset.from_list(rows)
    run = LibraryRun("base", "warm" if is_warm else "base", None, test, test)
    summary = report_library_run(run, trainer, seconds=100.0)

    assert summary == json.loads((tmp_path / "summary.json").read_text()) and cards == [True]
    assert (summary["model"], summary["questions"], summary["steps"]) == ("base", 6, 7)
    assert summary["failed_rollouts"] == 3  # one here, two in training
    assert summary["exact_match_before"] == summary["asked_before"] == 0.2
    assert summary["exact_match_after"] == 0.8333 and len(summary["interval_after"]) == 2
    assert summary["exact_match_difference"][0] == 0.8
    stages = ["before", "warm", "after"] if is_warm else ["before", "after"]
    assert [
        key.removeprefix("interval_") for key in summary if key.startswith("interval_")
    ] == stages
    assert ("exact_match_by_rewards" in summary) == is_warm
    if is_warm:
        assert summary["exact_match_by_rewards"][0] == 0.3333

    printed = capsys.readouterr().out
    assert "exact match before     0.200   95 % interval" in printed
    assert "6 questions about 3 towns that training never saw, 7 steps, 100 s, 3 failed" in printed
    assert printed.index("--- before training") < printed.index("--- after training")
    dialogues = json.loads((tmp_path / "trajectories.json").read_text())
    assert dialogues["before"][-1] == "agent        no"
    assert dialogues["after"][1:3] == ["agent        ask", "environment  document"]
