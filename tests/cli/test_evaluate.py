"""`agentic-prompting evaluate` on a trained agent and rows of one's own, and how it shows tables."""

import json
import shutil
import sys
from dataclasses import replace

import pytest

from agentic_prompting import PromptAgent
from agentic_prompting.cli import evaluate
from agentic_prompting.evolution import Population, SystemPrompt
from agentic_prompting.report.evaluation_summary import read_evaluation
from agentic_prompting.rollout import AgentSpec, FreeText
from support.policies import make_asking_conductor


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(
        "request,reply\nwhat is the language of Kenya ?,Swahili\nwhat is the capital of Kenya "
        "?,Nairobi\n"
    )
    return ["--dataset", file, "--columns", "question=request,answer=reply"]


def test_a_run_is_evaluated_on_rows_of_ones_own(run, asking_policy, mine, tmp_path):
    out_dir = tmp_path / "out"
    status, out, err = run(
        "evaluate", "--run", asking_policy, *mine, "--sandbox", "--output-dir", out_dir
    )
    assert status == 0, err
    line = next(line for line in out.splitlines() if line.split()[:1] == ["mine"])
    assert asking_policy.name in line and "[" in line, "the score has an interval"
    assert "| ---" not in out and "exact_match" in out, "a table, and no Markdown"
    assert (out_dir / "table.md").is_file() and (out_dir / "run.json").is_file()
    assert "already" not in err
    status, out, err = run(
        "evaluate", "--run", asking_policy, *mine, "--sandbox", "--output-dir", out_dir, "--json"
    )
    assert f"all 2 answers were in {out_dir} already" in err, "nobody was asked"
    (result,) = json.loads(out)["results"]
    assert result["answers"] == 2 and result["estimates"]["exact_match"]["mean"] in (0.0, 0.5, 1.0)


def test_a_run_that_has_trained_on_or_asks_another_is_not_continued(
    run, asking_policy, mine, tmp_path
):
    """Else the score after more training would be the one before it, without a word and without a
    call.
    """
    trained = tmp_path / "run"
    where = ["--output-dir", tmp_path / "out"]
    shutil.copytree(asking_policy, trained)
    (tmp_path / "own.py").write_text(
        "def environment(rollout):\n    return 'the answer is Nairobi .'\n"
    )
    other = ["--environment", f"{tmp_path}/own.py:environment"]
    assert run("evaluate", "--run", trained, *mine, "--sandbox", *where)[0] == 0
    status, _, err = run("evaluate", "--run", trained, *mine, *other, *where)
    assert status == 2 and "answers of another system" in err
    weights = next(trained.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes())  # as a trainer that saves again
    status, _, err = run("evaluate", "--run", trained, *mine, "--sandbox", *where)
    assert status == 2 and "answers of another system" in err


PROGRAM = """
from openai import OpenAI
from agentic_prompting import Program

def agent(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    client.chat.completions.create(model="agent", messages=[{"role": "user", "content": row["question"]}])
    return "Swahili"

program = Program(agent)
"""


def test_a_named_program_plays_a_free_text_agent(run, asking_policy, mine, tmp_path):
    """What a trainer saves of a program answers with free text, so that nothing but the option
    names it.
    """
    trained = tmp_path / "run"
    shutil.copytree(asking_policy, trained)
    replace(AgentSpec.load(trained), grammar=FreeText()).save(trained)
    (tmp_path / "own_agent.py").write_text(PROGRAM)
    status, out, err = run(
        "evaluate",
        *("--run", trained, *mine, "--program", f"{tmp_path}/own_agent.py:program"),
        *("--output-dir", tmp_path / "out", "--json"),
    )
    assert status == 0, err
    (result,) = json.loads(out)["results"]
    assert result["estimates"]["exact_match"]["mean"] == 0.5

    # The model before training, which no trainer has saved, in the same program.
    base = tmp_path / "base"
    shutil.copytree(asking_policy, base)
    (base / "agentic_prompting.json").unlink()
    status, out, err = run(
        "evaluate",
        *("--run", trained, "--base", base, *mine),
        *("--program", f"{tmp_path}/own_agent.py:program"),
        *("--output-dir", tmp_path / "both", "--json"),
    )
    assert status == 0, err
    record = json.loads(out)
    assert [result["system"] for result in record["results"]] == ["untrained", "run"]
    assert {comparison["second"] for comparison in record["comparisons"]} == {"untrained"}
    assert "format" not in record["results"][0]["estimates"], "a program has no tags"

    # Without the program the weights answer alone, and a line says so.
    (trained / "rollouts").mkdir(exist_ok=True)
    (trained / "rollouts" / "log.jsonl").write_text('{"program/calls": 1}\n')
    status, _, err = run("evaluate", "--run", trained, *mine, "--output-dir", tmp_path / "alone")
    assert status == 0 and "--program" in err


