"""The output of a run while it trains: a line per log, and tables for the trackers of `report_to`.

transformers' own callbacks log the numbers; [`LiveView`] adds, at every log, a table of a few trajectories of the
latest batch, and under E-SPL a table of the population and its tree. Training does not depend on them: after the first
failure of a tracker one warning is logged, and it gets no more tables.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import utils as hub
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.utils import logging as transformers_logging

from ..evolution import Population, lineage_of, plot_lineage
from ..records import RecordFile
from ..rollout import Rollout, transcript
from ..rollout.progress import Lines, Seldom, watched

logger = logging.getLogger(__name__)

# The line of a step, in this order: log key, label, format.
_SHOWN = [
    ("reward", "reward", "{:.3f}"),
    ("exact_match", "exact match", "{:.3f}"),
    ("rollout/turns", "turns", "{:.2f}"),
    ("rollout/malformed", "malformed", "{:.0%}"),
    ("rollout/truncated", "truncated", "{:.0%}"),
    ("rollout/failed", "failed", "{:.0%}"),
    ("environment/cost_usd", "cost", "$"),
    ("kl", "kl", "{:.4f}"),
    ("step_time", "step", "{:.1f} s"),
]

TRAJECTORIES = 4
"""Trajectories in the table of a log."""
MEMBERS = 50
"""Members in the table of a population: the best one and the latest."""
MAX_CHARS = 4000
"""Characters of a cell at most."""
PICTURE_SECONDS = 30.0
"""Seconds between two pictures of the tree, each of which takes a third of a second to draw."""


# --- a line per log --------------------------------------------------------------------------------------------------


def log_line(logs: dict[str, Any], step: int) -> str:
    """The line for one log entry; empty if it has nothing to show (the summary at the end of training).

    Shares and costs of zero are left out, so that the others stand out.
    """
    prefix = "eval_" if any(key.startswith("eval_") for key in logs) else ""
    parts = []
    for key, label, form in _SHOWN:
        value = logs.get(prefix + key)
        if value or (value == 0 and form not in ("{:.0%}", "$")):
            parts.append(f"{label} {dollars(value) if form == '$' else form.format(value)}")
    return f"{'evaluation at ' if prefix else ''}step {step}: {', '.join(parts)}" if parts else ""


def dollars(cost: float) -> str:
    """A cost in dollars, with more digits for smaller amounts."""
    return f"${cost:.{4 if cost < 0.001 else 3 if cost < 10 else 2}f}"


def quiet_libraries() -> None:
    """Turn off the bars of datasets, transformers and the hub (maps, weights, downloads) unless a person sees them."""
    if not watched():
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
        hub.disable_progress_bars()


def one_line_progress(trainer: Trainer, what: str = "training steps") -> None:
    """Replace transformers' bars, or the dicts that it prints with `disable_tqdm`, by [`OneLineProgress`]."""
    bars = trainer.pop_callback(ProgressCallback) is not None
    if bars or trainer.pop_callback(PrinterCallback) is not None:
        trainer.add_callback(OneLineProgress(what, bars))


