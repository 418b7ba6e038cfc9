"""Tables and pictures of a run while it trains, for the trackers of `report_to`.

At every log, [`LiveView`] adds a table of a few trajectories of the latest batch, and under E-SPL a
table of the population and its tree. Training does not depend on them: when a tracker fails, one
warning is logged and it gets no more tables.
"""

from __future__ import annotations

import logging
import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..evolution import Population, lineage_of, plot_lineage
from ..rewards import PromptR1Reward
from ..rewards.qa import is_scorable
from ..rollout import Rollout, question_text, transcript
from .reward_functions import RewardFunction

if TYPE_CHECKING:  # an optional package
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

MAX_TRAJECTORIES = 4
"""Trajectories in the table of a log."""
MAX_MEMBERS = 50
"""Members in the table of a population: the best one and the latest."""
MAX_CELL_CHARS = 4000
"""Maximum length of a cell."""
PICTURE_SECONDS = 30.0
"""Seconds between two pictures of the tree, each of which takes a third of a second to draw."""

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
        stride = max(1, len(rollouts) // MAX_TRAJECTORIES)
        indices = range(0, len(rollouts), stride)[:MAX_TRAJECTORIES]
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
    latest = [member for member in population.members[-MAX_MEMBERS:] if member is not best]
    # One row for each, in the order of `MEMBER_COLUMNS`.
    rows: list[Sequence[Any]] = []
    for member in [best, *reversed(latest)][:MAX_MEMBERS]:
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
    if len(text) > MAX_CELL_CHARS:
        text = f"{text[:MAX_CELL_CHARS]} [... {len(text) - MAX_CELL_CHARS} characters more]"
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
