"""How the cost of the library's own work grows with rollouts, turns, prompts and cached replies;
and its start-up time.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.growth --json  # about 3 minutes, up to 4,096 rollouts, 1 M replies
    OMP_NUM_THREADS=1 python -m benchmarks.speed.growth --json --quick  # under 50 s

The policy and the environment answer at once, so that the time is the loop's own: contexts,
parsing, observations, bookkeeping. Growth is linear where the cost of one more rollout, or turn,
stays the same. Writes `growth.png` into `--output`. The last line of `--json` holds `rollouts,
turns, growth_rollouts, growth_turns, growth_memory, population_ms, population_worst_ms, lookup_ms,
opening_s, import_s, help_s`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentic_prompting.evolution import RULES, Population, SystemPrompt
from agentic_prompting.llm import ReplayCache
from agentic_prompting.llm.types import Reply
from agentic_prompting.rollout import (
    BatchEngine,
    ChatFormat,
    Limits,
    Observation,
    Rollout,
    RolloutFacts,
    Sample,
    SampleRequest,
    play_all,
    rollout_metrics,
    rollout_record,
)
from agentic_prompting.sandbox.policy import world_tokenizer

THOUGHT = "country " * 40
ASK = f"<think> {THOUGHT}</think> <interaction_prompt> which country ? </interaction_prompt>"
END = "<think> done </think> <answer> Kenya </answer>"
REPLY = "country " * 400  # about 2,048 characters
TOKENIZER = world_tokenizer()
FORMAT = ChatFormat(TOKENIZER)
ASK_IDS = FORMAT.turn_ids(ASK)
END_IDS = FORMAT.turn_ids(END)
OPENING = TOKENIZER.convert_tokens_to_ids("<interaction_response>")
POPULATION = 10_000


class AtOnce:
    """An environment without latency."""

    async def step(self, rollout: Rollout) -> Observation:
        return Observation(REPLY)


def policy(turns: int) -> Callable[[Sequence[SampleRequest]], list[Sample]]:
    """A sampler that asks until its last turn."""

    def sample(requests: Sequence[SampleRequest]) -> list[Sample]:
        samples = []
        for request in requests:
            is_last_turn = request.context.count(OPENING) == turns - 1
            samples.append(Sample(list(END_IDS if is_last_turn else ASK_IDS)))
        return samples

    return sample


def play(n: int, turns: int) -> list[str]:
    """The records of `n` rollouts of `turns` turns, made with the metrics as the trainer makes
    them.
    """
    prompt = FORMAT.prompt_ids([{"role": "user", "content": "question : which country ?"}])
    rollouts = [
        Rollout(list(prompt), row={"question": "which country ?", "answers": ["Kenya"]})
        for _ in range(n)
    ]
    limits = Limits(max_turns=turns, max_tokens=10**6)
    play_all(rollouts, BatchEngine(policy(turns)), AtOnce(), FORMAT, limits)
    assert all(len(rollout.turns) == turns and rollout.status == "answered" for rollout in rollouts)
    rollout_metrics([RolloutFacts.of(rollout) for rollout in rollouts])
    lines = []
    for rollout in rollouts:
        record = rollout_record(rollout, run=0, step=0, mode="train", rewards={})
        lines.append(json.dumps(record))
    return lines


def rollout_ms(n: int, turns: int, repeats: int) -> float:
    """Milliseconds of one rollout among `n`: the median of `repeats`."""
    times = []
    for _ in range(repeats):
        gc.collect()
        started = time.perf_counter()
        play(n, turns)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times) / n


def rollout_kb(n: int, turns: int) -> float:
    """Peak memory of one rollout among `n`, in kilobytes."""
    gc.collect()
    tracemalloc.start()
    play(n, turns)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / n / 1e3


def measure_rollouts(numbers: Sequence[int], turns: Sequence[int], repeats: int) -> dict[str, Any]:
    """Cost by number of rollouts (at 4 turns) and by turns (at 256 rollouts); growth is last over
    first, per unit.
    """
    play(64, 4)  # warms up
    by_number = {n: round(rollout_ms(n, 4, repeats), 3) for n in numbers}
    memory = {n: round(rollout_kb(n, 4), 1) for n in numbers}
    by_turns = {count: round(rollout_ms(256, count, repeats), 3) for count in turns}

    def further_turn_ms(start: int, end: int) -> float:
        return (by_turns[end] - by_turns[start]) / (end - start)

    first = numbers[0]
    last = numbers[-1]
    late_turn_ms = further_turn_ms(turns[-2], turns[-1])
    early_turn_ms = further_turn_ms(turns[0], turns[1])
    return {
        "rollouts": by_number,
        "memory_kb": memory,
        "turns": by_turns,
        "growth_rollouts": round(by_number[last] / by_number[first], 2),
        "growth_memory": round(memory[last] / memory[first], 2),
        "growth_turns": round(late_turn_ms / early_turn_ms, 2),
    }


def measure_population() -> dict[str, float]:
    """Milliseconds to select 3 of 10,000 candidates and rate them, by the default rule and by the
    slowest.
    """

    def step_ms(rule: str) -> float:
        population = Population(SystemPrompt("root"), POPULATION, rule, seed=0)
        for number in range(POPULATION - 1):
            population.add(SystemPrompt(f"prompt {number}", parents=(number,), operator="mutation"))
        times = []
        for step in range(50):
            started = time.perf_counter()
            chosen = population.select(3)
            population.record(chosen, [[0.1 * row, 0.5, (step + row) % 2] for row in range(3)])
            times.append(time.perf_counter() - started)
        return 1e3 * statistics.median(times)

    by_rule = {rule: step_ms(rule) for rule in RULES}
    return {
        "population_ms": round(by_rule["top_plus_random"], 2),
        "population_worst_ms": round(max(by_rule.values()), 2),
    }


def measure_cache(folder: Path, entries: int) -> dict[str, float]:
    """The seconds to open a cache of `entries` replies, and the milliseconds to look one up."""
    path = folder / "replies.sqlite"
    cache = ReplayCache(path)

    def key(number: int) -> Any:
        return cache.key("m", [{"role": "user", "content": f"question {number}"}], {}, repeat=0)

    # One transaction for all; otherwise each entry would wait for the disk.
    reply = Reply(text=REPLY[:200], finish_reason="stop")
    connection = cache._connected()
    connection.execute("BEGIN")
    for number in range(entries):
        cache.put(key(number), reply)
    connection.execute("COMMIT")
    cache.close()

    # Open it and look one up.
    opening = []
    for _ in range(5):
        started = time.perf_counter()
        cache = ReplayCache(path)
        cache.get(key(0))
        opening.append(time.perf_counter() - started)

    # Look many up, here and there.
    keys = [key(number * 7919 % entries) for number in range(2000)]
    started = time.perf_counter()
    hits = sum(cache.get(cache_key) is not None for cache_key in keys)
    seconds = time.perf_counter() - started
    assert hits == len(keys)
    return {
        "entries": entries,
        "lookup_ms": round(1e3 * seconds / len(keys), 4),
        "opening_s": round(statistics.median(opening), 4),
    }


def measure_start(repeats: int) -> dict[str, float]:
    """Median seconds of the import and of the command's `--help`, each in a fresh process."""
    code = (
        "import time; t = time.perf_counter(); import agentic_prompting; print(time.perf_counter() "
        "- t)"
    )
    imports = []
    for _ in range(repeats):
        command = [sys.executable, "-c", code]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        imports.append(float(finished.stdout))

    command = [str(Path(sys.executable).with_name("agentic-prompting")), "--help"]
    helps = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        helps.append(time.perf_counter() - started)
    return {
        "import_s": round(statistics.median(imports), 3),
        "help_s": round(statistics.median(helps), 3),
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the cost of a rollout against the number of rollouts, and against turns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(list(result["rollouts"]), list(result["rollouts"].values()), marker="o", label="ms")
    memory = [kb / 100 for kb in result["memory_kb"].values()]
    left.plot(list(result["memory_kb"]), memory, marker="s", label="100 kB")
    left.set(xscale="log", xlabel="rollouts of 4 turns", ylabel="for one rollout", ylim=(0, None))
    left.legend(frameon=False)
    right.plot(list(result["turns"]), list(result["turns"].values()), marker="o")
    right.set(xlabel="turns", ylabel="ms for one rollout of 256", ylim=(0, None))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rollouts and replies")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/growth"), help="where the picture goes"
    )
    arguments = parser.parse_args()
    numbers = (64, 256, 1024) if arguments.quick else (64, 256, 1024, 4096)
    result: dict[str, Any] = measure_rollouts(numbers, (1, 2, 4, 8), 1 if arguments.quick else 3)
    result |= measure_population()
    with tempfile.TemporaryDirectory() as folder:
        result |= measure_cache(Path(folder), 100_000 if arguments.quick else 1_000_000)
    result |= measure_start(3 if arguments.quick else 9)
    arguments.output.mkdir(parents=True, exist_ok=True)
    plot(result, arguments.output / "growth.png")
    print("| what | value |\n|---|---|")
    for name, value in result.items():
        print(f"| {name} | {value} |")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
