"""The spans of training: steps and evaluations, in the same trace on every process, and the rewards of rollouts.

A reward is known only after its rollout has ended, and an ended span cannot be changed. A span that stayed open until
then would be lost if the process crashes. So a reward is a short span of its own below its rollout's, and the step's
span has the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from ..llm import spans
from .rollouts import Batch


def job_span(name: str, step: int, accelerator: Accelerator) -> Any:
    """A span on each process, below that of the first process. Called on every process alike."""
    about = {f"{spans.OWN}.step": step, f"{spans.OWN}.process": accelerator.process_index}
    if not spans.is_on() or accelerator.num_processes == 1:
        return spans.span(name, about)
    first = spans.span(name, about) if accelerator.is_main_process else None
    (parent,) = broadcast_object_list([first.traceparent if first else ""])
    return first or spans.span(name, about, parent)


class StepSpans(TrainerCallback):
    """A span for each training step. As a context manager around training it ends the span of a step that raised."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._open: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._open = job_span("training_step", state.global_step, self.accelerator)
        self._open.__enter__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.__exit__(None, None, None)

    def __enter__(self) -> StepSpans:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ended, self._open = self._open, None
        if ended is not None:
            ended.__exit__(kind, error, traceback)


def trace_rewards(
    batch: Batch,
    by_function: Sequence[Sequence[float]],
    totals: Sequence[float],
    names: Sequence[str],
) -> None:
    """A span with the rewards of each rollout, below the rollout's; without a value if it has no reward."""
    for rollout, scores, total in zip(batch.rollouts, by_function, totals, strict=True):
        known = {
            name: score
            for name, score in zip(("", *names), (total, *scores), strict=True)
            if score == score
        }
        about = {f"{spans.OWN}.reward.{name}".rstrip("."): score for name, score in known.items()}
        evaluation = {
            "gen_ai.evaluation.name": "reward",
            "gen_ai.evaluation.score.value": known.get(""),
        }
        with spans.span("reward", {**evaluation, **about}, parent=rollout.traceparent):
            pass


def trace_batch(rewards: torch.Tensor, failed: torch.Tensor, metrics: Mapping[str, float]) -> None:
    """Add the numbers of a batch, over all processes, to the current span, that of the step."""
    totals = rewards[~rewards.isnan()]
    spans.note(
        {
            f"{spans.OWN}.rollouts": len(rewards),
            f"{spans.OWN}.failed": int(failed.sum()),
            **({f"{spans.OWN}.reward": totals.mean().item()} if len(totals) else {}),
            **{
                f"{spans.OWN}.{name}": metrics[f"environment/{name}"]
                for name in ("calls", "tokens", "cost_usd")
            },
        }
    )
