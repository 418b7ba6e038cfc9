"""What the report is made of: curves, diffs, the tree, the packing; without a browser."""

import base64
import copy
import gzip
import hashlib
import json
import random
import re
import shutil

import pytest
from hypothesis import given, settings, strategies as st

from agentic_prompting.cli import main
from agentic_prompting.evaluation import wilson_interval
from agentic_prompting.evolution import Population, SystemPrompt
from agentic_prompting.evolution.lineage import lanes
from agentic_prompting.records import RecordFile
from agentic_prompting.report import history_of, plot_lineage, read_lineage, write_report
from agentic_prompting.report.cost_points import cost_points
from agentic_prompting.report.evaluation_summary import read_evaluation
from agentic_prompting.report.page import pack
from agentic_prompting.report.page_data import sample_evenly
from agentic_prompting.report.rollout_records import current_records, groups_of, reward_parts
from agentic_prompting.report.run_summary import RunSummary
from agentic_prompting.report.word_diff import word_diff
from agentic_prompting.rollout import RolloutLog
from support.browser import evolved, record, write_run
from support.pages import block

RNG = random.Random(0)


def one(step=0, **changes):
    return record(0, RNG, 3, step=step, **{"status": "answered", "answer": "Nairobi", **changes})


def test_the_curves_are_means_over_what_is_known():
    records = [
        one(rewards={"a": 1.0, "b": 0.5}, cost_usd=0.5),
        one(rewards={"a": None, "b": None}, status="failed", answer=None, cost_usd=0.25),
        one(rewards={"a": 0.0, "b": None}, answer="Lagos", cost_usd=0.25),
        one(step=3, rewards={"a": -1.0}, answers=[], cost_usd=2.0),
        one(step=3, mode="eval", rewards={"a": 9.0}),
    ]
    first, last = history_of(records)
    assert first["reward"] == 0.75 and first["exact_match"] == 0.5, "a failed rollout is in neither"
    assert first["rollout/failed"] == pytest.approx(1 / 3) and first["rollout/turns"] == 3
    assert (first["environment/cost_usd"], last["environment/cost_usd"]) == (1.0, 3.0)
    assert "exact_match" not in last and last["step"] == 4
    (evaluation,) = history_of(records, "eval")
    assert (evaluation["step"], evaluation["reward"]) == (3, 9.0), "it follows step 3"


def test_an_evaluation_with_several_rollouts_a_question_has_a_curve_for_each_k(tmp_path):
    records = [
        one(mode="eval", question=question, rewards={"a": reward})
        for question, rewards in (("q", (1.0, 0.0, 0.0)), ("r", (0.0, 0.0, None)))
        for reward in rewards
    ]
    (entry,) = history_of(records, "eval")
    assert (entry["pass@1"], entry["pass@2"], entry["pass@3"]) == pytest.approx((1 / 6, 1 / 3, 1))
    assert not any("pass@" in key for key in history_of([one(rewards={"a": 1.0})] * 3)[0]), (
        "not of training"
    )
    RolloutLog(tmp_path / "rollouts").write(records)
    panels = block(write_report(tmp_path, pictures=False).read_text(), "history")["panels"]
    assert {"pass@1": "k = 1", "pass@2": "k = 2", "pass@3": "k = 3"} in [
        panel["keys"] for panel in panels
    ]


def test_several_environments_have_curves_of_their_own(tmp_path):
    records = [
        one(environment="shop", rewards={"a": 1.0}),
        one(environment="oracle", rewards={"a": 0.0}, answer="Lagos"),
        one(environment="oracle", rewards={"a": None}, status="failed", answer=None),
    ]
    (entry,) = history_of(records)
    assert (entry["reward in shop"], entry["reward in oracle"]) == (1.0, 0.0)
    assert (entry["exact_match in shop"], entry["exact_match in oracle"]) == (1.0, 0.0)
    RolloutLog(tmp_path / "rollouts").write(records)
    panels = block(write_report(tmp_path, pictures=False).read_text(), "history")["panels"]
    assert {"reward in oracle": "oracle", "reward in shop": "shop"} in [
        panel["keys"] for panel in panels
    ]
    assert not any(" in " in key for key in history_of([one(environment="shop")])[0]), (
        "one environment is all"
    )


def test_what_a_later_run_did_over_is_left_out():
    steps = [one(step=step, run=10) for step in range(6)] + [
        one(step=step, run=20) for step in range(4, 8)
    ]
    assert [(kept["run"], kept["step"]) for kept in current_records(steps)] == [
        *((10, step) for step in range(4)),
        *((20, step) for step in range(4, 8)),
    ]
    anew = [*steps, one(step=0, run=30)]
    assert [kept["run"] for kept in current_records(anew)] == [30]


