"""[`Environment`], which answers the agent's requests, with all its optional members; and [`as_environment`].

An environment needs nothing but `step`. Any object with a `step`, and a plain function of the rollout, are adapted
once, at the front doors (a trainer, an agent, the commands); the code behind them reads attributes of an
[`Environment`].
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..llm import Budget, LLMError, ServerFailed
from ..llm.budget import charge_models_of
from ..llm.guard import call_guarded, failure_of, place_of
from ..llm.waiting import wait_for
from .grammar import Grammar
from .types import Limits, Observation, Rollout

T = TypeVar("T")

RESET_ERROR = "reset_error"  # the column of a row whose `reset` failed
RESET_SEED = "reset_seed"  # the column with the seed that `reset` may draw from


class Environment:
    """Answers the agent's requests. A subclass defines `step`, and those other members that it needs.

    Methods may be plain or `async`. A plain one runs in a thread, several of them at once, and may block. An error of a
    method in one episode fails that rollout alone.

    Attributes:
        grammar ([`Grammar`], *optional*): How the agent writes requests to it. `None`: the trainer's default, tags.
        prompt_template (`str`, *optional*): The agent's user message, with `{question}` and the grammar's tag names.
            `None`: a text made of the class's name and the first paragraph of its docstring.
        chat_template_kwargs (`Mapping`): Arguments for the chat template, such as `tools`.
        step_timeout (`float`, *optional*): Seconds that one `step` or `reset` may take; the rollout then fails. `None`:
            the run's `step_timeout`. `math.inf`: no limit, for calls that have limits of their own.
        repeatable_reset (`bool`): Whether `reset` is a function of its row alone. A resumed run with `async_lead` then
            calls it again and goes on with the episodes in flight, instead of playing them anew.
        play_episode (`Callable`, *optional*): An environment that plays whole episodes has this method, `async`, with
            the arguments `(rollout, policy, chat_format, limits)`; `step` is then never called.

    Example:

    ```python
    class Calculator(Environment):
        "A calculator that evaluates one expression."

        def step(self, rollout):
            return str(evaluate(rollout.turns[-1].request))
    ```
    """

    grammar: Grammar | None = None
    prompt_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = {}
    step_timeout: float | None = None
    repeatable_reset: bool = False
    play_episode: Callable[..., Awaitable[Rollout]] | None = None

    def step(
        self, rollout: Rollout
    ) -> Awaitable[Observation | str | None] | Observation | str | None:
        """Answer a turn that asks something (`rollout.turns[-1].kind == "act"`).

        Returns:
            [`Observation`] or `str`: The text that the agent reads next; `None` if the episode is over.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(rollout)")

    def reset(self, row: dict[str, Any]) -> Awaitable[dict[str, Any]] | dict[str, Any]:
        """Start an episode.

        Args:
            row (`dict`): A row of the data set, with the messages of its prompt in `prompt`, and a seed in
                `reset_seed`, which is the same for all rollouts of a group: draw from it what differs between episodes.
                A row of the data set may have a `reset_seed` of its own.

        Returns:
            `dict`: The row of this episode, which the rollout and the rewards get. Its `prompt` may have changed.
        """
        return row

    @property
    def identity(self) -> Mapping[str, Any]:
        """Plain settings that decide what its observations are. A run with other settings uses neither the episodes in
        flight nor the answers of an evaluation that were recorded before. Empty by default."""
        return {}

    def check(self) -> None:
        """Raise the error that a first `step` would cause (an [`LLMError`]), before a run spends anything."""

    def keep_private(self, paths: Sequence[str]) -> None:
        """Be told the files and folders of a run that no agent may see: its output, its data."""

    def charge_to(self, budget: Budget, account: str) -> None:
        """Charge the environment's spending to `budget`. By default that of the models in its attributes `chat`,
        `model` and `models`."""
        charge_models_of(self, budget, account)

    def state_dict(self) -> dict[str, Any] | None:
        """The state that a checkpoint keeps; `None` if there is none."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`."""

    def close(self) -> None:
        """Release the environment's resources: connections, processes."""

    @property
    def has_reset(self) -> bool:
        """Whether it defines `reset`."""
        return type(self).reset is not Environment.reset

    @property
    def described_by(self) -> Any:
        """The class or function whose name and docstring describe the environment."""
        return type(self)


