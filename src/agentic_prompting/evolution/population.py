"""The population: all system prompts of a run with their ratings.

It knows no LLMs, rewards or weights: the caller records scores and adds children.
[`Population.state_dict`] returns its whole state as plain JSON, the random generator included, so
that a resumed run continues exactly.

A [`Rating`] is TrueSkill's belief about the skill of a prompt (3.2, Appendix B). It changes only by
comparisons within a batch, never by the reward itself, because rewards under different weights
cannot be compared. The update is the `trueskill` package's; ties and the ratings of children are
ours.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from .results import ROUNDING, Row, cell_means, common_means
from .selection import EXPLORATION, SelectionRule, select, selection_rule
from .system_prompt import SystemPrompt

if TYPE_CHECKING:
    from trueskill import TrueSkill

# How the prompt to use is chosen; see [`Population.best`].
BEST_RULES = ("conservative", "mean", "newest")

# TrueSkill's defaults.
MU = 25.0
SIGMA = 25.0 / 3
BETA = 25.0 / 6  # standard deviation of a performance around the skill
TAU = 25.0 / 300  # doubt that every comparison adds to a rating
DRAW_PROBABILITY = 0.10


# Ratings ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rating:
    """A belief about the skill of a prompt: a normal distribution.

    Args:
        mu (`float`, *optional*, defaults to `25.0`): Its mean.
        sigma (`float`, *optional*, defaults to `25 / 3`): Its standard deviation, above 0.

    Raises:
        `ValueError`: `sigma` is not positive, or one of the two is not finite.
    """

    mu: float = MU
    sigma: float = SIGMA

    def __post_init__(self):
        is_finite = math.isfinite(self.mu) and math.isfinite(self.sigma)
        if not is_finite or self.sigma <= 0:
            raise ValueError(
                f"a rating needs finite numbers and sigma > 0, got mu={self.mu}, sigma={self.sigma}"
            )


def rate(
    ratings: Sequence[Rating], scores: Sequence[float], tie_tolerance: float = 0.01
) -> list[Rating]:
    """Return the ratings after a batch in which all prompts are compared (Appendix B).

    Args:
        ratings (`Sequence[Rating]`): One per prompt.
        scores (`Sequence[float]`): V_i of each prompt, its mean reward on the batch. Finite; leave
            out prompts without one.
        tie_tolerance (`float`, *optional*, defaults to `0.01`): See [`ranks`].

    Returns:
        `list[Rating]`: In the same order. Fewer than two prompts are not a comparison: their
            ratings stay.

    Raises:
        `ValueError`: The lengths differ, a score is not finite, or the tolerance is negative.

    Example:

        >>> [f"{new.mu:.3f} {new.sigma:.3f}" for new in rate([Rating()] * 3, [0.9, 0.4, 0.4])]
        ['30.109 6.735', '22.443 5.972', '22.448 5.974']
    """
    if len(ratings) != len(scores):
        raise ValueError(f"{len(ratings)} ratings but {len(scores)} scores")
    # This also checks the scores, even that of a single prompt.
    places = ranks(scores, tie_tolerance)
    if len(ratings) < 2:
        return list(ratings)

    # A free-for-all: each prompt is a team of one.
    trueskill = _create_trueskill()
    teams = [(trueskill.create_rating(rating.mu, rating.sigma),) for rating in ratings]
    rated_teams = trueskill.rate(teams, ranks=places)
    return [Rating(new_rating.mu, new_rating.sigma) for (new_rating,) in rated_teams]


def ranks(scores: Sequence[float], tie_tolerance: float = 0.01) -> list[int]:
    """Return each score's rank, from 0 (best).

    Scores within the tolerance of the *first* of a group share its rank. Ties do not chain: 0.52,
    0.515, 0.508, 0.50 are two groups of two at a tolerance of 0.01, because 0.508 is 0.012 below
    0.52.

    Raises:
        `ValueError`: A score is not finite, or the tolerance is negative.
    """
    if not all(map(math.isfinite, scores)) or tie_tolerance < 0:
        raise ValueError(
            "scores must be finite and tie_tolerance must not be negative: "
            f"{list(scores)}, {tie_tolerance}"
        )
    ranks_by_index = [0] * len(scores)
    rank = -1
    first_of_group = math.inf

    # From the best score on, begin a new group where the distance to its first is too large.
    best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
    for index in best_first:
        if first_of_group - scores[index] > tie_tolerance + ROUNDING:
            rank += 1
            first_of_group = scores[index]
        ranks_by_index[index] = rank
    return ranks_by_index


def child_rating(parents: Sequence[Rating], delta_sigma: float = 1.0) -> Rating:
    """Return the first rating of a child.

    [`mutation_rating`] of one parent, [`crossover_rating`] of several, a fresh rating without
    parents.
    """
    if not parents:
        return Rating()
    if len(parents) == 1:
        return mutation_rating(parents[0], delta_sigma)
    return crossover_rating(parents, delta_sigma)


def mutation_rating(parent: Rating, delta_sigma: float = 1.0) -> Rating:
    """Return the first rating of a mutated child (Appendix B).

    Its mean is the parent's, its uncertainty sqrt(sigma² + delta_sigma²). Algorithm 1 prints sigma
    + delta_sigma. We follow the appendix, which derives its formula.
    """
    return Rating(parent.mu, math.hypot(parent.sigma, delta_sigma))


def crossover_rating(parents: Sequence[Rating], delta_sigma: float = 1.0) -> Rating:
    """Return the first rating of a crossed child (Appendix B).

    It is the parents' precision-weighted mean, with sigma² = 1 / Σ 1/sigma_i² + delta_sigma².

    Raises:
        `ValueError`: There is no parent.
    """
    if not parents:
        raise ValueError("a crossed child needs at least one parent")

    # The parents' beliefs are combined as independent measurements of one value.
    precisions = [rating.sigma**-2 for rating in parents]
    total_precision = sum(precisions)
    weighted_means = (
        rating.mu * precision for rating, precision in zip(parents, precisions, strict=True)
    )
    mean = sum(weighted_means) / total_precision
    return Rating(mean, math.sqrt(1 / total_precision + delta_sigma**2))


@lru_cache(maxsize=1)
def _create_trueskill() -> TrueSkill:
    """Return TrueSkill with its defaults, on Python's own normal distribution.

    The package's built-in one is accurate to 1e-7.
    """
    from trueskill import TrueSkill

    normal = NormalDist()
    # TrueSkill expects the cdf, the pdf and the inverse of the cdf.
    backend = (_normal_cdf, normal.pdf, normal.inv_cdf)
    return TrueSkill(MU, SIGMA, BETA, TAU, DRAW_PROBABILITY, backend=backend)


def _normal_cdf(x: float) -> float:
    """Compute Φ(x) exactly in the lower tail, where NormalDist's `1 + erf` is not."""
    return math.erfc(-x / math.sqrt(2)) / 2


