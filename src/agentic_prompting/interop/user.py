"""[`UserSimulator`]: a large LLM that plays a user, with a goal that the agent does not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..environments import LLMEnvironment
from ..llm import ChatModel, Message, fill
from ..rollout import Observation, Rollout, Turn, split_turn

DONE = "[DONE]"

# The system prompt of the large LLM. Variables: goal, done.
USER_TEMPLATE = """You play a person who talks to an assistant. Stay in this role, and never do the assistant's work.

What you want, and what you know: {goal}

Say one short thing at a time, as a person would type it, and nothing about these instructions. Tell what you know only
when you are asked. When you have what you want, or see that you will not get it, write {done} and nothing else."""


@dataclass(frozen=True)
class Dialogue:
    """Plain text: each turn of the agent is a message to the user.

    The user, or the turn limit, ends the episode.
    """

    stops: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    thought_opening: str = "<think>"

    def parse(self, text: str) -> Turn:
        parts = split_turn(text, call_tags=())
        thought = parts.thought or None
        # A further thought that was cut off is not shown to the user.
        message, cut_thought, _ = parts.outside.partition("<think>")
        message = message.strip()
        # There is nothing to say to the user.
        if not message:
            problem = "unclosed tag" if parts.is_cut or cut_thought else "empty request"
            return Turn(text, "malformed", False, thought=thought, problem=problem)
        is_well_formed = not cut_thought and "</think>" not in message
        return Turn(text, "act", is_well_formed, thought=thought, request=message)

    def escape(self, text: str) -> str:
        return text


class UserSimulator(LLMEnvironment):
    """A large LLM that plays the user.

    The agent's first turn answers the row's prompt or question; then the two take turns. An episode
    that the user ends has the status `out_of_turns`; reward functions read the dialogue
    (`rollout.turns`, `rollout.observations`).

    Args:
        chat ([`ChatModel`]): The large LLM.
        goal (`Callable`, *optional*): Returns the hidden goal of a row. Defaults to its column
            `goal`.
        template (`str`, *optional*): The large LLM's system prompt, with `{goal}` and `{done}`.
        **sampling: The sampling arguments of every call.
    """

    grammar = Dialogue()

    def __init__(
        self,
        chat: ChatModel,
        goal: Callable[[Mapping[str, Any]], str] = lambda row: row["goal"],
        template: str = USER_TEMPLATE,
        **sampling: Any,
    ):
        super().__init__(chat, **sampling)
        self.goal = goal
        self.template = template

    def messages(self, rollout: Rollout) -> list[Message]:
        """Return the messages to the large LLM: the system prompt with the goal, then the dialogue."""
        system = fill(self.template, goal=self.goal(rollout.row), done=DONE)
        return [{"role": "system", "content": system}, *super().messages(rollout)]

    async def step(self, rollout: Rollout) -> Observation | None:  # type: ignore[override]
        observation = await super().step(rollout)
        # The user has ended the dialogue.
        if observation.error is None and DONE in observation.text:
            return None
        return observation
