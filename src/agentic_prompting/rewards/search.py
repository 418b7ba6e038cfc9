"""The reward of agentic search: `0.1 · (format - 1) + correct` (released E-SPL recipe)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..rollout import Rollout
from .qa import exact_match, scorable

_FORMAT_WEIGHT = 0.1


def search_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rollout: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
    **kwargs: Any,
) -> list[float | None]:
    """Exact match of the answer, and a little for its form.

    `correct` is 1 if the answer matches one of `answers` after SQuAD normalisation; `format` is 1 if the last turn has
    exactly one `Answer:`. An episode that ended without an answer (too many searches, an unclosed tag, out of tokens)
    has reward 0, as in the recipe. The arguments are those of [`exact_match_reward`].

    Args:
        rollout (`Sequence[Rollout]`): One episode per row, under [`SearchGrammar`].

    Returns:
        `list[float | None]`: In [-0.1, 1]; `None` for a rollout that failed through no fault of the agent.
    """
    return [_score(one, accepted) if scorable(one) else None for one, accepted in zip(rollout, answers, strict=True)]


def _score(rollout: Rollout, answers: Sequence[str]) -> float:
    if rollout.answer is None:
        return 0.0
    correct = exact_match(rollout.answer, answers) if rollout.answer else 0.0
    return _FORMAT_WEIGHT * (rollout.turns[-1].well_formed - 1) + correct
