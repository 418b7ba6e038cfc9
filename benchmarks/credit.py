"""Credit per turn in the sandbox, by the protocol in docs/evidence.md: rollouts until an agent is good, by rule.

    OMP_NUM_THREADS=1 python benchmarks/credit.py --json            # ten reported seeds, both worlds: hours
    OMP_NUM_THREADS=1 python benchmarks/credit.py --json --quick    # a seed for tuning, one world: minutes

Appends a record for each run to `--records`; what is recorded is not run again. The figures are those of the sandbox, a
policy of 390,000 parameters; they say nothing about real models. The last line of `--json` holds `turn_over_rollout`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lab import DEMO, RECORDS, Records, interval, log, markdown, quiet, settings, train

SEEDS, TUNING_SEED = tuple(range(901, 911)), 1
WORLDS = ("doors", "countries")
RULES: dict[str, dict[str, Any]] = {
    "rollout": {"rule": "rollout"},
    "turn": {"rule": "turn"},
    "turn, discount .5": {"rule": "turn", "discount": 0.5},
    "state": {"rule": "state"},
}
BATCH, GROUP, MOST_STEPS = 64, 8, 60
GOOD, WINDOW = 0.85, 3  # the mean success of so many steps in a row

COLOURS = ("amber", "blue", "coral", "green", "ivory", "plum", "red", "teal")
KEYS = ("anchor", "bell", "candle", "drum", "engine", "feather", "glove", "hammer")
DOORS, RIGHT, WARM_STEPS, ROWS = 4, 0.7, 200, 1024
FIRST_DOOR, NEXT_DOOR, NO_DOOR = "the first door is {} .", "the next door is {} .", "all doors are done ."
ASK = "<think> door </think> <interaction_prompt> {} </interaction_prompt>"
END = "<think> done </think> <answer> done </answer>"

Entries = Sequence[Mapping[str, Any]]
Success = Callable[[Any], bool]


# --- the world of doors -----------------------------------------------------------------------------------------------


def draw_keys(seed: int) -> dict[str, str]:
    """Each colour's own word."""
    return dict(zip(COLOURS, random.Random(f"keys {seed}").sample(KEYS, len(KEYS)), strict=True))


def draw_rows(n: int, draw: random.Random) -> list[dict[str, Any]]:
    """Questions: four doors in a row."""
    many = [draw.choices(COLOURS, k=DOORS) for _ in range(n)]
    return [{"question": FIRST_DOOR.format(doors[0]), "answers": ["done"], "doors": doors} for doors in many]


def next_door(rollout: Any) -> str:
    """The environment: the next door, whether the word for this one was right or not."""
    number = len(rollout.turns)
    return NEXT_DOOR.format(rollout.row["doors"][number]) if number < DOORS else NO_DOOR


def door_rewards(rollout: Any, keys: Mapping[str, str]) -> list[float]:
    """1 for a right word at a door, and for an answer after the last one; 0 for anything else."""
    words = [(turn.request or "").strip() for turn in rollout.turns]
    return [
        float(words[place] == keys[rollout.row["doors"][place]] if place < DOORS else turn.kind == "answer")
        for place, turn in enumerate(rollout.turns)
    ]


