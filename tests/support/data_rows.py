"""Rows of every data set in the shapes of their sources, and files of them."""

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

from agentic_prompting.data.espl_tasks import DAPO_HEAD, DAPO_TAIL

COLUMNS = ["id", "question", "answers", "task", "meta"]

REAL = Path(os.environ.get("AGENTIC_PROMPTING_DATA", "nowhere")) / "prompt_r1"

needs_real_files = pytest.mark.skipif(
    not REAL.is_dir(),
    reason=f"the released Prompt-R1 files are not at {REAL}: set AGENTIC_PROMPTING_DATA",
)

INSTRUCTION = "\nFirst, provide a simple explanation of the question, then {ask} and answer."


def released(question: str, golds: list[str], **changes) -> dict:
    message = {"content": f"Question: {question}{INSTRUCTION}", "role": "user"}
    row = {"data_source": "hotpot-256-test", "prompt": [message], "ability": "multihop_qa"}
    return row | {"reward_model": {"ground_truth": golds, "style": "rule"}} | changes


def dapo(problem: str, answer: str) -> dict:
    message = {"content": DAPO_HEAD + problem + DAPO_TAIL, "role": "user"}
    return {
        "prompt": [message],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "data_source": "math_dapo",
    }


# Three rows of each set, in the shape that its card or its readers show.
ROWS = {
    "prompt_r1": [
        released("Who wrote it?", ["Ada", " Ada", ""]),
        released(" Two\nlines? ", ["7"]),
        released("Third?", ["x"]),
    ],
    "hotpotqa": [
        {
            "id": f"5a{i}",
            "question": f"  Which of {i}? ",
            "answer": f"a{i}",
            "type": "bridge",
            "level": "hard",
            "context": {"title": ["T"], "sentences": [["S."]]},
        }
        for i in range(3)
    ],
    "2wiki": [
        {"id": str(i), "question": f"q{i}", "answer": f"a{i}", "type": "comparison"}
        for i in range(3)
    ],
    "gsm8k": [
        {"question": f"q{i}", "answer": f"Add.\n#### {a}"}
        for i, a in enumerate(["24,960", "-3", "7"])
    ],
    "musique": [
        {"id": "2hop__1", "question": f"q{i}", "answer": "Ada", "answer_aliases": ["A. L.", "Ada"]}
        for i in range(3)
    ],
    "popqa": [
        {
            "id": i,
            "prop": "capital",
            "question": f"q{i}",
            "possible_answers": golds,
            "s_pop": 12,
            "o_pop": 3,
        }
        for i, golds in enumerate(['["Rome", "Roma"]', "['Oslo']", '["Bern"]'])
    ],
    "squad_v2": [
        {
            "id": f"u{i}",
            "title": "T",
            "context": "C",
            "question": f"q{i}",
            "answers": {"text": golds, "answer_start": []},
        }
        for i, golds in enumerate([["40%"], [], ["a", "b"]])
    ],
    "triviaqa": [
        {
            "question": f"q{i}",
            "question_id": f"tc_{i}",
            "answer": {"value": "Ada", "aliases": ["Lovelace", "Ada"], "type": "W"},
        }
        for i in range(3)
    ],
    "mathqa": [
        {
            "Problem": f"q{i}",
            "Rationale": "…",
            "options": "a ) 38 , b ) 27.675 , c ) 1 , 5 , e ) none",
            "correct": letter,
        }
        for i, letter in enumerate("abe")
    ],
    "booksum": [
        {"bid": i, "chapter": f" C{i} ", "summary_text": f"s{i}", "summary": "{}"} for i in range(3)
    ],
    "writingprompts": [
        {"prompt": f"[ WP ] Idea {i} .", "story": f"It was {i} ."} for i in range(3)
    ],
    "xsum": [{"document": f"Long {i}.", "summary": f"Short {i}.", "id": str(i)} for i in range(3)],
    "dapo_math": [
        {
            "prompt": f"p{i}",
            "solution": str(i),
            "reward_model": {"ground_truth": str(i)},
            "ability": "MATH",
        }
        for i in range(3)
    ],
    "dapo100": [dapo(f"p{i}", str(i)) for i in range(100)],
    "aime25": [{"id": i, "problem": f"p{i}", "answer": str(i), "solution": "…"} for i in range(3)],
    "hmmt_feb": [
        {"problem_idx": i, "problem": f"p{i}", "answer": f"\\frac{{{i}}}{{7}}"} for i in range(3)
    ],
    "hmmt_nov25": [
        {"problem_idx": i, "problem": f"p{i}", "answer": i, "problem_type": ["Algebra"]}
        for i in range(3)
    ],
    "aimo_aime": [{"id": i, "problem": f"p{i}", "answer": f"00{i}", "url": "…"} for i in range(3)],
    "aimo_amc": [{"id": i, "problem": f"p{i}", "answer": 14.0 + i, "url": "…"} for i in range(3)],
    "aime_and_amc": [{"id": i, "problem": f"p{i}", "answer": str(i)} for i in range(3)],
    "beyondaime": [{"problem": f"p{i}", "answer": i} for i in range(3)],
    "svamp": [
        {"Body": f"b{i}.", "Question": f"q{i}?", "Answer": 51.0 + i, "Type": "Addition"}
        for i in range(3)
    ],
    "aqua": [
        {"question": f"q{i}", "options": ["A)1", "B)2"], "correct": "AB"[i % 2]} for i in range(3)
    ],
}


def written(tmp_path: Path, rows: list[dict], suffix: str = ".jsonl") -> str:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
