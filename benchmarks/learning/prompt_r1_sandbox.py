"""Prompt-R1 in the sandbox, part by part, on unseen countries, by the protocol in docs/evidence.md.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.prompt_r1_sandbox  # five reported seeds: an hour on a free core
    OMP_NUM_THREADS=1 python -m benchmarks.learning.prompt_r1_sandbox --quick  # a tuning seed, 3 minutes

Appends a record for each seed and setting to `--records`, from which `recompute.py` makes the
tables of docs/lab/prompt_r1.md. Recorded settings are not run again, and agents in `--folder` are
not trained again, so that the same command resumes a stopped run. The figures are those of the
sandbox, a policy of 390,000 parameters and a scripted oracle; they say nothing about real models.

The training's settings are read from `examples/configs/sandbox.yaml`. The oracle is a [`ChatModel`]
in this process, not an HTTP server as in the demo; its replies are the same. Every seed has its own
split, weights, traces and oracle. All settings of a seed share one warm start and answer the same
held-out questions with the same random numbers.
"""

from __future__ import annotations

import argparse
import io
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from agentic_prompting import LLMEnvironment, PromptR1Config, PromptR1Trainer
from agentic_prompting.llm import ChatModel, Message, Reply, complete
from agentic_prompting.rewards import exact_match, token_f1_reward
from agentic_prompting.rollout import SPEC_FILE, AgentSpec, Rollout
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.setup import prepare_sandbox
from agentic_prompting.sandbox.world import value_of
from benchmarks.lab import (
    DEMO,
    DEMO_STEPS,
    RECORDS,
    Records,
    ask,
    correct,
    log,
    quiet,
    settings,
    share,
    train,
)
from benchmarks.learning.prompt_r1_tables import (
    AGENTS,
    AWAY,
    HOME,
    NOBODY,
    REWORDED,
    results,
    transfer,
)

SEEDS = (601, 602, 603, 604, 605)
TUNING_SEED = 1
QUICK_STEPS = 8
"""GRPO steps; the warm start is as long as ever, because GRPO cannot do without it."""
WORDINGS = ("{} is the answer .", "i know this answer : {} .", "the answer of the question is {} .")

# The options in which a training differs from the file, and its reward where it is not the paper's.
# An agent with two turns asks once and answers; an agent without environment has one turn.
TRAININGS: dict[str, dict[str, Any]] = {
    "multi": {},
    "single": {"max_turns": 2},
    "alone_f1": {"max_turns": 1, "reward": token_f1_reward},
    "strict": {"gate": "strict"},
    "alone": {"max_turns": 1},
}
# Agent, environment, turns allowed where they are not the agent's own.
Setting = tuple[str, str, int | None]
FIRST: list[Setting] = [
    *((agent, HOME, None) for agent in ("sft", "multi", "single", "oracle")),
    *((agent, away, None) for away, agent in product(AWAY, ("multi", "single", "sft"))),
    *((agent, NOBODY, None) for agent in ("sft", "multi", "alone_f1")),
    *(("multi", HOME, turns) for turns in (4, 3, 2)),
]
OLD_SPLIT: list[Setting] = [("sft", HOME, None), ("multi", HOME, None)]
LAST: list[Setting] = [("strict", HOME, None), ("alone", NOBODY, None)]


class Reworded:
    """An oracle that rewords another oracle's replies: the request chooses one of `WORDINGS`."""

    def __init__(self, oracle: ChatModel):
        self.oracle = oracle

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Reply:
        reply = await self.oracle(messages, **options)
        value = value_of(reply.text)
        wording = random.Random(messages[-1]["content"]).choice(WORDINGS)
        if value is None:
            return reply
        return replace(reply, text=wording.format(value))


