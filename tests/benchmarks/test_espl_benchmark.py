"""The pure parts of E-SPL's benchmarks: what is reported follows from what the seeds gave."""

import json
import math
from pathlib import Path

import pytest
import yaml

from benchmarks import lab, recompute
from benchmarks.learning import (
    calls,
    espl_figures,
    espl_sandbox as benchmark,
    league_first,
    smoke as learning,
)
from benchmarks.speed import async_training


def test_intervals_are_students_over_seeds():
    interval = lab.interval([0.8, 0.9, 1.0])
    assert interval == {
        "mean": 0.9,
        "low": pytest.approx(0.6516, abs=1e-4),
        "high": pytest.approx(1.1484, abs=1e-4),
    }
    assert lab.interval([0.5]) == {"mean": 0.5, "low": None, "high": None}


def test_rank_correlations():
    assert benchmark.spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    assert benchmark.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert benchmark.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(
        0.9487, abs=1e-4
    )  # ties at their mean rank
    assert math.isnan(benchmark.spearman([1, 1, 1], [1, 2, 3]))
    assert benchmark.partial(0.8, 0.0, 0.0) == pytest.approx(0.8)
    assert benchmark.partial(0.6, 0.6, 1.0 - 1e-12) == pytest.approx(0.0, abs=1e-4)


def test_what_ratings_are_worth_is_told_by_seed():
    rated = [(25.0, 0.1, 0), (30.0, 0.5, 1), (28.0, 0.4, 2), (35.0, 0.9, 3)]
    table = benchmark.table([{"seed": 1, "rated": rated}, {"seed": 2, "rated": rated}])
    assert "| rating | 1.00 [1.00, 1.00] | 1.00, 1.00 |" in table
    assert "| birth order | 0.80 [" in table
    assert "one seed" in benchmark.table([{"seed": 1, "rated": rated}])


def test_the_config_is_the_examples():
    from agentic_prompting import ESPLConfig
    from agentic_prompting.sandbox.setup import SAMPLING

    config = yaml.safe_load(lab.ESPL.read_text())
    assert config.pop("task") == "sandbox"
    assert config["temperature"] == SAMPLING["temperature"], (
        "the policy before training is sampled as in training"
    )
    assert set(config) <= set(ESPLConfig.__dataclass_fields__), (
        "the scripts pass all of it to ESPLConfig"
    )


# The figures
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "variant"),
    [
        ("hmmt", "joint"),
        ("hmmt", "mutation_only"),
        ("aime25", "rl_grpo"),
        ("aime25", "rl_cispo"),
        ("search", "evolution"),
        ("beyondaime", "joint"),
        ("beyondaime", "reflection"),
        ("sandbox", "policy_edits"),
    ],
)
def test_every_training_of_the_figures_is_one_that_the_program_takes(
    pair, variant, tmp_path, monkeypatch
):
    from agentic_prompting import ESPLConfig
    from agentic_prompting.cli import train_program

    monkeypatch.setattr(ESPLConfig, "bf16", False)
    method, *options = espl_figures.command(
        pair, variant, tmp_path, ["--use_cpu", "true", "--bf16", "false"]
    )
    script, args, _ = train_program.parse_method_options(method, options)
    script.check(args)
    assert args.output_dir == str(tmp_path / pair / variant)
    assert args.p_crossover == (0.0 if variant == "mutation_only" or pair == "beyondaime" else 0.2)
    assert args.mode == {"rl_grpo": "rl", "rl_cispo": "rl"}.get(
        variant, variant if variant[-3:] == "ion" else "joint"
    )
    assert (args.loss_type == "cispo") == (variant == "rl_cispo")


