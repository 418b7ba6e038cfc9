"""Tables from configurations: read and checked, run in the sandbox, and through the command."""

import re
from pathlib import Path

import pytest

from agentic_prompting.cli import main
from agentic_prompting.evaluation import EvaluationTask
from misbehaving import MisbehavingServer
from paper_tables import load_config, run_table
from paper_tables.sandbox import SANDBOX_TASKS, sandbox_task

CONFIGS = sorted((Path(__file__).parents[1] / "examples" / "configs").glob("eval_*.yaml"))

SMALL = """
title: Small
tasks: [prompt_r1/test/hotpot]
baseline: cot
left_out: {the 8B column: a run of its own}
n: 8
calls_budget: 60
systems:
  direct: {kind: prompted, prompt: direct}
  cot: {kind: prompted}
  self_reflection: {}
  opro: {}
  prorefine: {setting: verifier}
"""


def written(tmp_path, text):
    path = tmp_path / "table.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_papers_configurations_are_sound(path):
    from agentic_prompting.data import find_task

    config = load_config(path)
    for task in [*config.tasks, *([config.train_task] if config.train_task else [])]:
        name, _, split = task.partition("/")
        _, split, record = find_task(name, split or "test")
        assert split in record.expected_rows
    named = {
        value for one in config.systems for role, value in one.settings.items() if role in ("model", "environment")
    }
    assert named <= set(config.models)


