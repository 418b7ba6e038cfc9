"""Reward functions: the trainer's argument, the checks of each call, and the completions.

Each one is guarded, so that an `exit()` in it costs one batch its rewards rather than ending the
run. A return value is checked in the first batch and not earlier: a call on a made-up rollout could
cost money or have side effects.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeAlias, cast

import torch
from datasets import Dataset

from ..llm.guard import (
    Escaped,
    call_guarded,
    describe,
    guard_function,
    note_source,
    place_of,
)
from ..llm.numbers import count_in_words, finite_float
from ..rollout import Environment, Environments, Rollout, TextFormat, render_messages
from .config import MultiTurnGRPOConfig
from .setup import unknown_environment

logger = logging.getLogger(__name__)

# As in TRL: a function, or a reward model or its name.
RewardFunction: TypeAlias = Callable[..., Any] | str | torch.nn.Module
# One, several, or those of each environment by its name.
RewardFunctions: TypeAlias = (
    RewardFunction
    | Sequence[RewardFunction]
    | Mapping[str, RewardFunction | Sequence[RewardFunction]]
)


# --- the trainer's argument --------------------------------------------------------------------


class EnvironmentReward:
    """A reward function for the rollouts of one of several environments.

    Other rollouts get no reward from it. Its other attributes are those of the wrapped function.

    Args:
        environment_name (`str`): Name of the environment.
        function (`Callable`): Its reward function.
    """

    def __init__(self, environment_name: str, function: Callable[..., Any]):
        function_name = getattr(function, "__name__", type(function).__name__)
        self.environment_name = environment_name
        self.__name__ = f"{environment_name}/{function_name}"
        self.__wrapped__ = function  # whose signature says which columns it needs

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def select_rows(self, dataset: Dataset) -> Dataset:
        """Return the environment's rows."""
        return dataset.select(self._indices(dataset["environment"]))

    async def __call__(self, **columns: Any) -> list[Any]:
        """Return the function's rewards of the environment's rollouts, `None` for the others."""
        rollout_count = len(columns["completions"])
        # The function is called only if it has a rollout to score.
        indices = self._indices(columns["environment"])
        if not indices:
            return [None] * rollout_count

        # Columns have a value for each rollout; other arguments are passed as they are.
        selected_columns = {}
        for name, values in columns.items():
            if isinstance(values, list) and len(values) == rollout_count:
                values = [values[index] for index in indices]
            selected_columns[name] = values

        returned = await call_guarded(self.__wrapped__, **selected_columns)
        # Put the rewards back to the places of their rollouts.
        rewards = [None] * rollout_count
        checked = check_rewards(returned, len(indices), self.__wrapped__)
        for index, reward in zip(indices, checked, strict=True):
            rewards[index] = reward
        return rewards

    def _indices(self, environment_names: Sequence[str]) -> list[int]:
        return [
            index for index, name in enumerate(environment_names) if name == self.environment_name
        ]


def list_reward_functions(
    reward_funcs: RewardFunctions | None, environment: Environment | None
) -> list[RewardFunction]:
    """Return a trainer's reward functions as a list.

    Args:
        reward_funcs (`Callable`, `list` or `Mapping`, *optional*): The trainer's argument. A
            mapping has the reward functions of each environment by its name; they become
            [`EnvironmentReward`] objects.
        environment ([`Environment`], *optional*): Answers the agent's requests.

    Raises:
        `ValueError`: If a mapping names an unknown environment, or lacks one.
    """
    if reward_funcs is None:
        return []
    if not isinstance(reward_funcs, Mapping):
        return _as_list(reward_funcs)

    # A mapping must name exactly the environments of the run.
    environment_names: list[str] = []
    if isinstance(environment, Environments):
        environment_names = list(environment.by_name)
    for name in environment_names:
        if name not in reward_funcs:
            raise ValueError(f"reward_funcs has no reward function for the environment {name!r}")
    for name in reward_funcs:
        if name not in environment_names:
            raise unknown_environment("reward_funcs", name, environment_names)

    # Each function sees the rollouts of its own environment.
    reward_functions: list[RewardFunction] = []
    for name, functions in reward_funcs.items():
        for function in _as_list(functions):
            if not callable(function):
                raise ValueError(
                    f"reward_funcs of the environment {name!r} has {function!r}, which cannot be "
                    "called"
                )
            reward_functions.append(EnvironmentReward(name, function))
    return reward_functions


