"""Reward functions behind the guard of user code: an `exit()` in one costs a batch its rewards, and not the run.

The columns that a function needs are read from its signature before anything is paid for. Its return value is checked
with the first batch and not earlier: a call on a made-up rollout could cost money (a judge) or have side effects.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..data import validate_dataset
from ..llm.guard import Escaped, describe, guarded, place_of
from .form import own_prompts

logger = logging.getLogger(__name__)


def guarded_reward(function: Any) -> Any:
    """A reward function for TRL. After an `exit()` or the like, which code written by a model may call, the batch has
    no reward from it, and a warning is logged. An ordinary exception is a bug in the function and is raised unchanged.

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

    def checked(value: Any, **columns: Any) -> list[Any]:
        return one_for_each(value, len(columns["completions"]), function)

    reward: Callable[..., Any] = guarded(function, no_rewards, checked)
    name = reward.__name__
    return reward


def one_for_each(value: Any, n: int, function: Any) -> list[Any]:
    """The rewards that a function returned for `n` completions, as a list of numbers or `None`.

    Raises:
        `ValueError`: The value is something else; the message names the function.
    """
    rewards, returned = _as_list(value)
    if rewards is None or len(rewards) != n:
        raise ValueError(
            f"the reward function {place_of(function)} must return a list of {n} numbers (or None), one for each "
            f"completion; it returned {returned}"
        )
    return rewards


def _as_list(value: Any) -> tuple[list[Any] | None, str]:
    """The rewards in a function's return value, or `None`; and a description of that value."""
    kind = "None" if value is None else f"a {type(value).__name__}"
    try:
        rewards = None if isinstance(value, str | bytes | Mapping) else list(value)
        for one in rewards or ():
            if isinstance(one, str):
                return None, f"{kind} with a {type(one).__name__} in it"
            if one is not None:
                float(one)
    except (TypeError, ValueError):  # a number, a tensor without dimensions, or an element that is no number
        return None, kind
    return rewards, kind if rewards is None else f"{kind} of {len(rewards)}"


def check_groups(functions: Sequence[Any], args: Any, evaluates: bool) -> None:
    """Raise `ValueError` if a reward function that compares the rollouts of a group ([`GroupJudge`]) would get a group
    of one, or a group that is split between processes.

    Args:
        functions (`Sequence`): The reward functions.
        args ([`MultiTurnGRPOConfig`]): The run's.
        evaluates (`bool`): Whether there are rows to evaluate on.
    """
    batches = [(args.num_generations, args.per_device_train_batch_size * args.steps_per_generation)]
    if evaluates:
        batches.append((args.num_generations_eval or args.num_generations, args.per_device_eval_batch_size))
    for group, own in batches:
        for one in functions:
            if check := getattr(one, "check_group", None):
                check(group if own % group == 0 else 1)


_FROM_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}


def check_rows(dataset: Any, functions: Sequence[Any], template: Any) -> None:
    """Raise `ValueError` if rows have neither a question for the template nor a prompt of their own, if they lack a
    column that a reward function needs, or if the template would be ignored."""
    first = "prompt" if own_prompts(dataset) else "question"
    validate_dataset(dataset, columns=(first,))
    for function in functions:
        own = getattr(function, "own_rows", lambda rows: rows)(dataset)  # of a reward of one environment
        if (row := next(iter(own), None)) is not None:
            check_columns(function, row)
            validate_dataset(own, columns=needed_columns(function))
    if template is not None and first == "prompt":
        raise ValueError(
            "prompt_template would be ignored, as the dataset has a column `prompt`, which is used as it is: "
            "leave one of them out"
        )


def check_columns(function: Any, columns: Collection[str]) -> None:
    """Raise `ValueError` if a reward function needs a column that the rows do not have.

    Args:
        function (`Callable`, `str` or `torch.nn.Module`): Models and their names need none.
        columns (`Collection[str]`): Those of the data set.
    """
    for name in needed_columns(function):
        if name not in columns:
            has = ", ".join(columns)
            raise ValueError(
                f"the reward function {place_of(function)} needs the column {name!r}; the rows have: {has}"
            )


def needed_columns(function: Any) -> list[str]:
    """The columns without which a reward function cannot be called: its parameters without a default."""
    if not callable(function) or isinstance(function, torch.nn.Module):
        return []
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function written in C may have no signature
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [one.name for one in parameters if one.kind in named and one.default is one.empty]
    return [name for name in needed if name not in _FROM_TRL | {"rollout"}]
