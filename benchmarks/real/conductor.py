"""A real model of 135 million parameters learns to lead three workers, in natural language.

    python -m benchmarks.real.conductor --json  # one seed on two cores, about half an hour; goes on where it was stopped
    python -m benchmarks.real.conductor --json --tuning  # the seed on which everything was chosen
    python -m benchmarks.real.conductor --world  # the workers alone, seconds
    python -m benchmarks.real.conductor  # the tables, from the records

Appends a record for each seed to `--records`; what is recorded is not run again.

Protocol, written before the run of the reported seed.

1. World. Questions about invented towns that no model has read about, sums, and words to be spelled
   backwards; half of the questions need two workers, such as "What is 112 plus the year in which
   Dalgate was founded?". Three workers, all of them functions: an archive that looks a fact up
   (BM25) and replies with its value, a calculator, and a speller. They are called so, and the
   prompt describes them in a line each, in an order that is drawn for each group. Measured first:
   what each worker alone and an oracle router of whole questions reach, and that the right plan
   reaches 1.
2. Model. SmolLM2-135M-Instruct, out of a package. It first imitates 192 uneven demonstrations (24
   steps of 8): about a third follow the right plan, the others pass the whole question on, ask the
   wrong worker, or guess. Then 16 steps of `PromptR1Trainer` with LoRA, 4 questions of 8 rollouts
   each, and Prompt-R1's reward.
3. Compared, on the same 192 questions about held-out towns: the published model, the model after
   its warm start, the trained one, and the baselines.
4. Seed 951; tuning seed 1.
5. Expected: the trained model is above the warm start and above the oracle router, both with an
   interval above 0 over questions; at least .9 of its turns are well formed; no rollout fails.
   Against us: any of these is missed. The figures are printed whatever they are. One seed says
   nothing about other seeds.

It was missed: the reward rose for three steps, from -.02 to .25, and then the policy learned to ask
until its turns were used up. Prompt-R1's reward as it is printed gives such an episode 0, as much
as one with a wrong answer (`gate="paper"`), and 29 of the 32 rollouts of step 9 ended so. The run
was paused for half an hour, and its three evaluations were made by `ask` after it.

Second protocol, written after that and before any run of its seed. `PromptR1Reward(gate="strict")`
closes this loophole. On tuning seed 1 it ended in another fault within five steps: one plan,
archive and then calculator, for questions of every kind, because three of the four questions of a
step happened to be of the kind for which it is right. So a step has 8 questions of 4 rollouts, at a
rate of 2e-4 in the place of 5e-4 and a temperature of 1.0 in the place of .7. The model first
imitates 288 demonstrations in the place of 192 (36 steps), drawn from all kinds of questions alike,
of which .45 in the place of .35 follow the right plan. With that the rewards of seed 1 rose from
.27 to .72 within the 16 steps. Seed 952. Expected: as above.

It was kept: .406 after the warm start, .714 trained, .469 the oracle router, every turn in form,
nothing failed. But sums, of which the warm start answered .72, were unlearned (.05): in the end
their questions go to the archive alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_prompting import PromptAgent, Worker, Workers
from agentic_prompting.environments import BM25Retriever
from agentic_prompting.evaluation.pool_systems import baselines_of_pool
from agentic_prompting.llm import Reply
from agentic_prompting.rewards import exact_match
from agentic_prompting.rollout import AgentSpec, AskGrammar, Limits, Rollout, Sample, Turn
from agentic_prompting.sandbox.library import Fact, split_by_subject, town_facts
from benchmarks.lab import correct, log, markdown, model_folder, quiet
from benchmarks.real.run_options import open_records, protocol_parser
from benchmarks.real.small_agent import imitate, load_published, score_cells, train_adapter

SEEDS = (952,)
TUNING_SEEDS = (1,)
TRAIN_ROWS = 512
HELD_OUT = 192
DEMONSTRATIONS = 288
WARM_START_STEPS = 36
STEPS = 16
# 8 questions of 4 rollouts a step: with few questions, the plan of the kind that happens to be
# frequent in a step is taken for the plan of all kinds.
TRAINING = {"num_generations": 4, "learning_rate": 2e-4, "temperature": 1.0}
GRAMMAR = AskGrammar()
LIMITS = Limits(max_turns=4, max_turn_tokens=64, max_tokens=480)
TEMPLATE = """\
You answer a question by asking the workers above.
To ask: <think>who knows it</think> <ask to="NAME">request</ask>
To answer: <think>done</think> <answer>#1</answer>
Replies are numbered. #1 stands for the whole first reply, in a request and in an answer.
Question: {question}"""

DESCRIPTIONS = {
    "archive": "knows facts about towns",
    "calculator": "works out sums such as 12 + 30",
    "speller": "spells a word backwards",
}
PRICES = {"archive": 0.002, "calculator": 0.001, "speller": 0.001}  # US dollars a call
SHARES = {"fact": 0.25, "sum": 0.13, "spell": 0.12, "fact, sum": 0.25, "fact, spell": 0.25}
"""How often each kind of question is drawn."""
DrawQuestion = Callable[
    [str, Sequence[Fact], random.Random], tuple[str, str, list[tuple[str, str]]]
]
"""Draws a question of a kind: see [`draw_question`]."""
MIX = {"plan": 0.45, "whole": 0.2, "wrong worker": 0.2, "guess": 0.15}
"""How often each kind of demonstration is drawn."""


# --- the world ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Workers and questions.

    Args:
        pool (`Mapping[str, Worker]`): The workers by name.
        kinds (`tuple[str, ...]`): The kinds of questions.
        train (`list[dict]`): The questions of training.
        test (`list[dict]`): Those about held-out towns.
    """

    pool: Mapping[str, Worker]
    kinds: tuple[str, ...]
    train: list[dict[str, Any]]
    test: list[dict[str, Any]]