def _as_list(functions: RewardFunction | Sequence[RewardFunction]) -> list[RewardFunction]:
    if isinstance(functions, list | tuple):
        return list(functions)
    return [cast(RewardFunction, functions)]


def check_reward_weights(
    args: MultiTurnGRPOConfig, reward_functions: Sequence[RewardFunction]
) -> None:
    """Check that `reward_weights` has a weight for each reward function of the caller's.

    Args:
        args ([`MultiTurnGRPOConfig`]): The caller's settings.
        reward_functions (`Sequence`): The reward functions, without those that an environment
            brings.

    Raises:
        `ValueError`: If there are more or fewer weights.
    """
    weights = args.reward_weights
    if weights is None or len(weights) == len(reward_functions):
        return
    names = []
    for function in reward_functions:
        if isinstance(function, str):
            names.append(function)
        else:
            names.append(getattr(function, "__name__", type(function).__name__))
    raise ValueError(
        f"reward_weights={list(weights)} must have one weight for each of the "
        f"{count_in_words(len(reward_functions), 'reward function')} "
        f"({', '.join(names) or 'none'}), in their order"
    )


def warn_of_shared_names(names: Sequence[str]) -> None:
    """Log a warning for each name that several reward functions of a run have.

    Args:
        names (`Sequence[str]`): The names of all reward functions, as TRL logs them.
    """
    for name, count in Counter(names).items():
        if count > 1:
            logger.warning(
                "%d reward functions are called %s: all of them count, but logs have their mean "
                "under this name, and the records of rollouts the last one's reward. Give each a "
                "name of its own (def, or function.__name__ = ...)",
                count,
                name,
            )


def check_group_sizes(
    reward_functions: Sequence[RewardFunction], args: MultiTurnGRPOConfig, has_eval_dataset: bool
) -> None:
    """Check that reward functions that compare rollouts, such as [`GroupJudge`], get whole groups.

    Raises:
        `ValueError`: If a group has a single rollout or is split between processes.
    """
    # Group size and rows per process: in training, and in evaluation if there is one.
    train_rows = args.per_device_train_batch_size * args.steps_per_generation
    group_and_row_counts = [(args.num_generations, train_rows)]
    if has_eval_dataset:
        eval_group_size = args.num_generations_eval or args.num_generations
        group_and_row_counts.append((eval_group_size, args.per_device_eval_batch_size))

    for group_size, rows_per_process in group_and_row_counts:
        # A function may get a single rollout of a group that is split between processes.
        is_split = rows_per_process % group_size != 0
        for function in reward_functions:
            if hasattr(function, "check_group"):
                function.check_group(1 if is_split else group_size)


# --- as TRL calls them ---------------------------------------------------------------------------


def guard_reward_function(function: RewardFunction) -> RewardFunction:
    """Return a reward function for TRL that checks the rewards and survives an `exit()`.

    After an `exit()` or the like, which code written by a model may call, the batch has no reward
    from the function, and a warning is logged. Ordinary exceptions are bugs in the function and are
    raised, with a note that names it. NaN counts as `None`, as in TRL; the first one of a function
    is logged.

    Args:
        function (`Callable`, `str` or `torch.nn.Module`): Reward models and their names are
            returned unchanged.
    """
    if not callable(function) or isinstance(function, torch.nn.Module):
        return function

    has_warned_about_nan = False

    def return_no_rewards(error: Exception, **columns: Any) -> list[None]:
        # An ordinary exception is a bug in the function, which the user must see.
        if not isinstance(error, Escaped):
            note_source(error, f"the reward function {place_of(function)}")
            raise error
        logger.warning(
            "the reward function %s raised %s: this batch has no reward from it",
            reward_function.__name__,
            describe(error),
        )
        return [None] * len(columns["completions"])

    def check_return_value(value: object, **columns: Any) -> list[Any]:
        nonlocal has_warned_about_nan
        rewards = check_rewards(value, len(columns["completions"]), function)
        nan_count = sum(bool(reward != reward) for reward in rewards)
        if nan_count and not has_warned_about_nan:
            has_warned_about_nan = True
            logger.warning(
                "the reward function %s returned NaN for %d of %d completions: it counts as None, "
                "so these rollouts have no reward from it",
                place_of(function),
                nan_count,
                len(rewards),
            )
        return rewards

    reward_function: Any = guard_function(
        function, return_no_rewards, check_return_value, kind="reward function"
    )
    return reward_function


