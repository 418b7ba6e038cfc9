"""A conductor of 420,000 parameters over three scripted workers, before and after GRPO, beside its
baselines.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --world  # the world alone, seconds
    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --json  # five reported seeds: about 10 minutes each
    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --json --tuning  # the seeds that are not reported
    OMP_NUM_THREADS=1 python -m benchmarks.learning.conductor --json --variant names  # or another of the variants

Appends a record for each run to `--records`; what is recorded is not run again. The figures are
those of a sandbox; they say nothing about real models. The world is in `conductor_world.py`.

First protocol (`--variant unchecked`), written before any run of seeds 921 to 925, and missed: two
of the three seeds that were run reached .90 and .91, the third .48, because its warm start sent .69
of the calls to the worker of their kind; and a worker of another wording than the only one of
training cost a third of the score.

Second protocol, written before any run of seeds 931 to 935. It differs in two things. The warm
start is checked: it goes on in rounds until .90 of the calls go to the worker of their kind, six
rounds at most. And the workers of warm start and training answer in six wordings. Everything was
tried on the tuning seeds 1 to 3 alone.

1. World. Measured first, on all held-out questions: each worker alone at most .35, the oracle
   router of whole questions at most .50, the right plan with random workers at most .25, the right
   plan 1.0.
2. Policy. Two layers of width 128, words as tokens. Warm start: 225 steps of copying exercises and
   rounds of 450 steps of scripted traces of mixed quality, about half of which end right. After
   each round, 128 training questions are sampled: the last round is the first in which .90 of the
   calls go to the worker of their kind. Then 64 steps of `PromptR1Trainer` with 16 questions of 8
   rollouts, the learning rate 1e-3, and Prompt-R1's reward. Pool order and names (A to F) are drawn
   for each group.
3. Seeds 931 to 935; 256 held-out questions about 40 countries that no training question names.
   Held-out questions have fixed names, the same for all systems.
4. Promise: exact match .85 on average over seeds, no seed below .80, each kind of question at least
   .70 over all seeds, untrained at most .50; above every baseline at the same cost or a lower one,
   paired by question.
5. Other pools, not trained further: digits wrong in .1 of the requests, in a wording that neither
   warm start nor training had: .75.
6. Reported with it: the share of calls that go to the worker of their kind, before and after;
   dollars and own tokens of a question.
7. The same with retyping instead of references (`--variant retyping`): .10 lower on questions that
   hand on values of one word, .50 lower on records of twelve words.

The further variants, written before any run of them. Each has a warm start of its own, the same
seeds, questions and sizes, and differs only in this:

8. `--variant names`: 30 names in warm start and training; held-out questions under ten other names:
   .75. The ten names are words of the copying exercises, and of no pool.
9. `--variant budget`: a fourth worker, `rumours`, knows the same facts as `facts` for a sixth of
   the price and is wrong in .15 of the calls, each time anew. Every row has a budget, which the
   prompt states: `low` or `high`, by turns. The warm start chooses between the two with equal odds
   under either. From step 32 on a dollar costs 120 under `low` and nothing under `high`. All
   held-out questions under each budget: `low` costs at most .60 of the dollars of `high`, exact
   match at least .60 under `low` and .85 under `high`. Beside it, best-of-n of the twin on whole
   questions with the dollars of `low` (n = 4) and of `high` (n = 9), and the right plan with each.
10. `--variant outages`: half of the calls to `numbers` fail, in warm start, training and test, and
   the agent reads `unavailable`. The warm start asks again; eight turns in place of six: .80.
11. `--variant outages-failed`: the same outages, but a failed call fails its rollout. The run has
   to end by itself; exact match of the questions that were answered, and of all without outages, is
   reported without a promise: the agent reads nothing of outages and cannot learn to avoid them.

On seed 931 the variants 8 to 10 missed their promises (.64; dollars as high under `low` as under
`high`; .76). Third protocol, written before any run of seeds 941 to 943, with the promises above;
tried on tuning seed 1 alone.

12. `--variant names-longer` and `--variant outages-longer`: two rounds of imitation at least, which
   also show every name of the vocabulary twice as often in the copying exercises.
13. `--variant budget-early`: a dollar costs 200 under `low`, from the first step on. At the price
   of 120 the twin was hardly worth its errors, and by the step at which dollars counted none was
   ever sampled but the dear one (so too from step 8 on). The warm start imitates 450 steps without
   the twin first: with it from the beginning, tuning seed 1 still sent .35 of the calls to a worker
   of their kind after four rounds. And it asks the twin in .7 of the calls under `low` and in .3
   under `high`: at equal odds the policy never read the budget.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import chain
from pathlib import Path
from sys import stderr
from typing import TYPE_CHECKING, Any

from agentic_prompting.evaluation.systems import Row
from agentic_prompting.rollout import Rollout
from agentic_prompting.sandbox.world import ANSWER, NOT_UNDERSTOOD
from benchmarks.lab import (
    BATCH,
    DEMO,
    RECORDS,
    Records,
    correct,
    log,
    quiet,
    settings,
    share,
)
from benchmarks.learning.conductor_baselines import (
    BASELINES,
    GRAMMAR,
    TEMPLATE,
    measure_scripts,
)
from benchmarks.learning.conductor_tables import (
    budget_table,
    retyping_table,
    summarise,
    systems_table,
    variants_table,
)
from benchmarks.learning.conductor_traces import NOUN, UNAVAILABLE, draw_traces
from benchmarks.learning.conductor_variants import (
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
    WORDING,
    Facts,
    SandboxWorkers,
    is_expert,
    make_environment,
    make_split,
    read_question,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEEDS: tuple[int, ...] = (931, 932, 933, 934, 935)
LATER_SEEDS = (941, 942, 943)
"""The seeds of the third protocol."""
LATER_VARIANTS = ("names-longer", "budget-early", "outages-longer")
TUNING_SEEDS = (1, 2, 3)
TRAIN_ROWS = 2048
HELD_OUT = 256
WARM_STEPS = 450
RIGHT_WORKER = 0.9
"""The share of calls that go to the worker of their kind, from which on RL begins."""
SHARES_FILE = "shares.json"

# --- the policy -----------------------------------------------------------------------------------


def make_tokenizer(
    facts: Facts, variant: Variant = VARIANTS["references"]
) -> PreTrainedTokenizerFast:
    """One token for each word that occurs, and for the two halves of `<ask to="A">`."""
    from tokenizers import AddedToken

    from agentic_prompting.sandbox.policy import build_tokenizer

    values = list(chain.from_iterable(facts.values.values()))
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
    words = set(" ".join([*texts, *values]).split()) - {"{}", "{value}"}
    tokenizer = build_tokenizer(sorted(words), values, GRAMMAR)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ('<ask to="', '">')])
    return tokenizer


def draw_nonsense(
    rollouts: Sequence[Rollout],
    tokenizer: PreTrainedTokenizerFast,
    facts: Facts,
    variant: Variant,
    generator: random.Random,
) -> list[Rollout]:
    """Conversations with random words in the place of values and names: exercises in copying."""
    replaced_words = set(chain.from_iterable(facts.values.values()))
    replaced_words |= {*variant.names, *RECORD_WORDS}
    replaced_ids = tokenizer.convert_tokens_to_ids(sorted(replaced_words))

    # Words that never replace another one.
    reserved = {*WORDING, "digit", *tokenizer.get_added_vocab()}
    reserved |= {f"#{number}" for number in range(1, 25)}
    vocabulary = sorted(tokenizer.get_vocab().items())
    replacement_ids = [token_id for word, token_id in vocabulary if word not in reserved]

    exercises = []
    for rollout in rollouts:
        drawn = generator.choices(replacement_ids, k=len(replaced_ids))
        replacements = dict(zip(replaced_ids, drawn, strict=True))
        prompt_ids = [replacements.get(token, token) for token in rollout.prompt_ids]
        ids = [replacements.get(token, token) for token in rollout.ids]
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

    # A finished warm start has its final name.
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
    down = None if variant.retries else 0.0
    environment = variant.environment(facts, down=down)

    def draw_imitation(imitated: Variant, workers: SandboxWorkers) -> list[Rollout]:
        """Traces in the tokens of the training, and half of them again with other words."""
        traces = draw_traces(rows, 20 * steps, workers, facts, imitated, generator)
        rollouts = [rollout_from_trace(trace, spec, chat_format) for trace in traces]
        half = rollouts[: len(rollouts) // 2]
        return [*rollouts, *draw_nonsense(half, tokenizer, facts, imitated, generator)]

    # The phases of the first round: their examples, steps and batch size.
    imitation = (draw_imitation(variant, environment), steps, 32)
    exercises = copying_exercises(tokenizer, 64 * (steps // 2), generator)
    policy = build_policy(tokenizer, seed)
    phases = [(exercises, steps // 2, 64), imitation]
    if variant.twin_comes_late:
        # Two workers for one kind of question would keep a policy from learning who is who.
        without_twin = replace(variant, has_twin=False)
        simpler = draw_imitation(without_twin, without_twin.environment(facts))
        phases.insert(1, (simpler, steps, 32))

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
        questions = rows[:128]
        if variant.has_twin:
            questions = [{**row, "budget": "high"} for row in questions]
        checked = measure_agent(unchecked, environment, questions, seed)
        shares.append(checked["right_worker"])
        log(f"seed {seed}: warm start, round {round_number + 1}: {checked}")
        if shares[-1] >= RIGHT_WORKER and round_number + 1 >= variant.min_rounds:
            break
        # Go on where it is below that, only with the traces.
        phases = [imitation]

    (unchecked / SHARES_FILE).write_text(json.dumps(shares))
    unchecked.rename(saved)
    return saved


# --- runs -----------------------------------------------------------------------------------------


def judge_workers(rollout: Rollout) -> list[bool]:
    """For each call that can be read, whether it goes to a worker of its kind."""
    workers = rollout.row["workers"]
    calls = chain.from_iterable(GRAMMAR.read_calls(turn.text) for turn in rollout.turns)
    results = []
    for call in calls:
        expression = read_question(call.arguments["request"])
        if expression is not None and not isinstance(expression, str):
            worker = workers.get(call.arguments["worker"])
            results.append(is_expert(worker, expression[0]))
    return results


def measure_agent(
    model: Path, environment: SandboxWorkers, rows: Sequence[Row], seed: int
) -> dict[str, Any]:
    """Scores, costs and calls of a saved conductor."""
    from agentic_prompting import PromptAgent
    from agentic_prompting.rollout import AgentSpec

    agent = PromptAgent.from_pretrained(
        model, environment, AgentSpec.load(model), max_batch_size=BATCH
    )
    rollouts = agent.answer_all(list(rows), seed=seed, progress=False)
    count = len(rollouts)
    right_worker = list(chain.from_iterable(map(judge_workers, rollouts)))
    replies = list(chain.from_iterable(rollout.replies for rollout in rollouts))
    turns = list(chain.from_iterable(rollout.turns for rollout in rollouts))
    well_formed = sum(turn.well_formed for turn in turns)
    own_tokens = sum(sum(rollout.mask) for rollout in rollouts)
    return {
        "correct": correct(rollouts),
        "failed": sum(rollout.error is not None for rollout in rollouts),
        "usd": round(sum(reply.worth.cost_usd for reply in replies) / count, 6),
        "calls": round(len(replies) / count, 3),
        "own_tokens": round(own_tokens / count, 1),
        "right_worker": round(sum(right_worker) / max(1, len(right_worker)), 4),
        "well_formed": round(well_formed / len(turns), 4),
    }


def measure(
    name: str, seed: int, folder: Path, warm_steps: int, steps: int | None, n_test: int
) -> dict[str, Any]:
    """Warm-start a conductor and train it: the record of the run."""
    facts = Facts()
    variant = VARIANTS[name]
    steps = variant.steps if steps is None else steps
    train_rows, test_rows = make_split(seed, TRAIN_ROWS, n_test, facts)
    train_rows = variant.with_budgets(train_rows)
    if variant.has_twin:
        test_rows = [{**row, "budget": "high"} for row in test_rows]
    environment = variant.environment(facts)

    # The warm start.
    started = time.perf_counter()
    with redirect_stdout(stderr):
        model = warm_up(folder, train_rows, facts, variant, seed, warm_steps)
    warm_seconds = time.perf_counter() - started
    warm_shares = json.loads((model / SHARES_FILE).read_text())
    before = measure_agent(model, environment, test_rows, seed)
    log(f"seed {seed}, {name}: {share(before['correct']):.3f} before, {before}")

    # The training.
    trained = folder / "trained"
    history, seconds = train_conductor(
        model, trained, variant, environment, train_rows, seed, steps
    )

    # Other conditions, in which neither is trained further.
    trials: dict[str, dict[str, Any]] = {}
    for trial_name, trial in make_trials(name, facts).items():
        rows = [{**row, **trial.columns} for row in test_rows]
        trials[trial_name] = measure_agent(trained, trial.environment, rows, seed)
        if trial.untrained:
            untrained = measure_agent(model, trial.environment, rows, seed)
            trials[f"{trial_name}, untrained"] = untrained
    failed = [entry["rollout/failed"] for entry in history if "rollout/failed" in entry]
    return {
        "variant": name,
        "seed": seed,
        "steps": steps,
        "kinds": [row["kind"] for row in test_rows],
        "warm_seconds": round(warm_seconds, 1),
        "warm_shares": warm_shares,
        "seconds": round(seconds, 1),
        "rewards": [round(entry["reward"], 3) for entry in history if "reward" in entry],
        "failed_rollouts": [round(value, 3) for value in failed],
        "before": before,
        "after": measure_agent(trained, environment, test_rows, seed),
        **trials,
        "baselines": measure_scripts(scripts_of(name), test_rows, environment, seed),
    }


def train_conductor(
    model: Path,
    output: Path,
    variant: Variant,
    environment: SandboxWorkers,
    rows: Sequence[Mapping[str, Any]],
    seed: int,
    steps: int,
) -> tuple[list[dict[str, Any]], float]:
    """Train a warm-started conductor by GRPO and save it; return the trainer's log and the seconds
    that it took.
    """
    from datasets import Dataset

    from agentic_prompting import PromptR1Config, PromptR1Trainer
    from agentic_prompting.rewards import PromptR1Reward

    changes = {
        "output_dir": str(output),
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
        rewards.append(LateCost(variant.budget_weights, variant.first_cost_step))
    started = time.perf_counter()
    trainer = PromptR1Trainer(
        model=str(model),
        environment=environment,
        reward_funcs=rewards,
        args=PromptR1Config(**settings(DEMO, **changes)),
        train_dataset=Dataset.from_list(list(rows)),
        prompt_template=TEMPLATE,
    )
    with redirect_stdout(stderr):
        trainer.train()
    trainer.save_model()
    return trainer.state.log_history, time.perf_counter() - started


def print_world() -> None:
    """Print what the baselines reach in the world, without a policy."""
    facts = Facts()
    for seed in SEEDS:
        _, rows = make_split(seed, 1, HELD_OUT, facts)
        measured = measure_scripts(BASELINES, rows, make_environment(facts), seed)
        scores = {name: round(share(entry["correct"]), 3) for name, entry in measured.items()}
        print(json.dumps({"seed": seed, "n": len(rows), **scores}), flush=True)


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
        print_world()
        return
    quiet()
    folder = options.folder / "runs"
    records_folder = RECORDS
    seeds = LATER_SEEDS if options.variant in LATER_VARIANTS else SEEDS
    sizes: tuple[int, int | None, int] = (WARM_STEPS, None, HELD_OUT)
    # Runs that are not reported get folders and records of their own.
    if options.tuning:
        folder = options.folder / "tuning"
    if options.quick:
        folder = options.folder / "quick"
        sizes = (10, 2, 32)
    if options.tuning or options.quick:
        records_folder = folder
        seeds = TUNING_SEEDS
    records = Records(options.records or records_folder / "conductor.jsonl.gz")
    runs = [(options.variant, seed) for seed in options.seeds or seeds]
    for variant, seed in records.missing(("variant", "seed"), runs):
        records.add(measure(variant, seed, folder / f"{variant}-{seed}", *sizes))
        log(json.dumps(summarise(records.read())))
    entries = records.read()
    print(systems_table(entries))
    print(variants_table(entries))
    print(budget_table(entries))
    print(retyping_table(entries))
    if options.json:
        print(json.dumps(summarise(entries)))


if __name__ == "__main__":
    main()
