"""What `headroom` says of the sandbox's worlds, and what is true there. **Sandbox**: nothing about real models.

    python -m benchmarks.learning.headroom_worlds              # what is missing of 20 seeds; about 20 minutes
    python -m benchmarks.learning.headroom_worlds --report     # the tables, from records/headroom.jsonl.gz
    python -m benchmarks.learning.headroom_worlds --seeds 2 --records /tmp/two.jsonl.gz

E-SPL's sandbox: an agent behind a chat model, of which only the system prompt can change. In `rules` some facts are
given only to requests that carry a word, which a prompt can state; in `unguarded` no fact is guarded, and the prompts
state words and nothing else, so that none can help; in `misleading` the start prompt gives words that are out of date.
`habits`, by name, has an agent that heeds no way to proceed; prompts move it all the same. A draw has rules and prompts
of its own; the agent is one for each world. The eleven challengers are what a reflector that is often wrong might
write: each states some words, right or wrong, and most of them a way to proceed. `truth` is the gain of the chosen
prompt over all 840 questions, each answered once under both prompts.

Prompt-R1's demo: its warm start (seed 42) and its oracle. The floor is pass@1 on 64 of the 256 held-out questions,
whose recorded score before training is in `records/demo.jsonl.gz`. The signal is the share of differing groups on 64
training questions under the reward of the training; the trainer itself plays 256 groups at a learning rate of 0.

Protocol, written before the runs. Seeds 0 to 19; `delta` 0.10; 512 calls and a top-up of 800 at most for prompts; all
seeds are reported. A verdict is wrong if it is "worth it" and the truth is 0 or less, or "not worth it" and the truth
is 0.10 or more. The promise is kept if

1. `rules`: "worth it" in 18 of 20 draws at least,
2. `unguarded`: "not worth it" in 16 of 20 at least, "worth it" in 1 at most,
3. `misleading`: a wrong verdict in 1 of 20 at most,
4. each of these worlds: the interval holds the truth in 17 of 20 at least,
5. demo: the interval of pass@1 holds the recorded score before training in 17 of 20 at least, and the interval of
   differing groups holds the trainer's share in 17 of 20 at least,
6. demo: the recorded score after training is above the ceiling of a single request, because the agent asks several
   times: headroom must not say "not worth it" in any draw.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lab import DEMO, RECORDS as RECORDED, Records, log, markdown, quiet, settings, train

RECORDS = RECORDED / "headroom.jsonl.gz"
WORLDS = ("rules", "unguarded", "misleading")
SEEDS = 20
CHALLENGERS = 11
# How often a challenger's word is right.
RIGHT = {"rules": 0.9, "unguarded": 0.9, "misleading": 0.5, "habits": 0.9}
DELTA = 0.10
TRAINER_STEPS = 16  # of 16 groups each
GROUP_SIZE = 8

NOT_RECORDED = "No run of it has been recorded yet."

Entry = Mapping[str, Any]


# --- measuring ------------------------------------------------------------------------------------------------------


def challengers(world: str, rules: Mapping[str, str], rng: random.Random) -> list[str]:
    """Prompts that a reflector might write: words for some of the guarded relations, and how to proceed."""
    from agentic_prompting.evolution import SystemPrompt
    from agentic_prompting.sandbox.guarded import HASTY, PREAMBLE, STEPWISE, WHOLE, WORDS, say
    from agentic_prompting.sandbox.world import sought

    prompts = []
    for _ in range(CHALLENGERS):
        principles = []
        for relation, word in rules.items():
            if rng.random() < 0.5:
                is_right = rng.random() < RIGHT[world]
                principles.append(say(sought(relation), word if is_right else rng.choice(WORDS)))
        if world != "unguarded":
            principles += rng.choices([[STEPWISE], [WHOLE], [HASTY], []], [0.5, 0.15, 0.1, 0.25])[0]
        prompts.append(SystemPrompt(PREAMBLE, tuple(principles)).text)
    return prompts


def measure_world(
    world: str, seeds: Sequence[int], folder: Path, keep: Callable[[Entry], None]
) -> None:
    """Measure each draw of rules of a world: the verdict, and the truth."""
    from agentic_prompting import LLMEnvironment, PromptAgent, headroom
    from agentic_prompting.evolution import SystemPrompt
    from agentic_prompting.rollout import fill_template
    from agentic_prompting.sandbox.guarded import PREAMBLE, WORDS, GuardedOracle, draw_rules, say
    from agentic_prompting.sandbox.setup import DEMO_SEED, AgentChat, prepare_guarded
    from agentic_prompting.sandbox.world import sought

    # One agent for all draws; its questions stand in its own template.
    is_guarded = world not in ("unguarded", "habits")
    sandbox = prepare_guarded(folder, DEMO_SEED, world="rules" if world == "unguarded" else world)
    template = sandbox.spec.prompt_template
    rows = [{**row, "question": fill_template(template, row["question"])} for row in sandbox.train]
    agent = PromptAgent.from_pretrained(sandbox.model, max_batch_size=256)
    for seed in seeds:
        # The rules of this draw, and the prompt that the user has so far.
        rng = random.Random(f"headroom {world} {seed}")
        rules = draw_rules(rng)
        start = SystemPrompt(PREAMBLE)
        if world == "misleading":
            unused = [word for word in WORDS if word not in rules.values()]
            outdated = rng.sample(unused, len(rules))
            principles = [
                say(sought(relation), word) for relation, word in zip(rules, outdated, strict=True)
            ]
            start = SystemPrompt(PREAMBLE, tuple(principles))
        agent.environment = LLMEnvironment(GuardedOracle(rules if is_guarded else {}, seed=seed))
        chat = AgentChat(agent, seed=seed)

        # Measure, then ask all questions under both prompts for the truth.
        started = time.process_time()
        prompts = [start.text, *challengers(world, rules, rng)]
        measured = headroom(rows, policy=chat, prompts=prompts, top_up_calls=800, seed=seed)
        seconds = time.process_time() - started
        assert measured.prompts is not None
        chosen = measured.texts[measured.prompts.chosen]
        truth = mean_score(chat, chosen, rows) - mean_score(chat, start.text, rows)
        gain = measured.prompts.gain
        keep(
            {
                "what": "world",
                "world": world,
                "seed": seed,
                "verdict": measured.prompts.verdict,
                "gain": [gain.mean, gain.low, gain.high],
                "truth": truth,
                "topped_up": measured.prompts.topped_up,
                "calls": sum(measured.calls.values()),
                "seconds": round(seconds, 1),
            }
        )
        log(f"{world} {seed}: {measured.prompts.sentence()}; truth {truth:+.3f}; {seconds:.0f} s")


def mean_score(chat: Any, prompt: str, rows: Sequence[Entry]) -> float:
    """The mean score of one answer to each row under a prompt."""
    from agentic_prompting.evaluation import PromptedSystem, score_records
    from agentic_prompting.evaluation.metrics import find_metrics

    answers = PromptedSystem(chat, prompt, max_in_flight=256)(rows, seed=1000)
    records = [
        {"answer": answer.text, "answers": row["answers"]}
        for answer, row in zip(answers, rows, strict=True)
    ]
    (scores,) = score_records(records, find_metrics(["exact_match"])).values()
    scored = [score for score in scores if score is not None]
    return sum(scored) / len(scored)


def measure_demo(seeds: Sequence[int], folder: Path, keep: Callable[[Entry], None]) -> None:
    """Measure the untrained agent of Prompt-R1's demo on several draws of rows."""
    from agentic_prompting import LLMEnvironment, PromptAgent, PromptR1Reward, headroom
    from agentic_prompting.llm import Message, Reply
    from agentic_prompting.sandbox import Oracle
    from agentic_prompting.sandbox.setup import DEMO_SEED, prepare_sandbox
    from agentic_prompting.sandbox.world import value_of

    sandbox = prepare_sandbox(folder, DEMO_SEED)
    oracle = Oracle(seed=DEMO_SEED)

    async def ask_oracle(messages: Sequence[Message], **sampling: Any) -> Reply:
        """The oracle's reply without the words around its answer."""
        reply = await oracle(messages, **sampling)
        return replace(reply, text=value_of(reply.text) or "")

    agent = PromptAgent.from_pretrained(sandbox.model, LLMEnvironment(oracle), max_batch_size=256)
    for seed in seeds:
        started = time.process_time()
        # The floor and the ceiling on held-out questions, in exact match.
        options: dict[str, Any] = {"agent": agent, "group_size": GROUP_SIZE, "seed": seed}
        # The oracle reads nothing but questions, so that other requests are questions, too.
        held_out = headroom(
            list(sandbox.test),
            llm=ask_oracle,
            requests=["{question}", "{question} "],
            repeats=1,
            calls=2048,
            **options,
        )
        # The signal on questions of the training, under its reward.
        signal = headroom(list(sandbox.train), reward=PromptR1Reward(), calls=2048, **options)
        seconds = time.process_time() - started
        assert held_out.signal is not None and held_out.requests is not None
        assert signal.signal is not None and signal.signal.differing is not None
        floor = held_out.signal.pass_at[1]
        best = held_out.signal.pass_at[GROUP_SIZE]
        differing = signal.signal.differing
        keep(
            {
                "what": "demo",
                "seed": seed,
                "floor": [floor.mean, floor.low, floor.high],
                "best": [best.mean, best.low, best.high],
                "request_ceiling": [held_out.requests.low, held_out.requests.high],
                "differing": [differing.mean, differing.low, differing.high],
                "verdict": held_out.training[0] if held_out.training else "",
                "signal_verdict": signal.signal.verdict,
                "calls": sum(held_out.calls.values()) + sum(signal.calls.values()),
                "seconds": round(seconds, 1),
            }
        )
        log(f"demo {seed}: floor {floor}, groups {differing}; {seconds:.0f} s")


