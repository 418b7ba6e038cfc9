"""One readable line per log instead of fifty numbers, and at most one a minute where nobody is watching. Everything is
still in `trainer.state.log_history` and goes to `report_to`."""

from __future__ import annotations

import sys
from typing import Any

import datasets
from huggingface_hub import utils as hub
from transformers import ProgressCallback
from transformers.utils import logging as transformers_logging

from ..rollout.progress import Seldom, progress, watched

# What a person watching wants to know, in this order: log key, label, format.
_SHOWN = [
    ("reward", "reward", "{:.3f}"),
    ("exact_match", "exact match", "{:.3f}"),
    ("rollout/turns", "turns", "{:.2f}"),
    ("rollout/malformed", "malformed", "{:.0%}"),
    ("rollout/truncated", "truncated", "{:.0%}"),
    ("rollout/failed", "failed", "{:.0%}"),
    ("environment/cost_usd", "cost", "${:.2f}"),
    ("kl", "kl", "{:.4f}"),
    ("step_time", "step", "{:.1f} s"),
]


def log_line(logs: dict[str, Any], step: int) -> str:
    """The line for one log entry; empty if it has nothing to show (the summary at the end of training).

    Shares and costs of zero are left out, so that they stand out when they are not.
    """
    prefix = "eval_" if any(key.startswith("eval_") for key in logs) else ""
    parts = []
    for key, label, form in _SHOWN:
        value = logs.get(prefix + key)
        if value is None or (value == 0 and form in ("{:.0%}", "${:.2f}")):
            continue
        parts.append(f"{label} {form.format(value)}")
    return f"{'evaluation at ' if prefix else ''}step {step}: {', '.join(parts)}" if parts else ""


def quiet_libraries() -> None:
    """Where nobody is watching: no bars of datasets, transformers and the hub (maps, weights, downloads)."""
    if not watched():
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
        hub.disable_progress_bars()


class OneLineProgress(ProgressCallback):
    """transformers' progress bars with [`log_line`] written above them.

    In a file or a pipe there are no bars, and of the lines the first, then at most one a minute, those of evaluations
    and the last. What has no logs (a warm start) counts its steps instead.

    Args:
        what (`str`, *optional*, defaults to `"training steps"`): What is counted where there are no bars.
    """

    def __init__(self, what: str = "training steps"):
        super().__init__()
        self.what, self._lines, self._seldom, self._unwritten = what, None, Seldom(), ""

    def on_train_begin(self, args, state, control, **kwargs):
        if watched():
            super().on_train_begin(args, state, control, **kwargs)
        elif state.is_world_process_zero:
            self._lines = progress(state.max_steps, self.what, state.global_step)
        self._seldom, self._unwritten = Seldom(at_once=True), ""

    def on_step_end(self, args, state, control, **kwargs):
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)
        elif self._lines is not None and not state.log_history:
            self._lines.update(state.global_step - self._lines.n)

    def on_prediction_step(self, args, state, control, **kwargs):
        if watched():
            super().on_prediction_step(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = log_line(logs or {}, state.global_step)
        if not (line and state.is_world_process_zero and self._shows()):
            return
        if watched(sys.stdout) or line.startswith("evaluation") or self._seldom.due():
            self._write(line)
        else:
            self._unwritten = line

    def _shows(self) -> bool:
        return self.training_bar is not None or self._lines is not None

    def _write(self, line: str) -> None:
        self._unwritten = ""
        if self.training_bar is not None:
            self.training_bar.write(line)
        else:
            print(line, flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self._unwritten:
            self._write(self._unwritten)
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)
        self._lines = None
