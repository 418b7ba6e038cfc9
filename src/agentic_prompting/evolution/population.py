"""The population: every system prompt that ever lived, and what is believed of it; and E-SPL's settings.

It knows nothing of LLMs, rewards or weights: it is told scores and given children. All it holds goes through
[`Population.state_dict`] as plain JSON, the random generator included, so that a resumed run continues exactly.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .ratings import (
    EXPLORATION,
    RULES,
    Rating,
    Row,
    SelectionRule,
    cell_means,
    common_means,
    crossover_rating,
    mutation_rating,
    rate,
    select,
    selection_rule,
)
from .system_prompt import MAX_WORDS, PLACES, SystemPrompt

BEST_RULES = ("conservative", "mean", "newest")


@dataclass
class Member:
    """A prompt and what is known of it.

    Args:
        prompt ([`SystemPrompt`]): The prompt, with its id.
        rating ([`Rating`]): The current belief.
        matches (`int`, *optional*, defaults to `0`): Batches in which it was rated against another.
        held_out (`dict[str, float]`, *optional*): Its latest `mean` reward, the `deviation` and the number `n` of
            rollouts on held-out problems, where that was measured.
    """

    prompt: SystemPrompt
    rating: Rating
    matches: int = 0
    held_out: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`Member.from_json`] gives an equal member back."""
        measured = {} if self.held_out is None else {"held_out": dict(self.held_out)}
        rating = [self.rating.mu, self.rating.sigma]
        return {"prompt": self.prompt.to_json(), "rating": rating, "matches": self.matches, **measured}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Member:
        """The inverse of [`Member.to_json`]."""
        prompt, rating = SystemPrompt.from_json(saved["prompt"]), Rating(*saved["rating"])
        return cls(prompt, rating, saved["matches"], saved.get("held_out"))


class Population:
    """The prompts of one run.

    Args:
        root ([`SystemPrompt`]): The first one. It gets id 0.
        window (`int`, *optional*, defaults to `10`): K: only the latest so many are selected (A.5).
        rule (`str` or `Callable`, *optional*, defaults to `"top_plus_random"`): Who plays: a name of `RULES`, or a
            function of the members of the window (oldest first), k and a `random.Random` that returns k positions.
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3, also for `best("conservative")`.
        temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, for `softmax`.
        independent_draws (`bool`, *optional*, defaults to `False`): The prompts of a batch are drawn independently, as
            Algorithm 1 reads, so that one may come twice; by default they are different ones.
        delta_sigma (`float`, *optional*, defaults to `1.0`): Δσ: how much less is known of a child (A.5).
        tie_tolerance (`float`, *optional*, defaults to `0.01`): Scores this close to the best of a group are equal.
        best_rule (`str`, *optional*, defaults to `"conservative"`): See [`Population.best`]. With a window of one it is
            always `newest`: such prompts never meet, so that none is rated.
        seed (`int`, *optional*, defaults to `0`): Of the selection.

    Attributes:
        members (`list[Member]`): Everything that ever lived; a prompt's id is its place.
        turns (`int`): How often was selected.

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
        self.exploration, self.delta_sigma, self.tie_tolerance = exploration, delta_sigma, tie_tolerance
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

    def record(self, prompts: Sequence[SystemPrompt | int], scores: Sequence[Row]) -> list[float | None]:
        """Rate the prompts of a batch by how they did.

        V_i is the mean over the problems on which *every* scorable prompt has a score, so that a prompt does not
        gain by the failure of calls on a hard problem. A prompt that was drawn twice is one player with the mean of
        its scores; one without any score is not rated, nor is anything where only one could be.

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
        values = dict(zip(played, common_means([cell_means(rows) for rows in played.values()]), strict=True))
        rated = {name: value for name, value in values.items() if value is not None}
        if len(rated) > 1:
            new = rate([self.members[name].rating for name in rated], list(rated.values()), self.tie_tolerance)
            for name, rating in zip(rated, new, strict=True):
                self.members[name].rating = rating
                self.members[name].matches += 1
        return [values[name] for name in ids]

    def note_held_out(self, prompt: SystemPrompt, rewards: Sequence[float]) -> None:
        """Keep what a member got on held-out problems, in place of what was measured before. Changes no rating."""
        if rewards:
            measured = {"mean": statistics.fmean(rewards), "deviation": statistics.pstdev(rewards), "n": len(rewards)}
            self.members[_id(prompt)].held_out = measured

    def add(self, child: SystemPrompt, rating: Rating | None = None) -> SystemPrompt:
        """A child joins, as the newest. Returns it with its id.

        Args:
            child ([`SystemPrompt`]): With its parents and operator. If its `born_at` is 0 it becomes `turns`.
            rating ([`Rating`], *optional*): By default [`Population.child_rating`] of its parents, as they are now.

        Raises:
            `ValueError`: It is a member already, or a parent is not.
        """
        if child.id is not None:
            raise ValueError(f"the child has id {child.id} already: pass one that does not belong to a population")
        if any(not 0 <= parent < len(self.members) for parent in child.parents):
            raise ValueError(f"parents {child.parents} of the child are unknown: ids go to {len(self.members) - 1}")
        born = replace(child, id=len(self.members), born_at=child.born_at or self.turns)
        self.members.append(Member(born, rating or self.child_rating(child)))
        return born

    def child_rating(self, child: SystemPrompt, parents: Mapping[int, Rating] | None = None) -> Rating:
        """What a child starts with (Appendix B): of one parent [`mutation_rating`], of several [`crossover_rating`],
        without any a fresh one.

        Args:
            child ([`SystemPrompt`]): With its parents.
            parents (`Mapping[int, Rating]`, *optional*): Ratings by id, where those of the batch that the child was
                made from count and the parents may have played again since. By default the current ones.
        """
        known = [(parents or {}).get(parent, self.members[parent].rating) for parent in child.parents]
        if len(known) == 1:
            return mutation_rating(known[0], self.delta_sigma)
        return crossover_rating(known, self.delta_sigma) if known else Rating()

    def best(self, rule: str | None = None) -> SystemPrompt:
        """The prompt to use.

        Args:
            rule (`str`, *optional*): `conservative`: the highest μ - λσ; `mean`: the highest μ; both among prompts
                that were rated, if there are any. `newest`: the latest, rated or not, which is what the released code
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
        """How much the prompts in play differ: the mean share of words that two of them do not have in common, over
        all pairs; 0.0 where all are the same, 1.0 where no two share a word. Crossover is known to wash it out (4.4).
        """
        words = [set(member.prompt.text.casefold().split()) for member in self.candidates()]
        pairs = [(one, other) for place, one in enumerate(words) for other in words[:place]]
        apart = [len(one ^ other) / len(one | other) if one != other else 0.0 for one, other in pairs]
        return statistics.fmean(apart) if apart else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during a run, as plain JSON; and what decides who is in play and who is best."""
        settings = {name: getattr(self, name) for name in ("window", "exploration", "best_rule")}
        members = [member.to_json() for member in self.members]
        return {**settings, "members": members, "turns": self.turns, "rng": rng_state(self.rng)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`Population.state_dict`]. The settings stay those of the constructor.

        Raises:
            `ValueError`: It is damaged. Nothing has changed then.
        """
        try:
            members, turns, rng = read_members(state["members"]), state["turns"], rng_of(state["rng"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the saved population is damaged: {_said(error)}") from None
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


def best_of(members: Sequence[Member], rule: str = "conservative", exploration: float = EXPLORATION) -> Member:
    """The best of some members by [`Population.best`]'s rule, λ being `exploration`."""
    one_of("best_rule", rule, BEST_RULES)
    if rule == "newest":
        return members[-1]
    doubt = exploration if rule == "conservative" else 0.0
    rated = [member for member in members if member.matches] or members
    return max(rated, key=lambda member: member.rating.mu - doubt * member.rating.sigma)


