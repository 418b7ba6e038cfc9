"""Agents that keep their own loop beside the native one, in the sandbox, by the protocol in
docs/evidence.md.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.program_sandbox  # five reported seeds: about two hours
    OMP_NUM_THREADS=1 python -m benchmarks.learning.program_sandbox --quick  # a seed for tuning, few steps: minutes

Appends a record for each seed and agent to `--records`, from which `recompute.py` makes the table
of docs/lab/prompt_r1.md. Seeds that have a record are not run again. The figures are about the
sandbox: a policy of 390,000 parameters and a scripted oracle. They say nothing about real models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.lab import (
    BATCH,
    DEMO,
    RECORDS,
    Records,
    correct,
    interval,
    log,
    markdown,
    quiet,
    settings,
    share,
    shown,
    train,
)

if TYPE_CHECKING:
    from agentic_prompting import LLMEnvironment, Program
    from agentic_prompting.sandbox.setup import SandboxRun

SEEDS = (801, 802, 803, 804, 805)
TUNING_SEED = 1
STEPS = 16
QUICK_STEPS = 2
ROLLOUTS = 64
QUESTIONS = 256
NATIVE = "native"
CLOSE = 0.05
"""A mean difference beyond this says nothing about being alike."""
AGENTS = {
    NATIVE: "the native loop, `LLMEnvironment`",
    "script": "a script around `openai` that does the same",
    "vote": "two sub-agents at once, a third decides",
    "last exchange": "a history that is rewritten each turn",
}
NOTHING = "No run of it has been recorded yet."
Entries = Sequence[Mapping[str, Any]]


# --- the table ------------------------------------------------------------------------------------


def table(records: Entries) -> str:
    """Exact match before and after by agent, and the difference from the native loop, paired by
    seed.
    """
    if not records:
        return NOTHING
    native = {run["seed"]: share(run["after"]) for run in records if run["agent"] == NATIVE}
    rows = []
    for name, title in AGENTS.items():
        runs = {run["seed"]: run for run in records if run["agent"] == name}
        if not runs:
            rows.append([title, "not run", "", "", "", ""])
            continue
        before = [share(run["before"]) for run in runs.values()]
        after = {seed: share(run["after"]) for seed, run in runs.items()}
        gains = [share(run["after"]) - share(run["before"]) for run in runs.values()]
        minus_native = ""
        if name != NATIVE:
            differences = [after[seed] - native[seed] for seed in after if seed in native]
            minus_native = shown(differences, "+")
        scores = [shown(before), shown(list(after.values())), shown(gains, "+")]
        sequences = fmean(run["sequences"] for run in runs.values())
        rows.append([title, *scores, minus_native, f"{sequences:.2f}"])
    seeds = sorted({run["seed"] for run in records})
    titles = "agent", "before [95 %]", "after [95 %]", "gain", "minus native", "sequences a rollout"
    return f"{markdown(titles, rows)}\n\nSeeds: {', '.join(map(str, seeds))}."


def verdict(records: Entries) -> str:
    """What the protocol asks, answered: is the script within the native loop's interval, and do the
    others gain?
    """
    if not records:
        return NOTHING
    after = {(record["agent"], record["seed"]): share(record["after"]) for record in records}
    differences = []
    for (agent, seed), score in after.items():
        if agent == NATIVE and ("script", seed) in after:
            differences.append(after["script", seed] - score)
    sentences = [_compare_with_native(differences)]
    for name in ("vote", "last exchange"):
        runs = [record for record in records if record["agent"] == name]
        gains = [after[name, run["seed"]] - share(run["before"]) for run in runs]
        low = interval(gains)["low"] if gains else None
        has_gained = low is not None and low > 0
        sentences.append(f"*{name}* {'gains' if has_gained else 'shows no gain'}")
    return "; ".join(sentences) + "."


def _compare_with_native(differences: Sequence[float]) -> str:
    """What the differences of the script from the native loop say."""
    if len(differences) < 2:
        return "the script and the native loop have too few seeds in common"
    estimate = interval(differences)
    if not estimate["low"] <= 0 <= estimate["high"]:  # type: ignore[operator]
        return "the script differs from the native loop"
    if abs(estimate["mean"]) > CLOSE:  # type: ignore[arg-type]
        return (
            "the script is within the native loop's interval, but too few seeds show that "
            "they are alike"
        )
    return "the script learns as the native loop does"


# --- a run ----------------------------------------------------------------------------------------


def environment_of(agent: str, seed: int) -> LLMEnvironment | Program:
    """The environment of an agent: each has an oracle of this seed."""
    from agentic_prompting import LLMEnvironment, Program
    from agentic_prompting.sandbox import Oracle
    from benchmarks.learning.agent_programs import AGENTS as PROGRAMS

    oracle = Oracle(seed=seed)
    if agent == NATIVE:
        return LLMEnvironment(oracle)
    return Program(PROGRAMS[agent], llms={"oracle": oracle})


def ask(model: Path, agent: str, rows: Sequence[Any], seed: int) -> tuple[str, float]:
    """Whether each question is answered right, and the mean number of token sequences.

    Raises:
        `RuntimeError`: A rollout failed. Nothing here can fail but by a bug.
    """
    from agentic_prompting import PromptAgent

    loaded_agent = PromptAgent.from_pretrained(
        model, environment_of(agent, seed), max_batch_size=BATCH
    )
    rollouts = loaded_agent.answer_all(list(rows), seed=seed, progress=False)
    failed = [rollout.error for rollout in rollouts if rollout.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(rollouts)} rollouts failed: {failed[0]}")
    return correct(rollouts), fmean(len(rollout.sequences) for rollout in rollouts)


def measure(
    agent: str, seed: int, sandbox: SandboxRun, folder: Path, steps: int, questions: int
) -> dict[str, Any]:
    """Ask the warm start, train it, ask again: the agent's record."""
    from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
    from agentic_prompting.rewards import exact_match_reward

    # Ask the warm start.
    rows = list(sandbox.test)[:questions]
    started = time.perf_counter()
    before, _ = ask(sandbox.model, agent, rows, seed)

    # Train it.
    options = {
        "seed": seed,
        "max_steps": steps,
        "per_device_train_batch_size": ROLLOUTS,
        "overwrite": True,
    }
    args = MultiTurnGRPOConfig(**settings(DEMO, output_dir=str(folder), **options))
    trainer = train(
        MultiTurnGRPOTrainer,
        args,
        sandbox,
        environment_of(agent, seed),
        reward_funcs=exact_match_reward,
    )
    trainer.save_model(str(folder))

    # Ask the trained agent the same questions.
    after, sequences = ask(folder, agent, rows, seed)
    failed = [entry.get("rollout/failed", 0.0) for entry in trainer.state.log_history]
    return {
        "agent": agent,
        "seed": seed,
        "before": before,
        "after": after,
        "sequences": round(sequences, 3),
        "failed": max(failed, default=0.0),
        "steps": steps,
        "seconds": round(time.perf_counter() - started, 1),
    }


