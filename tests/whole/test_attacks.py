"""Attacks: a population of 100,000 prompts, secrets in a run's folder, one budget over many
processes.
"""

import gzip
import json
import os
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from agentic_prompting.cli import train_program
from agentic_prompting.evolution import Population, SystemPrompt
from agentic_prompting.evolution.population import load_state
from agentic_prompting.llm.loop import run
from agentic_prompting.records import atomic_write
from agentic_prompting.report import write_report
from agentic_prompting.trainers.policies.vllm_client import PolicyUnreachable
from support.pages import block
from support.servers import LoopbackServer

ROOT = Path(__file__).parents[2]

# --- a population of 100,000 prompts --------------------------------------------------------------


# Of the processor, which other work disturbs less than the clock. It takes 5 to 25, and hours if
# time is quadratic in the number of prompts.
SECONDS = 600


@pytest.fixture(scope="module")
def grown():
    """Each prompt the child of the one before, rated against its neighbours."""
    population = Population(SystemPrompt("Answer.", ("Think.",)))
    rng = random.Random(0)
    started = time.process_time()
    while len(population.members) < 100_000:
        newest = population.members[-1].prompt
        population.add(
            SystemPrompt(
                "Answer.", (f"Think {len(population.members)} times.",), parents=(newest.id,)
            )
        )
    for _ in range(50):
        drawn = population.select(3)
        population.record(drawn, [[rng.random()] for _ in drawn])
        population.best()
    assert time.process_time() - started < SECONDS
    return population


def test_the_state_of_100_000_prompts(grown, tmp_path):
    started = time.process_time()
    again = Population(SystemPrompt("Answer.", ("Think.",)))
    atomic_write(tmp_path / "population.json", json.dumps(grown.state_dict()))
    load_state(tmp_path / "population.json", again.load_state_dict)
    assert len(again.members) == 100_000 and again.best() == grown.best()
    assert again.select(3) == grown.select(3), "the same draw"
    assert time.process_time() - started < SECONDS


def test_the_report_of_100_000_prompts(grown, tmp_path):
    atomic_write(tmp_path / "population.json", json.dumps({"population": grown.state_dict()}))
    started = time.process_time()
    page = write_report(tmp_path, pictures=False)
    assert time.process_time() - started < SECONDS and page.stat().st_size < 200e6
    assert grown.best().principles[0] in json.dumps(block(page.read_text(), "lineage"))


# --- secrets --------------------------------------------------------------------------------------

KEY = "sk-planted-0123456789abcdef"
PASSWORD = "hunter2-planted-in-the-address"


def contents(path):
    """A file's bytes, and those of what is packed in it."""
    data = path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            data += b"".join(map(packed.read, packed.namelist()))
    return data + gzip.decompress(data) if path.suffix == ".gz" else data


def test_secrets_of_key_and_address_are_in_no_file_of_a_run(
    tiny_policy, tmp_path, monkeypatch, capfd
):
    """The whole program with a key in the environment and another one in the endpoint's address:
    checkpoints, training_args.bin, spending.sqlite, the model card, trajectories, all that an
    upload would take, and what is printed. The endpoint fails now and then, with an error that
    quotes the key.
    """
    from support.servers import Answer

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    folder = tmp_path / "run"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"{n} ?", "answers": ["1"]}) + "\n" for n in range(8))
    )

    def said(body, number):
        return (
            Answer(f"the key {KEY} or {PASSWORD} is wrong", status=400)
            if number % 3 == 1
            else "Nairobi"
        )

    with LoopbackServer(said) as server:
        address = server.base_url.replace("http://", f"http://someone:{PASSWORD}@")
        train_program.main(
            "prompt-r1",
            [
                "--model_name_or_path",
                str(tiny_policy),
                "--dataset",
                str(rows),
                "--output_dir",
                str(folder),
                "--environment_model",
                "m",
                "--environment_base_url",
                address,
                "--budget_tokens",
                "1000000",
                "--max_steps",
                "2",
                "--save_steps",
                "1",
                "--num_generations",
                "2",
                "--per_device_train_batch_size",
                "4",
                "--max_turns",
                "2",
                "--max_turn_tokens",
                "24",
                "--max_completion_length",
                "120",
                "--use_cpu",
                "true",
                "--bf16",
                "false",
                "--gradient_checkpointing",
                "false",
                "--report_to",
                "none",
                "--max_failed_share",
                "1",
                "--replay_cache",
                str(folder / "replies.sqlite"),
            ],
        )
    printed = capfd.readouterr()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"training_args.bin", "spending.sqlite", "README.md"} <= {path.name for path in files}
    for secret in (KEY, PASSWORD):
        assert not [path for path in files if secret.encode() in contents(path)]
        assert secret not in printed.out + printed.err


