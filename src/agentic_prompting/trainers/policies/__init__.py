"""The policies that sample the agent's turns while it is trained, by the trainer's back end."""

from .backend import Backend, sampling_of, tokenizer_of, trainer_backend
from .batch_samplers import CollectivePolicy, PeerFailed
from .vllm_client import PolicyUnreachable
from .weight_sync import use_weight_sync

__all__ = [
    "Backend",
    "CollectivePolicy",
    "PeerFailed",
    "PolicyUnreachable",
    "sampling_of",
    "tokenizer_of",
    "trainer_backend",
    "use_weight_sync",
]
