"""Fewer calls for the same gradient: which rollouts are worth playing, and the weights that keep the estimate honest.

Rules only, without a model or a trainer. What a rule leaves out with probability 1 - p, and would have counted, counts
1/p where it is kept (Horvitz and Thompson): the expected gradient is that of playing everything, whatever the rule
looks at. docs/howto/save_calls.md says what each saves and what it may bias.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..rollout import Environment, Observation, Rollout, RolloutFacts, observe, rollout_seed

_TRIES = 32  # questions drawn to find one that is not settled; then the last one is taken


def group_weight(first: Sequence[float | None], chance: float, draw: float) -> float:
    """What a group counts whose first rollouts earned `first`: it grows to its full size unless this is 0.

    Args:
        first (`Sequence[float]`): Rewards; `None` of a failed rollout, of which nothing is known.
        chance (`float`): With which a group grows whose first rollouts all earned the same, in (0, 1].
        draw (`float`): Uniform in [0, 1), from the group's own seed.
    """
    return (1 / chance if draw < chance else 0.0) if agree(first) else 1.0


def agree(first: Sequence[float | None]) -> bool:
    """Whether the first rollouts of a group all earned the same; a failed one earned nothing that is known."""
    return None not in first and len(set(first)) == 1


class Growth:
    """How often a group whose first rollouts agree is worth its calls, by what the groups of late have shown.

    A group left out saves calls, and makes those that count instead of it count more: noise, which costs further steps.
    The chance is the one with the least noise for the calls, p² = s·(k + d·c) / (d·c): of groups that agreed and grew,
    s had a spread after all; d of all groups differed at once; k rollouts are played first, and the others cost c calls
    for each of theirs. Where nearly all groups that agree are settled it is small. Where many are not, or replies are
    shared and the rest is nearly free, it is 1. It is a function of earlier batches, so that the gradient has no bias.

    Args:
        start (`int`), n (`int`): Rollouts of a group that are played first, and of a whole group.
    """

    def __init__(self, start: int, n: int):
        self.start, self.n = start, n
        self.seen = {"differed": 0.0, "agreed": 0.0, "grown": 0.0, "spread": 0.0}  # groups; older ones count less

    def chance(self, paid: float) -> float:
        """With which a group grows whose first rollouts agree; 1 while nothing is known.

        Args:
            paid (`float`): The share of the last batch's replies that were paid for and not shared.
        """
        seen = self.seen
        spread = (seen["spread"] + 1) / (seen["grown"] + 1)
        differ = (seen["differed"] + 1) / (seen["differed"] + seen["agreed"] + 1)
        rest = max(1, self.n - self.start) * paid * differ
        return min(1.0, (spread * (self.start + rest) / rest) ** 0.5)

    def fade(self) -> None:
        """A batch begins: what the earlier ones showed counts a fifth less."""
        self.seen = {name: 0.8 * number for name, number in self.seen.items()}

    def note(self, earned: Sequence[float | None]) -> None:
        """Note a group's rewards, those of its first rollouts first."""
        if not agree(earned[: self.start]):
            self.seen["differed"] += 1
            return
        self.seen["agreed"] += 1
        if len(earned) > self.start:
            self.seen["grown"] += 1
            self.seen["spread"] += not no_spread(earned)

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return dict(self.seen)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.seen |= state


def honest_advantages(rewards: torch.Tensor, weights: torch.Tensor, scale: bool = False) -> torch.Tensor:
    """Advantages whose expected gradient is that of rollouts which were all played to their end.

        A_i = w_i · (n - 1)/n · (r_i - sum over j ≠ i of w_j r_j / sum over j ≠ i of w_j)

    With weights of 1 it is r_i minus the group's mean. Each w is 1/p with probability p, else 0, drawn independently
    after the rollout's fate is known, so that E[w_i] = 1; and what is subtracted depends on the other rollouts alone,
    as a baseline has to. Where no other is known it is 0. A weight that all of a group share is applied after this, as
    a factor.

    Args:
        rewards (`torch.Tensor`): Of shape `(groups, n)`; NaN where there is none.
        weights (`torch.Tensor`): Of the same shape. A rollout that failed has no part in its group.
        scale (`bool`, *optional*, defaults to `False`): Divide by the group's standard deviation, estimated with the
            same weights, as `scale_rewards="group"` does. A ratio of estimates is no longer free of bias.

    Returns:
        `torch.Tensor`: Of the same shape, 0 where there is no reward.
    """
    there = (weights == 0) | ~rewards.isnan()  # left out by the rule is there, with a weight of 0; failed is not
    worth = torch.where(rewards.isnan(), 0.0, rewards)
    n, weights = there.sum(1, keepdim=True).clamp(min=1), weights * there
    known, total = (weights * worth).sum(1, keepdim=True), weights.sum(1, keepdim=True)
    others = total - weights
    baseline = torch.where(others > 0, (known - weights * worth) / others.clamp(min=1e-9), 0.0)
    advantages = weights * (n - 1) / n * (worth - baseline)
    if scale:  # more than one is known, or there is no deviation
        square = (weights * (worth - known / total.clamp(min=1e-9)) ** 2).sum(1, keepdim=True) / total.clamp(min=1e-9)
        deviation = (square * n / (n - 1).clamp(min=1)).sqrt()
        advantages = torch.where((weights > 0).sum(1, keepdim=True) > 1, advantages / (deviation + 1e-4), 0.0)
    return advantages