def prepare_doors(folder: Path, seed: int) -> Any:
    """The world with its policy, warm-started to say the right word in .7 of its turns."""
    from datasets import Dataset

    from agentic_prompting.rollout import rollout_from_trace
    from agentic_prompting.sandbox.policy import build_policy, build_tokenizer, sandbox_spec, save_policy
    from agentic_prompting.sandbox.recipe import SFT
    from agentic_prompting.sandbox.setup import Sandbox
    from agentic_prompting.trainers import warm_start

    keys, draw, spec = draw_keys(seed), random.Random(f"doors {seed}"), sandbox_spec(DOORS + 1)
    texts = (*COLOURS, *KEYS, FIRST_DOOR, NEXT_DOOR, NO_DOOR, "door done")
    words = sorted({word for text in texts for word in text.split()} - {"{}"})
    rows, model = draw_rows(ROWS, draw), folder / "warm_start"
    if not model.exists():
        tokenizer = build_tokenizer(words)
        form, policy, traces = spec.tokens(tokenizer), build_policy(tokenizer, seed), []
        for row in draw_rows(32 * WARM_STEPS, draw):
            right = [keys[colour] for colour in row["doors"]]
            read = [key if draw.random() < RIGHT else draw.choice([one for one in KEYS if one != key]) for key in right]
            seen = [*(NEXT_DOOR.format(colour) for colour in row["doors"][1:]), NO_DOOR]
            trace = {**row, "turns": [*map(ASK.format, read), END], "observations": seen}
            traces.append(rollout_from_trace(trace, spec, form))
        warm_start(
            policy, tokenizer, traces, folder / "sft", max_steps=WARM_STEPS, per_device_train_batch_size=32, seed=seed,
            bf16=False, use_cpu=True, gradient_checkpointing=False, **SFT,
        )  # fmt: skip
        save_policy(policy, tokenizer, spec, model)
    return Sandbox(model=model, spec=spec, train=Dataset.from_list(rows), test=Dataset.from_list([]))


# --- the demo's world -------------------------------------------------------------------------------------------------


def country_rewards(rollout: Any) -> list[float]:
    """.5 over the number of needed facts for the first request of each; the right answer in the last turn is 1."""
    from agentic_prompting import exact_match
    from agentic_prompting.sandbox import parse_question

    question = parse_question(rollout.row["question"])
    assert question is not None
    needed = {text for text, _ in question.path}
    rewards: list[float] = []
    for turn in rollout.turns:
        asked = parse_question(turn.request or "")
        is_needed = asked is not None and asked.text in needed
        needed -= {asked.text} if asked is not None else set()
        rewards.append(0.5 / question.hops if is_needed else 0.0)
    if rewards and rollout.answer is not None:
        rewards[-1] = exact_match(rollout.answer, rollout.row["answers"])
    return rewards


# --- a run ------------------------------------------------------------------------------------------------------------


def world_of(world: str, seed: int, folder: Path) -> tuple[Any, Any, Callable[[Any], list[float]], Success]:
    """A world's sandbox, environment, rewards by turn, and what a success is."""
    from agentic_prompting import LLMEnvironment, exact_match
    from agentic_prompting.sandbox import Oracle
    from agentic_prompting.sandbox.setup import prepare_sandbox

    if world == "countries":
        sandbox = prepare_sandbox(folder, seed)
        solved = lambda one: bool(exact_match(one.answer or "", one.row["answers"]))  # noqa: E731
        return sandbox, LLMEnvironment(Oracle(seed=seed)), country_rewards, solved
    keys = draw_keys(seed)
    opened = lambda one: sum(door_rewards(one, keys)) == DOORS + 1  # noqa: E731
    return prepare_doors(folder, seed), next_door, lambda one: door_rewards(one, keys), opened


