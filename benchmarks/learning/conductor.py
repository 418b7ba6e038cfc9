"""A conductor of 420,000 parameters over three scripted workers, before and after GRPO, beside its baselines.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --world  # the world alone, seconds
    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --json  # five reported seeds: about 10 minutes each
    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --json --tuning  # the seed that is not reported

Appends a record for each run to `--records`; what is recorded is not run again. The figures are those of a sandbox; they
say nothing about real models. The world is in `conductor_world.py`.

Protocol, written before any run of the reported seeds. The settings are those of a sketch with one seed; on the tuning
seed 24 steps gave .852, which led to 32 steps and to workers that read answers in any wording.

1. World. Measured first, on all held-out questions: each worker alone at most .35, the oracle router of whole questions
   at most .50, the right plan with random workers at most .25, the right plan 1.0.
2. Policy. Two layers of width 128, words as tokens. Warm start: 225 steps of copying exercises and 450 steps of scripted
   traces of mixed quality, about half of which end right; then 32 steps of `PromptR1Trainer` with 16 questions of 8
   rollouts, the learning rate 1e-3, and Prompt-R1's reward. Pool order and names (A to F) are drawn for each group.
3. Seeds 921 to 925; 256 held-out questions about 40 countries that no training question names. Held-out questions have
   fixed names, the same for all systems.
4. Promise: exact match .85 on average over seeds, no seed below .80, each kind of question at least .70 over all seeds,
   untrained at most .50; above every baseline at the same cost or a lower one, paired by question.
5. Other pools, not trained further: digits wrong in .1 of the requests, in another wording: .75.
6. Reported with it: the share of calls that go to the worker of their kind, before and after; dollars and own tokens of a
   question.
7. The same with retyping instead of references (`--variant retyping`): .10 lower on questions that hand on values of one
   word, .50 lower on records of twelve words.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from sys import stderr
from typing import Any

from agentic_prompting.evaluation.systems import Answer, Row, System, answer_of_rollout
from agentic_prompting.rollout import AskGrammar, Limits, Rollout, Sample
from agentic_prompting.sandbox.world import ANSWER, NOT_UNDERSTOOD
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
)
from benchmarks.learning.conductor_world import (
    DESCRIPTION,
    RECORD_WORDS,
    WORDING,
    WORKER_OF,
    Facts,
    PlanStep,
    ScriptedWorker,
    make_environment,
    make_split,
    plan_of,
    question_text,
    read_question,
    read_value,
)

SEEDS, TUNING_SEED = (921, 922, 923, 924, 925), 1
VARIANTS = ("references", "retyping")
TRAIN_ROWS, HELD_OUT = 2048, 256
WARM_STEPS, STEPS = 450, 32
TEMPLATE = "question : {question}"
GRAMMAR = AskGrammar()
LIMITS = Limits(max_turns=6, max_turn_tokens=96, max_tokens=560)
MIX = {
    "decompose": 0.3,
    "pass_on": 0.32,
    "wrong": 0.12,
    "bare": 0.06,
    "impatient": 0.1,
    "partial": 0.1,
}
"""Share of each kind of trace. Passing the question on is the habit to be unlearned."""
NOUN = {"sum": "digit sum"}
OTHER_WORDING = "it is {value} ; the answer is {value} ."


# --- baselines: scripted conductors in the same environment ----------------------------------------------------------


class Episode:
    """An episode that a script plays: it asks workers by their kind, and reads the values in their replies.

    Args:
        environment ([`Workers`]): Answers.
        row (`Mapping`): The question, with the seed of its names.
        seed (`int`): Identifies the episode.
    """

    def __init__(self, environment: Any, row: Row, seed: int):
        prompt = [{"role": "user", "content": TEMPLATE.format(question=row["question"])}]
        self.environment = environment
        self.rollout = Rollout([], row=environment.reset({**row, "prompt": prompt}), seed=seed)
        self.question = row["question"]
        self.expression = read_question(row["question"])

    async def ask(self, *calls: tuple[str, str]) -> list[str]:
        """The values in the replies to some calls of one turn, each a worker's kind and a request."""
        names = {kind: name for name, kind in self.rollout.row["workers"].items()}
        turn = " ".join(f'<ask to="{names[kind]}">{request}</ask>' for kind, request in calls)
        self.rollout.add_turn(Sample([0]), GRAMMAR.parse(turn))
        observation = await self.environment.step(self.rollout)
        self.rollout.add_observation(observation, [])
        return [read_value(part) or part for part in observation.parts]

    def answer(self, value: str) -> Rollout:
        """End the episode with this answer."""
        self.rollout.add_turn(Sample([0]), GRAMMAR.parse(f"<answer>{value}</answer>"))
        return self.rollout.finish("answered")


