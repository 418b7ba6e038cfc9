"""Splits rows into those to learn from and those to evaluate on."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


def hold_out(rows: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Split rows into those to learn from and held-out rows, without a question on both sides.

    The split is a function of the questions alone: neither a seed nor the order of the rows changes
    it, so every command holds out the same rows of a file.

    Args:
        rows (`datasets.Dataset`): Rows with `question`, as [`load_task`] returns them.
        share (`float`): The share of the different questions to hold out, between 0 and 1.

    Returns:
        `tuple[Dataset, Dataset]`: The rows to learn from, and the held-out rows, in their order.

    Raises:
        `ValueError`: `share` is out of range, or one side would have no row.

    Example:

        >>> from agentic_prompting import load_task
        >>> rows = load_task([{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(10)])
        >>> train, held_out = hold_out(rows, 0.3)
        >>> len(train), len(held_out)
        (7, 3)
    """
    if not 0 < share < 1:
        raise ValueError(f"the share to hold out must be between 0 and 1, got {share}")

    # The questions in an order that depends on their texts alone.
    questions = sorted(set(rows["question"]), key=_digest)
    count = round(share * len(questions))
    if not 0 < count < len(questions):
        raise ValueError(
            f"{share} of {len(questions)} different questions leaves nothing on one side: use more "
            "rows or another share"
        )
    held_out_questions = set(questions[:count])

    # Rows with the same question go to the same side.
    learned: list[int] = []
    held_out: list[int] = []
    for number, question in enumerate(rows["question"]):
        side = held_out if question in held_out_questions else learned
        side.append(number)
    return rows.select(learned), rows.select(held_out)


def _digest(question: str) -> bytes:
    return hashlib.sha256(question.encode()).digest()
