"""Pictures of a training run as PNG files, from the trainer's log history or from [`history_of`] its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..evolution.plotting import LINES, figure_class

Log = Sequence[Mapping[str, Any]]


class Panel(NamedTuple):
    """One picture: a name (of its file), a title, and the log keys in it with their labels."""

    name: str
    title: str
    keys: dict[str, str]


PANELS = (
    Panel("reward", "mean reward", {"reward": "reward"}),
    Panel("exact_match", "exact match", {"exact_match": "exact match of training rollouts"}),
    Panel("turns", "turns", {"rollout/turns": "turns per rollout"}),
    Panel(
        "outcomes",
        "share of rollouts",
        {
            "rollout/answered": "answered",
            "rollout/out_of_turns": "out of turns",
            "rollout/truncated": "truncated",
            "rollout/malformed": "malformed",
            "rollout/failed": "failed",
        },
    ),
    Panel("cost", "cost (US dollars)", {"environment/cost_usd": "spent on the large LLM"}),
)
"""What is drawn, top to bottom. The page draws the same ones."""


def panels_in(log: Log) -> list[Panel]:
    """The panels that this log has something for."""
    return [panel for panel in PANELS if any(entry.get(key) is not None for key in panel.keys for entry in log)]


def plot_reward(log_history: Log, path: str | Path, title: str = "") -> None:
    """Draw reward, exact match, turns and outcomes over the training steps, one below the other.

    Args:
        log_history (`Sequence[Mapping]`): `trainer.state.log_history`, or what [`history_of`] returns.
        path (`str` or `Path`): The PNG to write.
        title (`str`, *optional*): Above the panels.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    # In the trainer's log the cost is that of one step, which is no curve to look at.
    panels = [panel for panel in panels_in(log_history) if panel.name != "cost"]
    if panels:
        _draw(log_history, panels, path, title)


def plot_panels(history: Log, folder: str | Path) -> list[Path]:
    """Draw each panel into a PNG of its own, `<name>.png` in `folder`. Returns what was written."""
    written = []
    for panel in panels_in(history):
        written.append(Path(folder) / f"{panel.name}.png")
        _draw(history, [panel], written[-1], "")
    return written


def _draw(log: Log, panels: Sequence[Panel], path: str | Path, title: str) -> None:
    figure = figure_class()(figsize=(7, max(3.0, 2.1 * len(panels))), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        for (key, label), (colour, dashes) in zip(panel.keys.items(), LINES, strict=False):
            points = [(entry["step"], entry[key]) for entry in log if entry.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=label, linewidth=1.6, color=colour, dashes=dashes)
        axis.set_ylabel(panel.title)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if len(panel.keys) > 1:
            axis.legend(fontsize="small", ncols=3)
    axes[-1].set_xlabel("training step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
