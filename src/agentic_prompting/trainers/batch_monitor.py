"""From a batch of rollouts and their rewards to metrics, records, warnings, and reasons to stop.

A [`BatchMonitor`] measures and records every batch. A [`FailureWatch`] decides whether few enough
rollouts failed to continue. [`logp_difference`] and [`clipped_share`] compare the sampler's
log-probabilities with the trainer's.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from trl import GRPOConfig

from ..evaluation.repeats import passes
from ..llm import spans
from ..llm.guard import traceback_of
from ..rollout import (
    Rollout,
    RolloutFacts,
    RolloutLog,
    group_diversity,
    metrics_by_environment,
    rollout_metrics,
    rollout_record,
)
from .first_batches import FirstBatchWatch
from .rollouts import Batch
from .tracing import trace_batch, trace_rewards

logger = logging.getLogger(__name__)

LOGP_BOUND = 0.05
"""The mean `sampling/logp_difference` above which a warning is logged.

It is ten times the largest mean that rounding causes.

Measured with nine families of tiny random models (tests/local/test_families.py), 480 tokens each,
the engine against a forward pass over the whole text: means up to 3e-6 in float32, and 4.5e-3 in
bfloat16 (of the weights or of autocast). The largest difference of a token is no measure: 3e-5 in
float32, but up to 1.3 in bfloat16, where rounding may send a token of a mixture of experts to
another expert.
"""
MAX_TRACEBACKS = 100  # per run, in its file of tracebacks


# --- a batch -> metrics and records ------------------------------------------------------------


def total_rewards(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Return the rewards that are trained on: the weighted sum over reward functions, as in TRL.

    Args:
        rewards (`torch.Tensor`): Of shape `(rollouts, reward functions)`, NaN where there is none.
        weights (`Sequence[float]`, *optional*): Defaults to 1 for each reward function.

    Returns:
        `torch.Tensor`: Of shape `(rollouts,)`, NaN for rollouts without any reward.
    """
    if weights is None:
        weights = [1.0] * rewards.shape[1]
    # A missing reward counts as 0 in the sum, unless all of them are missing.
    totals = (rewards * torch.tensor(weights, device=rewards.device)).nansum(1)
    return totals.masked_fill(rewards.isnan().all(1), torch.nan)


def pass_at_k_metrics(scores: torch.Tensor, group_size: int) -> dict[str, float]:
    """Return the metrics `pass@k` of an evaluation batch; see [`passes`].

    Args:
        scores (`torch.Tensor`): One score per rollout, over all processes, NaN where there is
            none. From 1 on the answer counts as right.
        group_size (`int`): Rollouts per question. There are no metrics for a single one.
    """
    return passes([group.tolist() for group in scores.split(group_size)])


@dataclass(frozen=True)
class BatchSummary:
    """The result of [`BatchMonitor.process`], equal on all processes.

    Args:
        metrics (`dict[str, float]`): Means and sums over all processes.
        totals (`torch.Tensor`): The rewards that are trained on, of shape `(rollouts of all
            processes,)`, NaN where there is none.
        failed (`torch.Tensor`): Whether each rollout failed, in the same shape.
        stop_reason (`str`): The reason why training has to stop, or an empty string.
    """

    metrics: Mapping[str, float]
    totals: torch.Tensor
    failed: torch.Tensor
    stop_reason: str


