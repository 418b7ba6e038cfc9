"""`agentic-prompting headroom`: in the sandbox, at endpoints, with an agent; the file that it writes."""

import json
import re

import pytest

from support.servers import LoopbackServer


@pytest.fixture
def sums(tmp_path):
    rows = [
        {"question": f"What is {number} + {number}?", "answers": [str(2 * number)]}
        for number in range(200)
    ]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def add(body, number):
    """Right if the system prompt asks for care, or every third time."""
    question = body["messages"][-1]["content"]
    if "<prompt>" in question:
        return "<prompt>Take care.</prompt><prompt>Hurry.</prompt>"
    term = int(re.search(r"What is (\d+)", question)[1])
    careful = any("care" in message["content"] for message in body["messages"][:-1])
    return f"Answer: {2 * term if careful or term % 3 == 0 else 0}"


def test_the_sandbox_needs_no_key(run, tmp_path):
    status, out, err = run("headroom", "--sandbox", "--output-dir", tmp_path, "--calls", 300)
    assert (status, err) == (0, "") and "worth it" in out and "Calls: prompts" in out
    saved = json.loads((tmp_path / "headroom.json").read_text())
    assert saved["prompts"]["verdict"] in out and saved["calls"]["prompts"] <= 300


def test_prompts_and_a_ceiling_at_endpoints(run, sums, tmp_path):
    with LoopbackServer(add) as server:
        models = []
        for role in ("policy", "reference", "environment"):
            models += [f"--{role}-model", "m", f"--{role}-base-url", server.base_url]
        words = [
            "--dataset",
            sums,
            *models,
            "--tried",
            4,
            "--calls",
            128,
            "--output-dir",
            tmp_path / "out",
        ]
        status, out, err = run("headroom", *words, "--json")
    found = json.loads(out)
    assert status == 0, err
    assert found["prompts"]["verdict"] == "worth it" and "Take care." in found["texts"]
    assert found["requests"]["repeats"] == 4 and found["calls"] == {
        "prompts": found["calls"]["prompts"],
        "requests": 128,
    }
    assert (tmp_path / "out" / "headroom.json").is_file() and found["file"].endswith(
        "headroom.json"
    )


def test_a_spent_budget_stops_it(run, sums, tmp_path):
    with LoopbackServer(add) as server:
        model = [
            "--policy-model",
            "gpt-4o-mini",
            "--policy-base-url",
            server.base_url,
            "--prompt",
            "Mine.",
        ]
        words = [
            "--dataset",
            sums,
            *model,
            "--budget-usd",
            1e-9,
            "--output-dir",
            tmp_path,
            "--calls",
            200,
        ]
        status, out, err = run("headroom", *words)
    assert status == 1 and "Stopped early" in out and "budget" in err


def test_the_signal_of_an_agent(run, asking_policy, tmp_path):
    rows = [
        {"question": f"what is the {thing} of Kenya ?", "answers": ["x"]}
        for thing in ("language", "capital")
    ] * 10
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(
        "def environment(rollout):\n    return 'the answer is Nairobi .'\n"
    )
    environment = ["--environment", f"{tmp_path}/own.py:environment"]
    words = [
        "--untrained",
        asking_policy,
        *environment,
        "--dataset",
        file,
        "--group-size",
        4,
        "--output-dir",
        tmp_path,
    ]
    status, out, err = run("headroom", *words)
    assert status == 0, err
    assert "Signal for GRPO: " in out and "pass@4" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--policy-model"),
        (["--untrained", "nowhere"], "--environment-model"),
        (["--policy-model", "m", "--dataset", "nowhere.csv"], "nowhere.csv"),
        (["--sandbox", "--calls", "10"], "too few"),
        (["--policy-model", "m", "--dataset", "rows.csv", "--score", "no_such"], "no_such"),
    ],
)
def test_what_is_missing_is_one_line(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("question,answer\nWhere is Rome?,Italy\n")
    status, out, err = run("headroom", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err, err