Script = Callable[[Episode, random.Random], Awaitable[str]]


class ScriptedSystem(System):
    """A script as a system of `evaluate`; its calls cost what a conductor's calls cost."""

    def __init__(self, name: str, script: Script, environment: Any):
        self.name = name
        self.script = script
        self.environment = environment

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"script": self.name, "environment": dict(self.environment.identity)}

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        episode = Episode(self.environment, row, seed)
        value = await self.script(episode, random.Random(f"{seed} {self.name} {row['question']}"))
        return answer_of_rollout(episode.answer(value), time.perf_counter() - started)


def pass_on_to(kind: str) -> Script:
    """The whole question goes to one worker."""

    async def script(episode: Episode, generator: random.Random) -> str:
        return (await episode.ask((kind, episode.question)))[0]

    return script


async def route_evenly(episode: Episode, generator: random.Random) -> str:
    """The whole question goes to a worker drawn with equal weights."""
    return (await episode.ask((generator.choice(list(DESCRIPTION)), episode.question)))[0]


async def route_by_oracle(episode: Episode, generator: random.Random) -> str:
    """The whole question goes to a worker that answers it rightly, if there is one: an upper bound of routing."""
    answers = episode.rollout.row["answers"]
    for kind in DESCRIPTION:
        reply = episode.environment.pool[kind].model.answer(episode.question)
        if read_value(reply) in answers:
            return (await episode.ask((kind, episode.question)))[0]
    assert not isinstance(episode.expression, str) and episode.expression is not None
    return (await episode.ask((WORKER_OF[episode.expression[0]], episode.question)))[0]


async def best_of_two(episode: Episode, generator: random.Random) -> str:
    """Two samples of the best worker: the cost of the right plan. These workers give the same answer each time."""
    calls = [("facts", episode.question)] * 2
    return (await episode.ask(*calls))[0]


def follow_plan(choose_worker: Callable[[PlanStep, random.Random], str]) -> Script:
    """The right plan, step by step, with references."""

    async def script(episode: Episode, generator: random.Random) -> str:
        values: list[str] = []
        for step in plan_of(episode.expression):
            references = [f"#{number + 1}" for number in range(len(values))]
            values += await episode.ask((choose_worker(step, generator), step.request(references)))
        return values[-1]

    return script


BASELINES: Mapping[str, Script] = {
    **{f"{kind} alone": pass_on_to(kind) for kind in DESCRIPTION},
    "even router": route_evenly,
    "oracle router": route_by_oracle,
    "best of two, facts": best_of_two,
    "right plan, random workers": follow_plan(
        lambda step, generator: generator.choice(list(DESCRIPTION))
    ),
    "right plan": follow_plan(lambda step, generator: WORKER_OF[step.operation]),
}


def measure_baselines(rows: Sequence[Row], facts: Facts, seed: int) -> dict[str, dict[str, Any]]:
    """Right answers (`0110`) and dollars a question of each baseline."""
    from agentic_prompting.rewards import exact_match

    environment = make_environment(facts)
    measured = {}
    for name, script in BASELINES.items():
        answers = ScriptedSystem(name, script, environment)(list(rows), seed=seed)
        right = [
            str(int(exact_match(answer.text or "", row["answers"])))
            for answer, row in zip(answers, rows, strict=True)
        ]
        usd = sum(answer.worth_usd or 0.0 for answer in answers) / len(rows)
        measured[name] = {"correct": "".join(right), "usd": round(usd, 6)}
    return measured


# --- traces of mixed quality -----------------------------------------------------------------------------------------


