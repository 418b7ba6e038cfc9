"""How training ends before its time, on every process and always with a checkpoint: the environment is gone, a process
failed, or somebody pressed Ctrl-C."""

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
    """Training was ended by Ctrl-C, after a whole step and with a checkpoint. Says how to go on.

    Not an `Exception`: what handles errors on the way must not take it for one.
    """


class PeerFailed(RuntimeError):
    """Another process of the job failed in its rollouts; the message says which, and with what."""


# --- because of the environment --------------------------------------------------------------------------------------


class FailureWatch:
    """Tells a run of bad luck from an environment that is gone.

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

    def why_stop(self, facts: Sequence[RolloutFacts], speaks: bool = True, more: str = "", trains: bool = True) -> str:
        """Take note of a batch of all processes; why to stop after it, or an empty text. The first failure of all is
        warned of with its cause and where there is `more`, by the process that `speaks`."""
        failed = [fact for fact in facts if fact.status == "failed"]
        self._recent.append((len(failed), len(facts)))
        if failed and speaks and not self._warned:
            logger.warning(
                "%d of %d rollouts of this batch failed; they get no reward, and training goes on "
                "while at most %s fail. The first with %s: %s%s",
                *(len(failed), len(facts), f"{self.max_share:.0%}", failed[0].error_kind, failed[0].error, more),
            )
        self._warned |= bool(failed)
        if trains:
            self.trained |= len(failed) < len(facts)
            self._last_cause = f"{failed[-1].error_kind}: {failed[-1].error}" if failed else ""
        share = sum(n for n, _ in self._recent) / sum(n for _, n in self._recent)
        fatal = next((fact for fact in failed if fact.fatal), None)
        full = len(self._recent) == self._recent.maxlen
        if fatal is None and not (full and share > self.max_share):
            return ""
        cause = fatal or failed[-1]
        return f"{share:.0%} of the recent rollouts failed, the last with {cause.error_kind}: {cause.error}"

    def why_failed(self) -> str:
        """At the end of a run: why it is none, or an empty text. It may have been too short to be stopped before."""
        all_failed = self._last_cause and not self.trained
        return f"every rollout of this run failed, the last with {self._last_cause}" if all_failed else ""

    def warn_of_form(self, facts: Sequence[RolloutFacts], limits: Limits) -> None:
        """Say, once, that hardly a rollout of the first step ended as it should: nothing could be learnt from them."""
        cut, odd = (sum(fact.status == status for fact in facts) for status in ("truncated", "malformed"))
        if self._warned_of_form or cut + odd <= 0.9 * len(facts):
            return
        self._warned_of_form = True
        logger.warning(
            "%d of %d rollouts of the first step gave no answer in the form that is asked for (%d cut off, %d fit no "
            "rule of the grammar). Look at some with `agentic-prompting report`; prompt_template has to tell the agent "
            "how to write, and max_turn_tokens=%d and max_completion_length=%d have to let it. It is asked with %s",
            *(cut + odd, len(facts), cut, odd, limits.max_turn_tokens, limits.max_tokens, self.asked),
        )


@contextmanager
def quiet_about_missing_rewards(quiet: bool) -> Iterator[None]:
    """Around TRL's rewards: where rollouts failed, its warning that "All reward functions returned None" would point
    the wrong way, and print the row. [`FailureWatch`] reports the failure."""
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


def stop(why: str, spending: Budget, args: Any, step: int, save: Callable[[], Any] | None) -> NoReturn:
    """End training so that it can be resumed later. Must be called on every process alike.

    Args:
        why (`str`): The reason.
        spending ([`Budget`]): The job's.
        args ([`MultiTurnGRPOConfig`]): The run's.
        step (`int`): Updates of the weights so far.
        save (`Callable`, *optional*): Saves a checkpoint; `None` outside of training. It is called first: nothing else
            that goes wrong may replace it.

    Raises:
        [`TrainingStopped`]: Always; with `why`, what was spent, and where the checkpoint is.
    """
    saved = ""
    if save is not None:
        try:
            save()
            folder = args.output_dir
            saved = f" A checkpoint is in {folder}; mend the cause and continue with resume_from_checkpoint=True."
        except Exception as error:  # of any kind: the reason to stop must still be reported
            saved = f" And no checkpoint could be saved: {_line(error)}"
    try:
        spent = f"Spent so far: {spending}."
    except Exception as error:
        spent = f"What was spent so far is not known: {spending.path} cannot be read ({_line(error)})."
    raise TrainingStopped(f"stopped at step {step}: {why}. {spent}{saved}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- because of another process --------------------------------------------------------------------------------------


@contextmanager
def rank_barrier(what: str) -> Iterator[Callable[[], None]]:
    """A stretch that every process of the job goes through in its own time, and leaves together with the others.

    Not a collective: the waiting goes over the process group's key-value store, so a process that needs ten minutes
    longer runs into no NCCL timeout, and one that failed is heard of at once. Under every launcher the same.

    Args:
        what (`str`): The name of the work, for messages: "the rollouts of step 3".

    Yields:
        `Callable`: Raises [`PeerFailed`] if another process has failed; to be called now and then.

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
        if store.check([f"{_STORE}/failed"]):  # what broke here is a collective that the failed process has left
            raise PeerFailed(store.get(f"{_STORE}/failed").decode()) from error
        where = f"process {rank} of {world} ({socket.gethostname()}) failed in {what}"
        store.set(f"{_STORE}/failed", f"{where}: {describe(error, 1000)}")
        error.add_note(f"{where}; the other processes stop with it")
        raise
    # How many stretches this process has been through is counted in the store: there may be several trainers.
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
    """Within it the first Ctrl-C (SIGINT) ends training after the step at hand, with a checkpoint.

    The second one, more than a second later, interrupts at once, as it does without this. One process of a job that is
    told is enough: all stop after the same step. On another thread than the main one, where Python delivers no signals,
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
        checkpoint = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{interrupt.stopped_at}"
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
                os.write(2, b"\nInterrupted: finishing this step, then saving a checkpoint. Ctrl-C again: at once.\n")
        elif now - self.asked_at > SAME_SECONDS:
            raise KeyboardInterrupt

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked = self.asked_at is not None
        if args.world_size > 1:
            asked = bool(reduce(torch.tensor(float(asked), device=args.device)).item())
        if asked:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True
