"""The `agentic-prompting` command as a user runs it: the sandbox, a real endpoint on loopback, and
everything wrong.
"""

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from agentic_prompting.cli.loader import SCORES, load_score
from agentic_prompting.data import hold_out, load_task
from support.refine_models import answer, critic, improve
from support.servers import Answer, LoopbackServer

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from agentic_prompting.cli import main; main()"]


@pytest.fixture
def server():
    def said(body, number):
        system = body["messages"][0]["content"]
        user = body["messages"][-1]["content"]
        if body["model"] == "large":
            rule = improve if user.startswith("Prompt:") else critic
            return "<ACCURACY>0</ACCURACY>" if "Prediction:" in user else rule(system, user)
        full = answer(15)(system, user).split()
        limit = body["max_tokens"]
        return Answer(
            " ".join(full[:limit]), finish_reason="length" if len(full) > limit else "stop"
        )

    with LoopbackServer(said) as server:
        yield server


@pytest.fixture
def models(server):
    urls = ["--task-base-url", server.base_url, "--feedback-base-url", server.base_url]
    return ["--task-model", "small", "--feedback-model", "large", *urls]


def test_the_console_script_is_this_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"agentic-prompting": "agentic_prompting.cli:main"}


def test_help_imports_little():
    """Its time is that of its imports: torch alone has thousands of modules, numpy 150."""
    code = (
        "import sys\n"
        "try:\n from agentic_prompting.cli import main; main(['--help'])\n"
        "except SystemExit as end: print(end.code, len(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, modules = map(int, run.stdout.split()[-2:])
    assert "refine" in run.stdout and status == 0
    assert modules < 300, "about 200"


def test_every_score_that_is_named_can_be_loaded():
    assert SCORES and all(callable(load_score(name)) for name in SCORES)


def test_the_sandbox_shows_a_refinement_as_diffs(run):
    status, out, err = run("refine", "--sandbox")
    assert (status, err) == (0, "")
    assert "Verdict: wrong" in out
    assert "Step 1" in out
    assert "  + Compare words that begin alike" in out
    assert "Ended: finished" in out and "accuracy                     1" in out


def test_the_budget_is_that_of_all_roles_and_of_restarts(run, server, models, tmp_path):
    """15 tokens a call. The task model may ask what it likes: it is the whole that counts."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(f"Question {i}?") + "\n" for i in range(300)))
    files = ["--input", rows, "--output", tmp_path / "results.jsonl"]
    status, _, err = run(
        "refine", *models, *files, "--budget-tokens", "3000", "--max-in-flight", "2"
    )
    bill = err.strip().splitlines()[-1]
    assert status == 1 and "of the budget of 3,000 tokens are spent in all" in bill
    spent = {
        name: int(n.replace(",", ""))
        for name, n in re.findall(r"(\w+) \$0 or no price known \(([\d,]+) tokens\)", bill)
    }
    assert set(spent) == {"task", "feedback", "optimizer", "verifier"}
    assert 3000 <= sum(spent.values()) <= 15 * len(server.requests) < 4000
    request_count = len(server.requests)
    assert run("refine", *models, *files, "--budget-tokens", "3000")[0] == 1
    assert len(server.requests) == request_count


def test_json_is_one_object(run):
    _, out, _ = run("refine", "--sandbox", "--json")
    record = json.loads(out)
    assert record["summary"]["queries"] == 1 and record["results"][0]["steps"]


def test_a_question_through_an_endpoint(run, models):
    status, out, _ = run("refine", "--prompt", "Think. [bold]", "--query", "How many?", *models)
    assert status == 0 and "Verdict: wrong" in out
    assert "  - [bold]" in out and "  + [bold]+" in out  # brackets are no markup


def test_empty_questions_of_a_table_are_counted(run, models, server, tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("nr,Ticket text\n1,How?\n2,\n3,Why?\n4,  \n")
    status, _, err = run("refine", "--input", table, "--columns=question=Ticket text", *models)
    assert status == 2 and not server.requests
    assert "2 rows" in err and "'Ticket text'" in err and "row 1, row 3" in err, err


def test_results_of_an_earlier_run_are_named_so(run, models, server, tmp_path):
    questions = tmp_path / "queries.jsonl"
    questions.write_text('"A?"\n"B?"\n')
    results = tmp_path / "results.jsonl"
    prices = ["--task-client=price=1/1", "--feedback-client=price=1/1"]
    words = ["refine", "--input", questions, "--output", results, *models, *prices]
    status, out, err = run(*words)
    assert status == 0 and "already" not in err
    # The total is over all roles: 15 tokens a request, at a dollar for a million of them.
    request_count = len(server.requests)
    (total,) = [line for line in out.splitlines() if "all roles" in line]
    assert f"{request_count} calls" in total and f"{15 * request_count:,} tokens" in total
    status, again, err = run(*words)
    assert (status, again) == (0, out) and len(server.requests) == request_count
    assert "2 questions" in err and str(results) in err and "already" in err
    assert json.loads(run(*words, "--json")[1])["cost_usd"] == pytest.approx(15e-6 * request_count)
    # One more question is asked, so the results are not all old.
    questions.write_text('"A?"\n"B?"\n"C?"\n')
    assert "already" not in run(*words)[2] and len(server.requests) > request_count


def test_a_file_is_resumed(run, models, server, tmp_path):
    questions = tmp_path / "queries.jsonl"
    results = tmp_path / "out" / "results.jsonl"
    rows = [
        {"question": "A?", "answers": [answer(15)("", "")]},
        {"question": "B?", "answers": ["other"]},
        "C?",
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    arguments = [
        "refine",
        "--input",
        questions,
        "--output",
        results,
        "--paper-setting",
        "optimal_verifier",
        *models,
    ]
    arguments += ["--replay-cache", tmp_path / "replies.sqlite", "--json"]
    _, out, _ = run(*arguments)
    assert json.loads(out)["summary"]["accuracy"] == 0.5
    assert json.loads(out)["output"] == str(results)
    assert sorted(json.loads(line)["verdict"] for line in results.read_text().splitlines()) == [
        "right",
        "wrong",
    ]
    request_count = len(server.requests)
    assert json.loads(run(*arguments)[1])["summary"]["accuracy"] == 0.5
    results.unlink()
    assert json.loads(run(*arguments)[1])["summary"]["accuracy"] == 0.5
    assert len(server.requests) == request_count
    questions.write_text(json.dumps(rows[2]))
    status, _, err = run(*arguments)
    assert status == 2 and "compares with accepted answers" in err


def test_a_table_is_refined_and_compared(run, models, tmp_path):
    """A CSV from a spreadsheet: accuracy before and after, with intervals."""
    table = tmp_path / "mine.csv"
    table.write_text(f"request;reply\nA?;{answer(15)('', '')}\nB?;other\n")
    words = ["refine", "--input", table, "--columns", "question=request,answer=reply", *models]
    words += ["--paper-setting", "optimal_verifier"]
    status, out, err = run(*words)
    assert status == 0, err
    for name in ("accuracy before", "accuracy", "accuracy gained"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name}  ")]
        assert "[" in line and line.endswith("of 2"), out
    summary = json.loads(run(*words, "--json")[1])["summary"]
    assert "no gain was shown: the interval contains 0" in out
    low, high = summary["accuracy_interval"]
    assert low < summary["accuracy"] == 0.5 < high
    assert summary["accuracy_before"] == 0.5 and summary["accuracy_gained"] == 0.0
    status, _, err = run("refine", "--sandbox", "--input", table)
    assert status == 2 and "columns" in err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", '\ufeff{"question": "A?", "answer": "other"}\n"B?"\n'),
        ("rows.json", '[\n {"question": "A?", "answers": "other"},\n "B?"\n]\n'),
        ("rows.csv", "question;answer\nA?;other\n"),
    ],
)
def test_a_file_reads_as_in_other_commands(run, models, tmp_path, name, text):
    """A mark of the encoding, one list, a single answer: `load_task` reads them, and so does this."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    words = ["refine", "--input", tmp_path / name, "--paper-setting", "no_verifier", *models]
    status, out, err = run(*words, "--json")
    assert status == 0, err
    assert json.loads(out)["summary"]["accuracy"] == 0.0


def test_a_share_of_a_dataset_is_refined(run, models, tmp_path):
    """The questions that the other commands hold out."""
    table = tmp_path / "mine.csv"
    table.write_text("request,reply\n" + "".join(f"Which is {n}?,x\n" for n in range(10)))
    words = ["refine", "--dataset", table, "--columns", "question=request,answer=reply", *models]
    words += ["--paper-setting", "no_verifier", "--json"]
    status, out, err = run(*words, "--held-out", 0.4)
    assert status == 0, err
    rows = load_task(str(table), columns={"question": "request", "answer": "reply"})
    _, held_out = hold_out(rows, 0.4)
    refined = [result["query"] for result in json.loads(out)["results"]]
    assert refined == list(held_out["question"]) and len(refined) == 4
    assert json.loads(out)["summary"]["accuracy"] == 0.0
    assert len(json.loads(run(*words)[1])["results"]) == 10
    status, _, err = run("refine", "--input", table, "--held-out", 0.4, *models)
    assert status == 2 and "--dataset" in err


def test_a_table_may_hold_questions_alone(run, models, tmp_path):
    (tmp_path / "rows.csv").write_text("id;request\na;A?\n;B?\n")
    words = ["refine", "--input", tmp_path / "rows.csv", "--columns", "question=request", *models]
    status, out, err = run(*words, "--json")
    assert status == 0, err
    results = json.loads(out)["results"]
    assert [(result["id"], result["query"]) for result in results] == [("a", "A?"), ("1", "B?")]


def test_without_a_verifier_there_is_no_before(run, models, tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("question,answer\nA?,other\n")
    words = ["refine", "--input", table, "--paper-setting", "no_verifier", *models, "--json"]
    summary = json.loads(run(*words)[1])["summary"]
    assert summary["accuracy"] == 0.0 and "accuracy_before" not in summary


def test_roles_are_called_as_their_options_say(run, models, tmp_path, monkeypatch):
    """A price of each role, and a key of its own."""
    monkeypatch.setenv("TASK_KEY", "secret-of-the-task")
    clients = ["--task-client", "key=TASK_KEY,price=1/2", "--feedback-client", "price=10/20"]
    status, out, err = run("refine", "--query", "A?", *models, *clients, "--json")
    assert status == 0, err
    (result,) = json.loads(out)["results"]
    usage = result["usage"]
    for role, price in (("task", 1), ("feedback", 10), ("verifier", 10)):
        tokens = usage[role]["prompt_tokens"] + 2 * usage[role]["completion_tokens"]
        assert usage[role]["cost_usd"] == pytest.approx(tokens * price / 1e6), role


def test_a_model_in_a_folder_answers(run, server, tiny_policy):
    feedback = ["--feedback-model", "large", "--feedback-base-url", server.base_url]
    status, out, err = run(
        "refine",
        "--prompt=Think.",
        "--query=what is the capital of Kenya ?",
        f"--local-model={tiny_policy}",
        "--tokens-per-step=4",
        "--max-steps=2",
        "--final-max-tokens=12",
        *feedback,
        "--json",
    )
    assert status == 0, err
    (result,) = json.loads(out)["results"]
    assert result["stop_reason"] in ("finished", "max_steps")
    assert result["failures"] == []
    assert result["steps"]
    assert {body["model"] for body in server.requests} == {"large"}


def test_failed_questions_are_said_and_show_in_the_status(run):
    with LoopbackServer(lambda body, number: Answer(status=401)) as server:
        urls = ["--task-base-url", server.base_url, "--feedback-base-url", server.base_url]
        status, _, err = run(
            "refine", "--query", "q", "--task-model", "s", "--feedback-model", "l", *urls
        )
    assert status == 1
    assert err.splitlines()[-1].startswith(
        "agentic-prompting: 1 of 1 question failed; first: task model"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --query TEXT, --input FILE and --dataset FILE"),
        (["--query", "q", "--input", "f"], "one of --query TEXT, --input FILE and --dataset FILE"),
        (["--query", "q"], "either --task-model NAME or --local-model FOLDER"),
        (["--query", "q", "--task-model", "m"], "--feedback-model NAME"),
        (
            ["--query", "q", "--local-model", "nowhere", "--feedback-model", "m"],
            "no transformers model",
        ),
        (["--input", "nowhere.jsonl"], "No such file"),
        (["--sandbox", "--query", " "], "query 0 is empty"),
        (["--sandbox", "--prompt", ""], "the prompt is empty"),
        (["--sandbox", "--query", ""], "query 0 is empty"),
        (
            ["--sandbox", "--tokens-per-step", "0"],
            "tokens_per_step",
        ),
        (["--sandbox", "--max-in-flight", "0"], "max_in_flight"),
        (["--sandbox", "--tokens-per-step", "ten"], "tokens-per-step"),
        (["--sandbox", "--paper-setting", "best"], "optimal_verifier"),
        (
            ["--sandbox", "--query", "q", "--paper-setting", "optimal_verifier"],
            "pass a row with `question` and",
        ),
        (["--nope"], "--nope"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, arguments, message):
    status, out, err = run("refine", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert message in err


def test_a_line_that_is_no_json_is_named(run, tmp_path):
    file = tmp_path / "queries.jsonl"
    file.write_text('"fine"\n\n{oops\n')
    status, _, err = run("refine", "--sandbox", "--input", file)
    assert status == 2 and f"line 3 of {file} is not JSON" in err


def test_ctrl_c_leaves_a_file_to_go_on_from(tmp_path):
    questions = tmp_path / "queries.jsonl"
    results = tmp_path / "results.jsonl"
    questions.write_text("".join(json.dumps(f"Question {i}?") + "\n" for i in range(4)))

    def said(body, number):
        if "Question 3?" in body["messages"][-1]["content"]:
            time.sleep(20)
        user = body["messages"][-1]["content"]
        return improve("", user) if user.startswith("Prompt:") else "<ACCURACY>1</ACCURACY>"

    with LoopbackServer(said) as server:
        urls = ["--task-base-url", server.base_url, "--feedback-base-url", server.base_url]
        arguments = [
            "refine",
            f"--input={questions}",
            f"--output={results}",
            "--task-model=s",
            "--feedback-model=l",
        ]
        running = subprocess.Popen(
            [*COMMAND, *map(str, arguments), *urls],
            stderr=subprocess.PIPE,
            text=True,
            env={"OPENAI_API_KEY": "none"},
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (
            results.exists() and results.read_bytes().count(b"\n") == 3
        ):
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert f"the same command goes on from {results}" in err
    assert "Traceback" not in err
    assert len([json.loads(line) for line in results.read_text().splitlines()]) == 3
