"""Models in this process."""

from .greedy import GreedyBatch, GreedyRow, can_draft, greedy
from .transformers_chat import TransformersChat
from .transformers_sampler import Sampling, TransformersSampler, context_length, end_of_turn_tokens

__all__ = [
    "GreedyBatch",
    "GreedyRow",
    "Sampling",
    "TransformersChat",
    "TransformersSampler",
    "can_draft",
    "context_length",
    "end_of_turn_tokens",
    "greedy",
]
