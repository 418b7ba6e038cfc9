"""The end of a run that cannot continue, on every process and always with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from accelerate.utils import gather_object

from ...llm import Budget, BudgetExceeded

if TYPE_CHECKING:
    from ..config import MultiTurnGRPOConfig


class TrainingStopped(RuntimeError):
    """Training stopped because of the environment. A checkpoint was saved first; resume from it."""


def gather_first_reason(reason: str | None) -> str | None:
    """Return the first process's reason that is not empty. Must be called on every process."""
    reasons = [reason for reason in gather_object([reason]) if reason]
    return reasons[0] if reasons else None


def check_budget(spending: Budget) -> str:
    """Return why the budget allows no further call, or an empty text."""
    try:
        spending.stop_when_spent()
    except BudgetExceeded as error:
        return str(error)
    return ""


def stop_training(
    reason: str,
    spending: Budget,
    args: MultiTurnGRPOConfig,
    step: int,
    save_checkpoint: Callable[[], None] | None,
) -> NoReturn:
    """End training so that it can be resumed later. Must be called on every process.

    Args:
        reason (`str`): The reason.
        spending ([`Budget`]): The job's budget.
        args ([`MultiTurnGRPOConfig`]): The run's settings.
        step (`int`): Weight updates so far.
        save_checkpoint (`Callable`, *optional*): Saves a checkpoint; `None` outside of training. It
            is called before anything else that may fail.

    Raises:
        [`TrainingStopped`]: Always; with the reason, the spending, and where the checkpoint is.
    """
    # Whatever fails from here on, the reason to stop must still be reported.
    checkpoint_report = ""
    if save_checkpoint is not None:
        try:
            save_checkpoint()
            checkpoint_report = (
                f" A checkpoint is in {args.output_dir}; fix the cause, then resume with "
                "resume_from_checkpoint=True (--resume_from_checkpoint true)."
            )
        except Exception as error:
            checkpoint_report = f" And no checkpoint could be saved: {_describe_on_a_line(error)}"
    # The record of spending may be damaged.
    try:
        spending_report = f"Spent so far: {spending}."
    except Exception as error:
        spending_report = (
            f"The spending so far is unknown: {spending.path} cannot be read "
            f"({_describe_on_a_line(error)})."
        )
    raise TrainingStopped(f"stopped at step {step}: {reason}. {spending_report}{checkpoint_report}")


def _describe_on_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