class Environments(Environment):
    """Several environments in one run. The column `environment` of a row names the row's own.

    Args:
        environments (`Mapping[str, Any]`): By name; each as for [`as_environment`].

    Raises:
        `TypeError`: One of them is no environment, or plays whole episodes; the message names it.
    """

    def __init__(self, environments: Mapping[str, Any]):
        if not environments:
            raise TypeError("environment is an empty mapping: name at least one environment")
        self.by_name = {name: _named(name, one) for name, one in environments.items()}
        self.grammar = {name: one.grammar for name, one in self.by_name.items()}  # type: ignore[assignment]

    def of(self, row: Mapping[str, Any]) -> Environment:
        """The environment of a row.

        Raises:
            `ValueError`: The row names none of them.
        """
        if (name := row.get("environment")) not in self.by_name:
            raise ValueError(
                f"a row names the environment {name!r}; there are: {', '.join(self.by_name)}"
            )
        return self.by_name[name]

    async def reset(self, row: dict[str, Any]) -> Any:
        """The row's environment starts an episode."""
        own = self.of(row)
        return await call_guarded(own.reset, row) if own.has_reset else row

    def check(self) -> None:
        """Check each."""
        for one in self.by_name.values():
            one.check()

    def keep_private(self, paths: Sequence[str]) -> None:
        """Be told the files and folders of a run that no agent may see: its output, its data."""

    def charge_to(self, budget: Budget, account: str) -> None:
        """Charge the spending of each to an account of its own, `account/name`."""
        for name, one in self.by_name.items():
            one.charge_to(budget, f"{account}/{name}")

    def state_dict(self) -> dict[str, Any] | None:
        """The states of the environments that have one, by name."""
        states = {name: one.state_dict() for name, one in self.by_name.items()}
        return {name: state for name, state in states.items() if state is not None} or None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue each from its own state."""
        for name, own in state.items():
            self.by_name[name].load_state_dict(own)

    def close(self) -> None:
        """Close each."""
        for one in self.by_name.values():
            one.close()

    @property
    def has_reset(self) -> bool:
        return any(one.has_reset for one in self.by_name.values())

    @property
    def repeatable_reset(self) -> bool:  # type: ignore[override]
        return all(one.repeatable_reset for one in self.by_name.values() if one.has_reset)

    @property
    def identity(self) -> Mapping[str, Any]:
        identities = {name: dict(one.identity) for name, one in self.by_name.items()}
        return {name: values for name, values in identities.items() if values}


def _named(name: Any, thing: Any) -> Environment:
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of an environment must be a text, got {name!r}")
    try:
        one = as_environment(thing)
    except TypeError as error:
        raise TypeError(f"environment {name!r}: {error}") from None
    if one is None or one.play_episode is not None or isinstance(one, Environments):
        raise TypeError(
            f"environment {name!r} must have a step(rollout): a program, or none, cannot be one of several"
        )
    return one


class _Function(Environment):
    """A function of the rollout as an environment."""

    def __init__(self, function: Callable[[Rollout], Any]):
        self.step = function  # type: ignore[assignment, method-assign]

    @property
    def described_by(self) -> Any:
        return self.step


def _forwarded(name: str) -> Any:
    """A property: the adapted object's own member where it has one, else the default of [`Environment`]."""

    def get(self: Any) -> Any:
        return (
            getattr(self.adapted, name)
            if hasattr(self.adapted, name)
            else getattr(super(_Object, self), name)
        )

    return property(get)


class _Object(Environment):
    """Any object with a `step` as an environment. Its other attributes are those of the object."""

    def __init__(self, adapted: Any):
        self.adapted = adapted

    @property
    def has_reset(self) -> bool:
        return hasattr(self.adapted, "reset")

    @property
    def described_by(self) -> Any:
        return type(self.adapted)

    def __getattr__(self, name: str) -> Any:
        if name == "adapted":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.adapted, name)


for _name in vars(Environment):
    if not _name.startswith("_") and _name not in vars(_Object):
        setattr(_Object, _name, _forwarded(_name))