class BatchMonitor:
    """Measures and records every batch once its rewards are known, and decides when to stop.

    Args:
        log ([`RolloutLog`]): The record of this process's rollouts.
        failures ([`FailureWatch`]): Decides when too many rollouts fail.
        first_batches ([`FirstBatchWatch`]): Warns of first batches that cannot train anything.
        run_id (`int`): Distinguishes the records of several runs in one folder.
        reward_names (`list[str]`): The names of the reward functions.
        process_index (`int`): The number of this process. Only the first one logs warnings.
        show_batch (`Callable`, *optional*): Called with mode, rollouts and rewards; see
            [`LiveView.show`].
        measure_environments (`bool`, *optional*, defaults to `False`): Whether to add metrics by
            environment.

    Attributes:
        some_failed (`bool`): Whether any rollout of the last training batch failed, on any process.
    """

    def __init__(
        self,
        log: RolloutLog,
        failures: FailureWatch,
        first_batches: FirstBatchWatch,
        run_id: int,
        reward_names: Sequence[str],
        process_index: int,
        show_batch: Callable[..., None] | None = None,
        measure_environments: bool = False,
    ):
        self.log = log
        self.failures = failures
        self.first_batches = first_batches
        self.run_id = run_id
        self.reward_names = reward_names
        self.process_index = process_index
        self.show_batch = show_batch
        self.measure_environments = measure_environments
        self.some_failed = False
        self._warned_about_logprobs = False
        self._traceback_file = log.folder / f"errors-{process_index:05d}.txt"
        self._traceback_frames: set[str] = set()  # of tracebacks in the file

    def process(
        self, batch: Batch, rewards: torch.Tensor, weights: Sequence[float] | None = None
    ) -> BatchSummary:
        """Measure and record a batch. Must be called on every process.

        Args:
            batch ([`Batch`]): The batch of this process.
            rewards (`torch.Tensor`): Of shape `(rollouts of all processes, reward functions)`,
                NaN where there is none. Changed in place: failed rollouts lose their rewards.
            weights (`Sequence[float]`, *optional*): The weights of the reward functions. Defaults
                to 1 for each.
        """
        # A failed rollout has no reward, whatever a reward function returned for it.
        facts = gather_object([RolloutFacts.of(rollout) for rollout in batch.rollouts])
        failed = torch.tensor([fact.status == "failed" for fact in facts], device=rewards.device)
        rewards[failed] = torch.nan
        totals = total_rewards(rewards, weights)

        if batch.position.is_training:
            self.some_failed = bool(failed.any())
            if self.process_index == 0:
                self.first_batches.check_batch(facts, rewards, totals.tolist(), batch.position)

        # Record the rollouts of this process.
        first_index = self.process_index * len(batch.rollouts)
        local = slice(first_index, first_index + len(batch.rollouts))
        self._record(batch, rewards[local].tolist(), totals[local].tolist())

        # Decide whether training may go on.
        hint = f"; its traceback is in {self._traceback_file}" if self._traceback_frames else ""
        stop_reason = self.failures.check_batch(
            facts,
            is_main_process=self.process_index == 0,
            hint=hint,
            is_training=batch.position.is_training,
        )

        # Compute the metrics.
        metrics = rollout_metrics(facts)
        if spans.is_on():
            trace_batch(totals, failed, metrics)
        if self.measure_environments:
            metrics |= metrics_by_environment(facts, totals.tolist())
        if batch.position.is_training:
            diversity = _measure_diversity(batch.rollouts)
            if diversity is not None:
                metrics["groups/diversity"] = diversity
        return BatchSummary(metrics=metrics, totals=totals, failed=failed, stop_reason=stop_reason)

    def record_unscored(self, batch: Batch) -> None:
        """Record this process's rollouts of a batch, without rewards: a reward function has raised.

        They were paid for, and may show why it raised.
        """
        self._write_tracebacks(batch.rollouts)
        rewards = [[math.nan] * len(self.reward_names)] * len(batch.rollouts)
        self.log.write(self._iter_records(batch, rewards, [math.nan] * len(batch.rollouts)))

    def check_logprob_difference(self, difference: float) -> None:
        """Log a warning, once, if the mean `sampling/logp_difference` exceeds [`LOGP_BOUND`]."""
        # One warning per run, from the first process, is enough.
        is_too_large = difference > LOGP_BOUND
        if not is_too_large or self.process_index != 0 or self._warned_about_logprobs:
            return
        self._warned_about_logprobs = True
        logger.warning(
            "the sampler's log-probabilities differ from the trainer's by %.2g on average (more "
            "than %g): the gradient is not that of the policy that sampled. Check that the sampler "
            "has the same weights, temperature and precision; with vLLM, top_p, top_k, min_p and "
            "repetition_penalty cause a difference",
            difference,
            LOGP_BOUND,
        )

    def _record(self, batch: Batch, rewards: list[list[float]], totals: list[float]) -> None:
        """Show, trace and store this process's rollouts, given their rewards by reward function."""
        if self.show_batch is not None:
            self.show_batch(batch.position.mode, batch.rollouts, rewards)
        if spans.is_on():
            trace_rewards(batch, rewards, totals, self.reward_names)
        self._write_tracebacks(batch.rollouts)
        self.log.write(self._iter_records(batch, rewards, totals))

    def _iter_records(
        self, batch: Batch, rewards: list[list[float]], totals: list[float]
    ) -> Iterator[dict[str, Any]]:
        """Yield the record of each rollout."""
        for rollout, rollout_rewards, total, metadata in zip(
            batch.rollouts, rewards, totals, batch.metadata, strict=True
        ):
            # Beside the total, a record has the reward of each function by its name.
            named_rewards = {}
            for name, reward in zip(self.reward_names, rollout_rewards, strict=True):
                named_rewards[name] = round_reward(reward)
            yield rollout_record(
                rollout,
                run=self.run_id,
                step=batch.position.step,
                mode=batch.position.mode,
                reward=round_reward(total),
                rewards=named_rewards,
                **metadata,
            )

    def _write_tracebacks(self, rollouts: Sequence[Rollout]) -> None:
        """Append the tracebacks of failed rollouts to a file, each one once."""
        # Without a record of rollouts there is no record of their errors, either.
        if not self.log.max_bytes:
            return
        for rollout in rollouts:
            text = traceback_of(rollout.error)
            # The last line is the exception's message, which may differ between two equal errors.
            frames = text.rpartition("\n")[0]
            is_full = len(self._traceback_frames) >= MAX_TRACEBACKS
            if not text or frames in self._traceback_frames or is_full:
                continue
            self._traceback_frames.add(frames)
            with suppress(OSError):  # the disk may be full
                self.log.folder.mkdir(parents=True, exist_ok=True)
                with self._traceback_file.open("a", encoding="utf-8", errors="replace") as file:
                    file.write(f"{text}\n\n")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"some_failed": self.some_failed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.some_failed = state["some_failed"]


