"""[`PlannedRun`]: the run whose memory and costs are estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trainers.settings_file import RunSettings

if TYPE_CHECKING:
    from peft import PeftConfig


@dataclass(frozen=True)
class PlannedRun:
    """The run to plan, from a configuration or from a pilot.

    Args:
        values (`dict[str, Any]`): The training arguments by name.
        model (`str`): The name or folder of the model.
        peft_config (`PeftConfig`, *optional*): The adapter.
        rows (`int`, *optional*): Rows of the dataset, if known.
        gpus (`int`, *optional*): GPUs that train, if known.
    """

    values: Mapping[str, Any]
    model: str
    peft_config: PeftConfig | None
    rows: int | None
    gpus: int | None

    @classmethod
    def like_pilot(
        cls,
        folder: Path,
        changes: Mapping[str, Any],
        rows: int | None = None,
        gpus: int | None = None,
    ) -> PlannedRun:
        """Return a run with the settings of a pilot run.

        Args:
            folder (`Path`): The folder of the pilot.
            changes (`Mapping[str, Any]`): Training arguments that differ from the pilot's.
            rows (`int`, *optional*): Rows of the full run, from which its steps follow unless
                `changes` has `max_steps`. Defaults to those of the pilot.
            gpus (`int`, *optional*): GPUs that train. Defaults to the processes of the pilot.
        """
        settings = RunSettings.read(folder)
        values = dict(settings.args)
        # A pilot on a CPU stands for a run on GPUs.
        if values.get("use_cpu"):
            values |= {"use_cpu": False, "bf16": not values.get("fp16")}
        # With rows of the full run the steps follow from them, unlike those of the pilot.
        if rows is not None:
            values["max_steps"] = -1
        values |= changes
        # The rollouts that are played at once grow with the processes.
        gpus = settings.processes if gpus is None else gpus
        rows_per_process = values.get("per_device_train_batch_size", 8)
        micro_batches = values.get("steps_per_generation") or 1
        values["generation_batch_size"] = rows_per_process * micro_batches * gpus
        return cls(
            values=values,
            model=settings.model,
            peft_config=settings.peft_config,
            rows=settings.rows,
            gpus=gpus,
        )
