"""The second league: its cells, what they say together, and that a run that was killed goes on
where it was.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.learning import league, league_cell
from support.marks import long


def record(cell, correct="1100", **changes):
    world, reflector, seed, method = cell
    about = {
        "world": world,
        "reflector": reflector,
        "seed": seed,
        "method": method,
        "correct": correct,
    }
    about |= {
        "ends": ["code", "code", "symbol", "domain"],
        "guarded": ["capital", "code", "symbol"],
    }
    about["others"] = dict.fromkeys(league.OTHERS, 0.125)
    return {**about, "calls": 10, "curve": [], "rated": [], "commit": "x", "seconds": 1, **changes}


RIGHT = {"joint": "1110", "one call": "1111", "GEPA, then GRPO": "1000"}


def of_all(setting, seeds=league.SEEDS):
    return [
        record((*setting, seed, method), RIGHT[method])
        for seed in seeds
        for method in league.PRIMARY
    ]


def test_the_cells_are_those_of_the_protocol():
    todo = list(league.cells())
    assert len(todo) == len(set(todo)) == 16 * (6 * 4 + 3 + 2)
    assert {seed for _, _, seed, _ in todo} == set(range(521, 537))
    assert not {*league.SEEDS} & {*league.TUNING_SEEDS}
    assert todo[:4] == [("rules", "easy", 521, method) for method in league.PRIMARY] + [
        ("rules", "easy", 522, "joint")
    ]
    assert {method for *_, method in todo} == {*league_cell.METHODS, *league_cell.GONE} - {
        "joint, then fixed teacher"
    }
    trained = [
        phases for method, phases in league_cell.METHODS.items() if method not in league.DISTILLED
    ]
    assert all(sum(portion for _, portion, _ in phases) == 1 for phases in trained), (
        "equal rollouts"
    )
    with pytest.raises(ValueError, match="commit [0-9a-f]{7,} runs it"):
        league_cell.run("rules", "easy", 1, "one call, paired", Path("x"))
    assert len({league.path_of(Path("x"), cell) for cell in todo}) == len(todo)


def test_differences_are_paired_by_seed_over_the_settings_that_are_complete():
    first, second = league.SETTINGS[:2]
    records = of_all(first) + of_all(second, league.SEEDS[:3])
    outcomes = league.outcomes(records)
    row = outcomes["one_call_minus_joint"]
    assert (row["mean"], row["n"], row["settings"]) == (0.25, 16, ["rules, easy"])
    assert outcomes["one_call_minus_gepa"]["mean"] == 0.75
    assert outcomes["paired_minus_one_call"]["n"] == 0
    assert outcomes["each"]["rules, .7"]["one_call_minus_joint"]["n"] == 3
    assert outcomes["calls"]["joint"] == 10
    both = league.outcomes(of_all(first) + of_all(second))["one_call_minus_joint"]
    assert both["n"] == 16 and len(both["settings"]) == 2, (
        "the mean of the settings, a value for each seed"
    )


def test_what_counts_against_us_is_said_first():
    text = league.verdicts(of_all(league.SETTINGS[0]))
    assert text.count("- Not so: ") == 2
    assert "one-sided lower bound +0.250." in text
    assert "Difference +0.250 [+0.250, +0.250], over 1 of 6 settings" in text
    text = league.verdicts(of_all(league.SETTINGS[0], league.SEEDS[:2]))
    assert text.count("Not decided yet (2 of 16 seeds)") == 2
    assert "Cells that are not run yet: *rules, easy*, 106 of 112; *rules, .7*, 64 of 64; " in text
    worse = [
        {**one, "correct": "0000" if one["method"] == "one call" else one["correct"]}
        for one in of_all(("rules", "easy"))
    ]
    assert league.verdicts(worse).startswith("- **Against us**")


def test_paired_ratings_and_distillations_have_their_lines():
    seeds = league.SEEDS
    cell = ("rules", "easy")
    others = {
        "one call, paired": "1111",
        "joint, then imitation": "1000",
        "joint, then on-policy": "1100",
    }
    records = of_all(cell) + [
        record((*cell, seed, method), right) for seed in seeds for method, right in others.items()
    ]
    text = league.verdicts(records)
    assert "**Against us**: paired ratings with top-two do not gain" in text.splitlines()[0], (
        "no better than one call"
    )
    assert (
        "with a teacher that moved, minus imitation: +0.250 [+0.250, +0.250], on 16 seeds, over 1 "
        "of" in text
    )
    assert (
        "Not asked by the protocol: joint training minus GEPA, then GRPO: +0.500 [+0.500, +0.500]"
        in text
    )
    assert "Imitation minus its teacher: -0.500" in text
    shown = " | ".join(f"{x:+.3f} [{x:+.3f}, {x:+.3f}]" for x in (0.25, 0.75, 0.5, 0.0))
    row = f"| rules, easy | {shown} | 16 / 16 / 16 / 16 |"
    assert league.each_setting(records).splitlines()[2:] == [row], (
        "settings without a pair have no row"
    )


def test_secondary_outcomes():
    assert league.calls_until_good([(1, 0.9), (2, 0.7), (3, 0.9), (4, 0.9), (5, 1.0)]) == 3
    assert (
        league.calls_until_good([(1, 1.0), (2, 1.0)])
        is None
        is league.calls_until_good([(n, 0.7) for n in range(9)])
    )
    assert league.unlocked(record(("rules", "easy", 1, "joint"), "1000")) == 1, (
        "code half right, symbol not, capital no end"
    )
    rated = [(25.0, 0.1, 0), (30.0, 0.5, 1), (28.0, 0.4, 2)]
    records = [
        record(("rules", "easy", seed, "joint"), rated=rated, curve=[(7, 0.9)] * 3)
        for seed in (1, 2)
    ]
    row = league.summarise(records)["rules, easy"]["joint"]
    assert (row["calls_until_good"], row["good"], row["spearman"]["mean"], row["n"]) == (
        7,
        2,
        1.0,
        2,
    )
    assert "| rules, easy | joint | 0.500 [" in league.table(records)
    assert "7 (2 of 2)" in league.table(records)


SCRIPT = """
import sys, time
sys.path[:0] = [{benchmarks!r}]
from benchmarks.learning import league
def run(world, reflector, seed, method, folder, **options):
    if seed == 523:
        print("at it", flush=True)
        time.sleep(60)
    return {{"seed": seed, "method": method, "world": world, "reflector": reflector, "seconds": 0}}
