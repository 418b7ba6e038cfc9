"""Agents that keep their own loop beside the native one, in the sandbox, by the protocol in docs/evidence.md.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.program_sandbox  # five reported seeds: about two hours
    OMP_NUM_THREADS=1 python -m benchmarks.learning.program_sandbox --quick  # a seed for tuning, few steps: minutes

Appends a record for each seed and agent to `--records`, from which `recompute.py` makes the table of
docs/lab/prompt_r1.md. Seeds that have a record are not run again. The figures are about the sandbox: a policy
of 390,000 parameters and a scripted oracle. They say nothing about real models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

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

SEEDS = (801, 802, 803, 804, 805)
TUNING_SEED = 1
STEPS = 16
QUICK_STEPS = 2
ROLLOUTS = 64
QUESTIONS = 256
NATIVE = "native"
CLOSE = 0.05  # a mean difference beyond this says nothing about being alike
AGENTS = {
    NATIVE: "the native loop, `LLMEnvironment`",
    "script": "a script around `openai` that does the same",
    "vote": "two sub-agents at once, a third decides",
    "last exchange": "a history that is rewritten each turn",
}
NOTHING = "No run of it has been recorded yet."
Entries = Sequence[Mapping[str, Any]]


# --- the table --------------------------------------------------------------------------------------------------------


def table(records: Entries) -> str:
    """Exact match before and after by agent, and the difference from the native loop, paired by seed."""
    if not records:
        return NOTHING
    after = {
        name: {
            record["seed"]: share(record["after"]) for record in records if record["agent"] == name
        }
        for name in AGENTS
    }
    rows = []
    for name, title in AGENTS.items():
        runs = [run for run in records if run["agent"] == name]
        if not runs:
            rows.append([title, "not run", "", "", "", ""])
            continue
        before = [share(run["before"]) for run in runs]
        gains = [last - first for first, last in zip(before, after[name].values(), strict=True)]
        other = [
            after[name][seed] - after[NATIVE][seed] for seed in after[name] if seed in after[NATIVE]
        ]
        sequences = f"{fmean(run['sequences'] for run in runs):.2f}"
        rows.append(
            [
                title,
                shown(before),
                shown([*after[name].values()]),
                shown(gains, "+"),
                shown(other, "+") if name != NATIVE else "",
                sequences,
            ]
        )
    seeds = sorted({run["seed"] for run in records})
    titles = "agent", "before [95 %]", "after [95 %]", "gain", "minus native", "sequences a rollout"
    return f"{markdown(titles, rows)}\n\nSeeds: {', '.join(map(str, seeds))}."


def verdict(records: Entries) -> str:
    """What the protocol asks, answered: is the script within the native loop's interval, and do the others gain?"""
    if not records:
        return NOTHING
    after = {(record["agent"], record["seed"]): share(record["after"]) for record in records}
    pairs = [
        after["script", seed] - native
        for (agent, seed), native in after.items()
        if agent == NATIVE and ("script", seed) in after
    ]
    sentences = []
    if len(pairs) < 2:
        sentences.append("the script and the native loop have too few seeds in common")
    else:
        estimate = interval(pairs)
        if not estimate["low"] <= 0 <= estimate["high"]:  # type: ignore[operator]
            sentences.append("the script differs from the native loop")
        elif abs(estimate["mean"]) > CLOSE:  # type: ignore[arg-type]
            sentences.append(
                "the script is within the native loop's interval, but too few seeds show that they are alike"
            )
        else:
            sentences.append("the script learns as the native loop does")
    for name in ("vote", "last exchange"):
        gains = [
            after[name, record["seed"]] - share(record["before"])
            for record in records
            if record["agent"] == name
        ]
        low = interval(gains)["low"] if gains else None
        sentences.append(f"*{name}* {'gains' if low is not None and low > 0 else 'shows no gain'}")
    return "; ".join(sentences) + "."


# --- a run ------------------------------------------------------------------------------------------------------------


def environment_of(agent: str, seed: int) -> Any:
    """The environment of an agent: each has an oracle of this seed."""
    from agentic_prompting import LLMEnvironment, Program
    from agentic_prompting.sandbox import Oracle
    from benchmarks.learning.agent_programs import AGENTS as PROGRAMS

    oracle = Oracle(seed=seed)
    return (
        LLMEnvironment(oracle)
        if agent == NATIVE
        else Program(PROGRAMS[agent], llms={"oracle": oracle})
    )


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
    if failed := [rollout.error for rollout in rollouts if rollout.error is not None]:
        raise RuntimeError(f"{len(failed)} of {len(rollouts)} rollouts failed: {failed[0]}")
    return correct(rollouts), fmean(len(rollout.sequences) for rollout in rollouts)


def measure(
    agent: str, seed: int, sandbox: Any, folder: Path, steps: int, questions: int
) -> dict[str, Any]:
    """Ask the warm start, train it, ask again: the agent's record."""
    from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
    from agentic_prompting.rewards import exact_match_reward

    rows = list(sandbox.test)[:questions]
    started = time.perf_counter()
    before, _ = ask(sandbox.model, agent, rows, seed)
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
    after, sequences = ask(folder, agent, rows, seed)
    failed = max(
        (entry.get("rollout/failed", 0.0) for entry in trainer.state.log_history), default=0.0
    )
    found = {
        "before": before,
        "after": after,
        "sequences": round(sequences, 3),
        "failed": failed,
        "steps": steps,
    }
    return {
        "agent": agent,
        "seed": seed,
        **found,
        "seconds": round(time.perf_counter() - started, 1),
    }


def run_all(
    seeds: Sequence[int], folder: Path, records: Records, steps: int, questions: int
) -> None:
    """Run what is not recorded: all agents of a seed, then the next seed."""
    from agentic_prompting.sandbox.setup import prepare_sandbox

    for seed in seeds:
        left = records.missing(("agent", "seed"), [(agent, seed) for agent in AGENTS])
        sandbox = prepare_sandbox(folder / str(seed), seed) if left else None
        for agent, _ in left:
            record = measure(
                agent, seed, sandbox, folder / str(seed) / agent.replace(" ", "_"), steps, questions
            )
            records.add(record)
            log(
                f"seed {seed}, {agent}: {share(record['before']):.3f} to {share(record['after']):.3f}"
            )


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
    folder = options.folder / "quick" if options.quick else options.folder
    records = Records(
        options.records or (folder if options.quick else RECORDS) / "programs.jsonl.gz"
    )
    sizes = (QUICK_STEPS, 32) if options.quick else (STEPS, QUESTIONS)
    run_all(options.seeds or ((TUNING_SEED,) if options.quick else SEEDS), folder, records, *sizes)
    print(f"{table(records.read())}\n\n{verdict(records.read())}")


if __name__ == "__main__":
    main()