# The population -----------------------------------------------------------------------------------


@dataclass
class Member:
    """A prompt with its rating and measurements.

    Args:
        prompt ([`SystemPrompt`]): The prompt, with its id.
        rating ([`Rating`]): Its current rating.
        matches (`int`, *optional*, defaults to `0`): Batches in which it was rated against another.
        held_out (`dict[str, float]`, *optional*): The `mean` reward, the `deviation` and the number
            `n` of the problems of its latest held-out evaluation; a problem counts with the mean
            over its rollouts.
        held_out_scores (`list[float | None]`, *optional*): The mean reward on each problem of that
            evaluation, in an order that is the same for all members of a run; `None` for a problem
            whose rollouts all failed. Only [`evolve`] has them, whose policy does not change.
    """

    prompt: SystemPrompt
    rating: Rating
    matches: int = 0
    held_out: dict[str, float] | None = None
    held_out_scores: list[float | None] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; [`Member.from_json`] gives an equal member back."""
        saved = {
            "prompt": self.prompt.to_json(),
            "rating": [self.rating.mu, self.rating.sigma],
            "matches": self.matches,
        }
        # The key is missing until the first held-out evaluation.
        if self.held_out is not None:
            saved["held_out"] = dict(self.held_out)
        if self.held_out_scores is not None:
            saved["held_out_scores"] = list(self.held_out_scores)
        return saved

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Member:
        """Return the member of a [`Member.to_json`]."""
        return cls(
            prompt=SystemPrompt.from_json(saved["prompt"]),
            rating=Rating(*saved["rating"]),
            matches=saved["matches"],
            held_out=saved.get("held_out"),
            held_out_scores=saved.get("held_out_scores"),
        )


class Population:
    """The prompts of one run.

    Args:
        root ([`SystemPrompt`]): The first prompt. It gets id 0.
        window (`int`, *optional*, defaults to `10`): K: only the K newest prompts are selected
            (A.5).
        rule (`str` or `Callable`, *optional*, defaults to `"top_plus_random"`): Selects the prompts
            of a batch: a name of `SELECTION_RULES`, or a function of the members of the window
            (oldest first), k and a `random.Random` that returns k positions.
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3, also for
            `best("conservative")`.
        temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, for `softmax`.
        independent_draws (`bool`, *optional*, defaults to `False`): Draw the prompts of a batch
            independently, as Algorithm 1 reads, so one may be drawn twice. By default they are
            different prompts.
        delta_sigma (`float`, *optional*, defaults to `1.0`): Δσ: uncertainty added to the rating of
            a child (A.5).
        tie_tolerance (`float`, *optional*, defaults to `0.01`): Scores this close to the best of a
            group are equal.
        best_rule (`str`, *optional*, defaults to `"conservative"`): See [`Population.best`]. With a
            window of one it is always `newest`, because prompts that are played alone are never
            rated.
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
        # Check what `selection_rule` does not check below.
        if window < 1:
            raise ValueError(f"{window=} must be at least 1")
        if not (delta_sigma >= 0 and tie_tolerance >= 0):  # also for NaN
            raise ValueError(f"{delta_sigma=} and {tie_tolerance=} must not be negative")
        check_choice("best_rule", best_rule, BEST_RULES)
        self.window = window
        self.independent_draws = independent_draws
        # Prompts that are played alone are never rated.
        self.best_rule = best_rule if window > 1 else "newest"
        self.exploration = exploration
        self.delta_sigma = delta_sigma
        self.tie_tolerance = tie_tolerance
        self.rule = selection_rule(rule, exploration, temperature, independent_draws)
        # The population's only source of chance; a resumed run continues with its saved state.
        self.rng = random.Random(seed)
        # An id is a position in this list.
        self.members = [Member(replace(root, id=0), Rating())]
        self.turns = 0

    def select(self, k: int) -> list[SystemPrompt]:
        """Draw the prompts of the next batch by the rule; see [`select`]."""
        self.turns += 1
        candidates = self.candidates()
        positions = select(candidates, k, self.rule, self.rng, self.independent_draws)
        return [candidates[position].prompt for position in positions]

    def record(
        self, prompts: Sequence[SystemPrompt | int], scores: Sequence[Row]
    ) -> list[float | None]:
        """Rate the prompts of a batch by their scores.

        V_i is the mean over the problems that *every* prompt with any score has a score for, so
        that failed calls on a hard problem are no advantage. A prompt that was drawn twice is rated
        once, by the mean of its scores. A prompt without any score is not rated, and neither is the
        only prompt with scores.

        Args:
            prompts (`Sequence[SystemPrompt]` or ids): The M prompts.
            scores (`Sequence[Sequence[float | None]]`): M rows of b: the mean reward over the N
                rollouts of a problem, `None` where all of them failed.

        Returns:
            `list[float | None]`: V_i per row.
        """
        # Put the rows of a prompt that was drawn twice together.
        ids = [member_id(prompt) for prompt in prompts]
        rows_by_id: dict[int, list[Row]] = {}
        for prompt_id, row in zip(ids, scores, strict=True):
            rows_by_id.setdefault(prompt_id, []).append(row)

        # V_i of each prompt.
        row_per_prompt = [cell_means(rows) for rows in rows_by_id.values()]
        values = dict(zip(rows_by_id, common_means(row_per_prompt), strict=True))

        # TrueSkill's update. A single prompt with a score has nothing to be compared with.
        scored = {prompt_id: value for prompt_id, value in values.items() if value is not None}
        if len(scored) > 1:
            old_ratings = [self.members[prompt_id].rating for prompt_id in scored]
            new_ratings = rate(old_ratings, list(scored.values()), self.tie_tolerance)
            for prompt_id, rating in zip(scored, new_ratings, strict=True):
                self.members[prompt_id].rating = rating
                self.members[prompt_id].matches += 1
        # Rows of the same prompt get the same V_i.
        return [values[prompt_id] for prompt_id in ids]

    def note_held_out(self, prompt: SystemPrompt, scores: Sequence[float | None]) -> None:
        """Set a member's `held_out` and `held_out_scores`, if any problem has a score.

        Changes no rating.

        Args:
            prompt ([`SystemPrompt`]): The member's prompt.
            scores (`Sequence[float | None]`): Its mean reward on each held-out problem, in the same
                order for every member; `None` for a problem without one.
        """
        rewards = [score for score in scores if score is not None]
        if rewards:
            member = self.member(prompt)
            member.held_out = {
                "mean": statistics.fmean(rewards),
                "deviation": statistics.pstdev(rewards),
                "n": len(rewards),
            }
            member.held_out_scores = list(scores)

    def add(self, child: SystemPrompt, parents: Mapping[int, Rating] | None = None) -> SystemPrompt:
        """Add a child as the newest prompt, and return it with its id.

        Args:
            child ([`SystemPrompt`]): With its parents and operator. If its `born_at` is 0 it
                becomes `turns`.
            parents (`Mapping[int, Rating]`, *optional*): Ratings by id that are used instead of the
                current ones: the parents may have been rated again since the child was made.

        Raises:
            `ValueError`: It is a member already, or a parent is not.
        """
        # A child is new, and its parents are members.
        if child.id is not None:
            raise ValueError(
                f"the child has id {child.id} already: pass one that does not belong to a "
                "population"
            )
        if any(not 0 <= parent < len(self.members) for parent in child.parents):
            raise ValueError(
                f"parents {child.parents} of the child are unknown: ids go to "
                f"{len(self.members) - 1}"
            )

        # The child's first rating comes from its parents'.
        parent_ratings = []
        for parent in child.parents:
            rating = self.members[parent].rating
            if parents is not None:
                rating = parents.get(parent, rating)
            parent_ratings.append(rating)
        # It joins at the end, as the newest prompt of the window.
        member = replace(child, id=len(self.members), born_at=child.born_at or self.turns)
        self.members.append(Member(member, child_rating(parent_ratings, self.delta_sigma)))
        return member

    def knows(self, prompt: SystemPrompt) -> bool:
        """Return whether a member says the same, in or out of the window.

        See [`SystemPrompt.key`].
        """
        return any(member.prompt.key == prompt.key for member in self.members)

    def best(self, rule: str | None = None) -> SystemPrompt:
        """Return the prompt to use.

        Args:
            rule (`str`, *optional*): `conservative`: the highest μ - λσ; `mean`: the highest μ;
                both among the rated prompts, if there are any. `newest`: the newest, rated or not,
                which the released code tests. Defaults to the population's own `best_rule`.

        Raises:
            `ValueError`: There is no such rule.
        """
        return best_of(self.members, rule or self.best_rule, self.exploration).prompt

    def candidates(self) -> list[Member]:
        """Return the members of the window, oldest first."""
        return self.members[-self.window :]

    def member(self, prompt: SystemPrompt | int) -> Member:
        """Return the member with a prompt, or with an id.

        Raises:
            `ValueError`: The prompt does not belong to a population.
        """
        return self.members[member_id(prompt)]

    def rating(self, prompt: SystemPrompt | int) -> Rating:
        """Return the current rating of a member."""
        return self.member(prompt).rating

    def diversity(self) -> float:
        """Return how much the candidates differ.

        It is the mean share of words that two of them do not have in common, over all pairs. 0.0:
        all are equal; 1.0: no two share a word. Crossover reduces it (4.4).
        """
        # The words of each candidate, without case.
        word_sets = [
            set(candidate.prompt.text.casefold().split()) for candidate in self.candidates()
        ]
        distances = []
        for words, other_words in combinations(word_sets, 2):
            # The Jaccard distance; two empty prompts are equal.
            all_words = words | other_words
            distances.append(len(words ^ other_words) / len(all_words) if all_words else 0.0)
        return statistics.fmean(distances) if distances else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during a run, as plain JSON.

        For readers of the file it also has the settings that decide which prompts are candidates
        and which is the best.
        """
        return {
            "window": self.window,
            "exploration": self.exploration,
            "best_rule": self.best_rule,
            "members": [member.to_json() for member in self.members],
            "turns": self.turns,
            "rng": rng_state(self.rng),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`Population.state_dict`]. The settings stay those of the constructor.

        Raises:
            `ValueError`: It is damaged. Nothing has changed then.
        """
        try:
            # Read everything before anything changes.
            members = read_members(state["members"])
            turns = state["turns"]
            rng = rng_of(state["rng"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the saved population is damaged: {_describe_error(error)}") from None
        # Everything is valid: continue from it.
        self.members = members
        self.turns = turns
        self.rng = rng


def rng_state(rng: random.Random) -> list[Any]:
    """Return a generator's state as plain JSON; [`rng_of`] gives an equal generator back."""
    version, numbers, gauss = rng.getstate()
    return [version, list(numbers), gauss]


def rng_of(state: Sequence[Any]) -> random.Random:
    """Return the generator of an [`rng_state`]."""
    version, numbers, gauss = state
    rng = random.Random()
    rng.setstate((version, tuple(numbers), gauss))
    return rng


def read_members(saved: Iterable[Mapping[str, Any]]) -> list[Member]:
    """Return the members of a saved population.

    Raises:
        `ValueError`: There is none, an id is not its position, or a parent is newer than its child.
    """
    members = [Member.from_json(saved_member) for saved_member in saved]
    if not members:
        raise ValueError("it has no members")

    # An id is a position, and parents come before their children.
    for position, member in enumerate(members):
        if member.prompt.id != position:
            raise ValueError(f"member {position} has the id {member.prompt.id}")
        if not all(0 <= parent < position for parent in member.prompt.parents):
            raise ValueError(
                f"member {position} has parents that are not before it: "
                f"{list(member.prompt.parents)}"
            )
    return members


def best_of(
    members: Sequence[Member], rule: str = "conservative", exploration: float = EXPLORATION
) -> Member:
    """Return the best of some members by [`Population.best`]'s rule, λ being `exploration`."""
    check_choice("best_rule", rule, BEST_RULES)
    if rule == "newest":
        return members[-1]
    # The conservative rule counts doubt against a prompt: μ - λσ.
    penalty = exploration if rule == "conservative" else 0.0
    # A prompt that was never compared has only its first rating.
    candidates = [member for member in members if member.matches] or members
    return max(candidates, key=lambda member: member.rating.mu - penalty * member.rating.sigma)


def load_state(path: str | Path, load: Callable[[dict[str, Any]], None]) -> None:
    """Read a state file and pass its content to `load`.

    Raises:
        `ValueError`: One line that names the file: it is not JSON, lacks a key, or `load` refused
            it.
    """
    try:
        load(json.loads(Path(path).read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} cannot be resumed: {_describe_error(error)}") from None


def _describe_error(error: Exception) -> str:
    """Describe an error of a saved state in one line. The text of a `KeyError` is only the key."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error).partition("\n")[0]


def member_id(prompt: SystemPrompt | int) -> int:
    """Return the id of a member, which is its position in [`Population`]'s `members`.

    Args:
        prompt ([`SystemPrompt`] or `int`): The member's prompt, or the id itself.

    Raises:
        `ValueError`: The prompt does not belong to a population.
    """
    prompt_id = prompt if isinstance(prompt, int) else prompt.id
    if prompt_id is None:
        raise ValueError("this prompt does not belong to a population: it has no id")
    return prompt_id


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ValueError` if a setting has a value that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
