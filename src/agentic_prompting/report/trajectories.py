"""Recorded trajectories as the page's browser needs them: a small index to filter by, and the texts in chunks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ..rewards import prompt_r1_score, token_f1
from .history import Record, exact_match_of_record, total_reward
from .packing import chunk_blocks, data_block

CHUNK = 200  # trajectories that are unpacked together
_TITLE_CHARS = 140
_CLOSE = 1e-5  # rewards are recorded with six digits


def sample_evenly(records: Sequence[Record], most: int) -> list[Record]:
    """At most `most` records, drawn over the whole run, in their order. The same ones each time."""
    if len(records) <= most:
        return list(records)
    return [records[place] for place in sorted(random.Random(0).sample(range(len(records)), most))]


def trajectory_blocks(records: Sequence[Record], total: int) -> str:
    """The page's data blocks for these records.

    Args:
        records (`Sequence[Mapping]`): Those to show.
        total (`int`): How many there are in the run.
    """
    columns: dict[str, Any] = {
        "step": [record["step"] for record in records],
        "mode": [record.get("mode", "train") for record in records],
        "status": [record["status"] for record in records],
        "task": [str(record.get("task") or "") for record in records],
        "reward": [total_reward(record) for record in records],
        "match": [exact_match_of_record(record) for record in records],
        "turns": [len(record["turns"]) for record in records],
        "prompt": [record.get("system_prompt") for record in records],
        "title": [str(record.get("question") or "")[:_TITLE_CHARS] for record in records],
    }
    index = {"total": total, "chunk": CHUNK, "columns": columns}
    return data_block("trajectories", index) + chunk_blocks("trajectories", [shown(r) for r in records], CHUNK)


def shown(record: Record) -> dict[str, Any]:
    """What one opened trajectory shows, the reward in its parts included."""
    names = ("question", "answers", "answer", "error", "turns", "observations", "tokens", "cost_usd", "run")
    kept = {name: record[name] for name in names if record.get(name) is not None}
    # A browser's numbers end at 2**53, seeds do not.
    return {**kept, "seed": str(record.get("seed", "")), "parts": reward_parts(record)}


def reward_parts(record: Record) -> list[tuple[str, float | None]]:
    """A record's rewards by name, Prompt-R1's broken into its format and answer parts, and how right the answer was.

    The parts are worked out anew from the turns with the paper's coefficients. They are shown only where they give the
    reward that was recorded: a run with other coefficients shows its reward whole.
    """
    rewards: Mapping[str, float | None] = record.get("rewards") or {}
    parts: list[tuple[str, float | None]] = []
    for name, value in rewards.items():
        parts.append((name, value))
        parts += _prompt_r1_parts(record, value) if name == "prompt_r1_reward" and value is not None else []
    matched = exact_match_of_record(record)
    if matched is not None:
        parts += [("exact match", matched), ("token F1", token_f1(record.get("answer") or "", record["answers"]))]
    return parts


def _prompt_r1_parts(record: Record, recorded: float) -> list[tuple[str, float | None]]:
    texts = [turn["text"] for turn in record["turns"]]
    if not record.get("answers"):
        return []
    for gate in ("paper", "strict"):
        score = prompt_r1_score(texts, record["answers"], gate=gate)
        if abs(score.total - recorded) < _CLOSE:
            passed = score.answer if score.total >= 0 else 0.0
            return [("· format (−1 + R_fmt)", score.total - passed), ("· answer, where the format is whole", passed)]
    return []
