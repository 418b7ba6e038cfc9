"""The output of a run while it trains: a line per log, and tables for the trackers of `report_to`.

transformers' own callbacks log the numbers. At every log, [`LiveView`] adds a table of a few
trajectories of the latest batch, and under E-SPL a table of the population and its tree. Training
does not depend on them: when a tracker fails, one warning is logged and it gets no more tables.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

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

from ..evolution import Population, lineage_of, plot_lineage
from ..llm.numbers import format_usd
from ..records import RecordFile
from ..rewards import PromptR1Reward
from ..rewards.qa import is_scorable
from ..rollout import Rollout, question_text, transcript
from ..rollout.progress import PrintInterval, ProgressLines, is_watched
from .reward_functions import RewardFunction

if TYPE_CHECKING:  # an optional package
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

# The line of a step, in this order: log key, label, format.
LINE_METRICS = [
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
"""Maximum length of a cell."""
PICTURE_SECONDS = 30.0
"""Seconds between two pictures of the tree, each of which takes a third of a second to draw."""


# --- a line per log ----------------------------------------------------------------------------


def log_line(logs: Mapping[str, float], step: int) -> str:
    """Return the line for one log entry.

    It is empty if there is nothing to show, as in the summary at the end of training. Shares and
    costs of zero are left out, so that the others stand out.
    """
    is_evaluation = any(key.startswith("eval_") for key in logs)
    prefix = "eval_" if is_evaluation else ""
    # Collect the metrics that this log has.
    parts = []
    for key, label, value_format in LINE_METRICS:
        value = logs.get(prefix + key)
        hides_zero = value_format in ("{:.0%}", "$")
        if value is None or (value == 0 and hides_zero):
            continue
        text = f"${format_usd(value)}" if value_format == "$" else value_format.format(value)
        parts.append(f"{label} {text}")
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


# --- trackers ----------------------------------------------------------------------------------

MEMBER_COLUMNS = ["id", "parents", "operator", "born", "mu", "sigma", "matches", "best", "text"]
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MARKDOWN_CHARACTERS = re.compile(r"[^\w\s,;]|_")


@dataclass(frozen=True)
class LoggedTable:
    """A table for a tracker."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    step: int


class TensorBoard:
    """The event file of transformers' callback. It has no tables, so they are Markdown texts."""

    def __init__(self, writer: SummaryWriter):
        self.writer = writer

    def log_table(self, table: LoggedTable) -> None:
        rows: list[Sequence[str]] = [table.columns, ["---"] * len(table.columns)]
        # Escape the cells, because trajectories may contain Markdown.
        for row in table.rows:
            rows.append([_escape_markdown(cell) for cell in row])
        lines = [f"| {' | '.join(row)} |" for row in rows]
        self.writer.add_text(table.name, "\n".join(lines), table.step)

    def log_picture(self, name: str, png: Path, step: int) -> None:
        from matplotlib.image import imread

        self.writer.add_image(name, imread(png)[..., :3], step, dataformats="HWC")


class WandB:
    """The current run of the `wandb` module."""

    def __init__(self, module: ModuleType):
        self.module = module

    def log_table(self, table: LoggedTable) -> None:
        rows = [list(row) for row in table.rows]
        value = self.module.Table(columns=list(table.columns), data=rows)
        self.module.log({table.name: value, "train/global_step": table.step})

    def log_picture(self, name: str, png: Path, step: int) -> None:
        self.module.log({name: self.module.Image(str(png)), "train/global_step": step})


class Trackio(WandB):
    """The current run of the `trackio` module, whose tables are made of data frames."""

    def log_table(self, table: LoggedTable) -> None:
        import pandas

        rows = [list(row) for row in table.rows]
        frame = pandas.DataFrame(rows, columns=list(table.columns))
        value = self.module.Table(dataframe=frame)
        self.module.log({table.name: value, "train/global_step": table.step})


# For each of transformers' callbacks: its name in `report_to`, its attribute that is written to,
# and the adapter.
TRACKERS = {
    "TensorBoardCallback": ("tensorboard", "tb_writer", TensorBoard),
    "WandbCallback": ("wandb", "_wandb", WandB),
    "TrackioCallback": ("trackio", "_trackio", Trackio),
}


