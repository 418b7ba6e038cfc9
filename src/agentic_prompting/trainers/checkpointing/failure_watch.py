"""Decides whether the environment is down, from the rollouts that fail."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from ...rollout import Limits, RolloutFacts

logger = logging.getLogger(__name__)

MAX_UNREADABLE_SHARE = 0.9  # of the first step's rollouts, before a warning


class FailureWatch:
    """Decides whether few enough rollouts fail to continue, or the environment is down.

    Args:
        window (`int`): Number of recent batches that count.
        max_share (`float`): The largest share of these batches' rollouts that may fail.
        prompt_description (`str`, *optional*): The prompt template in use and its origin, for the
            warning about the format.

    Attributes:
        has_trained (`bool`): Whether a rollout of training succeeded.
    """

    def __init__(self, window: int, max_share: float, prompt_description: str = ""):
        self.max_share = max_share
        self.prompt_description = prompt_description
        self.has_trained = False
        # Failed and all rollouts of recent batches.
        self._recent_counts: deque[tuple[int, int]] = deque(maxlen=window)
        self._last_cause = ""  # of a training batch in which rollouts failed
        self._warned_about_failures = False
        self._warned_about_format = False

    def check_batch(
        self,
        facts: Sequence[RolloutFacts],
        is_main_process: bool = True,
        hint: str = "",
        is_training: bool = True,
    ) -> str:
        """Count a batch of all processes, and return the reason to stop after it, or an empty text.

        Args:
            facts (`Sequence[RolloutFacts]`): The rollouts of all processes.
            is_main_process (`bool`, *optional*, defaults to `True`): Whether this process logs a
                warning at the run's first failure.
            hint (`str`, *optional*): The end of that warning.
            is_training (`bool`, *optional*, defaults to `True`): Whether the batch is trained on.
        """
        # Count the batch, and warn at the first failure of the run.
        failed = [fact for fact in facts if fact.status == "failed"]
        self._recent_counts.append((len(failed), len(facts)))
        if failed and not self._warned_about_failures:
            self._warned_about_failures = True
            if is_main_process:
                self._warn_about_failures(failed, len(facts), hint)

        # Remember what a run that is over has to report.
        if is_training:
            if len(failed) < len(facts):
                self.has_trained = True
            self._last_cause = f"{failed[-1].error_kind}: {failed[-1].error}" if failed else ""

        if not failed:
            return (
                ""  # even if too many of the recent rollouts failed: the environment has recovered
            )

        # A fatal error stops at once, others if there are too many in a full window.
        failed_count = sum(failed_in_batch for failed_in_batch, _ in self._recent_counts)
        rollout_count = sum(batch_size for _, batch_size in self._recent_counts)
        share = failed_count / rollout_count
        is_window_full = len(self._recent_counts) == self._recent_counts.maxlen
        fatal = [fact for fact in failed if fact.fatal]
        if not fatal and not (is_window_full and share > self.max_share):
            return ""
        # Name a fatal error rather than the last one.
        cause = fatal[0] if fatal else failed[-1]
        return f"{share:.0%} of the recent rollouts failed, the last with {cause.error_kind}: {cause.error}"

    def failure_reason(self) -> str:
        """Return why a finished run counts as failed, or an empty text.

        A run may be too short for `check_batch` to stop it.
        """
        if self.has_trained or not self._last_cause:
            return ""
        return f"every rollout of this run failed, the last with {self._last_cause}"

    def warn_about_format(self, facts: Sequence[RolloutFacts], limits: Limits) -> None:
        """Log a warning, once, if nearly all rollouts of the first step were cut off or malformed."""
        truncated = sum(fact.status == "truncated" for fact in facts)
        malformed = sum(fact.status == "malformed" for fact in facts)
        is_fine = truncated + malformed <= MAX_UNREADABLE_SHARE * len(facts)
        if self._warned_about_format or is_fine:
            return
        self._warned_about_format = True
        logger.warning(
            "%d of %d rollouts of the first step gave no answer in the form that the prompt asks for (%d cut off, %d fit no "
            "rule of the grammar). Look at some with `agentic-prompting report`; prompt_template has to tell the agent "
            "how to write, and max_turn_tokens=%d and max_completion_length=%d have to allow it. The prompt is %s",
            truncated + malformed,
            len(facts),
            truncated,
            malformed,
            limits.max_turn_tokens,
            limits.max_tokens,
            self.prompt_description,
        )

    def _warn_about_failures(
        self, failed: Sequence[RolloutFacts], rollout_count: int, hint: str
    ) -> None:
        logger.warning(
            "%d of %d rollouts of this batch failed; they get no reward, and training goes on "
            "while at most %s fail. The first with %s: %s%s",
            len(failed),
            rollout_count,
            f"{self.max_share:.0%}",
            failed[0].error_kind,
            failed[0].error,
            hint,
        )
