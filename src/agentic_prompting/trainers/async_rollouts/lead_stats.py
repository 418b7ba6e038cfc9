"""How old the tokens of a batch are, and who waited for whom while it was played."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from accelerate.utils import gather_object


@dataclass
class LeadStats:
    """Facts about the rollouts in flight of one process, collected once per batch.

    Args:
        token_ages (`Counter[int]`): Weight updates between sampling a token and training on it:
            the number of tokens of each age.
        updates_during_turns (`list[int]`): Weight updates while a turn was sampled, for each turn.
        groups_in_flight (`int`): Groups that were started and not used yet.
        trainer_idle (`float`): Share of the time since the last batch that the trainer waited.
        policy_idle (`float`): Share of that time in which the policy sampled nothing.
        played_anew (`int`): Rollouts of an earlier process that are replayed from the start: those
            of a program, and those of a lost group.
    """

    token_ages: Counter[int]
    updates_during_turns: list[int]
    groups_in_flight: int
    trainer_idle: float
    policy_idle: float
    played_anew: int


def gather_lead_metrics(stats: LeadStats) -> dict[str, float]:
    """Return the metrics over all processes. Must be called on every process."""
    # Merge the ages and turns of all processes.
    stats_by_process: Sequence[LeadStats] = gather_object([stats])
    token_ages: Counter[int] = Counter()
    updates_during_turns: list[int] = []
    for process_stats in stats_by_process:
        token_ages += process_stats.token_ages
        updates_during_turns += process_stats.updates_during_turns

    # Means are over tokens and turns; idle shares are over processes.
    age_sum = sum(age * count for age, count in token_ages.items())
    return {
        "async/played_anew": float(
            sum(process_stats.played_anew for process_stats in stats_by_process)
        ),
        "async/token_age": age_sum / max(token_ages.total(), 1),
        "async/token_age_max": float(max(token_ages, default=0)),
        "async/turn_age": sum(updates_during_turns) / max(len(updates_during_turns), 1),
        "async/groups_in_flight": float(
            sum(process_stats.groups_in_flight for process_stats in stats_by_process)
        ),
        "async/trainer_idle": fmean(
            process_stats.trainer_idle for process_stats in stats_by_process
        ),
        "async/policy_idle": fmean(process_stats.policy_idle for process_stats in stats_by_process),
    }


class IdleClock:
    """Measures for how long the trainer waited, and the policy sampled, between two batches."""

    def __init__(self) -> None:
        self.needs_trainer_thread = False  # whether the policy samples only while the trainer waits
        self._interval_start = time.monotonic()
        self._last_change = self._interval_start
        self._trainer_idle_seconds = 0.0
        self._policy_busy_seconds = 0.0
        self._trainer_waits = False
        self._turns_in_progress = 0

    def set_trainer_waits(self, trainer_waits: bool) -> None:
        """Record that the trainer starts or stops waiting."""
        self._add_elapsed_time()
        self._trainer_waits = trainer_waits

    def turn_started(self) -> None:
        """Record that a turn was requested from the policy."""
        self._add_elapsed_time()
        self._turns_in_progress += 1

    def turn_ended(self) -> None:
        """Record that a turn arrived, or failed."""
        self._add_elapsed_time()
        self._turns_in_progress -= 1

    def read_idle_shares(self) -> tuple[float, float]:
        """Return the idle shares of trainer and policy since the last call."""
        seconds = max(self._last_change - self._interval_start, 1e-9)
        trainer_idle = self._trainer_idle_seconds / seconds
        policy_idle = 1 - self._policy_busy_seconds / seconds
        # Begin the next interval.
        self._interval_start = self._last_change
        self._trainer_idle_seconds = 0.0
        self._policy_busy_seconds = 0.0
        return trainer_idle, policy_idle

    def _add_elapsed_time(self) -> None:
        # The time since the last change was spent in the state that still holds.
        now = time.monotonic()
        seconds = now - self._last_change
        self._last_change = now
        if self._trainer_waits:
            self._trainer_idle_seconds += seconds
        # A policy on the trainer's thread samples only while the trainer waits for it.
        can_sample = self._trainer_waits or not self.needs_trainer_thread
        if self._turns_in_progress > 0 and can_sample:
            self._policy_busy_seconds += seconds
