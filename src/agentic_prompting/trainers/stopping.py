"""Early ends of training, on every process and always with a checkpoint: the environment is down, another process
failed, or Ctrl-C was pressed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate.utils import gather_object, reduce
from torch.distributed.distributed_c10d import _get_default_store
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from ..llm import Budget, BudgetExceeded
from ..llm.guard import describe
from ..rollout import Limits, RolloutFacts

logger = logging.getLogger(__name__)

# A launcher passes on the signal that the terminal has already delivered: within this time two are one.
SAME_SECONDS = 1.0
_STORE = "agentic_prompting/rank_barrier"


class TrainingStopped(RuntimeError):
    """Training could not go on because of the environment. A checkpoint was saved first; resume from it."""


class TrainingInterrupted(KeyboardInterrupt):
    """Training was ended by Ctrl-C, after a whole step and with a checkpoint. The message tells how to resume.

    Not an `Exception`, so that no handler of errors catches it.
    """


class PeerFailed(RuntimeError):
    """Another process of the job failed in its rollouts; the message has its number and its error."""


# --- because of the environment --------------------------------------------------------------------------------------


class FailureWatch:
    """Decides whether failed rollouts are few enough to go on, or the environment is down.

    Args:
        window (`int`): Batches to look at.
        max_share (`float`): The share of these batches' rollouts that may fail.
        asked (`str`, *optional*): The prompt template in use and where it comes from, for the warning about form.
    """

    def __init__(self, window: int, max_share: float, asked: str = ""):
        self.max_share, self.asked = max_share, asked
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)
        self.trained, self._last_cause = False, ""
        self._warned = self._warned_of_form = False

    def why_stop(
        self,
        facts: Sequence[RolloutFacts],
        speaks: bool = True,
        more: str = "",
        trains: bool = True,
    ) -> str:
        """Count a batch of all processes and return the reason to stop after it, or an empty text. At the run's first
        failure the process that `speaks` logs a warning with the cause, followed by `more`."""
        failed = [fact for fact in facts if fact.status == "failed"]
        self._recent.append((len(failed), len(facts)))
        if failed and speaks and not self._warned:
            logger.warning(
                "%d of %d rollouts of this batch failed; they get no reward, and training goes on "
                "while at most %s fail. The first with %s: %s%s",
                *(
                    len(failed),
                    len(facts),
                    f"{self.max_share:.0%}",
                    failed[0].error_kind,
                    failed[0].error,
                    more,
                ),
            )
        self._warned |= bool(failed)
        if trains:
            self.trained |= len(failed) < len(facts)
            self._last_cause = f"{failed[-1].error_kind}: {failed[-1].error}" if failed else ""
        share = sum(n for n, _ in self._recent) / sum(n for _, n in self._recent)
        fatal = next((fact for fact in failed if fact.fatal), None)
        full = len(self._recent) == self._recent.maxlen
        if fatal is None and not (
            failed and full and share > self.max_share
        ):  # else it has recovered
            return ""
        cause = fatal or failed[-1]
        return f"{share:.0%} of the recent rollouts failed, the last with {cause.error_kind}: {cause.error}"

    def why_failed(self) -> str:
        """The reason why a run that is over has failed, or an empty text; it may be too short for `why_stop`."""
        all_failed = self._last_cause and not self.trained
        return (
            f"every rollout of this run failed, the last with {self._last_cause}"
            if all_failed
            else ""
        )

    def warn_of_form(self, facts: Sequence[RolloutFacts], limits: Limits) -> None:
        """Warn once if nearly all rollouts of the first step were cut off or malformed: they teach nothing."""
        cut, odd = (
            sum(fact.status == status for fact in facts) for status in ("truncated", "malformed")
        )
        if self._warned_of_form or cut + odd <= 0.9 * len(facts):
            return
        self._warned_of_form = True
        logger.warning(
            "%d of %d rollouts of the first step gave no answer in the form that is asked for (%d cut off, %d fit no "
            "rule of the grammar). Look at some with `agentic-prompting report`; prompt_template has to tell the agent "
            "how to write, and max_turn_tokens=%d and max_completion_length=%d have to let it. It is asked with %s",
            *(
                cut + odd,
                len(facts),
                cut,
                odd,
                limits.max_turn_tokens,
                limits.max_tokens,
                self.asked,
            ),
        )


@contextmanager
def quiet_about_missing_rewards(quiet: bool) -> Iterator[None]:
    """Within it, if `quiet`, TRL does not warn that "All reward functions returned None": where rollouts failed, that
    would be misleading and print the row. [`FailureWatch`] reports the failure."""
    log = logging.getLogger(GRPOTrainer.__module__)

    def keep(record: logging.LogRecord) -> bool:
        return not (quiet and "All reward functions returned None" in record.getMessage())

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def first_reason(why: str | None) -> str | None:
    """The first process's reason that is not empty, on every process alike."""
    return next(filter(None, gather_object([why])), None)


def why_spent(spending: Budget) -> str:
    """Why the budget lets no further call be made, or an empty text."""
    try:
        spending.stop_when_spent()
    except BudgetExceeded as error:
        return str(error)
    return ""


