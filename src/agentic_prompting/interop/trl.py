"""TRL's `environment_factory` classes, as they are: `reset(**row)`, public methods as tools, maybe `get_reward()`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from ..llm import LLMError, ServerFailed
from ..llm.guard import call_guarded_now, failure_of
from ..rollout import RESET_SEED, Observation, Rollout
from .tools import Tool, ToolEnvironment, called, text_of

_NOT_TOOLS = ("reset", "get_reward")


class TRLEnvironment(ToolEnvironment):
    """An environment class of TRL; every episode has an instance of its own.

    The text that `reset` returns follows the prompt, as in TRL. Unlike in TRL, the calls of a turn run at once, and an
    outage (`outages` of [`ToolEnvironment`], or a `reset` that raises) fails the rollout instead of becoming text.

    Args:
        factory (`Callable`): Makes a new instance: the class itself.
        tools (`Sequence`, *optional*): Further tools, as for [`ToolEnvironment`].
        **kwargs: Further arguments of [`ToolEnvironment`].

    Attributes:
        reward (`Callable`, *optional*): For a trainer's `reward_funcs`, where the class has `get_reward`.

    Raises:
        `TypeError`: The instances have no `reset`.
    """

    def __init__(self, factory: Callable[[], Any], tools: Sequence[Any] = (), **kwargs: Any):
        instance = factory()
        if not callable(getattr(instance, "reset", None)):
            raise TypeError(
                f"an environment class of TRL needs a method reset, {type(instance).__name__} has none"
            )
        names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
        methods = [
            self._tool(instance, name)
            for name in names
            if name[0] != "_" and name not in _NOT_TOOLS
        ]
        super().__init__([*methods, *tools], **kwargs)
        self.factory = factory
        self.reward = (
            _rewards_of(type(instance).__name__) if hasattr(instance, "get_reward") else None
        )

    @staticmethod
    def _tool(instance: Any, name: str) -> Tool:
        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            return Observation(
                text_of(await called(getattr(rollout.row["environments"], name), arguments))
            )

        return Tool(get_json_schema(getattr(instance, name)), call)

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row of one episode, with its instance in the column `environments` (TRL's name for it) and the text of
        the instance's `reset` after the prompt. Never raises: a failure is stored in that column."""
        prompt = row["prompt"]
        try:
            instance = call_guarded_now(self.factory)
            columns = {name: value for name, value in row.items() if name != RESET_SEED}
            text = await called(instance.reset, columns)
        except Exception as error:
            failed = (
                error if isinstance(error, LLMError) else failure_of(ServerFailed, "reset", error)
            )
            return {**row, "environments": failed}
        if text is not None:
            # Text in TRL's standard format, else messages.
            prompt = (
                prompt + text
                if isinstance(prompt, str)
                else [*prompt[:-1], _longer(prompt[-1], text)]
            )
        return {**row, "prompt": prompt, "environments": instance}

    async def step(self, rollout: Rollout) -> Observation:
        if isinstance(instance := rollout.row["environments"], LLMError):
            return Observation(error=instance)
        return await super().step(rollout)


def _longer(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {**message, "content": message["content"] + text}


def _rewards_of(name: str) -> Callable[..., Any]:
    """A reward function with TRL's signature and the name of the class. It returns each instance's `get_reward()`, and
    `None` where `reset` failed."""

    async def own(instance: Any) -> float | None:
        return None if isinstance(instance, LLMError) else await called(instance.get_reward, {})

    async def rewards(environments: Sequence[Any], **columns: Any) -> list[float | None]:
        return list(await asyncio.gather(*map(own, environments)))

    rewards.__name__ = name
    return rewards
