"""Watches finished batches: metrics, records, a live view, and reasons to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from ..evaluation.repeats import passes
from ..llm import spans
from ..llm.guard import traceback_of
from ..rollout import (
    Limits,
    RolloutFacts,
    RolloutLog,
    metrics_by_environment,
    rollout_metrics,
    rollout_record,
)
from .batch import Batch
from .loss import LOGP_BOUND
from .stopping import FailureWatch
from .tracing import trace_batch, trace_rewards

logger = logging.getLogger(__name__)

_MOST_TRACEBACKS = 100  # of a run, in its file


@dataclass(frozen=True)
class Seen:
    """The findings of an [`Observer`] about a batch, the same on every process.

    Args:
        metrics (`dict[str, float]`): Means and sums over all processes.
        totals (`torch.Tensor`): Of shape `(rollouts of all processes,)`: the rewards that are trained on, NaN where
            there is none.
        failed (`torch.Tensor`): Whether a rollout failed, in the same shape.
        stop (`str`): The reason why training has to stop, or an empty text.
    """

    metrics: Mapping[str, float]
    totals: torch.Tensor
    failed: torch.Tensor
    stop: str


class Observer:
    """Looks at every batch once its rewards are known.

    Args:
        log ([`RolloutLog`]): Where this process's rollouts are recorded.
        failures ([`FailureWatch`]): Decides when too many fail.
        run (`int`): Tells apart the records of several runs in one folder.
        reward_names (`list[str]`): The reward functions' names.
        limits ([`Limits`]): For the warning about rollouts that are cut off.
        process (`int`): This process's number. The first one warns.
        show (`Callable`, *optional*): Gets mode, rollouts and rewards of each batch; see [`LiveView.show`].
        several (`bool`, *optional*, defaults to `False`): Whether there are several environments, each with metrics of
            its own.

    Attributes:
        some_failed (`bool`): Whether any rollout of the last training batch failed, on any process.
    """

    def __init__(
        self,
        log: RolloutLog,
        failures: FailureWatch,
        run: int,
        reward_names: Sequence[str],
        limits: Limits,
        process: int,
        show: Callable[..., None] | None = None,
        several: bool = False,
    ):
        self.log, self.failures, self.run, self.reward_names = log, failures, run, reward_names
        self.limits, self.process, self.show, self.several = limits, process, show, several
        self.some_failed, self._warned_of_logps = False, False
        self._errors = log.folder / f"errors-{process:05d}.txt"
        self._tracebacks: set[str] = set()  # written, without the exceptions' own texts

    def seen(self, batch: Batch, rewards: torch.Tensor, weights: Sequence[float] | None = None) -> Seen:
        """Measure and record a batch. Called on every process alike.

        Args:
            batch ([`Batch`]): This process's part.
            rewards (`torch.Tensor`): Of shape `(rollouts of all processes, reward functions)`, NaN where there is none.
                Changed in place: a failed rollout has no reward, whatever a reward function returned for it.
            weights (`Sequence[float]`, *optional*): The weights of the reward functions. Defaults to 1 for each.
        """
        facts = gather_object([RolloutFacts.of(rollout) for rollout in batch.rollouts])
        failed = torch.tensor([fact.status == "failed" for fact in facts], device=rewards.device)
        rewards[failed] = torch.nan
        if batch.place.trains:
            self.some_failed = bool(failed.any())
            if batch.place.step == 0 and self.process == 0:
                self.failures.warn_of_form(facts, self.limits)
        first = self.process * len(batch.rollouts)
        own = slice(first, first + len(batch.rollouts))
        totals = total_rewards(rewards, weights)
        self._record(batch, rewards[own].tolist(), totals[own].tolist())
        more = f"; its traceback is in {self._errors}" if self._tracebacks else ""
        why = self.failures.why_stop(facts, self.process == 0, more, batch.place.trains)
        metrics = rollout_metrics(facts)
        if spans.is_on():
            trace_batch(totals, failed, metrics)
        by_name = metrics_by_environment(facts, totals.tolist()) if self.several else {}
        return Seen(metrics | by_name, totals, failed, why)

    def warn_of_logps(self, difference: float) -> None:
        """Warn once if the mean `sampling/logp_difference` is above [`LOGP_BOUND`]."""
        if difference > LOGP_BOUND and self.process == 0 and not self._warned_of_logps:
            self._warned_of_logps = True
            logger.warning(
                "the sampler's log-probabilities differ from the trainer's by %.2g on average (more than %g): the "
                "gradient is not that of the policy that sampled. Check that the sampler has the same weights, "
                "temperature and precision; top_p, top_k, min_p and repetition_penalty cause a difference, too",
                *(difference, LOGP_BOUND),
            )

    def _record(self, batch: Batch, by_function: list[list[float]], totals: list[float]) -> None:
        if self.show is not None:
            self.show(batch.place.mode, batch.rollouts, by_function)
        if spans.is_on():
            trace_rewards(batch, by_function, totals, self.reward_names)
        for text in filter(None, (traceback_of(rollout.error) for rollout in batch.rollouts)):
            place = text.rpartition("\n")[0]
            if self.log.max_bytes and place not in self._tracebacks and len(self._tracebacks) < _MOST_TRACEBACKS:
                self._tracebacks.add(place)
                with suppress(OSError):  # a full disk
                    self.log.folder.mkdir(parents=True, exist_ok=True)
                    with self._errors.open("a", encoding="utf-8", errors="replace") as file:
                        file.write(f"{text}\n\n")
        self.log.write(
            rollout_record(
                rollout,
                run=self.run,
                step=batch.place.step,
                mode=batch.place.mode,
                reward=_or_none(total),
                rewards={name: _or_none(reward) for name, reward in zip(self.reward_names, scores, strict=True)},
                **metadata,
            )
            for rollout, scores, total, metadata in zip(
                batch.rollouts, by_function, totals, batch.metadata, strict=True
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"some_failed": self.some_failed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from an [`Observer.state_dict`]."""
        self.some_failed = state["some_failed"]


def total_rewards(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """The rewards that are trained on: the weighted sum over reward functions, as in TRL; NaN where none gave one."""
    totals = (rewards * torch.tensor(weights or [1.0] * rewards.shape[1], device=rewards.device)).nansum(1)
    return totals.masked_fill(rewards.isnan().all(1), torch.nan)


def eval_passes(scores: torch.Tensor, group: int) -> dict[str, float]:
    """The metrics `pass@k` of an evaluation's batch, as [`passes`] has them.

    Args:
        scores (`torch.Tensor`): Scores of all processes' rollouts, from one reward function; NaN where there is none.
            1 or more is a right answer.
        group (`int`): Rollouts of a question, `num_generations_eval`. With a single one there are no metrics.
    """
    return passes([one.tolist() for one in scores.split(group)])


def _or_none(reward: float) -> float | None:
    return None if reward != reward else round(reward, 6)  # NaN: not scored
