"""[`Environment`], which answers the agent's requests, and its adapters.

An environment needs only `step`. [`as_environment`] adapts any object with a `step`, or a plain
function of the rollout, once: in a trainer, an agent or a command. All other code reads attributes
of an [`Environment`].
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from ..llm import Budget, LLMError, ServerFailed
from ..llm.budget import charge_models_of
from ..llm.guard import call_guarded, failure_of, place_of, wait_for
from .grammar import Grammar
from .types import Limits, Observation, Rollout

T = TypeVar("T")

# The column of a row whose `reset` failed.
RESET_ERROR = "reset_error"
# The column with the seed that `reset` may draw from.
RESET_SEED = "reset_seed"


class Environment:
    """Answers the agent's requests. A subclass defines `step` and the optional members it needs.

    Methods may be plain or `async`. A plain method runs in a thread, possibly several at once, and
    may block. An error of a method in one episode fails only that rollout.

    Attributes:
        grammar ([`Grammar`], *optional*): The form of the agent's requests. `None`: the trainer's
            default, tags.
        prompt_template (`str`, *optional*): The agent's user message, with `{question}` and the
            grammar's tag names. `None`: a text made of the class's name and the first paragraph of
            its docstring.
        chat_template_kwargs (`Mapping`): Arguments for the chat template, such as `tools`.
        step_timeout (`float`, *optional*): Seconds that one `step` or `reset` may take; the rollout
            then fails. `None`: the run's `step_timeout`. `math.inf`: no limit, for calls that have
            limits of their own.
        repeatable_reset (`bool`): Whether `reset` depends only on its row. A resumed run with
            `async_lead` then calls it again and continues the episodes in flight, instead of
            replaying them from the start.
        play_episode (`Callable`, *optional*): An environment that plays whole episodes has this
            `async` method, with the arguments `(rollout, policy, chat_format, limits)`; `step` is
            then never called. Ask [`Environment.plays_whole_episodes`] whether one does.

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
        """Answer a request of the agent (`rollout.turns[-1].kind == "act"`).

        Returns:
            [`Observation`] or `str`: The text that the agent reads next; `None` if the episode is
            over.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(rollout)")

    def reset(self, row: dict[str, Any]) -> Awaitable[dict[str, Any]] | dict[str, Any]:
        """Start an episode.

        Args:
            row (`dict`): A row of the data set, with the messages of its prompt in `prompt`, and a
                seed in `reset_seed`, the same for all rollouts of a group, for everything that
                differs between episodes. A row of the data set may have a `reset_seed` of its own.

        Returns:
            `dict`: The row of this episode, which the rollout and the rewards get. Its `prompt` may
            have changed.
        """
        return row

    @property
    def identity(self) -> Mapping[str, Any]:
        """Plain settings that decide what its observations are. Empty by default.

        A run with other settings uses neither the episodes in flight nor the answers of an
        evaluation that were recorded before.
        """
        return {}

    def check(self) -> None:
        """Raise the [`LLMError`] that a first `step` would cause, before a run spends anything."""

    def keep_private(self, paths: Sequence[str]) -> None:
        """Hide files and folders of a run, such as its output and its data, from the agent."""

    def hide_columns(self, columns: Mapping[str, str]) -> None:
        """Hide the truth from the agent under the names that the user's data has for it, too.

        Args:
            columns (`Mapping[str, str]`): Our name for a column -> that of the data. Rows have
                both.
        """

    def charge_to(self, budget: Budget, account: str) -> None:
        """Charge the environment's spending to `budget`.

        By default these are the calls of the models in the attributes `chat`, `model` and `models`.
        """
        charge_models_of(self, budget, account)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that a checkpoint keeps; `None` without one."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a `state_dict()`."""

    def close(self) -> None:
        """Release the environment's resources: connections, processes."""

    @property
    def has_reset(self) -> bool:
        """Whether the environment defines `reset`."""
        return type(self).reset is not Environment.reset

    @property
    def plays_whole_episodes(self) -> bool:
        """Whether the environment is a program: an agent that keeps its own loop."""
        return self.play_episode is not None

    @property
    def described_by(self) -> Any:
        """The class or function whose name and docstring describe the environment."""
        return type(self)