def round_reward(reward: float) -> float | None:
    """Return a reward for a record: rounded, `None` instead of NaN."""
    if reward != reward:  # NaN: there is no reward
        return None
    return round(reward, 6)


def _measure_diversity(rollouts: Sequence[Rollout]) -> float | None:
    """Return the mean diversity of groups over all processes. Must be called on every process.

    If a group is divided between processes, each part counts by itself.
    """
    groups: dict[int | None, list[str]] = {}
    for rollout in rollouts:
        if rollout.status != "failed":
            groups.setdefault(rollout.group, []).append("\n".join(rollout.texts))
    values = [group_diversity(texts) for texts in groups.values()]
    known_values = gather_object([value for value in values if value is not None])
    return sum(known_values) / len(known_values) if known_values else None


# --- the sampler against the trainer -------------------------------------------------------------


def logp_difference(
    logps: torch.Tensor, batch: Mapping[str, torch.Tensor], accelerator: Accelerator
) -> dict[str, float]:
    """Return the difference between the log-probabilities of sampler and trainer.

    Args:
        logps (`torch.Tensor`): The trainer's, of shape `(batch, completion)`.
        batch (`dict`): A micro-batch with the columns of [`Batch.sampler_columns`].
        accelerator (`Accelerator`): The processes of the job, each of which calls this.

    Returns:
        `dict`: The metrics `sampling/logp_difference/mean` and `/max` of the agent's tokens;
            empty if the sampler returned no log-probabilities.
    """
    # Compare tokens in the loss for which the sampler has reported a log-probability.
    in_loss = (batch["completion_mask"] * batch["tool_mask"]).bool()
    is_compared = in_loss & ~batch["sampler_logps"].isnan()
    differences = (logps - batch["sampler_logps"])[is_compared].abs().float()

    # Sum, number and maximum of each process. The zero is the maximum where there is no token.
    local_stats = [
        differences.sum(),
        is_compared.sum().float(),
        torch.cat([differences, differences.new_zeros(1)]).max(),
    ]
    gathered = accelerator.gather(torch.stack(local_stats).unsqueeze(0))
    totals, token_counts, maxima = gathered.unbind(1)
    if not token_counts.any():
        return {}
    return {
        "sampling/logp_difference/mean": (totals.sum() / token_counts.sum()).item(),
        "sampling/logp_difference/max": maxima.max().item(),
    }