def test_the_evaluation_before_a_checkpoint_stays_when_a_run_is_resumed_there():
    """It is made at the step of which the resumed run's first batch is one, and was taken for
    replaced.
    """

    def steps(*evaluated_after):
        both = [*((10, s, "train") for s in range(6)), (10, 4, "eval"), (10, 6, "eval")]
        both += [*((20, s, "train") for s in range(4, 8)), (20, 8, "eval")]
        records = [
            one(step=step, run=run, mode=mode) for run, step, mode in [*both, *evaluated_after]
        ]
        return [
            (kept["run"], kept["step"])
            for kept in current_records(records)
            if kept["mode"] == "eval"
        ]

    assert steps() == [(10, 4), (20, 8)], "that of step 6 is of weights that are gone"
    assert steps((20, 4, "eval")) == [(20, 8), (20, 4)], "made again, at the resumed run's start"
    assert steps((5, 0, "eval")) == [(10, 4), (20, 8)], "a run that began anew replaces all"


def test_an_evaluation_alone_replaces_no_training():
    """A script that evaluates before it trains does so again when it is started again."""
    trained = [one(step=0, run=10, mode="eval"), *(one(step=step, run=10) for step in range(6))]
    again = one(step=0, run=20, mode="eval")
    assert current_records([*trained, again]) == trained, "refused, or nothing left to train"
    resumed = [one(step=step, run=20) for step in range(4, 8)]
    assert current_records([*trained, again, *resumed]) == [*trained[:5], *resumed]
    # The log has no mode, and counts a step when it is over.
    log = [{"run": 10, "step": 0, "eval_loss": 1.0}, {"run": 10, "step": 1, "loss": 1.0}]
    log += [{"run": 20, "step": 0, "eval_loss": 2.0}, {"run": 20, "step": 1, "train_runtime": 1.0}]
    assert current_records(log) == [*log[:2], log[3]]


def test_evaluations_without_training_show_the_last():
    records = [one(step=0, run=run, mode="eval") for run in (10, 20)]
    assert current_records(records) == records[1:]


def test_a_sample_is_spread_and_always_the_same():
    records = [one(step=step) for step in range(1000)]
    sample = [kept["step"] for kept in sample_evenly(records, 100)]
    assert len(sample) == 100 and sample == sorted(sample) and sample[0] < 100 and sample[-1] > 900
    assert sample == [kept["step"] for kept in sample_evenly(records, 100)]


@pytest.mark.parametrize(("total", "shown"), [(1.0, (0.0, 1.0)), (0.5, None)])
def test_the_parts_of_a_reward_are_shown_where_they_add_up(total, shown):
    parts = reward_parts(one(rewards={"prompt_r1_reward": total}))
    values = [value for name, value in parts if name.startswith("·")]
    assert values == list(shown or ()) and parts[0] == ("prompt_r1_reward", total)
    assert parts[-2:] == [("exact match", 1.0), ("token F1", 1.0)]


# --- diffs ----------------------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from("ab \n.é"), max_size=60)


@given(TEXTS, TEXTS)
def test_a_diff_holds_both_texts(old, new):
    changes = word_diff(old, new)
    assert "".join(text for kind, text in changes if kind != "+") == old
    assert "".join(text for kind, text in changes if kind != "-") == new
    assert all(text for _, text in changes)


def test_a_diff_reads_well():
    assert word_diff("Ask two short questions.", "Ask one long question.") == [
        ("=", "Ask "),
        ("-", "two short questions"),
        ("+", "one long question"),
        ("=", "."),
    ]


def test_the_line_before_a_new_one_has_not_changed():
    """Though a line's end was put behind it."""
    assert word_diff("a\nb c", "a\nb c\nd e") == [("=", "a\nb c"), ("+", "\nd e")]


def test_a_diff_of_long_texts_does_not_take_long():
    old = "\n".join(f"line {number}" for number in range(1000))
    assert word_diff(old, old + "\nmore")[0][0] == "="
    assert len(word_diff(old, old.replace("500", "x"))) == 4
    huge = "x y\n" * 100_000
    assert word_diff(huge, huge + "z") == [("-", huge), ("+", huge + "z")]


# --- the tree -------------------------------------------------------------------------------------


def test_the_tree_is_the_populations(tmp_path):
    population = evolved(tmp_path / "population.json")
    lineage = read_lineage(tmp_path / "population.json")
    assert [node.member for node in lineage.nodes] == population.members
    assert [place for place, node in enumerate(lineage.nodes) if node.best] == [
        population.best().id
    ]
    candidates = [member.prompt.id for member in population.candidates()]
    assert [place for place, node in enumerate(lineage.nodes) if node.in_window] == candidates
    assert len(candidates) == 10
    assert lineage.window == population.window
    assert {lineage.nodes[child].member.prompt.operator for _, child in lineage.edges} == {
        "mutation",
        "crossover",
    }


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=30))
def test_every_prompt_has_a_place_of_its_own(births):
    population = Population(SystemPrompt("a", ()))
    for number, (parent, crossed) in enumerate(births):
        first = parent % (number + 1)
        parents = (first, number) if crossed and first != number else (first,)
        population.add(SystemPrompt("a", (f"p{number}",), parents=parents))
    rows = lanes(population.members)
    in_row = {}
    for place, row in enumerate(rows):
        in_row.setdefault(row, []).append(place)
    assert sorted(in_row) == list(range(len(in_row))), "no empty rows"
    for place in range(len(population.members)):
        only_child = [other for other in population.members if place in other.prompt.parents]
        if len(only_child) == 1 and only_child[0].prompt.parents == (place,):
            assert rows[only_child[0].prompt.id] == rows[place], "a line of descent runs straight"


