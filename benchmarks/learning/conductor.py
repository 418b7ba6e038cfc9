"""A conductor of 420,000 parameters over three scripted workers, before and after GRPO, beside its baselines.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --world  # the world alone, seconds
    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --json  # five reported seeds: about 10 minutes each
    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --json --tuning  # the seeds that are not reported
    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --json --variant names  # or another of the variants

Appends a record for each run to `--records`; what is recorded is not run again. The figures are those of a sandbox; they
say nothing about real models. The world is in `conductor_world.py`.

First protocol (`--variant unchecked`), written before any run of seeds 921 to 925, and missed: two of the three seeds that
were run reached .90 and .91, the third .48, because its warm start sent .69 of the calls to the worker of their kind; and a
worker of another wording than the only one of training cost a third of the score.

Second protocol, written before any run of seeds 931 to 935. It differs in two things. The warm start is checked: it goes on in
rounds until .90 of the calls go to the worker of their kind, six rounds at most. And the workers of warm start and training
answer in six wordings. Everything was tried on the tuning seeds 1 to 3 alone.

1. World. Measured first, on all held-out questions: each worker alone at most .35, the oracle router of whole questions
   at most .50, the right plan with random workers at most .25, the right plan 1.0.
2. Policy. Two layers of width 128, words as tokens. Warm start: 225 steps of copying exercises and rounds of 450 steps of
   scripted traces of mixed quality, about half of which end right. After each round, 128 training questions are sampled: the
   last round is the first in which .90 of the calls go to the worker of their kind. Then 64 steps of `PromptR1Trainer` with 16
   questions of 8 rollouts, the learning rate 1e-3, and Prompt-R1's reward. Pool order and names (A to F) are drawn for each
   group.
3. Seeds 931 to 935; 256 held-out questions about 40 countries that no training question names. Held-out questions have
   fixed names, the same for all systems.
4. Promise: exact match .85 on average over seeds, no seed below .80, each kind of question at least .70 over all seeds,
   untrained at most .50; above every baseline at the same cost or a lower one, paired by question.
5. Other pools, not trained further: digits wrong in .1 of the requests, in a wording that neither warm start nor training
   had: .75.
6. Reported with it: the share of calls that go to the worker of their kind, before and after; dollars and own tokens of a
   question.
7. The same with retyping instead of references (`--variant retyping`): .10 lower on questions that hand on values of one
   word, .50 lower on records of twelve words.

The further variants, written before any run of them. Each has a warm start of its own, the same seeds, questions and sizes,
and differs only in this:

8. `--variant names`: 30 names in warm start and training; held-out questions under ten other names: .75. The ten names are
   words of the copying exercises, and of no pool.
9. `--variant budget`: a fourth worker, `rumours`, knows the same facts as `facts` for a sixth of the price and is wrong in
   .15 of the calls, each time anew. Every row has a budget, which the prompt states: `low` or `high`, by turns. The warm
   start chooses between the two with equal odds under either. From step 32 on a dollar costs 120 under `low` and
   nothing under `high`. All held-out questions under each budget: `low` costs at most .60 of the dollars of `high`, exact
   match at least .60 under `low` and .85 under `high`. Beside it, best-of-n of the twin on whole questions with the dollars
   of `low` (n = 4) and of `high` (n = 9), and the right plan with each.
10. `--variant outages`: half of the calls to `numbers` fail, in warm start, training and test, and the agent reads
   `unavailable`. The warm start asks again; eight turns in place of six: .80.
11. `--variant outages-failed`: the same outages, but a failed call fails its rollout. The run has to end by itself; exact
   match of the questions that were answered, and of all without outages, is reported without a promise: the agent reads
   nothing of outages and cannot learn to avoid them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from sys import stderr
from typing import Any

from agentic_prompting.evaluation.systems import Row
from agentic_prompting.rollout import Rollout
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
from benchmarks.learning.conductor_baselines import (
    BASELINES,
    GRAMMAR,
    TEMPLATE,
    measure_scripts,
)
from benchmarks.learning.conductor_variants import (
    BUDGET_WEIGHTS,
    LETTERS,
    VARIANTS,
    LateCost,
    Variant,
    make_trials,
    scripts_of,
)
from benchmarks.learning.conductor_world import (
    DESCRIPTION,
    OTHER_WORDING,
    RECORD_WORDS,
    TWIN,
    WORDING,
    WORKER_OF,
    Facts,
    PlanStep,
    is_expert,
    make_environment,
    make_split,
    plan_of,
    question_text,
    read_question,
    read_value,
)

SEEDS, TUNING_SEEDS = (931, 932, 933, 934, 935), (1, 2, 3)
TRAIN_ROWS, HELD_OUT = 2048, 256
WARM_STEPS = 450
RIGHT_WORKER = 0.9
"""The share of calls that go to the worker of their kind, from which on RL begins."""
SHARES_FILE = "shares.json"
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
UNAVAILABLE = "unavailable"


# --- traces of mixed quality -----------------------------------------------------------------------------------------


class TraceWriter:
    """Writes an episode in the text that `Workers` makes of it.

    Args:
        environment ([`Workers`]): Whose workers reply.
        row (`Mapping`): A row that the environment has reset.
        variant ([`Variant`]): How values are handed on, and whether workers are asked again.
    """

    def __init__(self, environment: Any, row: Row, variant: Variant):
        self.environment = environment
        self.variant = variant
        # Decides what the workers get wrong, and which calls fail.
        self.luck = random.Random(f"luck {row['reset_seed']}")
        self.names = {kind: name for name, kind in row["workers"].items()}
        self.turns: list[str] = []
        self.observations: list[str] = []
        self.replies: list[str] = []

    def ask(self, thought: str, calls: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Append a turn with these calls, and the replies to it. Return the calls that failed."""
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
            if self.luck.random() < model.down:
                self.replies.append(UNAVAILABLE)
                continue
            repeat = self.luck.getrandbits(32)
            self.replies.append(model.answer("\n".join([*quoted, text]), repeat))
        shown = [f"#{number} : {reply}" for number, reply in enumerate(self.replies, 1)]
        self.observations.append("\n".join(shown[first:]))
        replies = self.replies[first:]
        return [call for call, reply in zip(calls, replies, strict=True) if reply == UNAVAILABLE]

    def finish(self, thought: str, answer: str) -> None:
        """Append the answering turn."""
        self.turns.append(f"<think> {thought} </think> <answer> {answer} </answer>")

    def describe(self, kind: str) -> str:
        """A worker's description and name, in the order of the prompt, so that two layers can copy them."""
        return f"{self.environment.pool[kind].description} {self.names[kind]}"

    def value(self, index: int) -> str:
        """The value in a reply."""
        return read_value(self.replies[index]) or "nothing"

    def text_values(self) -> list[str]:
        """What stands for each earlier step in a request."""
        values = []
        for index, reply in enumerate(self.replies):
            # A call that failed was made again.
            if reply != UNAVAILABLE:
                values.append(self.value(index) if self.variant.retypes else f"#{index + 1}")
        return values

    def choose_expert(self, operation: str, generator: random.Random) -> str:
        """A worker that knows an operation."""
        kind = WORKER_OF[operation]
        if self.variant.has_twin and kind == "facts":
            kind = generator.choice(["facts", TWIN])
        return kind

    @property
    def is_out_of_turns(self) -> bool:
        """Whether the next turn has to answer."""
        return len(self.turns) >= self.variant.max_turns - 1


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
            kind = writer.choose_expert(step.operation, generator)
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
        failed = writer.ask(thought, calls)
        # Ask again what failed.
        while failed and writer.variant.retries and not writer.is_out_of_turns:
            kinds = dict.fromkeys(kind for kind, _ in failed)
            again = "ask again with " + " ".join(map(writer.describe, kinds))
            failed = writer.ask(again, failed)
        if writer.is_out_of_turns:
            break
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
        worker = writer.choose_expert(expression[0], generator)
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
    variant: Variant,
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
        writer = TraceWriter(environment, row, variant)
        write_trace(kind, row, writer, facts, generator)
        traces.append({**row, "turns": writer.turns, "observations": writer.observations})
    return traces


