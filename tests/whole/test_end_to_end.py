"""The whole path as a user walks it: the demo's script against three servers, bad input, and real
HotpotQA questions.

Imports take most of the time of a short run. So one process imports what the script imports and
forks a child for each run of `ask`; a child runs the script's file as `__main__` with its own
arguments, environment and output. The demo itself is started as `make demo` starts it. All of it
happens at once, in the fixture `runs`.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

import agentic_prompting
from agentic_prompting import LLMEnvironment, PromptAgent, load_task
from agentic_prompting.cli import train_program
from agentic_prompting.llm import ScriptedChat, ServerFailed
from agentic_prompting.rewards import PromptR1Reward, exact_match, token_f1
from agentic_prompting.rollout import parse_turn, read_rollouts
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.server import OracleServer
from support.servers import unused_url

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_prompt_r1.py"
DATA = Path(os.environ.get("AGENTIC_PROMPTING_DATA", "nowhere"))
HOTPOT = DATA / "prompt_r1" / "eval" / "hotpot.parquet"
TIMEOUT = 240
CAN_SERVE = all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn"))

# The demo's configuration, made as small as it goes.
DEMO = [
    "--config",
    "examples/configs/sandbox.yaml",
    "--warm_start_steps",
    "2",
    "--max_steps",
    "1",
    "--n_test",
    "8",
    "--per_device_train_batch_size",
    "16",
]
SUMMARY_KEYS = {
    "exact_match_before",
    "exact_match_after",
    "steps",
    "seconds",
    "mean_turns",
    "failed_rollouts",
}


@dataclass
class Run:
    """What came of one run of the script."""

    folder: Path
    code: int
    stdout: str
    stderr: str

    @property
    def last_line(self):
        return self.stderr.rstrip().splitlines()[-1]

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def records(self):
        return list(read_rollouts(self.folder / "rollouts"))

    def check(self):
        assert self.code == 0, self.stdout[-2000:] + self.stderr[-4000:]
        return self


# --- processes ------------------------------------------------------------------------------------

# Imports once; then one child for each job: {"args": [...], "env": {...}, "output": path without
# suffix}.
FORKER = """
import json, os, runpy, sys, time
import matplotlib.figure
import agentic_prompting.llm.openai_http, agentic_prompting.sandbox.results, agentic_prompting.sandbox.setup
from trl import GRPOTrainer, ModelConfig, SFTTrainer, TrlParser
script, jobs, seconds = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
children = {}
for job in jobs:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(job["output"] + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(job["env"])
        sys.argv = [script, *job["args"]]
        runpy.run_path(script, run_name="__main__")
        sys.exit(0)
    children[child] = job
deadline = time.monotonic() + seconds
codes = {}
while children:
    child, status = os.waitpid(-1, os.WNOHANG)
    if child:
        codes[children.pop(child)["output"]] = os.waitstatus_to_exitcode(status)
    elif time.monotonic() > deadline:
        for child in children:
            os.kill(child, 9)
        deadline = float("inf")
    else:
        time.sleep(0.05)
print(json.dumps(codes))
"""


def environment_variables(**changes):
    """Of a user without keys, whose machine has no network."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "ACCELERATE_"))
    }
    source = str(Path(agentic_prompting.__file__).parents[1])
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1",
    }
    return {**own, **quiet, "PYTHONPATH": source, "COLUMNS": "200", **changes}


class Background:
    """A process of ours that is ended with everything it started."""

    def __init__(self, command, log, **options):
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
                **options,
            )

    def wait_for(self, condition, what):
        deadline = time.monotonic() + 90
        while not (result := condition()):
            assert self.process.poll() is None, (
                f"{what} ended early:\n{self.log.read_text()[-3000:]}"
            )
            assert time.monotonic() < deadline, (
                f"{what} did not start:\n{self.log.read_text()[-3000:]}"
            )
            time.sleep(0.05)
        return result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def oracle_process(folder):
    """The sandbox's oracle as a server of its own."""
    command = [sys.executable, "-m", "agentic_prompting.sandbox.server", "--port", "0"]
    return Background(
        command, folder / "oracle.log", env=environment_variables(PYTHONUNBUFFERED="1")
    )


def oracle_url(process):
    found = process.wait_for(
        lambda: re.match(r"http://\S+/v1$", process.log.read_text().strip()), "the oracle"
    )
    return found[0]


def transformers_serve(model, folder, port):
    """An OpenAI-compatible server that has nothing to do with us, with a tiny random model."""
    command = [
        Path(sys.executable).parent / "transformers",
        "serve",
        str(model),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--device",
        "cpu",
    ]
    return Background(command, folder / "serve.log", env=environment_variables())


def answers(url):
    def ask():
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                url, timeout=1
            ) as response:
                return response.status == 200
        except OSError:
            return False

    return ask


