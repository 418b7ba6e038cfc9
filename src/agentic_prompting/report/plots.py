"""Pictures and tables of a run: curves over the training steps, and what ProRefine's paper shows of its results.

Curves are drawn from the trainer's log history or from [`history_of`] its records; accuracy is laid out as in
ProRefine's Table 1, iterations as in its Figure 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..evaluation import Estimate, bootstrap_interval, wilson_interval
from ..evolution.lineage import LINES, figure_class
from ..refine import RefinementResult
from ..rewards.reasoning import Scorer
from ..rollout import STATUSES

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
        {f"rollout/{status}": status.replace("_", " ") for status in STATUSES},
    ),
    Panel("cost", "cost (US dollars)", {"environment/cost_usd": "spent on the large LLM"}),
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
"""What is drawn, top to bottom. The page draws the same ones. The first five are of the rollouts, the others of the
trainer's log."""

OPTIMISATION = tuple(key for panel in PANELS[5:] for key in panel.keys)
"""What the trainer's log is read for."""


def panels_in(log: Log) -> list[Panel]:
    """The panels that this log has something for."""
    return [
        panel
        for panel in PANELS
        if any(entry.get(key) is not None for key in panel.keys for entry in log)
    ]


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
    panels = [
        panel
        for panel in panels_in(log_history)
        if panel.name in ("reward", "exact_match", "turns", "outcomes")
    ]
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
                axis.plot(
                    *zip(*points, strict=True),
                    label=label,
                    linewidth=1.6,
                    color=colour,
                    dashes=dashes,
                )
        axis.set_ylabel(panel.title)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if len(panel.keys) > 1:
            axis.legend(fontsize="small", ncols=3)
    axes[-1].set_xlabel("training step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


# --- ProRefine -------------------------------------------------------------------------------------------------------


def accuracy_of(
    results: Sequence[RefinementResult],
    rows: Sequence[Mapping[str, Any]],
    score: Scorer,
    threshold: float = 1.0,
) -> Estimate:
    """Share of right answers with its 95 % Wilson interval. Failed queries are left out.

    Args:
        results (`Sequence[RefinementResult]`): What [`ProRefiner.refine_all`] returned.
        rows (`Sequence[Mapping]`): The rows it was given, with `answers`.
        score (`Callable[[str, Sequence[str]], float]`): Such as [`integer_match`].
        threshold (`float`, *optional*, defaults to `1.0`): The least score that is right.

    Raises:
        `ValueError`: If every query failed.
    """
    answered = [
        (result, row) for result, row in zip(results, rows, strict=True) if result.error is None
    ]
    right = sum(score(result.answer, row["answers"]) >= threshold for result, row in answered)
    return wilson_interval(right, len(answered))


def accuracy_table(accuracy: Mapping[str, Mapping[str, Mapping[str, Estimate]]]) -> str:
    """Accuracy as a Markdown table laid out like the paper's Table 1.

    Args:
        accuracy (`Mapping`): By data set, method and task model, in the order to be shown.
    """
    models = list(
        dict.fromkeys(
            model for methods in accuracy.values() for row in methods.values() for model in row
        )
    )
    lines = [f"| data set | method | {' | '.join(models)} |", "|---" * (2 + len(models)) + "|"]
    for name, methods in accuracy.items():
        for method, row in methods.items():
            cells = [
                f"{e.mean:.3f} [{e.low:.3f}, {e.high:.3f}]" if (e := row.get(model)) else "–"
                for model in models
            ]
            lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def iterations_of(results: Sequence[RefinementResult]) -> Estimate:
    """Mean number of refinement steps a query, with its 95 % bootstrap interval; 0 where the first answer was taken."""
    return bootstrap_interval([len(result.steps) for result in results])


def plot_iterations(
    results: Mapping[str, Mapping[str, Sequence[RefinementResult]]],
    path: str | Path,
    title: str = "",
) -> None:
    """Draw the mean number of refinement iterations, as in the paper's Figure 4.

    Args:
        results (`Mapping`): Results by data set and method.
        path (`str` or `Path`): The PNG to write, with its folders.
        title (`str`, *optional*): Above the bars.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    methods = list(dict.fromkeys(method for by_method in results.values() for method in by_method))
    figure = figure_class()(figsize=(1.5 + 2.2 * len(results), 3.2), layout="constrained")
    axis, width = figure.subplots(), 0.8 / max(1, len(methods))
    for number, method in enumerate(methods):
        found = {
            i: iterations_of(by[method]) for i, by in enumerate(results.values()) if by.get(method)
        }
        places = [i + (number - (len(methods) - 1) / 2) * width for i in found]
        ends = [[e.mean - e.low for e in found.values()], [e.high - e.mean for e in found.values()]]
        look: dict[str, Any] = {
            "color": LINES[number % len(LINES)][0],
            "error_kw": {"linewidth": 1},
        }
        bars = axis.bar(
            places, [e.mean for e in found.values()], 0.92 * width, yerr=ends, label=method, **look
        )
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize="small")
    axis.set_xticks(range(len(results)), list(results))
    axis.set(ylabel="mean refinement iterations", axisbelow=True)
    axis.set_title(title, fontsize="medium")
    axis.margins(y=0.15)
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(methods), fontsize="small", frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
