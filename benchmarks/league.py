"""E-SPL against other uses of the same rollouts and calls, in three worlds, on unseen countries: see docs/evidence.md.

    python benchmarks/league.py --json            # hours: three worlds, five reported seeds
    python benchmarks/league.py --json --quick    # ten minutes: one world, two of the seeds for tuning, fewer steps

Appends a record for each world, seed and method to `--records`, from which `benchmarks/recompute.py` makes every
figure. Combinations that are recorded are not run again: the same command goes on where it was stopped. All methods of
a seed come before the next seed, all seeds of a world before the next world.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab import (
    ESPL,
    RECORDS as RECORDED,
    REPOSITORY,
    Records,
    ask,
    correct,
    git,
    interval,
    log,
    markdown,
    quiet,
    settings,
    share,
    shown,
    train,
)

RECORDS = RECORDED / "league.jsonl.gz"
WARM_STARTS = REPOSITORY / "runs" / "warm_starts"  # each in a folder named after the fingerprint of its recipe
WORLDS, SEEDS, TUNING_SEEDS = ("rules", "habits", "misleading"), (501, 502, 503, 504, 505), (1, 2, 3)
STEPS, QUICK_STEPS, MAX_CALLS, TEMPERATURE = 30, 6, 3000, 0.7

# Phases: a mode of the trainer, `gepa` or `distill`; its share of the rollouts; options that differ from the file's.
METHODS: dict[str, list[tuple[str, float, dict[str, Any]]]] = {
    "joint": [("joint", 1.0, {})],
    "rl": [("rl", 1.0, {})],
    "evolution": [("evolution", 1.0, {})],
    "GEPA, then GRPO": [("gepa", 0.5, {}), ("rl", 0.5, {})],
    "warm start": [],  # its first prompt, without further training
    "GRPO, then GEPA": [("rl", 0.5, {}), ("gepa", 0.5, {})],
    "alternating": [("alternating", 1.0, {"phase_steps": 5})],
    "joint, then distillation": [("joint", 0.5, {}), ("distill", 0.5, {})],
    "joint, mutation only": [("joint", 1.0, {"p_crossover": 0.0})],
    "reflection": [("reflection", 1.0, {})],
}
CORE = tuple(METHODS)[:5]  # in the worlds after the first
QUICK = ("joint", "rl", "evolution")
GEPA_VALIDATION, DISTILLATION_EPOCHS = 64, 3

# The outcomes that the protocol counts against us: the world, the outcome, and the test on differences from `joint`.
AGAINST: list[tuple[str, str, tuple[str, ...], Callable[[Mapping[str, float]], bool]]] = [
    ("rules", "joint training is not above RL and evolution alone", ("rl", "evolution"), lambda row: row["high"] >= 0),
    (
        "rules",
        "GEPA and then GRPO, or phases in turn, are as good",
        ("GEPA, then GRPO", "alternating"),
        lambda row: row["high"] >= 0,
    ),
    ("habits", "joint training is more than .05 below RL", ("rl",), lambda row: row["mean"] > 0.05),
    ("misleading", "joint training ends below its warm start", ("warm start",), lambda row: row["mean"] > 0),
    ("rules", "without crossover it is as good", ("joint, mutation only",), lambda row: row["high"] >= 0),
]


# --- pure: records and what they say ------------------------------------------------------------------------------


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Exact match, difference from `joint` paired by seed, and mean rollouts and calls of each world and method."""
    scores: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for record in records:
        scores.setdefault(record["world"], {}).setdefault(record["method"], {})[record["seed"]] = record
    return {
        world: {method: _row(of_seed, methods.get("joint", {})) for method, of_seed in methods.items()}
        for world, methods in scores.items()
    }