class OneLineProgress(ProgressCallback):
    """transformers' progress bars with [`log_line`] written above them. Every log is still in
    `trainer.state.log_history`.

    In a file or a pipe there are no bars. There the first line is written, then at most one a minute, those of
    evaluations, and the last one. A training without logs (a warm start) counts its steps instead.

    Args:
        what (`str`, *optional*, defaults to `"training steps"`): The unit counted, where there are no bars.
        bars (`bool`, *optional*, defaults to `True`): Whether there may be bars.
    """

    def __init__(self, what: str = "training steps", bars: bool = True):
        super().__init__()
        self.what, self.bars, self._seldom, self._unwritten = what, bars, Seldom(), ""
        self._lines: Lines | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.bars and watched():
            super().on_train_begin(args, state, control, **kwargs)
        elif state.is_world_process_zero:
            self._lines = Lines(state.max_steps, self.what, state.global_step)
        self._seldom, self._unwritten = Seldom(at_once=True), ""

    def on_step_end(self, args, state, control, **kwargs):
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)
        elif self._lines is not None and not state.log_history:
            self._lines.update(state.global_step - self._lines.n)

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.bars and watched():
            super().on_prediction_step(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = log_line(logs or {}, state.global_step)
        if (
            not line
            or not state.is_world_process_zero
            or (self.training_bar is None and self._lines is None)
        ):
            return
        if self._lines is not None:
            self._lines.n = state.global_step
            line += self._lines.left()
        if watched(sys.stdout) or line.startswith("evaluation") or self._seldom.due():
            self._write(line)
        else:
            self._unwritten = line

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


class LogFile(TrainerCallback):
    """Writes each log at once as a line of `log.jsonl`, for curves while a run goes on and however it ends.

    Args:
        folder (`Path`): Where the file goes.
        run (`int`): Tells apart the lines of several runs in one folder.
    """

    def __init__(self, folder: Path, run: int):
        self.file, self.run = RecordFile(folder / "log.jsonl"), run

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with suppress(OSError):  # a full disk; the trainer's state has every log
                self.file.append([{"run": self.run, "step": state.global_step, **(logs or {})}])


# --- tables for trackers ---------------------------------------------------------------------------------------------

_MEMBER_COLUMNS = ["id", "parents", "operator", "born", "mu", "sigma", "matches", "best", "text"]
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MARKDOWN = re.compile(r"[^\w\s,;]|_")


class TensorBoard:
    """The event file that transformers' callback writes. It has no tables, so a table is an escaped Markdown text."""

    def __init__(self, writer: Any):
        self.writer = writer

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence], step: int) -> None:
        lines = [
            columns,
            ["---"] * len(columns),
            *([_escaped(cell) for cell in row] for row in rows),
        ]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def picture(self, name: str, png: Path, step: int) -> None:
        from matplotlib.image import imread

        self.writer.add_image(name, imread(png)[..., :3], step, dataformats="HWC")


class WandB:
    """The current run of the `wandb` module."""

    def __init__(self, module: Any):
        self.module = module

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence], step: int) -> None:
        table = self.module.Table(columns=list(columns), data=[list(row) for row in rows])
        self.module.log({name: table, "train/global_step": step})

    def picture(self, name: str, png: Path, step: int) -> None:
        self.module.log({name: self.module.Image(str(png)), "train/global_step": step})


