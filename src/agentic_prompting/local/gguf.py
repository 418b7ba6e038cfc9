"""Loads GGUF files as ordinary models: with all weights, which train and save like any others."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)

# Two quantisations of one matrix have rows of a cosine similarity above 0.99. Those of a head that
# was trained apart from the embeddings are far below.
_MIN_SIMILARITY = 0.98
_COMPARED_ROWS = 1024


def load_gguf(
    file: str | Path, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a GGUF file with its weights dequantised.

    llama.cpp quantises the output head of a model with tied embeddings a second time, and
    transformers then loads two matrices where the model has one. Such a head is tied again, to the
    values of the head, which has the higher precision.

    Args:
        file (`str` or `Path`): The file.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Data type of the weights.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: The model, which can be trained and
        saved, and its tokenizer.

    Raises:
        `ImportError`: The package `gguf` is missing.
        `FileNotFoundError`: The file does not exist.
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

    # Tie the embeddings to the head.
    if has_copied_head(model):
        head_weight = model.get_output_embeddings().weight.detach()
        embedding = torch.nn.Embedding.from_pretrained(head_weight, freeze=False)
        model.set_input_embeddings(embedding)
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model, tokenizer


def is_from_gguf(model: torch.nn.Module) -> bool:
    """Return whether the model is from GGUF and transformers still treats it as quantised."""
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    method = getattr(config, "quant_method", None)
    return getattr(method, "value", method) == "gguf"


def as_dense_model(model: Model) -> Model:
    """Let a model from a GGUF file train and save; any other model is returned unchanged.

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
            "the model's weights are packed in GGUF blocks, which can neither be trained nor "
            "saved: load it with quantization_config=GgufConfig(dequantize=True)"
        )
    # Remove every mark by which transformers recognises a quantised model.
    model.hf_quantizer = None
    for attribute in ("is_quantized", "quantization_method"):
        if attribute in vars(model):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def has_copied_head(model: PreTrainedModel) -> bool:
    """Return whether a model's output head is a quantised second copy of its embeddings."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return False
    if head.weight.shape != embedding.weight.shape:
        return False

    # Compare a sample of the rows.
    step = max(1, head.weight.shape[0] // _COMPARED_ROWS)
    with torch.no_grad():
        similarity = torch.nn.functional.cosine_similarity(
            head.weight[::step].float(), embedding.weight[::step].float(), dim=1
        )
    return bool(similarity.median() > _MIN_SIMILARITY)


def warn_of_copied_head(model: PreTrainedModel) -> None:
    """Log a warning if a model has the copied head that [`load_gguf`] would tie."""
    if has_copied_head(model):
        logger.warning(
            "the model's head has the values of its embeddings, but is not tied to them: %.0f "
            "million weights are stored and trained twice. GGUF files of tied models load like "
            "this; agentic_prompting.local.load_gguf ties them",
            model.get_output_embeddings().weight.numel() / 1e6,
        )