def test_a_program_gets_all_columns_of_json_lines(run, asking_policy, tmp_path):
    """Else a command would play its tasks without their files, and the score would not say so."""
    trained = tmp_path / "run"
    shutil.copytree(asking_policy, trained)
    replace(AgentSpec.load(trained), grammar=FreeText()).save(trained)
    (tmp_path / "own_agent.py").write_text(
        PROGRAM.replace('return "Swahili"', 'return row["files"]["a.txt"]')
    )
    row = {
        "question": "what is the language of Kenya ?",
        "answers": ["Swahili"],
        "files": {"a.txt": "Swahili"},
    }
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    program = f"{tmp_path}/own_agent.py:program"
    rows = ("--dataset", tmp_path / "tasks.jsonl")
    status, out, err = run(
        "evaluate",
        *("--run", trained, *rows, "--program", program),
        *("--output-dir", tmp_path / "out", "--json"),
    )
    assert status == 0, err
    (result,) = json.loads(out)["results"]
    assert result["estimates"]["exact_match"]["mean"] == 1.0

    # Before training, too.
    status, out, err = run("check-env", program, "--model", trained, *rows, "--json")
    assert status == 0, err
    assert json.loads(out)["episodes"][0]["answer"] == "Swahili"


def test_a_changed_program_is_asked_elsewhere(run, asking_policy, mine, tmp_path):
    """Else the score of the new program would be that of the old one, without a word."""
    trained = tmp_path / "run"
    shutil.copytree(asking_policy, trained)
    replace(AgentSpec.load(trained), grammar=FreeText()).save(trained)
    file = tmp_path / "own_agent.py"
    file.write_text(PROGRAM)
    words = ("evaluate", "--run", trained, *mine, "--program", f"{file}:program")
    words += ("--output-dir", tmp_path / "out")
    assert run(*words)[0] == 0
    assert run(*words)[0] == 0, "unchanged, it goes on"
    file.write_text("# A remark.\n" + PROGRAM)
    assert run(*words)[0] == 0, "a remark changes no answer"
    file.write_text(PROGRAM.replace("Swahili", "Nairobi, I think"))
    status, _, err = run(*words)
    assert status == 2 and "before the code" in err


def test_the_questions_metrics_and_repeats_are_options(run, asking_policy, mine, tmp_path):
    (tmp_path / "own_judge.py").write_text("def always(answer, answers):\n    return 1.0\n")
    words = [
        "--task-rows=1",
        "--samples=2",
        "--metric=token_f1",
        f"--judge={tmp_path}/own_judge.py:always",
    ]
    where = ["--sandbox", "--output-dir", tmp_path / "out", "--json"]
    (result,) = json.loads(run("evaluate", "--run", asking_policy, *mine, *words, *where)[1])[
        "results"
    ]
    assert result["answers"] == 2
    assert {"token_f1", f"{tmp_path}/own_judge.py:always"} <= set(result["estimates"])


def test_a_judge_may_be_the_metric(run, asking_policy, mine, tmp_path):
    (tmp_path / "own_judge.py").write_text("def always(answer, answers):\n    return 1.0\n")
    words = [f"--judge={tmp_path}/own_judge.py:always", f"--metric={tmp_path}/own_judge.py:always"]
    where = ["--sandbox", "--task-rows=1", "--output-dir", tmp_path / "out", "--json"]
    status, out, err = run("evaluate", "--run", asking_policy, *mine, *words, *where)
    assert status == 0, err
    (result,) = json.loads(out)["results"]
    assert f"{tmp_path}/own_judge.py:always" in result["estimates"]


