"""The papers' figures from tables and runs: bars with intervals, training curves overlaid, one case
across methods.

    python benchmarks/paper_tables/figures.py --output runs/figure6 \\
        --runs GPT-4o-mini=runs/qwen3_4b GPT-OSS-20B=runs/qwen3_4b_gpt_oss_20b     # Prompt-R1, Figure 6 (a-b)

Bars are drawn by `agentic-prompting evaluate` where a table's configuration has `figures`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentic_prompting.evaluation import Estimate, Evaluation, find_metrics, score_records
from agentic_prompting.evaluation.answer_records import row_index_of
from agentic_prompting.evolution.lineage import LINES, figure_class

if TYPE_CHECKING:
    from .config import TableConfig
    from .run import TableRun

CURVES = {"reward": "mean reward", "rollout/turns": "turns per rollout"}
"""What a training's log is drawn by: key and label."""
_HATCHES = ("", "//", "..", "xx")  # after all colours have been used


def draw_figures(run: TableRun, config: TableConfig, folder: Path) -> None:
    """Draw a configuration's `figures` into `folder`; `left_out` gets the reason for each figure
    that is not drawn.

    Each has the `metric` of its bars: a name, `first` (each task's first one), `wald` (the same
    with Wald's interval), or a `dict` by task; and where not all of them are shown `tasks` and
    `systems`.
    """
    for name, figure in config.figures.items():
        bars = bars_of(run.evaluation, config, figure)
        try:
            if not bars:
                raise ValueError("no system and task of it has such a score")
            run.files[name] = draw_bars(bars, folder / f"{name}.png", figure.get("title", name))
            drawn_tasks = {task.partition(" (")[0] for task in bars}
            missing = [task for task in figure.get("tasks", ()) if task not in drawn_tasks]
            if missing:
                run.left_out[f"{name}, {', '.join(missing)}"] = "no such score there"
        except (ImportError, ValueError) as error:
            run.left_out[name] = f"not drawn: {error}"


def bars_of(
    evaluation: Evaluation, config: TableConfig, figure: Mapping[str, Any]
) -> dict[str, dict[str, Estimate]]:
    """The estimates of a figure, by task and system."""
    from .estimates import wald_of  # here: as a script this file is in no package

    bars: dict[str, dict[str, Estimate]] = {}
    tasks = figure.get("tasks")
    systems = figure.get("systems")
    metric = figure.get("metric", "first")
    for result in evaluation.results:
        # A task is named without its stand-in, a system with its model or without.
        task = result.task.partition(" (")[0]
        base = result.system.partition(",")[0]
        if tasks and task not in tasks:
            continue
        if systems is not None and base not in systems and result.system not in systems:
            continue

        name = metric
        if isinstance(metric, Mapping):
            name = metric.get(task, metric.get("default"))
        if name == "wald":
            estimate = wald_of(result)
        elif name == "first":
            estimate = next(iter(result.estimates.values()), None)
        else:
            estimate = result.estimates.get(name)
        if estimate is not None:
            bars.setdefault(result.task, {})[result.system] = estimate
    return bars