def load_state(path: str | Path, load: Callable[[dict[str, Any]], None]) -> None:
    """Give what a state file holds to `load`.

    Raises:
        `ValueError`: One line that names the file: it is no JSON, lacks something, or `load` refused it.
    """
    try:
        load(json.loads(Path(path).read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} cannot be gone on with: {_said(error)}") from None


def _said(error: Exception) -> str:
    """What is wrong with saved state, in a line; a `KeyError` names the key and no more."""
    return f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]


def _id(prompt: SystemPrompt | int) -> int:
    name = prompt if isinstance(prompt, int) else prompt.id
    if name is None:
        raise ValueError("this prompt does not belong to a population: it has no id")
    return name


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raises `ValueError` if a setting is none of what it may be."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


# The settings --------------------------------------------------------------------------------------------------------

_OF_A_POPULATION = (
    "window", "selection", "exploration", "selection_temperature", "independent_draws", "delta_sigma", "tie_tolerance",
    "best_rule",
)  # fmt: skip


def setting(default: Any, text: str) -> Any:
    """A field with its words for a command line."""
    return field(default=default, metadata={"help": text})


@dataclass
class ESPLSettings:
    """The settings of E-SPL, the same for the trainer and for [`evolve`]; the defaults are the paper's (Appendix A and
    B, eq 1-4) unless said otherwise.

    Args:
        prompts_per_step (`int`, *optional*, defaults to `3`): M: system prompts tried in each batch.
        num_generations (`int`, *optional*, defaults to `5`): N: rollouts of each problem under each prompt.
        window (`int`, *optional*, defaults to `10`): K: only the latest so many prompts are drawn.
        selection (`str`, *optional*, defaults to `"top_plus_random"`): How the M prompts are drawn: `top_plus_random`
            (the paper's own runs), `softmax` (eq 3), `uniform`. For a rule of your own
            pass a [`Population`].
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3.
        selection_temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, for `softmax`.
        independent_draws (`bool`, *optional*, defaults to `False`): Draw the M prompts independently, as Algorithm 1
            reads, so that one may come twice. By default they are different ones, as in the paper's own runs.
        best_rule (`str`, *optional*, defaults to `"conservative"`): Which prompt is tested and saved: `conservative`
            (the highest μ - λσ), `mean` (the highest μ) or `newest` (the released code's); see [`Population.best`].
        delta_sigma (`float`, *optional*, defaults to `1.0`): Δσ: uncertainty added for a child.
        tie_tolerance (`float`, *optional*, defaults to `0.01`): Mean rewards this close are a tie.
        p_crossover (`float`, *optional*, defaults to `0.2`): Probability of a crossover after a batch.
        reflect_on (`str`, *optional*, defaults to `"mixed"`): The problems a mutation looks at: `mixed`, those with
            differing rewards (A.2); `imperfect`, those with a reward below 1.0, also where every attempt failed.
        max_ops (`int`, *optional*, defaults to `2`): K_ops: edits per problem (A.4).
        max_words (`int`, *optional*, defaults to `32`): Principles with more words are refused (A.5).
        prompt_place (`str`, *optional*, defaults to `"system"`): Where the prompt stands: `system` message; `user`: in
            front of the first user message (the paper's maths template); `after`: behind it (the released one).
        reference_sampling (`dict` or `str`, *optional*): Passed on with every call of the reference LLM: `temperature`,
            `top_p`, `max_tokens`, ...; on a command line as JSON. The model's own defaults if it is not set.
        eval_all (`bool`, *optional*, defaults to `False`): In the end, try every prompt that played on the held-out
            rows, under the final weights (Figure 8).

    Raises:
        `ValueError`: A value is out of range.
    """

    prompts_per_step: int = setting(3, "M: system prompts per batch.")
    num_generations: int = setting(5, "N: rollouts per problem and prompt.")
    window: int = setting(10, "K: the latest so many prompts are drawn.")
    selection: str = setting("top_plus_random", f"How prompts are drawn: {', '.join(RULES)}.")
    exploration: float = setting(EXPLORATION, "Lambda of eq 3.")
    selection_temperature: float = setting(1.0, "T of eq 3, for softmax.")
    independent_draws: bool = setting(False, "Draw prompts independently: one may come twice.")
    best_rule: str = setting("conservative", f"The prompt that is tested: {', '.join(BEST_RULES)}.")
    delta_sigma: float = setting(1.0, "Uncertainty added for a child.")
    tie_tolerance: float = setting(0.01, "Mean rewards this close are a tie.")
    p_crossover: float = setting(0.2, "Probability of a crossover after a batch.")
    reflect_on: str = setting("mixed", "mixed (the paper) or imperfect.")
    max_ops: int = setting(2, "K_ops: edits per problem.")
    max_words: int = setting(MAX_WORDS, "Longer principles are refused.")
    prompt_place: str = setting("system", f"One of {', '.join(PLACES)}.")
    reference_sampling: dict[str, Any] | str | None = setting(None, "Of the reference's calls: JSON.")
    eval_all: bool = setting(False, "In the end, every prompt on held-out rows.")

    def __post_init__(self) -> None:
        one_of("selection", self.selection, RULES)
        one_of("reflect_on", self.reflect_on, ("mixed", "imperfect"))
        one_of("prompt_place", self.prompt_place, PLACES)
        for name in ("prompts_per_step", "num_generations", "window", "max_ops", "max_words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.p_crossover <= 1:
            raise ValueError(f"p_crossover must be between 0 and 1, got {self.p_crossover}")
        if isinstance(self.reference_sampling, str):
            self.reference_sampling = _read_sampling(self.reference_sampling)
        self.population(SystemPrompt(""))  # raises for what only it can judge

    def population(self, root: SystemPrompt, seed: int = 0, window: int | None = None) -> Population:
        """A new population under these settings."""
        names = ("exploration", "independent_draws", "delta_sigma", "tie_tolerance", "best_rule")
        options = {name: getattr(self, name) for name in names}
        options |= {"temperature": self.selection_temperature, "seed": seed}
        return Population(root, window or self.window, self.selection, **options)

    def check_own_population(self) -> None:
        """Raises `ValueError` for a setting that a population of one's own would leave without effect."""
        defaults = {one.name: one.default for one in fields(ESPLSettings)}
        for name in _OF_A_POPULATION:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(self, name)!r} would be ignored: a Population brings its own")


def _read_sampling(text: str) -> dict[str, Any]:
    try:
        sampling = json.loads(text)
    except ValueError:
        sampling = None
    if not isinstance(sampling, dict):
        raise ValueError(f"reference_sampling must be a JSON object, got {text!r}")
    return sampling
