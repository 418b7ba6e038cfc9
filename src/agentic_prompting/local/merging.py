"""[`save_merged`]: a trained agent as an ordinary model folder, for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..rollout.spec import SPEC_FILE


def save_merged(run: Path, folder: Path, dtype: str = "auto") -> bool:
    """Write a trained agent's whole weights, tokenizer and form into a folder.

    Args:
        run (`Path`): A folder that a trainer has saved.
        folder (`Path`): The folder to write to.
        dtype (`str`, *optional*, defaults to `"auto"`): Data type of the saved weights.

    Returns:
        `bool`: Whether there was an adapter.
    """
    has_adapter = (run / "adapter_config.json").exists()
    if has_adapter:
        model = AutoPeftModelForCausalLM.from_pretrained(run).merge_and_unload()
    else:
        model = AutoModelForCausalLM.from_pretrained(run)
    if dtype != "auto":
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(run).save_pretrained(folder)

    # The prompt, the form of the turns and the limits: without them the agent is not asked as in
    # training.
    if (run / SPEC_FILE).exists():
        shutil.copy2(run / SPEC_FILE, folder / SPEC_FILE)
    return has_adapter
