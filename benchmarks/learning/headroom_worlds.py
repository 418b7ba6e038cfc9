"""What `headroom` says of the sandbox's worlds, and what is true there.

**Sandbox**: nothing about real models.

    python -m benchmarks.learning.headroom_worlds              # what is missing of 20 seeds; about 30 minutes
    python -m benchmarks.learning.headroom_worlds --report     # the tables, from records/headroom.jsonl.gz
    python -m benchmarks.learning.headroom_worlds --parts demo --seeds 2 --records /tmp/two.jsonl.gz

E-SPL's sandbox: an agent behind a chat model, of which only the system prompt can change. In
`rules` some facts are given only to requests that carry a word, which a prompt can state; in
`unguarded` no fact is guarded, and the prompts state words and nothing else, so that none can help;
in `misleading` the start prompt gives words that are out of date. `habits`, by name, has an agent
that heeds no way to proceed; prompts move it all the same. In `unread` no fact is guarded and the
agent reads the start prompt, whichever prompt it is given. A draw has rules and prompts of its own;
the agent is one for each world. The eleven challengers are what a reflector that is often wrong
might write: each states some words, right or wrong, and most of them a way to proceed. `truth` is
the gain of the chosen prompt over all 840 questions.

Prompt-R1's demo: its warm start (seed 42) and its oracle. The floor is pass@1 on 64 of the 256
held-out questions, whose recorded score before training is in `records/demo.jsonl.gz`. The signal
is the share of differing groups on 64 training questions under the reward of the training; the
trainer itself plays 256 groups at a learning rate of 0.

First protocol, written before its runs. Seeds 0 to 19; `delta` 0.10; 512 calls and a top-up of 800
at most for prompts; all seeds are reported. The truth is of one answer to each question under both
prompts. A verdict is wrong if it is "worth it" and the truth is 0 or less, or "not worth it" and
the truth is 0.10 or more. The promise is kept if

1. `rules`: "worth it" in 18 of 20 draws at least,
2. `unguarded`: "not worth it" in 16 of 20 at least, "worth it" in 1 at most,
3. `misleading`: a wrong verdict in 1 of 20 at most,
4. each of these worlds: the interval holds the truth in 17 of 20 at least,
5. demo: the interval of pass@1 holds the recorded score before training in 17 of 20 at least, and
   the interval of differing groups holds the trainer's share in 17 of 20 at least,
6. demo: the recorded score after training is above the ceiling of a single request, because the
   agent asks several times: headroom must not say "not worth it" in any draw.

The runs missed 2 (7 of 20), 4 (`rules`, 15 of 20) and 5 (the floor, 14 of 20). Why, as far as was
found:

- 4: the agent's seeds were made of the last eight bytes of a conversation. The 840 questions had
  109 seeds, and the errors of two questions with one seed had a correlation of 0.41 (`rules`, seed
  10, ten answers to each question): rows were taken as independent and were not, in the measurement
  and still more in the truth, which had one answer to each question and was compared as if it had
  no error. Together this makes 85 % of 95 %, and the three worlds' intervals hold 51 of 60. Mended
  in `rollout_seed`; with it the correlation is -0.01.
- 5: the recorded score before training is of one rollout of 256 questions, with a standard error of
  0.029. The mean of 16 further rollouts of each is 0.327, which is also the mean of the 20 draws.
  All draws were compared with one error.
- 2: prompts change what this agent does even where no word is needed. It asks for one fact at a
  time as often under the start prompt as under four stated words, and is then right in 81 and 95 %
  (`unguarded`, seed 4, 420 questions).

Second protocol, written before its runs, for the mended seeds. Seeds 20 to 39; `delta`, calls and
top-up as before; all seeds are reported. The truth of `rules` and `misleading` is the mean of two
answers to each of the 840 questions under both prompts; its standard error, from the differences
between the two, is recorded. The demo's floor is compared with the mean of 16 rollouts of each of
the 256 questions, by seeds 1000 to 1015. An interval holds a truth if it does so after its
half-width h is widened to sqrt(h^2 + (1.96 e)^2), where e is the standard error of the truth.
`unread` replaces `unguarded`: the benchmark asserts that the agent reads the same conversation
under all prompts of a draw, so that its truth is 0. Each prompt draws samples of its own. The
promise is kept if

1. `rules`: "worth it" in all draws but 2 at most of those whose truth is 0.10 or more,
2. `unread`: "not worth it" in 16 of 20 at least (the simulation says 91 to 95 %), "worth it" in 2
   at most (3 to 4 %),
3. `misleading`: a wrong verdict in 1 of 20 at most,
4. each of these worlds: the interval holds the truth in 17 of 20 at least, and in 53 of the 60
   together,
5. demo: the interval of pass@1 holds the mean of the 16 in 17 of 20 at least, and the interval of
   differing groups holds the trainer's share in 17 of 20 at least,
6. demo: "not worth it" in no draw.

A measurement that covers in 95 % misses 17 of 20 in one of 63 worlds, and 53 of 60 in one of 100.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lab import DEMO, RECORDS as RECORDED, Records, log, markdown, quiet, settings, train

if TYPE_CHECKING:
    from agentic_prompting.llm import ChatModel, Message, Reply

RECORDS = RECORDED / "headroom.jsonl.gz"
PROTOCOL = 2
"""Entries without a number are of the first one."""
PARTS = ("rules", "unread", "misleading", "demo")
FIRST_SEED = 20
SEEDS = 20
CHALLENGERS = 11
# How often a challenger's word is right.
RIGHT = {"rules": 0.9, "unguarded": 0.9, "unread": 0.9, "misleading": 0.5, "habits": 0.9}
UNGUARDED = ("unguarded", "unread", "habits")
TRUTH_SEED = 1000
"""No draw measures with it, or with those that follow it."""
TRUTH_REPEATS = 2
FLOOR_REPEATS = 16
DELTA = 0.10
TRAINER_STEPS = 16
"""Steps of 16 groups each."""
GROUP_SIZE = 8

NOT_RECORDED = "No run of it has been recorded yet."

Entry = Mapping[str, Any]


# --- measuring ------------------------------------------------------------------------------------


def challengers(world: str, rules: Mapping[str, str], rng: random.Random) -> list[str]:
    """Prompts that a reflector might write: words for some of the guarded relations, and how to
    proceed.
    """
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
    from agentic_prompting.sandbox.guarded import PREAMBLE, GuardedOracle, draw_rules
    from agentic_prompting.sandbox.setup import DEMO_SEED, AgentChat, prepare_guarded

    # One agent for all draws; its questions stand in its own template.
    agents_world = world if world in ("misleading", "habits") else "rules"
    sandbox = prepare_guarded(folder, DEMO_SEED, world=agents_world)
    template = sandbox.spec.prompt_template
    rows = [{**row, "question": fill_template(template, row["question"])} for row in sandbox.train]
    agent = PromptAgent.from_pretrained(sandbox.model, max_batch_size=256)
    for seed in seeds:
        # The rules of this draw, and the prompt that the user has so far.
        rng = random.Random(f"headroom {world} {seed}")
        rules = draw_rules(rng)
        start = SystemPrompt(PREAMBLE)
        if world == "misleading":
            start = SystemPrompt(PREAMBLE, outdated_principles(rules, rng))
        guarded = {} if world in UNGUARDED else rules
        agent.environment = LLMEnvironment(GuardedOracle(guarded, seed=seed))
        chat: Any = AgentChat(agent, seed=seed)
        prompts = [start.text, *challengers(world, rules, rng)]
        if world == "unread":
            chat = UnreadPrompts(chat, start.text)
            assert_no_headroom(chat, prompts, rows)

        # Measure, then ask all questions under both prompts for the truth.
        started = time.process_time()
        measured = headroom(rows, policy=chat, prompts=prompts, top_up_calls=800, seed=seed)
        seconds = time.process_time() - started
        assert measured.prompts is not None
        chosen = measured.texts[measured.prompts.chosen]
        # Without headroom the truth is known.
        truth = 0.0
        truth_error = 0.0
        if world != "unread":
            truth, truth_error = true_gain(chat, start.text, chosen, rows)
        gain = measured.prompts.gain
        keep(
            {
                "what": "world",
                "protocol": PROTOCOL,
                "world": world,
                "seed": seed,
                "verdict": measured.prompts.verdict,
                "gain": [gain.mean, gain.low, gain.high],
                "truth": truth,
                "truth_error": truth_error,
                "topped_up": measured.prompts.topped_up,
                "calls": sum(measured.calls.values()),
                "seconds": round(seconds, 1),
            }
        )
        log(f"{world} {seed}: {measured.prompts.sentence()}; truth {truth:+.3f}; {seconds:.0f} s")


def outdated_principles(rules: Mapping[str, str], rng: random.Random) -> tuple[str, ...]:
    """Words for the guarded relations that are right for none of them."""
    from agentic_prompting.sandbox.guarded import WORDS, say
    from agentic_prompting.sandbox.world import sought

    unused = [word for word in WORDS if word not in rules.values()]
    words = rng.sample(unused, len(rules))
    return tuple(say(sought(relation), word) for relation, word in zip(rules, words, strict=True))


class UnreadPrompts:
    """A chat model that reads one system prompt, whichever it is given: all prompts have the same
    true score.

    Each prompt draws samples of its own, so that their measured scores differ by chance.

    Args:
        chat ([`ChatModel`]): The model.
        prompt (`str`): The system prompt that it reads.
    """

    def __init__(self, chat: ChatModel, prompt: str):
        self.chat = chat
        self.prompt = prompt

    def conversation(self, messages: Sequence[Message]) -> list[Message]:
        """The messages that the model reads in place of these."""
        from agentic_prompting.llm import with_system

        question = [message for message in messages if message["role"] != "system"]
        return with_system(self.prompt, question)

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, **options: Any
    ) -> Reply:
        from agentic_prompting.rollout import rollout_seed

        unread = [message["content"] for message in messages if message["role"] == "system"]
        repeat = rollout_seed(repeat or 0, *unread)
        return await self.chat(self.conversation(messages), repeat=repeat, **options)


def assert_no_headroom(chat: UnreadPrompts, prompts: Sequence[str], rows: Sequence[Entry]) -> None:
    """Check that the model reads the same conversation under all prompts, and under none, for each
    row.
    """
    from agentic_prompting.llm import with_system

    for row in rows:
        question = [{"role": "user", "content": row["question"]}]
        expected = chat.conversation(with_system(prompts[0], question))
        for prompt in [*prompts, None]:
            assert chat.conversation(with_system(prompt, question)) == expected, row["question"]


def true_gain(
    chat: ChatModel, start: str, chosen: str, rows: Sequence[Entry]
) -> tuple[float, float]:
    """The mean gain of a prompt over another one on these rows, and its standard error.

    The rows are all that there are, so that the answers' chance is the only error.
    """
    differences = []
    for seed in range(TRUTH_SEED, TRUTH_SEED + TRUTH_REPEATS):
        chosen_scores = score_answers(chat, chosen, rows, seed)
        start_scores = score_answers(chat, start, rows, seed)
        differences.append(np.subtract(chosen_scores, start_scores))
    gains = np.array(differences)
    return float(gains.mean()), error_of_answers(gains)


def error_of_answers(scores: np.ndarray) -> float:
    """The standard error of the mean of a table of repeats and rows, whose rows are all that there
    are.
    """
    repeats, rows = scores.shape
    return math.sqrt(float(scores.var(axis=0, ddof=1).sum()) / repeats) / rows


def score_answers(chat: ChatModel, prompt: str, rows: Sequence[Entry], seed: int) -> list[float]:
    """The score of one answer to each row under a prompt."""
    from agentic_prompting.evaluation import PromptedSystem, score_records
    from agentic_prompting.evaluation.metrics import find_metrics

    answers = PromptedSystem(chat, prompt, max_in_flight=256)(rows, seed=seed)
    records = [
        {"answer": answer.text, "answers": row["answers"]}
        for answer, row in zip(answers, rows, strict=True)
    ]
    (scores,) = score_records(records, find_metrics(["exact_match"])).values()
    # The scripted oracle has no outages, so that every answer has a score.
    return [float(score) for score in scores if score is not None]


def measure_demo(seeds: Sequence[int], folder: Path, keep: Callable[[Entry], None]) -> None:
    """Measure the untrained agent of Prompt-R1's demo on several draws of rows."""
    from agentic_prompting import LLMEnvironment, PromptAgent, PromptR1Reward, headroom
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
                "protocol": PROTOCOL,
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


