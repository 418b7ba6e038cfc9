"""Warnings at the start of a run, if its first batches cannot train anything."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from ..rollout import Limits, RolloutFacts
from .rollouts import BatchPosition

logger = logging.getLogger(__name__)

REWARD_TOLERANCE = 1e-6  # rewards that differ by no more count as equal
MAX_UNREADABLE_SHARE = 0.9  # of the first batch's rollouts; above it a warning is logged
UNSCORED_BATCHES = 5
"""Batches without any reward from a function, at the start of a run, before a warning is logged.

A function that judges one task of several returns `None` for the others, so it may have nothing to
judge in a single batch.
"""

_NO_ANSWER_ADVICE = (
    "it returned None or an empty text (a command: it printed nothing), or raised an error that "
    "mistakes= lists; every path of a function has to end with `return` and its answer"
)


class FirstBatchWatch:
    """Warns at the start of a run if its batches cannot train anything.

    Either nearly all rollouts end without an answer, or no group has different rewards, or a reward
    function scores nothing.

    Args:
        reward_names (`Sequence[str]`): The names of the reward functions.
        limits ([`Limits`]): The limits of rollouts, which a warning mentions.
        prompt_description (`str`): The prompt template in use and its origin.
        has_environment (`bool`): Whether the agent may ask an environment.
        has_several_environments (`bool`): Whether rows name one of several environments.
    """

    def __init__(
        self,
        reward_names: Sequence[str],
        limits: Limits,
        prompt_description: str,
        has_environment: bool,
        has_several_environments: bool,
    ):
        self.reward_names = reward_names
        self.limits = limits
        self.prompt_description = prompt_description
        self.has_environment = has_environment
        self.has_several_environments = has_several_environments
        self._has_checked_first_batch = False
        # From the first batch on, until there have been `UNSCORED_BATCHES` of them.
        self._unscored: UnscoredRewards | None = None

    def check_batch(
        self,
        facts: Sequence[RolloutFacts],
        rewards: torch.Tensor,
        totals: Sequence[float],
        position: BatchPosition,
    ) -> None:
        """Log a warning if there is a reason. Called with each training batch of a run.

        Args:
            facts (`Sequence[RolloutFacts]`): The rollouts of all processes.
            rewards (`torch.Tensor`): Of shape `(rollouts, reward functions)`, NaN where there is
                none.
            totals (`Sequence[float]`): The reward of each rollout that is trained on; NaN where
                there is none.
            position ([`BatchPosition`]): The position of the batch in the run.
        """
        # A run that was resumed has been warned before.
        if position.step == 0 and not self._has_checked_first_batch:
            self._has_checked_first_batch = True
            self._check_first_batch(facts, totals, position.group_size)
            # With several environments a batch may have no rollout for a function.
            if not self.has_several_environments:
                self._unscored = UnscoredRewards(self.reward_names, position.batch_count)

        if self._unscored is not None:
            scorable_count = sum(fact.status != "failed" for fact in facts)
            self._unscored.check_batch(rewards, scorable_count)

    def _check_first_batch(
        self, facts: Sequence[RolloutFacts], totals: Sequence[float], group_size: int
    ) -> None:
        """Log a warning if nearly all rollouts have no answer; else, if the rewards are flat."""
        # Many rollouts without an answer point to a mistake in the prompt.
        missing_answers = describe_missing_answers(
            facts, self.limits, self.prompt_description, self.has_environment
        )
        if missing_answers:
            logger.warning(missing_answers)
            return
        reason = describe_flat_reward(facts, totals, group_size, self.has_environment)
        if reason:
            logger.warning(
                "the reward is flat in the first batch: in no group do the rollouts have different "
                'rewards, so there is no gradient; %s. See "My reward is flat" on the page '
                "Troubleshooting",
                reason,
            )


def describe_missing_answers(
    facts: Sequence[RolloutFacts],
    limits: Limits,
    prompt_description: str,
    has_environment: bool,
) -> str:
    """Return a warning if nearly all rollouts were cut off or malformed, else an empty text.

    Args:
        facts (`Sequence[RolloutFacts]`): The rollouts of all processes.
        limits ([`Limits`]): Mentioned in the warning.
        prompt_description (`str`): The prompt template in use and its origin.
        has_environment (`bool`): Whether the agent may ask an environment. Otherwise the prompt
            asks for no form.
    """
    truncated = sum(fact.status == "truncated" for fact in facts)
    malformed = sum(fact.status == "malformed" for fact in facts)
    if truncated + malformed <= MAX_UNREADABLE_SHARE * len(facts):
        return ""

    if not has_environment and not malformed:
        max_tokens = min(limits.max_turn_tokens, limits.max_tokens)
        return (
            f"{truncated} of {len(facts)} completions of the first step were cut off at "
            f"{max_tokens} tokens, before their end: raise max_completion_length= (and "
            "max_turn_tokens=, if it is set). They are scored as they are, as in TRL, unless "
            "mask_truncated_completions=True"
        )
    # A program writes its own messages, and returns the answer itself.
    if all(_is_of_program(fact) for fact in facts):
        return (
            f"{truncated + malformed} of {len(facts)} rollouts of the first step ended without an "
            f"answer (in {malformed} the program gave none, in {truncated} the conversation left "
            f"no room for a reply). If the program gave none, {_NO_ANSWER_ADVICE}. If there was no "
            f"room, raise max_completion_length={limits.max_tokens}. Look at some with "
            "`agentic-prompting report`"
        )
    return (
        f"{truncated + malformed} of {len(facts)} rollouts of the first step gave no answer in the "
        f"form that the prompt asks for ({truncated} cut off, {malformed} fit no rule of the "
        "grammar). Look at some with `agentic-prompting report`; the prompt has to tell the agent "
        f"how to write, and max_turn_tokens={limits.max_turn_tokens} and "
        f"max_completion_length={limits.max_tokens} have to allow it. The prompt is "
        f"{prompt_description}"
    )


def describe_flat_reward(
    facts: Sequence[RolloutFacts],
    rewards: Sequence[float],
    group_size: int,
    has_environment: bool,
) -> str:
    """Return why no group of a batch has a gradient; an empty text if some group has one.

    Args:
        facts (`Sequence[RolloutFacts]`): The rollouts of all processes.
        rewards (`Sequence[float]`): The reward of each that is trained on; NaN where there is none.
        group_size (`int`): Rollouts of a group, which are neighbours.
        has_environment (`bool`): Whether the agent may ask an environment.
    """
    # The rewards of each group that can be compared.
    groups = []
    for start in range(0, len(rewards), group_size):
        group = [reward for reward in rewards[start : start + group_size] if not math.isnan(reward)]
        if len(group) > 1:
            groups.append(group)
    is_flat = all(max(group) - min(group) <= REWARD_TOLERANCE for group in groups)
    if not groups or not is_flat:
        return ""

    # What all rollouts with a reward have in common.
    scored = [fact for fact, reward in zip(facts, rewards, strict=True) if not math.isnan(reward)]
    causes = []
    group_rewards = [group[0] for group in groups]
    if max(group_rewards) - min(group_rewards) <= REWARD_TOLERANCE:
        causes.append(f"every reward is {group_rewards[0]:g}")
    else:
        causes.append("rewards differ between questions only, not between rollouts of a question")
    statuses = {fact.status for fact in scored}
    if statuses == {"truncated"}:
        causes.append(
            "every rollout was cut off: raise max_turn_tokens= and max_completion_length="
        )
    elif statuses == {"malformed"} and all(_is_of_program(fact) for fact in scored):
        causes.append(f"the program gave no answer in any rollout: {_NO_ANSWER_ADVICE}")
    elif statuses == {"malformed"}:
        causes.append("every turn was malformed: the prompt has to tell the agent how to write")
    elif has_environment and not any(_has_asked(fact) for fact in scored):
        causes.append("no rollout asked the environment: the prompt has to tell the agent how")
    else:
        causes.append(
            "take harder or easier questions, a finer reward, more num_generations= or a higher "
            "temperature="
        )
    return "; ".join(causes)


def _has_asked(fact: RolloutFacts) -> bool:
    """Whether a rollout called the environment; a program answers itself."""
    return fact.interactions > 0 or _is_of_program(fact)


def _is_of_program(fact: RolloutFacts) -> bool:
    """Whether an agent program played a rollout."""
    return "program/calls" in fact.counts


class UnscoredRewards:
    """Looks for reward functions that return `None` or NaN for every rollout of the first batches.

    Args:
        names (`Sequence[str]`): The names of the reward functions.
        batch_count (`int`): Batches of the whole run, which may be fewer than [`UNSCORED_BATCHES`].
            0 if it is not known.
    """

    def __init__(self, names: Sequence[str], batch_count: int):
        self.names = names
        self.last_batch = min(batch_count or UNSCORED_BATCHES, UNSCORED_BATCHES)
        self.batches = 0
        self.rollouts = 0
        self.has_scored = [False] * len(names)

    def check_batch(self, rewards: torch.Tensor, scorable_count: int) -> None:
        """Count a batch. After the last one, log a warning for each function without a reward.

        Args:
            rewards (`torch.Tensor`): Of shape `(rollouts, reward functions)`, NaN where there is
                none.
            scorable_count (`int`): Rollouts that did not fail.
        """
        if self.batches >= self.last_batch:
            return
        self.batches += 1
        self.rollouts += scorable_count
        scored_now = (~rewards.isnan()).any(dim=0).tolist()
        self.has_scored = [
            before or now for before, now in zip(self.has_scored, scored_now, strict=True)
        ]
        if self.batches < self.last_batch or not self.rollouts:
            return
        for name, has_scored in zip(self.names, self.has_scored, strict=True):
            if not has_scored:
                logger.warning(
                    "the reward function %s gave none of the first %d rollouts (%d batches) a "
                    "reward: it returned None or NaN each time. Other reward functions count "
                    "alone there; without any, nothing is learned",
                    name,
                    self.rollouts,
                    self.batches,
                )