def stop(
    why: str, spending: Budget, args: Any, step: int, save: Callable[[], Any] | None
) -> NoReturn:
    """End training so that it can be resumed later. Must be called on every process alike.

    Args:
        why (`str`): The reason.
        spending ([`Budget`]): The job's.
        args ([`MultiTurnGRPOConfig`]): The run's.
        step (`int`): Updates of the weights so far.
        save (`Callable`, *optional*): Saves a checkpoint; `None` outside of training. It is called before anything else
            that may fail.

    Raises:
        [`TrainingStopped`]: Always; with `why`, what was spent, and where the checkpoint is.
    """
    saved = ""
    if save is not None:
        try:
            save()
            folder = args.output_dir
            saved = f" A checkpoint is in {folder}; mend the cause and continue with resume_from_checkpoint=True."
        except Exception as error:  # whatever it is: the reason to stop must still be reported
            saved = f" And no checkpoint could be saved: {_line(error)}"
    try:
        spent = f"Spent so far: {spending}."
    except Exception as error:
        spent = (
            f"What was spent so far is not known: {spending.path} cannot be read ({_line(error)})."
        )
    raise TrainingStopped(f"stopped at step {step}: {why}. {spent}{saved}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- because of another process --------------------------------------------------------------------------------------


@contextmanager
def rank_barrier(what: str) -> Iterator[Callable[[], None]]:
    """A block that every process of the job runs at its own pace, and that all leave together.

    Not a collective: processes wait through the process group's key-value store, so one that takes ten minutes longer
    causes no NCCL timeout, and the others learn at once of one that failed. It is the same under every launcher.

    Args:
        what (`str`): The name of the work, for messages: "the rollouts of step 3".

    Yields:
        `Callable`: Raises [`PeerFailed`] if another process has failed; call it at intervals.

    Raises:
        [`PeerFailed`]: On every process but the failing one, which raises its own error with a note about where.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        yield lambda: None
        return
    store, rank = _get_default_store(), dist.get_rank()

    def listen() -> None:
        if store.check([f"{_STORE}/failed"]):
            raise PeerFailed(store.get(f"{_STORE}/failed").decode())

    try:
        yield listen
    except PeerFailed:
        raise
    except BaseException as error:
        if store.check(
            [f"{_STORE}/failed"]
        ):  # this error comes from a collective that the failed process has left
            raise PeerFailed(store.get(f"{_STORE}/failed").decode()) from error
        where = f"process {rank} of {world} ({socket.gethostname()}) failed in {what}"
        store.set(f"{_STORE}/failed", f"{where}: {describe(error, 1000)}")
        error.add_note(f"{where}; the other processes stop with it")
        raise
    # The store counts the blocks that this process has passed: there may be several trainers.
    expected = world * store.add(f"{_STORE}/{rank}", 1)
    arrived = store.add(f"{_STORE}/arrived", 1)
    pause = 0.001
    while arrived < expected:
        listen()
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
        arrived = store.add(f"{_STORE}/arrived", 0)


# --- because of Ctrl-C -----------------------------------------------------------------------------------------------


@contextmanager
def checkpoint_on_interrupt(trainer: Trainer) -> Iterator[None]:
    """Within it the first Ctrl-C (SIGINT) ends training after the current step, with a checkpoint.

    A second one, more than a second later, interrupts at once, as it does without this. If one process of a job gets
    the signal, all stop after the same step. On a thread other than the main one, where Python delivers no signals,
    this changes nothing.

    Args:
        trainer (`Trainer`): The one whose `train` is called within.

    Raises:
        [`TrainingInterrupted`]: At the end of the body, if training ended early because of a signal.

    Example:

    ```python
    with checkpoint_on_interrupt(trainer):
        trainer.train()
    ```
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt = _StopAfterStep()
    interrupt.speaks = trainer.args.process_index == 0
    trainer.add_callback(interrupt)
    before = signal.signal(signal.SIGINT, interrupt.asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        trainer.remove_callback(interrupt)
    if interrupt.stopped_at is not None:
        checkpoint = (
            Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{interrupt.stopped_at}"
        )
        raise TrainingInterrupted(
            f"interrupted after step {interrupt.stopped_at}, a checkpoint was saved; to go on, call "
            f"train(resume_from_checkpoint=True), or run the same command with --resume_from_checkpoint {checkpoint}"
        )


class _StopAfterStep(TrainerCallback):
    """Ends training after the step during which a signal came, on every process of the job alike."""

    speaks = False
    asked_at: float | None = None
    stopped_at: int | None = None

    def asked(self, *signal_and_frame: Any) -> None:
        """The signal's handler."""
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at = now
            if self.speaks:  # not `print`, which may be what the signal has interrupted
                os.write(
                    2,
                    b"\nInterrupted: finishing this step, then saving a checkpoint. Ctrl-C again: at once.\n",
                )
        elif now - self.asked_at > SAME_SECONDS:
            raise KeyboardInterrupt

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked = self.asked_at is not None
        if args.world_size > 1:
            asked = bool(reduce(torch.tensor(float(asked), device=args.device)).item())
        if asked:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True