def test_a_file_of_something_else_is_told(tmp_path):
    (tmp_path / "population.json").write_text('{"population": 3}')
    with pytest.raises(ValueError, match=r"population\.json is no population"):
        read_lineage(tmp_path / "population.json")
    evolved(tmp_path / "population.json")
    whole = json.loads((tmp_path / "population.json").read_text())
    for edit in ({"parents": [77]}, {"id": 5}):
        state = copy.deepcopy(whole)
        state["population"]["members"][1]["prompt"].update(edit)
        (tmp_path / "population.json").write_text(json.dumps(state))
        with pytest.raises(ValueError, match=r"population\.json is no population"):
            read_lineage(tmp_path / "population.json")


# --- the file -------------------------------------------------------------------------------------


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5))
def test_packed_data_holds_nothing_that_html_knows(data):
    assert re.fullmatch(r"[A-Za-z0-9+/=]*", pack(data))
    assert json.loads(gzip.decompress(base64.b64decode(pack(data)))) == data


def test_one_file_without_a_network(tmp_path):
    secret = "</script><script>alert(1)</script>"
    page = write_report(write_run(tmp_path, [one(question=secret)]))
    html = page.read_text(encoding="utf-8")
    assert secret not in html and block(html, "trajectories-0")[0]["question"] == secret
    assert set(re.findall(r"https?://[^\s\"'`]+", html)) == {"http://www.w3.org/2000/svg"}, (
        "a name, not an address"
    )
    assert not re.search(r"\b(src|href)=\"?[a-z]", html)
    assert "innerHTML" not in html
    assert "{{" not in html
    for kind in ("script", "style"):
        inner = re.search(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL).group(1)
        allowed = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{allowed}'" in html
    assert write_report(tmp_path).read_text(encoding="utf-8") == html, (
        "the same run gives the same page"
    )


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra [report] is not installed")
    evolved(tmp_path / "population.json")
    write_report(
        write_run(tmp_path, [one(step=step) for step in range(3)]), output=tmp_path / "out"
    )
    drawn = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {
        "reward.png",
        "exact_match.png",
        "turns.png",
        "outcomes.png",
        "cost.png",
        "tree.png",
    }
    plot_lineage(read_lineage(tmp_path / "population.json"), tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes()[:4] == b"\x89PNG"


def test_more_than_it_can_show(tmp_path):
    run = write_run(tmp_path, [one(step=step) for step in range(30)])
    html = write_report(run, max_trajectories=10, pictures=False).read_text(encoding="utf-8")
    index = block(html, "trajectories")
    assert index["total"] == 30 and len(index["columns"]["step"]) == 10
    assert len(block(html, "history")["modes"]["train"]) == 30, "the curves are of all"


def test_nothing_to_report(tmp_path):
    with pytest.raises(FileNotFoundError, match="no rollouts/"):
        write_report(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        write_report(tmp_path / "nowhere")


def test_the_command(tmp_path, capsys):
    run = write_run(tmp_path, [one()])
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--no-pictures", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert printed == {
        "page": str(run / "report" / "index.html"),
        "pictures": [],
    }
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "nowhere")])
    assert ended.value.code == 2 and "does not exist" in capsys.readouterr().err


# --- what training used ---------------------------------------------------------------------------


def test_the_reward_is_the_weighted_total_that_training_used(tmp_path):
    """Where it was recorded: with `reward_weights` the plain sum is another number."""
    weighted = one(rewards={"a": -1.0, "b": -0.5}, reward=-1.25)
    html = write_report(
        write_run(tmp_path, [weighted, one(step=1, reward=float("nan"))]), pictures=False
    ).read_text()
    assert [entry.get("reward") for entry in block(html, "history")["modes"]["train"]] == [
        -1.25,
        None,
    ]
    assert block(html, "trajectories")["columns"]["reward"] == [-1.25, None]
    shown, _ = block(html, "trajectories-0")
    assert shown["parts"][:3] == [
        ["a", -1.0],
        ["b", -0.5],
        ["total, as weighted in training", -1.25],
    ]


def test_the_trainers_log_is_drawn(tmp_path):
    """Of the longest training in the folder; what JSON cannot hold, and other entries, are left
    out.
    """
    log = [
        {"step": 1, "loss": 0.5, "kl": float("nan"), "lr": 1},
        {"step": 2, "entropy": 2.0, "grad_norm": 0.1},
    ]
    for folder, state in (
        (
            "checkpoint-2",
            {"global_step": 2, "log_history": [*log, {"step": 2, "train_runtime": 3.0}]},
        ),
        ("checkpoint-1", {"global_step": 1, "log_history": log[:1]}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps(state))
    write_run(tmp_path, [one()])
    history = block(write_report(tmp_path, pictures=False).read_text(), "history")
    assert history["modes"]["optimisation"] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "entropy": 2.0, "grad_norm": 0.1},
    ]
    assert {"loss", "grad_norm", "entropy"} < {panel["name"] for panel in history["panels"]}
    (tmp_path / "trainer_state.json").write_text("{broken")
    assert block(write_report(tmp_path, pictures=False).read_text(), "history") == history


