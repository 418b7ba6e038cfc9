"""benchmarks/fidelity/trl_suite.py: what it compares, and the tiny models that stand for the hub's."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from support.marks import long

ROOT = Path(__file__).parents[2]
BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture
def benchmark():
    def imported(name):
        return import_module(f"benchmarks.fidelity.{name}")

    yield imported
    for name in [name for name, module in sys.modules.items() if BENCHMARKS in str(module)]:
        del sys.modules[name]


def test_only_what_trls_class_passes_counts(benchmark, monkeypatch):
    suite = benchmark("trl_suite")
    monkeypatch.setattr(suite, "INTENDED", {r"::test_images": "text alone"})
    theirs = {
        "T::test_a": ("passed", ""),
        "T::test_b": ("passed", ""),
        "T::test_images[x]": ("passed", ""),
        "T::test_gone": ("passed", ""),
        "T::test_no_model": ("failed", "OSError"),
        "T::test_gpu": ("skipped", "no GPU"),
    }
    ours = {
        "T::test_a": ("passed", ""),
        "T::test_b": ("failed", "AssertionError"),
        "T::test_no_model": ("passed", ""),
        "T::test_images[x]": ("failed", "ValueError"),
        "T::test_gpu": ("skipped", "no GPU"),
    }
    figures = suite.compare(theirs, ours)
    assert (figures["trl_passes"], figures["ours_passes"]) == (4, 1)
    assert figures["differences"] == {
        "T::test_b": {"error": "AssertionError", "intended": None},
        "T::test_images[x]": {"error": "ValueError", "intended": "text alone"},
        "T::test_gone": {"error": "not run", "intended": None},
    }


def test_every_intended_difference_is_said_on_the_page(benchmark):
    """By its reason's first words."""
    page = " ".join((ROOT / "docs" / "howto" / "trl_script.md").read_text(encoding="utf-8").split())
    intended = benchmark("trl_suite").INTENDED
    assert intended and all(reason in page for reason in intended.values())


def test_the_tokenizer_has_the_ids_that_trls_tests_write(benchmark):
    tokenizer = benchmark("trl_tiny").tokenizer("qwen3", "<|im_end|>")
    call = [
        151657,
        198,
        4913,
        606,
        788,
        330,
        64648,
        22785,
        497,
        330,
        16370,
        788,
        5212,
        64,
        788,
        220,
        18,
        11248,
        151658,
    ]
    text = '<tool_call>\n{"name": "multiply_tool", "arguments": {"a": 3}}\n</tool_call>'
    assert tokenizer.decode([*call, 151645]) == f"{text}<|im_end|>"
    assert tokenizer.eos_token_id == 151645
    assert tokenizer.decode(tokenizer("Wo ist Malmö? 東")["input_ids"]) == "Wo ist Malmö? 東"
    assert tokenizer("<tool_call>")["input_ids"] == [151657]


def test_a_small_tokenizer_reads_the_same_texts(benchmark):
    tokenizer = benchmark("trl_tiny").tokenizer("qwen2_5", "<|im_end|>", 1024)
    ids = tokenizer("Wo ist Malmö? 東<tool_call><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids) == "Wo ist Malmö? 東<tool_call><|im_end|>"
    assert ids[-1] == tokenizer.eos_token_id
    assert len(tokenizer) == 1024 and max(tokenizer.get_vocab().values()) == 1023


@pytest.mark.timeout(600)
@long
def test_a_checkout_is_run_with_both_classes(tmp_path):
    """A checkout of three tests: one that both pass, one about what is different on purpose, one
    that nobody passes.
    """
    checkout = tmp_path / "checkout"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nmarkers = ["slow: takes long"]\n'
    )
    (checkout / "tests" / "__init__.py").touch()
    (checkout / "tests" / "test_grpo_trainer.py").write_text(
        """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.import_utils import is_no_such_thing_available


class TestGRPOTrainer:
    def test_train(self, tmp_path):
        rows = load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train")
        args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=2, num_generations=2,
                          max_completion_length=4, max_steps=1, report_to="none")
        assert not args.bf16 and not is_no_such_thing_available()
        trainer = GRPOTrainer(model="trl-internal-testing/tiny-Qwen2ForCausalLM-2.5", args=args, train_dataset=rows,
                              reward_funcs=lambda completions, **_: [float(len(one)) for one in completions])
        trainer.train()

    def test_rollout_dispatch(self, tmp_path):
        GRPOTrainer.rollout_func = None
        assert GRPOTrainer.__name__ == "GRPOTrainer"

    def test_nobody(self):
        assert False
"""
    )
    script = [
        sys.executable,
        "-m",
        "benchmarks.fidelity.trl_suite",
        "--checkout",
        checkout,
        "--bf16",
        "off",
        "--json",
    ]
    done = subprocess.run(script, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])["bf16=off"]
    assert (found["trl_passes"], found["ours_passes"]) == (2, 1), done.stderr
    (lost,) = found["differences"].values()
    assert lost["intended"] is None and "MovedOver" in lost["error"] and done.returncode == 1
