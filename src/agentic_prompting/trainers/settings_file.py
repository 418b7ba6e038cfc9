"""A run's settings, in a file beside its rollouts.

`plan --from RUN` reads it if there is no configuration.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..llm.masking import mask_secrets
from ..records import atomic_write

logger = logging.getLogger(__name__)

SETTINGS_FILE = Path("rollouts") / "settings.json"
"""The file in a run's folder."""


@dataclass(frozen=True)
class RunSettings:
    """The settings with which a run was started.

    Args:
        args (`dict[str, Any]`): The training arguments by name.
        model (`str`): The name or folder of the model.
        rows (`int`, *optional*): Rows of the training data; `None` if they were streamed.
        processes (`int`): Processes that trained.
        peft (`dict[str, Any]`, *optional*): The adapter's configuration, if one was trained.
    """

    args: Mapping[str, Any]
    model: str
    rows: int | None
    processes: int
    peft: Mapping[str, Any] | None = None

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
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}; name the run with --config") from None

    def write(self, run: str | Path) -> None:
        """Write the settings into a run's folder, without keys and tokens."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, default=_to_json)
        atomic_write(Path(run) / SETTINGS_FILE, mask_secrets(text) + "\n")

    @property
    def peft_config(self) -> PeftConfig | None:
        """The adapter's configuration."""
        return None if self.peft is None else PeftConfig.from_peft_type(**self.peft)


class SettingsFile(TrainerCallback):
    """Writes [`RunSettings`] when training begins.

    Args:
        rows (`int`, *optional*): Rows of the training data.
    """

    def __init__(self, rows: int | None):
        self.rows = rows

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
        # An adapter has the settings of its base, and those of its own.
        adapter = getattr(model, "peft_config", {}).get("default")
        settings = RunSettings(
            args=args.to_dict(),
            model=model.config._name_or_path,
            rows=self.rows,
            processes=args.world_size,
            peft=adapter.to_dict() if isinstance(adapter, PeftConfig) else None,
        )
        # Only `plan` reads the file: a full disk must not end the run.
        try:
            settings.write(args.output_dir)
        except OSError as error:
            logger.warning("the settings of this run are not recorded: %s", error)


def _to_json(value: object) -> object:
    """Return a value that JSON cannot hold as one that it can: a set as a list, others as text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