def measure_trainer(folder: Path, keep: Callable[[Entry], None]) -> None:
    """Let the trainer play groups at a learning rate of 0, and count those that have a gradient."""
    from agentic_prompting import LLMEnvironment, PromptR1Config, PromptR1Trainer
    from agentic_prompting.sandbox import Oracle
    from agentic_prompting.sandbox.setup import DEMO_SEED, prepare_sandbox

    sandbox = prepare_sandbox(folder, DEMO_SEED)
    options = settings(
        DEMO, output_dir=str(folder / "run"), max_steps=TRAINER_STEPS, learning_rate=0.0
    )
    environment = LLMEnvironment(Oracle(seed=DEMO_SEED))
    trainer = train(PromptR1Trainer, PromptR1Config(**options), sandbox, environment)
    # TRL logs the share of groups whose rewards do not differ.
    flat = [
        entry["frac_reward_zero_std"]
        for entry in trainer.state.log_history
        if "frac_reward_zero_std" in entry
    ]
    groups_per_step = options["per_device_train_batch_size"] // options["num_generations"]
    keep(
        {
            "what": "trainer",
            "seed": 0,
            "groups": len(flat) * groups_per_step,
            "differing": round(sum(1 - share for share in flat) * groups_per_step),
        }
    )


# --- the records' tables --------------------------------------------------------------------------------------------


