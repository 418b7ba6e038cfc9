"""The population: all system prompts of a run with their ratings.

It knows no LLMs, rewards or weights: the caller records scores and adds children. [`Population.state_dict`] returns all
of its state as plain JSON, the random generator included, so that a resumed run continues exactly.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .ratings import EXPLORATION, Rating, child_rating, rate
from .results import Row, cell_means, common_means
from .selection import SelectionRule, select, selection_rule
from .system_prompt import SystemPrompt

BEST_RULES = ("conservative", "mean", "newest")


@dataclass
class Member:
    """A prompt with its rating and measurements.

    Args:
        prompt ([`SystemPrompt`]): The prompt, with its id.
        rating ([`Rating`]): Its current rating.
        matches (`int`, *optional*, defaults to `0`): Batches in which it was rated against another.
        held_out (`dict[str, float]`, *optional*): The `mean` reward, the `deviation` and the number `n` of the problems
            of its latest evaluation on held-out ones; of each problem the mean over its rollouts.
    """

    prompt: SystemPrompt
    rating: Rating
    matches: int = 0
    held_out: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`Member.from_json`] gives an equal member back."""
        held_out = {} if self.held_out is None else {"held_out": dict(self.held_out)}
        rating = [self.rating.mu, self.rating.sigma]
        return {
            "prompt": self.prompt.to_json(),
            "rating": rating,
            "matches": self.matches,
            **held_out,
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Member:
        """The inverse of [`Member.to_json`]."""
        prompt, rating = SystemPrompt.from_json(saved["prompt"]), Rating(*saved["rating"])
        return cls(prompt, rating, saved["matches"], saved.get("held_out"))


class Population:
    """The prompts of one run.

    Args:
        root ([`SystemPrompt`]): The first prompt. It gets id 0.
        window (`int`, *optional*, defaults to `10`): K: only the K newest prompts are selected (A.5).
        rule (`str` or `Callable`, *optional*, defaults to `"top_plus_random"`): Selects the prompts of a batch: a name
            of `RULES`, or a function of the members of the window (oldest first), k and a `random.Random` that returns
            k positions.
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3, also for `best("conservative")`.
        temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, for `softmax`.
        independent_draws (`bool`, *optional*, defaults to `False`): Draw the prompts of a batch independently, as
            Algorithm 1 reads, so that one may be drawn twice. By default they are different prompts.
        delta_sigma (`float`, *optional*, defaults to `1.0`): Δσ: uncertainty added to the rating of a child (A.5).
        tie_tolerance (`float`, *optional*, defaults to `0.01`): Scores this close to the best of a group are equal.
        best_rule (`str`, *optional*, defaults to `"conservative"`): See [`Population.best`]. With a window of one it is
            always `newest`, because prompts that are played alone are never rated.
        seed (`int`, *optional*, defaults to `0`): Seed of the random generator.

    Attributes:
        members (`list[Member]`): All prompts of the run. A prompt's id is its position.
        turns (`int`): Number of calls of [`Population.select`].
        rng (`random.Random`): The random generator.

    Raises:
        `ValueError`: An argument is out of range.
    """

    def __init__(
        self,
        root: SystemPrompt,
        window: int = 10,
        rule: str | SelectionRule = "top_plus_random",
        *,
        exploration: float = EXPLORATION,
        temperature: float = 1.0,
        independent_draws: bool = False,
        delta_sigma: float = 1.0,
        tie_tolerance: float = 0.01,
        best_rule: str = "conservative",
        seed: int = 0,
    ):
        if window < 1:
            raise ValueError(f"{window=} must be at least 1")
        if delta_sigma < 0 or tie_tolerance < 0:
            raise ValueError(f"{delta_sigma=} and {tie_tolerance=} must not be negative")
        one_of("best_rule", best_rule, BEST_RULES)
        self.window, self.independent_draws = window, independent_draws
        self.best_rule = best_rule if window > 1 else "newest"
        self.exploration, self.delta_sigma, self.tie_tolerance = (
            exploration,
            delta_sigma,
            tie_tolerance,
        )
        self.rule = selection_rule(rule, exploration, temperature, independent_draws)
        self.rng = random.Random(seed)
        self.members = [Member(replace(root, id=0), Rating())]
        self.turns = 0

    def select(self, k: int) -> list[SystemPrompt]:
        """The prompts of the next batch, by the rule; see [`select`]."""
        self.turns += 1
        candidates = self.candidates()
        places = select(candidates, k, self.rule, self.rng, self.independent_draws)
        return [candidates[place].prompt for place in places]

    def record(
        self, prompts: Sequence[SystemPrompt | int], scores: Sequence[Row]
    ) -> list[float | None]:
        """Rate the prompts of a batch by their scores.

        V_i is the mean over the problems on which *every* prompt that has any score has one, so that failed calls on a
        hard problem are no advantage. A prompt that was drawn twice is rated once, by the mean of its scores. A prompt
        without any score is not rated, and a single prompt that has one is not rated either.

        Args:
            prompts (`Sequence[SystemPrompt]` or ids): The M prompts.
            scores (`Sequence[Sequence[float | None]]`): M rows of b: the mean reward over the N rollouts of a problem,
                `None` where all of them failed.

        Returns:
            `list[float | None]`: V_i per row.
        """
        played: dict[int, list[Row]] = {}
        ids = [_id(prompt) for prompt in prompts]
        for name, row in zip(ids, scores, strict=True):
            played.setdefault(name, []).append(row)
        values = dict(
            zip(played, common_means([cell_means(rows) for rows in played.values()]), strict=True)
        )
        rated = {name: value for name, value in values.items() if value is not None}
        if len(rated) > 1:
            new = rate(
                [self.members[name].rating for name in rated],
                list(rated.values()),
                self.tie_tolerance,
            )
            for name, rating in zip(rated, new, strict=True):
                self.members[name].rating = rating
                self.members[name].matches += 1
        return [values[name] for name in ids]

    def note_held_out(self, prompt: SystemPrompt, rewards: Sequence[float]) -> None:
        """Set a member's `held_out` from its mean reward on each held-out problem. Changes no rating."""
        if rewards:
            held_out = {
                "mean": statistics.fmean(rewards),
                "deviation": statistics.pstdev(rewards),
                "n": len(rewards),
            }
            self.members[_id(prompt)].held_out = held_out

    def add(self, child: SystemPrompt, parents: Mapping[int, Rating] | None = None) -> SystemPrompt:
        """Add a child as the newest prompt. Returns it with its id.

        Args:
            child ([`SystemPrompt`]): With its parents and operator. If its `born_at` is 0 it becomes `turns`.
            parents (`Mapping[int, Rating]`, *optional*): Ratings by id that are used instead of the current ones: the
                parents may have been rated again since the child was made.

        Raises:
            `ValueError`: It is a member already, or a parent is not.
        """
        if child.id is not None:
            raise ValueError(
                f"the child has id {child.id} already: pass one that does not belong to a population"
            )
        if any(not 0 <= parent < len(self.members) for parent in child.parents):
            raise ValueError(
                f"parents {child.parents} of the child are unknown: ids go to {len(self.members) - 1}"
            )
        born = replace(child, id=len(self.members), born_at=child.born_at or self.turns)
        known = [(parents or {}).get(name, self.members[name].rating) for name in child.parents]
        self.members.append(Member(born, child_rating(known, self.delta_sigma)))
        return born

    def knows(self, prompt: SystemPrompt) -> bool:
        """Whether a member says the same, in or out of the window; see [`SystemPrompt.key`]."""
        return any(member.prompt.key == prompt.key for member in self.members)

    def best(self, rule: str | None = None) -> SystemPrompt:
        """The prompt to use.

        Args:
            rule (`str`, *optional*): `conservative`: the highest μ - λσ; `mean`: the highest μ; both among the rated
                prompts, if there are any. `newest`: the newest, rated or not, which is the one that the released code
                tests. Defaults to the population's own `best_rule`.

        Raises:
            `ValueError`: There is no such rule.
        """
        return best_of(self.members, rule or self.best_rule, self.exploration).prompt

    def candidates(self) -> list[Member]:
        """The members of the window, oldest first."""
        return self.members[-self.window :]

    def rating(self, prompt: SystemPrompt | int) -> Rating:
        """The current rating of a member."""
        return self.members[_id(prompt)].rating

    def diversity(self) -> float:
        """How much the candidates differ: the mean share of words that two of them do not have in common, over all
        pairs. 0.0: all are equal; 1.0: no two share a word. Crossover reduces it (4.4)."""
        words = [set(member.prompt.text.casefold().split()) for member in self.candidates()]
        pairs = [(one, other) for place, one in enumerate(words) for other in words[:place]]
        apart = [
            len(one ^ other) / len(one | other) if one != other else 0.0 for one, other in pairs
        ]
        return statistics.fmean(apart) if apart else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during a run, as plain JSON, and the settings that decide which prompts are
        candidates and which is the best, for readers of the file."""
        settings = {name: getattr(self, name) for name in ("window", "exploration", "best_rule")}
        members = [member.to_json() for member in self.members]
        return {**settings, "members": members, "turns": self.turns, "rng": rng_state(self.rng)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`Population.state_dict`]. The settings stay those of the constructor.

        Raises:
            `ValueError`: It is damaged. Nothing has changed then.
        """
        try:
            members, turns, rng = (
                read_members(state["members"]),
                state["turns"],
                rng_of(state["rng"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the saved population is damaged: {_describe(error)}") from None
        self.members, self.turns, self.rng = members, turns, rng


def rng_state(rng: random.Random) -> list[Any]:
    """A generator's state as plain JSON; [`rng_of`] gives an equal one back."""
    version, numbers, gauss = rng.getstate()
    return [version, list(numbers), gauss]


def rng_of(state: Sequence[Any]) -> random.Random:
    """The inverse of [`rng_state`]."""
    version, numbers, gauss = state
    rng = random.Random()
    rng.setstate((version, tuple(numbers), gauss))
    return rng


def read_members(saved: Iterable[Mapping[str, Any]]) -> list[Member]:
    """The members of a saved population.

    Raises:
        `ValueError`: There is none, an id is not its position, or a parent is newer than its child.
    """
    members = [Member.from_json(one) for one in saved]
    if not members:
        raise ValueError("it has no members")
    for place, member in enumerate(members):
        if member.prompt.id != place:
            raise ValueError(f"member {place} has the id {member.prompt.id}")
        if not all(0 <= parent < place for parent in member.prompt.parents):
            raise ValueError(
                f"member {place} has parents that are not before it: {list(member.prompt.parents)}"
            )
    return members


def best_of(
    members: Sequence[Member], rule: str = "conservative", exploration: float = EXPLORATION
) -> Member:
    """The best of some members by [`Population.best`]'s rule, λ being `exploration`."""
    one_of("best_rule", rule, BEST_RULES)
    if rule == "newest":
        return members[-1]
    doubt = exploration if rule == "conservative" else 0.0
    rated = [member for member in members if member.matches] or members
    return max(rated, key=lambda member: member.rating.mu - doubt * member.rating.sigma)


def load_state(path: str | Path, load: Callable[[dict[str, Any]], None]) -> None:
    """Read a state file and pass its content to `load`.

    Raises:
        `ValueError`: One line that names the file: it is no JSON, lacks a key, or `load` refused it.
    """
    try:
        load(json.loads(Path(path).read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} cannot be resumed: {_describe(error)}") from None


def _describe(error: Exception) -> str:
    """An error of a saved state in one line. The text of a `KeyError` is only the key."""
    return f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]


def _id(prompt: SystemPrompt | int) -> int:
    name = prompt if isinstance(prompt, int) else prompt.id
    if name is None:
        raise ValueError("this prompt does not belong to a population: it has no id")
    return name


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ValueError` if a setting has a value that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
