"""A member of the population: a prompt and what is believed of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .ratings import Rating
from .system_prompt import SystemPrompt


@dataclass
class Member:
    """A prompt and what is known of it.

    Args:
        prompt ([`SystemPrompt`]): The prompt, with its id.
        rating ([`Rating`]): The current belief.
        games (`int`, *optional*, defaults to `0`): Batches in which it was rated against another.
        problem_scores (`dict[str, float]`, *optional*): Its latest mean reward per problem; forgotten when it leaves
            the window.
        held_out (`dict[str, float]`, *optional*): Its latest `mean` reward, the `deviation` and the number `n` of
            rollouts on held-out problems, where that was measured.
    """

    prompt: SystemPrompt
    rating: Rating
    games: int = 0
    problem_scores: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`Member.from_json`] gives an equal member back."""
        return {
            "prompt": self.prompt.to_json(),
            "rating": [self.rating.mu, self.rating.sigma],
            "games": self.games,
            "problem_scores": dict(self.problem_scores),
            **({} if self.held_out is None else {"held_out": dict(self.held_out)}),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Member:
        """The inverse of [`Member.to_json`]."""
        prompt, rating = SystemPrompt.from_json(saved["prompt"]), Rating(*saved["rating"])
        return cls(prompt, rating, saved["games"], dict(saved["problem_scores"]), saved.get("held_out"))


def read_members(saved: Iterable[Mapping[str, Any]]) -> list[Member]:
    """The members of a saved population.

    Raises:
        `ValueError`: There is none, an id is not its place, or a parent is younger than its child.
    """
    members = [Member.from_json(one) for one in saved]
    if not members:
        raise ValueError("it has no members")
    for place, member in enumerate(members):
        if member.prompt.id != place:
            raise ValueError(f"member {place} has the id {member.prompt.id}")
        if not all(0 <= parent < place for parent in member.prompt.parents):
            raise ValueError(f"member {place} has parents that are not before it: {list(member.prompt.parents)}")
    return members


def word_diversity(prompts: Iterable[SystemPrompt]) -> float:
    """How much prompts differ: the mean share of words that two of them do not have in common, over all pairs.

    0.0 where all are the same (or there is only one), 1.0 where no two share a word.
    """
    words = [set(prompt.text.casefold().split()) for prompt in prompts]
    apart = [
        1 - len(one & other) / len(one | other) if one != other else 0.0
        for place, one in enumerate(words)
        for other in words[:place]
    ]
    return sum(apart) / len(apart) if apart else 0.0