class TraceWriter:
    """Writes an episode in the text that `Workers` makes of it.

    Args:
        environment ([`Workers`]): Whose workers reply.
        row (`Mapping`): A row that the environment has reset.
        retypes (`bool`): Whether values are typed again, instead of handed on by reference.
    """

    def __init__(self, environment: Any, row: Row, retypes: bool):
        self.environment = environment
        self.retypes = retypes
        self.names = {kind: name for name, kind in row["workers"].items()}
        self.turns: list[str] = []
        self.observations: list[str] = []
        self.replies: list[str] = []

    def ask(self, thought: str, calls: Sequence[tuple[str, str]]) -> None:
        """Append a turn with these calls, and the replies to it."""
        first = len(self.replies)
        requests = [f'<ask to=" {self.names[kind]} "> {text} </ask>' for kind, text in calls]
        self.turns.append(f"<think> {thought} </think> {' '.join(requests)}")
        for kind, text in calls:
            # The scripted workers read nothing but the lines that begin with a reference.
            quoted = [
                f"#{number} : {reply}"
                for number, reply in enumerate(self.replies, 1)
                if f"#{number}" in text.split()
            ]
            model = self.environment.pool[kind].model
            self.replies.append(model.answer("\n".join([*quoted, text])))
        shown = [f"#{number} : {reply}" for number, reply in enumerate(self.replies, 1)]
        self.observations.append("\n".join(shown[first:]))

    def finish(self, thought: str, answer: str) -> None:
        """Append the answering turn."""
        self.turns.append(f"<think> {thought} </think> <answer> {answer} </answer>")

    def describe(self, kind: str) -> str:
        """A worker's description and name, in the order of the prompt, so that two layers can copy them."""
        return f"{DESCRIPTION[kind]} {self.names[kind]}"

    def value(self, index: int) -> str:
        """The value in a reply."""
        return read_value(self.replies[index]) or "nothing"

    def text_values(self) -> list[str]:
        """What stands for each earlier step in a request."""
        numbers = range(len(self.replies))
        return [self.value(number) if self.retypes else f"#{number + 1}" for number in numbers]


def write_plan(
    writer: TraceWriter,
    steps: Sequence[PlanStep],
    generator: random.Random,
    wrong_workers: bool = False,
    levels: int = 9,
) -> None:
    """The calls of a plan, all that need nothing of each other in one turn; then the last value as the answer."""
    depths = sorted({step.depth for step in steps})[:levels]
    for depth in depths:
        level = [step for step in steps if step.depth == depth]
        calls = []
        for step in level:
            kind = WORKER_OF[step.operation]
            if wrong_workers and generator.random() < 0.6:
                kind = generator.choice(list(DESCRIPTION))
            calls.append((kind, step.request(writer.text_values())))
        if len(calls) == 1:
            operation = level[0].operation
            noun = NOUN.get(operation, operation)
            thought = f"find the {noun} with {writer.describe(calls[0][0])}"
        else:
            kinds = dict.fromkeys(kind for kind, _ in calls)
            thought = "find all with " + " ".join(map(writer.describe, kinds))
        writer.ask(thought, calls)
    writer.finish("done", writer.value(len(writer.replies) - 1))


def write_trace(
    kind: str, row: Row, writer: TraceWriter, facts: Facts, generator: random.Random
) -> None:
    """One trace of a kind of `MIX`."""
    expression = read_question(row["question"])
    assert expression is not None
    steps = plan_of(expression)
    drops_thought = kind == "bare"
    if kind == "bare":
        kind = generator.choice(["decompose", "pass_on"])
    if kind in ("decompose", "wrong"):
        write_plan(writer, steps, generator, wrong_workers=kind == "wrong")
    elif kind == "partial" and len(steps) > 1:
        write_plan(writer, steps, generator, levels=1)
    elif kind == "impatient":
        guesses = facts.values.get(expression[0], ["nothing"])
        writer.finish("i know this", generator.choice(guesses))
    else:
        worker = WORKER_OF[expression[0]]
        thought = f"ask the whole question with {writer.describe(worker)}"
        writer.ask(thought, [(worker, question_text(expression))])
        writer.finish("done", writer.value(0))
    if drops_thought:
        writer.turns[-1] = writer.turns[-1].partition("</think> ")[2]


