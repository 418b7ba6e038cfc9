"""Policies and chat models that run a transformers model in this process."""

from .gguf import load_gguf
from .precision import has_bf16_instructions, is_bf16_slow, loading_dtype
from .sampling import Sampling, TransformersSampler, context_length, end_of_turn_tokens
from .slab import can_slab
from .small_model import SmallModelMissing, small_model
from .transformers_chat import TransformersChat
from .transformers_engine import TransformersEngine, local_policy

__all__ = [
    "Sampling",
    "SmallModelMissing",
    "TransformersChat",
    "TransformersEngine",
    "TransformersSampler",
    "can_slab",
    "context_length",
    "end_of_turn_tokens",
    "has_bf16_instructions",
    "is_bf16_slow",
    "load_gguf",
    "loading_dtype",
    "local_policy",
    "small_model",
]