league.run = run
league.work(list(league.cells())[:9], league.Path({folder!r}))
"""


def test_a_kill_loses_at_most_the_cell_in_progress(tmp_path, monkeypatch):
    """And another process passes over a cell that one is at."""
    script = SCRIPT.format(benchmarks=str(Path(league.__file__).parents[2]), folder=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline() == b"at it\n"
    ran = tmp_path / "ran.txt"

    def run(*cell, **options):
        with ran.open("a") as file:
            print(*cell[2:4], file=file)
        world, reflector, seed, method, _ = cell
        return {
            "seed": seed,
            "method": method,
            "world": world,
            "reflector": reflector,
            "seconds": 0,
        }

    monkeypatch.setattr(league, "run", run)
    league.work(list(league.cells())[:8], tmp_path)
    assert ran.read_text().splitlines() == ["523 one call"], (
        "six are done, and the first process is at the seventh"
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    league.work(list(league.cells())[:9], tmp_path)
    assert ran.read_text().splitlines()[1:] == ["523 joint", "523 GEPA, then GRPO"]
    records = league.read(tmp_path)
    assert len(records) == 9 and all(record["commit"] and record["date"] for record in records)


def test_another_machine_goes_on_from_the_records(tmp_path, monkeypatch):
    ran = []
    first = list(league.cells())[:3]
    world, reflector, seed, method = first[1]
    recorded = {
        "world": world,
        "reflector": reflector,
        "seed": seed,
        "method": method,
        "seconds": 7,
        "commit": "a",
    }
    monkeypatch.setattr(league, "_work_on", lambda cell, *rest: ran.append(cell))
    monkeypatch.setattr(league, "FORK", SimpleNamespace(Process=InProcess))
    league.restore(tmp_path, [recorded])
    league.restore(tmp_path, [{**recorded, "seconds": 8}])  # a cell of this folder stays
    league.work(first, tmp_path)
    assert ran == [first[0], first[2]] and league.read(tmp_path) == [recorded]


class InProcess:
    exitcode = 0

    def __init__(self, target, args):
        self.start = lambda: target(*args)

    def join(self):
        pass


def test_a_warm_start_has_the_code_that_made_it_in_its_name(monkeypatch, tmp_path):
    """Made once, by one process, and anew where the training code or a library has changed."""
    pytest.importorskip("torch")
    made = []
    monkeypatch.setattr(league_cell, "WARM_STARTS", tmp_path)
    monkeypatch.setattr(
        "agentic_prompting.sandbox.setup.prepare_guarded",
        lambda folder, seed, world: made.append(folder),
    )
    league_cell.prepare("rules", 1)
    league_cell.prepare("many", 1)
    league_cell.prepare("rules", 2)
    assert made[0] == made[1] != made[2], "worlds share the warm start of a seed"
    monkeypatch.setattr(league_cell, "version", lambda name: "9")
    league_cell.prepare("rules", 1)
    assert made[3] != made[0] and made[3].parent == tmp_path


@long
def test_the_phases_of_a_method_hand_on_weights_and_prompt(monkeypatch, tmp_path):
    """GEPA's prompt is where joint training starts, whose prompt is then left out; every phase's
    rollouts count.
    """
    pytest.importorskip("gepa", reason="needs the extra optimizers")
    from agentic_prompting.sandbox.setup import prepare_guarded

    sandbox = prepare_guarded(tmp_path, 1, n_test=8, warm_start_steps=2, copying_steps=2)
    monkeypatch.setattr(league_cell, "prepare", lambda *where: sandbox)
    monkeypatch.setattr(league_cell, "leaks", lambda *where: 0)
    phases = [("gepa", 0.5, {}), ("joint", 0.5, {"evolution_lag": 0}), ("imitate", 0.5, {})]
    monkeypatch.setitem(league_cell.METHODS, "joint", phases)
    found = []
    agents = league_cell.Agent
    monkeypatch.setattr(league_cell, "Agent", lambda *args: found.append(agents(*args)) or found[0])
    record = league_cell.run("rules", "easy", 1, "joint", tmp_path / "runs", steps=2)
    trainer = found[0].trainer
    assert trainer.population.members[0].prompt.preamble == sandbox.root.preamble
    assert record["prompt"] == "" and found[0].model == found[0].output
    assert record["rollouts"] >= 3 * 96
    assert len(record["correct"]) == len(record["ends"]) == 8
    assert record["calls"] > 0
    assert list(record["others"]) == list(league.OTHERS)
    (batch,) = record["curve"]
    assert 0 <= batch[1] <= 1
    assert record["rated"] == []
    assert set(record["guarded"]) == set(sandbox.oracle.rules)


def test_calls_beyond_the_budget_are_refused(monkeypatch):
    from agentic_prompting.llm import ScriptedChat, complete

    chat = league_cell.CountedChat(ScriptedChat(lambda messages: "yes"), 1)
    assert complete(chat, "may I?").text == "yes"
    assert complete(chat, "again?").error is not None
    assert chat.calls == 2
