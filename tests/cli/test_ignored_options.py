"""Options that a command does not read in the mode in use are refused, before anything is asked or loaded."""

import pytest

from agentic_prompting.cli.options import given_options
from agentic_prompting.cli.refine import RefineOptions

TABLE = """
title: mine
output: out
tasks: [rows.jsonl]
systems: {direct: {kind: prompted, model: m, prompt: start}}
models: {m: {name: m, base_url: "http://localhost:1"}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with rows, a table and an environment, in which the command runs."""
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 4)
    (tmp_path / "table.yaml").write_text(TABLE)
    (tmp_path / "own.py").write_text("def environment(rollout):\n    return 'x'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1")
    return tmp_path


@pytest.fixture
def refused(run, folder, asking_policy):
    """Asserts that a command ends with one line that names the option; `RUN` stands for an agent's folder."""

    def check(words, option, advice):
        words = [str(asking_policy) if word == "RUN" else word for word in words]
        status, out, err = run(*words)
        assert (status, out, err.count("\n")) == (2, "", 1), (out, err)
        assert option in err and "no effect" in err and advice in err, err

    return check


def test_an_option_at_its_default_is_not_given():
    assert given_options(RefineOptions()) == []
    options = RefineOptions(score="exact_match", query="", max_steps=0, history=True)
    assert sorted(given_options(options)) == ["history", "max_steps"]


OWN = ["--environment", "own.py:environment"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([*OWN, "--environment-base-url", "http://x"], "own.py:environment"),
        ([*OWN, "--environment-client", "rate=1"], "own.py:environment"),
        ([*OWN, "--environment-max-tokens", "9"], "own.py:environment"),
        ([*OWN, "--replay-cache", "r.sqlite"], "own.py:environment"),
        (["--sandbox", "--environment-base-url", "http://x"], "oracle"),
    ],
)
@pytest.mark.parametrize("command", [["ask", "RUN", "q"], ["serve", "RUN"]])
def test_ask_and_serve(refused, command, words, advice):
    refused([*command, *words], words[-2], advice)


@pytest.mark.parametrize(
    ("words", "option", "advice"),
    [
        (["--compare", "a", "b", "--metric", "token_f1"], "--metric", "--compare"),
        (["--compare", "a", "b", "--output-dir", "c"], "--output-dir", "--compare"),
        (["--compare", "a", "b", "--dataset", "rows.jsonl"], "--dataset", "--compare"),
        (["--config", "table.yaml", "--samples", "3"], "--samples", "runs:"),
        (["--config", "table.yaml", "--task-rows", "3"], "--task-rows", "n:"),
        (["--config", "table.yaml", "--task-split", "test"], "--task-split", "tasks:"),
        (["--config", "table.yaml", "--data-files", "f"], "--data-files", "data_files:"),
        (
            ["--config", "table.yaml", "--sandbox", "--dataset", "rows.jsonl"],
            "--dataset",
            "--sandbox",
        ),
        (["--config", "table.yaml", "--sandbox", "--held-out", "0.5"], "--held-out", "--sandbox"),
        (
            ["--run", "RUN", "--dataset", "rows.jsonl", "--sandbox", "--seeds", "1", "2"],
            "--seeds",
            "--samples",
        ),
        (
            ["--run", "RUN", "--dataset", "rows.jsonl", "--sandbox", "--task-split", "test"],
            "--task-split",
            "--dataset",
        ),
    ],
)
def test_evaluate(refused, words, option, advice):
    refused(["evaluate", *words], option, advice)
