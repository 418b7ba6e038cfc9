"""E-SPL's evolution of prompts alone with real models: one of .5 billion parameters answers, one of
1.5 billion reflects.

    python -m benchmarks.real.evolve_prompts --policy-url http://localhost:8081/v1 --reflector-url http://localhost:8080/v1
    python -m benchmarks.real.evolve_prompts ... --tuning  # the seed that is not reported
    python -m benchmarks.real.evolve_prompts  # the tables, from the records

Appends a record for each task to `--records`; what is recorded is not run again. A stopped
evolution goes on from `--folder`.

Protocol, written before the runs of the reported seed.

1. Models. Qwen2.5-Coder-0.5B-Instruct answers, Qwen2.5-Coder-1.5B-Instruct reflects (both Q4_K_M,
   in llama.cpp with one thread each).
2. Tasks, made by rule, with a structure that a prompt can state and no model can know. `queues`: a
   note to a town's office belongs into one of four queues, by its topic; which topic belongs into
   which queue is drawn. `dates`: a date is to be written in the office's own format, which is
   drawn. 64 questions to learn from, 256 held out.
3. Evolution. `evolve` with 8 steps of 8 problems, 2 prompts and 2 answers each,
   `reflection="rewrite"` and `reflect_on="imperfect"`, because at first hardly any answer is right.
   The first prompt states the task without its rule.
4. Reported: the share of answers that are right to the letter, of the first and of the best prompt
   by rating, on the same held-out questions at temperature 0; how many mutations could be read, and
   why the others could not; the best prompt.
5. Seed 958; tuning seed 1.
6. Expected: at least one of the two tasks is gained with an interval above 0. The figures are
   printed whatever they are.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_prompting import OpenAIChat, evolve
from agentic_prompting.evaluation import PromptedSystem, evaluate_agent
from agentic_prompting.evaluation.metrics import each
from agentic_prompting.evolution import EvolveConfig
from benchmarks.lab import RECORDS, Records, log, markdown
from benchmarks.real.small_agent import connect, score_cells

SEEDS = (958,)
TUNING_SEEDS = (1,)
TRAIN_ROWS = 64
HELD_OUT = 256
CONFIG = {
    "steps": 8,
    "problems_per_step": 8,
    "prompts_per_step": 2,
    "num_generations": 2,
    "reflection": "rewrite",
    "reflect_on": "imperfect",
    "grammar": "free",
    "policy_sampling": {"temperature": 0.7, "max_tokens": 16},
    "reference_sampling": {"temperature": 0.7, "max_tokens": 400},
}

# The topics of notes, and what notes of each topic mention.
TOPICS = {
    "water": ["a burst pipe", "low water pressure", "brown tap water", "a leaking hydrant"],
    "roads": ["a pothole", "a broken kerb", "a faded crossing", "a loose paving stone"],
    "noise": ["a barking dog", "loud music at night", "a rattling fan", "a car alarm"],
    "trees": ["a fallen branch", "a dead oak", "an overgrown hedge", "roots in the path"],
}
STREETS = [
    "Mill Lane",
    "Church Road",
    "Station Street",
    "High Street",
    "Bridge Street",
    "Park Road",
    "North Lane",
    "Oak Street",
]
NOTES = (
    "There is {thing} in {street}, by number {number}.",
    "I write about {thing} near {number} {street}. Please help.",
    "Since Monday we have {thing} in front of {number} {street}.",
)
QUEUES = ("Amber", "Cobalt", "Violet", "Coral")
MONTHS = """January February March April May June July August September October November December""".split()  # noqa: SIM905
FORMATS = ("{year}.{month:02}.{day:02}", "{day:02}/{month:02}/{year}", "{year}-{day:02}-{month:02}")
FIRST_PROMPTS = {
    "queues": (
        "Sort the note into a queue: Amber, Cobalt, Violet or Coral. Answer with the queue alone."
    ),
    "dates": "Write the date as the office does. Answer with the date alone.",
}


def draw_rows(task: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Different questions of a task, each with its answer. The seed decides the rule, too."""
    generator = random.Random(f"{task} {seed}")
    queues = dict(zip(TOPICS, generator.sample(QUEUES, len(QUEUES)), strict=True))
    date_format = generator.choice(FORMATS)
    rows: dict[str, str] = {}
    while len(rows) < count:
        if task == "queues":
            topic = generator.choice(list(TOPICS))
            note = generator.choice(NOTES).format(
                thing=generator.choice(TOPICS[topic]),
                street=generator.choice(STREETS),
                number=generator.randint(1, 90),
            )
            rows[note] = queues[topic]
        else:
            year, month = generator.randint(1950, 2030), generator.randint(1, 12)
            day = generator.randint(1, 28)
            question = f"{day} {MONTHS[month - 1]} {year}"
            rows[question] = date_format.format(year=year, month=month, day=day)
    return [{"question": question, "answers": [answer]} for question, answer in rows.items()]