def test_the_log_that_grows_is_read_before_a_checkpoints(tmp_path):
    """What a resumed run did over is left out, half a line passed over; the ages of tokens are of
    runs with a lead.
    """
    run = write_run(tmp_path, [one()])
    (run / "trainer_state.json").write_text(
        json.dumps({"global_step": 9, "log_history": [{"step": 9, "loss": 9.0}]})
    )
    lines = [{"run": 1, "step": step, "loss": 0.5, "async/token_age": 0.25} for step in (1, 2, 3)]
    lines += [{"run": 2, "step": step, "loss": 0.25, "learning_rate": 1e-6} for step in (2, 3)]
    lines += [{"run": 2, "step": 3, "train_runtime": 1.0}]
    log = run / "rollouts" / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)) + '\n{"run": 2, "st')
    history = block(write_report(run, pictures=False).read_text(), "history")
    assert history["modes"]["optimisation"] == [
        {"step": 1, "loss": 0.5, "async/token_age": 0.25},
        *({"step": step, "loss": 0.25, "learning_rate": 1e-6} for step in (2, 3)),
    ]
    assert {"learning_rate", "token_age"} < {panel["name"] for panel in history["panels"]}


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        (
            {
                "exact_match_before": 0.3,
                "interval_before": [0.2, 0.4],
                "exact_match_after": 0.9,
                "interval_after": [0.8, 1.0],
            },
            [["before", 0.3, 0.2, 0.4], ["after", 0.9, 0.8, 1.0]],
        ),
        (
            {"exact_match": {"policy after, best prompt": [0.9, 0.8, 1.0], "x": [None, 0, 1]}},
            [["policy after, best prompt", 0.9, 0.8, 1.0]],
        ),
        ([1], []),
    ],
)
def test_the_held_out_result_of_every_method_is_shown(tmp_path, summary, shown):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    html = write_report(write_run(tmp_path, [one()]), pictures=False).read_text()
    assert block(html, "run")["heldOut"] == shown


# --- groups ---------------------------------------------------------------------------------------


def test_rollouts_of_one_question_are_a_group_with_advantages(tmp_path):
    """As GRPO takes them: above the group's mean, over its deviation. A failed one has none."""
    rewards = [1.0, 0.0, 0.5, None]
    records = [one(question=q, reward=r, rewards={"a": r}) for q in ("x", "y") for r in rewards]
    records += [one(question="x", step=1, reward=1.0)]
    columns = block(
        write_report(write_run(tmp_path, records), pictures=False).read_text(), "trajectories"
    )["columns"]
    assert columns["group"] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert columns["advantage"][:4] == [
        pytest.approx(0.9998, abs=1e-3),
        pytest.approx(-0.9998, abs=1e-3),
        0.0,
        None,
    ]
    assert columns["advantage"][-1] == 0.0


# --- evaluations ----------------------------------------------------------------------------------

ROWS = [{"question": f"q{i}", "answers": [str(i)]} for i in range(8)]


def evaluated(folder, saved=True):
    from agentic_prompting.evaluation import evaluate_agent, save_run

    right = lambda questions: [question[1:] for question in questions]  # noqa: E731

    def half(questions):
        return [question[1:] if int(question[1:]) % 2 else "no" for question in questions]

    evaluation = evaluate_agent(
        {"right": right, "half": half}, {"sums": ROWS}, runs=1, output=folder, progress=False
    )
    if saved:
        save_run(folder, evaluation)
    return folder


@pytest.mark.parametrize("saved", [True, False])
def test_an_evaluations_folder_is_opened(tmp_path, saved):
    """Tables with intervals, paired tests, each answer; also without what `save_run` adds."""
    html = write_report(evaluated(tmp_path / "e", saved), pictures=False).read_text()
    section = block(html, "evaluation")
    assert [row["system"] for row in section["results"]] == ["right", "half"] or not saved
    by_system = {row["system"]: row for row in section["results"]}
    assert by_system["right"]["exact_match"].startswith("1.000 [")
    assert by_system["half"]["exact_match"][:5] == "0.500"
    (difference,) = section["differences"]
    assert difference["better / worse / same"] in ("0 / 4 / 4", "4 / 0 / 4")
    assert difference["p (McNemar)"] == "0.125"
    assert sorted(set(section["columns"]["system"])) == ["half", "right"]
    assert len(section["columns"]["match"]) == 16
    assert sum(section["columns"]["match"]) == 12
    (figure,) = section["intervals"]
    assert (figure["task"], figure["metric"]) == ("sums", "exact_match")
    assert {name: mean for name, mean, *_ in figure["systems"]} == {"right": 1.0, "half": 0.5}
    assert all(0 < low <= mean <= high <= 1 for _, mean, low, high in figure["systems"])
    first = block(html, "answers-0")[0]
    assert first["question"] == "q0"
    assert first["answers"] == ["0"]
    assert first["answer"] in ("0", "no")


