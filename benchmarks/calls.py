"""Calls of the large LLM until the sandbox's agent is good: today, each setting that saves some, all of them.

    OMP_NUM_THREADS=1 python benchmarks/calls.py --json            # 5 seeds, both worlds, some hours
    OMP_NUM_THREADS=1 python benchmarks/calls.py --json --quick    # 1 seed for tuning, 3 settings: under ten minutes

Each run is appended to `--records` when it ends, and what is recorded is not run again; the table on
docs/howto/save_calls.md is made of these records by `benchmarks/recompute.py`.

**Protocol.** All settings of a seed share one warm start and train as the demo does, its decay of the learning rate
over 40 steps included. Every second step they are asked the same 256 questions, of countries that no training question
names, until exact match is .85 (guarded: see `GOOD`), or 24 steps are over. Counted are the calls of training that were
made, not those answered by a shared reply; a run that never gets there counts all of its calls, and says so. In the
guarded world the oracle refuses who does not know its rules; here they are in the system prompt, and temperature and
learning rate are those of the world's own configuration, .7 and 5e-4 throughout. Good is .6 there, since no setting
comes much above .7 in 24 steps. Chosen on seeds for tuning: today's training reached it on two of three and stayed at a
third of the questions on the other, at temperature 1 and at the demo's learning rate likewise on one. *All* has every
setting on, with the values they have alone. Seeds 1, 2 and 3 are for tuning, 201 to 205 are reported, run once. (In the
plain world an earlier version had been seen of 201, with looks after every step and a learning rate that was 0 after
12; no value was changed for it. In the guarded world none had been seen when this was written. All were run a second
time: in the first a look could leave the model in evaluation for the step after it, by a mistake in the engine that a
step asked and paid twice gave away.) The gradient's bias and noise are those of the rules alone, in a problem of one
decision, with 95 % intervals. It measures the sandbox: a policy of 390,000 parameters and a scripted oracle, priced
like gpt-4o-mini.
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
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import yaml
from league import CONFIG as GUARDED_CONFIG, read_records
from prompt_r1_sandbox import CONFIG, log
from recompute import calls_table, of_settings
from records import RECORDS as RECORDED, record
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
from agentic_prompting.evaluation import wilson_interval
from agentic_prompting.llm import Reply
from agentic_prompting.llm.budget import PRICES
from agentic_prompting.llm.wire import priced
from agentic_prompting.rewards import PromptR1Reward
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.guarded import PREAMBLE, say
from agentic_prompting.sandbox.setup import prepare_guarded, prepare_sandbox
from agentic_prompting.trainers import MultiTurnGRPOConfig
from agentic_prompting.trainers.saving_calls import group_weight, honest_advantages

RECORDS = RECORDED / "calls.jsonl.gz"
BIAS = RECORDED / "bias.jsonl.gz"  # one line, the latest
SEEDS, TUNING_SEEDS = (201, 202, 203, 204, 205), (1, 2, 3)  # none that the sandbox was made with
GOOD = {"plain": 0.85, "guarded": 0.6}  # exact match to reach
EVERY, MOST, QUESTIONS = 2, 24, 256  # steps between two looks; steps at most; held-out questions of a look
SETTINGS: dict[str, dict[str, Any]] = {
    "today": {"share_replies": "never"},
    "replies shared": {"share_replies": "step"},
    "groups that grow": {"share_replies": "never", "group_start": 4},
    "refilled": {"share_replies": "never", "refill_rounds": 2},
    "curriculum": {"share_replies": "never", "curriculum_rare": 0.2},
    "hopeless ended": {"share_replies": "never", "hopeless_share": 0.5},
}
SETTINGS["all"] = {name: value for setting in SETTINGS.values() for name, value in setting.items()}
SETTINGS["all"]["share_replies"] = "step"
REPORTED = ("today", "replies shared", "groups that grow", "refilled", "curriculum", "hopeless ended", "all")


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
    """Asks held-out questions every second step, and ends training when enough are answered."""

    def __init__(self, trainer: Any, chat: Counted, test: Sequence[Any], seed: int, good: float):
        self.trainer, self.chat, self.test, self.seed, self.good = trainer, chat, list(test)[:QUESTIONS], seed, good
        self.curve: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.chat.step = state.global_step
        if state.global_step % EVERY:
            return
        trainer, self.chat.training = self.trainer, False
        environment = LLMEnvironment(self.chat)
        agent = PromptAgent(trainer.model, trainer.processing_class, environment, trainer.spec, max_batch_size=256)
        rollouts = agent.answer_all(self.test, seed=self.seed, progress=False)
        trainer.model.train()
        self.chat.training = True
        answered = [exact_match(one.answer or "", one.row["answers"]) for one in rollouts]
        right = wilson_interval(sum(answered), len(answered))
        look = {"step": state.global_step, "calls": self.chat.calls, "usd": round(self.chat.usd, 6)}
        look["different"] = len(self.chat.asked)  # within their steps: what sharing pays for
        self.curve.append({**look, "exact_match": right.mean, "interval": [round(right.low, 4), round(right.high, 4)]})
        log(f"  step {state.global_step}: {right.mean:.3f} after {self.chat.calls} calls")
        control.should_training_stop |= right.mean >= self.good or state.global_step >= MOST


def run(name: str, seed: int, world: str, prepared: Any, folder: Path) -> dict[str, Any]:
    """Train with one setting until the agent is good, or the steps are over; its record."""
    changes = dict(SETTINGS[name])
    oracle, sandbox, system_prompt = prepared
    chat = Counted(oracle)
    environment = LLMEnvironment(chat, share_replies=changes.pop("share_replies"))
    values = {key: value for key, value in yaml.safe_load(CONFIG.read_text()).items() if key != "sandbox"}
    values |= {"output_dir": str(folder / name.replace(" ", "-")), "seed": seed, **changes}
    values |= {"disable_tqdm": True, "rollouts_max_mb": 0}
    options: dict[str, Any] = {"environment": environment, "prompt_template": sandbox.spec.prompt_template}
    if world == "plain":
        kind: Any = PromptR1Trainer
        args: Any = PromptR1Config(**values)
    else:
        kind, args = MultiTurnGRPOTrainer, MultiTurnGRPOConfig(**{**values, **_of_guarded_world()})
        options |= {"system_prompt": system_prompt, "reward_funcs": PromptR1Reward()}
    trainer = kind(str(sandbox.model), args=args, train_dataset=sandbox.train, **options)
    looks = Looks(trainer, chat, sandbox.test, seed, GOOD[world])
    trainer.add_callback(looks)
    started = time.perf_counter()
    with redirect_stdout(io.StringIO()):
        trainer.train()
    last, seconds = looks.curve[-1], round(time.perf_counter() - started)
    log(f"seed {seed}, {world}: {name}: {last['calls']} calls, {seconds} s")
    twice = chat.twice if SETTINGS[name]["share_replies"] == "step" else None
    about = {"world": world, "seed": seed, "setting": name, "values": SETTINGS[name]}
    left_out = [entry.get("rollout/left_out", 0.0) for entry in trainer.state.log_history if "loss" in entry]
    reached = last["exact_match"] >= GOOD[world]
    end = {"reached": reached, "paid_twice": twice, "curve": looks.curve, "left_out": left_out, "seconds": seconds}
    return {**about, **last, **end}


def _of_guarded_world() -> dict[str, Any]:
    """What that world's own configuration says of sampling and learning."""
    values = yaml.safe_load(GUARDED_CONFIG.read_text())
    return {name: values[name] for name in ("temperature", "learning_rate", "lr_scheduler_type")}