def same_text(answer: str, accepted: Sequence[str]) -> float:
    """Whether an answer is right to the letter.

    `exact_match` would take no notice of the punctuation of a date.
    """
    return float(answer.strip() in accepted)


def same_text_reward(
    completions: Sequence[Any], answers: Sequence[Sequence[str]], **_: Any
) -> list[float]:
    """[`same_text`] as a reward."""
    return [
        same_text(completion[-1]["content"], accepted)
        for completion, accepted in zip(completions, answers, strict=True)
    ]


# --- a run ----------------------------------------------------------------------------------------


def measure(
    task: str, seed: int, policy: OpenAIChat, reflector: OpenAIChat, folder: Path
) -> dict[str, Any]:
    """The record of a task: its evolution, and the first and the best prompt on held-out questions."""
    started = time.monotonic()
    rows = draw_rows(task, TRAIN_ROWS + HELD_OUT, seed)
    first_prompt = FIRST_PROMPTS[task]
    result = evolve(
        policy,
        reflector,
        rows[:TRAIN_ROWS],
        same_text_reward,
        first_prompt,
        EvolveConfig(seed=seed, **CONFIG),
        on_step=lambda step: log(f"{task}, step {step.step}: {step.values}"),
        checkpoint=folder / task / "state.json",
    )
    mutations = [
        operator
        for step in result.steps
        for operator in step.operators
        if operator["operator"] == "mutation"
    ]
    prompts = {"first": first_prompt, "best": result.best.text}
    correct = {name: ask(policy, prompt, rows[TRAIN_ROWS:]) for name, prompt in prompts.items()}
    return {
        "task": task,
        "seed": seed,
        "policy": policy.model,
        "reflector": reflector.model,
        "seconds": round(time.monotonic() - started),
        "stopped": result.stopped,
        "mutations": len(mutations),
        "children": sum(mutation["child"] is not None for mutation in mutations),
        "reasons": Counter(
            mutation["reason"] for mutation in mutations if mutation["child"] is None
        ),
        "example": rows[TRAIN_ROWS],
        "prompts": prompts,
        "correct": correct,
    }


def ask(policy: OpenAIChat, prompt: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A character for each held-out question: whether the answer under the prompt is right."""
    system = PromptedSystem(policy, prompt, temperature=0, max_tokens=16)
    evaluation = evaluate_agent(
        system, {"held out": rows}, {"same text": each(same_text)}, n=None, runs=1, progress=False
    )
    (result,) = evaluation.results
    values = result.values["same text"]
    # A failed answer is neither right nor wrong.
    return "".join(
        str(int(values[number])) if number in values else "-" for number in range(len(rows))
    )


# --- figures --------------------------------------------------------------------------------------


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Right answers of the first and of the best prompt, what was gained, and what became of the
    mutations.
    """
    if not records:
        return "No run of it has been recorded yet."
    rows = []
    for record in records:
        best = record["correct"]["best"]
        first_score, gained = score_cells(record["correct"]["first"], best)
        best_score, _ = score_cells(best)
        mutations = record["mutations"]
        read = f"{mutations - record['reasons'].get('unreadable', 0)} of {mutations}"
        figures = (first_score, best_score, gained, read, record["children"])
        rows.append((record["seed"], record["task"], *figures))
    titles = ("seed", "task", "first prompt", "best prompt", "gained", "replies read", "children")
    return markdown(titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy-url", help="the address of the model that answers")
    parser.add_argument("--policy", default="qwen2.5-coder-0.5b", help="its name")
    parser.add_argument("--reflector-url", help="the address of the model that reflects")
    parser.add_argument("--reflector", default="qwen2.5-coder-1.5b", help="its name")
    parser.add_argument("--tuning", action="store_true", help="the seed that is not reported")
    parser.add_argument("--folder", type=Path, default=Path("runs/evolve-prompts"))
    parser.add_argument("--records", type=Path, help="default: records/evolve_prompts.jsonl.gz")
    options = parser.parse_args()
    default = (options.folder if options.tuning else RECORDS) / "evolve_prompts.jsonl.gz"
    records = Records(options.records or default)
    if options.policy_url and options.reflector_url:
        policy = connect(options.policy_url, options.policy, options.folder / "policy")
        reflector = connect(options.reflector_url, options.reflector, options.folder / "reflector")
        with policy, reflector:
            seeds = TUNING_SEEDS if options.tuning else SEEDS
            runs = [(task, seed) for seed in seeds for task in FIRST_PROMPTS]
            for task, seed in records.missing(("task", "seed"), runs):
                folder = options.folder / str(seed)
                records.add(measure(task, seed, policy, reflector, folder))
        print(json.dumps(records.read()))
    print(table(records.read()))


if __name__ == "__main__":
    main()
