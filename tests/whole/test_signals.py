"""SIGINT and SIGTERM at random moments, with requests open: the exit code, a line or two, nobody
left, resumable.
"""

import json
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from agentic_prompting.cli.evolve import NOTHING_LEARNED
from support.marks import LONG
from support.refine_models import improve
from support.servers import LoopbackServer
from support.signalled import Counted, Signalled, moments

EXAMPLES = Path(__file__).parents[2] / "examples"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGINT)
# one of each signal; the slowest get one
FEW = 2
ONE = 1
MANY = pytest.param(10, marks=LONG)


def refine(folder, url):
    (folder / "in.jsonl").write_text(
        "".join(json.dumps(f"Question {number}?") + "\n" for number in range(40))
    )
    models = [
        "--task-model",
        "s",
        "--feedback-model",
        "l",
        "--task-base-url",
        url,
        "--feedback-base-url",
        url,
    ]
    files = [
        "--input",
        folder / "in.jsonl",
        "--output",
        folder / "out.jsonl",
        "--max-in-flight",
        "4",
    ]
    return ["refine", *files, *models, "--max-steps", "2"]


def evolve(folder, url):
    rows = [{"question": f"Question {number}?", "answer": "no"} for number in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = [
        "--policy-model",
        "p",
        "--policy-base-url",
        url,
        "--reference-model",
        "r",
        "--reference-base-url",
        url,
    ]
    sizes = ["--steps", "30", "--problems-per-step", "4", "--num-generations", "2"]
    return [
        "evolve",
        "--dataset",
        folder / "rows.jsonl",
        *models,
        *sizes,
        "--output-dir",
        folder / "run",
    ]


def evaluate(folder, url):
    rows = [{"question": f"Question {number}?", "answers": ["no"]} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "table.yaml").write_text(f"""
title: A table
output: {folder / "run"}
tasks: [{folder / "rows.jsonl"}]
runs: 2
models: {{m: {{name: m, base_url: "{url}", max_concurrency: 4}}}}
systems: {{direct: {{kind: prompted, model: m, prompt: start}}}}
""")
    return ["evaluate", "--config", folder / "table.yaml"]


def said(body):
    user = body["messages"][-1]["content"]
    right = "yes" if user.endswith(("1?", "3?", "5?")) else "no"
    return (
        improve("", user)
        if user.startswith("Prompt:")
        else f"<ACCURACY>0</ACCURACY> <answer>{right}</answer>"
    )


def killed_and_gone_on(kind, folder, count, seconds=0.15, longest=2.0):
    """Each of `count` runs gets a signal at a moment of its own, and goes on to its end."""
    for number, moment in enumerate(moments(count, longest, seed=count)):
        own = folder / str(number)
        own.mkdir()
        replies = Counted(said, seconds)
        with LoopbackServer(replies) as server:
            words = kind(own, server.base_url)
            first = Signalled(words, own / "first.log")
            replies.wait_for(1, first)
            time.sleep(moment)
            code, printed = first.signalled(SIGNALS[number % len(SIGNALS)])
            ours = [line for line in printed.splitlines() if line.startswith("agentic-prompting: ")]
            lines = [
                line for line in ours if "no evidence at step" not in line
            ]  # advice on the run, not on its end
            assert code == 130, (code, printed)
            assert (
                "Traceback" not in printed
                and len(lines) == 1
                and "the same command goes on" in lines[0]
            ), printed
            replies.seconds = 0.0
            code, printed = Signalled(words, own / "second.log").ended()
            assert code == (NOTHING_LEARNED if kind is evolve else 0), (
                printed
            )  # its policy always says the same


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("kind", [refine, evolve, evaluate], ids=lambda one: one.__name__)
def test_a_signal_ends_a_command_in_a_line_and_it_goes_on(tmp_path, kind, count):
    killed_and_gone_on(kind, tmp_path, count)


def serve_with_an_open_request(policy, folder, number, moment):
    """A request is open, whose reply from the large LLM takes longer than the service waits."""
    import socket
    import threading
    import urllib.error
    import urllib.request

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    replies = Counted(lambda body: "Nairobi", 3.0)
    got = []
    with LoopbackServer(replies) as server:
        model = ["--environment-model", "m", "--environment-base-url", server.base_url]
        run = Signalled(
            ["serve", policy, *model, "--port", port], folder / f"{number}-{moment}.log"
        )
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                assert run.process.poll() is None and time.monotonic() < deadline, (
                    run.log.read_text()
                )
                time.sleep(0.1)

        def ask():
            asked = {
                "model": "agent",
                "messages": [{"role": "user", "content": "what is the capital of Kenya ?"}],
            }
            request = urllib.request.Request(
                f"{address}/v1/chat/completions",
                json.dumps(asked).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                got.append(urllib.request.urlopen(request, timeout=60).status)
            except urllib.error.HTTPError as error:
                got.append(error.code)
            except OSError as error:
                got.append(type(error).__name__)

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        time.sleep(moment)
        code, printed = run.signalled(number)
        for client in clients:
            client.join(60)
    return code, printed, got


@pytest.mark.parametrize("count", [ONE, MANY])
def test_a_signal_ends_the_service(asking_policy, tmp_path, count):
    for number, moment in enumerate(moments(count, 2.0, seed=count)):
        code, printed, got = serve_with_an_open_request(
            asking_policy, tmp_path, SIGNALS[number % 3], moment
        )
        after = printed.partition("(Ctrl-C stops)")[2].splitlines()
        said = [
            line for line in after if " POST /v1/" not in line
        ]  # a line for each request that was answered
        assert code == 130 and "Traceback" not in printed and len(said) <= 2, (code, printed)
        assert len(got) == 4, "no client waits for ever"


LAUNCHES = """
import subprocess, sys
from accelerate.commands import launch

def launch_command(arguments):
    code = "import time; print('trains', flush=True); time.sleep(60)"
    status = subprocess.Popen([sys.executable, "-c", code]).wait()
    raise subprocess.CalledProcessError(status, "the program")

launch.launch_command = launch_command
from agentic_prompting.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launched_program_is_no_orphan(tmp_path, number):
    """`kill` of the command reaches the process that trains, which would go on without anybody."""
    run = Signalled(
        ["demo", "--output-dir", tmp_path / "run"],
        tmp_path / "log",
        [sys.executable, "-c", LAUNCHES],
    )
    while "trains" not in run.log.read_text():
        assert run.process.poll() is None, run.log.read_text()
        time.sleep(0.05)
    code, _ = run.signalled(number)
    assert code == 130


SIGNALLED_TWICE = """
import builtins, os, signal, subprocess, sys
from accelerate.commands import launch

def launch_command(arguments):
    waits = "signal.signal(signal.SIGINT, lambda *_: sys.exit(7)); print(flush=True); time.sleep(60)"
    code = f"import signal, sys, time; {waits}"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    original = builtins.__import__

    def another_signal(*arguments, **keywords):
        os.kill(os.getpid(), signal.SIGTERM)  # it comes while a handler imports
        return original(*arguments, **keywords)

    builtins.__import__ = another_signal
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        builtins.__import__ = original
    raise subprocess.CalledProcessError(child.wait(), "the program")

launch.launch_command = launch_command
from agentic_prompting.cli import main
main()
"""


def test_a_second_signal_meets_no_import(tmp_path):
    run = Signalled(
        ["demo", "--output-dir", tmp_path / "run"],
        tmp_path / "log",
        [sys.executable, "-c", SIGNALLED_TWICE],
    )
    code, printed = run.ended()
    assert code == 7 and "Traceback" not in printed, printed


def demo(policy, folder, number, moment):
    """The sandbox's training, with its policy in place; killed at a moment of its steps, and gone
    on with.
    """
    shutil.copytree(policy, folder / "warm_start")
    words = [
        "demo",
        "--output-dir",
        folder,
        "--n_test",
        "8",
        "--per_device_train_batch_size",
        "16",
        "--num_generations",
        "4",
    ]
    log = folder.with_suffix(".log")
    run = Signalled([*words, "--max_steps", "300"], log)
    deadline = time.monotonic() + 200
    while "step 1:" not in log.read_text():
        assert run.process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)
    time.sleep(moment)
    code, printed = run.signalled(number)
    assert code == 130 and "Traceback" not in printed, (code, printed[-3000:])
    last = printed.splitlines()[-1]
    assert "a checkpoint was saved" in last and "--resume_from_checkpoint" in last
    assert "train(" not in last, "it speaks of the command, not of Python"
    (checkpoint,) = folder.glob("checkpoint-*")
    step = int(checkpoint.name.partition("-")[2])
    code, printed = Signalled(
        [*words, "--max_steps", step + 1], folder.with_suffix(".again.log")
    ).ended()
    assert code == 0 and (folder / "summary.json").exists(), printed[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [ONE, MANY])
def test_a_signal_ends_a_demo_with_a_checkpoint(tiny_policy, tmp_path, count):
    for number, moment in enumerate(moments(count, 4.0, seed=count)):
        demo(tiny_policy, tmp_path / str(number), SIGNALS[(number + 1) % 3], moment)