class Trackio(WandB):
    """The current run of the `trackio` module, whose tables are made of data frames."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence], step: int) -> None:
        import pandas

        frame = pandas.DataFrame([list(row) for row in rows], columns=list(columns))
        self.module.log({name: self.module.Table(dataframe=frame), "train/global_step": step})


# For each callback of transformers: its name in `report_to`, its attribute that is written to, and the adapter.
_TRACKERS = {
    "TensorBoardCallback": ("tensorboard", "tb_writer", TensorBoard),
    "WandbCallback": ("wandb", "_wandb", WandB),
    "TrackioCallback": ("trackio", "_trackio", Trackio),
}


class LiveView(TrainerCallback):
    """Logs tables and pictures to the trackers of a run, on the first process only.

    Args:
        report_to (`list[str]`): The run's trackers.
        callbacks (`Callable`): Returns the trainer's callbacks, among them those that opened the trackers.
        reward_names (`list[str]`), reward_funcs (`list[Callable]`): The reward functions.
        population ([`Population`], *optional*): Logged as well.
    """

    def __init__(
        self,
        report_to: Sequence[str],
        callbacks: Callable[[], Sequence[Any]],
        reward_names: Sequence[str],
        reward_funcs: Sequence[Any],
        population: Population | None = None,
    ):
        self.report_to, self.callbacks = report_to, callbacks
        self.reward_names, self.reward_funcs, self.population = (
            reward_names,
            reward_funcs,
            population,
        )
        self._latest: tuple[str, list[Sequence]] | None = (
            None  # mode and rows of the batch since the last log
        )
        self._broken: set[str] = set()
        self._drawn: tuple[int, float] = (1, -PICTURE_SECONDS)  # members, and when
        self._turns = 0

    def show(
        self, mode: str, rollouts: Sequence[Rollout], rewards: Sequence[Sequence[float]]
    ) -> None:
        """Keep a few of this process's rollouts of a `train` or `eval` batch, spread over it, with their rewards by
        reward function (NaN where it has none)."""
        if self.is_wanted():
            chosen = range(0, len(rollouts), max(1, len(rollouts) // TRAJECTORIES))[:TRAJECTORIES]
            self._latest = mode, [self._row(rollouts[place], rewards[place]) for place in chosen]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not self.is_wanted():
            return
        latest, self._latest = self._latest, None
        if latest is not None and latest[1]:
            columns = ["question", "conversation", "answer", "status", *self.reward_names, "parts"]
            self._send("table", f"{latest[0]}/trajectories", columns, latest[1], state.global_step)
        last = "train_runtime" in (logs or {})
        population = self.population
        if population is not None and (population.turns != self._turns or last):
            self._turns = population.turns
            self._send(
                "table",
                "evolution/members",
                _MEMBER_COLUMNS,
                _members(population),
                state.global_step,
            )
            self._draw(population, state.global_step, last)

    def _draw(self, population: Population, step: int, last: bool) -> None:
        """Send a picture of the tree if it has grown, not too often, and at the end."""
        members, when = self._drawn
        soon = not last and time.monotonic() - when < PICTURE_SECONDS
        if len(population.members) == members or soon:
            return
        self._drawn = len(population.members), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            png = Path(folder) / "tree.png"
            try:
                plot_lineage(lineage_of(population), png)
            except Exception as error:  # matplotlib is an extra
                self._give_up("the picture of the tree", error)
            else:
                self._send("picture", "evolution/tree", png, step)

    def is_wanted(self) -> bool:
        """Whether a tracker of the run accepts tables and has not failed."""
        return bool({name for name, *_ in _TRACKERS.values()} & set(self.report_to) - self._broken)

    def _send(self, what: str, *content: Any) -> None:
        """Send a table or picture to the trackers that transformers' callbacks have opened and that have not failed."""
        for callback in self.callbacks():
            name, attribute, kind = _TRACKERS.get(type(callback).__name__, ("", "", WandB))
            target = getattr(callback, attribute, None) if name else None
            if target is None or name in self._broken:
                continue
            try:
                getattr(kind(target), what)(*content)
            except Exception as error:
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        if name not in self._broken:
            self._broken.add(name)
            logger.warning(
                "%s cannot be logged to any more, training goes on without it: %r", name, error
            )

    def _row(self, rollout: Rollout, rewards: Sequence[float]) -> Sequence:
        texts = [rollout.row.get("question") or "", transcript(rollout), rollout.answer or ""]
        scores = [None if reward != reward else round(float(reward), 6) for reward in rewards]
        return [
            *(_cell(str(text)) for text in texts),
            rollout.status,
            *scores,
            self._parts(rollout),
        ]

    def _parts(self, rollout: Rollout) -> str:
        """The parts of a reward, if its function reports them (`scores`, as Prompt-R1's)."""
        parts = []
        for reward in filter(lambda one: callable(getattr(one, "scores", None)), self.reward_funcs):
            try:
                (score,) = reward.scores([rollout], [rollout.row["answers"]])
                parts += (
                    [f"{name} {value:.3f}" for name, value in score._asdict().items()]
                    if score
                    else []
                )
            except (
                Exception
            ) as error:  # the reward is the user's code, and training does not need these parts
                logger.debug("no parts of %r: %r", reward, error)
        return ", ".join(parts)


def _members(population: Population) -> list[Sequence]:
    """The latest members and the best one, newest first."""
    best = population.best().id
    latest = [m for m in population.members[-MEMBERS:] if m.prompt.id != best]
    rows: list[Sequence] = []
    for member in [population.members[best or 0], *reversed(latest)][:MEMBERS]:
        prompt, rating = member.prompt, member.rating
        descent = [prompt.id, ", ".join(map(str, prompt.parents)), prompt.operator, prompt.born_at]
        ratings = [
            round(rating.mu, 4),
            round(rating.sigma, 4),
            member.matches,
            "best" if prompt.id == best else "",
        ]
        rows.append([*descent, *ratings, _cell(prompt.text)])
    return rows


def _cell(text: str) -> str:
    """The text in a form that every tracker can store: short, in UTF-8, without control characters."""
    cut = (
        text
        if len(text) <= MAX_CHARS
        else f"{text[:MAX_CHARS]} [... {len(text) - MAX_CHARS} characters more]"
    )
    return _CONTROL.sub("\ufffd", cut.encode("utf-8", "replace").decode("utf-8"))


def _escaped(cell: Any) -> str:
    """A cell without effect on TensorBoard's Markdown: no link, no picture to load, no new column."""
    if not isinstance(cell, str):
        return "–" if cell is None else str(cell)
    escaped = _MARKDOWN.sub(lambda found: f"&#{ord(found[0])};", cell)
    return "<br>".join(escaped.splitlines())
