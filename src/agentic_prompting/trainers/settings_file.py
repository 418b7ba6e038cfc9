"""A run's settings, in a file beside its rollouts.

`plan --from RUN` reads it if there is no configuration.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from peft import PeftConfig
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..llm.masking import mask_secrets
from ..records import atomic_write, digest
from ..rollout import Environment, Environments
from ..versions import code_version, combine_versions, row_version

logger = logging.getLogger(__name__)

_MAX_ROWS = 10_000

_LEARNING_ARGUMENTS = (
    # The optimizer.
    "learning_rate",
    "lr_scheduler_type",
    "optim",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "max_grad_norm",
    "seed",
    # The batch.
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "async_lead",
    "max_staleness",
    # Sampling.
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    # Episodes.
    "max_turns",
    "max_turn_tokens",
    "max_completion_length",
    "max_context",
    "step_timeout",
    "stop_at_tags",
    "environment_limits",
    "environment_ratio",
    # Rewards and loss.
    "gate",
    "reward_weights",
    "scale_rewards",
    "mask_truncated_completions",
    "beta",
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "entropy_coef",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    # E-SPL, as far as its population does not check them itself.
    "mode",
    "phase_steps",
    "baseline",
    "prompts_per_step",
    "p_crossover",
    "reflection",
    "reflect_on",
    "reflector",
    "evolution_lag",
)
"""Training arguments whose change makes another run of it. Further ones are not compared."""

SETTINGS_FILE = Path("rollouts") / "settings.json"
"""The file in a run's folder."""
CHECKPOINT_SETTINGS_FILE = Path("run_settings.json")
"""The file in a checkpoint's folder."""


@dataclass(frozen=True)
class RunSettings:
    """The settings with which a run trains.

    Args:
        args (`dict[str, Any]`): The training arguments by name; a learning rate that has no effect
            is replaced by the one in effect.
        model (`str`): The name or folder of the model.
        rows (`int`, *optional*): Rows of the training data; `None` if they were streamed.
        processes (`int`): Processes that trained.
        peft (`dict[str, Any]`, *optional*): The adapter's configuration, if one was trained.
        inputs (`dict[str, str]`): Digests of [`describe_inputs`]; older files have none.
    """

    args: Mapping[str, Any]
    model: str
    rows: int | None
    processes: int
    peft: Mapping[str, Any] | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run: str | Path) -> RunSettings:
        """Read the settings of a run's folder.

        Raises:
            `FileNotFoundError`: The folder has no such file: it is not the folder of a run, or an
                earlier version wrote it.
            `ValueError`: The file is damaged.
        """
        path = Path(run) / SETTINGS_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{run} has no {SETTINGS_FILE}: it is not the folder of a training run, or an "
                "earlier version wrote it; name the run with --config FILE"
            )
        return cls._read_file(path)

    @classmethod
    def read_checkpoint(cls, checkpoint: str | Path) -> RunSettings | None:
        """Read the settings that a checkpoint was trained with; `None` if it does not have them.

        Raises:
            `ValueError`: The file is damaged.
        """
        path = Path(checkpoint) / CHECKPOINT_SETTINGS_FILE
        return cls._read_file(path) if path.is_file() else None

    @classmethod
    def _read_file(cls, path: Path) -> RunSettings:
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}; name the run with --config") from None

    def write(self, run: str | Path) -> None:
        """Write the settings into a run's folder, without keys and tokens."""
        self._write_file(Path(run) / SETTINGS_FILE)

    def write_checkpoint(self, checkpoint: str | Path) -> None:
        """Write the settings into a checkpoint's folder, without keys and tokens."""
        self._write_file(Path(checkpoint) / CHECKPOINT_SETTINGS_FILE)

    def _write_file(self, path: Path) -> None:
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, default=_to_json)
        atomic_write(path, mask_secrets(text) + "\n")

    @property
    def peft_config(self) -> PeftConfig | None:
        """The adapter's configuration."""
        return None if self.peft is None else PeftConfig.from_peft_type(**self.peft)