def test_a_function_as_metric_names_its_option(run, asking_policy, mine, monkeypatch, tmp_path):
    (tmp_path / "own_score.py").write_text("def always(answer, answers):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "--run", asking_policy, *mine, "--sandbox", "--output-dir", "out"]
    status, _, err = run(*words, "--metric", "own_score:always")
    assert status == 2 and "--judge own_score:always" in err
    status, _, err = run(*words, "--metric", "own_score:alway")
    assert status == 2 and "did you mean always" in err
    status, _, err = run("headroom", "--dataset", "x.csv", "--metric", "own_score:always")
    assert status == 2 and "--score own_score:always" in err


def test_rows_are_sampled_from_the_held_out_share(run, asking_policy, tmp_path):
    lines = [json.dumps({"question": f"{number} ?", "answer": "x"}) for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    words = ["--dataset", tmp_path / "rows.jsonl", "--held-out=0.5", "--task-rows=2", "--sandbox"]
    where = ["--output-dir", tmp_path / "out", "--json"]
    (result,) = json.loads(run("evaluate", "--run", asking_policy, *words, *where)[1])["results"]
    assert result["answers"] == 2
    status, _, err = run("evaluate", "--run", asking_policy, *words, "--task-rows=19")
    assert status == 2 and "--task-rows 19" in err


def test_a_free_text_agent_asks_nobody(run, asking_policy, mine, tmp_path):
    trained = tmp_path / "run"
    shutil.copytree(asking_policy, trained)
    replace(AgentSpec.load(trained), grammar=FreeText()).save(trained)
    words = ["evaluate", "--run", trained, *mine]
    for option in (["--environment-model", "m"], ["--sandbox"], ["--replay-cache", "r"]):
        status, out, err = run(*words, *option)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert option[0] in err and "--program" in err


def test_what_prompt_and_weights_are_worth(
    run, asking_policy, tiny_policy, mine, tmp_path, monkeypatch
):
    """A run of E-SPL: base and trained weights, each under the first and the final prompt."""
    trained = tmp_path / "run"
    asked = []
    shutil.copytree(asking_policy, trained)
    spec = replace(AgentSpec.load(trained), system_prompt="the capital")
    spec.save(trained)
    population = Population(SystemPrompt("the first"))
    (trained / "population.json").write_text(json.dumps({"population": population.state_dict()}))
    answer_all = PromptAgent.answer_all

    def answers(agent, questions, **options):
        rollouts = answer_all(agent, questions, **options)
        asked.append(
            (
                agent.spec.system_prompt,
                agent.policy,
                any(rollout.observations for rollout in rollouts),
            )
        )
        assert agent.spec.system_prompt in agent.chat_format.tokenizer.decode(
            rollouts[0].prompt_ids
        )
        return rollouts

    monkeypatch.setattr(PromptAgent, "answer_all", answers)
    status, out, err = run(
        "evaluate", "--run", trained, "--base", tiny_policy, *mine, "--sandbox", "--json"
    )
    assert status == 0, err
    record = json.loads(out)
    names = [result["system"] for result in record["results"]]
    assert names == [
        f"{weights} weights, {which} prompt"
        for weights in ("base", "trained")
        for which in ("first", "final")
    ]
    assert [prompt for prompt, *_ in asked] == ["the first", "the capital"] * 2
    assert asked[0][1] is asked[1][1] is not asked[2][1] is asked[3][1], "weights are loaded once"
    assert not any(one[2] for one in asked[:2]) and all(one[2] for one in asked[2:]), (
        "only the trained policy asks"
    )
    assert {comparison["second"] for comparison in record["comparisons"]} == {names[0]}
    assert read_evaluation(trained / "evaluation") is not None, "the report shows it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config FILE, --run RUN --dataset FILE, or --compare FOLDER FOLDER"),
        (
            ["--base", "b", "--compare", "one", "other"],
            "--base needs --run",
        ),
        (["--run", "RUN"], "name the rows: --dataset FILE"),
        (
            ["--run", "RUN", "--dataset", "mine.csv"],
            "name the large LLM with --environment-model NAME",
        ),
        (["--run", "RUN", "--dataset", "nowhere.csv", "--sandbox"], "nowhere.csv"),
        (
            ["--run", "nowhere/at/all", "--dataset", "mine.csv", "--sandbox"],
            "nowhere/at/all does not exist",
        ),
        (
            ["--run", "RUN", "--dataset", "mine.csv", "--sandbox", "--columns", "question=reqest"],
            "reqest",
        ),
    ],
)
def test_what_is_missing_is_one_line(
    run, asking_policy, mine, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(
        "evaluate", *(asking_policy if word == "RUN" else word for word in arguments)
    )
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err, err


TABLE = """
title: mine
output: out
tasks: [rows.jsonl]
runs: 1
systems: {direct: {kind: prompted, model: m, prompt: start}}
models: {m: {name: m, base_url: "http://localhost:1"}}
"""


@pytest.mark.parametrize("installed_from", ["a clone", "a wheel", "nowhere"])
def test_no_program_of_the_current_folder_is_run(run, tmp_path, monkeypatch, installed_from):
    """A folder that was downloaded, or one above it, may hold a `benchmarks/paper_tables` of
    anybody's.
    """
    planted = tmp_path / "benchmarks" / "paper_tables" / "__init__.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    below = tmp_path / "data" / "mine"
    below.mkdir(parents=True)
    (tmp_path / "src" / "agentic_prompting").mkdir(parents=True)
    (below / "table.yaml").write_text(TABLE)
    monkeypatch.chdir(below)
    monkeypatch.delitem(sys.modules, "paper_tables", raising=False)
    clone = evaluate.CLONE
    if installed_from != "a clone":
        monkeypatch.setattr(evaluate, "CLONE", tmp_path)
    monkeypatch.setattr(
        evaluate, "find_shared_folder", lambda: clone if installed_from == "a wheel" else None
    )
    status, _, err = run("evaluate", "--config", "table.yaml")
    assert not planted.with_name("ran").exists()
    assert status == 2 and ("rows.jsonl" in err) == (installed_from != "nowhere"), err


@pytest.mark.parametrize(
    ("words", "asks"), [([], False), (["--metric", "rouge"], True), (["--dataset", "gsm8k"], True)]
)
def test_a_table_of_own_files_asks_no_hub(run, tmp_path, monkeypatch, words, asks):
    asked = []
    monkeypatch.setattr(evaluate, "probe_hub", lambda: asked.append(1))
    (tmp_path / "table.yaml").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    status, _, _ = run("evaluate", "--config", "table.yaml", *words)
    assert status == 2 and bool(asked) == asks


def test_a_refused_table_names_no_line_of_ours(run, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "paper_tables", raising=False)
    (tmp_path / "table.yaml").write_text(TABLE.replace("prompted", "promptd"))
    status, _, err = run("evaluate", "--config", tmp_path / "table.yaml")
    assert status == 2 and "'promptd'" in err and ".py" not in err


GRAMMAR = """
from dataclasses import dataclass
from agentic_prompting.rollout import TagGrammar

@dataclass(frozen=True)
class Mine(TagGrammar):
    pass

class Desk:
    grammar = Mine()

    def step(self, rollout):
        return "Nairobi"
"""


def test_an_environment_brings_the_grammar_of_its_agent(run, asking_policy, mine, tmp_path):
    trained = tmp_path / "run"
    shutil.copytree(asking_policy, trained)
    spec_file = trained / "agentic_prompting.json"
    saved = json.loads(spec_file.read_text())
    spec_file.write_text(json.dumps({**saved, "grammar": {"kind": "Mine"}}))
    (tmp_path / "desk.py").write_text(GRAMMAR)
    words = ["--run", trained, *mine, "--output-dir", tmp_path / "out", "--json"]
    status, out, err = run("evaluate", *words, "--environment", f"{tmp_path}/desk.py:Desk")
    assert status == 0, err
    (result,) = json.loads(out)["results"]
    assert result["answers"] == 2

    # Without its environment the error names the option.
    status, _, err = run("evaluate", *words)
    assert status == 2 and "'Mine'" in err and "--environment" in err


def test_a_table_stopped_while_it_loads_names_no_folder(run, tmp_path, monkeypatch):
    def stop(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "find_example", stop)
    status, _, err = run("evaluate", "--config", tmp_path / "table.yaml")
    assert status == 130 and "None" not in err and "goes on from" not in err


POOL = """
from agentic_prompting.environments import Worker, Workers

pool = {
    "language": Worker(lambda messages: "Answer: Swahili", usd=0.01),
    "country": Worker(lambda messages: "Answer: Nairobi", usd=0.02),
}
environment = Workers(pool)
"""


def test_a_conductor_is_compared_with_its_workers(run, mine, tmp_path):
    policy = make_asking_conductor(tmp_path / "policy")
    (tmp_path / "pool.py").write_text(POOL)
    words = ["--run", policy, "--base", policy, "--baselines", *mine]
    pool = ["--environment", f"{tmp_path}/pool.py:environment"]
    status, out, err = run("evaluate", *words, *pool, "--output-dir", tmp_path / "out", "--json")
    assert status == 0, err
    printed = json.loads(out)
    systems = [result["system"] for result in printed["results"]]
    assert systems[:2] == ["policy", "untrained"]
    assert systems[2:6] == ["language alone", "country alone", "even router", "oracle router"]
    assert systems[6].startswith("best of ") and systems[7].startswith("random plan of ")
    scores = {
        result["system"]: result["estimates"]["exact_match"]["mean"]
        for result in printed["results"]
    }
    assert scores["language alone"] == 0.5 and scores["oracle router"] == 1.0
    status, _, err = run("evaluate", *words, "--sandbox", "--output-dir", tmp_path / "other")
    assert status == 2 and "--baselines" in err
    status, _, err = run("evaluate", "--baselines", "--compare", tmp_path, tmp_path)
    assert status == 2 and "--run" in err
