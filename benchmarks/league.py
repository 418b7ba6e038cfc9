"""E-SPL and what else the same rollouts and calls buy, in three worlds, on unseen countries: see docs/evidence.md.

    python benchmarks/league.py --json            # hours: three worlds, five reported seeds
    python benchmarks/league.py --json --quick    # ten minutes: one world, two of the seeds for tuning, fewer steps

Writes a record for each world, seed and method to `--records`, from which `benchmarks/recompute.py` makes every figure;
what is recorded already is not run again. Two workers of one thread each.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[1]
RECORDS = REPOSITORY / "records" / "league.jsonl.gz"
CONFIG = REPOSITORY / "examples" / "configs" / "espl" / "sandbox.yaml"
WORLDS, SEEDS, TUNING_SEEDS = ("rules", "habits", "misleading"), (501, 502, 503, 504, 505), (1, 2, 3)
STEPS, QUICK_STEPS, MAX_CALLS, TEMPERATURE = 30, 6, 3000, 0.7

# Phases: the trainer's mode, its share of the steps, and what differs from the configuration file.
METHODS: dict[str, list[tuple[str, float, dict[str, Any]]]] = {
    "joint": [("joint", 1.0, {})],
    "joint, mutation only": [("joint", 1.0, {"p_crossover": 0.0})],
    "rl": [("rl", 1.0, {})],
    "evolution": [("evolution", 1.0, {})],
    "reflection": [("reflection", 1.0, {})],
    "prompts, then weights": [("evolution", 0.5, {}), ("rl", 0.5, {})],
    "weights, then prompts": [("rl", 0.5, {}), ("evolution", 0.5, {})],
    "alternating": [("rl", 0.25, {}), ("evolution", 0.25, {})] * 2,
}
MISSING = ("GEPA, then GRPO", "GRPO, then GEPA", "joint, then distillation")  # of the protocol's methods
QUICK = ("joint", "rl", "evolution")


# --- pure: records and what they say ------------------------------------------------------------------------------


def t_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and 95 % interval of Student's t; of one value there is no interval."""
    from scipy.stats import t

    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": round(mean, 4), "low": None, "high": None}
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4)}


def share(correct: str) -> float:
    """Of `"0110"`, .5."""
    return correct.count("1") / len(correct)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records in a file, none if there is no file."""
    if not path.exists():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per world and method: exact match, the difference from `joint` paired by seed, means of rollouts and calls."""
    scores: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for record in records:
        scores.setdefault(record["world"], {}).setdefault(record["method"], {})[record["seed"]] = record
    return {
        world: {method: _row(of_seed, methods.get("joint", {})) for method, of_seed in methods.items()}
        for world, methods in scores.items()
    }