def is_wrong(draw: Entry) -> bool:
    """Whether the truth contradicts the verdict of a draw."""
    if draw["verdict"] == "worth it":
        return draw["truth"] <= 0
    return draw["verdict"] == "not worth it" and draw["truth"] >= DELTA


def holds(interval: Sequence[float], value: float) -> bool:
    """Whether an interval, `[mean, low, high]`, holds a value."""
    return interval[1] <= value <= interval[2]


def table(records: Sequence[Entry]) -> str:
    """Verdicts of each world, counted, beside the truth."""
    rows = []
    for world in dict.fromkeys(entry["world"] for entry in records if entry["what"] == "world"):
        draws = [entry for entry in records if entry.get("world") == world]
        verdicts = Counter(draw["verdict"] for draw in draws)
        truths = [draw["truth"] for draw in draws]
        rows.append(
            [
                world,
                len(draws),
                verdicts["worth it"],
                verdicts["not worth it"],
                verdicts["cannot tell"],
                sum(is_wrong(draw) for draw in draws),
                f"{min(truths):+.2f} to {max(truths):+.2f}",
                f"{sum(holds(draw['gain'], draw['truth']) for draw in draws)} of {len(draws)}",
                max(draw["calls"] for draw in draws),
                f"{max(draw['seconds'] for draw in draws):.0f} s",
            ]
        )
    titles = "world,draws,worth it,not worth it,cannot tell,wrong,true gain of the chosen prompt"
    titles += ",interval holds it,calls at most,processor time at most"
    return markdown(titles.split(","), rows)