def as_environment(thing: Any) -> Environment | None:
    """An [`Environment`] made of `thing`.

    Args:
        thing ([`Environment`], object with a `step`, `Callable` or `Mapping`, *optional*): A function is the `step`,
            plain or `async`: it gets the [`Rollout`] and returns an [`Observation`], its text, or `None` if the episode
            is over. A mapping has several by name: [`Environments`]. `None` stays `None`.

    Raises:
        `TypeError`: There is no `step(rollout)` to call; the message says what to pass instead.
        `ValueError`: Its `step_timeout` is not above 0.
    """
    if thing is None or isinstance(thing, Environments):
        return thing
    if isinstance(thing, Mapping):
        return Environments(thing)
    if inspect.isclass(thing):
        raise TypeError(
            f"environment is the class {thing.__name__}: pass an object of it, {thing.__name__}(...)"
        )
    step = thing if inspect.isroutine(thing) else getattr(thing, "step", None)
    name = getattr(thing, "__name__", type(thing).__name__)
    if not callable(step) or getattr(step, "__func__", None) is Environment.step:
        raise TypeError(
            f"environment has no step(rollout) to call: {name}. Pass an object with that method, a function of the "
            "rollout, or LLMEnvironment(chat) around a large LLM"
        )
    try:
        inspect.signature(step).bind(None)
    except TypeError as error:
        raise TypeError(
            f"environment {name} must take one argument, the rollout: {error}"
        ) from None
    except ValueError:  # a function written in C may have no signature
        pass
    limit = getattr(thing, "step_timeout", None)
    if limit is not None and not (isinstance(limit, int | float) and limit > 0):
        raise ValueError(
            f"step_timeout of the environment {name} must be seconds above 0 or None, got {limit!r}"
        )
    if isinstance(thing, Environment):
        return thing
    return _Function(thing) if step is thing else _Object(thing)


async def call_environment(
    environment: Environment,
    method: Callable[[Any], Any],
    argument: Any,
    step_timeout: float | None,
    receive: Callable[[Any], T] = lambda returned: returned,
) -> T:
    """What a method of an environment returns, within the time limit.

    Args:
        environment ([`Environment`]): Its own `step_timeout` takes precedence.
        method (`Callable`): Its `step` or `reset`.
        argument (`Any`): The method's argument.
        step_timeout (`float`, *optional*): The limit in seconds.
        receive (`Callable`, *optional*): Converts the returned value, in the task that called the method. A caller
            that is cancelled may never see the value; `receive` always does.

    Raises:
        [`TimedOut`]: The method did not return in time.
        `Exception`: Whatever the method or `receive` raises.
    """

    async def call_method() -> T:
        return receive(await call_guarded(method, argument))

    limit = getattr(environment, "step_timeout", None)
    if limit is None:
        limit = step_timeout
    if limit == math.inf:
        return await call_method()
    return await wait_for(call_method(), f"the environment {place_of(method)}", limit)


async def reset_rows(
    environment: Environment | None,
    rows: Sequence[dict[str, Any]],
    limits: Limits = Limits(),
    seeds: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """The rows of a batch of episodes, after the environment's `reset` of each, all at once. Never raises.

    Each row gets its seed of `seeds` (by default its number) in the column `RESET_SEED`, unless it has one.

    If a `reset` fails, its row has the [`LLMError`] under `RESET_ERROR`, and `play` ends its rollout as `failed`
    before the first turn. All rows have the same columns, `None` where one has nothing, since rewards get columns.
    """
    if environment is None or not environment.has_reset:
        return list(rows)
    if seeds is None:
        seeds = range(len(rows))
    resets = [
        _reset(environment, {RESET_SEED: seed, **row}, limits)
        for row, seed in zip(rows, seeds, strict=True)
    ]
    return same_columns(await asyncio.gather(*resets))


def same_columns(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the rows, all with the same columns."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{**columns, **row} for row in rows]


async def _reset(environment: Environment, row: dict[str, Any], limits: Limits) -> dict[str, Any]:
    try:
        if isinstance(environment, Environments):
            environment = environment.of(row)
        if not environment.has_reset:
            return row
        begun: Any = await call_environment(
            environment, environment.reset, row, limits.of(row).step_timeout
        )
        if not isinstance(begun, Mapping):
            wrong = type(begun).__name__
            raise ServerFailed(
                f"{place_of(environment.reset)} must return the row of the episode, a dict, not {wrong}"
            )
        return dict(begun)
    except LLMError as error:
        return {**row, RESET_ERROR: error}
    except Exception as error:
        return {**row, RESET_ERROR: failure_of(ServerFailed, "the environment's reset", error)}