def draw_traces(
    rows: Sequence[Row],
    n: int,
    environment: Any,
    facts: Facts,
    retypes: bool,
    generator: random.Random,
) -> list[dict[str, Any]]:
    """Traces of mixed quality, each of an episode with a pool of its own."""
    traces = []
    for _ in range(n):
        (kind,) = generator.choices(list(MIX), list(MIX.values()))
        row = dict(generator.choice(rows))
        prompt = [{"role": "user", "content": TEMPLATE.format(question=row["question"])}]
        seed = generator.getrandbits(48)
        row = environment.reset({**row, "reset_seed": seed, "prompt": prompt})
        writer = TraceWriter(environment, row, retypes)
        write_trace(kind, row, writer, facts, generator)
        traces.append({**row, "turns": writer.turns, "observations": writer.observations})
    return traces


# --- the policy ------------------------------------------------------------------------------------------------------


def make_tokenizer(facts: Facts) -> Any:
    """One token for each word that occurs, and for the two halves of `<ask to="A">`."""
    from tokenizers import AddedToken

    from agentic_prompting.sandbox.policy import build_tokenizer

    values = [value for values in facts.values.values() for value in values]
    texts = [
        ANSWER, OTHER_WORDING, NOT_UNDERSTOOD, "what is ?", "find the with all ask whole question i know this done nothing",
        "workers : question : budget low high there is no worker , only reply unavailable the request is empty calls in",
        "one turn 4", *WORDING.values(), *WORDING, *NOUN.values(), *DESCRIPTION, *DESCRIPTION.values(), *RECORD_WORDS,
        *(f"#{number}" for number in range(1, 25)), *"ABCDEF",
    ]  # fmt: skip
    words = {word for text in [*texts, *values] for word in text.split()} - {"{}", "{value}"}
    tokenizer = build_tokenizer(sorted(words), values, GRAMMAR)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ('<ask to="', '">')])
    return tokenizer


def draw_nonsense(
    rollouts: Sequence[Rollout], tokenizer: Any, facts: Facts, generator: random.Random
) -> list[Rollout]:
    """Conversations with random words in the place of values and names: exercises in copying."""
    values = {value for values in facts.values.values() for value in values}
    replaced = tokenizer.convert_tokens_to_ids(sorted(values | set("ABCDEF") | set(RECORD_WORDS)))
    kept = {*WORDING, "digit", *tokenizer.get_added_vocab()}
    kept |= {f"#{number}" for number in range(1, 25)}
    words = [number for word, number in sorted(tokenizer.get_vocab().items()) if word not in kept]
    exercises = []
    for rollout in rollouts:
        drawn = dict(zip(replaced, generator.choices(words, k=len(replaced)), strict=True))
        prompt_ids = [drawn.get(token, token) for token in rollout.prompt_ids]
        ids = [drawn.get(token, token) for token in rollout.ids]
        exercises.append(Rollout(prompt_ids=prompt_ids, ids=ids, mask=list(rollout.mask)))
    return exercises


