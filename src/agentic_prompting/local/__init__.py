"""Models in this process."""

from .sampling import Sampling, TransformersSampler, context_length, end_of_turn_tokens
from .transformers_chat import TransformersChat
from .transformers_engine import TransformersEngine, can_slab, local_policy

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
