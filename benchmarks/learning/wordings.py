"""Does Prompt-R1's agent carry over to a large LLM that words its replies in a way it never saw?
See docs/evidence.md.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.wordings --json  # five seeds; goes on where it was stopped
    OMP_NUM_THREADS=1 python -m benchmarks.learning.wordings --json --quick  # one seed for tuning, few steps

Two agents from one warm start of the seed: *one wording*, trained as in the demonstration, and
*three wordings*, where each episode draws one of three. Both are asked the held-out questions under
oracles of two other wordings, under the noisier oracle, and under both at once. All of it is the
sandbox: a tiny policy and a scripted oracle.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from agentic_prompting.llm import ChatModel, Message, Reply
from benchmarks.lab import (
    DEMO,
    DEMO_STEPS,
    RECORDS as RECORDED,
    Records,
    ask,
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

RECORDS = RECORDED / "wordings.jsonl.gz"
SEEDS = (641, 642, 643, 644, 645)
# Its warm start comes with the package.
TUNING_SEED = 42
QUICK_STEPS = 2
NOISE = 0.05
GOAL = 0.8
TRAINED = ("the answer is {} .", "{} is the answer .", "i know this answer : {} .")
UNSEEN = ("the answer of the question is {} .", "this question has the answer {} .")
AGENTS: dict[str, Sequence[str]] = {"one wording": TRAINED[:1], "three wordings": TRAINED}
# By name: the wordings and the noise of the oracle that the agents are tried with.
TRIALS: dict[str, tuple[Sequence[str], float]] = {
    "as trained": (TRAINED[:1], 0.0),
    "three wordings": (TRAINED, 0.0),
    "unseen: first": (UNSEEN[:1], 0.0),
    "unseen: second": (UNSEEN[1:], 0.0),
    "noisier": (TRAINED[:1], NOISE),
    "unseen and noisier": (UNSEEN, NOISE),
}


class Worded:
    """An oracle's replies in other words: each episode draws its wording.

    Args:
        oracle ([`ChatModel`]): The oracle.
        wordings (`Sequence[str]`): With `{}` for the answer.
    """

    def __init__(self, oracle: ChatModel, wordings: Sequence[str]):
        self.oracle = oracle
        self.wordings = wordings

    async def __call__(
        self, messages: Sequence[Message], *, session: str | None = None, **options: Any
    ) -> Reply:
        from agentic_prompting.sandbox.world import value_of

        reply = await self.oracle(messages, session=session, **options)
        value = value_of(reply.text)
        wording = random.Random(f"wording {session}").choice(self.wordings)
        if value is None:
            return reply
        return replace(reply, text=wording.format(value))


def measure(seed: int, agent: str, folder: Path, steps: int) -> dict[str, Any]:
    """Train an agent, ask it the held-out questions under each oracle, and return the record."""
    from agentic_prompting import LLMEnvironment, PromptR1Config, PromptR1Trainer
    from agentic_prompting.sandbox import Oracle
    from agentic_prompting.sandbox.setup import prepare_sandbox

    quiet()
    started = time.perf_counter()
    with redirect_stdout(io.StringIO()):
        sandbox = prepare_sandbox(folder / str(seed), seed)
    output = folder / str(seed) / agent.replace(" ", "-")
    options = {"output_dir": str(output), "seed": seed, "max_steps": steps, "overwrite": True}
    environment = LLMEnvironment(Worded(Oracle(seed=seed), AGENTS[agent]))
    trainer = train(
        PromptR1Trainer, PromptR1Config(**settings(DEMO, **options)), sandbox, environment
    )
    trainer.save_model(str(output))
    flags = {}
    for name, (wordings, noise) in TRIALS.items():
        oracle = Worded(Oracle(seed=seed, noise=noise), wordings)
        flags[name] = correct(ask(output, LLMEnvironment(oracle), sandbox.test, seed))
    return {
        "seed": seed,
        "agent": agent,
        "correct": flags,
        "seconds": round(time.perf_counter() - started),
    }


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Exact match by agent and oracle, means over seeds with intervals."""
    runs: dict[str, list[Mapping[str, str]]] = {}
    for record in records:
        runs.setdefault(record["agent"], []).append(record["correct"])
    summary: dict[str, dict[str, Any]] = {}
    for agent, runs_of_agent in runs.items():
        summary[agent] = {}
        for trial in TRIALS:
            scores = [share(correct[trial]) for correct in runs_of_agent]
            summary[agent][trial] = interval(scores)
    return summary


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """The summary as a Markdown table."""
    summary = summarise(records)
    rows = []
    for trial in TRIALS:
        scores = [shown(of_agent[trial]) for of_agent in summary.values()]
        rows.append([trial, *scores])
    titles = [f"trained with {agent}" for agent in summary]
    return markdown(("oracle", *titles), rows)


def reached(records: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """For each unseen oracle whether the agent trained on three wordings has the exact match that
    was expected.
    """
    rows = summarise(records).get("three wordings", {})
    unseen = [trial for trial in rows if trial.startswith("unseen")]
    return {trial: rows[trial]["mean"] >= GOAL for trial in unseen}


def verdict(records: Iterable[Mapping[str, Any]]) -> str:
    """The protocol's expectation, answered."""
    by_trial = reached(records)
    missed = [trial for trial in ("first", "second") if not by_trial.get(f"unseen: {trial}")]
    if missed:
        return (
            f"**Against us**: less than the expected {GOAL} on an unseen wording "
            f"({', '.join(missed)})."
        )
    return f"As expected, it is {GOAL} or more on each unseen wording."


def main() -> None:
    parser = argparse.ArgumentParser(description="Transfer of Prompt-R1's agent to other wordings.")
    parser.add_argument(
        "--quick", action="store_true", help="one seed that is not reported, few steps"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/wordings"), help="agents")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    records = Records(RECORDS)
    steps = DEMO_STEPS
    seeds: Sequence[int] = SEEDS
    if options.quick:
        records = Records(options.folder / "quick.jsonl.gz")
        steps = QUICK_STEPS
        seeds = (TUNING_SEED,)
    for seed, agent in records.missing(("seed", "agent"), product(seeds, AGENTS)):
        records.add(measure(seed, agent, options.folder, steps))
        log(f"seed {seed}: {agent}")
    entries = records.read()
    print(table(entries))
    if options.json:
        result = {
            "wordings": summarise(entries),
            "at_least_.8": reached(entries),
            "seeds": sorted({entry["seed"] for entry in entries}),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
