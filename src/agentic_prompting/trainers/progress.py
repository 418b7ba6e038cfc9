"""One readable line per log instead of fifty numbers. Everything is still in `trainer.state.log_history` and goes to
`report_to`."""

from __future__ import annotations

from typing import Any

from transformers import ProgressCallback

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


class OneLineProgress(ProgressCallback):
    """transformers' progress bar with [`log_line`] written above it."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            line = log_line(logs or {}, state.global_step)
            if line:
                self.training_bar.write(line)
