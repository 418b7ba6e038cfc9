"""The parts that the sandbox's benchmarks share: settings, training, held-out questions, intervals,
tables, records.

Importing this module needs no torch, so that `recompute.py` stays fast: what needs it is imported
in the functions.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.paper_tables.estimates import seed_interval

if TYPE_CHECKING:
    from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
    from agentic_prompting.rollout import Rollout
    from agentic_prompting.sandbox.setup import SandboxRun

REPOSITORY = Path(__file__).parents[1]
RECORDS = REPOSITORY / "records"
DEMO = REPOSITORY / "examples" / "configs" / "sandbox.yaml"  # Prompt-R1 in the sandbox
ESPL = REPOSITORY / "examples" / "configs" / "espl" / "sandbox.yaml"
# Steps of the protocol, whose records began with them; the demonstration itself ends sooner.
DEMO_STEPS = 40
# Keys of a configuration that its program reads; the others are the trainer's.
PROGRAM_KEYS = ("sandbox", "task", "share_replies")
# Rollouts that are sampled at once when questions are asked.
BATCH = 256


# --- training and asking --------------------------------------------------------------------------


def settings(config: Path, **changes: Any) -> dict[str, Any]:
    """A configuration's training options, without progress bar and rollout log.

    Args:
        config (`Path`): A YAML file of `examples/configs`.
        **changes: Options that differ from the file's.
    """
    import yaml

    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    options = {name: value for name, value in values.items() if name not in PROGRAM_KEYS}
    return {**options, "disable_tqdm": True, "rollouts_max_mb": 0, **changes}


def train(
    trainer_class: type[MultiTurnGRPOTrainer],
    args: MultiTurnGRPOConfig,
    sandbox: SandboxRun,
    environment: Any,
    before: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:
    """A trainer that has trained on a sandbox's questions, from its warm start, without printing.

    Args:
        trainer_class (`type`): The trainer's class.
        args (`MultiTurnGRPOConfig`): Its settings, see [`settings`].
        sandbox: As [`prepare_sandbox`] or [`prepare_guarded`] returns it.
        environment: The environment of the episodes; `None` for an agent that asks nothing.
        before (`Callable`, *optional*): Called with the trainer before it trains, to add callbacks
            for example.
        **options: Further arguments of the trainer; `model` replaces the warm start.
    """
    arguments = {
        "model": str(sandbox.model),
        "train_dataset": sandbox.train,
        "prompt_template": sandbox.spec.prompt_template,
        **options,
    }
    trainer = trainer_class(args=args, environment=environment, **arguments)
    if before is not None:
        before(trainer)
    # With its progress bar off, transformers prints every log entry.
    with redirect_stdout(io.StringIO()):
        trainer.train()
    return trainer


def ask(
    model: Path, environment: Any, rows: Iterable[Any], seed: int = 0, **changes: Any
) -> list[Rollout]:
    """The rollouts of a saved agent that answers some questions.

    Args:
        model (`Path`): The agent's folder.
        environment: As in [`train`].
        rows (`Iterable`): Questions with their answers, one row each.
        seed (`int`, *optional*, defaults to `0`): The same seed gives the same rollouts.
        **changes: Fields of the agent's [`AgentSpec`] that differ from the saved ones.
    """
    from agentic_prompting import PromptAgent
    from agentic_prompting.rollout import AgentSpec

    spec = replace(AgentSpec.load(model), **changes)
    agent = PromptAgent.from_pretrained(model, environment, spec, max_batch_size=BATCH)
    return agent.answer_all(list(rows), seed=seed, progress=False)


def correct(rollouts: Iterable[Rollout]) -> str:
    """`1` for each rollout whose answer matches its row exactly, `0` for each other: `"0110"`."""
    from agentic_prompting.rewards import exact_match

    scores = [exact_match(rollout.answer or "", rollout.row["answers"]) for rollout in rollouts]
    return "".join(str(int(score)) for score in scores)


def model_folder(name: str) -> str:
    """What `from_pretrained` takes for a model: a folder, a name on the Hub, or `smollm2`, the
    package's model.
    """
    if name != "smollm2":
        return name
    from agentic_prompting.local import small_model

    return str(small_model())


def quiet() -> None:
    """Silence the libraries' warnings and progress bars for the rest of the process."""
    import datasets
    import transformers

    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def log(line: str) -> None:
    """Print a line to standard error at once; standard output is for results."""
    print(line, file=sys.stderr, flush=True)


# --- figures --------------------------------------------------------------------------------------


def share(correct: str) -> float:
    """The share of right answers: .5 for `"0110"`."""
    return correct.count("1") / len(correct)


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """`mean`, `low` and `high`: the mean over seeds and its 95 % interval by Student's t.

    One value has no interval: `low` and `high` are `None`.
    """
    if len(values) < 2:
        return {"mean": round(values[0], 4), "low": None, "high": None}
    estimate = seed_interval(values)
    return {
        "mean": round(estimate.mean, 4),
        "low": round(estimate.low, 4),
        "high": round(estimate.high, 4),
    }


def shown(row: Mapping[str, Any] | Sequence[float] | None, sign: str = "", digits: int = 3) -> str:
    """A mean with its interval as text: `0.961 [0.930, 0.979]`.

    Args:
        row (`dict` or `Sequence[float]`, *optional*): What [`interval`] returned, or the values
            themselves. Without values the text is empty.
        sign (`str`, *optional*): `"+"` to show the sign of positive numbers, too.
        digits (`int`, *optional*, defaults to `3`): Digits after the point.
    """
    if not row:
        return ""
    if not isinstance(row, Mapping):
        row = interval(row)
    form = f"{sign}.{digits}f"
    mean = format(row["mean"], form)
    if row["low"] is None:
        return f"{mean} [one seed]"
    low = format(row["low"], form)
    high = format(row["high"], form)
    return f"{mean} [{low}, {high}]"


def markdown(titles: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table: a title for each column, and the cells of each row."""
    lines = [_table_line(titles), "|" + "---|" * len(titles)]
    lines += [_table_line(cells) for cells in rows]
    return "\n".join(lines)


def _table_line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# --- records --------------------------------------------------------------------------------------


class Records:
    """A file of measurements: one JSON object a line, compressed, each with its commit, date and
    machine.

    Entries are appended as they are measured, so that a run that was stopped goes on where it was.

    Args:
        path (`Path`): `records/NAME.jsonl.gz` for what is reported; the file need not exist.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All entries, oldest first; none if there is no file."""
        if not self.path.exists():
            return []
        with gzip.open(self.path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def add(self, *entries: Mapping[str, Any]) -> None:
        """Append entries."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            commit = git("rev-parse", "--short=12", "HEAD")
        except (OSError, subprocess.CalledProcessError):
            # There is only a copy of the files, as on a lent machine.
            commit = "unknown"
        load = os.getloadavg()[0]
        origin = {
            "commit": commit,
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {load:.1f}",
        }
        with gzip.open(self.path, "at", encoding="utf-8") as file:
            file.writelines(json.dumps({**entry, **origin}) + "\n" for entry in entries)

    def write(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Replace all entries by these, which have their commit, date and machine."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(self.path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)

    def missing(
        self, keys: Sequence[str], combinations: Iterable[tuple[Any, ...]]
    ) -> list[tuple[Any, ...]]:
        """Those of some combinations of values that no entry has under these keys."""
        recorded = set()
        for entry in self.read():
            recorded.add(tuple(entry[key] for key in keys))
        return [values for values in combinations if values not in recorded]


def git(*arguments: str) -> str:
    """The output of a git command in this repository."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
