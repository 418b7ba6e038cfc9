"""`examples/refine.py` as a user runs it: in the sandbox, and against a real endpoint on the
loopback interface.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest

from agentic_prompting.llm import start
from agentic_prompting.sandbox.puzzles import COUNTING, make_puzzles, puzzle_models
from support.servers import Answer, LoopbackServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "refine.py"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the script with these arguments and returns what it printed."""

    def main(*arguments):
        monkeypatch.setattr(
            sys, "argv", ["refine.py", "--output_dir", str(tmp_path), *map(str, arguments)]
        )
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    return main


def test_the_sandbox_by_default(run, tmp_path):
    shown = run("--rows", 30)
    assert shown.count("| bbh_word_sorting |") == 3
    assert "optimal verifier" in shown
    assert "iterations" in shown
    assert len((tmp_path / "no_verifier.jsonl").read_text().splitlines()) == 30
    assert (tmp_path / "iterations.png").stat().st_size > 5_000
    assert run("--rows", 30) == shown  # from the files


def test_a_set_through_an_endpoint(run, tmp_path):
    models = puzzle_models()

    def said(body, number):
        headings = {"Prompt:": "optimizer", "Question:": "feedback"}
        user = body["messages"][-1]["content"]
        role = "verifier" if "Prediction:" in user else headings.get(user.split("\n")[0], "task")
        limit = {"max_tokens": body["max_tokens"]} if role == "task" else {}
        reply = start(models[role](body["messages"], **limit)).result()
        return Answer(reply.text, finish_reason=reply.finish_reason)

    data = tmp_path / "SVAMP.json"
    puzzles = [row["question"].partition(". ") for row in make_puzzles(10, kinds=(COUNTING,))]
    data.write_text(
        json.dumps(
            [
                {"Body": body + ".", "Question": question, "Answer": 1.0}
                for body, _, question in puzzles
            ]
        )
    )
    with LoopbackServer(said) as server:
        urls = ["--task_base_url", server.base_url, "--critic_base_url", server.base_url]
        arguments = ["--task", "svamp", "--data_files", data, "--task_model", "small", *urls]
        assert "| small |" in run(*arguments, "--critic_model", "large", "--rows", 5)


def test_a_budget_stops_all_roles_with_one_line_and_the_bill(run, tmp_path):
    data = tmp_path / "SVAMP.json"
    data.write_text(
        json.dumps(
            [{"Body": f"Body {i}.", "Question": "How many?", "Answer": 1.0} for i in range(40)]
        )
    )
    with LoopbackServer(lambda body, number: "Answer: 2") as server:
        urls = ["--task_base_url", server.base_url, "--critic_base_url", server.base_url]
        arguments = [
            "--task=svamp",
            f"--data_files={data}",
            "--task_model=a",
            "--critic_model=b",
            *urls,
        ]
        with pytest.raises(
            SystemExit, match="of the budget of 150 tokens are spent in all"
        ) as stopped:
            run(*arguments, "--rows", 40, "--budget_tokens", 150)
        assert "Spent so far: " in str(stopped.value) and "task $0 or no price known" in str(
            stopped.value
        )
        assert "\n" not in str(stopped.value)


def test_what_is_missing_is_said(run, capsys):
    with pytest.raises(SystemExit) as ended:
        run("--task", "bbh_word_sorting")
    message = capsys.readouterr().err
    assert ended.value.code == 2 and "--task_model" in message and "--critic_model" in message