# --- the policy ------------------------------------------------------------------------------------------------------


def make_tokenizer(facts: Facts, variant: Variant = VARIANTS["references"]) -> Any:
    """One token for each word that occurs, and for the two halves of `<ask to="A">`."""
    from tokenizers import AddedToken

    from agentic_prompting.sandbox.policy import build_tokenizer

    values = [value for values in facts.values.values() for value in values]
    replies = [ANSWER, OTHER_WORDING, NOT_UNDERSTOOD, UNAVAILABLE]
    replies += [f"#{number}" for number in range(1, 25)]
    thoughts = ["find the with all ask whole question i know this done nothing", *NOUN.values()]
    prompts = [
        "workers : question : budget low high",
        *LETTERS,
        *DESCRIPTION,
        *DESCRIPTION.values(),
    ]
    questions = ["what is ?", *WORDING, *WORDING.values(), *RECORD_WORDS]
    # What `Workers` tells an agent whose call cannot be made.
    mistakes = ["there is no worker , only reply the request is empty calls in one turn 4"]
    texts = [*replies, *thoughts, *prompts, *questions, *mistakes, *variant.words]
    words = {word for text in [*texts, *values] for word in text.split()} - {"{}", "{value}"}
    tokenizer = build_tokenizer(sorted(words), values, GRAMMAR)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ('<ask to="', '">')])
    return tokenizer