def prepare(seed: int, world: str, folder: Path) -> tuple[Any, Any, str | None]:
    """The oracle, the data with a warm-started policy, and the system prompt, if the world has one."""
    with redirect_stdout(io.StringIO()):
        if world == "plain":
            return Oracle(seed=seed), prepare_sandbox(folder, seed), None
        guarded = prepare_guarded(folder, seed)
    rules = SystemPrompt(PREAMBLE, tuple(say(*rule) for rule in guarded.oracle.rules.items()))
    return guarded.oracle, guarded, rules.text


# --- the gradient's bias, of the rules alone ----------------------------------------------------------------------


SHARE, GROWING = 0.5, ((4, 0.5), (2, 0.25))  # of the hopeless that are played on; first rollouts and chances of groups


def biases(draws: int, rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """How far the expected gradient of a rule is from that of full groups, relative to its length, with intervals; and
    its noise: how many groups it takes, full groups taken as 1, for a mean gradient that is as sure.

    Groups of 8 of a policy of one decision between four actions, three of them hopeless, with advantages as the
    sandbox has them (`scale_rewards="group"`) and without the division.
    """
    chances, worth = np.array([0.3, 0.3, 0.3, 0.1]), np.array([1.0, -0.4, -1.0, 0.0])
    actions = rng.choice(4, (draws, 8), p=chances)
    rewards, score = torch.tensor(worth[actions]), torch.tensor(np.eye(4)[actions] - chances)
    played = torch.tensor(rng.random((draws, 8)) < SHARE) | (rewards == 1.0)
    weights = torch.where(rewards == 1.0, 1.0, 1 / SHARE) * played
    whole, luck = torch.ones_like(rewards), rng.random(draws)
    grown = {}
    for start, chance in GROWING:
        firsts = zip(rewards[:, :start].tolist(), luck, strict=True)
        weights_of_groups = [group_weight(first, chance, draw) for first, draw in firsts]
        grown[f"{start} first, chance {chance}"] = torch.tensor(weights_of_groups)[:, None]
    found = {}
    for scale in (False, True):
        full = (honest_advantages(rewards, whole, scale)[..., None] * score).sum(1)
        seen = torch.where(played, rewards, torch.nan)
        rules = {
            **{name: groups * full for name, groups in grown.items()},
            "hopeless ended": (honest_advantages(seen, weights, scale)[..., None] * score).sum(1),
        }
        direction, noise = full.mean(0) / full.mean(0).norm(), full.var(0).sum()
        for name, estimate in rules.items():
            along = ((estimate - full) @ direction / full.mean(0).norm()).numpy()
            mean, error = float(along.mean()), float(1.96 * along.std() / draws**0.5)
            found[f"{name}, {'divided by the deviation' if scale else 'not divided'}"] = {
                **{"bias": round(mean, 4), "low": round(mean - error, 4), "high": round(mean + error, 4)},
                **{"free": abs(mean) <= error, "noise": round(float(estimate.var(0).sum() / noise), 3)},
            }
    return found


# --- the script ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Calls until the sandbox's agent is good.")
    parser.add_argument("--quick", action="store_true", help="one seed for tuning, plain world, three settings")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS}")
    parser.add_argument("--worlds", nargs="+", choices=GOOD, help="default: both")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help=f"default: {REPORTED}")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/calls"), help="warm starts, made where there are none"
    )
    parser.add_argument("--records", type=Path, help="default: records/calls.jsonl.gz; with --quick in the folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    seeds = options.seeds or (TUNING_SEEDS[:1] if options.quick else SEEDS)
    worlds = options.worlds or (("plain",) if options.quick else tuple(GOOD))
    names = options.settings or (("today", "replies shared", "all") if options.quick else REPORTED)
    records, started = options.records or (options.folder / "quick.jsonl.gz" if options.quick else RECORDS), time.time()
    known = {(one["world"], one["setting"], one["seed"]) for one in read_records(records)}
    for world, name, seed in product(worlds, names, seeds):
        if (world, name, seed) in known:
            continue
        prepared = prepare(seed, world, options.folder / f"{seed}-{world}")
        with tempfile.TemporaryDirectory() as temporary:
            record(records, run(name, seed, world, prepared, Path(temporary)))
    found = read_records(records)
    bias = biases(20_000 if options.quick else 200_000, np.random.default_rng(0))
    if records == RECORDS:
        BIAS.unlink(missing_ok=True)
        record(BIAS, {"rules": bias})
    print(calls_table(found))
    if options.json:
        rows = of_settings(found)
        ratios = {name: [one["calls_ratio"]["mean"] for (_, key), one in rows.items() if key == name] for name in names}
        head = {
            "calls_ratio": max(ratios.get("all", []), default=None),
            "calls_ratio_shared": max(ratios.get("replies shared", []), default=None),
            "scores_overlap": all(one["overlap"] for (_, name), one in rows.items() if name == "all"),
            "paid_twice": sum(one["paid_twice"] or 0 for one in found),
        }
        settings = {f"{world}: {name}": row for (world, name), row in rows.items()}
        print(json.dumps({**head, "bias": bias, "settings": settings, "seconds": round(time.time() - started)}))


if __name__ == "__main__":
    main()
