"""Checks that a reward function fits what it is called with: the columns of a dataset, and more."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..llm.guard import place_of

REWARD_ARGUMENTS = frozenset(
    {
        "prompts",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
        "rollout",
    }
)
"""Arguments of reward functions that are not columns of the dataset: those of TRL, and ours."""


def check_columns(
    function: Callable[..., Any], row: Mapping[str, Any], has_all_columns: bool = False
) -> None:
    """Check that a row has the columns that a reward function needs.

    Args:
        function (`Callable`): The reward function.
        row (`Mapping[str, Any]`): A row of the dataset.
        has_all_columns (`bool`, *optional*, defaults to `False`): Whether the row has every column
            of its file. Then the message does not advise to name further ones to [`load_task`].

    Raises:
        `ValueError`: A column is missing. The message says so if it was put into `meta`, as
            [`load_task`] does with columns of the user's own.
    """
    required = required_columns(function)
    for name in required:
        if name not in row:
            if required == ["answer", "answers"]:
                raise ValueError(
                    f"{place_of(function)} compares one answer with the accepted ones: that is a "
                    "score (--score, --judge); a reward takes `completions` and columns, and "
                    "returns a number for each completion"
                )
            raise ValueError(
                f"the reward function {place_of(function)} needs the column {name!r}; the rows "
                f"have: {', '.join(row)}{_describe_meta(name, row.get('meta'), has_all_columns)}"
            )


def refuse_reserved_columns(names: Iterable[str]) -> None:
    """Refuse columns of the dataset that reward functions would not get.

    Args:
        names (`Iterable[str]`): The names of all columns.

    Raises:
        `ValueError`: The trainer passes something else to them under such a name.
    """
    reserved = [name for name in names if name in REWARD_ARGUMENTS]
    if reserved:
        raise ValueError(
            f"the rows have the column {reserved[0]!r}, but reward functions get something else "
            f"under this name: rename it, for example to 'my_{reserved[0]}'"
        )


def check_keywords(function: Callable[..., Any]) -> None:
    """Check that a reward function takes the arguments that trainers call each one with, by name.

    Raises:
        `ValueError`: The function has neither a parameter for one of them nor `**kwargs`.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # functions written in C may have no signature
        return
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in ("prompts", "completions", "completion_ids"):
        if name not in parameters:
            raise ValueError(
                f"the reward function {place_of(function)} is called with {name}= and with every "
                "column of the rows by name, as in TRL: add **kwargs to its parameters"
            )


def required_columns(function: Callable[..., Any]) -> list[str]:
    """Return the columns that a reward function needs: its parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # functions written in C may have no signature
        return []
    # Parameters such as `**kwargs` and those with a default need no column.
    required = []
    for parameter in parameters:
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        has_default = parameter.default is not parameter.empty
        if is_named and not has_default and parameter.name not in REWARD_ARGUMENTS:
            required.append(parameter.name)
    return required


def _describe_meta(name: str, meta: object, has_all_columns: bool) -> str:
    """Return where in a row's `meta` a column is, or how it gets there; else an empty text."""
    is_json = isinstance(meta, str)
    if isinstance(meta, str):
        try:
            meta = json.loads(meta)
        except ValueError:
            return ""
    if not isinstance(meta, Mapping):
        return ""
    # `load_task` writes the source of a row, and leaves out columns that were not named.
    if name not in meta:
        if "source" not in meta or has_all_columns:
            return ""
        return (
            ". load_task keeps a further column of a file only if it is named, in `meta`: "
            f"columns={{{name!r}: {name!r}}} (--columns {name}={name}), and the reward takes "
            f"`meta` and reads json.loads(meta[i])[{name!r}]; a Dataset or a list of dicts of your "
            "own keeps all, and so does a file of `train agent`"
        )
    # `load_task` writes `meta` as JSON; rows of the user's own may have a dict.
    access = f"json.loads(meta[i])[{name!r}]" if is_json else f"meta[i][{name!r}]"
    return (
        f". It is in the column `meta`: take `meta` as an argument and read {access}, or pass rows "
        "of your own (a Dataset, a list of dicts), all of whose columns reach the reward"
    )