def run_all(
    seeds: Sequence[int], folder: Path, records: Records, steps: int, questions: int
) -> None:
    """Run what is not recorded: all agents of a seed, then the next seed."""
    from agentic_prompting.sandbox.setup import prepare_sandbox

    for seed in seeds:
        missing = records.missing(("agent", "seed"), product(AGENTS, (seed,)))
        if not missing:
            continue
        seed_folder = folder / str(seed)
        sandbox = prepare_sandbox(seed_folder, seed)
        for agent, _ in missing:
            agent_folder = seed_folder / agent.replace(" ", "_")
            record = measure(agent, seed, sandbox, agent_folder, steps, questions)
            records.add(record)
            before = share(record["before"])
            after = share(record["after"])
            log(f"seed {seed}, {agent}: {before:.3f} to {after:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed that is not reported, fewer steps and questions",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", help=f"default: {SEEDS}; with --quick {TUNING_SEED}"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/programs"), help="the agents")
    parser.add_argument(
        "--records",
        type=Path,
        help="default: records/programs.jsonl.gz; with --quick in the folder",
    )
    options = parser.parse_args()
    quiet()
    if options.quick:
        folder = options.folder / "quick"
        records_folder = folder
        default_seeds: tuple[int, ...] = (TUNING_SEED,)
        sizes = (QUICK_STEPS, 32)
    else:
        folder = options.folder
        records_folder = RECORDS
        default_seeds = SEEDS
        sizes = (STEPS, QUESTIONS)
    records = Records(options.records or records_folder / "programs.jsonl.gz")
    run_all(options.seeds or default_seeds, folder, records, *sizes)
    print(f"{table(records.read())}\n\n{verdict(records.read())}")


if __name__ == "__main__":
    main()
