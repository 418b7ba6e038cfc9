"""Several environments in one run: the shares of their rows, and reward functions for one of them.

The column `environment` of a row names the one in which it is played. [`Environments`] and the methods `of` of the
[`AgentSpec`], its chat format and its limits return what belongs to a row.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..data import validate_dataset
from ..llm.guard import call_guarded
from ..rollout import Environments
from .scoring import check_rewards


class RewardOf:
    """A reward function for the rollouts of one environment; all others have no reward from it.

    Args:
        name (`str`): Name of the environment.
        function (`Callable`): Its reward function, whose other attributes this object has as well.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self.environment, self.__wrapped__ = (
            name,
            function,
        )  # its signature says which columns it needs
        self.__name__ = f"{name}/{getattr(function, '__name__', type(function).__name__)}"

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def own_rows(self, dataset: Any) -> Any:
        """The rows of the environment."""
        return dataset.select(
            [place for place, name in enumerate(dataset["environment"]) if name == self.environment]
        )

    async def __call__(self, **columns: Any) -> list[Any]:
        """The function's rewards for its own rollouts, at their positions."""
        n = len(columns["completions"])
        places = [
            place for place, name in enumerate(columns["environment"]) if name == self.environment
        ]
        if not places:
            return [None] * n
        own = {
            key: [value[place] for place in places]
            if isinstance(value, list) and len(value) == n
            else value
            for key, value in columns.items()
        }
        rewards = check_rewards(
            await call_guarded(self.__wrapped__, **own), len(places), self.__wrapped__
        )
        by_place = dict(zip(places, rewards, strict=True))
        return [by_place.get(place) for place in range(n)]


def rewards_of(functions: Any, environment: Any) -> Any:
    """The reward functions of a trainer; those of a single environment become [`RewardOf`].

    Args:
        functions (`Callable`, `list` or `Mapping`): A mapping has them by environment.
        environment ([`Environment`], *optional*): The trainer's.

    Raises:
        `ValueError`: A mapping names an unknown environment, or lacks one of the run's.
    """
    if not isinstance(functions, Mapping):
        return functions
    known = getattr(environment, "by_name", {})
    if missing := [name for name in known if name not in functions]:
        raise ValueError(f"reward_funcs has no reward function for the environment {missing[0]!r}")
    if unknown := [name for name in functions if name not in known]:
        raise ValueError(
            f"reward_funcs names the environment {unknown[0]!r}; there are: {', '.join(known) or 'none'}"
        )
    each = {
        name: own if isinstance(own, list | tuple) else [own] for name, own in functions.items()
    }
    return [RewardOf(name, function) for name, own in each.items() for function in own]


def checked_rows(environment: Any, args: Any, rows: Any, evaluated: Iterable[Any]) -> Any:
    """The training rows, in the shares of `environment_ratio`.

    Args:
        environment ([`Environment`], *optional*): The trainer's.
        args ([`MultiTurnGRPOConfig`]): The run's.
        rows (`Dataset`): To train on.
        evaluated (`Iterable`): Data sets to evaluate on; some may be `None`.

    Raises:
        `ValueError`: A row names no environment of the run, or an option would be ignored.
    """
    if not isinstance(environment, Environments):
        for name in ("environment_ratio", "environment_limits"):
            if getattr(args, name):
                raise ValueError(
                    f"{name} would be ignored: it needs several environments, environment={{name: ...}}"
                )
        return rows
    if unknown := [
        name for name in args.environment_limits or () if name not in environment.by_name
    ]:
        known = ", ".join(environment.by_name)
        raise ValueError(
            f"environment_limits names the environment {unknown[0]!r}; there are: {known}"
        )
    for dataset in (rows, *evaluated):
        if dataset is not None or dataset is rows:
            check_environments(dataset, environment)
    return (
        draw_by_ratio(rows, args.environment_ratio, args.seed) if args.environment_ratio else rows
    )


def check_environments(dataset: Any, environment: Environments) -> None:
    """Raise `ValueError` unless each row names one of the environments."""
    validate_dataset(dataset, columns=("environment",))
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            "several environments need rows that can be counted: do not stream the dataset"
        )
    for number, name in enumerate(dataset["environment"]):
        if name not in environment.by_name:
            known = ", ".join(environment.by_name)
            raise ValueError(
                f"row {number} of the dataset names the environment {name!r}; there are: {known}"
            )


def draw_by_ratio(dataset: Any, ratio: Mapping[str, float], seed: int) -> Any:
    """The rows of several environments in given shares. Each row is there at least once.

    Args:
        dataset (`Dataset`): With a column `environment`.
        ratio (`Mapping[str, float]`): The share of each environment; their sum counts as 1.
        seed (`int`): Decides the order, and which rows are there once more than others.

    Raises:
        `ValueError`: The ratio names other environments than the rows, or a share is not above 0.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(dataset["environment"]):
        places.setdefault(name, []).append(place)
    if set(ratio) != set(places):
        raise ValueError(
            f"environment_ratio names {', '.join(ratio)}; the rows name {', '.join(places)}"
        )
    if wrong := [name for name, share in ratio.items() if not 0 < share < math.inf]:
        raise ValueError(
            f"environment_ratio of {wrong[0]!r} must be above 0, got {ratio[wrong[0]]}"
        )
    draw, total = random.Random(seed), sum(ratio.values())
    rows = max(len(own) * total / ratio[name] for name, own in places.items())
    drawn: list[int] = []
    for name, own in places.items():
        wanted = max(round(rows * ratio[name] / total), len(own))
        drawn += own * (wanted // len(own)) + draw.sample(own, wanted % len(own))
    draw.shuffle(drawn)
    return dataset.select(drawn)
