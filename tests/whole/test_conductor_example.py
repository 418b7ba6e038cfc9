"""`examples/train_conductor.py` as a user runs it, with its configuration, a tiny model and servers
on loopback.
"""

import json
import runpy
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from agentic_prompting.cli import train_program
from agentic_prompting.cli.loader import load_environment
from agentic_prompting.llm import run
from agentic_prompting.rollout import Rollout, Sample, read_rollouts
from support.policies import make_conductor_policy
from support.servers import LoopbackServer

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "configs" / "conductor.yaml"
SERVED = ("coder", "mathematician", "reader")


@pytest.fixture
def servers(monkeypatch):
    """A server for each model of the pool, by its name there."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with ExitStack() as stack:
        by_worker = {}
        for worker, variable in zip(SERVED, ("CODER", "MATH", "READER"), strict=True):
            server = LoopbackServer(
                lambda request, number, worker=worker: f"{worker} says {number}"
            )
            by_worker[worker] = stack.enter_context(server)
            monkeypatch.setenv(f"{variable}_URL", server.base_url)
        yield by_worker


def test_the_script_starts_the_program():
    assert (
        runpy.run_path(str(ROOT / "examples" / "train_conductor.py"))["main"] is train_program.main
    )


def test_every_key_of_its_configuration_is_an_option():
    keys = yaml.safe_load(CONFIG.read_text())
    options = {
        name
        for settings in train_program.METHODS["prompt-r1"]
        for name in settings.__dataclass_fields__
    }
    assert set(keys) <= options


def test_the_pool_asks_its_servers_and_the_calculator(servers):
    environment = load_environment("examples/train_conductor.py:environment")
    pool = [*SERVED, "calculator"]
    row = environment.reset({"question": "q", "prompt": "q", "pool": pool, "reset_seed": 1})
    names = {member: name for name, member in row["workers"].items()}
    requests = dict.fromkeys(SERVED, "what is new ?") | {"calculator": "(3 + 4) * -2"}
    calls = " ".join(f'<ask to="{names[worker]}">{text}</ask>' for worker, text in requests.items())
    rollout = Rollout([1], row=row)
    rollout.add_turn(Sample([2]), environment.grammar.parse(f"<think>all</think> {calls}"))
    observation = run(environment.step(rollout))
    assert observation.error is None
    assert observation.quotable_texts == (
        "coder says 0",
        "mathematician says 0",
        "reader says 0",
        "-14",
    )
    assert sum(reply.worth.cost_usd for reply in observation.replies) == pytest.approx(0.004)
    # A mistake in an expression is text for the agent.
    rollout.add_observation(observation, [3])
    turn = f'<think>t</think> <ask to="{names["calculator"]}">open("x")</ask>'
    rollout.add_turn(Sample([4]), environment.grammar.parse(turn))
    assert "only numbers" in run(environment.step(rollout)).quotable_texts[0]


def test_its_configuration_trains_a_tiny_model(servers, tmp_path):
    policy = make_conductor_policy(tmp_path / "policy")
    rows = tmp_path / "rows.jsonl"
    row = {"question": "What is 3 + 4 ?", "answers": ["7"]}
    rows.write_text(f"{json.dumps(row)}\n" * 4)
    out = tmp_path / "run"
    words = [
        f"--config={CONFIG}",
        f"--model_name_or_path={policy}",
        f"--dataset={rows}",
        f"--output_dir={out}",
        "--max_steps=1",
        "--num_generations=2",
        "--per_device_train_batch_size=4",
        "--gradient_accumulation_steps=1",
        "--max_turn_tokens=16",
        "--max_completion_length=64",
        "--max_context=4096",
        "--lora_r=4",
        "--use_cpu=true",
        "--bf16=false",
    ]
    train_program.main("prompt-r1", list(map(str, words)))
    records = list(read_rollouts(out / "rollouts"))
    assert len(records) == 4 and all(len(record["workers"]) in (3, 4) for record in records)
    assert (out / "adapter_model.safetensors").is_file()
    # The endpoints of all workers were checked before the model was loaded.
    assert all(server.requests for server in servers.values())