def draw_bars(bars: Mapping[str, Mapping[str, Estimate]], path: Path, title: str = "") -> Path:
    """A group of bars for each task, one for each system, with intervals.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    systems = list(dict.fromkeys(chain.from_iterable(bars.values())))
    figure = figure_class()(
        figsize=(2 + max(2.0, 0.16 * len(systems)) * len(bars), 4), layout="constrained"
    )
    axis = figure.subplots()
    width = 0.85 / len(systems)
    for number, system in enumerate(systems):
        estimates = [
            (position, by_system[system])
            for position, by_system in enumerate(bars.values())
            if system in by_system
        ]
        means = [estimate.mean for _, estimate in estimates]
        spread = [
            [estimate.mean - estimate.low for _, estimate in estimates],
            [estimate.high - estimate.mean for _, estimate in estimates],
        ]
        colour, _ = LINES[number % len(LINES)]
        hatch = _HATCHES[number // len(LINES) % len(_HATCHES)]
        offset = (number - (len(systems) - 1) / 2) * width
        axis.bar(
            [position + offset for position, _ in estimates],
            means,
            0.92 * width,
            yerr=spread,
            color=colour,
            hatch=hatch,
            label=system,
            error_kw={"linewidth": 0.8},
        )
    axis.set_xticks(
        range(len(bars)), [task.replace(" (", "\n(") for task in bars], fontsize="x-small"
    )
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        loc="outside lower center", ncols=min(4, len(systems)), fontsize="x-small", frameon=False
    )
    axis.set_title(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def draw_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Path:
    """Reward and turns of several trainings over their steps, one line each (Prompt-R1, Figure 6
    a-b).

    Args:
        runs (`dict`): Logs by the training's name, as in `trainer.state.log_history`.
        path (`Path`): The PNG to write.

    Raises:
        `ValueError`: A log has none of the curves.
    """
    figure = figure_class()(figsize=(9, 3.2), layout="constrained")
    for axis, (key, label) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        for (name, log), (colour, dashes) in zip(
            runs.items(), LINES * (1 + len(runs)), strict=False
        ):
            points = [(entry["step"], entry[key]) for entry in log if entry.get(key) is not None]
            if not points:
                raise ValueError(f"the log of {name} has no {key}")
            axis.plot(*zip(*points, strict=True), label=name, color=colour, dashes=dashes)
        axis.set_xlabel("training step")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def write_case(evaluation: Evaluation, system: str, path: Path) -> Path:
    """One question across methods, answers and scores (Prompt-R1, Figure 9): of those that `system`
    answers right, the one that the fewest others do.
    """
    metrics = find_metrics(["exact_match", "token_f1"])
    records = [record for record in evaluation.records if record["run"] == 0]
    scores = score_records(records, metrics)

    # By question: the number of each system's record.
    cases: dict[tuple[str, int], dict[str, int]] = {}
    for number, record in enumerate(records):
        cases.setdefault((record["task"], row_index_of(record)), {})[record["system"]] = number

    def worth(case: Mapping[str, int]) -> tuple[float, float]:
        matches = {name: scores["exact_match"][number] or 0.0 for name, number in case.items()}
        return matches[system], -sum(match for name, match in matches.items() if name != system)

    case = max((case for case in cases.values() if system in case), key=worth)
    row = records[case[system]]
    lines = [
        f"# A case of {row['task']}",
        "",
        f"Question: {row['question']}",
        "",
        f"Accepted: {row['answers']}",
        "",
    ]
    for name, number in case.items():
        record = records[number]
        em = scores["exact_match"][number]
        f1 = scores["token_f1"][number]
        if em is None or f1 is None:
            score_text = "no score"
        else:
            score_text = f"exact match {em:.2f}, F1 {f1:.2f}"
        quoted = [f"> {line}" for line in _answer_text(record).splitlines()]
        lines += [f"## {name}: {score_text}", "", *quoted, ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _answer_text(record: Mapping[str, Any]) -> str:
    """The whole answer as text: an agent's conversation, or a model's reply."""
    trajectory = record.get("trajectory")
    if isinstance(trajectory, Mapping) and "turns" in trajectory:
        turns = [turn["text"] for turn in trajectory["turns"]]
        replies = [
            f"[reply] {observation['text']}" for observation in trajectory.get("observations", [])
        ]
        texts = chain.from_iterable(zip(turns, [*replies, ""], strict=False))
        return "\n".join(text for text in texts if text)
    return str(record.get("whole") or record.get("answer") or record.get("error") or "(no answer)")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: curves of several trainings overlaid."""
    parser = argparse.ArgumentParser(
        description="Reward and turns of several trainings (Prompt-R1, Figure 6 a-b)."
    )
    parser.add_argument(
        "--runs", nargs="+", required=True, metavar="NAME=FOLDER", help="trainings, by name"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/figure6"), help="folder for the picture"
    )
    options = parser.parse_args(arguments)
    logs = {}
    for name, _, folder in (run.partition("=") for run in options.runs):
        states = sorted(
            Path(folder).rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime
        )
        if not states:
            raise SystemExit(
                f"{folder} has no trainer_state.json: train with save_steps, or "
                "trainer.save_state()"
            )
        logs[name] = json.loads(states[-1].read_text(encoding="utf-8"))["log_history"]
    print(draw_curves(logs, options.output / "training.png"))


if __name__ == "__main__":
    main()
