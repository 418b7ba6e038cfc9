"""Which architectures [`TransformersEngine`] can run, and the attention masks that it gives them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


def masks_of(model: PreTrainedModel, columns: torch.Tensor, width: int) -> Any:
    """The attention mask, or one for each kind of layer: a token attends to its own column and those before it. Later
    columns are not written yet, or hold padding that will be overwritten."""
    config = model.config.get_text_config()
    at = torch.arange(width, device=columns.device)
    full = (at <= columns.unsqueeze(-1)).unsqueeze(1)  # rows x 1 x tokens x columns
    masks = dict.fromkeys(_kinds(model), full)
    if "sliding_attention" in masks:
        masks["sliding_attention"] = full & (at > columns.unsqueeze(-1) - config.sliding_window).unsqueeze(1)
    if config._attn_implementation == "eager":  # eager attention adds the mask to the scores
        masks = {
            kind: torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
            for kind, mask in masks.items()
        }
    return masks if getattr(config, "layer_types", None) and len(masks) > 1 else next(iter(masks.values()))


def _kinds(model: PreTrainedModel) -> set[str]:
    """The kinds of the model's layers, one if its configuration names none."""
    config = model.config.get_text_config()
    one = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or [one])


@contextmanager
def attention_with_masks(model: PreTrainedModel) -> Iterator[None]:
    """The model with an attention that takes a mask from its caller, which flash attention does not."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if before not in ("sdpa", "eager"):
        # Models with attention sinks (gpt-oss) or soft-capped scores (Gemma 2) would lose them under sdpa.
        config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


def can_slab(model: PreTrainedModel) -> bool:
    """Whether [`TransformersEngine`] can run a model: its whole state is keys and values, its layers attend to
    everything or to a window, and it takes positions and masks from its caller."""
    return _obstacle(model) is None


def check_runs(model: PreTrainedModel) -> None:
    """Raise a `ValueError` that names the architecture, if [`TransformersEngine`] cannot run it."""
    obstacle = _obstacle(model)
    if obstacle is not None:
        name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
        raise ValueError(
            f"TransformersEngine cannot run {name}, which {obstacle}: use local_policy, which runs batches"
        )


def _obstacle(model: PreTrainedModel) -> str | None:
    """Why the engine cannot run a model, as the end of a sentence; `None` where it can."""
    kinds = _kinds(model) - {"full_attention", "sliding_attention"}
    if model._is_stateful or kinds:
        layers = " and ".join(sorted(kinds)) or "recurrent"
        return f"has {layers} layers, whose state is more than keys and values"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "has a prompt-learning adapter, which adds tokens of its own in front of the context"
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's forward hides its parameters
    missing = {"position_ids", "past_key_values", "attention_mask"} - set(inspect.signature(base.forward).parameters)
    if missing:
        return f"takes no {' and no '.join(sorted(missing))}"
    return None