def test_an_answer_is_judged_by_its_tasks_own_metric(tmp_path):
    from agentic_prompting.evaluation import EvaluationTask, evaluate_agent, save_run

    task = EvaluationTask("sums", [{"question": "q", "answers": ["8"]}], metrics=("integer_match",))
    evaluation = evaluate_agent(
        lambda qs: ["I count: 8 legs. Answer: 8"], [task], runs=1, output=tmp_path, progress=False
    )
    save_run(tmp_path, evaluation)
    assert block(write_report(tmp_path, pictures=False).read_text(), "evaluation")["columns"][
        "match"
    ] == [1.0]


def test_a_metric_of_ones_own_is_shown_as_in_the_table(tmp_path):
    """The report cannot call it: its values are those that the evaluation saved."""
    from agentic_prompting.evaluation import EvaluationTask, evaluate_agent, save_run
    from agentic_prompting.evaluation.metrics import each

    def length(answer, answers):
        return len(answer) / 10

    rows = [{"question": text, "answers": [text]} for text in ("four", "seven")]
    evaluation = evaluate_agent(
        {"echo": list},
        [EvaluationTask("words", rows)],
        {"length": each(length)},
        runs=1,
        output=tmp_path,
        progress=False,
    )
    save_run(tmp_path, evaluation)
    shown = block(write_report(tmp_path, pictures=False).read_text(), "evaluation")
    assert shown["columns"]["match"] == [0.4, 0.5]
    assert "length" in json.dumps(shown)
    assert "exact_match" not in json.dumps(shown)


# --- several runs ---------------------------------------------------------------------------------


def test_two_runs_side_by_side(tmp_path):
    first = write_run(
        tmp_path / "a" / "run", [one(step=step, rewards={"r": 0.25}) for step in range(3)]
    )
    second = write_run(
        tmp_path / "b" / "run", [one(step=step, rewards={"r": 0.75}) for step in range(4)]
    )
    html = write_report([first, second], tmp_path / "out", pictures=False).read_text()
    compared = block(html, "comparison")
    assert compared["folders"] == [str(first), str(second)], (
        "and what tells them apart is their name"
    )
    panel = next(panel for panel in compared["panels"] if panel["name"] == "reward")
    assert panel["keys"] == {"reward 0": "a/run", "reward 1": "b/run"}
    assert [(e["step"], e.get("reward 0"), e.get("reward 1")) for e in compared["entries"]] == [
        (1, 0.25, 0.75),
        (2, 0.25, 0.75),
        (3, 0.25, 0.75),
        (4, None, 0.75),
    ]
    evaluations = [evaluated(tmp_path / name) for name in ("e1", "e2")]
    differences = block(write_report(evaluations, tmp_path / "out2").read_text(), "comparison")[
        "differences"
    ]
    assert [row["difference [95 %]"][:6] for row in differences] == ["+0.000", "+0.000"]


def test_score_against_dollars(tmp_path):
    """The last steps of each run: what it answered right, and what the replies were worth, shared
    ones included.
    """
    runs = {"cheap": (0.001, 1), "dear": (0.01, 3), "wasteful": (0.02, 2)}
    gold = one()["answers"][0]
    for name, (usd, right) in runs.items():
        early = [one(step=step, answer=gold, worth_usd=9.0) for step in range(18)]
        late = [
            one(step=19, answer=gold if i < right else "x", cost_usd=0.0, worth_usd=usd)
            for i in range(4)
        ]
        write_run(
            tmp_path / name,
            [*early, *late, one(step=19, status="failed", answer=None, worth_usd=5.0)],
        )
    html = write_report(
        [tmp_path / name for name in reversed(runs)], tmp_path / "out", pictures=False
    ).read_text()
    points = block(html, "front")
    found = [(point["name"], point["usd"], point["mean"], point["front"]) for point in points]
    assert found == [
        ("cheap", 0.001, 0.25, True),
        ("dear", 0.01, 0.75, True),
        ("wasteful", 0.02, 0.5, False),
    ]
    assert all(0 <= point["low"] <= point["mean"] <= point["high"] <= 1 for point in points)
    # The interval of a table, which has a width even where every answer is right.
    dear = wilson_interval(3, 4)
    assert (points[1]["low"], points[1]["high"]) == (dear.low, dear.high)
    assert 'id="data-front"' not in write_report(tmp_path / "cheap", pictures=False).read_text(), (
        "one is no front"
    )
    free = [write_run(tmp_path / f"free{n}", [one(worth_usd=0.0, cost_usd=0.0)]) for n in range(2)]
    assert 'id="data-front"' not in write_report(free, tmp_path / "out", pictures=False).read_text()