def test_figures_from_what_runs_leave(tmp_path, capsys):
    """A trainer's folder, the checkpoint of `evolve`, and a run that is not there."""
    from agentic_prompting.evolution import EvolveConfig, evolve

    pair = tmp_path / "hmmt"
    for name, values in (("joint", [0.2, 0.6, 0.7, 0.8]), ("rl_grpo", [0.1, 0.4])):
        (pair / name).mkdir(parents=True)
        log = [{"step": 5 * step, "eval_reward": value} for step, value in enumerate(values)]
        (pair / name / "trainer_state.json").write_text(json.dumps({"log_history": log}))

    def wise(messages):
        return "b" if "Learn" in messages[0]["content"] else f"{sum(map(ord, str(messages))) % 2}"

    teach = lambda messages: json.dumps([{"op": "add", "text": "Learn."}])  # noqa: E731

    def right(completions, **_):
        return [float(completion[0]["content"] == "b") for completion in completions]

    config = EvolveConfig(
        steps=3, problems_per_step=2, reflect_on="imperfect", eval_every=1, eval_all=True
    )
    state = pair / "evolution" / "state.json"
    evolve(wise, teach, ["?", "??"], right, "Do.", config, checkpoint=state, eval_rows=["???"])

    espl_figures.main(["--pair", "hmmt", "--runs", str(tmp_path), "--draw", str(tmp_path / "png")])
    result = json.loads(capsys.readouterr().out)
    drawn = result["figures"]
    assert drawn["12"]["shown"]["joint"] == [[0, 0.2], [5, 0.6], [10, 0.7], [15, 0.8]]
    assert drawn["12"]["shown"]["evolution"][-1] == [3, 1.0]
    assert drawn["11"]["shown"]["joint"] == pytest.approx(0.7)
    assert "rl_cispo" in drawn["11"]["missing"]
    assert set(result["to_train"]) == {"mutation_only", "policy_edits", "rl_cispo", "reflection"}
    assert "--loss_type cispo" in result["to_train"]["rl_cispo"]
    assert "population" not in drawn["8"]
    assert "no prompt has a held-out score" in drawn["8"]["missing"]["joint"]
    assert {rating["held_out"] for rating in espl_figures.ratings_of(pair / "evolution")} == {
        0.0,
        1.0,
    }
    for name in ("1", "11", "12", "13", "14", "15"):
        assert Path(drawn[name]["picture"]).read_bytes().startswith(b"\x89PNG"), name
    state.rename(pair / "joint" / "population.json")
    espl_figures.main(
        [
            "--pair=hmmt",
            f"--runs={tmp_path}",
            f"--draw={tmp_path / 'png'}",
            "--figures=8",
        ]
    )
    drawn = json.loads(capsys.readouterr().out)["figures"]["8"]
    assert Path(drawn["picture"]).exists() and drawn["spearman"]["joint"] > 0


# --- what continuous integration asks of two runs -------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"before": 0.51}, "too little left"),
        ({"after": 0.84}, "below 0.85"),
        ({"failed": 1}, "1 rollouts failed"),
        ({"end": [0.3, 0.24, 0.36]}, "not above its start"),
        ({"first": [0.45, 0.39, 0.51]}, "no better than its first"),
        ({"agree": 0.7}, "order 0.70 of the pairs"),
    ],
)
def test_a_run_that_does_not_learn_fails(changes, complaint, monkeypatch):
    values = {
        "before": 0.35,
        "after": 0.9,
        "failed": 0,
        "end": [0.5, 0.44, 0.56],
        "agree": 0.8,
        **changes,
    }
    demo = {f"exact_match_{when}": values[when] for when in ("before", "after")}
    espl = {
        "policy before, initial prompt": [0.2, 0.16, 0.26],
        "policy after, best prompt": values["end"],
    }
    espl["policy after, initial prompt"] = values.get("first", [0.15, 0.11, 0.2])
    problem_texts = learning.problems(
        {**demo, "failed_rollouts": values["failed"]}, {"exact_match": espl}, values["agree"]
    )
    assert (complaint is None) == (problem_texts == [])
    assert all(complaint in problem for problem in problem_texts)


# --- the league, and the figures in the pages -----------------------------------------------------


def record(method, seed, correct, world="rules"):
    return {
        "world": world,
        "seed": seed,
        "method": method,
        "correct": correct,
        "rollouts": 96,
        "calls": 7,
    }


def test_the_league_pairs_by_seed_and_names_what_was_not_run(monkeypatch):
    records = [
        record("joint", 1, "1111"),
        record("joint", 2, "1110"),
        record("rl", 1, "1100"),
        record("rl", 2, "1000"),
    ]
    rows = league_first.summarise(records)["rules"]
    assert rows["rl"]["mean"] == 0.375
    assert rows["rl"]["minus_joint"] == {
        "mean": -0.5,
        "low": -0.5,
        "high": -0.5,
    }
    assert rows["joint"]["minus_joint"]["mean"] == 0 and rows["rl"]["seeds"] == [1, 2]
    table = league_first.table({"rules": rows})
    assert "| rules | rl | 0.375 [" in table and "| rules | GEPA, then GRPO | not run |" in table
    assert table.count("\n") == 1 + len(league_first.METHODS)
    assert len(league_first.missing("rules", rows)) == len(league_first.METHODS) - 2


