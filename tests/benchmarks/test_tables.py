"""Tables from configurations: read and checked, run in the sandbox, and through the command."""

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentic_prompting.cli import main
from agentic_prompting.evaluation import EvaluationTask
from paper_tables import load_config, run_table
from paper_tables.sandbox import SANDBOX_TASKS, sandbox_task
from support.misbehaving import MisbehavingServer

FOLDER = Path(__file__).parents[2] / "examples" / "configs"
OWN_ROWS = FOLDER / "eval_closed_model.yaml"
CONFIGS = sorted(set(FOLDER.glob("eval_*.yaml")) - {OWN_ROWS})

SMALL = """
title: Small
tasks: [prompt_r1/test/hotpot, gsm8k]
metrics: {default: [exact_match, token_f1], gsm8k: [token_f1, semantic_similarity]}
averages: {Average: [prompt_r1/test/hotpot, gsm8k]}
baseline: cot
case: opro
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
    learned = [config.train_task, config.validation_task, config.fit_task]
    named = [
        one
        for task in learned
        for one in (task.values() if isinstance(task, dict) else [task])
        if one
    ]
    for task in [*config.tasks, *named]:
        name, _, split = task.partition("/")
        _, split, record = find_task(name, split or "test")
        assert split in record.expected_rows
    roles = ("model", "environment", "critic", "editor")
    named = {
        value
        for system in config.systems
        for role, value in system.settings.items()
        if role in roles and value
    }
    assert named | ({config.judge} if config.judge else set()) <= set(config.models)
    of_sets = config.metrics if isinstance(config.metrics, dict) else {}
    assert set(of_sets) - {"default"} <= set(config.tasks)


def test_there_is_a_configuration_for_every_table():
    names = {path.stem for path in CONFIGS}
    assert {"eval_prompt_r1_table2", "eval_prompt_r1_table4", "eval_prompt_r1_table5"} < names
    assert {
        "eval_prorefine_table1",
        "eval_prorefine_ablations",
        "eval_prompt_r1_figures4_5",
        "eval_espl_aime25",
        "eval_espl_hmmt",
        "eval_espl_beyondaime",
    } < names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("self_reflection: {}", "reflection: {}"),
            "unknown 'reflection'; did you mean 'self_reflection'",
        ),
        (("tasks:", "task:"), "unknown 'task'; did you mean 'tasks'"),
        (("baseline: cot", "baseline: best"), "the baseline 'best' is none of the systems"),
        (
            ("opro: {}", "opro: {modle: x}"),
            r"system opro \(opro\): unknown 'modle'; did you mean 'model'",
        ),
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
    tasks = {"prompt_r1/test/hotpot (sandbox_countries)", "gsm8k (sandbox_counting)"}
    assert {(result.system, result.task) for result in run.evaluation.results} == {
        (system.name, task) for system in config.systems for task in {*tasks, "Average"}
    }
    found = {(result.system, result.task): result for result in run.evaluation.results}
    counting = "gsm8k (sandbox_counting)"
    assert found[("opro", counting)].fit_calls > 16
    means = [
        found[(name, counting)].estimates["integer_match"].mean for name in ("cot", "prorefine")
    ]
    assert means[1] > means[0]
    assert list(found[("cot", counting)].estimates) == ["integer_match", "token_f1"]
    of_sets = [found["cot", task].estimates["token_f1"].mean for task in sorted(tasks)]
    assert found["cot", "Average"].estimates["token_f1"].mean == pytest.approx(sum(of_sets) / 2)
    assert "Average" in run.files["md"].read_text() and "semantic_similarity" in run.left_out
    assert len(run.comparisons) == 4 * 2 and "sandbox: says nothing" in run.files["md"].read_text()
    assert "## prorefine: exact match" in run.files["case"].read_text()
    again = run_table(config, sandbox=True, output=tmp_path / "out", progress=False)
    assert again.evaluation.results == run.evaluation.results


def test_a_system_that_cannot_be_made_is_left_out_with_its_reason(tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "gepa" else find(name, *rest),
    )
    config = load_config(written(tmp_path, SMALL.replace("opro: {}", "gepa: {}")))
    run = run_table(config, sandbox=True, output=tmp_path / "out", progress=False)
    assert list(run.skipped) == ["gepa"] and "not installed" in run.skipped["gepa"]
    assert "gepa" not in {result.system for result in run.evaluation.results}


def test_what_a_stand_in_cannot_answer_is_not_asked_and_says_so(
    asking_policy, tmp_path, monkeypatch
):
    """Prompt-R1 stood at 0.000 with p = .0001 where its policy knew none of the words."""
    monkeypatch.setattr("paper_tables.sandbox_policies.policy_for", lambda *_: asking_policy)
    agents = "opro: {}\n  prompt_r1: {kind: agent, folder: runs/x, environment: oracle}"
    config = load_config(written(tmp_path, SMALL.replace("opro: {}", agents)))
    run = run_table(config, sandbox=True, output=tmp_path / "out", progress=False)
    counting = "gsm8k (sandbox_counting)"
    countries = "prompt_r1/test/hotpot (sandbox_countries)"
    assert [result.task for result in run.evaluation.results if result.system == "prompt_r1"] == [
        countries
    ]
    assert [
        comparison.task for comparison in run.comparisons if comparison.first == "prompt_r1"
    ] == [countries]
    lines = run.files["md"].read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {counting} | prompt_r1 |")]
    assert "| – |" in row
    assert "0.000 [" not in row
    assert "not asked: its policy reads countries' words alone" in row
    status("report", tmp_path / "out", "--no-pictures")
    assert (tmp_path / "out" / "report" / "index.html").is_file()


def test_agents_of_a_table(asking_policy, tmp_path):
    import paper_tables.sandbox_policies
    from paper_tables.sandbox import sandbox_models
    from paper_tables.systems import Lessons, Unavailable, Workshop

    agents = (
        f"agent: {{folder: {asking_policy}, environment: oracle}}\n  untrained: "
        f"{{kind: agent, folder: {tmp_path}}}"
    )
    config = load_config(written(tmp_path, SMALL.replace("opro: {}", agents)))
    systems = {system.name: system for system in config.systems}
    models = {name: (model, {}) for name, model in sandbox_models().items()}
    task = sandbox_task("sandbox_countries", 1)
    lessons = Lessons("countries", [])
    workshop = Workshop(config, models, tmp_path, None)
    (answer,) = workshop.make(systems["agent"], task, lessons)([task.rows[0]])
    assert answer.error is None and answer.calls == 1 and answer.trajectory["turns"]
    with pytest.raises(Unavailable, match="holds no trained agent: train it first"):
        workshop.make(systems["untrained"], task, lessons)
    with pytest.raises(Unavailable, match="-seed3 holds no trained agent"):
        Workshop(config, models, tmp_path / "table", None, seed=3).make(
            systems["agent"], task, lessons
        )
    assert callable(paper_tables.sandbox_policies.policy_for)


def test_training_and_test_questions_differ():
    for name in SANDBOX_TASKS:
        parts = [
            {row["question"] for row in sandbox_task(name, 30, split=split).rows}
            for split in ("train", "test")
        ]
        assert all(len(part) == 30 for part in parts) and not parts[0] & parts[1]
        few = {row["question"] for row in sandbox_task(name, 10, split="train").rows}
        assert not few & parts[1], "whatever their sizes"
    with pytest.raises(ValueError, match="unknown sandbox task"):
        sandbox_task("sandbox_chess", 3)


@pytest.mark.parametrize("dear", ["small", "large"])
def test_the_budget_of_a_table_is_that_of_all_its_models(dear, tmp_path, capsys, monkeypatch):
    """15 tokens a call; of the systems ProRefine alone asks the large model."""
    task = EvaluationTask(
        "puzzles", [{"question": f"How many in {i}?", "answers": ["7"]} for i in range(30)]
    )
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
        stderr = capsys.readouterr().err.strip().splitlines()[-1]
        request_count = len(server.requests)
        assert "of the budget of 150 tokens are spent in all" in stderr and request_count in (
            10,
            11,
        ), "within one call of it"
        assert re.search(
            rf"Spent so far: {dear} \$0 or no price known \(1(50|65) tokens\); run the same command again",
            stderr,
        )
        assert status(*command) == 1 and len(server.requests) == request_count, (
            "a restart does not get the budget again"
        )


def status(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


def test_the_evaluate_command(tmp_path, capsys):
    config = str(written(tmp_path, SMALL))
    folders = [str(tmp_path / name) for name in ("a", "b")]
    assert status("evaluate", "--config", config, "--sandbox", "--output", folders[0]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ *gsm8k \(sandbox_counting\) +cot +[–\d]", printed, re.M), printed
    assert "left out: the 8B column: a run of its own\n" in printed
    assert "left out: data sets: not read in the sandbox" in printed
    Path(config).write_text(SMALL.replace("prompt: direct", "prompt: Be quick."))
    assert status("evaluate", "--config", config, "--sandbox", "--output", folders[1]) == 0
    capsys.readouterr()
    assert status("evaluate", "--compare", *folders) == 0
    assert re.search(r"cot \(a\) +cot \(b\) +\+0\.000", capsys.readouterr().out)
    assert (
        status(
            "evaluate",
            "--config",
            config,
            "--sandbox",
            "--output",
            str(tmp_path / "c"),
            "--metric",
            "token_f1",
        )
        == 0
    )
    assert re.search(
        r"task +system +token_f1 +iterations +(note +)?answered", capsys.readouterr().out
    )
    assert status("evaluate", "--config", "eval_x.yaml", "--sandbox") == 2
    assert (
        "eval_x.yaml does not exist; in examples/configs/ there are eval_closed_model, "
        in capsys.readouterr().err
    )
    assert status("evaluate") == 2
    assert "--config FILE, --run RUN --dataset FILE, or --compare" in capsys.readouterr().err


def test_where_there_are_no_tables_the_command_says_what_to_do(tmp_path, monkeypatch, capsys):
    commands = importlib.import_module("agentic_prompting.cli.evaluate")
    monkeypatch.setattr(commands, "find_shared_folder", lambda: None)
    monkeypatch.delitem(sys.modules, "paper_tables", raising=False)
    config = str(written(tmp_path, SMALL))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "CLONE", tmp_path)
    assert status("evaluate", "--config", config, "--sandbox") == 2
    stderr = capsys.readouterr().err
    assert "clone" in stderr and "evaluate_agent" in stderr


def test_the_data_command(capsys):
    assert status("data", "list") == 0 and "writingprompts" in capsys.readouterr().out
    assert status("data", "show", "aime25", "hmmt") == 0
    assert "a pair of sets" in capsys.readouterr().out
    assert status("data", "check") == 0 and "records are consistent" in capsys.readouterr().out
    assert status("data", "show", "hotpot") == 2
    assert "did you mean 'hotpotqa'" in capsys.readouterr().err


def test_a_table_for_each_of_several_models_is_marked_within_each(tmp_path):
    text = """