def paid_share(facts: Sequence[RolloutFacts]) -> float:
    """The share of a batch's replies that were paid for and not shared; 1 where there were none."""
    replies = sum(fact.calls for fact in facts)
    return max(1, replies - sum(fact.shared for fact in facts)) / max(1, replies)


def counted(advantages: torch.Tensor, groups: torch.Tensor, ours: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Advantages times what their groups count; `ours` instead where they are `wanted`."""
    return groups * torch.where(wanted, ours.to(advantages.dtype), advantages)


class EndsHopeless:
    """An [`Environment`] that asks no more for an episode which cannot be saved, a random share of them excepted.

    Args:
        environment ([`Environment`]): Answers all others.
        hopeless (`Callable[[Rollout], bool]`): Whether nothing that the rollout's next reply says can make it good.
        share (`float`): Of the hopeless that are played on, in (0, 1]; those count 1/share, the others 0.
    """

    def __init__(self, environment: Environment, hopeless: Callable[[Rollout], bool], share: float):
        self.environment, self.hopeless, self.share = environment, hopeless, share

    async def step(self, rollout: Rollout) -> Observation | None:
        if rollout.batch and rollout.weight == 1 and self.hopeless(rollout):
            drawn = random.Random(rollout_seed(rollout.seed, "hopeless")).random()
            rollout.weight = 1 / self.share if drawn < self.share else 0.0
        return None if rollout.weight == 0 else await observe(self.environment, rollout)

    def __getattr__(self, name: str) -> Any:
        if name == "environment":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.environment, name)


class Curriculum:
    """What is known of each question, and which question takes the place of one that teaches nothing any more.

    A question is settled when the groups of its last `patience` visits had no spread of reward: all right, or all
    wrong. A settled one comes back with probability `rare` when it is its turn; otherwise another takes its place.

    Args:
        patience (`int`): Visits without spread until it is settled, >= 1.
        rare (`float`): In (0, 1]; 1 keeps the order of the data set.
    """

    def __init__(self, patience: int, rare: float):
        self.patience, self.rare = patience, rare
        self._flat: dict[str, int] = {}  # visits without spread since the last with one, by question

    def settled(self, question: str) -> bool:
        return self._flat.get(question, 0) >= self.patience

    def observe(self, question: str, rewards: Sequence[float]) -> None:
        """Note what a group of `question` earned; failed rollouts left out. Fewer than two say nothing."""
        if len(rewards) < 2:
            return
        if max(rewards) > min(rewards):
            self._flat.pop(question, None)
        else:
            self._flat[question] = self._flat.get(question, 0) + 1

    def instead(self, question: str, rows: Sequence[str], draw: random.Random) -> int | None:
        """Which of `rows` (questions by position) takes the place of `question`; `None`: it keeps its place."""
        if not self.settled(question) or draw.random() < self.rare:
            return None
        return other_row(rows, draw, self.settled)

    def state_dict(self) -> dict[str, Any]:
        return {"flat": dict(self._flat)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._flat = dict(state["flat"])


def other_row(rows: Sequence[str], draw: random.Random, unwanted: Callable[[str], bool]) -> int:
    """The position of a random row that is not `unwanted`, if one comes up in a bounded number of draws."""
    for _ in range(_TRIES):
        position = draw.randrange(len(rows))
        if not unwanted(rows[position]):
            break
    return position


class CallSaver:
    """What a trainer asks while it plays a batch: which questions, which rollouts, and what each group counts.

    On several processes each has its part of the global batch; groups may straddle processes, and all decide alike,
    from what was gathered of all and from seeds.

    Args:
        settings ([`MultiTurnGRPOConfig`]): What is to be saved, and how.
        rows (`Sequence[Mapping]`): The training rows, for questions that take another's place.
        n (`int`): Rollouts of a whole group.
        seed (`int`): Of the run.

    Attributes:
        group_weights (`dict[int, float]`): What each group of the last batch counts, all processes together.
        discarded (`list[Rollout]`): Of this process: played in the last batch for questions that taught nothing.
        paid (`float`): The share of the last batch's replies that were paid for and not shared.
    """

    def __init__(self, settings: Any, rows: Sequence[Mapping[str, Any]], n: int, seed: int):
        self.settings, self.rows, self.n, self.seed = settings, rows, n, seed
        self.start, self.paid = settings.group_start or n, 1.0
        self.growth = Growth(self.start, n)
        self.curriculum = Curriculum(settings.curriculum_patience, settings.curriculum_rare)
        self.group_weights: dict[int, float] = {}
        self.discarded: list[Rollout] = []
        self._questions: list[str] = []  # of all rows: read when one is first to be replaced

    def choose(self, rows: Sequence[Mapping[str, Any]], first: int, batch: str) -> list[Mapping[str, Any]]:
        """The rows of a batch, those of settled questions replaced; `first` is the place of the first in all of it."""
        if self.settings.curriculum_rare == 1:
            return list(rows)
        chosen = []
        for place, row in enumerate(rows, first):
            draw = self._draw(batch, "curriculum", place // self.n)
            position = self.curriculum.instead(question_of(row), self._all_questions(), draw)
            chosen.append(row if position is None else self.rows[position])
        return chosen

    def play(
        self,
        rollouts: list[Rollout],
        first: int,
        batch: str,
        play: Callable[[list[Rollout]], None],
        earn: Callable[[list[Rollout]], list[float | None]],
        begin: Callable[[int, Mapping[str, Any]], Rollout],
        gather: Callable[[list[Any]], list[Any]],
    ) -> None:
        """Play a batch, in place: the first of each group, then the rest of those that grow; then other questions in
        place of those that taught nothing, as often as is allowed.

        Args:
            rollouts (`list[Rollout]`): Of this process, not played yet; those of another question are new objects.
            first (`int`): The place of the first of them in the global batch.
            batch (`str`): Which batch it is.
            play (`Callable`): Plays some to their end, on every process at once.
            earn (`Callable`): What some earned; `None` for failed ones.
            begin (`Callable[[int, Mapping], Rollout]`): A rollout for a place of this process and a row.
            gather (`Callable[[list], list]`): Puts the lists of all processes together.
        """
        self.group_weights, self.discarded = {}, []
        self.growth.fade()
        chance = self.settings.group_chance or self.growth.chance(self.paid)
        group_of = {i: (first + i) // self.n for i in range(len(rollouts))}
        groups = sorted(set(gather(list(group_of.values()))))

        def earned_by(places: list[int]) -> dict[int, list[float | None]]:
            """Play those at `places`; what each group, of all processes, has earned by it."""
            some = [rollouts[i] for i in places]
            play(some)
            rewards = zip(places, some, earn(some), strict=True)
            known: dict[int, list[float | None]] = {}
            for group, question, reward in gather([(group_of[i], question_of(one.row), r) for i, one, r in rewards]):
                known.setdefault(group, []).append(reward)
                questions[group] = question
            return known

        for attempt in range(self.settings.refill_rounds + 1):
            questions: dict[int, str] = {}
            mine = [i for i in group_of if group_of[i] in groups]
            begun = [i for i in mine if (first + i) % self.n < self.start]
            earned = earned_by(begun)
            for group in groups:
                luck = self._draw(batch, "grow", group, attempt).random()
                grows = group_weight(earned[group], chance, luck) if self.start < self.n else 1.0
                self.group_weights[group] = grows
            rest = [i for i in mine if i not in begun]
            if self.start < self.n:
                for group, more in earned_by([i for i in rest if self.group_weights[group_of[i]]]).items():
                    earned[group] += more
            for i in mine:
                if not self.group_weights[group_of[i]]:
                    rollouts[i].weight = 0.0
                    rollouts[i].status = "left_out" if i in rest else rollouts[i].status
            for group, question in questions.items():
                self.growth.note(earned[group])
                self.curriculum.observe(question, [reward for reward in earned[group] if reward is not None])
            groups = [group for group in groups if no_spread(earned[group])]
            if not groups or attempt == self.settings.refill_rounds:
                return
            for i in mine:
                if group_of[i] in groups:
                    draw = self._draw(batch, "refill", group_of[i], attempt)
                    position = other_row(self._all_questions(), draw, self.curriculum.settled)
                    self.discarded += [rollouts[i]] if rollouts[i].turns else []
                    rollouts[i] = begin(i, self.rows[position])

    def _draw(self, *parts: Any) -> random.Random:
        return random.Random(rollout_seed(self.seed, *parts))

    def _all_questions(self) -> list[str]:
        if not self._questions:
            self._questions = [question_of(row) for row in self.rows]
        return self._questions


def question_of(row: Mapping[str, Any]) -> str:
    """What tells one question from another: its text, or the whole prompt of a row without one."""
    return str(row["question"] if "question" in row else row.get("prompt"))


def no_spread(rewards: Sequence[float | None]) -> bool:
    """Whether a group teaches nothing: at least two rewards, all the same. Failed rollouts say nothing."""
    known = {reward for reward in rewards if reward is not None}
    return len(known) == 1 and sum(reward is not None for reward in rewards) > 1
