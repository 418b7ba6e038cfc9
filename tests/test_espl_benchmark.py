"""The pure parts of benchmarks/espl_sandbox.py: what is reported follows from what the seeds gave."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import yaml

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "espl_sandbox.py"


def loaded(name, monkeypatch):
    """A script as a module, and under the name by which the others import it."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def benchmark(monkeypatch):
    return loaded("espl_sandbox", monkeypatch)


def test_intervals_are_students_over_seeds(benchmark):
    interval = benchmark.t_interval([0.8, 0.9, 1.0])
    assert interval == {"mean": 0.9, "low": pytest.approx(0.6516, abs=1e-4), "high": 1.0}
    assert benchmark.t_interval([0.5]) == {"mean": 0.5, "low": None, "high": None}


def test_rank_correlations(benchmark):
    assert benchmark.spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    assert benchmark.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert benchmark.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)  # ties at their mean rank
    assert math.isnan(benchmark.spearman([1, 1, 1], [1, 2, 3]))
    assert benchmark.partial(0.8, 0.0, 0.0) == pytest.approx(0.8)
    assert benchmark.partial(0.6, 0.6, 1.0 - 1e-12) == pytest.approx(0.0, abs=1e-4)


def test_a_summary_is_json_and_names_what_the_issue_asks_for(benchmark):
    def seed(number, value):
        rated = [(25.0, 0.1, 0), (30.0, 0.5, 1), (28.0, 0.4, 2), (35.0, 0.9, 3)]
        return benchmark.SeedResult(number, {"joint": value, "rl": value / 2}, rated)

    summary = benchmark.summarise([seed(1, 0.8), seed(2, 0.9)])
    assert {"seeds", "modes", "spearman", "spearman_birth_order", "spearman_partial"} <= set(summary)
    assert summary["modes"]["joint"]["mean"] == 0.85 and summary["spearman"] == 1.0
    assert "| joint | 0.850 [" in benchmark.table(summary)
    alone = benchmark.summarise([seed(1, 0.8)])
    assert "one seed" in benchmark.table(alone)
    assert "NaN" not in json.dumps(alone)


def test_a_mode_that_some_seeds_ran_has_an_interval_over_those(benchmark):
    results = [benchmark.SeedResult(1, {"rl": 0.1, "longer": 0.5}), benchmark.SeedResult(2, {"rl": 0.3})]
    summary = benchmark.summarise(results)
    assert summary["per_seed"] == {"rl": [0.1, 0.3], "longer": [0.5]}
    assert summary["modes"]["longer"] == {"mean": 0.5, "low": None, "high": None}


def test_what_the_workers_gave_is_one_result_a_seed(benchmark):
    part = benchmark.SeedResult
    parts = [
        part(2, {"rl": 0.2}),
        part(1, {"rl": 0.1}),
        part(1, {"joint": 0.9}, [(25.0, 0.1, 0)]),
        part(2, {"joint": 0.8}),
    ]
    assert benchmark.joined(parts) == [
        part(1, {"joint": 0.9, "rl": 0.1}, [(25.0, 0.1, 0)]),
        part(2, {"joint": 0.8, "rl": 0.2}),
    ]
    assert list(benchmark.joined(parts)[1].exact_match) == ["joint", "rl"], "in the order of the table"


def test_no_reported_seed_was_used_before(benchmark):
    assert not {*benchmark.TUNING_SEEDS} & {*benchmark.SEEDS} and len(set(benchmark.SEEDS)) >= 5


def test_the_config_is_the_examples(benchmark):
    from agentic_prompting import ESPLConfig
    from agentic_prompting.sandbox.setup import SAMPLING

    config = yaml.safe_load(benchmark.CONFIG.read_text())
    assert config.pop("task") == "sandbox"
    assert config["temperature"] == SAMPLING["temperature"], "the policy before training is sampled as in training"
    assert {setting: config[setting] for setting in benchmark.TRIED[0]} in benchmark.TRIED, "joint's was tuned"
    assert set(config) <= set(ESPLConfig.__dataclass_fields__), "the script passes all of it to ESPLConfig"


# --- what continuous integration asks of two runs ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"before": 0.51}, "too little left"),
        ({"after": 0.84}, "below 0.85"),
        ({"failed": 1}, "1 rollouts failed"),
        ({"end": [0.3, 0.24, 0.36]}, "not above its start"),
    ],
)
def test_a_run_that_does_not_learn_fails(changes, complaint, monkeypatch):
    learning = loaded("learning", monkeypatch)
    values = {"before": 0.35, "after": 0.9, "failed": 0, "end": [0.5, 0.44, 0.56], **changes}
    demo = {f"exact_match_{when}": values[when] for when in ("before", "after")}
    start = {"policy before, initial prompt": [0.2, 0.16, 0.26], "policy after, best prompt": values["end"]}
    found = learning.problems({**demo, "failed_rollouts": values["failed"]}, {"exact_match": start})
    assert (complaint is None) == (found == []) and all(complaint in problem for problem in found)


# --- the league, and the figures in the pages ----------------------------------------------------------------------


def record(method, seed, correct, world="rules"):
    return {"world": world, "seed": seed, "method": method, "correct": correct, "rollouts": 96, "calls": 7}


def test_the_league_pairs_by_seed_and_names_what_was_not_run(monkeypatch):
    league = loaded("league", monkeypatch)
    records = [record("joint", 1, "1111"), record("joint", 2, "1110"), record("rl", 1, "1100"), record("rl", 2, "1000")]
    rows = league.summarise(records)["rules"]
    assert rows["rl"]["mean"] == 0.375 and rows["rl"]["minus_joint"] == {"mean": -0.5, "low": -0.5, "high": -0.5}
    assert rows["joint"]["minus_joint"]["mean"] == 0 and rows["rl"]["seeds"] == [1, 2]
    table = league.table({"rules": rows})
    assert "| rules | rl | 0.375 [" in table and "| rules | GEPA, then GRPO | not run |" in table
    assert table.count("\n") == 1 + len(league.METHODS) + len(league.MISSING)
    assert not {*league.SEEDS} & {*league.TUNING_SEEDS}
    phases = league.METHODS.values()
    assert all(sum(portion for _, portion, _ in method) == 1 for method in phases), "equal rollouts"


def test_calls_beyond_the_budget_are_refused(monkeypatch):
    from agentic_prompting.llm import ScriptedChat, complete

    chat = loaded("league", monkeypatch).Counted(ScriptedChat(lambda messages: "yes"), 1)
    assert complete(chat, "may I?").text == "yes" and complete(chat, "again?").error is not None and chat.calls == 2


def test_a_page_that_says_something_else_than_the_records_is_noticed(monkeypatch, tmp_path):
    import gzip

    recompute = loaded("recompute", monkeypatch)
    monkeypatch.setattr(recompute, "REPOSITORY", tmp_path)
    (tmp_path / "records").mkdir()
    with gzip.open(tmp_path / "records" / "splits.jsonl.gz", "wt") as file:
        file.write(json.dumps({"split": "country", "seed": 601, "before": "0100", "after": "0111"}) + "\n")
    page = "before\n<!-- recomputed: splits -->\nold\n<!-- /recomputed -->\nafter\n"
    anew, names = recompute.recompute(page)
    assert names == ["splits"] and "| by country | 4 questions | 0.250 [one seed] | 0.750 [one seed] | 601 |" in anew
    assert recompute.recompute(anew) == (anew, ["splits"]) and anew.startswith("before\n") and anew.endswith("after\n")
