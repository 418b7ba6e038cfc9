"""`examples/refine.py` as a user runs it, against a real endpoint on the loopback interface."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from refine_models import answer, critic, improve
from servers import Answer, LoopbackServer

EXAMPLE = Path(__file__).parents[1] / "examples" / "refine.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script with these arguments and returns what it printed."""

    def said(body, number):
        system, user = body["messages"][0]["content"], body["messages"][-1]["content"]
        if body["model"] == "large":
            rule = improve if user.startswith("Prompt:") else critic
            return "<ACCURACY>0</ACCURACY>" if "Prediction:" in user else rule(system, user)
        full, limit = answer(15)(system, user).split(), body["max_tokens"]
        return Answer(" ".join(full[:limit]), finish_reason="length" if len(full) > limit else "stop")

    def main(*arguments):
        endpoint = ["--task_model", "small", "--feedback_model", "large"]
        endpoint += ["--task_base_url", server.base_url, "--feedback_base_url", server.base_url]
        monkeypatch.setattr(sys, "argv", ["refine.py", *endpoint, *map(str, arguments)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    with LoopbackServer(said) as server:
        main.server = server
        yield main


def test_one_question_is_shown_step_by_step(run):
    shown = run("--prompt", "Think.", "--query", "How many?")
    assert "Verdict: wrong" in shown and "Step 2" in shown and "- Think.+" in shown and "+ Think.++" in shown
    assert "Ended: finished, 2 steps" in shown and "task/calls" in shown


def test_a_file_of_questions_with_answers(run, tmp_path):
    questions, results = tmp_path / "queries.jsonl", tmp_path / "out" / "results.jsonl"
    rows = [{"question": "A?", "answers": [answer(15)("", "")]}, {"question": "B?", "answers": ["other"]}]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--input", questions, "--output", results, "--verifier", "optimal"]
    arguments += ["--replay_cache", tmp_path / "replies.sqlite"]
    assert "accuracy (exact_match)       0.5" in run(*arguments)
    assert [json.loads(line)["verdict"] for line in results.read_text().splitlines()] == ["right", "wrong"]
    asked = len(run.server.requests)
    assert "accuracy (exact_match)       0.5" in run(*arguments)
    results.unlink()
    assert "accuracy (exact_match)       0.5" in run(*arguments)
    assert len(run.server.requests) == asked


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "say what to answer"), (["--query", "q", "--verifier", "me"], "--verifier must be")]
)
def test_what_is_missing_is_said(run, arguments, message):
    with pytest.raises(SystemExit, match=message):
        run(*arguments)
