"""Written conversations as rollouts: for a supervised warm start in exactly the token form of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .chat_format import ChatFormat
from .grammar import Kind
from .spec import AgentSpec
from .types import Observation, Rollout, Sample, Status

_STATUS_AFTER: dict[Kind, Status] = {"answer": "answered", "act": "out_of_turns", "malformed": "malformed"}


def rollout_from_trace(trace: Mapping[str, Any], spec: AgentSpec, chat_format: ChatFormat) -> Rollout:
    """The rollout that an agent writing this trace would have made.

    Args:
        trace (`Mapping`): `turns` (`list[str]`), the agent's, and `observations` (`list[str]`), what came back after
            each but the last; beside them the columns of a dataset row (`question`, ...).
        spec ([`AgentSpec`]): How the agent is asked.
        chat_format ([`ChatFormat`]): Its tokenizer and template.

    Raises:
        `ValueError`: If there is not exactly one observation fewer than turns.
    """
    turns, observations = trace["turns"], trace["observations"]
    if len(turns) != len(observations) + 1:
        raise ValueError(f"a trace needs one observation fewer than turns, got {len(observations)} and {len(turns)}")
    rollout = Rollout(chat_format.prompt_ids(spec.messages(trace)), row=dict(trace))
    for text, observation in zip(turns, [*observations, None], strict=True):
        sample = Sample(chat_format.turn_ids(text))
        rollout.sampled(sample, chat_format.parse(sample.ids))
        if observation is not None:
            rollout.observed(Observation(observation), chat_format.observation_ids(observation, after=rollout.ids))
    rollout.status = _STATUS_AFTER[rollout.turns[-1].kind]
    return rollout