def warm_up(
    folder: Path, rows: Sequence[Row], facts: Facts, retypes: bool, seed: int, steps: int
) -> Path:
    """The folder of the warm-started policy."""
    from agentic_prompting.rollout import AgentSpec, rollout_from_trace
    from agentic_prompting.sandbox.policy import (
        build_policy,
        copying_exercises,
        keep_freed_memory,
        save_policy,
    )
    from agentic_prompting.sandbox.recipe import SFT
    from agentic_prompting.trainers import warm_start

    saved = folder / "warm_start"
    if (saved / "config.json").exists():
        return saved
    keep_freed_memory()
    spec = AgentSpec(TEMPLATE, grammar=GRAMMAR, limits=LIMITS)
    tokenizer = make_tokenizer(facts)
    chat_format = spec.tokens(tokenizer)
    generator = random.Random(f"traces {seed}")
    traces = draw_traces(rows, 20 * steps, make_environment(facts), facts, retypes, generator)
    rollouts = [rollout_from_trace(trace, spec, chat_format) for trace in traces]
    nonsense = draw_nonsense(rollouts[: len(rollouts) // 2], tokenizer, facts, generator)
    exercises = copying_exercises(tokenizer, 64 * (steps // 2), generator)

    policy = build_policy(tokenizer, seed)
    phases = ((exercises, steps // 2, 64), ([*rollouts, *nonsense], steps, 32))
    for examples, max_steps, batch in phases:
        warm_start(
            policy, tokenizer, examples, output_dir=folder / "sft", max_steps=max_steps,
            per_device_train_batch_size=batch, seed=seed, bf16=False, use_cpu=True, gradient_checkpointing=False,
            disable_tqdm=True, **SFT,
        )  # fmt: skip
    save_policy(policy, tokenizer, spec, saved)
    return saved


# --- runs ------------------------------------------------------------------------------------------------------------


def measure_agent(model: Path, environment: Any, rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Scores, costs and calls of a saved conductor."""
    from agentic_prompting import PromptAgent
    from agentic_prompting.rollout import AgentSpec

    agent = PromptAgent.from_pretrained(
        model, environment, AgentSpec.load(model), max_batch_size=BATCH
    )
    rollouts = agent.answer_all(list(rows), seed=seed, progress=False)
    right_worker = []
    for rollout in rollouts:
        workers = rollout.row["workers"]
        for turn in rollout.turns:
            for call in GRAMMAR.read_calls(turn.text):
                expression = read_question(call.arguments["request"])
                if expression is not None and not isinstance(expression, str):
                    worker = workers.get(call.arguments["worker"])
                    right_worker.append(worker == WORKER_OF[expression[0]])
    count = len(rollouts)
    calls = [reply for rollout in rollouts for reply in rollout.replies]
    return {
        "correct": correct(rollouts),
        "usd": round(sum(reply.worth.cost_usd for reply in calls) / count, 6),
        "calls": round(len(calls) / count, 3),
        "own_tokens": round(sum(sum(rollout.mask) for rollout in rollouts) / count, 1),
        "right_worker": round(sum(right_worker) / max(1, len(right_worker)), 4),
        "well_formed": round(
            sum(turn.well_formed for rollout in rollouts for turn in rollout.turns)
            / sum(len(rollout.turns) for rollout in rollouts),
            4,
        ),
    }


def measure(
    variant: str, seed: int, folder: Path, warm_steps: int, steps: int, n_test: int
) -> dict[str, Any]:
    """Warm-start a conductor and train it: the record of the run."""
    from datasets import Dataset

    from agentic_prompting import PromptR1Config, PromptR1Trainer

    facts = Facts()
    train_rows, test_rows = make_split(seed, TRAIN_ROWS, n_test, facts)
    environment = make_environment(facts)
    started = time.perf_counter()
    with redirect_stdout(stderr):
        model = warm_up(folder, train_rows, facts, variant == "retyping", seed, warm_steps)
    warm_seconds = time.perf_counter() - started
    before = measure_agent(model, environment, test_rows, seed)
    log(f"seed {seed}, {variant}: {share(before['correct']):.3f} before, {before}")

    trained = folder / "trained"
    changes = {
        "output_dir": str(trained),
        "seed": seed,
        "max_steps": steps,
        "max_turns": LIMITS.max_turns,
        "max_turn_tokens": LIMITS.max_turn_tokens,
        "max_completion_length": LIMITS.max_tokens,
        "num_generations": 8,
        "per_device_train_batch_size": 128,
        "learning_rate": 1e-3,
        "overwrite": True,
    }
    started = time.perf_counter()
    trainer = PromptR1Trainer(
        model=str(model),
        environment=environment,
        args=PromptR1Config(**settings(DEMO, **changes)),
        train_dataset=Dataset.from_list(train_rows),
        prompt_template=TEMPLATE,
    )
    with redirect_stdout(stderr):
        trainer.train()
    trainer.save_model()
    seconds = time.perf_counter() - started

    noisy = ScriptedWorker(facts, "numbers", noise=0.1, wording=OTHER_WORDING)
    return {
        "variant": variant,
        "seed": seed,
        "steps": steps,
        "kinds": [row["kind"] for row in test_rows],
        "warm_seconds": round(warm_seconds, 1),
        "seconds": round(seconds, 1),
        "rewards": [
            round(entry["reward"], 3) for entry in trainer.state.log_history if "reward" in entry
        ],
        "before": before,
        "after": measure_agent(trained, environment, test_rows, seed),
        "replaced": measure_agent(trained, make_environment(facts, numbers=noisy), test_rows, seed),
        "baselines": measure_baselines(test_rows, facts, seed),
    }


# --- figures ---------------------------------------------------------------------------------------------------------


def of_variant(records: Sequence[Mapping[str, Any]], variant: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record["variant"] == variant]


def by_kind(records: Sequence[Mapping[str, Any]], when: str = "after") -> dict[str, float]:
    """Exact match of each kind of question, over all seeds."""
    results: dict[str, list[int]] = defaultdict(list)
    for record in records:
        for kind, result in zip(record["kinds"], record[when]["correct"], strict=True):
            results[kind].append(int(result))
    return {kind: round(sum(values) / len(values), 3) for kind, values in sorted(results.items())}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Score and dollars of the conductor and of the baselines, and the difference to each, paired by seed."""
    records = of_variant(records, "references")
    if not records:
        return "no records"
    after = [share(record["after"]["correct"]) for record in records]
    systems: dict[str, list[Mapping[str, Any]]] = {
        name: [record["baselines"][name] for record in records] for name in BASELINES
    }
    systems["conductor, untrained"] = [record["before"] for record in records]
    systems["conductor, trained"] = [record["after"] for record in records]
    systems["conductor, digits replaced"] = [record["replaced"] for record in records]
    rows = []
    for name, measured in systems.items():
        scores = [share(entry["correct"]) for entry in measured]
        usd = sum(entry["usd"] for entry in measured) / len(measured)
        gains = [ours - score for ours, score in zip(after, scores, strict=True)]
        gain = "" if name == "conductor, trained" else shown(gains, "+")
        rows.append([name, shown(scores), f"{1000 * usd:.2f}", gain])
    return markdown(
        ("system", "exact match", "$ per 1,000 questions", "trained conductor minus it"),
        rows,
    )


def kinds_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Exact match of each kind of question before and after training, over all seeds."""
    records = of_variant(records, "references")
    before = by_kind(records, "before")
    after = by_kind(records)
    rows = [[kind, f"{before[kind]:.2f}", f"{after[kind]:.2f}"] for kind in after]
    return markdown(("kind of question", "untrained", "trained"), rows)


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the promise."""
    summary: dict[str, Any] = {}
    for variant in VARIANTS:
        runs = of_variant(records, variant)
        if runs:
            after = [share(run["after"]["correct"]) for run in runs]
            summary[variant] = {
                "seeds": [run["seed"] for run in runs],
                "before": interval([share(run["before"]["correct"]) for run in runs]),
                "after": interval(after),
                "lowest": min(after),
                "replaced": interval([share(run["replaced"]["correct"]) for run in runs]),
                "by_kind": by_kind(runs),
                "right_worker": [
                    [run[when]["right_worker"] for when in ("before", "after")] for run in runs
                ],
            }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", action="store_true", help="measure the world, train nothing")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--tuning", action="store_true", help="a seed that is not reported")
    parser.add_argument(
        "--quick", action="store_true", help="that seed with a few steps, to see that it runs"
    )
    parser.add_argument("--seeds", type=int, nargs="*", help="some of the seeds")
    parser.add_argument("--variant", default="references", choices=VARIANTS)
    parser.add_argument("--folder", type=Path, default=Path("runs/conductor"))
    parser.add_argument(
        "--records",
        type=Path,
        help="default: records/conductor.jsonl.gz; with --tuning in the folder",
    )
    options = parser.parse_args()
    if options.world:
        facts = Facts()
        for seed in SEEDS:
            _, rows = make_split(seed, 1, HELD_OUT, facts)
            measured = measure_baselines(rows, facts, seed)
            scores = {name: round(share(entry["correct"]), 3) for name, entry in measured.items()}
            print(json.dumps({"seed": seed, "n": len(rows), **scores}), flush=True)
        return
    quiet()
    is_reported = not (options.tuning or options.quick)
    folder = options.folder / ("quick" if options.quick else "tuning" if options.tuning else "runs")
    records = Records(
        options.records or (RECORDS if is_reported else folder) / "conductor.jsonl.gz"
    )
    seeds = options.seeds or (SEEDS if is_reported else (TUNING_SEED,))
    wanted = [(options.variant, seed) for seed in seeds]
    sizes = (10, 2, 32) if options.quick else (WARM_STEPS, STEPS, HELD_OUT)
    for variant, seed in records.missing(("variant", "seed"), wanted):
        records.add(measure(variant, seed, folder / f"{variant}-{seed}", *sizes))
        log(json.dumps(summarise(records.read())))
    entries = records.read()
    print(table(entries))
    if options.json:
        print(json.dumps(summarise(entries)))


if __name__ == "__main__":
    main()