def draw_nonsense(
    rollouts: Sequence[Rollout],
    tokenizer: Any,
    facts: Facts,
    variant: Variant,
    generator: random.Random,
) -> list[Rollout]:
    """Conversations with random words in the place of values and names: exercises in copying."""
    values = {value for values in facts.values.values() for value in values}
    replaced_words = values | set(variant.names) | set(RECORD_WORDS)
    replaced = tokenizer.convert_tokens_to_ids(sorted(replaced_words))
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
    folder: Path, rows: Sequence[Row], facts: Facts, variant: Variant, seed: int, steps: int
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
    unchecked = folder / "warm_start_unchecked"
    keep_freed_memory()
    spec = AgentSpec(TEMPLATE, grammar=GRAMMAR, limits=variant.limits)
    tokenizer = make_tokenizer(facts, variant)
    chat_format = spec.create_format(tokenizer)
    generator = random.Random(f"traces {seed}")
    # An agent that never reads of outages gets traces without them.
    environment = variant.environment(facts, down=None if variant.retries else 0.0)
    traces = draw_traces(rows, 20 * steps, environment, facts, variant, generator)
    rollouts = [rollout_from_trace(trace, spec, chat_format) for trace in traces]
    half = rollouts[: len(rollouts) // 2]
    nonsense = draw_nonsense(half, tokenizer, facts, variant, generator)
    exercises = copying_exercises(tokenizer, 64 * (steps // 2), generator)

    policy = build_policy(tokenizer, seed)
    imitation = ([*rollouts, *nonsense], steps, 32)
    phases = [(exercises, steps // 2, 64), imitation]
    shares = []
    for round_number in range(variant.max_rounds):
        for examples, max_steps, batch in phases:
            warm_start(
                policy,
                tokenizer,
                examples,
                output_dir=folder / "sft",
                max_steps=max_steps,
                per_device_train_batch_size=batch,
                seed=seed + 1000 * round_number,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                disable_tqdm=True,
                **SFT,
            )
        # The check before RL: whether calls go to the worker of their kind, on training questions.
        save_policy(policy, tokenizer, spec, unchecked)
        questions = [{**row, "budget": "high"} if variant.has_twin else row for row in rows[:128]]
        checked = measure_agent(unchecked, environment, questions, seed)
        shares.append(checked["right_worker"])
        log(f"seed {seed}: warm start, round {round_number + 1}: {checked}")
        if shares[-1] >= RIGHT_WORKER:
            break
        # Go on where it is below that, only with the traces.
        phases = [imitation]
    (unchecked / SHARES_FILE).write_text(json.dumps(shares))
    unchecked.rename(saved)
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
                    right_worker.append(is_expert(worker, expression[0]))
    count = len(rollouts)
    calls = [reply for rollout in rollouts for reply in rollout.replies]
    return {
        "correct": correct(rollouts),
        "failed": sum(rollout.error is not None for rollout in rollouts),
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
    name: str, seed: int, folder: Path, warm_steps: int, steps: int | None, n_test: int
) -> dict[str, Any]:
    """Warm-start a conductor and train it: the record of the run."""
    from datasets import Dataset

    from agentic_prompting import PromptR1Config, PromptR1Trainer
    from agentic_prompting.rewards import PromptR1Reward

    facts = Facts()
    variant = VARIANTS[name]
    steps = variant.steps if steps is None else steps
    train_rows, test_rows = make_split(seed, TRAIN_ROWS, n_test, facts)
    train_rows = variant.with_budgets(train_rows)
    if variant.has_twin:
        test_rows = [{**row, "budget": "high"} for row in test_rows]
    environment = variant.environment(facts)
    started = time.perf_counter()
    with redirect_stdout(stderr):
        model = warm_up(folder, train_rows, facts, variant, seed, warm_steps)
    warm_seconds = time.perf_counter() - started
    warm_shares = json.loads((model / SHARES_FILE).read_text())
    before = measure_agent(model, environment, test_rows, seed)
    log(f"seed {seed}, {name}: {share(before['correct']):.3f} before, {before}")

    trained = folder / "trained"
    changes = {
        "output_dir": str(trained),
        "seed": seed,
        "max_steps": steps,
        "max_turns": variant.limits.max_turns,
        "max_turn_tokens": variant.limits.max_turn_tokens,
        "max_completion_length": variant.limits.max_tokens,
        "num_generations": 8,
        "per_device_train_batch_size": 128,
        "learning_rate": 1e-3,
        "overwrite": True,
    }
    rewards: list[Any] = [PromptR1Reward()]
    if variant.has_twin:
        rewards.append(LateCost(BUDGET_WEIGHTS, variant.first_cost_step))
    started = time.perf_counter()
    trainer = PromptR1Trainer(
        model=str(model),
        environment=environment,
        reward_funcs=rewards,
        args=PromptR1Config(**settings(DEMO, **changes)),
        train_dataset=Dataset.from_list(train_rows),
        prompt_template=TEMPLATE,
    )
    with redirect_stdout(stderr):
        trainer.train()
    trainer.save_model()
    seconds = time.perf_counter() - started

    # Other conditions, in which neither is trained further.
    measured: dict[str, dict[str, Any]] = {}
    for trial_name, trial in make_trials(name, facts).items():
        rows = [{**row, **trial.columns} for row in test_rows]
        measured[trial_name] = measure_agent(trained, trial.environment, rows, seed)
        if trial.untrained:
            untrained = measure_agent(model, trial.environment, rows, seed)
            measured[f"{trial_name}, untrained"] = untrained
    history = trainer.state.log_history
    return {
        "variant": name,
        "seed": seed,
        "steps": steps,
        "kinds": [row["kind"] for row in test_rows],
        "warm_seconds": round(warm_seconds, 1),
        "warm_shares": warm_shares,
        "seconds": round(seconds, 1),
        "rewards": [round(entry["reward"], 3) for entry in history if "reward" in entry],
        "failed_rollouts": [
            round(entry["rollout/failed"], 3) for entry in history if "rollout/failed" in entry
        ],
        "before": before,
        "after": measure_agent(trained, environment, test_rows, seed),
        **measured,
        "baselines": measure_scripts(scripts_of(name), test_rows, environment, seed),
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
            after = [score_of(run["after"]) for run in runs]
            summary[variant] = {
                "seeds": [run["seed"] for run in runs],
                "lowest": min(after),
                **{name: interval(scores) for name, scores in scores_by_condition(runs).items()},
                "usd": {name: usd_of(runs, name) for name in conditions_of(runs)},
                "by_kind": by_kind(runs),
                "right_worker": [
                    [run[when]["right_worker"] for when in ("before", "after")] for run in runs
                ],
            }
    return summary


def score_of(measured: Mapping[str, Any]) -> float:
    """Exact match over the questions whose rollout did not fail."""
    scored = len(measured["correct"]) - measured.get("failed", 0)
    return measured["correct"].count("1") / max(1, scored)


def conditions_of(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of what each run measured of its conductor: `before`, `after` and the trials."""
    return [
        name for name, value in runs[0].items() if isinstance(value, Mapping) and "correct" in value
    ]


def scores_by_condition(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Exact match of each seed, by condition."""
    return {name: [score_of(run[name]) for run in runs] for name in conditions_of(runs)}


def usd_of(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean dollars of a question under a condition."""
    return round(sum(run[name]["usd"] for run in runs) / len(runs), 6)


CONDITION_TITLES = {
    ("unchecked", "before"): "the first protocol, untrained",
    ("unchecked", "after"): "the first protocol: one wording, a warm start that is not checked",
    ("unchecked", "replaced"): "the first protocol: digits replaced by a worker of another wording",
    ("references", "after"): "references",
    ("references", "replaced"): "digits replaced by a worker of a seventh wording",
    ("names", "before"): "30 names, untrained",
    ("names", "after"): "30 names",
    ("names", "held-out names"): "30 names in training, ten others",
    ("budget", "before"): "with a twin, budget `high`, untrained",
    ("budget", "low, untrained"): "with a twin, budget `low`, untrained",
    ("budget", "after"): "with a twin, budget `high`",
    ("budget", "low"): "with a twin, budget `low`",
    ("outages", "before"): "digits down half the time and *unavailable*, untrained",
    ("outages", "after"): "digits down half the time and *unavailable*",
    ("outages", "no outages"): "the same conductor without outages",
    ("outages-failed", "after"): "digits down half the time and *failed*, of what was answered",
    ("outages-failed", "no outages"): "the same conductor without outages",
    ("retyping", "after"): "retyping",
}
"""What the table of variants calls a condition of a variant."""

PROMISES = {
    ("unchecked", "after"): 0.85,
    ("unchecked", "replaced"): 0.75,
    ("references", "after"): 0.85,
    ("references", "replaced"): 0.75,
    ("names", "held-out names"): 0.75,
    ("budget", "low"): 0.60,
    ("budget", "after"): 0.85,
    ("outages", "after"): 0.80,
}
"""Exact match that the protocol expects at least."""
MAX_DOLLAR_SHARE = 0.60
"""Dollars under the budget `low` that the protocol expects at most, as a share of those under `high`."""


def variants_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Score and dollars of each variant's conductor under its conditions, with what the protocol expects."""
    rows = []
    for (variant, condition), title in CONDITION_TITLES.items():
        runs = of_variant(records, variant)
        if not runs:
            continue
        scores = scores_by_condition(runs)[condition]
        promise = PROMISES.get((variant, condition))
        verdict = ""
        if promise is not None:
            kept = sum(scores) / len(scores) >= promise
            verdict = f"at least {promise:.2f}: {'kept' if kept else '**missed**'}"
        usd = f"{1000 * usd_of(runs, condition):.2f}"
        rows.append([title, len(runs), shown(scores), usd, verdict])
    if not rows:
        return "No run of it has been recorded yet."
    return markdown(
        ("conductor", "seeds", "exact match", "$ per 1,000 questions", "protocol"), rows
    )


def budget_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Score and dollars of conductor and scripts in the world with a cheap twin, by dollars."""
    runs = of_variant(records, "budget")
    if not runs:
        return "No run of it has been recorded yet."
    titles = {
        "before": "conductor, untrained",
        "low": "conductor, `low`",
        "after": "conductor, `high`",
    }
    systems = {title: [run[condition] for run in runs] for condition, title in titles.items()}
    for name in runs[0]["baselines"]:
        systems[name] = [run["baselines"][name] for run in runs]
    # Order the systems by their dollars.
    usd = {
        name: sum(entry["usd"] for entry in entries) / len(entries)
        for name, entries in systems.items()
    }
    rows = []
    for name in sorted(systems, key=lambda system: usd[system]):
        scores = [score_of(entry) for entry in systems[name]]
        rows.append([name, f"{1000 * usd[name]:.2f}", shown(scores)])
    # The promise of the dollars.
    dollar_share = usd[titles["low"]] / usd[titles["after"]] if usd[titles["after"]] else 1.0
    verdict = "kept" if dollar_share <= MAX_DOLLAR_SHARE else "**missed**"
    promise = f"at most {MAX_DOLLAR_SHARE:.2f}: {verdict}"
    rows.append(["dollars of `low` as a share of `high`", f"{dollar_share:.2f}", promise])
    return markdown(("system", "$ per 1,000 questions", "exact match"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", action="store_true", help="measure the world, train nothing")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--tuning", action="store_true", help="seeds that are not reported")
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
            measured = measure_scripts(BASELINES, rows, make_environment(facts), seed)
            scores = {name: round(share(entry["correct"]), 3) for name, entry in measured.items()}
            print(json.dumps({"seed": seed, "n": len(rows), **scores}), flush=True)
        return
    quiet()
    is_reported = not (options.tuning or options.quick)
    folder = options.folder / ("quick" if options.quick else "tuning" if options.tuning else "runs")
    records = Records(
        options.records or (RECORDS if is_reported else folder) / "conductor.jsonl.gz"
    )
    seeds = options.seeds or (SEEDS if is_reported else TUNING_SEEDS)
    wanted = [(options.variant, seed) for seed in seeds]
    sizes = (10, 2, 32) if options.quick else (WARM_STEPS, None, HELD_OUT)
    for variant, seed in records.missing(("variant", "seed"), wanted):
        records.add(measure(variant, seed, folder / f"{variant}-{seed}", *sizes))
        log(json.dumps(summarise(records.read())))
    entries = records.read()
    print(table(entries))
    print(variants_table(entries))
    print(budget_table(entries))
    if options.json:
        print(json.dumps(summarise(entries)))


if __name__ == "__main__":
    main()
