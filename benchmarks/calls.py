"""Calls of the large LLM until the sandbox's agent is good: today, each setting that saves some, all of them.

    OMP_NUM_THREADS=1 python benchmarks/calls.py --json            # 5 seeds, both worlds, some hours
    OMP_NUM_THREADS=1 python benchmarks/calls.py --json --quick    # 1 seed, 3 settings: ten minutes, two free cores

All settings of a seed share one warm start, and are asked the same held-out questions (of countries that no training
question names) after every step, until exact match is .85 or the steps are over. Counted are the calls of training that
were made: not those answered by a shared reply. A run that never gets there counts all of its calls, and says so. In
the guarded world the oracle refuses who does not know its house rules; here they are in the system prompt. The
gradient's bias is that of the rules alone, in a problem of one decision, with 95 % intervals. It measures the sandbox:
a policy of 390,000 parameters and a scripted oracle, priced like gpt-4o-mini.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import yaml
from prompt_r1_sandbox import CONFIG, log, share
from transformers import TrainerCallback

from agentic_prompting import (
    LLMEnvironment,
    MultiTurnGRPOTrainer,
    PromptAgent,
    PromptR1Config,
    PromptR1Trainer,
    SystemPrompt,
    exact_match,
)
from agentic_prompting.evaluation import bootstrap_interval
from agentic_prompting.llm import Reply
from agentic_prompting.llm.budget import PRICES
from agentic_prompting.llm.wire import priced
from agentic_prompting.rewards import PromptR1Reward
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.guarded import PREAMBLE, say
from agentic_prompting.sandbox.setup import prepare_guarded, prepare_sandbox
from agentic_prompting.trainers import MultiTurnGRPOConfig
from agentic_prompting.trainers.saving_calls import group_weight, honest_advantages

SEEDS = (201, 202, 203, 204, 205)  # none that the sandbox was made with
GOOD, EVERY, QUESTIONS = 0.85, 1, 256  # exact match to reach; steps between two looks; held-out questions of a look
SETTINGS: dict[str, dict[str, Any]] = {
    "today": {"share_replies": "never"},
    "replies shared": {"share_replies": "step"},
    "groups that grow": {"share_replies": "never", "group_start": 2},
    "refilled": {"share_replies": "never", "group_start": 2, "refill_rounds": 2},
    "curriculum": {"share_replies": "never", "curriculum_rare": 0.2},
    "hopeless ended": {"share_replies": "never", "hopeless_share": 0.2},
}
SETTINGS["all"] = {name: value for setting in SETTINGS.values() for name, value in setting.items()}
SETTINGS["all"]["share_replies"] = "step"


class Counted:
    """The oracle, its calls counted and priced; `step` is set by the trainer."""

    def __init__(self, oracle: Any):
        self.oracle, self.step, self.training = oracle, 0, True
        self.calls, self.usd, self.asked = 0, 0.0, Counter[Any]()

    async def __call__(self, messages: Any, *, repeat: int | None = None, session: str | None = None) -> Reply:
        reply = await self.oracle(messages, repeat=repeat, session=session)
        if self.training:
            self.calls += 1
            self.asked[self.step, json.dumps(messages)] += 1
            usage = priced(reply.usage.prompt_tokens, reply.usage.completion_tokens, PRICES["gpt-4o-mini"])
            self.usd += usage.cost_usd
            return replace(reply, usage=usage)
        return reply

    @property
    def twice(self) -> int:
        """Calls that were made though the same had been said in their step."""
        return self.calls - len(self.asked)


class Looks(TrainerCallback):
    """Asks held-out questions after every step, and ends training when enough are answered."""

    def __init__(self, trainer: Any, chat: Counted, test: Sequence[Any], seed: int):
        self.trainer, self.chat, self.test, self.seed = trainer, chat, list(test)[:QUESTIONS], seed
        self.curve: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.chat.step = state.global_step
        if state.global_step % EVERY and state.global_step < state.max_steps:
            return
        trainer, self.chat.training = self.trainer, False
        environment = LLMEnvironment(self.chat)
        agent = PromptAgent(trainer.model, trainer.processing_class, environment, trainer.spec, max_batch_size=256)
        rollouts = agent.answer_all(self.test, seed=self.seed, progress=False)
        trainer.model.train()
        self.chat.training = True
        right = share(int(exact_match(one.answer or "", one.row["answers"])) for one in rollouts)
        look = {"step": state.global_step, "calls": self.chat.calls, "usd": round(self.chat.usd, 6)}
        self.curve.append({**look, "exact_match": right.mean, "interval": [round(right.low, 4), round(right.high, 4)]})
        log(f"  step {state.global_step}: {right.mean:.3f} after {self.chat.calls} calls")
        control.should_training_stop |= right.mean >= GOOD


def run(name: str, seed: int, world: str, prepared: Any, folder: Path, max_steps: int | None) -> dict[str, Any]:
    """Train with one setting until the agent is good, or the steps are over."""
    changes = dict(SETTINGS[name])
    oracle, sandbox, system_prompt = prepared
    chat = Counted(oracle)
    environment = LLMEnvironment(chat, share_replies=changes.pop("share_replies"))
    values = {key: value for key, value in yaml.safe_load(CONFIG.read_text()).items() if key != "sandbox"}
    values |= {"output_dir": str(folder / name.replace(" ", "-")), "seed": seed, **changes}
    values |= {"max_steps": max_steps or values["max_steps"], "disable_tqdm": True, "rollouts_max_mb": 0}
    options: dict[str, Any] = {"environment": environment, "prompt_template": sandbox.spec.prompt_template}
    if world == "plain":
        kind: Any = PromptR1Trainer
        args: Any = PromptR1Config(**values)
    else:
        kind, args = MultiTurnGRPOTrainer, MultiTurnGRPOConfig(**values)
        options |= {"system_prompt": system_prompt, "reward_funcs": PromptR1Reward()}
    trainer = kind(str(sandbox.model), args=args, train_dataset=sandbox.train, **options)
    looks = Looks(trainer, chat, sandbox.test, seed)
    trainer.add_callback(looks)
    started = time.perf_counter()
    with redirect_stdout(io.StringIO()):
        trainer.train()
    last = looks.curve[-1]
    log(f"seed {seed}, {world}: {name}: {last['calls']} calls, {time.perf_counter() - started:.0f} s")
    twice = chat.twice if SETTINGS[name]["share_replies"] == "step" else None
    return {**last, "reached": last["exact_match"] >= GOOD, "paid_twice": twice, "curve": looks.curve}


def prepare(seed: int, world: str, folder: Path) -> tuple[Any, Any, str | None]:
    """The oracle, the data with a warm-started policy, and the system prompt, if the world has one."""
    with redirect_stdout(io.StringIO()):
        if world == "plain":
            return Oracle(seed=seed), prepare_sandbox(folder, seed), None
        guarded = prepare_guarded(folder, seed)
    rules = SystemPrompt(PREAMBLE, tuple(say(*rule) for rule in guarded.oracle.rules.items()))
    return guarded.oracle, guarded, rules.text


# --- the gradient's bias, of the rules alone ----------------------------------------------------------------------


def biases(draws: int, rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """How far the expected gradient of a rule is from that of full groups, relative to its length, with intervals.

    Groups of 8 of a policy of one decision between four actions, three of them hopeless, with advantages as the
    sandbox has them (`scale_rewards="group"`) and without the division.
    """
    chances, worth = np.array([0.3, 0.3, 0.3, 0.1]), np.array([1.0, -0.4, -1.0, 0.0])
    actions = rng.choice(4, (draws, 8), p=chances)
    rewards, score = torch.tensor(worth[actions]), torch.tensor(np.eye(4)[actions] - chances)
    played = torch.tensor(rng.random((draws, 8)) < 0.2) | (rewards == 1.0)
    weights = torch.where(rewards == 1.0, 1.0, 5.0) * played
    whole, luck = torch.ones_like(rewards), rng.random(draws)
    groups = torch.tensor([group_weight(r[:2], 0.25, u) for r, u in zip(rewards.tolist(), luck, strict=True)])
    found = {}
    for scale in (False, True):
        full = (honest_advantages(rewards, whole, scale)[..., None] * score).sum(1)
        seen = torch.where(played, rewards, torch.nan)
        rules = {
            "groups that grow": groups[:, None] * full,
            "hopeless ended": (honest_advantages(seen, weights, scale)[..., None] * score).sum(1),
        }
        direction = full.mean(0) / full.mean(0).norm()
        for name, estimate in rules.items():
            along = ((estimate - full) @ direction / full.mean(0).norm()).numpy()
            mean, error = along.mean(), 1.96 * along.std() / draws**0.5
            low, high = float(mean - error), float(mean + error)
            known = {
                "bias": round(float(mean), 4),
                "low": round(low, 4),
                "high": round(high, 4),
                "free": low <= 0 <= high,
            }
            found[f"{name}, {'divided by the deviation' if scale else 'not divided'}"] = known
    return found


# --- the script ---------------------------------------------------------------------------------------------------


def overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def summary(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Each setting's calls against today's, seed by seed."""
    rows = {}
    for name, runs in results.items():
        pairs = list(zip(runs, results["today"], strict=True))
        ratios = [one["calls"] / today["calls"] for one, today in pairs]
        interval = bootstrap_interval(ratios) if len(ratios) > 1 else None
        rows[name] = {
            "calls_ratio": round(sum(ratios) / len(ratios), 4),
            "interval": [round(interval.low, 4), round(interval.high, 4)] if interval else None,
            "usd_ratio": round(sum(one["usd"] / today["usd"] for one, today in pairs) / len(pairs), 4),
            "reached": sum(one["reached"] for one in runs),
            "scores_overlap": all(overlap(one["interval"], today["interval"]) for one, today in pairs),
            "paid_twice": sum(one["paid_twice"] or 0 for one in runs),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Calls until the sandbox's agent is good.")
    parser.add_argument("--quick", action="store_true", help="one seed of the plain world, three settings")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: five, or the first of them with --quick")
    parser.add_argument("--worlds", nargs="+", choices=("plain", "guarded"), help="default: both; --quick: plain")
    parser.add_argument(
        "--settings", nargs="+", choices=tuple(SETTINGS), help="default: each; --quick: today, shared, all"
    )
    parser.add_argument("--max-steps", type=int, help="default: those of the demo, 40")
    parser.add_argument("--warm-starts", type=Path, help="keep them in this folder, and use those found there")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    worlds = options.worlds or (("plain",) if options.quick else ("plain", "guarded"))
    names = options.settings or (("today", "replies shared", "all") if options.quick else tuple(SETTINGS))
    names = ("today", *(name for name in names if name != "today"))
    started, found = time.perf_counter(), {}
    for world in worlds:
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for seed in seeds:
            with tempfile.TemporaryDirectory() as temporary:
                folder = (options.warm_starts or Path(temporary)) / f"{seed}-{world}"
                prepared = prepare(seed, world, folder)
                for name in names:
                    results[name].append(run(name, seed, world, prepared, Path(temporary), options.max_steps))
        found[world] = {"settings": summary(results), "runs": results}
    bias = biases(20_000 if options.quick else 1_000_000, np.random.default_rng(0))
    for world, one in found.items():
        print(f"\n{world}\n\n| setting | calls / today's | dollars / today's | reached | paid twice |")
        print("|---|---|---|---|---|")
        for name, row in one["settings"].items():
            reached = f"{row['reached']} of {len(seeds)}"
            cells = (name, row["calls_ratio"], row["usd_ratio"], reached, row["paid_twice"])
            print(f"| {' | '.join(map(str, cells))} |")
    if options.json:
        last = [one["settings"][names[-1]] for one in found.values()]  # all settings at once, where they were run
        shared = [row["calls_ratio"] for one in found.values() if (row := one["settings"].get("replies shared"))]
        head = {
            "calls_ratio": max(row["calls_ratio"] for row in last),
            "calls_ratio_shared": max(shared, default=None),
            "scores_overlap": all(row["scores_overlap"] for row in last),
            "paid_twice": sum(row["paid_twice"] for one in found.values() for row in one["settings"].values()),
        }
        seconds = round(time.perf_counter() - started)
        print(json.dumps({**head, "bias": bias, "seeds": list(seeds), "worlds": found, "seconds": seconds}))


if __name__ == "__main__":
    main()