title: Both
tasks: [bbh_word_sorting/test]
metrics: {bbh_word_sorting/test: [judged, word_sorting_match]}
judge: large
n: 6
each_of: [small, large]
models: {small: {}, large: {}}
baseline: cot
marks: [cot]
figures: {figure4: {metric: iterations}}
systems:
  cot: {kind: prompted, prompt: start}
  prorefine: {setting: optimal_verifier, prompt: start, options: {max_steps: 3}}
  fixed: {kind: prompted, model: large}
"""
    config = load_config(written(tmp_path, text))
    assert [system.name for system in config.systems] == [
        *("cot, small", "cot, large", "prorefine, small", "prorefine, large", "fixed")
    ]
    run = run_table(config, sandbox=True, output=tmp_path / "out", progress=False)
    pairs = {(comparison.first, comparison.second) for comparison in run.comparisons}
    assert pairs == {(f"prorefine, {model}", f"cot, {model}") for model in ("small", "large")}
    assert {result.task for result in run.evaluation.results} == {
        "bbh_word_sorting/test (sandbox_sorting)"
    }
    records = [
        record for record in run.evaluation.records if record["system"] == "prorefine, small"
    ]
    assert all(
        record.get("judged") in (0.0, 1.0, None) and record["trajectory"]["steps"] <= 3
        for record in records
    )
    first = run.evaluation.results[0]
    assert list(first.estimates)[:2] == ["judged", "word_sorting_match"]
    assert first.estimates["judged"].n + first.ungraded["judged"] == 6
    assert first.ungraded["judged"] < 3
    assert "| Wald |" in run.files["md"].read_text()
    assert run.files["figure4"].read_bytes().startswith(b"\x89PNG")
    again = run_table(config, sandbox=True, output=tmp_path / "out", progress=False)
    assert again.evaluation.results == run.evaluation.results


def test_three_seeds_are_put_together(tmp_path):
    text = SMALL.replace("  opro: {}\n", "").replace("case: opro\n", "")
    path = str(written(tmp_path, text))
    assert (
        status(
            "evaluate",
            "--config",
            path,
            "--sandbox",
            "--output",
            tmp_path / "out",
            "--seeds",
            1,
            2,
            3,
        )
        == 0
    )
    run = run_table(
        load_config(path), sandbox=True, output=tmp_path / "out", progress=False, seeds=[1, 2, 3]
    )
    assert {folder.name for folder in (tmp_path / "out").glob("seed-*")} == {
        "seed-1",
        "seed-2",
        "seed-3",
    }
    with pytest.raises(ValueError, match="at least two different seeds"):
        run_table(load_config(path), sandbox=True, seeds=[1, 1])
    result = run.evaluation.result("cot", "Average")
    assert result.answers == 3 * 2 * 8 and result.estimates["token_f1"].n == 3
    assert "means over seeds 1, 2, 3" in run.files["md"].read_text()


def test_a_table_of_local_files_at_an_endpoint(tmp_path):
    """The released data where they lie; up to the model, which here says A."""
    row = {
        "question": "Which?",
        "options": ["A)1", "B)2", "C)3", "D)4", "E)5"],
        "rationale": "",
        "correct": "A",
    }
    rows = [{**row, "question": f"Which of {i}?", "correct": "AB"[i % 2]} for i in range(6)]
    (tmp_path / "aqua.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with MisbehavingServer(say=lambda request: "Answer: A") as server:
        text = f"""
