"""Pictures of a training run, from the trainer's log history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What is drawn, top to bottom: title of the panel, and the log keys in it with their labels.
_PANELS = [
    ("mean reward", {"reward": "reward"}),
    ("exact match", {"exact_match": "exact match of training rollouts"}),
    ("turns", {"rollout/turns": "turns per rollout"}),
    (
        "share of rollouts",
        {
            "rollout/answered": "answered",
            "rollout/out_of_turns": "out of turns",
            "rollout/truncated": "truncated",
            "rollout/malformed": "malformed",
            "rollout/failed": "failed",
        },
    ),
]


def plot_reward(log_history: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw reward, exact match, turns and outcomes over the training steps.

    Args:
        log_history (`Sequence[Mapping]`): `trainer.state.log_history`.
        path (`str` or `Path`): The PNG to write.
        title (`str`, *optional*): Above the panels.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'agentic-prompting[report]'") from error
    panels = [panel for panel in _PANELS if any(key in entry for key in panel[1] for entry in log_history)]
    if not panels:
        return
    figure = Figure(figsize=(7, 2.1 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (label, keys) in zip(axes, panels, strict=True):
        for key, name in keys.items():
            points = [(entry["step"], entry[key]) for entry in log_history if entry.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, linewidth=1.5)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if len(keys) > 1:
            axis.legend(fontsize="small", ncols=3)
    axes[-1].set_xlabel("training step")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
