"""ProRefine with a real model of 1.5 billion parameters in all roles, on object counting and word
sorting.

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
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_prompting import OpenAIChat
from agentic_prompting.evaluation import paired_difference
from agentic_prompting.refine import START_PROMPTS, LabelVerifier, ProRefiner, RefinementResult
from agentic_prompting.sandbox.puzzles import COUNTING, SORTING, make_puzzles, score_puzzle
from benchmarks.lab import RECORDS, Records, log, markdown
from benchmarks.real.small_agent import by_question, connect, score_cells

TASKS = {COUNTING: "object counting", SORTING: "word sorting"}
SEED = 31
QUESTIONS = 32
SETTINGS = {
    "none": "no refinement",
    "no_verifier": "every question refined",
    "verifier": "the model's verdict",
    "optimal_verifier": "the labels' verdict",
}
LIMITS = {"tokens_per_step": 64, "max_steps": 4, "final_max_tokens": 384}
SAMPLING = {"feedback": {"max_tokens": 256}, "optimizer": {"max_tokens": 256}}


def measure(task: str, chat: OpenAIChat) -> dict[str, Any]:
    """The record of a task: every setting on its questions."""
    started = time.monotonic()
    rows = make_puzzles(QUESTIONS, SEED, (task,))
    verifiers = {
        "optimal_verifier": LabelVerifier(score_puzzle),
        "verifier": chat,
        "no_verifier": None,
    }
    settings = {}
    for name, verifier in verifiers.items():
        refiner = ProRefiner(chat, chat, chat, verifier, sampling=SAMPLING, **LIMITS)
        results = refiner.refine_all(START_PROMPTS[task], rows, max_in_flight=4, progress=False)
        settings[name] = describe(results, rows)
        log(f"{TASKS[task]}, {SETTINGS[name]}: {settings[name]['correct'].count('1')} right")
        if name == "optimal_verifier":
            first_answers = [result.initial_answer or "" for result in results]
            settings["none"] = {"correct": score(first_answers, rows), "steps": 0.0}
    return {
        "task": task,
        "llm": chat.model,
        "seconds": round(time.monotonic() - started),
        "settings": settings,
    }


def describe(
    results: Sequence[RefinementResult], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The accuracy and the cost of a setting."""
    refined = [result for result in results if result.steps]
    usage = [usage for result in results for usage in result.usage.values()]
    return {
        "correct": score([result.answer for result in results], rows),
        "refined": len(refined),
        "steps": round(sum(len(result.steps) for result in results) / len(results), 3),
        # Replies from the record count as well: another run would have to ask for them.
        "tokens": round(sum(role.worth_tokens for role in usage) / len(results)),
        "calls": round(sum(role.calls for role in usage) / len(results), 2),
        "kept_prompts": sum(result.kept_prompts for result in results),
        "failed": sum(result.error is not None for result in results),
        "example": [refined[0].query, refined[0].prompt, refined[0].answer] if refined else [],
    }


def score(answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A character for each question: whether its answer is right."""
    pairs = zip(answers, rows, strict=True)
    return "".join(str(int(score_puzzle(answer, row["answers"]))) for answer, row in pairs)


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
                rows.append((TASKS[record["task"]], title, accuracy, "", "", "", "", ""))
                continue
            pairs = list(zip(first_answers, measured["correct"], strict=True))
            gained = paired_difference(
                by_question(measured["correct"]), by_question(first_answers)
            ).difference
            rows.append(
                (
                    TASKS[record["task"]],
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