# --- one budget over three processes of eight connections -----------------------------------------

SPENDS = """
import sys
from agentic_prompting import OpenAIChat
from agentic_prompting.llm import Budget, charge, start
url, book, limit = sys.argv[1:]
with OpenAIChat("m", url, max_concurrency=8, price=(1e6, 1e6), max_retries=0) as chat:
    charge(Budget(usd=float(limit), path=book), environment=chat)
    replies = [start(chat([{"role": "user", "content": str(i)}])) for i in range(60)]
    print(sum(one.result(120).error is None for one in replies))
"""


def test_one_budget_over_three_processes(tmp_path):
    """Each call costs 15 dollars of 300: twenty, and no more than one for each connection on top."""
    from support.servers import Answer

    limit = 300
    cost = 15
    connections = 3 * 8
    asked = []

    def said(body, number):
        asked.append(number)
        return Answer("ok", delay=0.02 + random.Random(number).random() / 10)

    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENAI_API_KEY": "none"}
    with LoopbackServer(said) as server:
        command = [
            sys.executable,
            "-c",
            SPENDS,
            server.base_url,
            str(tmp_path / "spending.sqlite"),
            str(limit),
        ]
        running = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for _ in range(3)
        ]
        printed = [one.communicate(timeout=120)[0] for one in running]
        paid = sum(int(text.split()[-1]) for text in printed)
        assert limit / cost <= paid == len(asked) <= limit / cost + connections, printed
        again = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=120
        )
        assert again.stdout.split()[-1] == "0" and len(asked) == paid, (
            "a restart gets no budget of its own"
        )


# --- weights on servers of vLLM -------------------------------------------------------------------


class Loads:
    """As much of a server as `vllm_sync="disk"` speaks to: it has the weights that it was told
    last.
    """

    address = "http://stand-in"
    version = "default"

    async def request(self, path, body=None):
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]


def pushes_to(server, name, monkeypatch):
    """A trainer's side of it, after its first push."""
    from agentic_prompting.trainers.policies.weight_sync import DiskSync

    async def same(self, server, model, expected):
        return 0.0

    sync = DiskSync.__new__(DiskSync)
    sync.name = name
    sync.version = -1
    sync.folder = Path("weights")
    server.model = "policy"
    monkeypatch.setattr(DiskSync, "_measure_difference", same)
    run(sync._push(server, None))
    sync.version += 1
    return sync


def test_two_trainers_on_one_server_do_not_sample_from_each_others_weights(monkeypatch):
    """What a dead run has left, and a server that was started anew, are no hindrance; another
    trainer is named.
    """
    server = Loads()
    server.version = "run-18f00000000-7"
    first = pushes_to(server, "run-18f00000001", monkeypatch)
    run(first._push(server, None))
    server.version = "default"
    run(first._push(server, None))
    pushes_to(server, "run-18f00000002", monkeypatch)
    with pytest.raises(PolicyUnreachable, match="has the weights of another trainer"):
        run(first._push(server, None))


def test_weights_that_cannot_be_written_stop_a_push(tmp_path):
    """A file stands where the folder should be: an error, and no push of what was there before."""
    from agentic_prompting.trainers.policies.weight_sync import DiskSync

    sync = DiskSync.__new__(DiskSync)
    (tmp_path / "in the way").write_text("")
    sync.folder = tmp_path / "in the way" / "vllm_weights"
    with pytest.raises(OSError):
        sync._write({})