def _row(of_seed: Mapping[int, Mapping[str, Any]], joint: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    share = {seed: record["correct"].count("1") / len(record["correct"]) for seed, record in of_seed.items()}
    pairs = [
        share[seed] - joint[seed]["correct"].count("1") / len(joint[seed]["correct"]) for seed in share if seed in joint
    ]
    return {
        **t_interval(list(share.values())),
        "minus_joint": t_interval(pairs) if pairs else None,
        "seeds": sorted(share),
        "rollouts": round(statistics.fmean(record["rollouts"] for record in of_seed.values())),
        "calls": round(statistics.fmean(record["calls"] for record in of_seed.values())),
    }


def table(worlds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The worlds as a Markdown table."""
    lines = [
        "| world | method | exact match [95 %] | minus joint [95 %] | rollouts | calls |",
        "|---|---|---|---|---|---|",
    ]
    for world, methods in worlds.items():
        for method, row in methods.items():
            cells = [
                world,
                method,
                shown(row),
                shown(row["minus_joint"], "+"),
                f"{row['rollouts']:,}",
                f"{row['calls']:,}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines += [f"| {world} | {method} | not run | | | |" for method in (*METHODS, *MISSING) if method not in methods]
    return "\n".join(lines)


def shown(row: Mapping[str, Any] | None, sign: str = "") -> str:
    """A mean with its interval."""
    if row is None:
        return ""
    ends = "one seed" if row["low"] is None else f"{row['low']:{sign}.3f}, {row['high']:{sign}.3f}"
    return f"{row['mean']:{sign}.3f} [{ends}]"


def protocol_first(commits: Iterable[str]) -> bool:
    """Whether the protocol was committed before everything that these commits ran."""
    added = git("log", "--format=%H", "--diff-filter=A", "--", "docs/evidence.md").split()
    return bool(added) and all(
        subprocess.run(["git", "merge-base", "--is-ancestor", added[-1], commit], cwd=REPOSITORY).returncode == 0
        for commit in set(commits)
    )


def git(*arguments: str) -> str:
    """What git prints about this repository."""
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()


# --- one method in one world on one seed --------------------------------------------------------------------------


class Counted:
    """A [`ChatModel`] that counts its calls and refuses those beyond its budget."""

    def __init__(self, chat: Any, most: int):
        self.chat, self.most, self.calls = chat, most, 0

    async def __call__(self, messages: Any, **options: Any) -> Any:
        from agentic_prompting.llm import BudgetExceeded, Reply

        self.calls += 1
        if self.calls > self.most:
            return Reply(error=BudgetExceeded(f"{self.most} calls are what every method gets"))
        return await self.chat(messages, **options)


def prepare(world: str, seed: int, folder: Path) -> Any:
    """The sandbox with its warm start, quietly."""
    import datasets
    import transformers

    from agentic_prompting.sandbox.setup import prepare_guarded

    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    with redirect_stdout(io.StringIO()):
        return prepare_guarded(folder / world / str(seed), seed, world=world)


def run(world: str, seed: int, method: str, folder: Path, steps: int) -> dict[str, Any]:
    """Train a method and ask it the held-out questions."""
    from agentic_prompting import ESPLConfig, ESPLTrainer, LLMEnvironment, PromptR1Reward
    from agentic_prompting.sandbox import GuardedReflector

    started, sandbox = time.perf_counter(), prepare(world, seed, folder)
    model, prompt, rollouts = Path(sandbox.model), sandbox.root, 0
    reflector = Counted(GuardedReflector(sandbox.mistakes, seed), MAX_CALLS)
    shared = {key: value for key, value in yaml.safe_load(CONFIG.read_text()).items() if key != "task"}
    for number, (mode, portion, changes) in enumerate(METHODS[method]):
        output = folder / world / str(seed) / f"{method.replace(', ', '-').replace(' ', '-')}-{number}"
        values = {"mode": mode, "max_steps": max(1, round(steps * portion)), "seed": seed, **changes}
        values |= {"output_dir": str(output), "disable_tqdm": True, "rollouts_max_mb": 0}
        args = ESPLConfig(**{**shared, **values})
        trainer = ESPLTrainer(
            str(model),
            PromptR1Reward(),
            args,
            sandbox.train,
            reference=reflector if args.evolves else None,
            initial_prompt=prompt,
            environment=LLMEnvironment(sandbox.oracle),
            prompt_template=sandbox.spec.prompt_template,
        )
        with redirect_stdout(io.StringIO()):
            trainer.train()
        trainer.save_model(str(output))
        model, prompt = output, trainer.population.best()
        rollouts += args.max_steps * args.generation_batch_size
    return {
        **{"world": world, "seed": seed, "method": method, "commit": git("rev-parse", "HEAD")},
        **{"correct": answers(sandbox, model, prompt), "rollouts": rollouts, "calls": min(reflector.calls, MAX_CALLS)},
        **{"steps": steps, "prompt": prompt.text, "seconds": round(time.perf_counter() - started)},
    }


def answers(sandbox: Any, model: Path, prompt: Any) -> str:
    """Right or wrong, `1` or `0`, for each held-out question, sampled at the temperature that all methods get."""
    from agentic_prompting import AgentSpec, LLMEnvironment, PromptAgent, exact_match

    spec = replace(AgentSpec.load(model), system_prompt=prompt.text, sampling={"temperature": TEMPERATURE})
    agent = PromptAgent.from_pretrained(model, LLMEnvironment(sandbox.oracle), spec, max_batch_size=256)
    rollouts = agent.answer_all(list(sandbox.test), progress=False)
    return "".join(str(int(exact_match(rollout.answer or "", rollout.row["answers"]))) for rollout in rollouts)


# --- the script ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="The league table of docs/evidence.md.")
    parser.add_argument("--quick", action="store_true", help="one world, two seeds that are not reported, fewer steps")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS)
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS}")
    parser.add_argument("--folder", type=Path, default=Path("runs/league"), help="models")
    parser.add_argument("--records", type=Path, help="default: records/league.jsonl.gz; with --quick in the folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    records = options.records or (
        options.folder / "quick.jsonl.gz" if options.quick else REPOSITORY / "records/league.jsonl.gz"
    )
    worlds = options.worlds or (WORLDS[:1] if options.quick else WORLDS)
    seeds = options.seeds or (TUNING_SEEDS[:2] if options.quick else SEEDS)
    methods = options.methods or (QUICK if options.quick else tuple(METHODS))
    steps, started = QUICK_STEPS if options.quick else STEPS, time.perf_counter()
    records.parent.mkdir(parents=True, exist_ok=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    known = {(one["world"], one["seed"], one["method"]) for one in read_records(records)}
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the children as they start
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        places = [(world, seed) for world in worlds for seed in seeds]
        list(pool.map(prepare, *zip(*places, strict=True), [options.folder] * len(places)))
        jobs = [
            pool.submit(run, world, seed, method, options.folder, steps)
            for world, seed in places
            for method in methods
            if (world, seed, method) not in known
        ]
        for job in jobs:
            with gzip.open(records, "at", encoding="utf-8") as file:
                file.write(json.dumps(job.result()) + "\n")
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from leaks import leaks

    found = read_records(records)
    result = {
        "worlds": summarise(found),
        "leaks": sum(len(leaks(name, seed)) for name in ("prompt-r1", *worlds) for seed in seeds),
        "protocol_first": protocol_first(one["commit"] for one in found),
        "missing": list(MISSING),
        "seconds": round(time.perf_counter() - started),
    }
    print(table(result["worlds"]))
    print(f"leaks: {result['leaks']}, protocol first: {result['protocol_first']}, {result['seconds']} s")
    if options.json:
        print(json.dumps({"sandbox": True, "quick": options.quick, **result}))


if __name__ == "__main__":
    main()
