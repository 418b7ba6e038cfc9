"""Models in this process."""

from .greedy import GreedyBatch, GreedyRow, can_draft, greedy
from .sampling import Sampling, context_length, end_of_turn_tokens
from .transformers_chat import TransformersChat
from .transformers_engine import TransformersEngine, can_slab, local_policy
from .transformers_sampler import TransformersSampler

__all__ = [
    "GreedyBatch",
    "GreedyRow",
    "Sampling",
    "TransformersChat",
    "TransformersEngine",
    "TransformersSampler",
    "can_draft",
    "can_slab",
    "context_length",
    "end_of_turn_tokens",
    "greedy",
    "local_policy",
]