class Archive:
    """A worker that replies with the value of the fact whose sentence fits a request best."""

    def __init__(self, facts: Sequence[Fact]):
        self.search = BM25Retriever([fact.document for fact in facts])
        self.values = {fact.document: fact.value for fact in facts}

    def __call__(self, request: str) -> str:
        (documents,) = self.search([request], 1)
        return self.values[documents[0].text] if documents else "nothing found"


def calculate(request: str) -> str:
    """The sum of two numbers."""
    match = re.fullmatch(r"(?:what is )?(\d{1,9}) ?(?:\+|plus) ?(\d{1,9}) ?[.?]?", request.lower())
    return str(int(match[1]) + int(match[2])) if match else "this is no sum"


def spell_backwards(request: str) -> str:
    """A word of the request, the last one, spelled backwards."""
    words = re.findall(r"\w+", request[:200])
    return words[-1][::-1].lower() if words else "there is no word"


def make_pool(facts: Sequence[Fact]) -> dict[str, Worker]:
    functions = {"archive": Archive(facts), "calculator": calculate, "speller": spell_backwards}
    return {
        name: Worker(function, DESCRIPTIONS[name], usd=PRICES[name], takes="text")
        for name, function in functions.items()
    }


def draw_question(
    kind: str, facts: Sequence[Fact], generator: random.Random
) -> tuple[str, str, list[tuple[str, str]]]:
    """A question of a kind of `SHARES`, its answer, and its plan: the worker and the request of
    each call.
    """
    number = generator.randint(11, 999)
    if kind == "fact":
        fact = generator.choice(facts)
        return fact.question, fact.value, [("archive", fact.question)]
    if kind == "sum":
        other = generator.randint(11, 999)
        question = f"What is {number} plus {other}?"
        return question, str(number + other), [("calculator", f"{number} + {other}")]

    # The other kinds are about a year or a river.
    relation = "founded" if kind == "fact, sum" else "river"
    fact = generator.choice([fact for fact in facts if fact.relation == relation])
    ask_archive = ("archive", fact.question)
    if kind == "fact, sum":
        question = f"What is {number} plus the year in which {fact.subject} was founded?"
        answer = str(number + int(fact.value))
        return question, answer, [ask_archive, ("calculator", f"#1 + {number}")]
    answer = fact.value[::-1].lower()
    if kind == "spell":
        return f"Spell the word {fact.value} backwards.", answer, [("speller", fact.value)]
    question = f"Spell the name of the river that flows through {fact.subject} backwards."
    return question, answer, [ask_archive, ("speller", "#1")]


