"""The check that a run resumes with the adapter that its checkpoint was trained with.

Without it, transformers and torch end with missing keys, other shapes or an optimizer of another
size, and none of them names the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from torch import nn

_FULL_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
# The settings that decide which weights an adapter has, their shapes and their scale.
_COMPARED_SETTINGS = (
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "modules_to_save",
    "use_dora",
    "use_rslora",
)


def check_adapter(checkpoint: Path, model: nn.Module) -> None:
    """Raise if a checkpoint and the model to be trained do not have the same adapter, or both none.

    Args:
        checkpoint (`Path`): The checkpoint to resume from.
        model (`nn.Module`): The model to be trained, before it is wrapped for distribution.

    Raises:
        `ValueError`: The adapters differ; the message says in what.
    """
    adapter_file = checkpoint / "adapter_config.json"
    adapter = model.peft_config["default"] if isinstance(model, PeftModel) else None
    if adapter_file.exists() and adapter is None:
        raise ValueError(
            f"{checkpoint} has the weights of an adapter, and this trainer trains all weights: pass "
            "the peft_config of that run (--use_peft), or use another output_dir"
        )
    has_full_weights = any((checkpoint / name).exists() for name in _FULL_WEIGHTS)
    if adapter is not None and has_full_weights and not adapter_file.exists():
        raise ValueError(
            f"{checkpoint} has all weights of the model, and this trainer trains an adapter: leave "
            "out peft_config (--use_peft), or use another output_dir, with the checkpoint as its "
            "model"
        )
    if adapter is not None and adapter_file.exists():
        saved = json.loads(adapter_file.read_text(encoding="utf-8"))
        differences = _find_differences(saved, adapter)
        if differences:
            raise ValueError(
                f"{checkpoint} was trained with another adapter ({', '.join(differences)}): pass "
                "the peft_config of that run, or use another output_dir"
            )


def _find_differences(saved: Mapping[str, Any], adapter: PeftConfig) -> list[str]:
    """Return the settings of an adapter that are not as saved, each with both values."""
    differences = []
    for name in _COMPARED_SETTINGS:
        before = _comparable(saved.get(name))
        now = _comparable(getattr(adapter, name, None))
        if before != now:
            differences.append(f"{name} {before} -> {now}")
    return differences


def _comparable(value: Any) -> Any:
    """Return a setting as JSON has it; names of modules in alphabetical order."""
    if isinstance(value, list | set | tuple):
        return sorted(value)
    return getattr(value, "value", value)
