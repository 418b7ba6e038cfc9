"""Continuous batching against whole batches: tokens per second of the policy in this process, with outputs compared.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.engine --json  # about 3 minutes on a CPU
    OMP_NUM_THREADS=1 python -m benchmarks.speed.engine --json --quick  # about 2 minutes
    OMP_NUM_THREADS=1 python -m benchmarks.speed.engine --model smollm2 --json  # a real model (`engine_model.py`)

Three settings. Each runs alternately with [`TransformersEngine`] and with [`TransformersSampler`] in a [`BatchEngine`].
In the latter all waiting requests form the next batch, and a batch takes as long as its longest turn.

- `demo`: 128 rollouts of the sandbox, its warm-started policy, its oracle without latency; the stop texts of the demo.
- `uniform`: 64 rows of equally many tokens without an end: the engine can gain nothing, and must lose little.
- `mixed`: 64 rows whose lengths are log-normal (sigma 0.8), two turns each: finished rows leave the batch.

`prefix_wall_ratio` and `prefix_read_ratio` compare the engine with and without its cache between turns.

The last line of `--json` holds `demo_speedup, uniform_speedup, mixed_speedup, identical_greedy` (share of rollouts with
the same tokens at temperature 0) and `identical_share` (the same for seeded draws; they may differ at ties only).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting import LLMEnvironment
from agentic_prompting.llm import gather
from agentic_prompting.local import Sampling, TransformersEngine, TransformersSampler
from agentic_prompting.local.small_model import packaged_file
from agentic_prompting.rollout import (
    BatchEngine,
    ChatFormat,
    Rollout,
    Sample,
    SampleRequest,
    play_all,
    rollout_seed,
    run_with_engine,
)
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.setup import SandboxRun, prepare_sandbox
from benchmarks.lab import model_folder, quiet
from benchmarks.speed import engine_model
from benchmarks.speed.model_tables import engine_table, parts_table

GREEDY = Sampling(temperature=0)
SEEDED = Sampling()
Played = list[list[int]]


class Bench:
    """A model, and the two ways to sample from it."""

    def __init__(self, sandbox: SandboxRun):
        self.model = AutoModelForCausalLM.from_pretrained(sandbox.model).eval()
        self.rows = list(sandbox.train)[:128]
        self.tokenizer = AutoTokenizer.from_pretrained(sandbox.model)
        self.spec = sandbox.spec
        self.chat_format = ChatFormat(
            self.tokenizer, self.spec.grammar, self.spec.chat_template_kwargs
        )

    def engine(self, **options: Any) -> TransformersEngine:
        return TransformersEngine(self.model, self.tokenizer, on_callers_thread=True, **options)

    def batches(self, **options: Any) -> BatchEngine:
        return BatchEngine(
            TransformersSampler(self.model, self.tokenizer, **options), on_callers_thread=True
        )

    def demo(self, policy: Any) -> Played:
        """128 rollouts of the sandbox."""
        rollouts = [
            Rollout(
                self.chat_format.prompt_ids(self.spec.messages(row)),
                row=row,
                seed=rollout_seed(7, i),
            )
            for i, row in enumerate(self.rows)
        ]
        play_all(rollouts, policy, LLMEnvironment(Oracle()), self.chat_format, self.spec.limits)
        return [[token for token, own in zip(r.ids, r.mask, strict=True) if own] for r in rollouts]

    def turns(self, lengths: list[list[int]], reply: int = 1) -> Callable[[Any], Played]:
        """A function that plays conversations with turns of so many tokens and observations of `reply` tokens; no token
        ends a turn."""

        async def talk(policy: Any, number: int, turns: list[int]) -> list[int]:
            rng = random.Random(number)
            said = []
            context = [rng.randrange(10, len(self.tokenizer)) for _ in range(30)]
            for turn, length in enumerate(turns):
                sample: Sample = await policy(
                    SampleRequest(context, length, 1000 * turn + number, number)
                )
                said += sample.ids
                context = [
                    *context,
                    *sample.ids,
                    *(rng.randrange(10, len(self.tokenizer)) for _ in range(reply)),
                ]
            return said

        return lambda policy: run_with_engine(
            policy, gather(talk(policy, n, turns) for n, turns in enumerate(lengths))
        )


def compare(
    run: Callable[[Any], Played], ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int
) -> dict:
    """Tokens per second of both, measured alternately, and the share of rollouts with the same tokens."""
    speeds: dict[str, list[float]] = {"engine": [], "batches": []}
    said: dict[str, Played] = {}
    for repeat in range(repeats + 1):  # the first repeat warms up
        for name, make in (("engine", ours), ("batches", theirs)):
            policy = make()
            started = time.perf_counter()
            said[name] = run(policy)
            if repeat:
                speeds[name].append(sum(map(len, said[name])) / (time.perf_counter() - started))
    ratios = [a / b for a, b in zip(speeds["engine"], speeds["batches"], strict=True)]
    same = [a == b for a, b in zip(said["engine"], said["batches"], strict=True)]
    return {
        "engine_tokens_per_s": round(statistics.median(speeds["engine"])),
        "batches_tokens_per_s": round(statistics.median(speeds["batches"])),
        "speedup": round(statistics.median(ratios), 2),
        "identical": round(sum(same) / len(same), 4),
    }


def prefix(bench: Bench, repeats: int) -> tuple[float, float]:
    """Five turns of 20 tokens, observations of 150: the ratio of the engine without a cache between turns to the one
    with it, in seconds and in tokens of contexts read."""
    run = bench.turns([[20] * 5] * 16, reply=150)
    ratios = []
    read = {0.0: 0, 1024.0: 0}
    for _ in range(repeats):
        seconds = {}
        said = {}
        for kept_mb in read:
            engine = bench.engine(sampling=GREEDY, end_of_turn_ids=[10**9], prefix_cache_mb=kept_mb)
            started = time.perf_counter()
            said[kept_mb] = run(engine)
            seconds[kept_mb] = time.perf_counter() - started
            read[kept_mb] = engine.stats["read"]
        assert said[0.0] == said[1024.0]
        ratios.append(seconds[0.0] / seconds[1024.0])
    return round(statistics.median(ratios), 2), round(read[0.0] / read[1024.0], 2)


def measure_real_model(arguments: argparse.Namespace) -> None:
    """Print the tables of a real model."""
    quiet()
    gguf_file = arguments.gguf
    if gguf_file is None and arguments.model == "smollm2":
        gguf_file = packaged_file()
    result = engine_model.measure_model(
        model_folder(arguments.model),
        gguf_file,
        arguments.quick,
        arguments.rows,
        arguments.precisions or engine_model.native_precisions(),
    )
    print(engine_table(result["settings"]))
    print(parts_table(result["parts"]))
    if arguments.json:
        print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one repeat, shorter turns, a policy without warm start",
    )
    parser.add_argument("--model", help="measure a real model instead: smollm2, a folder, a name")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32], help="with --model")
    parser.add_argument(
        "--precisions",
        nargs="+",
        help="with --model: float32, bfloat16; those of the processor by default",
    )
    parser.add_argument("--gguf", type=Path, help="with --model: the file for llama.cpp")
    arguments = parser.parse_args()
    if arguments.model:
        measure_real_model(arguments)
        return
    rng = random.Random(0)
    tokens = 40 if arguments.quick else 80
    mixed = [
        [min(4 * tokens, max(4, int(tokens * rng.lognormvariate(0, 0.8)))) for _ in range(2)]
        for _ in range(64)
    ]
    endless = {"end_of_turn_ids": [10**9]}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(prepare_sandbox(folder, warm_start_steps=60 if arguments.quick else 250))
        rows = {}
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            stops = {"sampling": sampling, "stop_texts": bench.spec.stop_texts}
            settings: dict[str, tuple[Callable, dict]] = {
                "demo": (bench.demo, stops),
                "uniform": (bench.turns([[tokens]] * 64), {"sampling": sampling, **endless}),
                "mixed": (bench.turns(mixed), {"sampling": sampling, **endless}),
            }
            for setting, (run, options) in settings.items():
                rows[f"{setting} {name}"] = compare(
                    run,
                    lambda options=options: bench.engine(**options),
                    lambda options=options: bench.batches(**options),
                    2 if arguments.quick else 3,
                )
        kept, read = prefix(bench, 2 if arguments.quick else 3)
    print(
        "| setting | engine, tokens/s | batches, tokens/s | ratio | identical |\n|---|---|---|---|---|"
    )
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(map(str, row.values())) + " |")
    print(
        f"\nkeys and values kept between turns: {kept:.2f} x as fast, {read:.2f} x fewer tokens read"
    )
    if arguments.json:
        result = {
            f"{setting}_speedup": rows[f"{setting} seeded"]["speedup"]
            for setting in ("demo", "uniform", "mixed")
        }
        result["identical_greedy"] = min(
            row["identical"] for name, row in rows.items() if name.endswith("greedy")
        )
        result["identical_share"] = min(
            row["identical"] for name, row in rows.items() if name.endswith("seeded")
        )
        print(
            json.dumps(
                result | {"prefix_wall_ratio": kept, "prefix_read_ratio": read, "settings": rows}
            )
        )


if __name__ == "__main__":
    main()
