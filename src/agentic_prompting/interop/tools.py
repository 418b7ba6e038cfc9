"""Tools as an environment: Python functions, and anything else that can be called.

If a tool raises, the agent gets the error as text and may try again. An outage fails the rollout,
as in every environment.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from transformers.utils import get_json_schema

from ..llm import (
    Budget,
    ChatModel,
    LLMError,
    Message,
    ServerFailed,
    TimedOut,
    Unreachable,
    as_chat,
    charge,
    without_thoughts,
)
from ..llm.guard import Escaped, call_guarded, describe
from ..rollout import Environment, Observation, Rollout, read_call
from ..rollout.play import run_tool
from .tool_grammar import ToolGrammar

_EXAMPLE_CALL = '{"name": "...", "arguments": {...}}'


@dataclass(frozen=True)
class Tool:
    """A tool of the agent.

    Args:
        schema (`dict`): Its JSON schema, as chat templates take it: `{"type": "function",
            "function": {...}}`.
        call (`Callable`): Gets the arguments and the rollout; returns an [`Observation`], or
            raises.
        chat ([`ChatModel`], *optional*): The large LLM that it calls, whose costs count.
    """

    schema: Mapping[str, Any]
    call: Callable[[dict[str, Any], Rollout], Awaitable[Observation]]
    chat: ChatModel | None = None

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @classmethod
    def create(
        cls,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        call: Callable[[dict[str, Any], Rollout], Awaitable[Observation]],
        chat: ChatModel | None = None,
    ) -> Tool:
        """Create a tool from the parts of its schema.

        Args:
            name (`str`): The name of the tool.
            description (`str`): The description that the agent reads.
            parameters (`dict`): The JSON schema of its arguments.
            call (`Callable`): As for [`Tool`].
            chat ([`ChatModel`], *optional*): As for [`Tool`].
        """
        function = {"name": name, "description": description, "parameters": parameters}
        return cls(schema={"type": "function", "function": function}, call=call, chat=chat)

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Create a tool from a Python function, with or without `async`.

        Its schema comes from the function's type annotations and a docstring with `Args:`;
        `get_json_schema` raises if an argument lacks one of them.

        Args:
            function (`Callable`): The function. The agent reads its return value as text.
        """

        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            result = await call_guarded(function, **arguments)
            return Observation(to_text(result))

        return cls(schema=get_json_schema(function), call=call)


@runtime_checkable
class ToolCollection(Protocol):
    """An object with a list of tools, for example [`MCPTools`]."""

    tools: Sequence[Tool | Callable[..., Any]]


Tools: TypeAlias = Sequence[Tool | Callable[..., Any] | ToolCollection]


def ask_tool(
    chat: ChatModel, name: str = "ask", description: str = "Asks a large language model."
) -> Tool:
    """Create a tool that asks a large LLM. Its failures are outages, and its calls are counted.

    Args:
        chat ([`ChatModel`]): The large LLM.
        name (`str`, *optional*, defaults to `"ask"`): The name of the tool. Its one argument is
            `prompt`.
        description (`str`, *optional*): Tells the agent what the tool does.
    """

    async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
        # The seed identifies the rollout, so a replayed run finds its replies again.
        messages = [Message(role="user", content=str(arguments["prompt"]))]
        reply = await as_chat(chat)(messages, repeat=rollout.seed, session=str(rollout.seed))
        # Some servers leave the thought in the text.
        shown_reply = without_thoughts(reply)
        return Observation(shown_reply.text, error=shown_reply.error, replies=(reply,))

    prompt = {"type": "string", "description": "The question, complete in itself."}
    parameters = {"type": "object", "properties": {"prompt": prompt}, "required": ["prompt"]}
    return Tool.create(name, description, parameters, call, chat=chat)