class Environments(Environment):
    """Several environments in one run. The column `environment` of a row names the row's own.

    Args:
        environments (`Mapping[str, Any]`): By name; each as for [`as_environment`].

    Raises:
        `TypeError`: A value is not an environment, or plays whole episodes; the message names it.
    """

    def __init__(self, environments: Mapping[str, Any]):
        if not environments:
            raise TypeError("environment is an empty mapping: name at least one environment")
        self.by_name = {
            name: _as_named_environment(name, candidate) for name, candidate in environments.items()
        }
        # Each environment has a grammar of its own.
        self.grammar = {  # type: ignore[assignment]
            name: environment.grammar for name, environment in self.by_name.items()
        }

    def for_row(self, row: Mapping[str, Any]) -> Environment:
        """Return the environment of a row.

        Raises:
            `ValueError`: The row names none of them.
        """
        name = row.get("environment")
        if name not in self.by_name:
            raise ValueError(
                f"a row names the environment {name!r}; there are: {', '.join(self.by_name)}"
            )
        return self.by_name[name]

    async def reset(self, row: dict[str, Any]) -> Any:
        """Let the row's environment start an episode."""
        environment = self.for_row(row)
        if not environment.has_reset:
            return row
        return await call_guarded(environment.reset, row)

    def check(self) -> None:
        """Check each environment."""
        for environment in self.by_name.values():
            environment.check()

    def charge_to(self, budget: Budget, account: str) -> None:
        """Charge the spending of each environment to an account of its own, `account/name`."""
        for name, environment in self.by_name.items():
            environment.charge_to(budget, f"{account}/{name}")

    def state_dict(self) -> dict[str, Any] | None:
        """Return the states of the environments that have one, by name."""
        states = {name: environment.state_dict() for name, environment in self.by_name.items()}
        # Environments without a state are left out.
        return {name: state for name, state in states.items() if state is not None} or None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each environment."""
        for name, environment_state in state.items():
            self.by_name[name].load_state_dict(environment_state)

    def close(self) -> None:
        """Close each environment."""
        for environment in self.by_name.values():
            environment.close()

    @property
    def has_reset(self) -> bool:
        return any(environment.has_reset for environment in self.by_name.values())

    @property
    def repeatable_reset(self) -> bool:  # type: ignore[override]
        return all(
            environment.repeatable_reset
            for environment in self.by_name.values()
            if environment.has_reset
        )

    @property
    def identity(self) -> Mapping[str, Any]:
        identities = {
            name: dict(environment.identity) for name, environment in self.by_name.items()
        }
        return {name: identity for name, identity in identities.items() if identity}


def _as_named_environment(name: str, candidate: Any) -> Environment:
    """Adapt one of several environments; an error names it."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of an environment must be a non-empty str, got {name!r}")

    # Adapt it; an error says which of the environments is meant.
    try:
        environment = as_environment(candidate)
    except TypeError as error:
        raise TypeError(f"environment {name!r}: {error}") from None

    # Only environments with a `step` can share a run.
    is_nested = isinstance(environment, Environments)
    if environment is None or environment.plays_whole_episodes or is_nested:
        raise TypeError(
            f"environment {name!r} must have a step(rollout): a program cannot be one of several "
            "environments, nor can None or a mapping"
        )
    return environment


class _FunctionEnvironment(Environment):
    """Adapts a function of the rollout."""

    def __init__(self, function: Callable[[Rollout], Any]):
        self.step = function  # type: ignore[assignment, method-assign]

    @property
    def described_by(self) -> Any:
        return self.step


class _ObjectEnvironment(Environment):
    """Adapts any object with a `step`. All other attributes are the object's."""

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


def _forward_to_adapted(name: str) -> property:
    """Return a property: the adapted object's member if it has one, else [`Environment`]'s."""

    def get(self: _ObjectEnvironment) -> Any:
        if hasattr(self.adapted, name):
            return getattr(self.adapted, name)
        return getattr(super(_ObjectEnvironment, self), name)

    return property(get)


# Every public member of `Environment` is looked up on the adapted object first.
for _name in vars(Environment):
    if not _name.startswith("_") and _name not in vars(_ObjectEnvironment):
        setattr(_ObjectEnvironment, _name, _forward_to_adapted(_name))