def test_there_is_a_configuration_for_every_table():
    names = {path.stem for path in CONFIGS}
    assert {"eval_prompt_r1_table2", "eval_prompt_r1_table4", "eval_prompt_r1_table5"} < names
    assert {"eval_prorefine_table1", "eval_espl_aime25", "eval_espl_hmmt", "eval_espl_beyondaime"} < names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("self_reflection: {}", "reflection: {}"), "unknown 'reflection'; did you mean 'self_reflection'"),
        (("tasks:", "task:"), "unknown 'task'; did you mean 'tasks'"),
        (("baseline: cot", "baseline: best"), "the baseline 'best' is none of the systems"),
        (("opro: {}", "opro: {modle: x}"), r"system opro \(opro\): unknown 'modle'; did you mean 'model'"),
        (("title: Small", ""), "`title` is missing"),
        (("title: Small", "title: [a"), "is no YAML"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_config(written(tmp_path, SMALL.replace(*change)))


def test_a_table_in_the_sandbox(tmp_path):
    config = load_config(written(tmp_path, SMALL))
    run = run_table(config, sandbox=True, output=tmp_path / "out", progress=False)
    assert {(result.system, result.task) for result in run.evaluation.results} == {
        (system.name, task) for system in config.systems for task in SANDBOX_TASKS
    }
    found = {(result.system, result.task): result for result in run.evaluation.results}
    assert found[("opro", "sandbox_counting")].fit_calls > 16
    counting = [found[(name, "sandbox_counting")].estimates["integer_match"].mean for name in ("cot", "prorefine")]
    assert counting[1] > counting[0]
    assert len(run.comparisons) == 4 * 3 and "sandbox: says nothing" in run.files["md"].read_text()
    again = run_table(config, sandbox=True, output=tmp_path / "out", progress=False)
    assert again.evaluation.results == run.evaluation.results


def test_a_system_that_cannot_be_made_is_left_out_with_its_reason(tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gepa" else find(name, *rest))
    config = load_config(written(tmp_path, SMALL.replace("opro: {}", "gepa: {}")))
    run = run_table(config, sandbox=True, output=tmp_path / "out", progress=False)
    assert list(run.skipped) == ["gepa"] and "not installed" in run.skipped["gepa"]
    assert "gepa" not in {result.system for result in run.evaluation.results}


def test_agents_of_a_table(asking_policy, tmp_path):
    import paper_tables.sandbox_policies
    from paper_tables.sandbox import sandbox_models
    from paper_tables.systems import Unavailable, Workshop

    agents = (
        f"agent: {{folder: {asking_policy}, environment: oracle}}\n  untrained: {{kind: agent, folder: {tmp_path}}}"
    )
    config = load_config(written(tmp_path, SMALL.replace("opro: {}", agents)))
    systems = {system.name: system for system in config.systems}
    models = {name: (model, {}) for name, model in sandbox_models().items()}
    workshop = Workshop(config, models, [], "exact_match", tmp_path, None)
    (answer,) = workshop.make(systems["agent"])([sandbox_task("sandbox_countries", 1).rows[0]])
    assert answer.error is None and answer.calls == 1 and answer.trajectory["turns"]
    with pytest.raises(Unavailable, match="holds no trained agent: train it first"):
        workshop.make(systems["untrained"])
    assert callable(paper_tables.sandbox_policies.policy_for)


def test_training_and_test_questions_differ():
    for name in SANDBOX_TASKS:
        parts = [{row["question"] for row in sandbox_task(name, 30, split=split).rows} for split in ("train", "test")]
        assert all(len(part) == 30 for part in parts) and not parts[0] & parts[1]
    with pytest.raises(ValueError, match="unknown sandbox task"):
        sandbox_task("sandbox_chess", 3)


@pytest.mark.parametrize("dear", ["small", "large"])
def test_the_budget_of_a_table_is_that_of_all_its_models(dear, tmp_path, capsys, monkeypatch):
    """15 tokens a call; of the systems ProRefine alone asks the large model."""
    task = EvaluationTask("puzzles", [{"question": f"How many in {i}?", "answers": ["7"]} for i in range(30)])
    monkeypatch.setattr("paper_tables.run.load_evaluation_task", lambda *_: task)
    with MisbehavingServer(say=lambda request: "Answer: 3") as server:
        text = f"""
title: Dear
tasks: [puzzles]
budget_tokens: 150
models:
  small: {{base_url: "{server.base_url}", max_concurrency: 1}}
  large: {{base_url: "{server.base_url}", max_concurrency: 1}}
systems:
  cot: {{kind: prompted, model: {dear}}}
  prorefine: {{model: small, critic: large}}
"""
        config = written(tmp_path, text)
        command = ["evaluate", "--config", str(config), "--output", str(tmp_path / "out")]
        assert status(*command) == 1
        said = capsys.readouterr().err.strip().splitlines()[-1]
        asked = len(server.requests)
        assert "of the budget of 150 tokens are spent in all" in said and asked in (10, 11), "within one call of it"
        assert re.search(rf"Spent so far: {dear} \$0.0000 \(1(50|65) tokens\); run the same command again", said)
        assert status(*command) == 1 and len(server.requests) == asked, "a restart does not get the budget again"


def status(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return stopped.value.code


def test_the_evaluate_command(tmp_path, capsys):
    config = str(written(tmp_path, SMALL))
    folders = [str(tmp_path / name) for name in ("a", "b")]
    assert status("evaluate", "--config", config, "--sandbox", "--output", folders[0]) == 0
    shown = capsys.readouterr().out
    assert "| sandbox_sorting | cot |" in shown
    assert "left out: the 8B column: a run of its own\n" in shown
    assert "left out: prompt_r1/test/hotpot: no data sets in the sandbox; sandbox_sorting, " in shown
    Path(config).write_text(SMALL.replace("prompt: direct", "prompt: Be quick."))
    assert status("evaluate", "--config", config, "--sandbox", "--output", folders[1]) == 0
    capsys.readouterr()
    assert status("evaluate", "--compare", *folders) == 0
    assert "| cot (a) | cot (b) | +0.000" in capsys.readouterr().out
    assert status("evaluate", "--config", config, "--sandbox", "--output", folders[1], "--metric", "token_f1") == 0
    assert "| task | system | token_f1 | answered" in capsys.readouterr().out
    assert status("evaluate") == 2 and "--config FILE, or --compare" in capsys.readouterr().err


def test_outside_of_a_clone_the_command_says_what_to_do(tmp_path, monkeypatch, capsys):
    from agentic_prompting.cli import commands

    config = str(written(tmp_path, SMALL))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "lib" / "agentic_prompting" / "cli" / "commands.py"))
    assert status("evaluate", "--config", config, "--sandbox") == 2
    said = capsys.readouterr().err
    assert "run this command inside a clone" in said and "evaluate_agent" in said
    monkeypatch.chdir(CONFIGS[0].parent)  # a clone, though the package is installed elsewhere
    assert status("evaluate", "--config", config, "--sandbox", "--output", str(tmp_path / "out")) == 0


def test_the_data_command(capsys):
    assert status("data", "list") == 0 and "writingprompts" in capsys.readouterr().out
    assert status("data", "show", "aime25", "hmmt") == 0 and "a pair of sets" in capsys.readouterr().out
    assert status("data", "check") == 0 and "records are consistent" in capsys.readouterr().out
    assert status("data", "show", "hotpot") == 2 and "did you mean 'hotpotqa'" in capsys.readouterr().err