class LiveView(TrainerCallback):
    """Logs tables and pictures to the trackers of a run, on the first process only.

    Args:
        report_to (`list[str]`): The run's trackers.
        get_callbacks (`Callable`): Returns the trainer's callbacks, among them those that opened
            the trackers.
        reward_names (`list[str]`): Names of the reward functions.
        reward_functions (`list[Callable]`): The reward functions.
        population ([`Population`], *optional*): Logged as well.
    """

    def __init__(
        self,
        report_to: Sequence[str],
        get_callbacks: Callable[[], Sequence[TrainerCallback]],
        reward_names: Sequence[str],
        reward_functions: Sequence[RewardFunction],
        population: Population | None = None,
    ):
        self.report_to = report_to
        self.get_callbacks = get_callbacks
        self.reward_names = reward_names
        self.reward_functions = reward_functions
        self.population = population
        # The batch since the last log.
        self._batch_mode = ""
        self._batch_rows: list[Sequence[Any]] = []
        self._failed_trackers: set[str] = set()
        self._logged_turns = 0
        # The latest picture of the tree.
        self._drawn_members = 1
        self._drawn_at = -PICTURE_SECONDS

    def show(
        self, mode: str, rollouts: Sequence[Rollout], rewards: Sequence[Sequence[float]]
    ) -> None:
        """Keep a few of this process's rollouts, spread over a batch, for the next log.

        Args:
            mode (`str`): `train` or `eval`.
            rollouts (`Sequence[Rollout]`): The batch.
            rewards (`Sequence[Sequence[float]]`): Their rewards by reward function; NaN where there
                is none.
        """
        if not self.is_wanted():
            return
        # Rollouts at equal distances, not all from the first group.
        stride = max(1, len(rollouts) // TRAJECTORIES)
        indices = range(0, len(rollouts), stride)[:TRAJECTORIES]
        self._batch_mode = mode
        self._batch_rows = [self._trajectory(rollouts[index], rewards[index]) for index in indices]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero or not self.is_wanted():
            return

        # Trajectories of the latest batch.
        rows = self._batch_rows
        self._batch_rows = []
        if rows:
            columns = ["question", "conversation", "answer", "status", *self.reward_names, "parts"]
            self._log_table(
                LoggedTable(f"{self._batch_mode}/trajectories", columns, rows, state.global_step)
            )

        # The population, if it was played since the last log, and at the end.
        is_last = "train_runtime" in (logs or {})
        population = self.population
        if population is not None and (population.turns != self._logged_turns or is_last):
            self._logged_turns = population.turns
            rows = list_members(population)
            self._log_table(
                LoggedTable("evolution/members", MEMBER_COLUMNS, rows, state.global_step)
            )
            self._draw_tree(population, state.global_step, is_last)

    def is_wanted(self) -> bool:
        """Return whether a tracker of the run accepts tables and has not failed."""
        names = {name for name, _, _ in TRACKERS.values()}
        return bool(names & set(self.report_to) - self._failed_trackers)

    def _draw_tree(self, population: Population, step: int, is_last: bool) -> None:
        """Log a picture of the tree if it has grown, but not too often, and at the end."""
        is_too_early = not is_last and time.monotonic() - self._drawn_at < PICTURE_SECONDS
        if len(population.members) == self._drawn_members or is_too_early:
            return
        self._drawn_members = len(population.members)
        self._drawn_at = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            png = Path(folder) / "tree.png"
            try:
                plot_lineage(lineage_of(population), png)
            except Exception as error:  # matplotlib is an extra
                self._give_up("the picture of the tree", error)
                return
            self._log(lambda tracker: tracker.log_picture("evolution/tree", png, step))

    def _log_table(self, table: LoggedTable) -> None:
        self._log(lambda tracker: tracker.log_table(table))

    def _log(self, write: Callable[[TensorBoard | WandB], None]) -> None:
        """Write to the trackers that are open and have not failed."""
        # The attributes exist once the callback has opened its tracker, at the start of training.
        for callback in self.get_callbacks():
            callback_name = type(callback).__name__
            if callback_name not in TRACKERS:
                continue
            name, attribute, tracker_class = TRACKERS[callback_name]
            target = getattr(callback, attribute, None)
            if target is None or name in self._failed_trackers:
                continue
            try:
                write(tracker_class(target))
            except Exception as error:
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        if name not in self._failed_trackers:
            self._failed_trackers.add(name)
            logger.warning("logging to %s failed, training goes on without it: %r", name, error)

    def _trajectory(self, rollout: Rollout, rewards: Sequence[float]) -> Sequence[Any]:
        # A missing reward is an empty cell.
        scores = [None if math.isnan(reward) else round(float(reward), 6) for reward in rewards]
        return [
            _clean_cell(question_text(rollout.row)),
            _clean_cell(transcript(rollout)),
            _clean_cell(str(rollout.answer or "")),
            rollout.status,
            *scores,
            self._reward_parts(rollout),
        ]

    def _reward_parts(self, rollout: Rollout) -> str:
        """Return the parts of rewards that have some, which are Prompt-R1's."""
        parts = []
        for function in self.reward_functions:
            # The function may be guarded: look inside the wrapper.
            reward = unwrap(function) if callable(function) else function
            if isinstance(reward, PromptR1Reward) and is_scorable(rollout):
                score = reward.score(rollout)
                parts += [f"{name} {value:.3f}" for name, value in score._asdict().items()]
        return ", ".join(parts)


def list_members(population: Population) -> list[Sequence[Any]]:
    """Return rows for the best member and the latest ones, newest first."""
    # The best member comes first, even if it is not among the latest.
    best = population.member(population.best())
    latest = [member for member in population.members[-MEMBERS:] if member is not best]
    # One row for each, in the order of `MEMBER_COLUMNS`.
    rows: list[Sequence[Any]] = []
    for member in [best, *reversed(latest)][:MEMBERS]:
        prompt = member.prompt
        rows.append(
            [
                prompt.id,
                ", ".join(str(parent) for parent in prompt.parents),
                prompt.operator,
                prompt.born_at,
                round(member.rating.mu, 4),
                round(member.rating.sigma, 4),
                member.matches,
                "best" if member is best else "",
                _clean_cell(prompt.text),
            ]
        )
    return rows


def _clean_cell(text: str) -> str:
    """Return a text that every tracker can store: short, in UTF-8, without control characters."""
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]} [... {len(text) - MAX_CHARS} characters more]"
    # Lone surrogates have no encoding in UTF-8.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return CONTROL_CHARACTERS.sub("\ufffd", text)


def _escape_markdown(cell: object) -> str:
    """Return a cell without links, pictures to load or new columns in TensorBoard's Markdown."""
    if cell is None:
        return "–"
    if not isinstance(cell, str):
        return str(cell)
    # Replace special characters by HTML entities, and line ends by tags.
    escaped = MARKDOWN_CHARACTERS.sub(lambda match: f"&#{ord(match[0])};", cell)
    return "<br>".join(escaped.splitlines())
