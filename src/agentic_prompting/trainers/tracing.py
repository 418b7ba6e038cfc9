"""The spans of training: steps and evaluations, and the rewards of rollouts.

The span of a step is in the same trace on every process. A reward is known only after its rollout
has ended, and an ended span cannot be changed. A span that stayed open until then would be lost if
the process crashes. So a reward has a short span of its own below its rollout's, and the step's
span has the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..llm import spans
from .rollouts import Batch

# Metrics `environment/...` that the step's span has.
SUMMED_METRICS = ("calls", "tokens", "cost_usd")


def job_span(name: str, step: int, accelerator: Accelerator) -> Any:
    """Return a span of this process, below that of the main process.

    Must be called on every process.

    Args:
        name (`str`): The name of the span.
        step (`int`): Weight updates so far.
        accelerator (`Accelerator`): The processes of the job.
    """
    attributes = {f"{spans.OWN}.step": step, f"{spans.OWN}.process": accelerator.process_index}
    if not spans.is_on() or accelerator.num_processes == 1:
        return spans.span(name, attributes)

    # The main process begins the trace, and sends the others its span's name.
    main_span = None
    if accelerator.is_main_process:
        main_span = spans.span(name, attributes)
    (parent,) = broadcast_object_list([main_span.traceparent if main_span else ""])
    return main_span or spans.span(name, attributes, parent)


class StepSpans(TrainerCallback):
    """A span for each training step.

    As a context manager around training it also ends the span of a step that raised.

    Args:
        accelerator (`Accelerator`): The processes of the job.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._open_span: Any = None

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self._open_span = job_span("training_step", state.global_step, self.accelerator)
        self._open_span.__enter__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.__exit__(None, None, None)

    def __enter__(self) -> StepSpans:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        span = self._open_span
        self._open_span = None
        if span is not None:
            span.__exit__(error_type, error, traceback)


def trace_rewards(
    batch: Batch,
    rewards: Sequence[Sequence[float]],
    totals: Sequence[float],
    names: Sequence[str],
) -> None:
    """Write a span with the rewards of each rollout, below the rollout's.

    Args:
        batch ([`Batch`]): The rollouts.
        rewards (`Sequence[Sequence[float]]`): For each rollout the reward of each function, NaN
            where there is none.
        totals (`Sequence[float]`): The rollouts' total rewards.
        names (`Sequence[str]`): The names of the reward functions.
    """
    for rollout, scores, total in zip(batch.rollouts, rewards, totals, strict=True):
        # OpenTelemetry's names for an evaluation, and this library's own beside them.
        attributes: dict[str, Any] = {
            "gen_ai.evaluation.name": "reward",
            "gen_ai.evaluation.score.value": None if math.isnan(total) else total,
        }
        if not math.isnan(total):
            attributes[f"{spans.OWN}.reward"] = total
        for name, score in zip(names, scores, strict=True):
            if not math.isnan(score):
                attributes[f"{spans.OWN}.reward.{name}"] = score
        # The span has no duration: it only carries the rewards.
        with spans.span("reward", attributes, parent=rollout.traceparent):
            pass


def trace_batch(rewards: torch.Tensor, failed: torch.Tensor, metrics: Mapping[str, float]) -> None:
    """Add the numbers of a batch, over all processes, to the current span, that of the step.

    Args:
        rewards (`torch.Tensor`): The total rewards of shape `(rollouts,)`, NaN if there is none.
        failed (`torch.Tensor`): Whether each rollout failed.
        metrics (`Mapping[str, float]`): The batch's metrics.
    """
    attributes: dict[str, Any] = {
        f"{spans.OWN}.rollouts": len(rewards),
        f"{spans.OWN}.failed": int(failed.sum()),
    }
    # Rollouts without a reward do not count in the mean.
    known_rewards = rewards[~rewards.isnan()]
    if len(known_rewards):
        attributes[f"{spans.OWN}.reward"] = known_rewards.mean().item()
    # What the environment has spent on the batch.
    for name in SUMMED_METRICS:
        attributes[f"{spans.OWN}.{name}"] = metrics[f"environment/{name}"]
    spans.note(attributes)
