"""Loads GGUF files as ordinary models: weights in full, which train and save like any others."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Two quantisations of one matrix have rows of a cosine similarity above 0.99. Those of a head that was trained apart
# from the embeddings are far below.
_SAME_MATRIX = 0.98
_COMPARED_ROWS = 1024


def load_gguf(file: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Load a GGUF file with its weights dequantised.

    llama.cpp quantises the output head of a model with tied embeddings a second time, and transformers then loads two
    matrices where the model has one. Such a head is tied again, to the values of the head, which has the higher
    precision.

    Args:
        file (`str` or `Path`): The file.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the weights.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: The model, which can be trained and saved, and its tokenizer.

    Raises:
        `ImportError`: The package `gguf` is missing.
        `FileNotFoundError`: There is no such file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if find_spec("gguf") is None:
        raise ImportError(
            "GGUF files are read by the package gguf: pip install 'agentic-prompting[real]'"
        )
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = as_dense_model(model)
    if has_copied_head(model):
        model.set_input_embeddings(_embedding_of(model.get_output_embeddings().weight))
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model, tokenizer


def is_from_gguf(model: Any) -> bool:
    """Whether transformers has loaded the model from a GGUF file and still treats it as quantised."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    method = getattr(config, "quant_method", None)
    return getattr(method, "value", method) == "gguf"


def as_dense_model(model: Any) -> Any:
    """Let a model that was loaded from a GGUF file train and save; any other is returned as it is.

    transformers refuses both, because it takes the dequantised weights for quantised ones.

    Args:
        model (`PreTrainedModel`): Changed in place.

    Returns:
        `PreTrainedModel`: The same model.

    Raises:
        `ValueError`: Its weights are still packed in GGUF blocks.
    """
    if not is_from_gguf(model):
        return model
    if getattr(model.hf_quantizer, "packed_modules", None):
        raise ValueError(
            "the model's weights are packed in GGUF blocks, which can neither be trained nor saved: load it with "
            "quantization_config=GgufConfig(dequantize=True)"
        )
    model.hf_quantizer = None
    for attribute in ("is_quantized", "quantization_method"):
        if attribute in vars(model):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def has_copied_head(model: Any) -> bool:
    """Whether a model's output head is a second copy of its embeddings, quantised once more."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if (
        head is None
        or head.weight is embedding.weight
        or head.weight.shape != embedding.weight.shape
    ):
        return False
    step = max(1, head.weight.shape[0] // _COMPARED_ROWS)
    with torch.no_grad():
        similarity = torch.nn.functional.cosine_similarity(
            head.weight[::step].float(), embedding.weight[::step].float(), dim=1
        )
    return bool(similarity.median() > _SAME_MATRIX)


def warn_of_copied_head(model: Any) -> None:
    """Log a warning if a model from a GGUF file has the copied head that [`load_gguf`] would tie."""
    if has_copied_head(model):
        logger.warning(
            "the model's head has the values of its embeddings, but is not tied to them: %.0f million weights are held "
            "and trained twice. GGUF files of tied models load like this; agentic_prompting.local.load_gguf ties them",
            model.get_output_embeddings().weight.numel() / 1e6,
        )


def _embedding_of(weight: torch.Tensor) -> torch.nn.Embedding:
    return torch.nn.Embedding.from_pretrained(weight.detach(), freeze=False)
