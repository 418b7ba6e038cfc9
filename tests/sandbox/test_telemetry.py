"""TRL's trainers send a ping to the hub when they are made: the sandbox and the demo send none."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _telemetry

from agentic_prompting import PromptR1Config, PromptR1Trainer
from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.sandbox.setup import prepare_guarded, prepare_sandbox
from support.marks import LONG
from support.training import vars_for


@pytest.fixture
def pings(monkeypatch):
    """What would have been sent, on a machine with a network and without the switch."""
    sent = []
    monkeypatch.delenv("CI", raising=False)
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(_telemetry, "_start_telemetry_thread", lambda: None)
    monkeypatch.setattr(
        _telemetry,
        "_TELEMETRY_QUEUE",
        type("Queue", (), {"put": lambda self, one: sent.append(one)})(),
    )
    return sent


def made(policy, folder, rows):
    return PromptR1Trainer(
        str(policy),
        environment=LLMEnvironment(ScriptedChat(["x"])),
        args=PromptR1Config(**vars_for(folder)),
        train_dataset=rows,
    )


def test_a_trainer_pings_unless_the_switch_is_set(tiny_policy, rows, tmp_path, pings, monkeypatch):
    made(tiny_policy, tmp_path, rows)
    (ping,) = pings
    assert ping["topic"].startswith("trl/") and "agentic" not in str(ping), (
        "TRL's own words, nothing of ours"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # as the variable sets it
    made(tiny_policy, tmp_path, rows)
    assert len(pings) == 1


@pytest.mark.parametrize(
    "prepare",
    [prepare_sandbox, pytest.param(partial(prepare_guarded, copying_steps=1), marks=LONG)],
)
def test_the_sandbox_sends_nothing(prepare, tiny_policy, rows, tmp_path, pings):
    prepare(tmp_path, n_test=4, warm_start_steps=1)
    made(tiny_policy, tmp_path / "run", rows)
    assert not pings and os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1", (
        "neither its warm start nor its trainer"
    )


def test_the_demo_sends_nothing(tmp_path):
    """Its training is another process, which reads the variable."""
    code = (
        "import os; from agentic_prompting.cli import demo, main\n"
        "demo.launch = lambda *_: print('TELEMETRY', os.environ.get('HF_HUB_DISABLE_TELEMETRY')) or 1\n"
        f"main(['demo', '--output-dir', {str(tmp_path / 'demo')!r}])"
    )
    hidden = {
        name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_TELEMETRY"
    }
    done = subprocess.run([sys.executable, "-c", code], env=hidden, capture_output=True, text=True)
    assert "TELEMETRY 1" in done.stdout, done.stderr


def test_the_docs_say_so():
    page = (Path(__file__).parents[2] / "docs/howto/installation.md").read_text()
    assert "HF_HUB_DISABLE_TELEMETRY=1" in page and "ping" in page
