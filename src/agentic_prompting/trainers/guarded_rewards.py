"""Reward functions behind the guard of user code: what would end or hang the process costs one batch its rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ..llm.guard import Escaped, describe, guarded

logger = logging.getLogger(__name__)


def guarded_reward(function: Any) -> Any:
    """A reward function for TRL. `exit()` and its like (code that a model wrote may call it) give no reward for the
    batch, with a warning; an ordinary exception is a mistake in the function and is raised as it is.

    Args:
        function (`Callable`, `str` or `torch.nn.Module`): Models and their names are returned as they are.
    """
    if not callable(function) or isinstance(function, torch.nn.Module):
        return function

    def no_rewards(error: Exception, **columns: Any) -> list[None]:
        if not isinstance(error, Escaped):
            raise error
        logger.warning("the reward function %s raised %s: this batch has no reward from it", name, describe(error))
        return [None] * len(columns["completions"])

    reward: Callable[..., Any] = guarded(function, no_rewards)
    name = reward.__name__
    return reward
