"""Whatever a user brings as an environment, checked before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..rollout import Environment, Rollout


class FunctionEnvironment:
    """A function as an environment.

    Args:
        function (`Callable`): As [`Environment`]'s `step`, with or without `async`: gets the [`Rollout`], gives an
            [`Observation`], its text, or `None` if the episode is over.
    """

    def __init__(self, function: Callable[[Rollout], Any]):
        self.step = function


def as_environment(given: Any) -> Environment | None:
    """An environment of an object with a `step`, or of a plain function; `None` stays `None`.

    Raises:
        `TypeError`: For anything that has no `step(rollout)` to call; says what to pass instead.
    """
    if given is None:
        return None
    if inspect.isclass(given):
        raise TypeError(f"environment is the class {given.__name__}: pass an object of it, {given.__name__}(...)")
    environment = FunctionEnvironment(given) if inspect.isroutine(given) else given
    step, name = getattr(environment, "step", None), getattr(given, "__name__", type(given).__name__)
    if not callable(step):
        raise TypeError(
            f"environment has no step(rollout) to call: {name}. Pass an object with that method, a function of the "
            "rollout, or LLMEnvironment(chat) around a large LLM"
        )
    try:
        inspect.signature(step).bind(None)
    except TypeError as error:
        raise TypeError(f"environment {name} must take one argument, the rollout: {error}") from None
    except ValueError:  # one in C tells nothing of its arguments
        pass
    return environment