def draw_rows(
    facts: Sequence[Fact],
    count: int,
    generator: random.Random,
    shares: Mapping[str, float] = SHARES,
    draw_question: DrawQuestion = draw_question,
) -> list[dict[str, Any]]:
    """Different questions, each with its answer, its kind and its plan."""
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        (kind,) = generator.choices(list(shares), list(shares.values()))
        question, answer, plan = draw_question(kind, facts, generator)
        rows[question] = {
            "question": question,
            "answers": [answer],
            "kind": kind,
            # Two lists of texts: a data set wants columns of one type.
            "workers_of_plan": [worker for worker, _ in plan],
            "requests": [request for _, request in plan],
        }
    return list(rows.values())


# --- demonstrations -------------------------------------------------------------------------------


def begin(row: Mapping[str, Any], environment: Workers, seed: int) -> dict[str, Any]:
    """The row of an episode that begins: with its prompt and the workers' names."""
    prompt = [{"role": "user", "content": TEMPLATE.format(question=row["question"])}]
    return environment.reset({**row, "reset_seed": seed, "prompt": prompt})


async def demonstrate(
    row: Mapping[str, Any],
    environment: Workers,
    wrong_answers: Sequence[str],
    generator: random.Random,
) -> dict[str, Any]:
    """One demonstration, of a kind of `MIX`, with the workers' real replies."""
    (kind,) = generator.choices(list(MIX), list(MIX.values()))
    seed = generator.getrandbits(48)
    reset_row = begin(row, environment, seed)
    if kind == "guess":
        answer = generator.choice(wrong_answers)
        turns = [f"<think>I know this.</think> <answer>{answer}</answer>"]
        return {**reset_row, "turns": turns, "observations": []}

    names = {worker: name for name, worker in reset_row["workers"].items()}
    calls = list(zip(row["workers_of_plan"], row["requests"], strict=True))
    if kind == "whole":
        calls = [(generator.choice(list(names)), row["question"])]
    if kind == "wrong worker":
        number = generator.randrange(len(calls))
        calls[number] = (generator.choice(list(names)), calls[number][1])
    rollout = Rollout([], row=reset_row, seed=seed)
    turns = []
    observations = []
    for worker, request in calls:
        thought = f"{names[worker]} {environment.pool[worker].description}."
        turns.append(f'<think>{thought}</think> <ask to="{names[worker]}">{request}</ask>')
        rollout.add_turn(Sample([0]), GRAMMAR.parse(turns[-1]))
        observation = await environment.step(rollout)
        rollout.add_observation(observation, [])
        observations.append(observation.text)
    turns.append(f"<think>done</think> <answer>#{len(calls)}</answer>")
    return {**reset_row, "turns": turns, "observations": observations}


async def draw_demonstrations(
    world: World, environment: Workers, generator: random.Random
) -> list[dict[str, Any]]:
    """Demonstrations of all kinds of questions, equally many of each on average."""
    answers = [row["answers"][0] for row in world.train]
    rows_by_kind: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in world.train:
        rows_by_kind[row["kind"]].append(row)
    kinds = generator.choices(world.kinds, k=DEMONSTRATIONS)
    chosen = [generator.choice(rows_by_kind[kind]) for kind in kinds]
    return [await demonstrate(row, environment, answers, generator) for row in chosen]


# --- a run ----------------------------------------------------------------------------------------


def make_world(seed: int) -> World:
    """The world of a seed."""
    facts = town_facts(seed)
    train_facts, test_facts = split_by_subject(facts, held_out=32, seed=seed)
    generator = random.Random(f"questions {seed}")
    train = draw_rows(train_facts, TRAIN_ROWS, generator)
    test = draw_rows(test_facts, HELD_OUT, generator)
    return World(make_pool(facts), tuple(SHARES), train, test)


