"""`agentic-prompting headroom`: in the sandbox, at endpoints, with an agent; the file that it
writes.
"""

import json
import re
from contextlib import ExitStack

import pytest

from agentic_prompting.agent import PromptAgent
from agentic_prompting.cli.headroom import _connect_settings, _load_untrained
from agentic_prompting.cli.headroom_options import HeadroomOptions
from agentic_prompting.interop import ToolEnvironment
from support.servers import Answer, LoopbackServer


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
            f"--dataset={sums}",
            *models,
            "--tried=4",
            "--calls=128",
            f"--output-dir={tmp_path / 'out'}",
        ]
        status, out, err = run("headroom", *words, "--json")
    record = json.loads(out)
    assert status == 0, err
    assert record["prompts"]["verdict"] == "worth it" and "Take care." in record["texts"]
    assert record["requests"]["repeats"] == 4
    assert record["calls"] == {
        "prompts": record["calls"]["prompts"],
        "requests": 128,
    }
    assert (tmp_path / "out" / "headroom.json").is_file()
    assert record["file"].endswith("headroom.json")


def test_a_metric_takes_the_place_of_the_score(run, sums, tmp_path):
    options = HeadroomOptions(dataset=str(sums), metric=["token_f1"], output_dir=tmp_path)
    with ExitStack() as stack:
        assert _connect_settings(options, stack)["metric"] == "token_f1"
    words = ["--environment-model=m", f"--dataset={sums}", "--metric", "token_f1", "exact_match"]
    status, _, err = run("headroom", *words)
    assert status == 2 and "--metric takes one metric" in err


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
            f"--dataset={sums}",
            *model,
            "--budget-usd=1e-09",
            f"--output-dir={tmp_path}",
            "--calls=200",
        ]
        status, out, err = run("headroom", *words)
    assert status == 1 and "Stopped early" in out and "budget" in err
    assert "no file is written" in err and not (tmp_path / "headroom.json").exists()


def test_a_run_that_stops_at_once_keeps_the_result_of_before(run, sums, tmp_path):
    with LoopbackServer(add) as server:
        words = [
            *("--policy-model", "gpt-4o-mini", "--policy-base-url", server.base_url),
            *(f"--dataset={sums}", "--prompt", "Mine.", f"--output-dir={tmp_path}", "--calls=200"),
        ]
        assert run("headroom", *words)[0] == 0
        measured = (tmp_path / "headroom.json").read_text()
        status, _, err = run("headroom", *words, "--prompt", "Another.", "--budget-usd=1e-09")
    assert status == 1 and "headroom.json" in err and "budget" in err
    assert (tmp_path / "headroom.json").read_text() == measured


def test_the_signal_of_an_agent(run, asking_policy, tmp_path):
    rows = [
        {"question": f"what is the {relation} of Kenya ?", "answers": ["x"]}
        for relation in ("language", "capital")
    ] * 10
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(
        "def environment(rollout):\n    return 'the answer is Nairobi .'\n"
    )
    environment = ["--environment", f"{tmp_path}/own.py:environment"]
    words = [
        f"--untrained={asking_policy}",
        *environment,
        f"--dataset={file}",
        "--group-size=4",
        f"--output-dir={tmp_path}",
    ]
    status, out, err = run("headroom", *words)
    assert status == 0, err
    assert "Signal for GRPO: " in out and "pass@4" in out


def test_an_untrained_agent_is_shown_the_tools(monkeypatch, tmp_path):
    """As in training: without them it would call none, and there would be no signal."""

    def stock(part: str) -> int:
        """How many of a part there are.

        Args:
            part: The part.
        """
        return len(part)

    specs = []
    monkeypatch.setattr(
        PromptAgent, "from_pretrained", lambda model, environment, spec: specs.append(spec)
    )
    _load_untrained(str(tmp_path), ToolEnvironment([stock]))
    (spec,) = specs
    (tool,) = spec.chat_template_kwargs["tools"]
    assert tool["function"]["name"] == "stock"


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


def endpoints(server, *roles):
    """The options that name a model for each role."""
    words = []
    for role in roles:
        words += [f"--{role}-model", "gpt-4o-mini", f"--{role}-base-url", server.base_url]
    return words


def test_a_second_measurement_asks_nobody(run, sums, tmp_path):
    with LoopbackServer(add) as server:
        words = ["--dataset", sums, *endpoints(server, "policy", "reference", "environment")]
        words += ["--tried", 4, "--calls", 100, "--output-dir", tmp_path / "out", "--json"]
        first = json.loads(run("headroom", *words)[1])
        requests = len(server.requests)
        second = json.loads(run("headroom", *words)[1])
        assert len(server.requests) == requests == sum(first["calls"].values())
    assert first["cost_usd"] > 0
    assert second["cost_usd"] == 0
    assert second["replayed"] == first["calls"]
    assert (tmp_path / "out" / "replies.sqlite").is_file()
    assert not (tmp_path / "out" / "spending.sqlite").exists(), "the account of the run to come"


