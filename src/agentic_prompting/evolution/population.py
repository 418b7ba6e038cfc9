"""The population: every system prompt that ever lived, what is believed of it, and who plays next.

It knows nothing of LLMs, rewards or weights: it is told scores and given children. All it holds goes through
[`Population.state_dict`] as plain JSON, the random generator included, so that a resumed run continues exactly.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from .matrix import cell_means, common_means
from .member import Member, read_members, word_diversity
from .ratings import Rating, crossover_rating, mutation_rating, rate
from .selection import EXPLORATION, SelectionRule, select, selection_rule
from .system_prompt import SystemPrompt

BestRule = Literal["conservative", "mean", "newest"]


class Population:
    """The prompts of one run.

    Args:
        root ([`SystemPrompt`]): The first one. It gets id 0.
        window (`int`, *optional*, defaults to `10`): K: only the latest so many are selected (A.5).
        rule (`str` or `Callable`, *optional*, defaults to `"top_plus_random"`): See `selection.py`.
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3, also for `best("conservative")`.
        temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, for `softmax`.
        include_newest (`bool`, *optional*, defaults to `False`): The newest prompt of the window always plays.
        delta_sigma (`float`, *optional*, defaults to `1.0`): Δσ: how much less is known of a child (A.5).
        tie_tolerance (`float`, *optional*, defaults to `0.01`): Scores this close to the best of a group are equal.
        capacity (`int`, *optional*): [`Population.best`] looks at the latest so many only. By default at all.
        islands (`int`, *optional*, defaults to `1`): Separate windows, which take turns: a step's prompts come from
            one of them and so do its children's parents (niching; not in the paper, which names it as future work).
        migrate_every (`int`, *optional*, defaults to `10`): After so many turns of every island, its best joins the
            next one's window.
        seed (`int`, *optional*, defaults to `0`): Of the selection.

    Attributes:
        members (`list[Member]`): Everything that ever lived; a prompt's id is its place.
        turns (`int`): How often was selected.
        island (`int`): Where the latest selection came from, and where children join unless they are sent elsewhere.

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
        include_newest: bool = False,
        delta_sigma: float = 1.0,
        tie_tolerance: float = 0.01,
        capacity: int | None = None,
        islands: int = 1,
        migrate_every: int = 10,
        seed: int = 0,
    ):
        if min(window, islands, migrate_every) < 1:
            raise ValueError(f"{window=}, {islands=} and {migrate_every=} must be at least 1")
        if capacity is not None and capacity < window:
            raise ValueError(f"{capacity=} must be at least window={window}: what is selected has to be alive")
        if delta_sigma < 0 or tie_tolerance < 0:
            raise ValueError(f"{delta_sigma=} and {tie_tolerance=} must not be negative")
        self.window, self.capacity, self.include_newest = window, capacity, include_newest
        self.exploration, self.delta_sigma, self.tie_tolerance = exploration, delta_sigma, tie_tolerance
        self.migrate_every = migrate_every
        self.rule = selection_rule(rule, exploration, temperature)
        self.rng = random.Random(seed)
        self.members = [Member(replace(root, id=0), Rating())]
        self.turns, self.island = 0, 0
        # Per island the ids that joined it, oldest first; of these the last `window` are its window.
        self._joined = [[0] for _ in range(islands)]

    def select(self, k: int) -> list[SystemPrompt]:
        """The prompts of the next batch: different ones, unless the window holds fewer than `k`."""
        islands = len(self._joined)
        if islands > 1 and self.turns and self.turns % (islands * self.migrate_every) == 0:
            self._migrate()
        self.island = self.turns % islands
        self.turns += 1
        alive = self.alive(self.island)
        return [alive[place].prompt for place in select(alive, k, self.rule, self.rng, self.include_newest)]

    def record(
        self,
        prompts: Sequence[SystemPrompt | int],
        scores: Sequence[Sequence[float | None]],
        problems: Sequence[str] | None = None,
    ) -> list[float | None]:
        """Rate the prompts of a batch by how they did.

        V_i is the mean over the problems on which *every* scorable prompt has a score, so that a prompt does not
        gain by the failure of calls on a hard problem. A prompt that was drawn twice is one player with the mean of
        its scores; one without any score is not rated, nor is anything where only one could be.

        Args:
            prompts (`Sequence[SystemPrompt]` or ids): The M prompts.
            scores (`Sequence[Sequence[float | None]]`): M rows of b: the mean reward over the N rollouts of a problem,
                `None` where all of them failed.
            problems (`Sequence[str]`, *optional*): Names of the b problems, for the `pareto` rule, if the same problem
                may come again and its rewards can be compared then (frozen weights). By default each batch's are new.

        Returns:
            `list[float | None]`: V_i per row.
        """
        ids = [prompt if isinstance(prompt, int) else _id(prompt) for prompt in prompts]
        if len(ids) != len(scores):
            raise ValueError(f"{len(ids)} prompts but {len(scores)} rows of scores")
        players = list(dict.fromkeys(ids))
        rows = [
            cell_means([row for name, row in zip(ids, scores, strict=True) if name == player]) for player in players
        ]
        values = dict(zip(players, common_means(rows), strict=True))
        self._note_problems(players, rows, problems)
        rated = [player for player in players if values[player] is not None]
        if len(rated) > 1:
            before = [self.members[player].rating for player in rated]
            after = rate(before, [values[player] or 0.0 for player in rated], self.tie_tolerance)
            for player, rating in zip(rated, after, strict=True):
                self.members[player].rating = rating
                self.members[player].games += 1
        return [values[name] for name in ids]

    def note_held_out(self, prompt: SystemPrompt, rewards: Sequence[float]) -> None:
        """Keep what a member got on held-out problems, in place of what was measured before. Changes no rating."""
        if rewards:
            deviation = statistics.pstdev(rewards)
            measured = {"mean": statistics.fmean(rewards), "deviation": deviation, "n": len(rewards)}
            self.members[_id(prompt)].held_out = measured

    def add(self, child: SystemPrompt, rating: Rating | None = None, island: int | None = None) -> SystemPrompt:
        """A child joins, as the newest. Returns it with its id.

        Args:
            child ([`SystemPrompt`]): With its parents and operator. If its `born_at` is 0 it becomes `turns`.
            rating ([`Rating`], *optional*): By default what Appendix B says: of one parent [`mutation_rating`], of
                several [`crossover_rating`], without any a fresh one.
            island (`int`, *optional*): Where it joins; by default where the latest selection came from.

        Raises:
            `ValueError`: It is a member already, or a parent is not.
        """
        if child.id is not None:
            raise ValueError(f"the child has id {child.id} already: pass one that does not belong to a population")
        if any(not 0 <= parent < len(self.members) for parent in child.parents):
            raise ValueError(f"parents {child.parents} of the child are unknown: ids go to {len(self.members) - 1}")
        born = replace(child, id=len(self.members), born_at=child.born_at or self.turns)
        self.members.append(Member(born, rating or self._first_rating(child)))
        joined = self._joined[self.island if island is None else island]
        joined.append(len(self.members) - 1)
        self._forget_outside()
        return born

    def best(self, rule: BestRule = "conservative") -> SystemPrompt:
        """The prompt to use.

        Args:
            rule (`str`, *optional*, defaults to `"conservative"`): `conservative`: the highest μ - λσ; `mean`: the
                highest μ; both among prompts that were rated, if there are any. `newest`: the latest, rated or not,
                which is what the released code tests.

        Raises:
            `ValueError`: There is no such rule.
        """
        if rule == "newest":
            return self.members[-1].prompt
        if rule not in ("conservative", "mean"):
            raise ValueError(f"rule must be 'conservative', 'mean' or 'newest', got {rule!r}")
        recent = self.members[-self.capacity :] if self.capacity else self.members
        doubt = self.exploration if rule == "conservative" else 0.0
        return best_of(recent, doubt).prompt

    def alive(self, island: int | None = None) -> list[Member]:
        """The members of an island's window in the order they joined it, or of all windows in order of birth."""
        if island is not None:
            return [self.members[name] for name in self._joined[island][-self.window :]]
        ids = {name for joined in self._joined for name in joined[-self.window :]}
        return [self.members[name] for name in sorted(ids)]

    def rating(self, prompt: SystemPrompt | int) -> Rating:
        """The current rating of a member."""
        return self.members[prompt if isinstance(prompt, int) else _id(prompt)].rating

    def diversity(self) -> float:
        """[`word_diversity`] of the prompts in play. For logs: crossover is known to wash differences out (4.4)."""
        return word_diversity(member.prompt for member in self.alive())

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during a run, as plain JSON; and the window, for whoever draws it."""
        version, state, gauss = self.rng.getstate()
        return {
            "window": self.window,
            "members": [member.to_json() for member in self.members],
            "joined": [list(joined) for joined in self._joined],
            "turns": self.turns,
            "island": self.island,
            "rng": [version, list(state), gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`Population.state_dict`]. The settings stay those of the constructor.

        Raises:
            `ValueError`: It was made with another number of islands, or is damaged. Nothing has changed then.
        """
        try:
            members, turns, island = read_members(state["members"]), state["turns"], state["island"]
            joined = [list(ids) for ids in state["joined"]]
            version, numbers, gauss = state["rng"]
            rng = random.Random()
            rng.setstate((version, tuple(numbers), gauss))
            if island not in range(len(joined)) or not all(
                ids and set(ids) <= {*range(len(members))} for ids in joined
            ):
                raise ValueError("a window holds a member that is not there")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the saved population is damaged: {_said(error)}") from None
        if len(joined) != len(self._joined):
            raise ValueError(
                f"the saved population has islands={len(joined)}, this one {len(self._joined)}: use the same"
            )
        self.members, self._joined, self.turns, self.island, self.rng = members, joined, turns, island, rng

    def _first_rating(self, child: SystemPrompt) -> Rating:
        parents = [self.members[parent].rating for parent in child.parents]
        if not parents:
            return Rating()
        if len(parents) == 1:
            return mutation_rating(parents[0], self.delta_sigma)
        return crossover_rating(parents, self.delta_sigma)

    def _note_problems(
        self, players: Sequence[int], rows: Sequence[Sequence[float | None]], problems: Sequence[str] | None
    ) -> None:
        for player, row in zip(players, rows, strict=True):
            names = problems if problems is not None else [f"{self.turns}:{column}" for column in range(len(row))]
            played = zip(names, row, strict=True)
            self.members[player].problem_scores.update({name: score for name, score in played if score is not None})

    def _forget_outside(self) -> None:
        """Drop the per-problem scores of those that left the window; what joined last pushed out at most one."""
        kept = {name for joined in self._joined for name in joined[-self.window :]}
        for joined in self._joined:
            for name in joined[-self.window - 1 : -self.window]:
                if name not in kept:
                    self.members[name].problem_scores.clear()

    def _migrate(self) -> None:
        """The best of each island joins the next one's window (a ring)."""
        islands = range(len(self._joined))
        best = [max(self.alive(island), key=lambda member: member.rating.mu).prompt for island in islands]
        for island, prompt in enumerate(best):
            target = self._joined[(island + 1) % len(self._joined)]
            if prompt.id not in target[-self.window :]:
                target.append(_id(prompt))
        self._forget_outside()


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


def _id(prompt: SystemPrompt) -> int:
    if prompt.id is None:
        raise ValueError("this prompt does not belong to a population: it has no id")
    return prompt.id


def best_of(members: Sequence[Member], doubt: float = EXPLORATION) -> Member:
    """The one with the highest μ - `doubt`·σ, among those that were rated, if there are any."""
    rated = [member for member in members if member.games] or members
    return max(rated, key=lambda member: member.rating.mu - doubt * member.rating.sigma)
