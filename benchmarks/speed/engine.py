"""Continuous batching against whole batches: tokens per second of the policy in this process, with
outputs compared.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.engine --json  # about 3 minutes on a CPU
    OMP_NUM_THREADS=1 python -m benchmarks.speed.engine --json --quick  # about 2 minutes
    OMP_NUM_THREADS=1 python -m benchmarks.speed.engine --model smollm2 --json  # a real model (`engine_model.py`)

Three settings. Each runs alternately with [`TransformersEngine`] and with [`TransformersSampler`]
in a [`BatchEngine`]. In the latter all waiting requests form the next batch, and a batch takes as
long as its longest turn.

- `demo`: 128 rollouts of the sandbox, its warm-started policy, its oracle without latency; the stop
  texts of the demo.
- `uniform`: 64 rows of equally many tokens without an end: the engine can gain nothing, and must
  lose little.
- `mixed`: 64 rows whose lengths are log-normal (sigma 0.8), two turns each: finished rows leave the
  batch.

`prefix_wall_ratio` and `prefix_read_ratio` compare the engine with and without its cache between
turns.

The last line of `--json` holds `demo_speedup, uniform_speedup, mixed_speedup, identical_greedy`
(share of rollouts with the same tokens at temperature 0) and `identical_share` (the same for seeded
draws; they may differ at ties only).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
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
    Policy,
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
NEVER_SAMPLED = 10**9  # as the only token that ends a turn, it lets each turn reach its limit
SampledTokens = list[list[int]]  # of each rollout


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
        sampler = TransformersSampler(self.model, self.tokenizer, **options)
        return BatchEngine(sampler, on_callers_thread=True)

    def demo(self, policy: Policy) -> SampledTokens:
        """128 rollouts of the sandbox."""
        rollouts = []
        for number, row in enumerate(self.rows):
            prompt_ids = self.chat_format.prompt_ids(self.spec.messages(row))
            rollouts.append(Rollout(prompt_ids, row=row, seed=rollout_seed(7, number)))
        play_all(rollouts, policy, LLMEnvironment(Oracle()), self.chat_format, self.spec.limits)
        return [sampled_ids(rollout) for rollout in rollouts]

    def turns(self, lengths: list[list[int]], reply: int = 1) -> Callable[[Policy], SampledTokens]:
        """A function that plays conversations with turns of so many tokens and observations of
        `reply` tokens; no token ends a turn.
        """

        async def talk(policy: Policy, number: int, turn_lengths: list[int]) -> list[int]:
            rng = random.Random(number)

            def draw_tokens(count: int) -> list[int]:
                return [rng.randrange(10, len(self.tokenizer)) for _ in range(count)]

            sampled: list[int] = []
            context = draw_tokens(30)
            for turn, length in enumerate(turn_lengths):
                request = SampleRequest(context, length, 1000 * turn + number, number)
                sample: Sample = await policy(request)
                sampled += sample.ids
                context = [*context, *sample.ids, *draw_tokens(reply)]
            return sampled

        def play(policy: Policy) -> SampledTokens:
            conversations = (
                talk(policy, number, turn_lengths) for number, turn_lengths in enumerate(lengths)
            )
            return run_with_engine(policy, gather(conversations))

        return play


def sampled_ids(rollout: Rollout) -> list[int]:
    """The tokens that the agent wrote."""
    tokens = zip(rollout.ids, rollout.mask, strict=True)
    return [token for token, is_sampled in tokens if is_sampled]


def mixed_lengths(tokens: int) -> list[list[int]]:
    """The lengths of two turns of 64 rows: log-normal around `tokens`, the same every time."""
    rng = random.Random(0)

    def draw_length() -> int:
        return min(4 * tokens, max(4, int(tokens * rng.lognormvariate(0, 0.8))))

    return [[draw_length(), draw_length()] for _ in range(64)]


def compare(
    play: Callable[[Policy], SampledTokens],
    make_engine: Callable[[], TransformersEngine],
    make_batches: Callable[[], BatchEngine],
    repeats: int,
) -> dict[str, float]:
    """Tokens per second of both, measured alternately, and the share of rollouts with the same
    tokens.
    """
    speeds: dict[str, list[float]] = {"engine": [], "batches": []}
    sampled: dict[str, SampledTokens] = {}
    for repeat in range(repeats + 1):  # the first repeat warms up
        for name, make_policy in (("engine", make_engine), ("batches", make_batches)):
            policy = make_policy()
            started = time.perf_counter()
            sampled[name] = play(policy)
            if repeat:
                token_count = sum(map(len, sampled[name]))
                speeds[name].append(token_count / (time.perf_counter() - started))
    pairs = zip(speeds["engine"], speeds["batches"], strict=True)
    ratios = [engine_speed / batches_speed for engine_speed, batches_speed in pairs]
    rollouts = zip(sampled["engine"], sampled["batches"], strict=True)
    same = [engine_ids == batches_ids for engine_ids, batches_ids in rollouts]
    return {
        "engine_tokens_per_s": round(statistics.median(speeds["engine"])),
        "batches_tokens_per_s": round(statistics.median(speeds["batches"])),
        "speedup": round(statistics.median(ratios), 2),
        "identical": round(sum(same) / len(same), 4),
    }


def compare_prefix(bench: Bench, repeats: int) -> dict[str, float]:
    """Five turns of 20 tokens, observations of 150: the ratio of the engine without a cache between
    turns to the one with it, in seconds (`wall_ratio`) and in tokens of contexts read
    (`read_ratio`).
    """
    play = bench.turns([[20] * 5] * 16, reply=150)
    cache_sizes = (0.0, 1024.0)
    ratios = []
    read: dict[float, int] = {}
    for _ in range(repeats):
        seconds: dict[float, float] = {}
        sampled: dict[float, SampledTokens] = {}
        for cache_mb in cache_sizes:
            engine = bench.engine(
                sampling=GREEDY, end_of_turn_ids=[NEVER_SAMPLED], prefix_cache_mb=cache_mb
            )
            started = time.perf_counter()
            sampled[cache_mb] = play(engine)
            seconds[cache_mb] = time.perf_counter() - started
            read[cache_mb] = engine.stats["read"]
        assert sampled[0.0] == sampled[1024.0]
        ratios.append(seconds[0.0] / seconds[1024.0])
    return {
        "wall_ratio": round(statistics.median(ratios), 2),
        "read_ratio": round(read[0.0] / read[1024.0], 2),
    }


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


def measure_sandbox(arguments: argparse.Namespace) -> None:
    """Print the table of the sandbox's small policy."""
    tokens = 40 if arguments.quick else 80
    repeats = 2 if arguments.quick else 3
    warm_start_steps = 60 if arguments.quick else 250
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(prepare_sandbox(folder, warm_start_steps=warm_start_steps))
        rows: dict[str, dict[str, float]] = {}
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            stops: dict[str, Any] = {"sampling": sampling, "stop_texts": bench.spec.stop_texts}
            endless: dict[str, Any] = {"sampling": sampling, "end_of_turn_ids": [NEVER_SAMPLED]}
            settings = {
                "demo": (bench.demo, stops),
                "uniform": (bench.turns([[tokens]] * 64), endless),
                "mixed": (bench.turns(mixed_lengths(tokens)), endless),
            }
            for setting, (play, options) in settings.items():
                rows[f"{setting} {name}"] = compare(
                    play,
                    partial(bench.engine, **options),
                    partial(bench.batches, **options),
                    repeats,
                )
        prefix = compare_prefix(bench, repeats)

    print(
        "| setting | engine, tokens/s | batches, tokens/s | ratio | identical "
        "|\n|---|---|---|---|---|"
    )
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(map(str, row.values())) + " |")
    print(
        f"\nkeys and values kept between turns: {prefix['wall_ratio']:.2f} x as fast, "
        f"{prefix['read_ratio']:.2f} x fewer tokens read"
    )
    if arguments.json:
        print(json.dumps(figures_of(rows, prefix)))


def figures_of(rows: dict[str, dict[str, float]], prefix: dict[str, float]) -> dict[str, Any]:
    """The figures of the last line."""
    figures: dict[str, Any] = {}
    for setting in ("demo", "uniform", "mixed"):
        figures[f"{setting}_speedup"] = rows[f"{setting} seeded"]["speedup"]
    for name, key in (("greedy", "identical_greedy"), ("seeded", "identical_share")):
        figures[key] = min(row["identical"] for title, row in rows.items() if title.endswith(name))
    figures["prefix_wall_ratio"] = prefix["wall_ratio"]
    figures["prefix_read_ratio"] = prefix["read_ratio"]
    figures["settings"] = rows
    return figures


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
    measure_sandbox(arguments)


if __name__ == "__main__":
    main()
