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
    Rollout,
    Sample,
    SampleRequest,
    play_all,
    rollout_seed,
    run_with_engine,
)
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.setup import SandboxRun, prepare_sandbox
from benchmarks.lab import markdown, model_folder, quiet
from benchmarks.speed import engine_model
from benchmarks.speed.model_tables import engine_table, parts_table

GREEDY = Sampling(temperature=0)
SEEDED = Sampling()
Played = list[list[int]]  # the sampled tokens of each rollout


class Bench:
    """A model, and the two ways to sample from it."""

    def __init__(self, sandbox: SandboxRun):
        self.model = AutoModelForCausalLM.from_pretrained(sandbox.model).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(sandbox.model)
        self.rows = list(sandbox.train)[:128]
        self.spec = sandbox.spec
        self.chat_format = ChatFormat(
            self.tokenizer, self.spec.grammar, self.spec.chat_template_kwargs
        )

    def engine(self, **options: Any) -> TransformersEngine:
        return TransformersEngine(self.model, self.tokenizer, on_callers_thread=True, **options)

    def batches(self, **options: Any) -> BatchEngine:
        sampler = TransformersSampler(self.model, self.tokenizer, **options)
        return BatchEngine(sampler, on_callers_thread=True)

    def demo(self, policy: Any) -> Played:
        """128 rollouts of the sandbox."""
        rollouts = []
        for number, row in enumerate(self.rows):
            prompt_ids = self.chat_format.prompt_ids(self.spec.messages(row))
            rollouts.append(Rollout(prompt_ids, row=row, seed=rollout_seed(7, number)))
        play_all(rollouts, policy, LLMEnvironment(Oracle()), self.chat_format, self.spec.limits)
        return [sampled_tokens(rollout) for rollout in rollouts]

    def turns(self, lengths: list[list[int]], reply: int = 1) -> Callable[[Any], Played]:
        """A function that plays conversations with turns of so many tokens and observations of `reply` tokens; no token
        ends a turn."""

        def draw_tokens(rng: random.Random, count: int) -> list[int]:
            return [rng.randrange(10, len(self.tokenizer)) for _ in range(count)]

        async def talk(policy: Any, number: int, turn_lengths: list[int]) -> list[int]:
            rng = random.Random(number)
            context = draw_tokens(rng, 30)
            sampled = []
            for turn, length in enumerate(turn_lengths):
                seed = 1000 * turn + number
                sample: Sample = await policy(SampleRequest(context, length, seed, number))
                sampled += sample.ids
                context = [*context, *sample.ids, *draw_tokens(rng, reply)]
            return sampled

        def play(policy: Any) -> Played:
            talks = [talk(policy, number, turns) for number, turns in enumerate(lengths)]
            return run_with_engine(policy, gather(talks))

        return play


def sampled_tokens(rollout: Rollout) -> list[int]:
    """The policy's own tokens, without those of observations."""
    tokens = zip(rollout.ids, rollout.mask, strict=True)
    return [token for token, is_sampled in tokens if is_sampled]


def compare(
    run: Callable[[Any], Played], ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int
) -> dict:
    """Tokens per second of both, measured alternately, and the share of rollouts with the same tokens."""
    policies = {"engine": ours, "batches": theirs}
    speeds: dict[str, list[float]] = {"engine": [], "batches": []}
    played: dict[str, Played] = {}
    for repeat in range(repeats + 1):  # the first repeat warms up
        for name, make in policies.items():
            policy = make()
            started = time.perf_counter()
            played[name] = run(policy)
            seconds = time.perf_counter() - started
            if repeat:
                speeds[name].append(sum(map(len, played[name])) / seconds)
    ratios = [a / b for a, b in zip(speeds["engine"], speeds["batches"], strict=True)]
    same = [a == b for a, b in zip(played["engine"], played["batches"], strict=True)]
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
    without_cache = 0.0
    with_cache = 1024.0
    ratios = []
    tokens_read = {}
    for _ in range(repeats):
        seconds = {}
        played = {}
        for cache_mb in (without_cache, with_cache):
            engine = bench.engine(
                sampling=GREEDY, end_of_turn_ids=[10**9], prefix_cache_mb=cache_mb
            )
            started = time.perf_counter()
            played[cache_mb] = run(engine)
            seconds[cache_mb] = time.perf_counter() - started
            tokens_read[cache_mb] = engine.stats["read"]
        assert played[without_cache] == played[with_cache]
        ratios.append(seconds[without_cache] / seconds[with_cache])
    read_ratio = tokens_read[without_cache] / tokens_read[with_cache]
    return round(statistics.median(ratios), 2), round(read_ratio, 2)


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


def compare_settings(bench: Bench, tokens: int, repeats: int) -> dict[str, dict]:
    """A row for each setting and way of sampling, with turns of about so many tokens."""
    rng = random.Random(0)

    def draw_length() -> int:
        return min(4 * tokens, max(4, int(tokens * rng.lognormvariate(0, 0.8))))

    uniform = [[tokens]] * 64
    mixed = [[draw_length(), draw_length()] for _ in range(64)]
    rows = {}
    for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
        until_stop = {"sampling": sampling, "stop_texts": bench.spec.stop_texts}
        endless = {"sampling": sampling, "end_of_turn_ids": [10**9]}
        settings: dict[str, tuple[Callable, dict]] = {
            "demo": (bench.demo, until_stop),
            "uniform": (bench.turns(uniform), endless),
            "mixed": (bench.turns(mixed), endless),
        }
        for setting, (run, options) in settings.items():
            ours = partial(bench.engine, **options)
            theirs = partial(bench.batches, **options)
            rows[f"{setting} {name}"] = compare(run, ours, theirs, repeats)
    return rows


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
    repeats = 2 if arguments.quick else 3
    with tempfile.TemporaryDirectory() as folder:
        warm_start_steps = 60 if arguments.quick else 250
        bench = Bench(prepare_sandbox(folder, warm_start_steps=warm_start_steps))
        settings = compare_settings(bench, 40 if arguments.quick else 80, repeats)
        cache_wall_ratio, cache_read_ratio = prefix(bench, repeats)
    titles = ("setting", "engine, tokens/s", "batches, tokens/s", "ratio", "identical")
    print(markdown(titles, [[name, *row.values()] for name, row in settings.items()]))
    print(
        f"\nkeys and values kept between turns: {cache_wall_ratio:.2f} x as fast, "
        f"{cache_read_ratio:.2f} x fewer tokens read"
    )
    if arguments.json:
        identical: dict[str, list[float]] = {"greedy": [], "seeded": []}
        for name, row in settings.items():
            identical[name.split()[1]].append(row["identical"])
        result = {
            "demo_speedup": settings["demo seeded"]["speedup"],
            "uniform_speedup": settings["uniform seeded"]["speedup"],
            "mixed_speedup": settings["mixed seeded"]["speedup"],
            "identical_greedy": min(identical["greedy"]),
            "identical_share": min(identical["seeded"]),
            "prefix_wall_ratio": cache_wall_ratio,
            "prefix_read_ratio": cache_read_ratio,
            "settings": settings,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
