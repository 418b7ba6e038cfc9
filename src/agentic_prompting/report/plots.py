"""Curves over the training steps, as pictures: from the trainer's log history or from
[`history_of`] its records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..evolution.lineage import LINES, figure_class
from ..rollout import STATUSES

Log = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """One picture: a name (of its file), a title, and the log keys in it with their labels."""

    name: str
    title: str
    keys: dict[str, str]


ROLLOUT_PANELS = (
    Panel("reward", "mean reward", {"reward": "reward"}),
    Panel("exact_match", "exact match", {"exact_match": "exact match of training rollouts"}),
    Panel("turns", "turns", {"rollout/turns": "turns per rollout"}),
    Panel(
        "outcomes",
        "share of rollouts",
        {f"rollout/{status}": status.replace("_", " ") for status in STATUSES},
    ),
    Panel("groups", "share of groups with a gradient", {"groups/with_gradient": "rewards differ"}),
    Panel(
        "diversity",
        "diversity within a group",
        {"groups/diversity": "word pairs that another rollout has not"},
    ),
    Panel("cost", "cost (US dollars)", {"environment/cost_usd": "spent on the large LLM"}),
)
"""The curves of the rollouts."""

OPTIMISATION_PANELS = (
    Panel("loss", "loss", {"loss": "loss"}),
    Panel("kl", "KL divergence", {"kl": "from the reference policy, nats a token"}),
    Panel("grad_norm", "gradient norm", {"grad_norm": "before clipping"}),
    Panel("entropy", "entropy", {"entropy": "of the policy, nats a token"}),
    Panel("learning_rate", "learning rate", {"learning_rate": "learning rate"}),
    Panel(
        "token_age",
        "age of tokens (updates)",
        {"async/token_age": "mean", "async/token_age_max": "of the oldest"},
    ),
)
"""The curves of the trainer's log."""

EVOLUTION_PANELS = (
    Panel(
        "evolution_reward",
        "mean reward of the prompts",
        {"evolution/reward": "on the rows of the step", "evolution/held_out": "held out, the best"},
    ),
)
"""The curves of the state of `evolve`."""

PANELS = (*ROLLOUT_PANELS, *OPTIMISATION_PANELS, *EVOLUTION_PANELS)
"""All panels, top to bottom. The page draws the same ones."""

OPTIMISATION = tuple(key for panel in OPTIMISATION_PANELS for key in panel.keys)
"""The curves that are read from the trainer's log."""


def panels_in(log: Log) -> list[Panel]:
    """The panels that this log has something for."""
    # The keys that have a value in any entry.
    keys: set[str] = set()
    for entry in log:
        keys |= {key for key, value in entry.items() if value is not None}
    return [panel for panel in PANELS if keys & panel.keys.keys()]


def plot_reward(log_history: Log, path: str | Path, title: str = "") -> None:
    """Draw reward, exact match, turns and outcomes over the training steps, one below the other.

    Args:
        log_history (`Sequence[Mapping]`): `trainer.state.log_history`, or what [`history_of`]
            returns.
        path (`str` or `Path`): The PNG to write.
        title (`str`, *optional*): Above the panels.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    # In the trainer's log the cost is that of one step: its curve says little.
    names = ("reward", "exact_match", "turns", "outcomes")
    panels = [panel for panel in panels_in(log_history) if panel.name in names]
    if panels:
        _draw(log_history, panels, path, title)


def plot_panels(history: Log, folder: str | Path) -> list[Path]:
    """Draw each panel into a PNG of its own, `<name>.png` in `folder`. Returns the files."""
    # A panel without values gets no file.
    files = []
    for panel in panels_in(history):
        file = Path(folder) / f"{panel.name}.png"
        _draw(history, [panel], file, "")
        files.append(file)
    return files


def constant_limits(value: float) -> tuple[float, float]:
    """Limits of an axis for a curve that is always at one value: from 0, so that it is seen how
    large the value is.
    """
    # A constant of 0 needs an axis with some height.
    if value == 0:
        return 0.0, 1.0
    return min(0.0, 2 * value), max(0.0, 2 * value)


def _draw(log: Log, panels: Sequence[Panel], path: str | Path, title: str) -> None:
    figure = figure_class()(figsize=(7, max(3.0, 2.1 * len(panels))), layout="constrained")
    # One panel below the other, with the steps in common.
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        panel_values = []
        for (key, label), (colour, dashes) in zip(panel.keys.items(), LINES, strict=False):
            # Entries without this key leave no gap in the line.
            entries = [entry for entry in log if entry.get(key) is not None]
            steps = [entry["step"] for entry in entries]
            values = [entry[key] for entry in entries]
            panel_values += values
            if values:
                axis.plot(steps, values, label=label, linewidth=1.6, color=colour, dashes=dashes)
        # An automatic axis would magnify the noise of a constant.
        if min(panel_values) == max(panel_values):
            axis.set_ylim(constant_limits(panel_values[0]))
        # Label the panel; a legend only where there are several curves.
        axis.set_ylabel(panel.title)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if len(panel.keys) > 1:
            axis.legend(fontsize="small", ncols=3)
    # The steps, as whole numbers, below the last panel.
    axes[-1].set_xlabel("training step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
