"""Policies and chat models that run a transformers model in this process."""

from .sampling import Sampling, TransformersSampler, context_length, end_of_turn_tokens
from .slab import can_slab
from .transformers_chat import TransformersChat
from .transformers_engine import TransformersEngine, local_policy

__all__ = [
    "Sampling",
    "TransformersChat",
    "TransformersEngine",
    "TransformersSampler",
    "can_slab",
    "context_length",
    "end_of_turn_tokens",
    "local_policy",
]
