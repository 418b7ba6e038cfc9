"""The reward of agentic search, from the released E-SPL recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..rollout import Rollout
from .qa import exact_match, score_answers


def search_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rollout: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
    **_: object,
) -> list[float | None]:
    """Return `0.1 · (format - 1) + correct` for each rollout, with TRL's reward signature.

    `correct` is 1 if the answer matches one of `answers` after SQuAD normalisation; `format` is 1
    if the last turn has exactly one `Answer:`. A rollout that ended without an answer (too many
    searches, an unclosed tag, out of tokens) has reward 0, as in the recipe. The arguments are
    those of [`exact_match_reward`].

    Args:
        rollout (`Sequence[Rollout]`): One rollout per row, under [`SearchGrammar`].

    Returns:
        `list[float | None]`: In [-0.1, 1]; `None` for a rollout that failed through no fault of the
        agent.
    """
    rewards: list[float | None] = []
    scores = score_answers(_match_non_empty, rollout, answers)
    for episode, score in zip(rollout, scores, strict=True):
        # The penalty for another form.
        if score is not None and episode.answer is not None:
            score += 0.1 * (episode.turns[-1].well_formed - 1)
        rewards.append(score)
    return rewards


def _match_non_empty(answer: str, accepted: Sequence[str]) -> float:
    """Return the exact match of an answer.

    The recipe demands an answer: an empty one does not match an accepted answer that is empty after
    normalisation.
    """
    return exact_match(answer, accepted) if answer else 0.0
