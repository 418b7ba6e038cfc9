"""ProRefine with a real model of 1.5 billion parameters in all roles, on object counting, word
sorting and word problems.

    python -m benchmarks.real.prorefine --base-url http://localhost:8080/v1 --llm qwen2.5-coder-1.5b  # an hour or two; goes on
    python -m benchmarks.real.prorefine  # the table, from the records

Appends a record for each task to `--records`; what is recorded is not run again. A stopped task
goes on from the replies in `--folder`.

Protocol, written before any run.

1. Model. Qwen2.5-Coder-1.5B-Instruct (Q4_K_M) in llama.cpp with one thread, at temperature 0, as
   task model, critic, optimizer and verifier.
2. Questions. 32 puzzles of each kind in the wording of BIG-Bench Hard, made by rule
   (`make_puzzles`, seed 31), and the start prompt of `START_PROMPTS` for the kind. No prompt, limit
   or template was tried on them.
3. Settings. Steps of k = 64 tokens and at most n = 4 of them, which are as many tokens as the
   paper's 25 steps of 10, at a sixth of the calls. Critic and optimizer write up to 256 tokens, the
   task model 384.
4. Compared on the same questions: no refinement (the first answer); refinement of every question;
   only of those whose first answer the model itself holds wrong; only of those that are wrong by
   the labels (the paper's upper bound).
5. Expected: the upper bound is above no refinement, because it can only repair. Whether the other
   two are is open: a model of this size may well be too weak a critic. The figures are printed
   whatever they are.

Second protocol, of 29 November 2026, written before its run. None of the first answers to the
puzzles had been right, so they had no headroom: a third task takes their place.

1. Model, as before, but with two threads.
2. Questions. 64 word problems (`word_problems.py`, seed 32), each with one sentence that does not
   matter, and the start prompt for GSM8K. Seed 1 was for tuning: of its first 12 answers 6 were
   right, and of 16 answers 7. Stories without that sentence were too easy (7 or 8 of 8 right) or too
   hard (0 of 8).
3. Settings. Steps of k = 128 tokens and at most n = 2 of them; critic and optimizer write up to 160
   tokens, the task model 512. Other words in the critic's request were tried on seed 1 and did not
   help, so the templates are the library's own.
4. Compared, as before.
5. Expected: a first answer is right in .25 to .75, so that there is something to repair and to
   break; the upper bound is not below it. On seed 1 none of 6 wrong answers was repaired, and the
   model as verifier held each of them right or wrote no verdict, so little is expected of the other
   two.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentic_prompting import OpenAIChat
from agentic_prompting.evaluation import paired_difference
from agentic_prompting.refine import START_PROMPTS, LabelVerifier, ProRefiner, RefinementResult
from agentic_prompting.rewards import integer_match
from agentic_prompting.rewards.reasoning import Scorer
from agentic_prompting.sandbox.puzzles import COUNTING, SORTING, make_puzzles, score_puzzle
from benchmarks.lab import RECORDS, Records, log, markdown
from benchmarks.real.small_agent import by_question, connect, score_cells
from benchmarks.real.word_problems import make_word_problems

SETTINGS = {
    "none": "no refinement",
    "no_verifier": "every question refined",
    "verifier": "the model's verdict",
    "optimal_verifier": "the labels' verdict",
}


@dataclass(frozen=True)
class Task:
    """The questions of a task, and how they are answered and refined."""

    title: str
    start_prompt: str
    make_rows: Callable[[], list[dict[str, Any]]]
    scorer: Scorer
    limits: Mapping[str, int]
    edit_tokens: int
    """Most tokens of a feedback and of a new prompt."""


def puzzle_task(kind: str, title: str) -> Task:
    """The task of a kind of puzzles, as the first protocol has it."""
    return Task(
        title=title,
        start_prompt=START_PROMPTS[kind],
        make_rows=partial(make_puzzles, 32, 31, (kind,)),
        scorer=score_puzzle,
        limits={"tokens_per_step": 64, "max_steps": 4, "final_max_tokens": 384},
        edit_tokens=256,
    )


WORD_PROBLEMS = "word_problems"
TASKS = {
    COUNTING: puzzle_task(COUNTING, "object counting"),
    SORTING: puzzle_task(SORTING, "word sorting"),
    WORD_PROBLEMS: Task(
        title="word problems",
        start_prompt=START_PROMPTS["gsm8k_dspy"],
        make_rows=partial(make_word_problems, 64, 32),
        scorer=integer_match,
        limits={"tokens_per_step": 128, "max_steps": 2, "final_max_tokens": 512},
        edit_tokens=160,
    ),
}


def measure(name: str, chat: OpenAIChat) -> dict[str, Any]:
    """The record of a task: every setting on its questions."""
    started = time.monotonic()
    task = TASKS[name]
    rows = task.make_rows()
    sampling = {role: {"max_tokens": task.edit_tokens} for role in ("feedback", "optimizer")}
    verifiers = {
        "optimal_verifier": LabelVerifier(task.scorer),
        "verifier": chat,
        "no_verifier": None,
    }
    settings = {}
    for setting, verifier in verifiers.items():
        refiner = ProRefiner(chat, chat, chat, verifier, sampling=sampling, **task.limits)
        results = refiner.refine_all(task.start_prompt, rows, max_in_flight=4, progress=False)
        settings[setting] = describe(results, rows, task.scorer)
        log(f"{task.title}, {SETTINGS[setting]}: {settings[setting]['correct'].count('1')} right")
        if setting == "optimal_verifier":
            first_answers = [result.initial_answer or "" for result in results]
            correct = score(first_answers, rows, task.scorer)
            settings["none"] = {"correct": correct, "steps": 0.0}
    return {
        "task": name,
        "llm": chat.model,
        "seconds": round(time.monotonic() - started),
        "settings": settings,
    }


def describe(
    results: Sequence[RefinementResult], rows: Sequence[Mapping[str, Any]], scorer: Scorer
) -> dict[str, Any]:
    """The accuracy and the cost of a setting."""
    refined = [result for result in results if result.steps]
    usage = [usage for result in results for usage in result.usage.values()]
    return {
        "correct": score([result.answer for result in results], rows, scorer),
        "refined": len(refined),
        "steps": round(sum(len(result.steps) for result in results) / len(results), 3),
        # Replies from the record count as well: another run would have to ask for them.
        "tokens": round(sum(role.worth_tokens for role in usage) / len(results)),
        "calls": round(sum(role.calls for role in usage) / len(results), 2),
        "kept_prompts": sum(result.kept_prompts for result in results),
        "failed": sum(result.error is not None for result in results),
        "example": [refined[0].query, refined[0].prompt, refined[0].answer] if refined else [],
    }


def score(answers: Sequence[str], rows: Sequence[Mapping[str, Any]], scorer: Scorer) -> str:
    """A character for each question: whether its answer is right."""
    pairs = zip(answers, rows, strict=True)
    return "".join(str(int(scorer(answer, row["answers"]))) for answer, row in pairs)


# --- figures --------------------------------------------------------------------------------------


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Every setting of every task: accuracy, what it repaired and broke, and what it took."""
    if not records:
        return "No run of it has been recorded yet."
    rows = []
    for record in records:
        first_answers = record["settings"]["none"]["correct"]
        for name, title in SETTINGS.items():
            measured = record["settings"][name]
            accuracy, _ = score_cells(measured["correct"])
            if name == "none":
                rows.append((TASKS[record["task"]].title, title, accuracy, "", "", "", "", ""))
                continue
            pairs = list(zip(first_answers, measured["correct"], strict=True))
            gained = paired_difference(
                by_question(measured["correct"]), by_question(first_answers)
            ).difference
            rows.append(
                (
                    TASKS[record["task"]].title,
                    title,
                    accuracy,
                    f"{gained.mean:+.3f} [{gained.low:+.3f}, {gained.high:+.3f}]",
                    pairs.count(("0", "1")),
                    pairs.count(("1", "0")),
                    f"{measured['steps']:.2f}",
                    measured["tokens"],
                )
            )
    titles = (
        "task",
        "refined",
        "accuracy",
        "gained",
        "repaired",
        "broken",
        "steps a question",
        "tokens a question",
    )
    return markdown(titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="the address of the model")
    parser.add_argument("--llm", default="large LLM", help="its name")
    parser.add_argument("--folder", type=Path, default=Path("runs/real-prorefine"))
    parser.add_argument("--records", type=Path, default=RECORDS / "real_prorefine.jsonl.gz")
    options = parser.parse_args()
    records = Records(options.records)
    if options.base_url:
        with connect(options.base_url, options.llm, options.folder) as chat:
            for (task,) in records.missing(("task",), [(task,) for task in TASKS]):
                records.add(measure(task, chat))
        print(json.dumps(records.read()))
    print(table(records.read()))


if __name__ == "__main__":
    main()
