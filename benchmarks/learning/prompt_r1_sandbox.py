"""Prompt-R1 in the sandbox, part by part, on unseen countries, by the protocol in docs/evidence.md.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.prompt_r1_sandbox  # five reported seeds: an hour on a free core
    OMP_NUM_THREADS=1 python -m benchmarks.learning.prompt_r1_sandbox --quick  # a tuning seed, 3 minutes

Appends a record for each seed and setting to `--records`, from which `recompute.py` makes the tables of
docs/lab/prompt_r1.md. Recorded settings are not run again, and agents in `--folder` are not trained again, so that the same
command resumes a stopped run. The figures are those of the sandbox, a policy of 390,000 parameters and a scripted
oracle; they say nothing about real models.

The training's settings are read from `examples/configs/sandbox.yaml`. The oracle is a [`ChatModel`] in this process,
not an HTTP server as in the demo; its replies are the same. Every seed has its own split, weights, traces and oracle.
All settings of a seed share one warm start and answer the same held-out questions with the same random numbers.
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
QUICK_STEPS = 8  # GRPO steps; the warm start is as long as ever, because GRPO cannot do without it
WORDINGS = ("{} is the answer .", "i know this answer : {} .", "the answer of the question is {} .")

# The options in which a training differs from the file, and its reward where it is not the paper's. An agent with two
# turns asks once and answers; an agent without environment has one turn.
TRAININGS: dict[str, dict[str, Any]] = {
    "multi": {},
    "single": {"max_turns": 2},
    "alone_f1": {"max_turns": 1, "reward": token_f1_reward},
    "strict": {"gate": "strict"},
    "alone": {"max_turns": 1},
}
Setting = tuple[
    str, str, int | None
]  # agent, environment, turns allowed where they are not the agent's own
FIRST: list[Setting] = [
    *((agent, HOME, None) for agent in ("sft", "multi", "single", "oracle")),
    *((agent, environment, None) for environment in AWAY for agent in ("multi", "single", "sft")),
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
        return reply if value is None else replace(reply, text=wording.format(value))


@dataclass(frozen=True)
class Run:
    """The parts that all settings of a seed share.

    Args:
        seed (`int`): The seed of split, weights, traces, oracle, training and evaluation.
        by (`str`): The unit that is held out, `country` or `question`; see [`prepare_sandbox`].
        folder (`Path`): The folder of its agents.
        max_steps (`int`, *optional*, defaults to `40`): GRPO steps.
    """

    seed: int
    by: Literal["country", "question"]
    folder: Path
    max_steps: int = DEMO_STEPS

    def __post_init__(self) -> None:
        with redirect_stdout(io.StringIO()):
            object.__setattr__(self, "sandbox", prepare_sandbox(self.folder, self.seed, by=self.by))

    def environment(self, name: str) -> LLMEnvironment | None:
        """An environment around the seed's oracle. Noise changes single facts, not the oracle's guesses."""
        if name == NOBODY:
            return None
        noise = float(name.removeprefix("noise ")) if name.startswith("noise ") else 0.0
        oracle = Oracle(seed=self.seed, noise=noise)
        return LLMEnvironment(Reworded(oracle) if name == REWORDED else oracle)

    def agent(self, name: str) -> Path:
        """The folder of an agent, which is first trained by GRPO from the seed's warm start if it is missing."""
        folder = self.folder / name
        if name == "sft" or (folder / SPEC_FILE).exists():
            return self.sandbox.model if name == "sft" else folder
        changes = dict(TRAININGS[name])
        reward = changes.pop("reward", None)
        started = time.perf_counter()
        changes["max_steps"] = self.max_steps
        args = PromptR1Config(**settings(DEMO, output_dir=str(folder), seed=self.seed, **changes))
        environment = self.environment(NOBODY if name.startswith("alone") else HOME)
        trainer = train(PromptR1Trainer, args, self.sandbox, environment, reward_funcs=reward)
        trainer.save_model(str(folder))
        log(
            f"seed {self.seed}: {name}, {args.max_steps} steps, {time.perf_counter() - started:.0f} s"
        )
        return folder

    def measure(self, agent: str, environment: str, turns: int | None) -> dict[str, Any]:
        """Ask an agent the held-out questions and return its part of the record."""
        rows = list(self.sandbox.test)
        hops = "".join(str(row["meta"]["hops"]) for row in rows)
        if agent == "oracle":
            said = [
                value_of(complete(Oracle(seed=self.seed), row["question"]).text) for row in rows
            ]
            right = [
                exact_match(value or "", row["answers"])
                for value, row in zip(said, rows, strict=True)
            ]
            return {
                "correct": "".join(str(int(one)) for one in right),
                "hops": hops,
                "turns": 0.0,
                "answered": 1.0,
            }
        model = self.agent(agent)
        limits = AgentSpec.load(model).limits
        limits = replace(limits, max_turns=turns or limits.max_turns)
        rollouts = ask(model, self.environment(environment), rows, self.seed, limits=limits)
        return outcome_of(rollouts) | {"hops": hops}


def outcome_of(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The scores of finished rollouts: `correct` with 1 or 0 a question, mean `turns` and the share `answered`.

    Raises:
        `RuntimeError`: A rollout failed. The oracle in this process never fails, so the cause would be a bug.
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
    """Run what is not recorded: for each seed the protocol's settings, then the old split, then the rest."""
    keys = ("by", "seed", "agent", "environment", "turns_allowed")
    for by, chosen in (("country", FIRST), ("question", OLD_SPLIT), ("country", LAST)):
        for seed in seeds:
            left = records.missing(keys, [(by, seed, *setting) for setting in chosen])
            run = Run(seed, by, folder / f"{by}-{seed}", max_steps) if left else None  # type: ignore[arg-type]
            for values in left:
                agent, environment, turns = values[2:]
                # type: ignore[union-attr]
                started = time.perf_counter()
                record = run.measure(agent, environment, turns)
                named = dict(zip(keys, values, strict=True))
                records.add(named | record | {"seconds": round(time.perf_counter() - started, 1)})
                log(
                    f"seed {seed}, by {by}: {AGENTS[agent]}, {environment}, {turns}: {share(record['correct']):.3f}"
                )


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
    folder = options.folder / "quick" if options.quick else options.folder
    records = Records(
        options.records or (folder if options.quick else RECORDS) / "prompt_r1.jsonl.gz"
    )
    seeds = options.seeds or ((TUNING_SEED,) if options.quick else SEEDS)
    run_all(seeds, folder, records, QUICK_STEPS if options.quick else DEMO_STEPS)
    entries = records.read()
    print(
        "Prompt-R1 in the sandbox (a tiny policy and a scripted oracle; says nothing about real models)\n\n"
        f"{results(entries)}\n\nAnother oracle than the one trained with\n\n{transfer(entries)}"
    )


if __name__ == "__main__":
    main()
