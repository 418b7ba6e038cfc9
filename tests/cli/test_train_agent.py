"""`train --harness` and `check-env --harness`, with a stand-in for the program of a harness."""

import json
import sys
from contextlib import ExitStack

import pytest

from agentic_prompting.cli.script import run_script
from agentic_prompting.cli.train_program import parse_method_options
from agentic_prompting.programs import Program
from support.isolation import ISOLATION

STAND_IN = """#!{python}
import json, os, socket, subprocess, sys, urllib.request
try:
    socket.getaddrinfo("updates.example.org", 443)
except OSError:
    pass
command = dict(type="object", properties=dict(command=dict(type="string")))
tool = dict(name="bash", description="runs", parameters=command)
messages = [dict(role="user", content=sys.argv[1])]
for _ in range(9):
    body = json.dumps(dict(model="agent", messages=messages, tools=[dict(type="function", function=tool)])).encode()
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", body)
    said = json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]
    messages.append(said)
    for call in said.get("tool_calls") or []:
        done = subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True, capture_output=True)
        messages.append(dict(role="tool", content=done.stdout.decode(), tool_call_id=call["id"]))
    if not said.get("tool_calls"):
        break
print(said["content"])
"""
MODULE = """
from agentic_prompting.harnesses import Harness
from agentic_prompting.programs import Program
mine = Harness("mine", ("stand-in", "{task}"), {"chat": ("", "{base_url}")}, {"URL": "{url}"})
wrong = 7

def tests_pass(rollout, folder):
    return 1.0

def short(completions, **columns):
    return [0.0] * len(completions)

def by_level(completions, level, **columns):
    return level

async def agent(row, base_url, api_key): ...

command = ["stand-in", "{question}"]
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)  # as root, commands run as another user
    program = tmp_path / "stand-in"
    program.write_text(STAND_IN.replace("{python}", sys.executable))
    program.chmod(0o755)
    (tmp_path / "own_agent.py").write_text(MODULE)
    rows = [
        {"question": f"task {i}", "answers": ["x"], "files": {f"{i}.txt": "a"}, "tests": {}}
        for i in range(3)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_check_env_plays_one_task_in_a_harness(run, parts):
    status, out, err = run(
        "check-env", "--harness", "own_agent:mine", "--isolation", ISOLATION, "--json"
    )
    seen = json.loads(out)
    assert status == 0 and seen["wrote_the_file"] and seen["answer"] == "done", (seen, err)
    assert (seen["calls"], seen["sequences"], seen["tools"], seen["answer_in_prompt"]) == (
        3,
        1,
        ["bash"],
        False,
    )
    assert ISOLATION == "none" or "updates.example.org" in seen["looked_up"]
    status, out, _ = run("check-env", "--harness", "own_agent:mine", "--isolation", ISOLATION)
    assert status == 0 and "wrote_the_file        True" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--harness", "claude"], "there are settings for mini-swe-agent, codex"),
        (["--harness", "codex", "--dialect", "chat"], "codex speaks responses"),
        (["--harness", "own_agent:wrong"], "own_agent:wrong is a int, and not a Harness"),
        (
            ["--harness", "codex"],
            "there is no program 'codex' in PATH: install codex: npm install -g @openai/codex",
        ),
        ([], "or an agent with --harness NAME"),
        (["own_agent:agent", "--harness", "codex"], "or an agent with --harness NAME"),
    ],
)
def test_check_env_says_what_is_wrong(run, parts, monkeypatch, arguments, message):
    monkeypatch.setenv("PATH", "/nowhere")
    status, out, err = run("check-env", *arguments)
    assert status and out == "" and err.count("\n") == 1 and message in err, err


def test_train_with_a_harness_is_train_agent(run, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "agentic_prompting.cli.train.launch", lambda *given: calls.append(given) or 0
    )
    assert run("train", "--harness", "codex", "--dataset", "x.jsonl")[0] == 0
    assert run("train", "--program=a:b")[0] == 0
    assert [(method, words) for method, words, _ in calls] == [
        ("agent", ["--harness", "codex", "--dataset", "x.jsonl"]),
        ("agent", ["--program=a:b"]),
    ]
    status, out, _ = run("train", "agent", "--help")
    assert status == 0
    assert all(
        option in out for option in ("--harness", "--program", "--keep_failed", "--max_steps")
    )


def trainer_of(monkeypatch, *words):
    given = {}

    class Made(Exception):
        pass

    def make(**arguments):
        given.update(arguments)
        raise Made

    monkeypatch.setattr("agentic_prompting.cli.train_agent.MultiTurnGRPOTrainer", make)
    monkeypatch.setattr("agentic_prompting.cli.train_agent.check_before_loading", lambda *_: None)
    cpu = [
        "--model_name_or_path=m",
        "--output_dir=out",
        "--use_cpu=true",
        "--bf16=false",
    ]
    script, args, model = parse_method_options("agent", [*words, *cpu])
    script.check(args)
    with ExitStack() as stack, pytest.raises(Made):
        script.build_trainer(args, model, stack)
    return given


def test_a_column_that_the_file_lacks_is_not_to_be_named(parts, monkeypatch):
    words = ["--program=own_agent:agent", "--dataset=tasks.jsonl", "--reward=own_agent:by_level"]
    with pytest.raises(ValueError, match="'level'.* question") as refused:
        trainer_of(monkeypatch, *words)
    assert "--columns" not in str(refused.value)


def test_the_trainer_of_a_harness(parts, monkeypatch):
    words = [
        "--harness=pi",
        "--dialect=google",
        "--dataset=tasks.jsonl",
        "--keep_failed=kept",
    ]
    arguments = trainer_of(
        monkeypatch, *words, "--reward", "own_agent:tests_pass", "--ask", "Do: {question}"
    )
    program = arguments["environment"]
    assert (program.harness.name, program.harness.dialect, program.harness.task) == (
        "pi",
        "google",
        "Do: {question}",
    )
    assert program.reward_function(None, None) == 1.0 and arguments["reward_funcs"] is None
    assert program.workspace.keep_failed == "kept"
    assert [row["files"] for row in arguments["train_dataset"]] == [
        {f"{i}.txt": "a"} for i in range(3)
    ]
    arguments = trainer_of(
        monkeypatch,
        "--program=own_agent:agent",
        "--dataset=tasks.jsonl",
        "--task_rows=2",
        "--reward=own_agent:short",
    )
    assert type(arguments["environment"]) is Program and len(arguments["train_dataset"]) == 2
    assert [function.__name__ for function in arguments["reward_funcs"]] == ["short"]
    words = ["--program=own_agent:command", "--dataset=tasks.jsonl", "--shows", str(parts)]
    arguments = trainer_of(monkeypatch, *words, "--reward", "own_agent:tests_pass")
    assert list(arguments["environment"].workspace.shows) == [str(parts)]
    assert arguments["environment"].reward_function(None, None) == 1.0


@pytest.mark.parametrize("words", [["--shows", "x"], ["--reward", "own_agent:tests_pass"]])
def test_a_program_is_not_given_what_it_ignores(parts, words):
    rows = ["--dataset", "tasks.jsonl", "--output_dir", "out", "--use_cpu", "true"]
    script, args, model = parse_method_options(
        "agent", ["--program", "own_agent:agent", *words, *rows, "--bf16", "false"]
    )
    with pytest.raises(ValueError, match="CommandProgram"):
        script.build_trainer(args, model, ExitStack())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the agent to train"),
        (["--harness", "codex", "--program", "a:b"], "name the agent to train"),
        (["--harness", "codex"], "name the tasks"),
        (["--harness", "codex", "--environment", "llm"], "--environment would have no effect"),
        (
            ["--harness", "codex", "--dataset", "x.jsonl", "--dialect", "chat"],
            "codex speaks responses",
        ),
    ],
)
def test_what_train_agent_refuses(words, message):
    script, args, model = parse_method_options(
        "agent", [*words, "--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
    )
    with pytest.raises(ValueError, match=message):
        script.check(args)
        script.build_trainer(args, model, ExitStack())


@pytest.mark.parametrize("name", ["two", "one", "no_parameter", "Two", "wrong", "ints"])
def test_training_a_wrong_agent_is_bad_input(parts, monkeypatch, capsys, name):
    (parts / "wrong_agents.py").write_text(
        "async def two(row, client): ...\ndef one(row): ...\nasync def no_parameter(): ...\n"
        "class Two:\n    def __call__(self, row, client): ...\n"
        "wrong = 7\nints = [1, 2]\n"
    )
    words = [f"--program=wrong_agents.py:{name}", "--dataset=tasks.jsonl"]
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: trainer_of(monkeypatch, *words))
    err = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in err and err.count("\n") == 1
    assert f"wrong_agents.py:{name}" in err
    assert "base_url" in err or name == "ints", err