def measure(seed: int, world: World, folder: Path) -> dict[str, Any]:
    """Warm-start a conductor, train it, and ask it the held-out questions before, between and
    after.
    """
    from agentic_prompting import PromptR1Config, PromptR1Trainer
    from agentic_prompting.local import has_bf16_instructions
    from agentic_prompting.rewards import PromptR1Reward

    started = time.monotonic()
    environment = Workers(world.pool, unavailable="failed", max_reply_chars=200, share_replies=True)
    spec = AgentSpec(TEMPLATE, grammar=GRAMMAR, limits=LIMITS, sampling={"temperature": 0.7})
    generator = random.Random(f"demonstrations {seed}")
    traces = asyncio.run(draw_demonstrations(world, environment, generator))
    warm = imitate(
        *load_published(),
        spec,
        traces,
        folder,
        seed,
        max_steps=WARM_START_STEPS,
        learning_rate=1e-4,
        bf16=has_bf16_instructions(),
    )
    warm_seconds = time.monotonic() - started
    stages = {"warm": ask(warm, environment, spec, world.test, seed)}
    log(f"seed {seed}, after {warm_seconds:.0f} s of warm start: {figures_of(stages['warm'])}")

    training = train_adapter(
        PromptR1Trainer,
        PromptR1Config,
        warm,
        environment,
        PromptR1Reward(gate="strict"),
        world.train,
        spec,
        folder,
        seed,
        STEPS,
        **TRAINING,
    )
    log(f"seed {seed}: rewards {training['rewards']}")

    stages["after"] = ask(folder / "trained", environment, spec, world.test, seed)
    stages["before"] = ask(Path(model_folder("smollm2")), environment, spec, world.test, seed)
    for stage in ("before", "after"):
        log(f"seed {seed}, {stage}: {figures_of(stages[stage])}")
    return {
        "seed": seed,
        "steps": STEPS,
        "seconds": round(time.monotonic() - started),
        "warm_seconds": round(warm_seconds),
        "kinds": [row["kind"] for row in world.test],
        "rewards": training["rewards"],
        "failed_in_training": training["failed"],
        **stages,
        "baselines": ask_baselines(world.pool, world.test, seed),
    }


def ask(
    model: Path, environment: Workers, spec: AgentSpec, rows: Sequence[Any], seed: int
) -> dict[str, Any]:
    """How a conductor does on the held-out questions: `correct` has a character for each of them."""
    import torch

    agent = PromptAgent.from_pretrained(
        model, environment, spec, max_batch_size=64, dtype=torch.float32
    )
    rollouts = agent.answer_all(list(rows), seed=seed, progress=False)
    turns: list[Turn] = []
    calls: list[Reply] = []
    # Whether the worker of each call is one of the right plan.
    right_workers: list[bool] = []
    for rollout in rollouts:
        turns += rollout.turns
        calls += rollout.replies
        plan = rollout.row["workers_of_plan"]
        right_workers += [worker in plan for worker in _asked_workers(rollout)]
    return {
        "correct": correct(rollouts),
        "failed": sum(rollout.error is not None for rollout in rollouts),
        "well_formed": round(sum(turn.well_formed for turn in turns) / len(turns), 4),
        "calls": round(len(calls) / len(rollouts), 3),
        "usd": round(sum(reply.worth.cost_usd for reply in calls) / len(rollouts), 6),
        "right_worker": round(sum(right_workers) / max(1, len(right_workers)), 4),
        "example": _texts_of(rollouts[0]),
    }


def _asked_workers(rollout: Rollout) -> list[str | None]:
    """The workers that an episode asked, by their names in the pool; `None` for a name that is not
    in it.
    """
    workers = []
    for turn in rollout.turns:
        for call in GRAMMAR.read_calls(turn.text):
            workers.append(rollout.row["workers"].get(call.arguments["worker"]))
    return workers


def _texts_of(rollout: Rollout) -> list[str]:
    """The texts of an episode, the agent's and the workers' by turns."""
    texts = [rollout.row["question"]]
    for number, turn in enumerate(rollout.turns):
        texts.append(turn.text)
        texts += [observation.text for observation in rollout.observations[number : number + 1]]
    return texts


def ask_baselines(
    pool: Mapping[str, Worker], rows: Sequence[Mapping[str, Any]], seed: int
) -> dict[str, str]:
    """Right answers of each worker alone with the whole question, and of routers."""
    results = {}
    for name, system in baselines_of_pool(pool).items():
        answers = system(list(rows), seed=seed)
        results[name] = "".join(
            str(int(exact_match(answer.text or "", row["answers"])))
            for answer, row in zip(answers, rows, strict=True)
        )
    return results