def measure_floor(folder: Path, keep: Callable[[Entry], None]) -> None:
    """Let the demo's untrained agent answer each held-out question several times: the truth of its
    floor.
    """
    from agentic_prompting import LLMEnvironment, PromptAgent
    from agentic_prompting.rewards import exact_match
    from agentic_prompting.sandbox import Oracle
    from agentic_prompting.sandbox.setup import DEMO_SEED, prepare_sandbox

    sandbox = prepare_sandbox(folder, DEMO_SEED)
    environment = LLMEnvironment(Oracle(seed=DEMO_SEED))
    agent = PromptAgent.from_pretrained(sandbox.model, environment, max_batch_size=256)
    table = []
    for seed in range(TRUTH_SEED, TRUTH_SEED + FLOOR_REPEATS):
        rollouts = agent.answer_all(list(sandbox.test), seed=seed, progress=False)
        matches = [
            exact_match(rollout.answer or "", rollout.row["answers"]) for rollout in rollouts
        ]
        table.append(matches)
    scores = np.array(table, dtype=float)
    keep(
        {
            "what": "floor",
            "protocol": PROTOCOL,
            "seed": TRUTH_SEED,
            "repeats": FLOOR_REPEATS,
            "truth": float(scores.mean()),
            "truth_error": error_of_answers(scores),
        }
    )


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
    history = trainer.state.log_history
    flat = [entry["frac_reward_zero_std"] for entry in history if "frac_reward_zero_std" in entry]
    groups_per_step = options["per_device_train_batch_size"] // options["num_generations"]
    keep(
        {
            "what": "trainer",
            "seed": 0,
            "groups": len(flat) * groups_per_step,
            "differing": round(sum(1 - share for share in flat) * groups_per_step),
        }
    )