def test_prorefine_is_measured(run, sums, tmp_path):
    with LoopbackServer(lambda body, number: "Answer: 0") as server:
        words = ["--dataset", sums, *endpoints(server, "task", "feedback"), "--calls", 200]
        status, out, err = run("headroom", *words, "--output-dir", tmp_path, "--json")
    summary = json.loads(out)
    assert status == 0, err
    assert summary["refinement"]["gain"]["n"] >= 2 and 0 < summary["calls"]["refinement"] <= 200


WORKERS = """
from agentic_prompting import Worker, Workers

def double(text):
    return str(2 * int(text.split()[2]))

environment = Workers({
    "adder": Worker(double, "adds", takes="text"),
    "liar": Worker(lambda text: "0", "lies", takes="text"),
})
"""


def test_workers_and_their_oracle(run, sums, tmp_path):
    (tmp_path / "own_workers.py").write_text(WORKERS)
    words = ["--environment", f"{tmp_path}/own_workers.py:environment", "--dataset", sums]
    status, out, err = run("headroom", *words, "--repeats", 1, "--output-dir", tmp_path)
    assert status == 0, err
    assert "adder: 1.0" in out and "liar: 0.0" in out and "Pool" in out
    (tmp_path / "own_tool.py").write_text("def environment(rollout):\n    return 'x'\n")
    words[1] = f"{tmp_path}/own_tool.py:environment"
    assert run("headroom", *words, "--output-dir", tmp_path)[0] == 2, "nobody to measure"


def test_a_picture_beside_the_file(run, tmp_path):
    assert run("headroom", "--sandbox", "--output-dir", tmp_path, "--calls", 300)[0] == 0
    assert (tmp_path / "headroom.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_run_from_its_configuration(run, asking_policy, tmp_path):
    """Its model, environment, rows, reward, group size and limits; the result lies in its folder."""
    rows = [
        {"question": f"what is the {relation} of Kenya ?", "answers": ["Nairobi"]}
        for relation in ("language", "capital")
    ] * 10
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model_name_or_path: {asking_policy}\noutput_dir: {tmp_path}/run\n"
        f"dataset: {tmp_path}/rows.jsonl\nnum_generations: 4\nmax_turns: 2\nreward: exact_match\n"
        "per_device_train_batch_size: 4\n"
    )
    with LoopbackServer(lambda body, number: "the answer is Nairobi .") as server:
        words = ["--environment-model", "m", "--environment-base-url", server.base_url]
        status, out, err = run("headroom", "--config", config, *words, "--json")
    result = json.loads(out)
    # The endpoint is checked with one word; rows that repeat a question share its replies.
    paid = sum(result["calls"].values()) - sum(result["replayed"].values())
    assert len(server.requests) == 1 + paid
    assert status == 0, err
    assert result["signal"]["group_size"] == 4 and result["asks_once"] and result["requests"]
    assert result["file"] == f"{tmp_path}/run/headroom.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: sandbox\nprompts_per_step: 2\n", "sandbox"),
        ("reward: [exact_match, math]\nenvironment_model: m\n", "--reward"),
        ("no_such_option: 1\n", "no_such_option"),
        ("- a list\n", "options by name"),
    ],
)
def test_a_run_that_cannot_be_measured(run, tmp_path, text, message):
    config = tmp_path / "run.yaml"
    config.write_text(text)
    status, out, err = run("headroom", "--config", config, "--output-dir", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err, err


def test_the_defaults_are_those_of_python():
    from agentic_prompting.cli.headroom_options import HeadroomOptions
    from agentic_prompting.evaluation.headroom import HeadroomSettings

    for name in ("tried", "repeats", "calls", "top_up_calls", "delta", "seed"):
        assert getattr(HeadroomOptions, name) == getattr(HeadroomSettings, name)


def test_a_reference_that_fails_has_written_nothing(run, sums, tmp_path):
    def fail_to_write(body, number):
        if "<prompt>" in body["messages"][-1]["content"]:
            return Answer("too long", status=400)
        return add(body, number)

    with LoopbackServer(fail_to_write) as server:
        words = [f"--dataset={sums}", f"--output-dir={tmp_path / 'out'}"]
        for role in ("policy", "reference"):
            words += [f"--{role}-model=m", f"--{role}-base-url={server.base_url}"]
        status, out, err = run("headroom", *words)
    assert status == 1 and "too long" in err
    assert "wrote no prompt" not in out + err and "BadRequest(" not in out + err