# --- figures --------------------------------------------------------------------------------------


def figures_of(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a stage without the texts."""
    right = stage["correct"].count("1") / len(stage["correct"])
    figures = {name: stage[name] for name in ("well_formed", "calls", "right_worker", "failed")}
    return {"right": round(right, 3), **figures}


def systems_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Exact match of the conductor's stages and of the baselines, and what the trained one has
    more.
    """
    if not records:
        return "No run of it has been recorded yet."
    rows = []
    for record in records:
        titles = {"before": "published", "warm": "after the warm start", "after": "trained"}
        systems = {title: record[stage]["correct"] for stage, title in titles.items()}
        systems |= record["baselines"]
        for name, right in systems.items():
            trained = None if name == "trained" else systems["trained"]
            score, gained = score_cells(right, trained)
            rows.append((record["seed"], name, score, gained))
    return markdown(("seed", "system", "exact match", "trained minus it"), rows)


def kinds_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Exact match of each kind of question at the three stages."""
    if not records:
        return "No run of it has been recorded yet."
    rows = []
    for record in records:
        for kind in dict.fromkeys(record["kinds"]):
            numbers = [number for number, other in enumerate(record["kinds"]) if other == kind]
            cells = []
            for stage in ("before", "warm", "after"):
                right = sum(int(record[stage]["correct"][number]) for number in numbers)
                cells.append(f"{right / len(numbers):.2f}")
            rows.append((record["seed"], kind, len(numbers), *cells))
    titles = (
        "seed",
        "kind of question",
        "questions",
        "published",
        "after the warm start",
        "trained",
    )
    return markdown(titles, rows)


def calls_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Form, calls and failures at the three stages."""
    rows = []
    for record in records:
        for stage in ("before", "warm", "after"):
            measured = record[stage]
            figures = [
                measured[name] for name in ("well_formed", "calls", "right_worker", "failed")
            ]
            rows.append((record["seed"], stage, *figures))
    titles = (
        "seed",
        "stage",
        "turns in form",
        "calls a question",
        "calls to a right worker",
        "failed",
    )
    return markdown(titles, rows)


def print_tables(records: Sequence[Mapping[str, Any]]) -> None:
    """Print the three tables."""
    for table in (systems_table, kinds_table, calls_table):
        print(table(records))


def print_world(seed: int, world: World) -> None:
    """Print what the workers reach alone, and the right plan, without a conductor."""
    scores = {
        name: round(right.count("1") / len(right), 3)
        for name, right in ask_baselines(world.pool, world.test, seed).items()
    }
    environment = Workers(world.pool)
    solved = [
        exact_match(asyncio.run(follow_plan(row, environment)), row["answers"])
        for row in world.test
    ]
    scores["right plan"] = round(sum(solved) / len(solved), 3)
    print(json.dumps({"seed": seed, "n": len(world.test), **scores}), flush=True)


async def follow_plan(row: Mapping[str, Any], environment: Workers) -> str:
    """The answer of the right plan."""
    reset_row = begin(row, environment, seed=0)
    rollout = Rollout([], row=reset_row, seed=0)
    names = {worker: name for name, worker in reset_row["workers"].items()}
    for worker, request in zip(row["workers_of_plan"], row["requests"], strict=True):
        turn = GRAMMAR.parse(f'<think>next</think> <ask to="{names[worker]}">{request}</ask>')
        rollout.add_turn(Sample([0]), turn)
        rollout.add_observation(await environment.step(rollout), [])
    return rollout.observations[-1].quotable_texts[-1]


def main() -> None:
    parser = protocol_parser(__doc__, "runs/real-conductor", "real_conductor.jsonl.gz")
    parser.add_argument("--world", action="store_true", help="measure the workers, train nothing")
    options = parser.parse_args()
    if options.world:
        for seed in SEEDS:
            print_world(seed, make_world(seed))
        return
    records = open_records(options)
    if options.json:
        quiet()
        seeds = TUNING_SEEDS if options.tuning else SEEDS
        for (seed,) in records.missing(("seed",), [(seed,) for seed in seeds]):
            records.add(measure(seed, make_world(seed), options.folder / str(seed)))
        print(json.dumps(records.read()))
    print_tables(records.read())


if __name__ == "__main__":
    main()
