"""ProRefine's results as the page shows them: each query's steps, each step's change of the prompt as a diff."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evolution.lineage import JOURNAL_FILE
from ..refine import RefinementResult
from .diffs import word_diff
from .packing import chunk_blocks, data_block

CHUNK = 50


def find_results(folder: Path) -> list[RefinementResult]:
    """The refinement results in the `.jsonl` files of a folder, or in the file itself. Other files are passed over."""
    beside = (path for path in sorted(folder.glob("*.jsonl")) if not path.name.endswith(JOURNAL_FILE))
    paths = [folder] if folder.is_file() else beside
    return [result for path in paths for result in _read(path)]


def _read(path: Path) -> list[RefinementResult]:
    results = []
    for line in path.read_bytes().split(b"\n"):
        try:
            saved = json.loads(line)
            saved = {name: value for name, value in saved.items() if name not in ("key", "settings")}
            results.append(RefinementResult.from_dict(saved))
        except (ValueError, AttributeError):
            # A line that a kill cut off, the end of the file, or a file of something else.
            continue
    return results


def refinement_blocks(results: Sequence[RefinementResult]) -> str:
    """The page's data blocks for these results."""
    columns: dict[str, Any] = {
        "title": [result.query[:140] for result in results],
        "stop": [result.stop_reason for result in results],
        "verdict": [result.verdict for result in results],
        "steps": [len(result.steps) for result in results],
        "changed": [sum(step.new_prompt != step.prompt for step in result.steps) for result in results],
    }
    index = {"chunk": CHUNK, "columns": columns}
    return data_block("refinements", index) + chunk_blocks("refinements", [_shown(r) for r in results], CHUNK)


def _shown(result: RefinementResult) -> dict[str, Any]:
    return {
        "query": result.query,
        "prompt": result.initial_prompt,
        "first": result.initial_answer,
        "answer": result.answer,
        "error": None if result.error is None else str(result.error),
        "steps": [
            {
                "output": step.output,
                "complete": step.complete,
                "feedback": step.feedback,
                "problem": step.problem,
                "diff": word_diff(step.prompt, step.new_prompt) if step.new_prompt != step.prompt else None,
            }
            for step in result.steps
        ],
        "diff": word_diff(result.initial_prompt, result.prompt),
    }
