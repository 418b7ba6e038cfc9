"""`benchmarks/lab.py`: settings, a training and its held-out questions, intervals as text, records."""

import gzip
import json
from types import SimpleNamespace

import pytest
import yaml

from agentic_prompting import LLMEnvironment
from agentic_prompting.rollout import Limits
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE
from benchmarks import lab
from benchmarks.learning import calls


@pytest.mark.parametrize("config", [lab.DEMO, lab.ESPL], ids=lambda path: path.parent.name)
def test_settings_are_the_files_with_changes(config):
    values = yaml.safe_load(config.read_text())
    options = lab.settings(config, seed=7, max_steps=3)
    assert not {*lab.PROGRAM_KEYS} & options.keys() and {*lab.PROGRAM_KEYS} & values.keys()
    assert (options["seed"], options["max_steps"], options["disable_tqdm"]) == (7, 3, True)
    unchanged = values.keys() - {"seed", "max_steps", *lab.PROGRAM_KEYS}
    assert unchanged and all(options[name] == values[name] for name in unchanged)


def test_values_and_rows_are_shown_alike():
    values = [0.8, 0.9, 1.0]
    assert lab.shown(values) == lab.shown(lab.interval(values)) == "0.900 [0.652, 1.148]"
    assert lab.shown([0.25], "+", digits=2) == "+0.25 [one seed]"
    assert lab.shown([]) == lab.shown(None) == ""
    assert lab.markdown(("a", "b"), [(1, "x"), ("", 2)]).splitlines() == [
        "| a | b |",
        "|---|---|",
        "| 1 | x |",
        "|  | 2 |",
    ]


def test_records_are_appended_and_what_is_missing_is_found(tmp_path):
    records = lab.Records(tmp_path / "new" / "runs.jsonl.gz")
    wanted = [("a", 1), ("a", 2), ("b", 1)]
    assert records.read() == [] and records.missing(("name", "seed"), wanted) == wanted
    records.add({"name": "a", "seed": 2, "score": 0.5})
    records.add({"name": "b", "seed": 1, "score": 0.25})
    assert records.missing(("name", "seed"), wanted) == [("a", 1)]
    assert [record["score"] for record in records.read()] == [0.5, 0.25]
    assert {"commit", "date", "machine"} <= records.read()[0].keys()
    with gzip.open(records.path, "rt") as file:
        assert len([json.loads(line) for line in file]) == 2


def test_a_training_is_evaluated_until_it_is_good(asking_policy, rows, tmp_path, monkeypatch):
    """Calls of training are counted and those of evaluations are not; a shared reply is asked for
    once.
    """
    small = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
    }
    monkeypatch.setattr(
        calls, "settings", lambda *config, **changes: lab.settings(*config, **changes, **small)
    )
    monkeypatch.setattr(calls, "GOOD", {"plain": 0.0})  # reached at the first evaluation
    spec = SimpleNamespace(prompt_template=SANDBOX_TEMPLATE)
    sandbox = SimpleNamespace(model=asking_policy, train=rows, test=rows, spec=spec)
    found = {
        name: calls.run(name, 1, "plain", (Oracle(seed=1), sandbox, None), tmp_path / "runs")
        for name in calls.SETTINGS
    }
    for name, one in found.items():
        assert one["setting"] == name
        assert one["reached"]
        assert [look["step"] for look in one["curve"]] == [2]
    shared = found["replies shared"]
    today = found["today"]
    assert shared["paid_twice"] == 0 and today["paid_twice"] is None
    assert (
        0
        < shared["calls"]
        == shared["curve"][0]["different"]
        == today["curve"][0]["different"]
        < today["calls"]
    )
    assert shared["exact_match"] == today["exact_match"], "sharing leaves training as it is"


def test_a_saved_agent_is_asked_with_changed_settings(asking_policy, rows):
    environment = LLMEnvironment(Oracle())
    rollouts = lab.ask(asking_policy, environment, rows, seed=3)
    assert [rollout.row["question"] for rollout in rollouts] == rows["question"]
    assert set(lab.correct(rollouts)) <= {"0", "1"} and len(lab.correct(rollouts)) == 8
    again = lab.ask(asking_policy, environment, rows, seed=3, limits=Limits(max_turns=1))
    assert max(len(one.turns) for one in again) == 1 < max(len(one.turns) for one in rollouts)
    assert 0 <= lab.share(lab.correct(again)) <= 1


def test_records_are_written_where_there_is_no_history(tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "REPOSITORY", tmp_path)
    records = lab.Records(tmp_path / "runs.jsonl.gz")
    records.add({"score": 0.5})
    assert records.read()[0]["commit"] == "unknown"