def _row(of_seed: Mapping[int, Mapping[str, Any]], joint: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    shares = {seed: share(record["correct"]) for seed, record in of_seed.items()}
    pairs = [value - share(joint[seed]["correct"]) for seed, value in shares.items() if seed in joint]
    return {
        **interval(list(shares.values())),
        "minus_joint": interval(pairs) if pairs else None,
        "seeds": sorted(shares),
        "rollouts": round(statistics.fmean(record["rollouts"] for record in of_seed.values())),
        "calls": round(statistics.fmean(record["calls"] for record in of_seed.values())),
    }


def table(worlds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The worlds as a Markdown table."""
    rows = []
    for world, methods in worlds.items():
        for method in sorted(methods, key=list(METHODS).index):
            row = methods[method]
            spent = [f"{row[what]:,}" for what in ("rollouts", "calls")]
            rows.append([world, method, shown(row), shown(row["minus_joint"], "+"), *spent])
        rows += [[world, method, "not run", *[""] * 3] for method in missing(world, methods)]
    return markdown(
        ("world", "method", "exact match [95 %]", "minus joint [95 %]", "rollouts", "calls"),
        rows,
    )


def verdicts(worlds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The place of joint training in each world, and whether the outcomes of `AGAINST` came true."""
    lines = []
    for world, methods in worlds.items():
        order = sorted(methods, key=lambda method: -methods[method]["mean"])
        if "joint" in methods:
            place = order.index("joint") + 1
            other = f"not first but number {place} of {len(order)}; first is {order[0]}"
            lines.append(f"- *{world}*: joint training is {other if place > 1 else f'first of {len(order)}'}.")
    for world, what, others, counts in AGAINST:
        rows = {other: worlds.get(world, {}).get(other) for other in others}
        if any(row is None or row["minus_joint"] is None or row["minus_joint"]["low"] is None for row in rows.values()):
            lines.append(f"- Not decided yet: {what}.")
            continue
        differences = ", ".join(f"{other} {shown(row['minus_joint'], '+')}" for other, row in rows.items() if row)
        said = "**Against us**" if any(counts(row["minus_joint"]) for row in rows.values() if row) else "Not so"
        lines.append(f"- {said}: {what}. Minus joint: {differences}.")
    return "\n".join(lines)


def missing(world: str, methods: Iterable[str]) -> list[str]:
    """The protocol's methods for a world that are missing among `methods`."""
    return [method for method in (METHODS if world == WORLDS[0] else CORE) if method not in methods]


def protocol_first(commits: Iterable[str]) -> bool:
    """Whether the protocol was committed before all of these commits, from which the records come."""
    added = git("log", "--format=%H", "--diff-filter=A", "--", "docs/evidence.md").split()
    return bool(added) and all(
        subprocess.run(["git", "merge-base", "--is-ancestor", added[-1], commit], cwd=REPOSITORY).returncode == 0
        for commit in set(commits)
    )


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


def prepare(world: str, seed: int) -> Any:
    """The sandbox with its warm start, made without printing, and once for each recipe. All worlds but `habits` share
    one warm start; a change of the traces, the world or the training makes another."""
    from agentic_prompting.sandbox.setup import guarded_recipe, prepare_guarded

    quiet()
    with redirect_stdout(io.StringIO()):
        return prepare_guarded(WARM_STARTS / guarded_recipe(seed, world=world).fingerprint, seed, world=world)


def run(world: str, seed: int, method: str, folder: Path, steps: int) -> dict[str, Any]:
    """Train a method, ask its agent the held-out questions, and return the record."""
    from agentic_prompting.sandbox import GuardedReflector

    started, sandbox = time.perf_counter(), prepare(world, seed)
    reflector = Counted(GuardedReflector(sandbox.mistakes, seed), MAX_CALLS)
    agent = Agent(sandbox, seed, Path(sandbox.model), sandbox.root, reflector)
    name = method.replace(", ", "-").replace(" ", "-")
    for number, (kind, portion, changes) in enumerate(METHODS[method]):
        phase = {"gepa": agent.gepa, "distill": agent.distill}.get(kind, agent.train)
        agent.output = folder / world / str(seed) / f"{name}-{number}"
        with redirect_stdout(io.StringIO()):
            phase(max(1, round(steps * portion)), mode=kind, **changes)
    return {
        **{"world": world, "seed": seed, "method": method},
        **{"correct": answers(sandbox, agent.model, agent.prompt), "rollouts": agent.rollouts},
        **{"calls": min(reflector.calls, MAX_CALLS), "steps": steps, "prompt": agent.prompt.text},
        **{"seconds": round(time.perf_counter() - started)},
    }


@dataclass
class Agent:
    """The state that a method's phases pass on: weights, their prompt, and the rollouts spent."""

    sandbox: Any
    seed: int
    model: Path
    prompt: Any
    reflector: Counted
    output: Path = Path()
    rollouts: int = 0
    trainer: Any = None

    def train(self, steps: int, **changes: Any) -> None:
        """Train with E-SPL's trainer, in one of its modes."""
        from agentic_prompting import ESPLConfig, ESPLTrainer, LLMEnvironment, PromptR1Reward

        options = {"max_steps": steps, "seed": self.seed, "output_dir": str(self.output)}
        args = ESPLConfig(**settings(ESPL, **options, per_device_eval_batch_size=96, **changes))
        self.trainer = train(
            ESPLTrainer,
            args,
            self.sandbox,
            LLMEnvironment(self.sandbox.oracle),
            model=str(self.model),
            reward_funcs=PromptR1Reward(),
            reference=self.reflector if args.evolves else None,
            initial_prompt=self.prompt,
        )
        self._learned(steps * args.generation_batch_size)

    def distill(self, steps: int, mode: str) -> None:
        """Distill the prompt into the weights, with the rollouts of `steps` steps."""
        args = self.trainer.args
        rows = self.sandbox.train.select(range(steps * args.generation_batch_size // args.num_generations))
        batch = {"per_device_train_batch_size": 32}
        self.trainer.distill(rows, num_train_epochs=DISTILLATION_EPOCHS, **batch)
        self._learned(len(rows) * args.num_generations)

    def _learned(self, rollouts: int) -> None:
        self.trainer.save_model(str(self.output))
        self.model, self.prompt = self.output, self.trainer.final_prompt()
        self.rollouts += rollouts

    def gepa(self, steps: int, mode: str) -> None:
        """Optimise the prompt with the authors' package, for the rollouts of `steps` steps and one iteration."""
        import gepa

        from agentic_prompting import AgentSpec, LLMEnvironment, PromptAgent, PromptR1Reward, SystemPrompt
        from agentic_prompting.interop.gepa import AgentAdapter
        from agentic_prompting.llm import complete

        batch = settings(ESPL)["per_device_train_batch_size"]
        spec = replace(AgentSpec.load(self.model), sampling={"temperature": TEMPERATURE})
        agent = PromptAgent.from_pretrained(self.model, LLMEnvironment(self.sandbox.oracle), spec, max_batch_size=256)
        rows = list(self.sandbox.train)
        found = gepa.optimize(
            {"system_prompt": self.prompt.text},
            trainset=rows[GEPA_VALIDATION:],
            valset=rows[:GEPA_VALIDATION],
            adapter=AgentAdapter(agent, PromptR1Reward()),
            reflection_lm=lambda asked: complete(self.reflector, asked).text,
            max_metric_calls=steps * batch,
            seed=self.seed,
        )
        self.prompt = SystemPrompt.of(found.best_candidate["system_prompt"])
        self.rollouts += found.total_metric_calls


def answers(sandbox: Any, model: Path, prompt: Any) -> str:
    """`1` or `0` for each held-out question, sampled at the temperature that all methods share."""
    from agentic_prompting import LLMEnvironment

    changes = {"system_prompt": prompt.text, "sampling": {"temperature": TEMPERATURE}}
    return correct(ask(model, LLMEnvironment(sandbox.oracle), sandbox.test, **changes))


# --- the script ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="The league table of docs/evidence.md.")
    parser.add_argument("--quick", action="store_true", help="one world, two seeds that are not reported, fewer steps")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all in the first world, else the core")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS}")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument("--folder", type=Path, default=Path("runs/league"), help="models")
    parser.add_argument("--records", type=Path, help="default: records/league.jsonl.gz; with --quick in the folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    records = Records(options.records or (options.folder / "quick.jsonl.gz" if options.quick else RECORDS))
    worlds = options.worlds or (WORLDS[:1] if options.quick else WORLDS)
    seeds = options.seeds or (TUNING_SEEDS[:2] if options.quick else SEEDS)
    steps, started = QUICK_STEPS if options.quick else STEPS, time.perf_counter()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # the child processes read it at their start
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        for world, seed in ((world, seed) for world in worlds for seed in seeds):
            methods = options.methods or (QUICK if options.quick else METHODS if world == WORLDS[0] else CORE)
            todo = records.missing(("world", "seed", "method"), [(world, seed, method) for method in methods])
            if todo:
                pool.submit(prepare, world, seed).result()
            for job in as_completed(pool.submit(run, *one, options.folder, steps) for one in todo):
                records.add(job.result())
                log(" ".join(str(job.result()[key]) for key in ("world", "seed", "method", "seconds")))
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from support.leaks import leaks

    found = records.read()
    table_of = summarise(found)
    result = {
        "worlds": table_of,
        "leaks": sum(len(leaks(name, seed)) for name in ("prompt-r1", *worlds) for seed in seeds),
        "protocol_first": protocol_first(one["commit"] for one in found),
        "missing": {world: missing(world, methods) for world, methods in table_of.items()},
        "seconds": round(time.perf_counter() - started),
    }
    print(table(result["worlds"]))
    print(f"leaks: {result['leaks']}, protocol first: {result['protocol_first']}, {result['seconds']} s")
    if options.json:
        print(json.dumps({"sandbox": True, "quick": options.quick, **result}))


if __name__ == "__main__":
    main()