def measure(world: str, rule: str, seed: int, folder: Path, most_steps: int) -> dict[str, Any]:
    """Train until the agent is good: the record of a run."""
    from credit_rules import CreditTrainer
    from transformers import TrainerCallback

    from agentic_prompting import MultiTurnGRPOConfig

    sandbox, environment, by_turn, succeeds = world_of(world, seed, folder / world)
    success: list[float] = []
    wrong: list[int] = []  # wrong turns of each failing rollout of the first step

    def reward(rollout: Any, **columns: Any) -> list[float]:
        solved, rewards = [succeeds(one) for one in rollout], [by_turn(one) for one in rollout]
        if not success:
            wrong.extend(one.count(0.0) for one, is_right in zip(rewards, solved, strict=True) if not is_right)
        success.append(fmean(solved))
        return [sum(one) for one in rewards]

    def is_good() -> bool:
        return len(success) >= WINDOW and fmean(success[-WINDOW:]) >= GOOD

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = control.should_training_stop or is_good()

    started = time.perf_counter()
    options = {"per_device_train_batch_size": BATCH, "num_generations": GROUP, "lr_scheduler_type": "constant"}
    place = folder / world / rule.replace(" ", "_")
    args = MultiTurnGRPOConfig(
        **settings(DEMO, output_dir=str(place), seed=seed, max_steps=most_steps, overwrite=True, **options)
    )
    train(
        CreditTrainer, args, sandbox, environment, lambda trainer: trainer.add_callback(Stop()),
        reward_funcs=reward, by_turn=by_turn, **RULES[rule],
    )  # fmt: skip
    return {
        "world": world, "rule": rule, "seed": seed, "rollouts": BATCH * len(success), "reached": is_good(),
        "success": [round(one, 4) for one in success], "one_wrong": round(wrong.count(1) / max(len(wrong), 1), 3),
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


# --- the table --------------------------------------------------------------------------------------------------------


def ratio(records: Entries, world: str, rule: str) -> dict[str, float | None] | None:
    """Rollouts of a rule over those of `rollout`, paired by seed: the geometric mean and its interval."""
    played = {(one["rule"], one["seed"]): one["rollouts"] for one in records if one["world"] == world}
    seeds = [seed for name, seed in played if name == "rollout" and (rule, seed) in played]
    if not seeds:
        return None
    logs = interval([math.log(played[rule, seed] / played["rollout", seed]) for seed in seeds])
    return {name: None if value is None else round(math.exp(value), 3) for name, value in logs.items()}


def table(records: Entries) -> str:
    """Rollouts by world and rule, and their ratio to those of `rollout`."""
    rows = []
    for world in WORLDS:
        for rule in RULES:
            own = [one for one in records if (one["world"], one["rule"]) == (world, rule)]
            if not own:
                continue
            found, missed = ratio(records, world, rule), sum(not one["reached"] for one in own)
            ends = "one seed" if not found or found["low"] is None else f"{found['low']:.3f}, {found['high']:.3f}"
            over = "" if rule == "rollout" or not found else f"{found['mean']:.3f} [{ends}]"
            rows.append([world, rule, f"{fmean(one['rollouts'] for one in own):.0f}", f"{missed} of {len(own)}", over])
    return markdown(("world", "credit", f"rollouts until {GOOD}", "not reached", "over rollout [95 %]"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="one seed that is not reported, in the world of doors")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS}; with --quick {TUNING_SEED}")
    parser.add_argument("--steps", type=int, default=MOST_STEPS, help="at most; the protocol has 60")
    parser.add_argument("--folder", type=Path, default=Path("runs/credit"), help="policies and runs")
    parser.add_argument("--records", type=Path, help="default: records/credit.jsonl.gz; with --quick in the folder")
    options = parser.parse_args()
    quiet()
    folder = options.folder / "quick" if options.quick else options.folder
    records = Records(options.records or (folder if options.quick else RECORDS) / "credit.jsonl.gz")
    for world in WORLDS[:1] if options.quick else WORLDS:
        for seed in options.seeds or ((TUNING_SEED,) if options.quick else SEEDS):
            for rule, *_ in records.missing(("rule", "seed", "world"), [(rule, seed, world) for rule in RULES]):
                found = measure(world, rule, seed, folder / str(seed), options.steps)
                records.add(found)
                end = f"{found['rollouts']} rollouts" + ("" if found["reached"] else ", not reached")
                log(f"{world}, seed {seed}, {rule}: {end}")
    found = records.read()
    print(table(found))
    if options.json:
        ratios = {world: {rule: ratio(found, world, rule) for rule in RULES if rule != "rollout"} for world in WORLDS}
        turn = ratios["doors"]["turn"]
        print(json.dumps({"quick": options.quick, "turn_over_rollout": turn and turn["mean"], "ratios": ratios}))


if __name__ == "__main__":
    main()