# --- the records' tables --------------------------------------------------------------------------


def is_wrong(draw: Entry) -> bool:
    """Whether the truth contradicts the verdict of a draw."""
    if draw["verdict"] == "worth it":
        return draw["truth"] <= 0
    return draw["verdict"] == "not worth it" and draw["truth"] >= DELTA


def holds(interval: Sequence[float], value: float, error: float = 0.0) -> bool:
    """Whether an interval, `[mean, low, high]`, holds a value that has a standard error."""
    mean, low, high = interval
    # The side on which the value lies; the ends of a share's interval have different distances.
    half_width = high - mean if value > mean else mean - low
    return abs(value - mean) <= math.hypot(half_width, 1.96 * error)


def table(records: Sequence[Entry], protocol: int = PROTOCOL) -> str:
    """Verdicts of each world, counted, beside the truth."""
    all_draws = _draws_of("world", records, protocol)
    if not all_draws:
        return NOT_RECORDED
    rows = []
    for world in dict.fromkeys(draw["world"] for draw in all_draws):
        draws = [draw for draw in all_draws if draw["world"] == world]
        verdicts = Counter(draw["verdict"] for draw in draws)
        truths = [draw["truth"] for draw in draws]
        held = [holds(draw["gain"], draw["truth"], draw.get("truth_error", 0.0)) for draw in draws]
        rows.append(
            [
                world,
                len(draws),
                verdicts["worth it"],
                verdicts["not worth it"],
                verdicts["cannot tell"],
                sum(is_wrong(draw) for draw in draws),
                f"{min(truths):+.2f} to {max(truths):+.2f}",
                f"{sum(held)} of {len(draws)}",
                sum(draw["topped_up"] for draw in draws),
                max(draw["calls"] for draw in draws),
                f"{max(draw['seconds'] for draw in draws):.0f} s",
            ]
        )
    titles = "world,draws,worth it,not worth it,cannot tell,wrong,true gain of the chosen prompt"
    titles += ",interval holds it,topped up,calls at most,processor time at most"
    return markdown(titles.split(","), rows)