def test_what_would_count_against_us_is_said_first(monkeypatch):
    results = {"joint": "1111", "rl": "1100", "evolution": "1000"}
    records = [
        record(method, seed, correct) for method, correct in results.items() for seed in (1, 2)
    ]
    text = league_first.verdicts(league_first.summarise(records))
    assert text.startswith("- *rules*: joint training is first of 3.")
    assert (
        "- Not so: joint training is not above RL and evolution alone. Minus joint: rl -0.500 "
        "[-0.500" in text
    )
    assert text.count("Not decided yet") == 4
    records += [record("joint", seed, "1000", "habits") for seed in (1, 2)]
    records += [record("rl", seed, "1100", "habits") for seed in (1, 2)]
    text = league_first.verdicts(league_first.summarise(records))
    assert "- *habits*: joint training is not first but number 2 of 2; first is rl." in text
    assert (
        "- **Against us**: joint training is more than .05 below RL. Minus joint: rl +0.250 ["
        in text
    )


def test_leads_are_paired_by_seed(monkeypatch):
    scored = [
        (0, 0, True, "1110"),
        (1, 0, True, "1111"),
        (0, 2, True, "1100"),
        (1, 2, True, "1110"),
        (1, 2, False, ""),
    ]
    records = [
        {
            "seed": seed,
            "lead": lead,
            "corrected": corrected,
            "correct": correct or "0001",
            "age": lead,
        }
        for seed, lead, corrected, correct in scored[::-1]
    ]
    summary = async_training.summarise(records)
    assert list(summary) == ["0", "2", "2, uncorrected"] and summary["2"]["seeds"] == [0, 1]
    assert summary["2"]["minus_lead_0"] == {"mean": -0.25, "low": -0.25, "high": -0.25}
    assert summary["2, uncorrected"]["minus_lead_0"]["mean"] == -0.75
    table = async_training.table(records)
    assert "| 2 | 0.625 [" in table
    assert "| 2, uncorrected | 0.250 [one seed] | -0.750 [one seed] | 2.0 | 1 |" in table


def test_a_page_that_says_something_else_than_the_records_is_noticed(monkeypatch, tmp_path):
    import gzip

    monkeypatch.setattr(recompute, "REPOSITORY", tmp_path)
    (tmp_path / "records").mkdir()
    setting = {"by": "country", "seed": 601, "environment": "home", "turns_allowed": None}
    with gzip.open(tmp_path / "records" / "prompt_r1.jsonl.gz", "wt") as file:
        for agent, correct in (("sft", "0100"), ("multi", "0111")):
            file.write(json.dumps({**setting, "agent": agent, "correct": correct}) + "\n")
    page = "before\n<!-- recomputed: prompt_r1.splits -->\nold\n<!-- /recomputed -->\nafter\n"
    anew, names = recompute.recompute(page)
    assert names == ["prompt_r1.splits"]
    assert "| by country | 0.250 [one seed] | 0.750 [one seed] | 601 |" in anew
    assert recompute.recompute(anew) == (anew, names)
    assert anew.startswith("before\n")
    assert anew.endswith("after\n")


def test_calls_are_compared_seed_by_seed(monkeypatch):

    def run(setting, seed, calls, score, twice=None):
        about = {
            "world": "plain",
            "setting": setting,
            "seed": seed,
            "step": 6,
            "reached": score >= 0.85,
        }
        about["curve"] = [{"different": calls // 4}]
        return {
            **about,
            "calls": calls,
            "usd": calls / 1000,
            "exact_match": score,
            "paid_twice": twice,
        }

    records = [
        run("today", 1, 1000, 0.86),
        run("today", 2, 2000, 0.88),
        run("all", 2, 1000, 0.87, 0),
    ]
    records += [
        run("all", 1, 250, 0.8, 0),
        run("all", 3, 1, 1.0, 0),
    ]  # the third has no run to compare with
    row = calls.of_settings(records)["plain", "all"]
    assert (row["calls_ratio"]["mean"], row["calls"], row["reached"]) == (0.375, 625, 1)
    assert row["overlap"] and row["paid_twice"] == 0 and row["seeds"] == [1, 2]
    assert "| plain | all | 6.0 | 625 | 25% | 0.38 [" in calls.table(records)
    assert not calls.of_settings(records[1:])["plain", "all"]["overlap"], "one seed has no interval"