def describe_inputs(
    rows: Dataset | IterableDataset,
    reward_functions: Sequence[object],
    environment: Environment | None,
) -> dict[str, str]:
    """Return a digest of each part that a run learns from, by its name for a warning.

    Streamed rows, and code that is not the user's, have none.
    """
    environments: list[Environment | None] = [environment]
    if isinstance(environment, Environments):
        environments = list(environment.by_name.values())
    versions = {
        "the code of a reward function": combine_versions(map(code_version, reward_functions)),
        "the code of the environment": combine_versions(
            code_version(part.described_by) for part in environments if part is not None
        ),
    }
    if isinstance(rows, Dataset):
        # A sample of them, because a data set may be large.
        numbers = range(0, len(rows), max(1, len(rows) // _MAX_ROWS))
        sample = rows.select(numbers)
        columns = [name for name in ("prompt", "question", "answers") if name in rows.column_names]
        contents = [row_version(row, columns) for row in sample.select_columns(columns)]
        versions["the training rows"] = digest([len(rows), contents])
    return {name: version for name, version in versions.items() if version is not None}


class SettingsFile(TrainerCallback):
    """Keeps [`RunSettings`] when training begins, and writes them into the run's folder.

    If a run is resumed with other rows, other code or another learning rate than its checkpoint was
    trained with, a warning is logged.

    Args:
        rows (`int`, *optional*): Rows of the training data.
        find_inputs (`Callable`, *optional*): Returns the digests of [`describe_inputs`].
        find_checkpoint (`Callable`, *optional*): Returns the checkpoint that training is resumed
            from.
        writes_file (`bool`, *optional*, defaults to `True`): Whether to write the run's file.

    Attributes:
        settings ([`RunSettings`], *optional*): Those of the present training, on the main process.
    """

    def __init__(
        self,
        rows: int | None,
        find_inputs: Callable[[], Mapping[str, str]] = dict,
        find_checkpoint: Callable[[], str | None] = lambda: None,
        writes_file: bool = True,
    ):
        self.rows = rows
        self.find_inputs = find_inputs
        self.find_checkpoint = find_checkpoint
        self.writes_file = writes_file
        self.settings: RunSettings | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero or model is None:
            return
        arguments = args.to_dict()
        inputs = self.find_inputs()
        # A resumed run is compared with its checkpoint, and not with the last start: that may have
        # been killed before its next checkpoint.
        saved = None
        if state.global_step:
            saved = _read_saved_settings(self.find_checkpoint(), args.output_dir)
        if saved is not None:
            _warn_of_arguments(saved.args, arguments)
            _warn_of_inputs(saved.inputs, inputs)
            # The rate in effect is recorded.
            if _keeps_rate(saved.args) and "learning_rate" in saved.args:
                arguments["learning_rate"] = saved.args["learning_rate"]
        # An adapter has the settings of its base, and those of its own.
        adapter = getattr(model, "peft_config", {}).get("default")
        self.settings = RunSettings(
            args=arguments,
            model=model.config._name_or_path,
            rows=self.rows,
            processes=args.world_size,
            peft=adapter.to_dict() if isinstance(adapter, PeftConfig) else None,
            inputs=inputs,
        )
        # Only `plan` reads the file: a full disk must not end the run.
        if self.writes_file:
            try:
                self.settings.write(args.output_dir)
            except OSError as error:
                logger.warning("the settings of this run are not recorded: %s", error)


def _read_saved_settings(checkpoint: str | None, run: str | Path) -> RunSettings | None:
    """Return what a checkpoint was trained with, `None` if nothing says it."""
    try:
        settings = None if checkpoint is None else RunSettings.read_checkpoint(checkpoint)
        # Checkpoints of earlier versions have no settings: take those of the last start.
        return settings or RunSettings.read(run)
    except (OSError, ValueError):
        return None  # of an older version, or damaged


def _keeps_rate(saved_args: Mapping[str, Any]) -> bool:
    """Return whether a resumed run takes its learning rate from the checkpoint."""
    # A checkpoint with the model alone has no schedule.
    return not saved_args.get("save_only_model")


def _warn_of_inputs(saved_inputs: Mapping[str, str], inputs: Mapping[str, str]) -> None:
    """Log a warning if a resumed run learns from something else than before."""
    changes = [
        name for name in inputs if name in saved_inputs and saved_inputs[name] != inputs[name]
    ]
    if changes:
        logger.warning(
            "this run is resumed after a change of %s: its steps so far were trained without the "
            "change, and its logs and rollouts mix both. For a run of its own use another "
            "output_dir",
            " and ".join(changes),
        )


def _warn_of_arguments(saved_args: Mapping[str, Any], args: Mapping[str, Any]) -> None:
    """Log a warning for training arguments that are not as before, and say which of them have no
    effect.
    """
    ignored: list[str] = []
    applied: list[str] = []
    # As they are saved: a tuple is a list there.
    args = json.loads(json.dumps(args, default=_to_json))
    for name in _LEARNING_ARGUMENTS:
        if name not in saved_args or name not in args or saved_args[name] == args[name]:
            continue
        change = f"{name} {saved_args[name]} -> {args[name]}"
        is_ignored = name == "learning_rate" and _keeps_rate(saved_args)
        (ignored if is_ignored else applied).append(change)
    if ignored:
        logger.warning(
            "%s has no effect: a resumed run goes on with the learning rate of its checkpoint. To "
            "train these weights at another rate, begin a run of its own with the checkpoint as "
            "its model",
            ", ".join(ignored),
        )
    if applied:
        logger.warning(
            "this run is resumed with %s: its steps so far were trained without the change",
            ", ".join(applied),
        )


def _to_json(value: object) -> object:
    """Return a value that JSON cannot hold as one that it can: a set as a list, others as text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