def as_environment(candidate: Any) -> Environment | None:
    """Return an [`Environment`] made of `candidate`.

    Args:
        candidate ([`Environment`], object with a `step`, `Callable` or `Mapping`, *optional*): A
            function is the `step`, plain or `async`: it gets the [`Rollout`] and returns an
            [`Observation`], its text, or `None` if the episode is over. A mapping has several by
            name: [`Environments`]. `None` stays `None`.

    Raises:
        `TypeError`: There is no `step(rollout)` to call; the message says what to pass instead.
        `ValueError`: Its `step_timeout` is not above 0.
    """
    # Neither `None` nor several environments need an adapter.
    if candidate is None or isinstance(candidate, Environments):
        return candidate
    if isinstance(candidate, Mapping):
        return Environments(candidate)
    # A class has a `step` as well, but it needs an object.
    if inspect.isclass(candidate):
        name = candidate.__name__
        raise TypeError(f"environment is the class {name}: pass an object of it, {name}(...)")

    # Check that there is a step(rollout).
    is_function = inspect.isroutine(candidate)
    step = candidate if is_function else getattr(candidate, "step", None)
    name = getattr(candidate, "__name__", type(candidate).__name__)
    if not callable(step) or getattr(step, "__func__", None) is Environment.step:
        raise TypeError(
            f"environment has no step(rollout) to call: {name}. Pass an object with that method, a "
            "function of the rollout, LLMEnvironment(chat) around a large LLM, or Program(agent) "
            "around a function of (row, base_url, api_key)"
        )
    # A step is called with one argument, the rollout.
    try:
        inspect.signature(step).bind(None)
    except TypeError as error:
        # A function may be meant as an agent, which is no environment by itself.
        advice = ""
        if is_function:
            advice = "; an agent must take (row, base_url, api_key)"
            if "base_url" in inspect.signature(candidate).parameters:
                advice += f" and is passed as Program({name})"
        raise TypeError(
            f"environment {name} must take one argument, the rollout: {error}{advice}"
        ) from None
    except ValueError:  # a function written in C may have no signature
        pass

    # Check its time limit.
    timeout = getattr(candidate, "step_timeout", None)
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ValueError(
            f"step_timeout of the environment {name} must be seconds above 0 or None, "
            f"got {timeout!r}"
        )

    # Choose the adapter.
    if isinstance(candidate, Environment):
        return candidate
    return _FunctionEnvironment(candidate) if is_function else _ObjectEnvironment(candidate)


async def call_environment(
    environment: Environment,
    method: Callable[[Any], Any],
    argument: Any,
    step_timeout: float | None,
    receive: Callable[[Any], T] = lambda returned: returned,
) -> T:
    """Call a method of an environment within the time limit, and return its result.

    Args:
        environment ([`Environment`]): Its own `step_timeout` takes precedence.
        method (`Callable`): Its `step` or `reset`.
        argument (`Any`): The method's argument.
        step_timeout (`float`, *optional*): The limit in seconds.
        receive (`Callable`, *optional*): Converts the returned value, in the task that called the
            method. A caller that is cancelled may never see the value; `receive` always does.

    Raises:
        [`TimedOut`]: The method did not return in time.
        `Exception`: Whatever the method or `receive` raises.
    """

    # The value is converted in the task that called the method.
    async def call_method() -> T:
        return receive(await call_guarded(method, argument))

    # The environment's own limit takes precedence.
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
    """Return the rows of a batch of episodes after the environment's `reset` of each.

    Never raises: if a `reset` fails, its row has the [`LLMError`] under `RESET_ERROR`, and `play`
    ends its rollout as `failed` before the first turn. Each row gets its seed of `seeds` (by
    default its number) in the column `RESET_SEED`, unless it has one. All rows have the same
    columns, since rewards get columns; a missing value is `None`.
    """
    if environment is None or not environment.has_reset:
        return list(rows)

    # All episodes start at the same time, each row with its seed.
    if seeds is None:
        seeds = range(len(rows))
    resets = [
        _reset_row(environment, {RESET_SEED: seed, **row}, limits)
        for row, seed in zip(rows, seeds, strict=True)
    ]
    return same_columns(await asyncio.gather(*resets))


def same_columns(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the rows, all with the same columns."""
    columns = dict.fromkeys(chain.from_iterable(rows))
    return [{**columns, **row} for row in rows]


async def _reset_row(
    environment: Environment, row: dict[str, Any], limits: Limits
) -> dict[str, Any]:
    try:
        # With several environments the row names its own.
        if isinstance(environment, Environments):
            environment = environment.for_row(row)
        if not environment.has_reset:
            return row

        # Start the episode, and check the environment's row.
        step_timeout = limits.for_row(row).step_timeout
        episode_row: Any = await call_environment(environment, environment.reset, row, step_timeout)
        if not isinstance(episode_row, Mapping):
            raise ServerFailed(
                f"{place_of(environment.reset)} must return the row of the episode, a dict, "
                f"not {type(episode_row).__name__}"
            )
        return dict(episode_row)
    except LLMError as error:
        # `play` ends the rollout of such a row as failed.
        return {**row, RESET_ERROR: error}
    except Exception as error:
        return {**row, RESET_ERROR: failure_of(ServerFailed, "the environment's reset", error)}