def test_a_recording_makes_no_system_free(tmp_path):
    """Answers that come out of a recording cost nothing, and are worth on the front what they cost
    before.
    """
    from agentic_prompting.evaluation import PromptedSystem, evaluate_agent, save_run
    from agentic_prompting.llm import OpenAIChat, ReplayCache
    from support.servers import LoopbackServer

    cache = ReplayCache(tmp_path / "replies.sqlite")

    def asked(name, url):
        chats = {
            kind: OpenAIChat(kind, url, cache=cache, price=(usd, 0))
            for kind, usd in (("dear", 10), ("cheap", 1))
        }
        systems = {kind: PromptedSystem(chat) for kind, chat in chats.items()}
        evaluation = evaluate_agent(
            systems, {"sums": ROWS}, runs=1, output=tmp_path / name, progress=False
        )
        save_run(tmp_path / name, evaluation)
        points = block(
            write_report(tmp_path / name, tmp_path / f"of-{name}", pictures=False).read_text(),
            "front",
        )
        return sum(record["cost_usd"] for record in evaluation.records), [
            (point["name"], point["usd"]) for point in points
        ]

    with LoopbackServer(lambda request, number: "1") as server:
        paid, points = asked("first", server.base_url)
        assert paid == pytest.approx(sum(8 * usd for _, usd in points))
        assert [name for name, _ in points] == ["cheap", "dear"]
        assert points[1][1] == pytest.approx(10 * points[0][1])
        assert asked("again", server.base_url) == (0, points)


# --- live -----------------------------------------------------------------------------------------


def test_watch_writes_again_when_something_was_added(tmp_path):
    from agentic_prompting.report import watch_report

    run = write_run(tmp_path, [one()])
    pages = []

    def wait():
        """Between two looks: nothing new, another step, then Ctrl-C."""
        pages.append(block((run / "report" / "index.html").read_text(), "trajectories")["total"])
        if len(pages) == 2:
            write_run(tmp_path, [one(step=1)])
        if len(pages) == 4:
            raise KeyboardInterrupt

    page = watch_report(run, wait=wait)
    assert pages == [1, 1, 2, 2] and block(page.read_text(), "run")["watch"]
    stamp = page.stat().st_mtime_ns
    assert stamp == page.stat().st_mtime_ns


@pytest.mark.parametrize("column", ["environment", "id", "task"])
def test_rows_with_the_same_question_are_groups_of_their_own(column):
    """As in training.

    They were one group, with the other's mean in each advantage, and pass@4 of two rollouts each.
    """
    records = [
        one(mode="eval", question="q", **{column: name}, rewards={"a": reward})
        for name, rewards in (("first", (1.0, 0.0)), ("second", (5.0, 4.0)))
        for reward in rewards
    ]
    groups, advantages = groups_of(records)
    assert groups == [0, 0, 1, 1]
    assert advantages[0] == advantages[2] == -advantages[1] == -advantages[3]
    assert [key for key in history_of(records, "eval")[0] if key.startswith("pass@")] == [
        "pass@1",
        "pass@2",
    ]


def test_rollouts_of_one_question_do_not_narrow_the_interval_of_a_score(tmp_path):
    """Eight rollouts of a question that agree are one question: as eight they gave an interval a
    third as wide.
    """

    def widths(rollouts):
        found = [
            one(question=str(i), answer="Nairobi" if i % 2 else "Lagos", cost_usd=1.0)
            for i in range(20)
            for _ in range(rollouts)
        ]
        answered = {"system": "s", "task": "t", "answers": ["a"], "cost_usd": 1.0}
        records = [
            {
                **answered,
                "run": run,
                "place": i,
                "question": str(i),
                "answer": "a" if i % 2 else "b",
            }
            for i in range(20)
            for run in range(rollouts)
        ]
        RecordFile(tmp_path / str(rollouts) / "s.jsonl").append(records)
        runs = [
            RunSummary("t", "", found),
            RunSummary("e", "", evaluation=read_evaluation(tmp_path / str(rollouts))),
        ]
        return [
            (point.mean, point.low, point.high)
            for point in cost_points(runs, ["trained", "evaluated"])
        ]

    assert widths(8) == widths(1)
    assert [mean for mean, *_ in widths(1)] == [0.5, 0.5]


def test_an_evaluated_agent_costs_what_its_replies_are_worth(tmp_path):
    """With a recording the second of two agents looked free: the first had paid for the same
    replies.
    """
    answered = {
        "system": "s",
        "task": "t",
        "run": 0,
        "question": "q",
        "answers": ["a"],
        "answer": "a",
    }
    others = [{"worth_usd": 0.75}, {"worth_usd": None}, {}]
    RecordFile(tmp_path / "s.jsonl").append(
        [{**answered, "place": i, "cost_usd": 0.25, **one} for i, one in enumerate(others)]
    )
    (point,) = cost_points([RunSummary.read(tmp_path)], ["s"])
    assert point.usd == pytest.approx((0.75 + 0.25 + 0.25) / 3)


def test_watch_begins_before_there_is_anything(tmp_path):
    from agentic_prompting.report import watch_report

    looks = []

    def wait():
        looks.append((tmp_path / "report" / "index.html").exists())
        if len(looks) == 1:
            write_run(tmp_path, [one()])
        if len(looks) == 2:
            raise KeyboardInterrupt

    watch_report(tmp_path, wait=wait)
    assert looks == [False, True]