def demo_table(records: Sequence[Entry]) -> str:
    """The demo's floor, signal and ceilings, beside what was recorded of its training."""
    draws = [entry for entry in records if entry["what"] == "demo"]
    trainers = [entry for entry in records if entry["what"] == "trainer"]
    if not draws or not trainers:
        return NOT_RECORDED
    trainer = trainers[-1]
    recorded = Records(RECORDED / "demo.jsonl.gz").read()[-1]["summary"]
    differing = trainer["differing"] / trainer["groups"]
    before = recorded["exact_match_before"]
    after = recorded["exact_match_after"]

    def spread(name: str) -> str:
        means = [draw[name][0] for draw in draws]
        return f"{min(means):.2f} to {max(means):.2f}"

    def held(name: str, value: float) -> str:
        return f"{sum(holds(draw[name], value) for draw in draws)} of {len(draws)}"

    low = min(draw["request_ceiling"][0] for draw in draws)
    high = max(draw["request_ceiling"][1] for draw in draws)
    rows = [
        ["floor: pass@1", spread("floor"), f"{before:.3f} before training", held("floor", before)],
        [
            "groups whose rewards differ",
            spread("differing"),
            f"{differing:.3f} of {trainer['groups']} groups in the trainer",
            held("differing", differing),
        ],
        ["best of 8 rollouts: pass@8", spread("best"), f"{after:.3f} after training", ""],
        [
            "ceiling of a single request",
            f"{low:.2f} to {high:.2f}",
            f"{after:.3f} after training, with several requests",
            "",
        ],
    ]
    return markdown(("", "headroom, over the draws", "recorded", "interval holds it"), rows)


def demo_verdicts(records: Sequence[Entry]) -> str:
    """The demo's verdicts on training, counted."""
    draws = [entry for entry in records if entry["what"] == "demo"]
    verdicts = Counter(draw["verdict"] for draw in draws)
    if not draws:
        return NOT_RECORDED
    return ", ".join(f"{verdict} in {count} of {len(draws)}" for verdict, count in verdicts.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", action="store_true", help="print the tables, measure nothing")
    parser.add_argument("--json", action="store_true", help="print the records instead of tables")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="draws of each world")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=tuple(RIGHT))
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args()
    records = Records(options.records)
    if not options.report:
        quiet()
        with tempfile.TemporaryDirectory() as folder:
            _measure_missing(options, records, Path(folder))
    entries = records.read()
    if options.json:
        print(json.dumps(entries))
    else:
        print(f"{table(entries)}\n\n{demo_table(entries)}\n\n{demo_verdicts(entries)}")


def _measure_missing(options: argparse.Namespace, records: Records, folder: Path) -> None:
    """Measure the draws that are not recorded yet."""
    known = {(entry["what"], entry.get("world"), entry["seed"]) for entry in records.read()}

    def missing(what: str, world: str | None) -> list[int]:
        return [seed for seed in range(options.seeds) if (what, world, seed) not in known]

    for world in options.worlds:
        measure_world(world, missing("world", world), folder / world, records.add)
    measure_demo(missing("demo", None), folder / "demo", records.add)
    if ("trainer", None, 0) not in known:
        measure_trainer(folder / "demo", records.add)


if __name__ == "__main__":
    main()