def clipped_share(
    batch: Mapping[str, torch.Tensor], args: GRPOConfig, accelerator: Accelerator
) -> float:
    """Return the share of tokens whose importance ratio is out of bounds, over all processes.

    In the sequence modes of the ratio it is the share of sequences.

    Args:
        batch (`dict`): The return value of TRL's `_generate_and_score_completions`.
        args (`GRPOConfig`): Contains the settings `vllm_importance_sampling_*`.
        accelerator (`Accelerator`): The processes of the job.
    """
    # The log-ratio of the trainer's to the sampler's probability; 0 where the sampler's is not
    # known.
    mask = batch["completion_mask"] * batch["tool_mask"]
    log_ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask
    log_ratio = log_ratio.nan_to_num(0.0)
    # In the sequence modes, the ratio of a sequence is the product over its tokens.
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        log_ratio = log_ratio.sum(1)
        mask = (mask.sum(1) > 0).long()
    ratio = log_ratio.exp()

    # Count what is out of bounds.
    lower_bound = args.vllm_importance_sampling_clip_min or 0.0
    upper_bound = args.vllm_importance_sampling_clip_max
    if upper_bound is None:
        upper_bound = math.inf
    is_clipped = (ratio > upper_bound) | (ratio < lower_bound)
    local_counts = torch.stack([(is_clipped * mask).sum(), mask.sum()]).double()
    clipped_count, total_count = accelerator.reduce(local_counts).tolist()
    return clipped_count / max(total_count, 1.0)


# --- reasons to stop ---------------------------------------------------------------------------


# Kinds of errors for which the text of the policy may be to blame.
_PROGRAM_ERRORS = ("ProgramFailed", "CommandFailed")
_MISTAKES_ADVICE = (
    "if what the policy wrote is to blame, list the exception (or the exit code) in the program's "
    "mistakes=: then these rollouts are scored, and the policy learns to avoid them"
)


class FailureWatch:
    """Decides whether few enough rollouts fail to continue, or the environment is down.

    Args:
        window (`int`): Number of recent batches that count.
        max_share (`float`): The largest share of these batches' rollouts that may fail.

    Attributes:
        has_trained (`bool`): Whether a rollout of training succeeded.
    """

    def __init__(self, window: int, max_share: float):
        self.max_share = max_share
        self.has_trained = False
        # Failed and all rollouts of recent batches.
        self._recent_counts: deque[tuple[int, int]] = deque(maxlen=window)
        self._last_cause = ""  # of a training batch in which rollouts failed
        self._warned_about_failures = False

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

        # If none failed, the environment has recovered, even if too many of the recent ones failed.
        if not failed:
            return ""

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
        reason = (
            f"{share:.0%} of the recent rollouts failed, the last with {cause.error_kind}: "
            f"{cause.error}"
        )
        if cause.error_kind in _PROGRAM_ERRORS:
            reason += f"; {_MISTAKES_ADVICE}"
        return reason

    def failure_reason(self) -> str:
        """Return why a finished run counts as failed, or an empty text.

        A run may be too short for `check_batch` to stop it.
        """
        if self.has_trained or not self._last_cause:
            return ""
        return f"every rollout of this run failed, the last with {self._last_cause}"

    def _warn_about_failures(
        self, failed: Sequence[RolloutFacts], rollout_count: int, hint: str
    ) -> None:
        if failed[0].error_kind in _PROGRAM_ERRORS:
            hint += f"; {_MISTAKES_ADVICE}"
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