def test_watch_writes_again_when_the_run_is_evaluated(tmp_path):
    """`evaluate --run RUN` writes into its folder `evaluation`, which was not looked at."""
    from agentic_prompting.report import watch_report

    run = write_run(tmp_path, [one()])
    shown = []

    def wait():
        shown.append('id="data-evaluation"' in (run / "report" / "index.html").read_text())
        if len(shown) == 1:
            answered = {
                "system": "s",
                "task": "t",
                "run": 0,
                "place": 0,
                "question": "q",
                "answers": ["a"],
            }
            RecordFile(run / "evaluation" / "t.jsonl").append([{**answered, "answer": "a"}])
        if len(shown) == 2:
            raise KeyboardInterrupt

    watch_report(run, wait=wait)
    assert shown == [False, True]


def test_watch_does_not_answer_its_own_page(tmp_path):
    """With the run's folder as that of the page it wrote the page again at every look."""
    from agentic_prompting.report import watch_report

    run = write_run(tmp_path, [one()])
    stamps = []

    def wait():
        stamps.append((run / "index.html").stat().st_mtime_ns)
        if len(stamps) == 3:
            raise KeyboardInterrupt

    watch_report(run, run, wait=wait)
    assert len(set(stamps)) == 1


def test_watch_names_a_problem_once_although_a_file_was_missing_meanwhile(tmp_path, caplog):
    from agentic_prompting.report import watch_report

    write_run(tmp_path, [one()])
    population = tmp_path / "population.json"
    steps = [lambda: population.write_text("{"), lambda: shutil.rmtree(tmp_path / "rollouts")]
    steps += [population.unlink, lambda: population.write_text("{")]

    def wait():
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    watch_report(tmp_path, wait=wait)
    assert caplog.text.count("the page stays as it was") == 1


def test_the_command_watches_one_run(tmp_path, capsys, monkeypatch):
    from agentic_prompting import report

    followed = []
    monkeypatch.setattr(report, "watch_report", lambda *arguments: followed.append(arguments))
    for runs, status in (([tmp_path], 0), ([tmp_path, tmp_path], 2)):
        with pytest.raises(SystemExit) as ended:
            main(["report", *map(str, runs), "--watch"])
        assert ended.value.code == status
    assert followed == [(tmp_path, None, 20_000)] and "Ctrl-C stops" in capsys.readouterr().out


# --- damaged files --------------------------------------------------------------------------------


def gz_lines(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rollouts-00000-00000.jsonl.gz").write_bytes(
        gzip.compress(b"".join(line + b"\n" for line in lines))
    )


@pytest.mark.parametrize(
    "bad",
    [
        b'{"step": "text", "status": "answered", "turns": []}',
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"status": "answered", "turns": []}',
        b'{"step": 1, "status": "answered", "turns": {}}',
        b"[" * 100_000,
        b"9" * 5000,
    ],
)
def test_one_bad_line_is_left_out_and_its_file_is_named(tmp_path, bad, caplog):
    good = json.dumps(one()).encode()
    gz_lines(tmp_path / "rollouts", [good, bad, good])
    html = write_report(tmp_path, pictures=False).read_text()
    assert block(html, "trajectories")["total"] == 2
    assert "rollouts-00000-00000.jsonl.gz: left out 1 of its lines" in caplog.text
    assert "line 2" in caplog.text


@pytest.mark.parametrize("bad", ["{", '{"step": "x", "loss": 1.0}', '{"step": 1e999}', "3"])
def test_a_bad_line_of_the_log_is_left_out(tmp_path, bad, caplog):
    gz_lines(tmp_path / "rollouts", [json.dumps(one()).encode()])
    (tmp_path / "rollouts" / "log.jsonl").write_text(
        f'{{"step": 1, "loss": 0.5}}\n{bad}\n{{"step": 2, "loss": 0.25}}\n'
    )
    html = write_report(tmp_path, pictures=False).read_text()
    assert [entry["loss"] for entry in block(html, "history")["modes"]["optimisation"]] == [
        0.5,
        0.25,
    ]
    assert "log.jsonl: left out 1 of its lines" in caplog.text


JSONS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(one())), value=JSONS, within=st.booleans())
def test_whatever_a_field_holds_the_report_is_made(tmp_path_factory, name, value, within):
    folder = tmp_path_factory.mktemp("damaged")
    record = one(rewards={"prompt_r1_reward": 1.0}, reward=1.0)
    if (
        within
        and isinstance(record[name], list)
        and record[name]
        and isinstance(record[name][0], dict)
    ):
        record[name] = [{**record[name][0], "text": value}]
    else:
        record[name] = value
    gz_lines(folder / "rollouts", [json.dumps(one()).encode(), json.dumps(record).encode()])
    html = write_report(folder, pictures=False).read_text()
    data = [
        gzip.decompress(base64.b64decode(packed))
        for packed in re.findall(r'id="data-[^"]*">([^<]*)</script>', html)
    ]
    for each in data:  # as a browser reads it, which knows neither NaN nor Infinity
        json.loads(each, parse_constant=lambda name: pytest.fail(name))


def answered(**changes):
    found = {
        "system": "plain",
        "task": "gsm8k",
        "run": 0,
        "place": 0,
        "question": "2 + 2?",
        "answers": ["4"],
    }
    return {
        **found,
        "answer": "4",
        "whole": "it is 4",
        "error": None,
        "calls": 1,
        "tokens": 9,
        "cost_usd": 0.0,
        "seconds": 1.0,
    } | changes


