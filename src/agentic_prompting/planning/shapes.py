"""A model's configuration, without its weights; and a plain estimate for one that cannot be measured."""

from __future__ import annotations

import textwrap
from typing import Any

from transformers import AutoConfig, PretrainedConfig


class Unplannable(ValueError):
    """No step of this model can be measured; the message says what was tried, and gives a plain estimate if there is
    one."""


def shape_of(name: str) -> PretrainedConfig:
    """A model's configuration.

    Args:
        name (`str`): A folder, or a name on the hub, from which `config.json` alone is read.

    Raises:
        [`Unplannable`]: It is not there, needs code of its own, or is of no known architecture.
    """
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of transformers, of the hub, of the file
        reason = textwrap.shorten(str(error), 200, placeholder=" …")
    try:
        values = PretrainedConfig.get_config_dict(name)[0]
    except Exception:
        values = {}
    if not values:
        raise Unplannable(f"{name}: its config.json cannot be read, here or on the hub ({reason})")
    if "auto_map" in values:
        tried = "it needs Python code of its own, which is not run to plan"
    else:
        tried = f"transformers makes no model of its config.json ({reason})"
    raise Unplannable(f"{name}: {tried}. {estimate(values)}")


def estimate(values: dict[str, Any], trained: float = 1.0) -> str:
    """The memory of weights and AdamW as a sentence, from the numbers that most configurations have.

    Args:
        values (`dict`): A `config.json`.
        trained (`float`, *optional*, defaults to `1.0`): The share of the weights that learns.
    """
    values = {**values, **(values.get("text_config") or {})}
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    if missing := [one for one in names if not isinstance(values.get(one), int)]:
        return f"It has no {' and no '.join(missing)}, so there is no estimate either."
    hidden, layers, vocabulary = (values[one] for one in names)
    inner = values.get("moe_intermediate_size") or values.get("intermediate_size") or 4 * hidden
    experts = values.get("num_experts") or values.get("num_local_experts") or 1
    tables = 1 if values.get("tie_word_embeddings", True) else 2
    numbers = tables * vocabulary * hidden + layers * (4 * hidden * hidden + 3 * experts * hidden * inner)
    states = numbers * (2 + 14 * trained) / 2**30
    return (
        f"A plain estimate: {numbers / 1e9:.1f} billion parameters, {states:.0f} GiB in all for bf16 weights, "
        "gradients, fp32 weights and AdamW's two moments; activations are not in it."
    )
