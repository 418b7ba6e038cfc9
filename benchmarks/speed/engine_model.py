"""The engine on a real model, for `engine.py --model`: beside `generate`, the matrix products alone
and llama.cpp.

Each row has a context of 100 tokens and samples 32. *Full* is the model as it is, with trainable
weights; *lora* has an adapter of all linear layers and a frozen head, as in training with
`peft_config`. Speeds are sampled tokens per second of the processor, contexts included, the best of
some alternating runs.

- *limit*: a decoding step that is nothing but the matrix products of its rows. `of_limit` is that
  time over the engine's time for a step: the run less one that samples a single token, by the
  number of further steps.
- bfloat16 is measured by default where the processor computes in it (AVX-512 or AMX); elsewhere it
  is emulated.
- *identical*: the share of some rows whose greedy tokens are those of `generate` (float32: all;
  bfloat16: up to rounding).
- *parts*: how the largest run's processor time divides among groups of operations, by torch's
  profiler.
- *llama.cpp*: the GGUF file of the small model's package, or `--gguf`, by the package `xllamacpp`
  in a process of its own (`llama_cpp.py`); left out where that is not installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agentic_prompting.llm import gather
from agentic_prompting.local import Sampling, TransformersEngine
from agentic_prompting.rollout import SampleRequest, run_with_engine
from benchmarks.lab import REPOSITORY, log

CONTEXT_LENGTH = 100
NEW_TOKENS = 32
NEVER_SAMPLED = 10**9  # as the only token that ends a turn, it lets each row reach its limit
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The groups of `parts`, by a part of an operation's name; the first that fits counts.
OPERATIONS = {
    "matrix products": ("mm", "linear"),
    "attention": ("attention", "attn"),
    "choosing tokens": ("sort", "softmax", "cumsum", "exponential", "topk", "argmax", "gather"),
    "copies": ("copy", "cat", "index", "slice", "clone", "contiguous"),
}


class ModelBench:
    """A real model in one precision, trained in one way, with contexts out of the README."""

    def __init__(self, folder: str, precision: str, way: str):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=PRECISIONS[precision])
        if way == "lora":
            self.model = get_peft_model(self.model, LORA).to(PRECISIONS[precision])
        self.model.eval()
        self._text_ids = self.tokenizer((REPOSITORY / "README.md").read_text())["input_ids"]

    def contexts(self, rows: int) -> list[list[int]]:
        """Contexts that begin at different places of the text."""
        starts = [37 * row % (len(self._text_ids) - CONTEXT_LENGTH) for row in range(rows)]
        return [self._text_ids[start : start + CONTEXT_LENGTH] for start in starts]

    def by_engine(self, rows: int, new_tokens: int, greedy: bool = False) -> list[list[int]]:
        """Sample with the library's engine."""
        engine = TransformersEngine(
            self.model,
            self.tokenizer,
            Sampling(temperature=0) if greedy else Sampling(),
            end_of_turn_ids=[NEVER_SAMPLED],
            on_callers_thread=True,
        )
        requests = [
            SampleRequest(context, new_tokens, seed, seed)
            for seed, context in enumerate(self.contexts(rows))
        ]
        samples = run_with_engine(engine, gather(engine(request) for request in requests))
        return [sample.ids for sample in samples]

    def by_generate(self, rows: int, new_tokens: int, greedy: bool = False) -> list[list[int]]:
        """Sample with transformers' `generate`."""
        contexts = torch.tensor(self.contexts(rows))
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=not greedy,
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
        )
        with torch.no_grad():
            ids = self.model.generate(
                input_ids=contexts,
                attention_mask=torch.ones_like(contexts),
                generation_config=config,
            )
        return ids[:, CONTEXT_LENGTH:].tolist()

    def matrix_products_seconds(self, rows: int, repeats: int = 5) -> float:
        """Processor seconds of the matrix products of one decoding step."""
        weights = [
            module.weight
            for module in self.model.modules()
            if isinstance(module, torch.nn.Linear)  # the head and an adapter's matrices, too
        ]
        inputs = [torch.randn(rows, weight.shape[1], dtype=weight.dtype) for weight in weights]
        seconds = []
        with torch.no_grad():
            for _ in range(repeats):
                started = time.process_time()
                for hidden, weight in zip(inputs, weights, strict=True):
                    torch.nn.functional.linear(hidden, weight)
                seconds.append(time.process_time() - started)
        return min(seconds)

    def parts(self, rows: int, new_tokens: int) -> dict[str, float]:
        """Shares of the engine's processor time by groups of operations; the rest is Python and
        small operations.
        """
        started = time.process_time()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            self.by_engine(rows, new_tokens)
        total = time.process_time() - started
        shares: dict[str, float] = defaultdict(float)
        for operation in profiled.key_averages():
            seconds = operation.self_cpu_time_total / 1e6
            for part, names in OPERATIONS.items():
                if any(name in operation.key for name in names):
                    shares[part] += seconds / total
                    break
            else:
                shares["other operations"] += seconds / total
        shares["Python"] = max(0.0, 1 - sum(shares.values()))
        return {part: round(share, 3) for part, share in shares.items()}