title: AQuA
tasks: [aqua/test]
data_files: {{aqua/test: {tmp_path / "aqua.jsonl"}}}
n: null
runs: 1
models: {{small: {{base_url: "{server.base_url}"}}}}
systems: {{cot: {{kind: prompted, model: small, prompt: start}}}}
"""
        run = run_table(
            load_config(written(tmp_path, text)), output=tmp_path / "out", progress=False
        )
        assert "with five options" in json.dumps(server.requests[0])
    (result,) = run.evaluation.results
    assert (result.task, result.estimates["letter_match"].mean, result.answers) == (
        "aqua/test",
        0.5,
        6,
    )


def test_a_file_of_your_own_is_split(tmp_path, monkeypatch, capsys):
    """Optimisers learn from the rows that are not held out; one that found nothing has a note."""
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"Which colour has flag {i}?;blue\n" for i in range(10))
    (tmp_path / "mine.csv").write_text("request;reply\n" + lines)
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        text = OWN_ROWS.read_text()
        text = text.replace("{name: gpt-4o-mini,", f'{{base_url: "{server.base_url}",')
        text = text.replace("{name: gpt-4o}", f'{{base_url: "{server.base_url}"}}')
        text = text.replace("budget_usd: 10", "budget_tokens: 1000000")
        text = text.replace("calls_budget: 500", "calls_budget: 30")
        config = written(tmp_path, text.replace("  gepa: {prompt: *start}\n", ""))
        command = ["evaluate", "--config", str(config), "--dataset", "mine.csv"]
        command += ["--columns", "question=request,answer=reply", "--held-out", "0.4"]
        assert status(*command, "--output-dir", "out", "--json") == 0
        requests = json.dumps(server.requests)
    record = json.loads(capsys.readouterr().out)
    assert {result["answers"] for result in record["results"]} == {4}
    assert all(f"flag {i}" in requests for i in range(10))
    # Read from the folder, it says again that the editor's replies were unusable.
    for _ in range(2):
        table = (tmp_path / "out" / "table.md").read_text()
        assert "found no better prompt" in table
        assert "replies of the editor could not be read" in table
        assert status(*command, "--output-dir", "out", "--json") == 0
    assert set(record["usage"]) == {"model", "editor"} and record["cost_usd"] == 0


def closed_model_table(tmp_path, server, **changes):
    """The command that fills a table of OPRO and its start prompt on rows of one's own, at a
    server.
    """
    lines = "".join(f"Which colour has flag {i}?;blue\n" for i in range(10))
    (tmp_path / "mine.csv").write_text("request;reply\n" + lines)
    model = f'{{base_url: "{server.base_url}", price: [1, 1]}}'
    text = f"""