@dataclass(frozen=True)
class Run:
    """The parts that all settings of a seed share.

    Args:
        seed (`int`): The seed of split, weights, traces, oracle, training and evaluation.
        held_out (`str`): The unit that is held out, `country` or `question`; see
            [`prepare_sandbox`].
        folder (`Path`): The folder of its agents.
        max_steps (`int`, *optional*, defaults to `40`): GRPO steps.
    """

    seed: int
    held_out: Literal["country", "question"]
    folder: Path
    max_steps: int = DEMO_STEPS

    def __post_init__(self) -> None:
        with redirect_stdout(io.StringIO()):
            sandbox = prepare_sandbox(self.folder, self.seed, by=self.held_out)
        object.__setattr__(self, "sandbox", sandbox)

    def environment(self, name: str) -> LLMEnvironment | None:
        """An environment around the seed's oracle.

        Noise changes single facts, not the oracle's guesses.
        """
        if name == NOBODY:
            return None
        noise = 0.0
        if name.startswith("noise "):
            noise = float(name.removeprefix("noise "))
        oracle = Oracle(seed=self.seed, noise=noise)
        if name == REWORDED:
            return LLMEnvironment(Reworded(oracle))
        return LLMEnvironment(oracle)

    def agent(self, name: str) -> Path:
        """The folder of an agent, which is first trained by GRPO from the seed's warm start if it
        is missing.
        """
        if name == "sft":
            return self.sandbox.model
        folder = self.folder / name
        if (folder / SPEC_FILE).exists():
            return folder
        changes = dict(TRAININGS[name])
        reward = changes.pop("reward", None)
        started = time.perf_counter()
        changes["max_steps"] = self.max_steps
        args = PromptR1Config(**settings(DEMO, output_dir=str(folder), seed=self.seed, **changes))
        environment = self.environment(NOBODY if name.startswith("alone") else HOME)
        trainer = train(PromptR1Trainer, args, self.sandbox, environment, reward_funcs=reward)
        trainer.save_model(str(folder))
        seconds = time.perf_counter() - started
        log(f"seed {self.seed}: {name}, {args.max_steps} steps, {seconds:.0f} s")
        return folder

    def measure(self, agent: str, environment: str, turns: int | None) -> dict[str, Any]:
        """Ask an agent the held-out questions and return its part of the record."""
        rows = list(self.sandbox.test)
        hops = "".join(str(row["meta"]["hops"]) for row in rows)
        if agent == "oracle":
            oracle = Oracle(seed=self.seed)
            flags = ""
            for row in rows:
                value = value_of(complete(oracle, row["question"]).text)
                flags += str(int(exact_match(value or "", row["answers"])))
            return {"correct": flags, "hops": hops, "turns": 0.0, "answered": 1.0}
        model = self.agent(agent)
        limits = AgentSpec.load(model).limits
        if turns:
            limits = replace(limits, max_turns=turns)
        rollouts = ask(model, self.environment(environment), rows, self.seed, limits=limits)
        return outcome_of(rollouts) | {"hops": hops}


def outcome_of(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The scores of finished rollouts: `correct` with 1 or 0 a question, mean `turns` and the share
    `answered`.

    Raises:
        `RuntimeError`: A rollout failed. The oracle in this process never fails, so the cause would
        be a bug.
    """
    statuses = Counter(rollout.status for rollout in rollouts)
    if statuses["failed"]:
        raise RuntimeError(
            f"{statuses['failed']} of {len(rollouts)} rollouts failed; nothing was scored"
        )
    return {
        "correct": correct(rollouts),
        "turns": round(sum(len(rollout.turns) for rollout in rollouts) / len(rollouts), 3),
        "answered": round(statuses["answered"] / len(rollouts), 4),
    }


def run_all(seeds: Sequence[int], folder: Path, records: Records, max_steps: int) -> None:
    """Run what is not recorded: for each seed the protocol's settings, then the old split, then the
    rest.
    """
    keys = ("by", "seed", "agent", "environment", "turns_allowed")
    parts: list[tuple[Literal["country", "question"], list[Setting]]] = [
        ("country", FIRST),
        ("question", OLD_SPLIT),
        ("country", LAST),
    ]
    for (held_out, part), seed in product(parts, seeds):
        missing = records.missing(keys, [(held_out, seed, *setting) for setting in part])
        if not missing:
            continue
        run = Run(seed, held_out, folder / f"{held_out}-{seed}", max_steps)
        for values in missing:
            agent, environment, turns = values[2:]
            started = time.perf_counter()
            outcome = run.measure(agent, environment, turns)
            seconds = round(time.perf_counter() - started, 1)
            records.add({**dict(zip(keys, values, strict=True)), **outcome, "seconds": seconds})
            score = share(outcome["correct"])
            title = f"{AGENTS[agent]}, {environment}, {turns}"
            log(f"seed {seed}, by {held_out}: {title}: {score:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompt-R1 in the sandbox, part by part.")
    parser.add_argument(
        "--quick", action="store_true", help="one seed that is not reported, fewer GRPO steps"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", help=f"default: {SEEDS}; with --quick {TUNING_SEED}"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/prompt_r1"), help="the agents")
    parser.add_argument(
        "--records",
        type=Path,
        help="default: records/prompt_r1.jsonl.gz; with --quick in the folder",
    )
    options = parser.parse_args()
    quiet()
    if options.quick:
        folder = options.folder / "quick"
        records_folder = folder
        default_seeds: tuple[int, ...] = (TUNING_SEED,)
        max_steps = QUICK_STEPS
    else:
        folder = options.folder
        records_folder = RECORDS
        default_seeds = SEEDS
        max_steps = DEMO_STEPS
    records = Records(options.records or records_folder / "prompt_r1.jsonl.gz")
    run_all(options.seeds or default_seeds, folder, records, max_steps)
    entries = records.read()
    print(
        "Prompt-R1 in the sandbox (a tiny policy and a scripted oracle; says nothing about real models)\n\n"
        f"{results(entries)}\n\nAnother oracle than the one trained with\n\n{transfer(entries)}"
    )


if __name__ == "__main__":
    main()