def native_precisions() -> list[str]:
    """The precisions that the processor computes in."""
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return ["float32", "bfloat16"] if has_bfloat16 else ["float32"]


def spent(sample: Callable[[int, int], Any], rows: int, new_tokens: int) -> float:
    """Processor seconds of a run."""
    started = time.process_time()
    sample(rows, new_tokens)
    return time.process_time() - started


def measure(bench: ModelBench, rows: int, new_tokens: int, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    samplers = {"engine": bench.by_engine, "generate": bench.by_generate}
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(repeats):
        for name, sample in samplers.items():
            seconds[name].append(spent(sample, rows, new_tokens))
    best = {name: min(runs) for name, runs in seconds.items()}

    # A step of the engine is what a run of one token does not have.
    reading = min(spent(bench.by_engine, rows, 1) for _ in range(repeats))
    step = (best["engine"] - reading) / (new_tokens - 1)
    products = bench.matrix_products_seconds(rows)

    # A few rows and tokens suffice to see that both read the same model.
    few_rows = min(rows, 8)
    short = min(new_tokens, 16)
    greedy = [bench.by_engine(few_rows, short, True), bench.by_generate(few_rows, short, True)]
    same = [ours == theirs for ours, theirs in zip(*greedy, strict=True)]
    return {
        "rows": rows,
        "engine_tokens_per_s": round(rows * new_tokens / best["engine"], 1),
        "generate_tokens_per_s": round(rows * new_tokens / best["generate"], 1),
        "ratio": round(best["generate"] / best["engine"], 2),
        "limit_tokens_per_s": round(rows / products, 1),
        "of_limit": round(products / step, 3),
        "identical": round(sum(same) / len(same), 3),
    }


def measure_llama_cpp(
    gguf_file: Path | None, row_counts: Sequence[int], new_tokens: int
) -> dict[int, float]:
    """llama.cpp's tokens per second of the processor, by the number of rows; empty without the
    package or file.
    """
    if find_spec("xllamacpp") is None or gguf_file is None:
        log("llama.cpp is left out: it needs the package xllamacpp and a GGUF file")
        return {}
    speeds = {}
    for rows in row_counts:
        command = [sys.executable, "-m", "benchmarks.speed.llama_cpp", str(gguf_file)]
        command += [str(rows), str(CONTEXT_LENGTH), str(new_tokens)]
        finished = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
        if finished.returncode:
            log(f"llama.cpp failed: {finished.stderr[-400:]}")
            return {}
        speeds[rows] = json.loads(finished.stdout.splitlines()[-1])["tokens_per_s"]
    return speeds


def measure_model(
    folder: str,
    gguf_file: Path | None,
    quick: bool,
    row_counts: Sequence[int],
    precisions: Sequence[str],
) -> dict[str, Any]:
    """All rows of the table, and what the largest run in the last precision spends its time on."""
    new_tokens = NEW_TOKENS // 2 if quick else NEW_TOKENS
    repeats = 1 if quick else 3
    speeds = measure_llama_cpp(gguf_file, row_counts, new_tokens)
    settings = []
    parts: dict[str, dict[str, float]] = {}
    for precision in precisions:
        for way in ("full", "lora"):
            bench = ModelBench(folder, precision, way)
            bench.by_engine(2, 2)  # the first run is slower
            for rows in row_counts:
                row = measure(bench, rows, new_tokens, repeats)
                # llama.cpp runs the file's own weights.
                row["llama_cpp_tokens_per_s"] = speeds.get(rows) if way == "full" else None
                settings.append({"way": way, "precision": precision, **row})
                log(json.dumps(settings[-1]))
            parts[f"{precision} {way}"] = bench.parts(max(row_counts), new_tokens)
    result: dict[str, Any] = {"settings": settings, "parts": parts}

    # The figures that have a target: the worst setting of each size.
    for rows in row_counts:
        result[f"ratio_{rows}"] = min(row["ratio"] for row in settings if row["rows"] == rows)
    largest = [row for row in settings if row["rows"] == max(row_counts)]
    for precision in precisions:
        result[f"of_limit_{precision}"] = min(
            row["of_limit"] for row in largest if row["precision"] == precision
        )
    return result