# --- what the runs need ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served_policy(tiny_policy, tmp_path_factory):
    """The tiny random model as a large LLM. Every second token ends its reply, but not before the
    fifth: the server has no limit below 1,024 tokens of its own.
    """
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(tiny_policy, folder, dirs_exist_ok=True)
    config = json.loads((folder / "generation_config.json").read_text())
    ends = list(range(3, 700, 2))
    (folder / "generation_config.json").write_text(
        json.dumps({**config, "eos_token_id": ends, "min_new_tokens": 5})
    )
    return folder


BAD = [
    "unknown_task",
    "missing_file",
    "no_model",
    "wrong_key",
    "unreachable",
    "unknown_model",
    "sandbox_unreachable",
]
WRONG_KEY = "sk-wrong-0123456789"


@pytest.fixture(scope="module")
def runs(asking_policy, served_policy, tiny_policy, tmp_path_factory):
    """Every run of the script, by name."""
    folder = tmp_path_factory.mktemp("runs")
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"id": str(i), "question": f"{i} ?", "answer": "a"}) + "\n" for i in range(8)
        )
    )
    own = {
        "task": "hotpotqa",
        "data_files": str(rows),
        "model_name_or_path": str(tiny_policy),
        "max_steps": "1",
        "num_generations": "2",
        "per_device_train_batch_size": "4",
        "max_completion_length": "40",
        "use_cpu": "true",
        "bf16": "false",
        "gradient_checkpointing": "false",
        "report_to": "none",
        "environment_model": "sandbox-oracle",
    }
    jobs = []

    def job(name, args, **env):
        output = folder / name
        jobs.append(
            {"args": [*args, "--output_dir", str(output)], "output": str(output), "env": env}
        )
        return output

    def asks(name, url, model):
        """The demo against another endpoint, with a policy that asks."""
        shutil.copytree(
            asking_policy,
            job(name, [*DEMO, "--environment_base_url", url, "--environment_model", model])
            / "warm_start",
        )

    def bad(name, env=None, **changes):
        options = {name: value for name, value in {**own, **changes}.items() if value is not None}
        job(
            name,
            [word for key, value in options.items() for word in (f"--{key}", value)],
            **(env or {}),
        )

    with ExitStack() as stack:
        port = re.search(r":(\d+)/", unused_url())[1]
        serve = (
            stack.enter_context(transformers_serve(served_policy, folder, port))
            if CAN_SERVE
            else None
        )
        demo = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            "examples/accelerate/single.yaml",
            str(SCRIPT),
            *DEMO,
            "--output_dir",
            str(folder / "demo"),
        ]
        with open(folder / "demo.out", "w") as out, open(folder / "demo.err", "w") as err:
            launched = subprocess.Popen(
                demo, stdout=out, stderr=err, cwd=ROOT, env=environment_variables()
            )
        stack.callback(launched.kill)
        oracle = oracle_url(stack.enter_context(oracle_process(folder)))
        guarded = stack.enter_context(OracleServer(api_key="the right key"))

        asks("separate_oracle", oracle, "sandbox-oracle")
        if serve is not None:
            asks("transformers_serve", f"http://127.0.0.1:{port}/v1", str(served_policy))
        bad("unknown_task", environment_base_url=oracle, task="hotpot")
        bad("missing_file", environment_base_url=oracle, data_files=str(folder / "nowhere.jsonl"))
        bad("no_model", environment_base_url=oracle, environment_model=None)
        bad("wrong_key", {"OPENAI_API_KEY": WRONG_KEY}, environment_base_url=guarded.base_url)
        bad("unreachable", environment_base_url=unused_url())
        bad("unknown_model", environment_base_url=oracle, environment_model="gpt-5o")
        job(
            "sandbox_unreachable",
            [*DEMO, "--environment_base_url", unused_url(), "--environment_model", "m"],
        )

        if serve is not None:
            serve.wait_for(answers(f"http://127.0.0.1:{port}/health"), "transformers serve")
        forked = subprocess.run(
            [sys.executable, "-c", FORKER, str(SCRIPT), json.dumps(jobs), str(TIMEOUT - 60)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment_variables(),
            timeout=TIMEOUT,
        )
        assert forked.returncode == 0, forked.stderr[-3000:]
        codes = json.loads(forked.stdout.splitlines()[-1])
        codes[str(folder / "demo")] = launched.wait(TIMEOUT)
        yield {
            Path(output).name: Run(
                Path(output),
                code,
                Path(output + ".out").read_text(),
                Path(output + ".err").read_text(),
            )
            for output, code in codes.items()
        }


# --- the demo -------------------------------------------------------------------------------------


def test_the_demo_writes_what_it_says(runs):
    run = runs["demo"].check()
    summary = run.summary
    assert set(summary) >= SUMMARY_KEYS and summary["sandbox"] is True
    assert all(isinstance(summary[key], (int, float)) for key in SUMMARY_KEYS)
    assert (summary["steps"], summary["questions"], summary["failed_rollouts"]) == (1, 8, 0)
    assert 1 <= summary["mean_turns"] <= 5 and summary["seconds"] > 0
    picture = (run.folder / "reward.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 5000
    trajectories = json.loads((run.folder / "trajectories.json").read_text())
    assert set(trajectories) == {"before", "after"}
    assert all(
        lines[0].startswith("question") and lines[1].startswith("agent")
        for lines in trajectories.values()
    )
    assert len(run.records) == 16 and {record["step"] for record in run.records} == {0}
    log = json.loads((run.folder / "trainer_state.json").read_text())["log_history"]
    assert {"loss", "grad_norm", "kl", "entropy"} <= set(log[0]), (
        "the optimisation's curves outlive the run"
    )
    assert (run.folder / "model.safetensors").exists()
    assert (run.folder / "agentic_prompting.json").exists()
    for printed in (
        "exact match before",
        "exact match after",
        "--- before training",
        "--- after training",
        "step 1:",
    ):
        assert printed in run.stdout
    assert "says nothing about real models" in run.stdout, (
        "what the sandbox shows is said to be the sandbox"
    )
    assert "%|" not in run.stderr and "\r" not in run.stdout + run.stderr, (
        "no progress bars in a pipe"
    )
    assert "warning" not in run.stderr.lower() and "deprecated" not in run.stderr.lower()


def test_use_peft_trains_an_adapter_that_can_be_used(asking_policy, tmp_path, monkeypatch):
    shutil.copytree(asking_policy, tmp_path / "warm_start")
    adapter = ["--use_peft", "true", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
    options = [*DEMO, *adapter, "--learning_rate", "0.01", "--output_dir", str(tmp_path)]
    monkeypatch.chdir(ROOT)
    train_program.main("prompt-r1", options)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["r"], sorted(written["target_modules"])) == (4, ["q_proj", "v_proj"])
    weights = load_file(tmp_path / "adapter_model.safetensors")
    moved = [float(weight.abs().max()) for name, weight in weights.items() if "lora_B" in name]
    assert moved and all(moved), "B begins at zero: these were trained"
    assert not (tmp_path / "model.safetensors").exists()
    agent = PromptAgent.from_pretrained(
        tmp_path, LLMEnvironment(ScriptedChat(["the answer is Swahili ."]))
    )
    assert agent.answer("what is the language of Kenya ?").done


def test_the_demo_against_an_oracle_of_its_own_process(runs):
    """The embedded default is only a default: the same script, the oracle somewhere else."""
    run = runs["separate_oracle"].check()
    assert set(run.summary) >= SUMMARY_KEYS and run.summary["failed_rollouts"] == 0
    records_with_replies = [record for record in run.records if record["observations"]]
    assert len(records_with_replies) > len(run.records) / 2, (
        "the policy of this test asks; else nothing is shown here"
    )
    oracle = Oracle()
    for record in records_with_replies:
        requests = [parse_turn(turn["text"]).request for turn in record["turns"]]
        replies = [observation["text"] for observation in record["observations"]]
        assert replies == [oracle.answer(request) for request in requests[: len(replies)]]
    assert any(
        "the answer is Swahili ." in str(record["observations"]) for record in records_with_replies
    )
    assert any(record["status"] == "answered" for record in records_with_replies)
    # The evaluation before and after went to the same endpoint.
    trajectories = json.loads((run.folder / "trajectories.json").read_text())
    assert any(
        line.startswith("environment  ") for lines in trajectories.values() for line in lines
    )


@pytest.mark.skipif(
    not CAN_SERVE,
    reason="transformers serve needs fastapi and uvicorn: pip install fastapi uvicorn",
)
def test_the_demo_against_a_server_that_is_not_ours(runs):
    """`transformers serve` with a random model: nonsense for replies, and everything goes on."""
    run = runs["transformers_serve"].check()
    assert set(run.summary) >= SUMMARY_KEYS
    records_with_replies = [record for record in run.records if record["observations"]]
    assert len(records_with_replies) > len(run.records) / 2
    for record in records_with_replies:
        for observation in record["observations"]:
            assert bool(observation["text"]) != bool(observation["error"]), (
                "a reply or an error, never both"
            )
    assert all((record["status"] == "failed") == bool(record["error"]) for record in run.records)
    assert all(
        record["rewards"]["prompt_r1_reward"] is not None
        for record in run.records
        if not record["error"]
    )
    assert run.summary["failed_rollouts"] == 0, [record["error"] for record in run.records]


# --- bad input: one line that says what to do, before anything is trained -------------------------

SAID = {
    "unknown_task": r"unknown task 'hotpot'; did you mean 'hotpotqa' or 'nq_hotpotqa'\? .*data list",
    "missing_file": r"hotpotqa: no such file: .*nowhere\.jsonl",
    "no_model": r"--environment_model NAME",
    "wrong_key": r"the key was rejected: set OPENAI_API_KEY .*sandbox-oracle at http://127.*HTTP 401",
    "unreachable": r"does not answer .*is its server running, and is its base_url right\? .*http://127",
    "unknown_model": r"unknown model 'gpt-5o' or wrong path: .*HTTP 404",
    "sandbox_unreachable": r"does not answer .*is its server running",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(runs, name):
    run = runs[name]
    assert run.code == (2 if name in ("unknown_task", "missing_file", "no_model") else 1), (
        run.stdout + run.stderr
    )
    assert re.match(f"agentic-prompting: .*{SAID[name]}", run.last_line), run.stderr[-2000:]
    assert len(run.last_line) < 400
    written = [path.name for path in run.folder.iterdir()] if run.folder.exists() else []
    assert set(written) <= {"training.lock"}, (
        "nothing was trained, and nothing written under the lock"
    )
    assert "warm start" not in run.stdout and "step" not in run.stdout
    assert "During handling of the above exception" not in run.stderr, (
        "one cause, not a chain of them"
    )
    assert WRONG_KEY not in run.stdout + run.stderr


# --- real questions -------------------------------------------------------------------------------


@pytest.mark.skipif(not HOTPOT.is_file(), reason=f"the released HotpotQA rows are not at {HOTPOT}")
def test_real_hotpotqa_rows_are_played_and_scored(asking_policy):
    """The plumbing over 16 real rows: whatever the tiny policy makes of them, each ends and has
    numbers for scores.
    """
    rows = list(
        load_task("prompt_r1", split="test/hotpot", data_files=str(HOTPOT)).select(range(16))
    )
    environment = LLMEnvironment(ScriptedChat(lambda messages: "the answer is Swahili ."))
    rollouts = PromptAgent.from_pretrained(asking_policy, environment).answer_all(
        rows, progress=False
    )
    assert len(rollouts) == 16
    assert all(rollout.done and rollout.status != "failed" for rollout in rollouts)
    assert sum(bool(rollout.observations) for rollout in rollouts) >= 8
    assert any(rollout.status == "answered" for rollout in rollouts)
    for row, rollout in zip(rows, rollouts, strict=True):
        assert rollout.row["question"] == row["question"] and row["answers"]
        score = PromptR1Reward().score_turns(rollout.texts, row["answers"])
        numbers = [
            exact_match(rollout.answer or "", row["answers"]),
            token_f1(rollout.answer or "", row["answers"]),
            score.total,
            score.format,
            score.answer,
        ]
        assert all(isinstance(number, (int, float)) and number == number for number in numbers)
        assert -1 <= score.total <= 1


@pytest.mark.skipif(not HOTPOT.is_file(), reason=f"the released HotpotQA rows are not at {HOTPOT}")
def test_the_released_instruction_can_be_used_verbatim(asking_policy):
    """Rows bring the original template; a right answer to a real question scores as one."""
    row = load_task("prompt_r1", split="test/hotpot", data_files=str(HOTPOT))[0]
    template = json.loads(row["meta"])["prompt_template"]
    assert "{question}" in template and "interaction_prompt" in template
    turns = [
        "<think> a </think>\n<interaction_prompt> b </interaction_prompt>",
        f"<think> a </think>\n<answer> {row['answers'][0]} </answer>",
    ]
    assert PromptR1Reward().score_turns(turns, row["answers"]).total == pytest.approx(1.0)
    assert PromptR1Reward().score_turns(
        [*turns[:1], turns[1].replace(row["answers"][0], "zzz")], row["answers"]
    ).total == pytest.approx(0.0)


def test_a_failing_environment_is_seen_in_use(asking_policy):
    """The same plumbing when the large LLM is down: failed rollouts with their cause, which nobody
    reads as a reply.
    """
    environment = LLMEnvironment(ScriptedChat([ServerFailed("down for maintenance", status=503)]))
    agent = PromptAgent.from_pretrained(asking_policy, environment)
    rollouts = agent.answer_all(["what is the language of Kenya ?"] * 8, progress=False)
    failed = [rollout for rollout in rollouts if rollout.status == "failed"]
    assert len(failed) >= 4
    assert all("down for maintenance" in str(rollout.error) for rollout in failed)
    assert not any(
        "maintenance" in agent.chat_format.tokenizer.decode(rollout.ids) for rollout in rollouts
    )
