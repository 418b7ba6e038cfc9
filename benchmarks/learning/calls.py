"""Calls of the large LLM until the sandbox's agent is good, with and without shared replies.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.calls --json  # 5 seeds, both worlds, some hours
    OMP_NUM_THREADS=1 python -m benchmarks.learning.calls --json --quick  # 1 seed for tuning, the plain world: minutes

Each run is appended to `--records` when it ends, and a recorded run is not repeated. The figures in
docs/howto/costs.md are computed from these records by `benchmarks/recompute.py`. The records also
hold settings that have been removed from the library because they saved no calls: growing groups,
refilled batches, a curriculum, and ending hopeless episodes early.

**Protocol.** Both settings of a seed share one warm start and train as the demo does, including its
decay of the learning rate over 40 steps. Every second step the agent answers the same 256
questions, about countries that no training question names, until exact match reaches .85 (in the
guarded world `GOOD`) or 24 steps are over. The count is the calls that training made; a shared
reply counts once. A run that never reaches the score counts all of its calls. In the guarded world
the oracle refuses an agent that does not know its rules; here the rules are in the system prompt,
and temperature and learning rate are those of the world's own configuration. The score to reach is
.6 there, because no setting goes much above .7 in 24 steps. Seeds 1, 2 and 3 are for tuning; seeds
201 to 205 are reported. (All runs were repeated once: in the first version, a mistake in the engine
could leave the model in evaluation mode for the step after an evaluation. In the plain world seed
201 had been seen before, with an evaluation after every step and a learning rate that reached 0
after 12 steps; no value was changed because of it.) The benchmark measures the sandbox: a policy of
390,000 parameters and a scripted oracle, priced like gpt-4o-mini.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.lab import (
    BATCH,
    DEMO,
    DEMO_STEPS,
    ESPL,
    RECORDS as RECORDED,
    Records,
    correct,
    interval,
    log,
    markdown,
    quiet,
    settings,
    shown,
    train,
)

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from agentic_prompting import MultiTurnGRPOTrainer
    from agentic_prompting.llm import ChatModel, Message, Reply
    from agentic_prompting.sandbox.setup import SandboxRun

RECORDS = RECORDED / "calls.jsonl.gz"
# None that the sandbox was made with.
SEEDS = (201, 202, 203, 204, 205)
TUNING_SEEDS = (1, 2, 3)
GOOD = {"plain": 0.85, "guarded": 0.6}
"""The exact match to reach in each world."""
EVAL_STEPS = 2
MAX_STEPS = 24
QUESTIONS = 256
SETTINGS = {"today": "never", "replies shared": "step"}
"""The environment's `share_replies` in each setting."""


# --- the records' tables --------------------------------------------------------------------------