class ToolEnvironment(Environment):
    """Tools as an environment. The calls of one turn run at the same time.

    Args:
        tools (`Sequence`): Python functions, [`Tool`]s, and objects with a list of them as `.tools`
            ([`MCPTools`]).
        max_chars (`int`, *optional*, defaults to `8192`): Longer results are cut to this length.
        outages (`tuple`, *optional*): The exceptions of a tool that are not the agent's fault: the
            rollout fails and is left out of the loss. An [`LLMError`] always is one. Any other
            exception of a tool is given to the agent as text, with secrets masked.
        max_calls (`int`, *optional*, defaults to `16`): Calls in one turn. Further ones are not
            made, and the agent reads so: a turn has room for hundreds.

    Raises:
        `ValueError`: There is no tool, two have the same name, or `max_calls` is below 1.
    """

    grammar: ToolGrammar

    def __init__(
        self,
        tools: Tools,
        max_chars: int = 8192,
        outages: tuple[type[Exception], ...] = (ConnectionError, TimeoutError),
        max_calls: int = 16,
    ):
        all_tools = _collect_tools(tools)
        self.tools = {tool.name: tool for tool in all_tools}
        # Calls are matched to tools by name.
        if not all_tools or len(self.tools) < len(all_tools):
            names = [tool.name for tool in all_tools]
            raise ValueError(f"pass at least one tool, each with its own name; got {names}")
        if max_calls < 1:
            raise ValueError(f"max_calls must be at least 1, got {max_calls}")
        self.max_chars = max_chars
        self.max_calls = max_calls
        self.outages = outages
        self.grammar = ToolGrammar()
        # The chat template shows the tools in the prompt.
        self._schemas = [dict(tool.schema) for tool in all_tools]
        self.chat_template_kwargs = {"tools": self._schemas}

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book the spending of the large LLMs among the tools."""
        for tool in self.tools.values():
            # Only a tool that calls a large LLM spends anything.
            if tool.chat is not None:
                charge(budget, **{account: tool.chat})

    async def step(self, rollout: Rollout) -> Observation:
        """Run the calls of the last turn."""
        start = time.perf_counter()
        # Run the calls of the turn at the same time.
        bodies = self.grammar.bodies(rollout.turns[-1].text)
        made_calls = bodies[: self.max_calls]
        observations = await asyncio.gather(*(self._call(body, rollout) for body in made_calls))
        # Each call has a response, so that the agent can tell which ones were not made.
        excess = Observation(f"Error: only {self.max_calls} calls in one turn")
        observations += [excess] * (len(bodies) - len(made_calls))

        # Join what the calls returned. One outage fails the rollout.
        texts = [observation.text[: self.max_chars] for observation in observations]
        errors = [observation.error for observation in observations if observation.error]
        replies = [reply for observation in observations for reply in observation.replies]
        return Observation(
            self.grammar.join_responses(texts),
            error=errors[0] if errors else None,
            replies=tuple(replies),
            seconds=time.perf_counter() - start,
        )

    async def _call(self, body: str, rollout: Rollout) -> Observation:
        """Run one call. Never raises: an outage is the observation's error."""
        # Tell the agent about calls that no tool can answer.
        call = read_call(body, self._schemas)
        if call.problem:
            return Observation(f"Error: a call must be {_EXAMPLE_CALL} ({call.problem})")
        name = call.name
        if name not in self.tools:
            tool_names = ", ".join(self.tools)
            return Observation(f"Error: there is no tool {name[:40]!r}, only: {tool_names}")
        try:
            # Run the tool. Its errors are text for the agent, outages are not.
            observation = call_guarded(self.tools[name].call, call.arguments, rollout)
            return await run_tool(name, body, observation)
        except LLMError as error:
            return Observation(error=error)
        # The option `outages` names exceptions that are not the agent's fault.
        except self.outages as error:
            message = f"the tool {name} raised {describe(error)}"
            if isinstance(error, TimeoutError):
                return Observation(error=TimedOut(message))
            return Observation(error=Unreachable(message))
        except Exception as error:
            # A tool that calls `exit()` is broken. Any other error tells the agent something.
            if isinstance(error, Escaped) and not isinstance(error.original, Exception):
                message = f"the tool {name} raised {describe(error)}"
                return Observation(error=ServerFailed(message))
            return Observation(f"Error: {describe(error, 500)}")


def _collect_tools(tools: Tools) -> list[Tool]:
    """Return functions, tools and the tools of collections as one list of tools."""
    all_tools: list[Tool] = []
    for item in tools:
        # A collection stands for its tools.
        members = item.tools if isinstance(item, ToolCollection) else [item]
        for tool in members:
            if not isinstance(tool, Tool):
                tool = Tool.from_function(tool)
            all_tools.append(tool)
    return all_tools


def to_text(value: object) -> str:
    """Convert what a tool returned to text for the agent: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    # Values that JSON cannot represent become text, as by `repr`.
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
