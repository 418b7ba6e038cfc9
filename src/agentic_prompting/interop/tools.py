"""Tools as an environment: Python functions, and anything else that can be called.

An exception of a tool is text for the agent, which may try again. An outage fails the rollout, as everywhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
)
from ..llm.guard import Escaped, call_guarded, describe
from ..rollout import Environment, Observation, Rollout, read_call
from ..rollout.play import run_tool
from .tool_grammar import ToolGrammar


@dataclass(frozen=True)
class Tool:
    """One tool of the agent.

    Args:
        schema (`dict`): Its JSON schema, as chat templates take it: `{"type": "function", "function": {...}}`.
        call (`Callable`): Gets the arguments and the rollout; returns an [`Observation`], or raises.
        chat ([`ChatModel`], *optional*): The large LLM behind it, whose costs count.
    """

    schema: Mapping[str, Any]
    call: Callable[[dict[str, Any], Rollout], Awaitable[Observation]]
    chat: ChatModel | None = None

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """A tool from a Python function, with or without `async`. Its schema comes from its types and from a docstring
        with `Args:`; `get_json_schema` raises if an argument lacks one of them."""

        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            return Observation(text_of(await called(function, arguments)))

        return cls(get_json_schema(function), call)


def ask_tool(
    chat: ChatModel, name: str = "ask", description: str = "Asks a large language model."
) -> Tool:
    """A large LLM as a tool with one argument, `prompt`. Its failures are outages, and its calls are counted."""

    async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
        messages = [Message(role="user", content=str(arguments["prompt"]))]
        reply = await as_chat(chat)(messages, repeat=rollout.seed, session=str(rollout.seed))
        return Observation(reply.text, error=reply.error, replies=(reply,))

    properties = {"prompt": {"type": "string", "description": "The question, complete in itself."}}
    parameters = {"type": "object", "properties": properties, "required": ["prompt"]}
    schema = {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
    return Tool(schema, call, chat)


class ToolEnvironment(Environment):
    """Tools as an environment; the calls of one turn run at once.

    Args:
        tools (`Sequence`): Python functions, [`Tool`]s, and objects with a list of them as `.tools` ([`MCPTools`]).
        max_chars (`int`, *optional*, defaults to `8192`): A longer result is cut.
        outages (`tuple`, *optional*): Exceptions of a tool that are not the agent's fault: the rollout fails and is
            left out of the loss. An [`LLMError`] always is one. Any other exception of a tool is text for the agent,
            with secrets masked.

    Raises:
        `ValueError`: There is no tool, or two have the same name.
    """

    grammar: ToolGrammar

    def __init__(
        self,
        tools: Sequence[Any],
        max_chars: int = 8192,
        outages: tuple[type[Exception], ...] = (ConnectionError, TimeoutError),
    ):
        flat = [tool for one in tools for tool in getattr(one, "tools", [one])]
        named = [one if isinstance(one, Tool) else Tool.of(one) for one in flat]
        self.tools = {tool.name: tool for tool in named}
        if not named or len(self.tools) < len(named):
            raise ValueError(
                f"pass at least one tool, each with its own name; got {[tool.name for tool in named]}"
            )
        self.max_chars, self.outages, self.grammar = max_chars, outages, ToolGrammar()
        self._schemas = [dict(tool.schema) for tool in named]
        self.chat_template_kwargs = {"tools": self._schemas}  # so that the prompt shows them

    def charge_to(self, budget: Budget, account: str) -> None:
        """Charge the costs of the large LLMs among the tools to `budget`."""
        for tool in self.tools.values():
            if tool.chat is not None:
                charge(budget, **{account: tool.chat})

    async def step(self, rollout: Rollout) -> Observation:
        """Run the calls of the last turn."""
        started = time.perf_counter()
        bodies = self.grammar.bodies(rollout.turns[-1].text)
        results = await asyncio.gather(*(self._call(body, rollout) for body in bodies))
        return Observation(
            self.grammar.together([one.text[: self.max_chars] for one in results]),
            error=next((one.error for one in results if one.error), None),
            replies=tuple(reply for one in results for reply in one.replies),
            seconds=time.perf_counter() - started,
        )

    async def _call(self, body: str, rollout: Rollout) -> Observation:
        call = read_call(body, self._schemas)
        if call.problem:
            example = '{"name": "...", "arguments": {...}}'
            return Observation(f"Error: a call must be {example} ({call.problem})")
        name = call.name
        if name not in self.tools:
            return Observation(
                f"Error: there is no tool {name[:40]!r}, only: {', '.join(self.tools)}"
            )
        try:
            return await run_tool(
                name, body, call_guarded(self.tools[name].call, call.arguments, rollout)
            )
        except LLMError as error:
            return Observation(error=error)
        except self.outages as error:
            kind = TimedOut if isinstance(error, TimeoutError) else Unreachable
            return Observation(error=kind(f"the tool {name} raised {describe(error)}"))
        except Exception as error:
            if isinstance(error, Escaped) and not isinstance(
                error.original, Exception
            ):  # `exit()` and the like
                return Observation(error=ServerFailed(f"the tool {name} raised {describe(error)}"))
            return Observation(
                f"Error: {describe(error, 500)}"
            )  # the tool's own word on what it was asked


async def called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The result of a function, plain or `async`."""
    return await call_guarded(function, **arguments)


def text_of(value: Any) -> str:
    """A tool's return value as text for the agent: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