def refined(**changes):
    from agentic_prompting.refine.types import RefinementResult, RefinementStep

    step = RefinementStep("Think.", "Think twice.", "4?", False, "Check it.")
    return (
        RefinementResult(
            "0", "2 + 2?", "4", "Think.", "Think twice.", "finished", steps=(step,)
        ).to_dict()
        | changes
    )


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from([answered, refined]), data=st.data(), value=JSONS)
def test_whatever_an_answer_or_a_refinement_holds_the_report_is_made(
    tmp_path_factory, kind, data, value
):
    folder = tmp_path_factory.mktemp("damaged")
    name = data.draw(st.sampled_from(sorted(kind())))
    lines = (
        [kind(), kind(**{name: value}), kind(place=1, id="1")]
        if kind is answered
        else [kind(), kind(**{name: value})]
    )
    (folder / "results.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"torn'
    )
    (folder / "run.json").write_text(json.dumps({"metrics": value, "fit_calls": {"plain": 0}}))
    html = write_report(folder, pictures=False).read_text()
    assert ('id="data-evaluation"' if kind is answered else 'id="data-refinements"') in html


def test_watching_goes_on_while_files_grow_are_damaged_and_go(tmp_path, caplog):
    """A step a look: a file grows by half a member, a population is garbage, everything is removed
    and comes again.
    """
    from agentic_prompting.report import watch_report

    whole = gzip.compress(json.dumps(one()).encode() + b"\n")
    part = tmp_path / "rollouts" / "rollouts-00000-00000.jsonl.gz"
    seen = []

    def look():
        page = tmp_path / "report" / "index.html"
        if page.exists():
            seen.append(block(page.read_text(), "trajectories")["total"])
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    def written(data):
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(data)

    steps = [
        lambda: written(whole),
        lambda: written(whole + whole[:20]),
        lambda: written(whole * 3),
        lambda: (tmp_path / "population.json").write_text("{"),
        lambda: part.unlink(),
        lambda: ((tmp_path / "population.json").unlink(), written(whole * 4)),
    ]
    watch_report(tmp_path, wait=look)
    assert seen == [1, 1, 3, 3, 3, 4]
    assert caplog.text.count("the page stays as it was") == 1 and "population.json" in caplog.text


# --- groups with a gradient, evolutions, optimised prompts ----------------------------------------


def test_the_share_of_groups_with_a_gradient(tmp_path):
    """A group whose rewards are equal trains nothing; the page has the share, and why."""
    records = []
    for question, rewards, answers in (
        ("differ", (0.0, 1.0), ("Lima", "Nairobi")),
        ("right", (1.0, 1.0), ("Nairobi", "Nairobi")),
        ("wrong", (0.0, 0.0), ("Lima", "Lima")),
    ):
        for reward, answer in zip(rewards, answers, strict=True):
            records.append(one(question=question, rewards={"r": reward}, answer=answer))
    records += [
        one(question="cut", rewards={"r": 0.0}, status="truncated", answer=None) for _ in range(2)
    ]
    records.append(one(question="alone", rewards={"r": 0.0}))
    (entry,) = history_of(records)
    assert entry["groups/with_gradient"] == 0.25
    html = write_report(write_run(tmp_path / "run", records), pictures=False).read_text()
    assert block(html, "run")["gradient"] == {
        "groups": 4,
        "with_gradient": 1,
        "reasons": {"all right": 1, "all wrong": 1, "all truncated": 1},
    }


def test_the_folder_of_evolve_has_its_tree_and_its_rewards(tmp_path):
    """Also without held-out rows."""
    population = evolved(tmp_path / "population.json", 3)
    (tmp_path / "population.json").unlink()
    steps = [{"step": 0, "reward": 0.25, "held_out": None}, {"step": 1, "reward": 0.5}]
    state = {"population": population.state_dict(), "steps": steps}
    (tmp_path / "state.json").write_text(json.dumps(state))
    html = write_report(tmp_path, pictures=False).read_text()
    assert len(block(html, "lineage")["nodes"]) == len(population.members)
    assert block(html, "history")["modes"]["evolution"] == [
        {"step": 1, "evolution/reward": 0.25},
        {"step": 2, "evolution/reward": 0.5},
    ]


def test_a_table_shows_the_optimised_prompts(tmp_path):
    folder = evaluated(tmp_path / "e", True)
    (folder / "prompts").mkdir()
    prompt = {"prompt": "Count twice.", "calls": 12}
    (folder / "prompts" / "gepa-of-us-0123abcd.json").write_text(json.dumps(prompt))
    html = write_report(folder, pictures=False).read_text()
    assert block(html, "evaluation")["prompts"] == [["gepa-of-us", "Count twice."]]


@pytest.mark.parametrize(
    ("value", "limits"), [(0.5, (0, 1)), (-2, (-4, 0)), (0, (0, 1)), (1e-6, (0, 2e-6))]
)
def test_the_axis_of_a_constant_begins_at_zero(value, limits):
    from agentic_prompting.report.plots import constant_limits

    assert constant_limits(value) == limits