def of_settings(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Each world and setting against `today`, paired by seed."""
    runs = {(record["world"], record["setting"], record["seed"]): record for record in records}
    rows = {}
    for world, setting in dict.fromkeys(key[:2] for key in runs):
        pairs = []
        for key, run in runs.items():
            today = runs.get((world, "today", run["seed"]))
            if key[:2] == (world, setting) and today is not None:
                pairs.append((run, today))
        if pairs:
            rows[world, setting] = _summarise_pairs(pairs)
    return rows


def _summarise_pairs(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, Any]:
    """A setting's runs, each beside the run of `today` with its seed."""
    runs = [run for run, _ in pairs]
    score = interval([run["exact_match"] for run in runs])
    today_score = interval([today["exact_match"] for _, today in pairs])
    overlap = False
    # One seed has no interval.
    if score["low"] is not None and today_score["low"] is not None:
        overlap = score["low"] <= today_score["high"] and today_score["low"] <= score["high"]
    paid_twice = None
    if runs[0]["paid_twice"] is not None:
        paid_twice = sum(run["paid_twice"] for run in runs)
    return {
        "steps": fmean(run["step"] for run in runs),
        "calls": round(fmean(run["calls"] for run in runs)),
        "different": fmean(run["curve"][-1]["different"] / run["calls"] for run in runs),
        "calls_ratio": interval([run["calls"] / today["calls"] for run, today in pairs]),
        "usd_ratio": interval([run["usd"] / today["usd"] for run, today in pairs]),
        "reached": sum(run["reached"] for run in runs),
        "exact_match": score,
        "overlap": overlap,
        "paid_twice": paid_twice,
        "seeds": sorted(run["seed"] for run in runs),
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Calls of the large LLM until the agent is good, by world and setting."""
    titles = (
        "world",
        "setting",
        "steps",
        "calls",
        "different in their step",
        "of today's [95 %]",
        "dollars of it",
    )
    rows = []
    for (world, name), row in of_settings(records).items():
        cells = [world, name, f"{row['steps']:.1f}", f"{row['calls']:,}", f"{row['different']:.0%}"]
        cells += [shown(row["calls_ratio"], digits=2), f"{row['usd_ratio']['mean']:.2f}"]
        cells += [f"{row['reached']} of {len(row['seeds'])}", shown(row["exact_match"])]
        paid_twice = "–" if row["paid_twice"] is None else row["paid_twice"]
        rows.append([*cells, paid_twice])
    return markdown([*titles, "reached", "exact match [95 %]", "paid twice"], rows)


def finding(records: Sequence[Mapping[str, Any]]) -> str:
    """The findings of all recorded settings, in two sentences."""
    rows = of_settings(records)

    def ratios(setting: str) -> list[str]:
        """The share of today's calls in each world."""
        return [shown(rows[world, setting]["calls_ratio"], digits=2) for world in GOOD]

    plain, guarded = ratios("replies shared")
    refilled = ratios("refilled")
    ineffective = product(GOOD, ("groups that grow", "curriculum", "hopeless ended"))
    means = [rows[setting]["calls_ratio"]["mean"] for setting in ineffective]
    return (
        f"Sharing replies took {plain} of the calls in the plain world and {guarded} in the "
        "guarded one, for the same training. Growing groups, a curriculum and ending hopeless "
        f"episodes took {min(means):.2f} to {max(means):.2f} of the calls, and refilling batches "
        f"with other questions {refilled[0]} and {refilled[1]}, so the library no longer has them."
    )


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All settings, and the figures of sharing replies over both worlds."""
    rows = of_settings(records)
    shared = [row for (_, name), row in rows.items() if name == "replies shared"]
    return {
        "calls_ratio_shared": max((row["calls_ratio"]["mean"] for row in shared), default=None),
        "scores_overlap": all(row["overlap"] for row in shared),
        "paid_twice": sum(row["paid_twice"] for row in shared),
        "settings": {f"{world}: {name}": row for (world, name), row in rows.items()},
    }


# --- runs -----------------------------------------------------------------------------------------


class CountedOracle:
    """The oracle with its calls counted and priced; [`add_evaluations`] sets `step`."""

    def __init__(self, oracle: ChatModel):
        self.oracle = oracle
        self.step = 0
        self.training = True
        self.calls = 0
        self.usd = 0.0
        # Pairs of a step and a request.
        self.requests: set[tuple[int, str]] = set()

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None
    ) -> Reply:
        from agentic_prompting.llm.budget import PRICES, price_tokens

        reply = await self.oracle(messages, repeat=repeat, session=session)
        if not self.training:
            return reply
        self.calls += 1
        self.requests.add((self.step, json.dumps(messages)))
        usage = price_tokens(
            reply.usage.prompt_tokens, reply.usage.completion_tokens, PRICES["gpt-4o-mini"]
        )
        self.usd += usage.cost_usd
        return replace(reply, usage=usage)

    @property
    def repeated_calls(self) -> int:
        """The number of calls that repeated an earlier call of their step."""
        return self.calls - len(self.requests)


def add_evaluations(
    trainer: MultiTurnGRPOTrainer, chat: CountedOracle, test: Sequence[Any], seed: int, good: float
) -> list[dict[str, Any]]:
    """Evaluate every second step of a training, and end it when the score is reached.

    Returns:
        `list[dict]`: One entry for each evaluation, filled while the trainer trains.
    """
    from transformers import TrainerCallback

    from agentic_prompting import LLMEnvironment, PromptAgent
    from agentic_prompting.evaluation import wilson_interval

    curve: list[dict[str, Any]] = []

    class Evaluations(TrainerCallback):
        def on_step_end(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            **kwargs: Any,
        ) -> None:
            chat.step = state.global_step
            if state.global_step % EVAL_STEPS:
                return

            # Calls of the evaluation are not counted.
            chat.training = False
            environment = LLMEnvironment(chat)
            agent = PromptAgent(
                trainer.model,
                trainer.processing_class,
                environment,
                trainer.spec,
                max_batch_size=BATCH,
            )
            rollouts = agent.answer_all(test, seed=seed, progress=False)
            trainer.model.train()
            chat.training = True

            score = wilson_interval(correct(rollouts).count("1"), len(rollouts))
            curve.append(
                {
                    "step": state.global_step,
                    "calls": chat.calls,
                    "usd": round(chat.usd, 6),
                    "different": len(chat.requests),
                    "exact_match": score.mean,
                    "interval": [round(score.low, 4), round(score.high, 4)],
                }
            )
            log(f"  step {state.global_step}: {score.mean:.3f} after {chat.calls} calls")
            control.should_training_stop |= score.mean >= good or state.global_step >= MAX_STEPS

    trainer.add_callback(Evaluations())
    return curve


def run(
    name: str,
    seed: int,
    world: str,
    prepared: tuple[ChatModel, SandboxRun, str | None],
    folder: Path,
) -> dict[str, Any]:
    """Train with one setting until the agent is good or the steps are over, and return the run's
    record.
    """
    from agentic_prompting import (
        LLMEnvironment,
        MultiTurnGRPOTrainer,
        PromptR1Config,
        PromptR1Trainer,
    )
    from agentic_prompting.rewards import PromptR1Reward
    from agentic_prompting.trainers import MultiTurnGRPOConfig

    # What the demo trains with, or the guarded world's own trainer.
    oracle, sandbox, system_prompt = prepared
    chat = CountedOracle(oracle)
    curve = list[dict[str, Any]]()
    output = folder / name.replace(" ", "-")
    values = settings(DEMO, max_steps=DEMO_STEPS, output_dir=str(output), seed=seed)
    options: dict[str, Any] = {}
    if world == "plain":
        trainer_class: type[MultiTurnGRPOTrainer] = PromptR1Trainer
        args: MultiTurnGRPOConfig = PromptR1Config(**values)
    else:
        # Sampling and learning as in that world's own configuration.
        guarded = settings(ESPL)
        for key in ("temperature", "learning_rate", "lr_scheduler_type"):
            values[key] = guarded[key]
        trainer_class = MultiTurnGRPOTrainer
        args = MultiTurnGRPOConfig(**values)
        options = {"system_prompt": system_prompt, "reward_funcs": PromptR1Reward()}

    def watch(trainer: MultiTurnGRPOTrainer) -> None:
        nonlocal curve
        questions = list(sandbox.test)[:QUESTIONS]
        curve = add_evaluations(trainer, chat, questions, seed, GOOD[world])

    # Train until the evaluations end it.
    started = time.perf_counter()
    environment = LLMEnvironment(chat, share_replies=SETTINGS[name])
    train(trainer_class, args, sandbox, environment, before=watch, **options)
    end = curve[-1]
    seconds = round(time.perf_counter() - started)
    log(f"seed {seed}, {world}: {name}: {end['calls']} calls, {seconds} s")
    return {
        "world": world,
        "seed": seed,
        "setting": name,
        "values": {"share_replies": SETTINGS[name]},
        **end,
        "reached": end["exact_match"] >= GOOD[world],
        "paid_twice": chat.repeated_calls if SETTINGS[name] == "step" else None,
        "curve": curve,
        "seconds": seconds,
    }


def prepare(seed: int, world: str, folder: Path) -> tuple[ChatModel, SandboxRun, str | None]:
    """The oracle, the data with a warm-started policy, and the system prompt of a world that has
    one.
    """
    from agentic_prompting.evolution import SystemPrompt
    from agentic_prompting.sandbox import Oracle
    from agentic_prompting.sandbox.guarded import PREAMBLE, say
    from agentic_prompting.sandbox.setup import prepare_guarded, prepare_sandbox

    with redirect_stdout(io.StringIO()):
        if world == "plain":
            return Oracle(seed=seed), prepare_sandbox(folder, seed), None
        guarded = prepare_guarded(folder, seed)
    rules = SystemPrompt(PREAMBLE, tuple(say(*rule) for rule in guarded.oracle.rules.items()))
    return guarded.oracle, guarded, rules.text


def main() -> None:
    parser = argparse.ArgumentParser(description="Calls until the sandbox's agent is good.")
    parser.add_argument("--quick", action="store_true", help="one seed for tuning, plain world")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS}")
    parser.add_argument("--worlds", nargs="+", choices=GOOD, help="default: both")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: both"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/calls"), help="warm starts, created where missing"
    )
    parser.add_argument(
        "--records", type=Path, help="default: records/calls.jsonl.gz; with --quick in the folder"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    quiet()
    if options.quick:
        seeds = options.seeds or TUNING_SEEDS[:1]
        worlds = options.worlds or ["plain"]
        records = Records(options.records or options.folder / "quick.jsonl.gz")
    else:
        seeds = options.seeds or SEEDS
        worlds = options.worlds or list(GOOD)
        records = Records(options.records or RECORDS)
    started = time.time()
    runs = product(worlds, options.settings, seeds)
    for world, name, seed in records.missing(("world", "setting", "seed"), runs):
        prepared = prepare(seed, world, options.folder / f"{seed}-{world}")
        with tempfile.TemporaryDirectory() as temporary:
            records.add(run(name, seed, world, prepared, Path(temporary)))
    entries = records.read()
    print(table(entries))
    if options.json:
        print(json.dumps({**summarise(entries), "seconds": round(time.time() - started)}))


if __name__ == "__main__":
    main()