def demo_table(records: Sequence[Entry], protocol: int = PROTOCOL) -> str:
    """The demo's floor, signal and ceilings, beside what was recorded of it."""
    draws = _draws_of("demo", records, protocol)
    trainers = [entry for entry in records if entry["what"] == "trainer"]
    floors = [entry for entry in records if entry["what"] == "floor"]
    if not draws or not trainers or not floors:
        return NOT_RECORDED

    # The recorded result of the demo, which headroom is compared with.
    trainer = trainers[-1]
    floor = floors[-1]
    after = Records(RECORDED / "demo.jsonl.gz").read()[-1]["summary"]["exact_match_after"]
    differing = trainer["differing"] / trainer["groups"]

    def spread(name: str) -> str:
        means = [draw[name][0] for draw in draws]
        return f"{min(means):.2f} to {max(means):.2f}"

    def held(name: str, value: float, error: float = 0.0) -> str:
        return f"{sum(holds(draw[name], value, error) for draw in draws)} of {len(draws)}"

    # A row for each figure of headroom.
    low = min(draw["request_ceiling"][0] for draw in draws)
    high = max(draw["request_ceiling"][1] for draw in draws)
    rows = [
        [
            "floor: pass@1",
            spread("floor"),
            f"{floor['truth']:.3f}, {floor['repeats']} rollouts of each question",
            held("floor", floor["truth"], floor["truth_error"]),
        ],
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


def demo_verdicts(records: Sequence[Entry], protocol: int = PROTOCOL) -> str:
    """The demo's verdicts on training, counted."""
    draws = _draws_of("demo", records, protocol)
    verdicts = Counter(draw["verdict"] for draw in draws)
    if not draws:
        return NOT_RECORDED
    return ", ".join(f"{verdict} in {count} of {len(draws)}" for verdict, count in verdicts.items())


def _draws_of(part: str, records: Sequence[Entry], protocol: int) -> list[Entry]:
    """The records of `world` or `demo` under a protocol."""
    entries = [entry for entry in records if entry["what"] == part]
    return [entry for entry in entries if entry.get("protocol", 1) == protocol]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", action="store_true", help="print the tables, measure nothing")
    parser.add_argument("--json", action="store_true", help="print the records instead of tables")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="draws of each part")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=(*RIGHT, "demo"))
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
        print("First protocol", table(entries, protocol=1), sep="\n\n", end="\n\n")
        second = (table(entries), demo_table(entries), demo_verdicts(entries))
        print("Second protocol", *second, sep="\n\n")


def _measure_missing(options: argparse.Namespace, records: Records, folder: Path) -> None:
    """Measure the draws that are not recorded yet."""
    recorded = set()
    for entry in records.read():
        # The trainer plays on its own, under either protocol.
        if entry["what"] == "trainer" or entry.get("protocol", 1) == PROTOCOL:
            recorded.add((entry["what"], entry.get("world"), entry.get("seed")))

    def missing(measurement: str, world: str | None) -> list[int]:
        seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
        return [seed for seed in seeds if (measurement, world, seed) not in recorded]

    for part in options.parts:
        if part != "demo":
            measure_world(part, missing("world", part), folder / part, records.add)
            continue
        measure_demo(missing("demo", None), folder / "demo", records.add)
        if ("floor", None, TRUTH_SEED) not in recorded:
            measure_floor(folder / "demo", records.add)
        if ("trainer", None, 0) not in recorded:
            measure_trainer(folder / "demo", records.add)


if __name__ == "__main__":
    main()
