"""The progress of a run: a line per log, on the terminal and in `log.jsonl`.

transformers' own callbacks log the numbers, and draw the bars that a person sees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import datasets
from huggingface_hub import utils as hub_utils
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from ..llm.numbers import format_usd
from ..records import RecordFile
from ..rollout.progress import PrintInterval, ProgressLines, is_watched


@dataclass(frozen=True)
class LineMetric:
    """A metric in the line of a log.

    Args:
        key (`str`): Its name in the log.
        label (`str`): Its name in the line.
        format (`Callable`): Returns its value as text.
        shows_zero (`bool`, *optional*, defaults to `True`): Whether it is shown if it is 0. Shares
            and costs are not, so that the others stand out.
    """

    key: str
    label: str
    format: Callable[[float], str]
    shows_zero: bool = True


# The line of a step, in this order.
LINE_METRICS = [
    LineMetric("reward", "reward", "{:.3f}".format),
    LineMetric("exact_match", "exact match", "{:.3f}".format),
    LineMetric("rollout/turns", "turns", "{:.2f}".format),
    LineMetric("rollout/malformed", "malformed", "{:.0%}".format, shows_zero=False),
    LineMetric("rollout/truncated", "truncated", "{:.0%}".format, shows_zero=False),
    LineMetric("rollout/failed", "failed", "{:.0%}".format, shows_zero=False),
    LineMetric("environment/cost_usd", "cost", lambda usd: f"${format_usd(usd)}", shows_zero=False),
    LineMetric("kl", "kl", "{:.4f}".format),
    LineMetric("step_time", "step", "{:.1f} s".format),
]


def log_line(logs: Mapping[str, float], step: int) -> str:
    """Return the line for one log entry.

    It is empty if there is nothing to show, as in the summary at the end of training.
    """
    is_evaluation = any(key.startswith("eval_") for key in logs)
    prefix = "eval_" if is_evaluation else ""
    # Collect the metrics that this log has.
    parts = []
    for metric in LINE_METRICS:
        value = logs.get(prefix + metric.key)
        if value is None or (value == 0 and not metric.shows_zero):
            continue
        parts.append(f"{metric.label} {metric.format(value)}")
    if not parts:
        return ""
    start = "evaluation at " if is_evaluation else ""
    return f"{start}step {step}: {', '.join(parts)}"


def hide_library_bars() -> None:
    """Turn off the bars of datasets, transformers and the Hub unless a person sees them."""
    if not is_watched():
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
        hub_utils.disable_progress_bars()


def use_one_line_progress(trainer: Trainer, unit: str = "training steps") -> None:
    """Replace transformers' progress output by [`OneLineProgress`].

    That is a bar, or with `disable_tqdm` a printed dict per log. Without either nothing is added.
    """
    # Which of the two callbacks there is depends on `disable_tqdm`.
    has_bars = trainer.pop_callback(ProgressCallback) is not None
    has_printer = trainer.pop_callback(PrinterCallback) is not None
    if has_bars or has_printer:
        trainer.add_callback(OneLineProgress(unit, has_bars))


class OneLineProgress(ProgressCallback):
    """transformers' progress bars with [`log_line`] written above them.

    Every log is still in `trainer.state.log_history`. In a file or a pipe there are no bars. There
    the first line is written, then at most one a minute, those of evaluations, and the last one. A
    training without logs (a warm start) counts its steps instead.

    Args:
        unit (`str`, *optional*, defaults to `"training steps"`): The unit counted if there are no
            bars.
        has_bars (`bool`, *optional*, defaults to `True`): Whether there may be bars.
    """

    def __init__(self, unit: str = "training steps", has_bars: bool = True):
        super().__init__()
        self.unit = unit
        self.has_bars = has_bars
        self._print_interval = PrintInterval()
        self._unwritten = ""
        self._lines: ProgressLines | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        # A person sees a bar; a file or a pipe gets lines, from the first process.
        if self.has_bars and is_watched():
            super().on_train_begin(args, state, control, **kwargs)
        elif state.is_world_process_zero:
            # Steps follow each other, so the first ones tell the pace.
            self._lines = ProgressLines(
                state.max_steps, self.unit, state.global_step, share_before_estimate=0.0
            )
        self._print_interval = PrintInterval(at_once=True)
        self._unwritten = ""
        # A resumed run says where it goes on.
        if state.global_step and state.is_world_process_zero:
            self._write(f"resuming after step {state.global_step} of {state.max_steps}")
            if state.global_step >= state.max_steps:
                self._write("nothing is left to train: raise max_steps (or num_train_epochs)")

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)
        # A training without logs, such as a warm start, counts its steps.
        elif self._lines is not None and not state.log_history:
            self._lines.update(state.global_step - self._lines.n)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if self.has_bars and is_watched():
            super().on_prediction_step(args, state, control, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        line = log_line(logs or {}, state.global_step)
        # The first process writes, during training, and if there is something to show.
        is_training = self.training_bar is not None or self._lines is not None
        if not line or not state.is_world_process_zero or not is_training:
            return

        # In a file, most lines are held back; the latest of them is written at the end.
        if self._lines is not None:
            self._lines.n = state.global_step
            line += self._lines.time_left()
        if is_watched(sys.stdout) or line.startswith("evaluation") or self._print_interval.is_due():
            self._write(line)
        else:
            self._unwritten = line

    def _write(self, line: str) -> None:
        self._unwritten = ""
        if self.training_bar is not None:
            self.training_bar.write(line)
        else:
            print(line, flush=True)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        # The last line is always written, even if it was held back.
        if self._unwritten:
            self._write(self._unwritten)
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)
        self._lines = None


class LogFile(TrainerCallback):
    """Writes each log at once as a line of `log.jsonl`, for curves of a run that still goes on.

    Args:
        folder (`Path`): Where the file goes.
        run_id (`int`): Distinguishes the lines of several runs in one folder.
    """

    def __init__(self, folder: Path, run_id: int):
        self.file = RecordFile(folder / "log.jsonl")
        self.run_id = run_id

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if state.is_world_process_zero:
            with suppress(OSError):  # a full disk; the trainer's state has every log
                self.file.append([{"run": self.run_id, "step": state.global_step, **(logs or {})}])