def check_rewards(value: Any, count: int, function: Callable[..., Any]) -> list[Any]:
    """Return the value that a reward function returned, as a list of numbers and `None`.

    Args:
        value (`Any`): The value.
        count (`int`): The number of completions that the function was called with.
        function (`Callable`): The function, which the error names.

    Raises:
        `ValueError`: If the value is anything else than one number or `None` for each completion.
    """
    description = "None" if value is None else f"a {type(value).__name__}"
    rewards: list[Any] | None = None
    if not isinstance(value, str | bytes | Mapping):
        # A number or a tensor without dimensions cannot be iterated over.
        with suppress(TypeError, ValueError):
            rewards = list(value)

    # Complete the description for the error, and drop rewards that are no numbers.
    if rewards is not None:
        if any(isinstance(reward, str) for reward in rewards):
            description += " with a str in it"
            rewards = None
        elif all(is_number_or_none(reward) for reward in rewards):
            description += f" of {len(rewards)}"
        else:
            rewards = None

    if rewards is None or len(rewards) != count:
        raise ValueError(
            f"the reward function {place_of(function)} must return a list of {count} numbers (or "
            f"None), one for each completion; it returned {description}"
        )
    return leave_out_infinite(rewards, function)


def leave_out_infinite(rewards: Sequence[Any], function: Callable[..., Any]) -> list[Any]:
    """Return rewards with `None` in place of infinite ones, such as 1e40 or 10**400.

    A function that computes with what the policy wrote may return them. A single one would make the
    advantages of its whole group NaN.
    """
    infinite_count = 0
    finite_rewards = []
    for reward in rewards:
        # NaN stays, because it already means that there is no reward.
        is_nan = reward != reward
        if reward is not None and finite_float(reward) is None and not is_nan:
            infinite_count += 1
            reward = None
        finite_rewards.append(reward)
    if infinite_count:
        logger.warning(
            "the reward function %s returned %d infinite rewards: these rollouts have no reward "
            "from it",
            place_of(function),
            infinite_count,
        )
    return finite_rewards


def is_number_or_none(value: Any) -> bool:
    """Whether a value is `None` or a number."""
    if value is None:
        return True
    try:
        finite_float(value)
    except (TypeError, ValueError):
        return False
    return True


# --- completions for reward functions ----------------------------------------------------------


def render_completions(
    rollouts: Sequence[Rollout], trl_completions: Sequence[Any], chat_format: TextFormat
) -> list[Any]:
    """Return the completions of a batch as reward functions get them.

    They are TRL's own, except for conversations of several turns, which TRL reads as one message.
    """
    completions = []
    for rollout, trl_completion in zip(rollouts, trl_completions, strict=True):
        if isinstance(trl_completion, str) or len(rollout.turns) < 2:
            completions.append(trl_completion)
        else:
            completions.append(render_completion(rollout, chat_format.for_row(rollout.row)))
    return completions


def render_completion(rollout: Rollout, chat_format: TextFormat) -> str | list[dict[str, Any]]:
    """Return a finished rollout in the form in which TRL's reward functions get a completion.

    Args:
        rollout ([`Rollout`]): Its row has the `prompt` that it started with.
        chat_format ([`TextFormat`]): Has its tokenizer and grammar.

    Returns:
        `str` if the prompt is text: everything after it. Otherwise `list[dict]`: an `assistant`
            message for each turn, with its `tool_calls`, and the messages of the observations
            between turns, from a `tool` or the `user`.
    """

    def decode(token_ids: Sequence[int]) -> str:
        return chat_format.tokenizer.decode(token_ids, skip_special_tokens=True)

    # The completion of a prompt that is text is text, too.
    if isinstance(rollout.row["prompt"], str):
        return decode(rollout.ids)

    # Otherwise it is a conversation, with a message for each turn and each observation.
    turn_spans = rollout.turn_spans or find_turn_spans(rollout.mask)
    turn_texts = [decode(rollout.ids[start:end]) for start, end in turn_spans]
    tools = getattr(chat_format, "chat_template_kwargs", {}).get("tools") or ()
    return render_messages(rollout, turn_texts, chat_format.grammar, tools)


def find_turn_spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and end of each run of tokens in the loss.

    This is for rollouts that an environment has filled in itself. The runs are its turns if all of
    them are in the loss, because tokens of the chat template separate two turns.
    """
    turn_spans = []
    start = 0
    for is_sampled, run in groupby(mask):
        end = start + len(list(run))
        if is_sampled:
            turn_spans.append((start, end))
        start = end
    return turn_spans
