"""[`TRLEnvironment`]: runs TRL's `environment_factory` classes unchanged.

Such a class has `reset(**row)`, public methods as tools, and maybe `get_reward()`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from ..llm import LLMError, ServerFailed
from ..llm.guard import call_guarded, failure_of
from ..rollout import RESET_SEED, Observation, Rollout
from .tools import Tool, ToolEnvironment, Tools, to_text

RewardFunction = Callable[..., Coroutine[Any, Any, list[float | None]]]

_RESERVED_METHODS = ("reset", "get_reward")


class TRLEnvironment(ToolEnvironment):
    """An environment class of TRL. Every episode has its own instance.

    The text that `reset` returns follows the prompt, as in TRL. Unlike in TRL, the calls of a turn
    run at the same time, and an outage (`outages` of [`ToolEnvironment`], or a `reset` that raises)
    fails the rollout instead of becoming text.

    Args:
        factory (`Callable`): Creates an instance: the class itself.
        tools (`Sequence`, *optional*): Further tools, as for [`ToolEnvironment`].
        **kwargs: Further arguments of [`ToolEnvironment`].

    Attributes:
        reward (`Callable`, *optional*): For a trainer's `reward_funcs`, if the class has
            `get_reward`.

    Raises:
        `TypeError`: The instances have no `reset`.
        `ValueError`: There is no tool: neither a public method nor one of `tools`.
    """

    def __init__(self, factory: Callable[[], Any], tools: Tools = (), **kwargs: Any):
        # One instance shows the methods of the class.
        instance = factory()
        class_name = type(instance).__name__
        if not callable(getattr(instance, "reset", None)):
            raise TypeError(
                f"an environment class of TRL needs a method reset, {class_name} has none"
            )
        # Public methods are the agent's tools, except for those that TRL itself calls.
        methods = []
        for name, _ in inspect.getmembers(type(instance), inspect.isfunction):
            if not name.startswith("_") and name not in _RESERVED_METHODS:
                methods.append(self._create_tool(instance, name))
        if not methods and not tools:
            raise ValueError(
                f"the environment class {class_name} gives the agent no tool: a tool is a public "
                "method besides reset and get_reward. Add one, or pass tools="
            )
        super().__init__([*methods, *tools], **kwargs)
        self.factory = factory
        # The reward of an episode is asked of its instance.
        self.reward: RewardFunction | None = None
        if hasattr(instance, "get_reward"):
            self.reward = _create_reward(class_name)

    def _create_tool(self, instance: Any, name: str) -> Tool:
        """Create a tool that calls a method of the episode's instance."""

        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            method = getattr(rollout.row["environments"], name)
            return Observation(to_text(await call_guarded(method, **arguments)))

        return Tool(schema=get_json_schema(getattr(instance, name)), call=call)

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of one episode, with an instance and the text of its `reset`.

        The instance is in the column `environments` (TRL's name for it), the text after the prompt.
        Never raises: a failure is stored in that column.
        """
        try:
            # Create the instance of this episode in a thread, because it may load something, and
            # start it.
            instance = await call_guarded(lambda: self.factory())
            # The seed of the reset is for our environments.
            columns = {name: value for name, value in row.items() if name != RESET_SEED}
            text = await call_guarded(instance.reset, **columns)
        except LLMError as error:
            return {**row, "environments": error}
        except Exception as error:
            return {**row, "environments": failure_of(ServerFailed, "reset", error)}

        # The prompt is text, or in TRL's conversational format messages.
        prompt = row["prompt"]
        if text is not None:
            if isinstance(prompt, str):
                prompt = prompt + text
            else:
                last_message = {**prompt[-1], "content": prompt[-1]["content"] + text}
                prompt = [*prompt[:-1], last_message]
        return {**row, "prompt": prompt, "environments": instance}

    async def step(self, rollout: Rollout) -> Observation:
        instance = rollout.row["environments"]
        # The `reset` of this episode failed.
        if isinstance(instance, LLMError):
            return Observation(error=instance)
        return await super().step(rollout)


def _create_reward(class_name: str) -> RewardFunction:
    """Create a reward function with TRL's signature and the name of the environment class.

    It returns each instance's `get_reward()`, and `None` where `reset` failed.
    """

    async def get_reward(instance: Any) -> float | None:
        if isinstance(instance, LLMError):
            return None
        return await call_guarded(instance.get_reward)

    async def get_rewards(environments: Sequence[Any], **columns: Any) -> list[float | None]:
        return list(await asyncio.gather(*map(get_reward, environments)))

    # Trainers log a reward under the name of its function.
    get_rewards.__name__ = class_name
    return get_rewards
