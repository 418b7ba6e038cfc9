"""The shape of a model without its weights, and a rough memory estimate for models that cannot be
measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig


class Unplannable(ValueError):
    """No training step of this model can be measured.

    The message says what was tried, with a rough estimate if there is one.
    """


def load_shape(name: str) -> PretrainedConfig:
    """Load a model's configuration.

    Args:
        name (`str`): A local folder, or a model on the Hub, from which only `config.json` is read.

    Raises:
        [`Unplannable`]: If there is no such model, it needs its own code, or its architecture is
            unknown.
    """
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of transformers, of the Hub, or of the file
        reason = textwrap.shorten(str(error), 200, placeholder=" …")

    # Find out why: whether there is a configuration at all, and whether it needs its own code.
    try:
        values = PretrainedConfig.get_config_dict(name)[0]
    except Exception:
        values = {}
    if not values:
        raise Unplannable(f"{name}: config.json cannot be read, locally or from the Hub ({reason})")
    if "auto_map" in values:
        cause = "it needs its own Python code, which `plan` does not run"
    else:
        cause = f"transformers cannot load its config.json ({reason})"
    raise Unplannable(f"{name}: {cause}. {rough_estimate(values)}")


def rough_estimate(values: Mapping[str, Any], trained_share: float = 1.0) -> str:
    """Return the memory of weights and AdamW as a sentence, from what most configurations contain.

    Args:
        values (`Mapping[str, Any]`): The content of a `config.json`.
        trained_share (`float`, *optional*, defaults to `1.0`): Share of the weights that is
            trained.
    """
    # In multimodal models, the sizes of the language model are in a nested configuration.
    values = {**values, **(values.get("text_config") or {})}
    required = ("hidden_size", "num_hidden_layers", "vocab_size")
    missing = [name for name in required if not isinstance(values.get(name), int)]
    if missing:
        return f"There is no estimate either, because {' and '.join(missing)} are missing."

    # Embeddings, and per layer four attention projections and three projections of each expert.
    hidden = values["hidden_size"]
    inner = values.get("moe_intermediate_size") or values.get("intermediate_size") or 4 * hidden
    experts = values.get("num_experts") or values.get("num_local_experts") or 1
    tables = 1 if values.get("tie_word_embeddings", True) else 2
    embeddings = tables * values["vocab_size"] * hidden
    layer = 4 * hidden * hidden + 3 * experts * hidden * inner
    parameters = embeddings + values["num_hidden_layers"] * layer

    # bf16 weights take 2 bytes; each trained one 14 more: gradient 2, fp32 weight and moments 12.
    gib = parameters * (2 + 14 * trained_share) / 2**30
    return (
        f"A rough estimate: {parameters / 1e9:.1f} billion parameters, {gib:.0f} GiB in all for "
        "bf16 weights, gradients, fp32 weights and AdamW's two moments, without activations."
    )
