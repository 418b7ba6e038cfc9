"""The time to score 10,000 trajectories: exact match, token F1 and form.

    python -m benchmarks.speed.scoring

Prints one line. The trajectories are generated: three turns each, answers of one to six words.
"""

from __future__ import annotations

import random
import time
from typing import Any

from agentic_prompting.evaluation import find_metrics, format_scores, score_records

TRAJECTORIES = 10_000


def make_records(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records in the form of the evaluation harness, with an agent's turns."""
    rng = random.Random(seed)
    words = ["the", "a", "Nairobi", "castle", "river", "of", "king", "1975", "Seoul", "north"]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 6)))

    def ask() -> dict[str, str]:
        thought = "<think>what is asked for ?</think>"
        return {"text": f"{thought} <interaction_prompt>where is {text()} ?</interaction_prompt>"}

    records = []
    for _ in range(n):
        answer = text()
        record: dict[str, Any] = {"answer": answer, "answers": [text(), text()]}
        last_turn = {"text": f"<think>done</think> <answer>{answer}</answer>"}
        record["trajectory"] = {"turns": [ask(), ask(), last_turn]}
        records.append(record)
    return records


def main() -> None:
    records = make_records(TRAJECTORIES)
    metrics = find_metrics(["exact_match", "token_f1"])
    started = time.perf_counter()
    score_records(records, metrics)
    format_scores(records)
    print(f"{TRAJECTORIES:,} trajectories scored in {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