title: Mine
tasks: [mine.csv]
columns: {{question: request, answer: reply}}
held_out: 0.4
n: null
runs: 1
metrics: [exact_match]
calls_budget: {changes.get("calls_budget", 30)}
budget_usd: 10
models: {{model: {model}, editor: {model}}}
systems: {{start: {{kind: prompted, prompt: &start "Answer."}}, opro: {{prompt: *start}}}}
"""
    return ["evaluate", "--config", str(written(tmp_path, text)), "--output-dir", "out"]


def test_a_prompt_of_a_table_may_be_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "system_prompt.txt").write_text("Answer.\n[G0]. Name the colour alone.")
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        command = closed_model_table(tmp_path, server)
        config = Path(command[2])
        evolved = ", evolved: {kind: prompted, prompt: system_prompt.txt}"
        config.write_text(config.read_text().replace(", opro: {prompt: *start}", evolved))
        (tmp_path / "system_prompt.txt").rename(tmp_path / "moved.txt")
        assert status(*command) == 2, "before any system is asked"
        assert not server.requests
        (tmp_path / "moved.txt").rename(tmp_path / "system_prompt.txt")
        assert status(*command) == 0
        assert "[G0]. Name the colour alone." in json.dumps(server.requests)


def test_dropped_rows_are_reported_once(tmp_path, monkeypatch, capsys):
    """The file has rows to learn from and held-out ones, but is read once."""
    monkeypatch.chdir(tmp_path)
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        command = closed_model_table(tmp_path, server)
        with open(tmp_path / "mine.csv", "a") as file:
            file.write("Which colour has the sea?;\n")
        assert status(*command) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert len([line for line in warnings if "dropped 1 row" in line]) == 1


def test_each_model_of_a_table_may_have_its_own_key(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("FIRST_KEY", "sk-first")
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        command = closed_model_table(tmp_path, server)
        config = Path(command[2])
        endpoint = f'base_url: "{server.base_url}", price: [1, 1]'
        models = f"model: {{{endpoint}, key: FIRST_KEY}}, editor: {{{endpoint}, key: SECOND_KEY}}"
        text = re.sub(r"models: .*", f"models: {{{models}}}", config.read_text())
        config.write_text(text)
        assert status(*command) == 2
        assert "SECOND_KEY" in capsys.readouterr().err
        assert not server.requests
        monkeypatch.setenv("SECOND_KEY", "sk-second")
        server.plan = lambda number, request: "401"
        assert status(*command) == 1
        assert "_KEY" in capsys.readouterr().err.replace("OPENAI_API_KEY", "")
        server.plan = lambda number, request: None
        assert status(*command) == 0
        assert server.authorizations == {"Bearer sk-first", "Bearer sk-second"}
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or b"sk-" not in path.read_bytes()


def test_a_budget_of_the_command_replaces_the_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        command = closed_model_table(tmp_path, server)
        assert status(*command, "--budget-usd", "0.000001") == 1
        assert "budget" in capsys.readouterr().err
        assert status(*command) == 0
    assert "spent on this table so far: $0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("calls", "words", "message"),
    [
        (5, [], "opro needs 6 calls"),
        (30, ["--environment-model", "m"], "--environment-model would have no effect"),
        (30, ["--replay-cache", "replies.sqlite"], "--replay-cache would have no effect"),
    ],
)
def test_a_table_that_cannot_be_filled_asks_nothing(
    tmp_path, monkeypatch, capsys, calls, words, message
):
    monkeypatch.chdir(tmp_path)
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        assert status(*closed_model_table(tmp_path, server, calls_budget=calls), *words) == 2
        assert message in capsys.readouterr().err and not server.requests


def test_the_table_for_a_closed_model_in_the_sandbox(tmp_path):
    config = load_config(OWN_ROWS)
    small = replace(config, sandbox={**config.sandbox, "n": 6, "train_rows": 8})
    run = run_table(small, sandbox=True, output=tmp_path / "out", progress=False)
    assert {"start", "espl", "opro"} <= {result.system for result in run.evaluation.results}
    assert all(comparison.second == "start" for comparison in run.comparisons)


def test_a_second_search_that_would_be_refused_afterwards_asks_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        command = closed_model_table(tmp_path, server, calls_budget=30)
        assert status(*command) == 0
        asked = len(server.requests)
        assert status(*command, "--metric", "token_f1", "exact_match") == 2
        error = capsys.readouterr().err
        assert "another first metric" in error and "--output-dir" in error
        # With a further metric nothing is searched, and the same answers are scored anew.
        assert status(*command, "--metric", "exact_match", "token_f1") == 0
        assert len(server.requests) == asked


def test_a_prompt_of_other_labels_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        command = closed_model_table(tmp_path, server)
        assert status(*command) == 0
        asked = len(server.requests)
        rows = tmp_path / "mine.csv"
        rows.write_text(rows.read_text().replace(";blue", ";red"))
        assert status(*command) == 2
        error = capsys.readouterr().err
        assert "accepted answers" in error and "--output-dir" in error
        # A prompt of an older version says nothing of its labels, and is taken.
        for file in (tmp_path / "out" / "prompts").glob("*.json"):
            record = json.loads(file.read_text())
            del record["labels"]
            file.write_text(json.dumps(record))
        assert status(*command) == 0
        assert len(server.requests) == asked


def test_a_prompt_of_another_editor_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        command = closed_model_table(tmp_path, server)
        assert status(*command) == 0
        asked = len(server.requests)
        table = Path(command[2])
        table.write_text(table.read_text().replace("editor: {", "editor: {name: other, "))
        assert status(*command) == 2
        error = capsys.readouterr().err
        assert "another editor" in error and "--output-dir" in error
        assert len(server.requests) == asked


def test_a_prompt_of_an_edited_judge_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    judge = tmp_path / "my_table_judge.py"
    judge.write_text("def judge(answer, answers):\n    return float(answer in answers)\n")
    options = ("--judge", "my_table_judge:judge", "--metric", "my_table_judge:judge")
    with MisbehavingServer(say=lambda request: "Answer: blue") as server:
        command = closed_model_table(tmp_path, server)
        assert status(*command, *options) == 0
        asked = len(server.requests)
        judge.write_text(judge.read_text() + "# A remark.\n")
        assert status(*command, *options) == 0
        judge.write_text("def judge(answer, answers):\n    return 0.5\n")
        assert status(*command, *options) == 2
        error = capsys.readouterr().err
        assert "other code of its metric" in error and "--output-dir" in error
        assert len(server.requests) == asked


def test_the_curves_of_two_trainings_are_overlaid(tmp_path, capsys):
    from paper_tables.figures import main as draw

    for name in ("a", "b"):
        folder = tmp_path / name / "checkpoint-2"
        folder.mkdir(parents=True)
        log = [{"step": step, "reward": step / 2, "rollout/turns": 2.0} for step in (1, 2)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    draw(["--runs", f"one={tmp_path / 'a'}", f"two={tmp_path / 'b'}", "--output", str(tmp_path)])
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "training.png" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no trainer_state.json"):
        draw(["--runs", f"none={tmp_path / 'nowhere'}"])


def test_the_sft_baseline_is_table_7s(tmp_path, monkeypatch):
    """LoRA of rank 8, merged; 4 x 8 rows a step, 1e-4, three epochs, cosine with a tenth of
    warm-up.
    """
    from agentic_prompting.sandbox.policy import build_policy, world_tokenizer
    from paper_tables import training

    tokenizer = world_tokenizer()
    build_policy(tokenizer).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    seen = {}

    def trained(model, tokenizer, rollouts, folder, **arguments):
        seen.update(arguments, rank=model.peft_config["default"].r, rows=len(rollouts))
        return warm_start(
            model, tokenizer, rollouts, folder, **{**arguments, "max_steps": 1, "bf16": False}
        )

    warm_start = training.warm_start
    monkeypatch.setattr(training, "warm_start", trained)
    rows = sandbox_task("sandbox_countries", 6, split="train").rows
    folder = training.train_sft(
        tmp_path / "base", rows, tmp_path / "sft", training.plain_spec(), use_cpu=True
    )
    expected = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-4,
        "rank": 8,
    }
    assert {name: seen[name] for name in expected} == expected and seen["rows"] == 6
    assert (seen["num_train_epochs"], seen["lr_scheduler_type"], seen["warmup_steps"]) == (
        3,
        "cosine",
        0.1,
    )
    assert (folder / "config.json").exists() and not (folder / "adapter_config.json").exists()

    # It is used again, but not for another base, other rows or other arguments.
    arguments = (tmp_path / "base", rows, tmp_path / "sft", training.plain_spec())
    assert training.train_sft(*arguments) == folder
    with pytest.raises(ValueError, match="arguments"):
        training.train_sft(*arguments, learning_rate=1e-3)
    with pytest.raises(ValueError, match="rows"):
        training.train_sft(tmp_path / "base", rows[1:], *arguments[2:])


def test_single_turn_grpo_takes_prompt_r1s_numbers_from_its_file(tmp_path, monkeypatch):
    from paper_tables import training

    class Trained(Exception):
        pass

    def trainer(**arguments):
        raise Trained(arguments["args"])

    monkeypatch.setattr(training, "MultiTurnGRPOTrainer", trainer)
    config = str(CONFIGS[0].parent / "qwen3_4b.yaml")
    with pytest.raises(Trained) as made:
        training.train_single_turn(
            "base", [], tmp_path, training.plain_spec(), config=config, use_cpu=True, bf16=False
        )
    (args,) = made.value.args
    assert (args.num_generations, args.learning_rate, args.beta, args.max_turns) == (
        5,
        1e-6,
        0.001,
        1,
    )
