"""Tools as the model writes them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several in a turn.

The format of Qwen3, Hermes and their kin, whose chat template shows the tools itself (`tools=`). A tool's own error is
text for the agent, which may try again; an outage is not: it fails the rollout, as everywhere.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers.utils import get_json_schema

from ..llm import Budget, ChatModel, LLMError, Message, TimedOut, Unreachable, as_chat, charge
from ..rollout import Observation, Rollout, Turn


@dataclass(frozen=True)
class ToolGrammar:
    """Turns with native tool calls. A turn with a call asks; one without is the answer, its thought left out.

    Args:
        call (`str`, *optional*, defaults to `"tool_call"`): The tag around the JSON of a call.
        response (`str`, *optional*, defaults to `"tool_response"`): The tag around what a tool returned.
    """

    call: str = "tool_call"
    response: str = "tool_response"
    # No stop text: calls in parallel follow each other, and the model ends its turn itself.
    stops: tuple[str, ...] = field(default=(), init=False)
    thought_opening: str = field(default="<think>", init=False)

    @property
    def frame(self) -> tuple[str, str]:
        return f"<{self.response}>\n", f"\n</{self.response}>"

    @cached_property
    def _tags(self) -> re.Pattern[str]:
        return re.compile(rf"<(/?)({re.escape(self.call)}|{re.escape(self.response)})>")

    def parse(self, text: str) -> Turn:
        thought, _, said = text.rpartition("</think>")
        thought = thought.strip().removeprefix("<think>").strip()
        bodies = self.bodies(said)
        if len(self._tags.findall(said)) != 2 * len(bodies):
            return Turn(text, "malformed", False, thought=thought or None, problem="unclosed tag")
        if bodies:
            return Turn(text, "act", True, thought=thought or None, request="\n".join(bodies))
        answer = said.strip()
        return Turn(text, "answer", bool(answer) and "<think>" not in answer, thought=thought or None, answer=answer)

    def bodies(self, text: str) -> list[str]:
        """What stands in each call of a turn, its thought left out, in order."""
        said = text.rpartition("</think>")[2]
        return [body.strip() for body in re.findall(rf"<{self.call}>(.*?)</{self.call}>", said, re.DOTALL)]

    def escape(self, text: str) -> str:
        return self._tags.sub(r"[\1\2]", text)

    @property
    def separator(self) -> str:
        """Between the responses to the calls of one turn, as the template has it."""
        opening, closing = self.frame
        return f"{closing}\n{opening}"

    def together(self, texts: Sequence[str]) -> str:
        """Several responses as one observation; none of them can pose as two."""
        return self.separator.join(map(self.escape, texts))


@dataclass(frozen=True)
class Tool:
    """Something the agent can call.

    Args:
        schema (`dict`): Its JSON schema, as chat templates take it: `{"type": "function", "function": {...}}`.
        call (`Callable`): Gets the arguments and the rollout; gives an [`Observation`]. Raises what went wrong.
        chat ([`ChatModel`], *optional*): The large LLM behind it, which spends.
    """

    schema: Mapping[str, Any]
    call: Callable[[dict[str, Any], Rollout], Awaitable[Observation]]
    chat: ChatModel | None = None

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """A Python function, with or without `async`; types and a docstring with `Args:` make its schema.

        Raises:
            `transformers.utils.chat_template_utils.DocstringParsingException` and the like: An argument has no type or
                no line in the docstring.
        """

        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            return Observation(text_of(await called(function, arguments)))

        return cls(get_json_schema(function), call)


def ask_tool(chat: ChatModel, name: str = "ask", description: str = "Asks a large language model.") -> Tool:
    """A large LLM as a tool beside others: one argument, `prompt`. Its failures are outages, its calls are counted."""

    async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
        messages = [Message(role="user", content=str(arguments["prompt"]))]
        reply = await as_chat(chat)(messages, repeat=rollout.seed, session=str(rollout.seed))
        return Observation(reply.text, error=reply.error, replies=(reply,))

    properties = {"prompt": {"type": "string", "description": "What to ask, complete in itself."}}
    parameters = {"type": "object", "properties": properties, "required": ["prompt"]}
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return Tool(schema, call, chat)


class ToolEnvironment:
    """Tools as an environment; calls of one turn run at once.

    Args:
        tools (`Sequence`): Python functions, [`Tool`]s, and what has a list of them under `.tools` ([`MCPTools`]).
        max_chars (`int`, *optional*, defaults to `8192`): A longer result is cut.
        outages (`tuple`, *optional*): Exceptions of a tool that are nobody's fault: the rollout fails and is left out
            of the loss. An [`LLMError`] always is one. Everything else a tool raises is text for the agent.

    Raises:
        `ValueError`: For no tool at all, or two of one name.
    """

    def __init__(
        self,
        tools: Sequence[Any],
        max_chars: int = 8192,
        outages: tuple[type[Exception], ...] = (ConnectionError, TimeoutError),
    ):
        found = [one for given in tools for one in getattr(given, "tools", [given])]
        named = [one if isinstance(one, Tool) else Tool.of(one) for one in found]
        self.tools = {tool.name: tool for tool in named}
        if not named or len(self.tools) < len(named):
            raise ValueError(f"tools must be some, each with its own name, got {[tool.name for tool in named]}")
        self.max_chars, self.outages, self.grammar = max_chars, outages, ToolGrammar()

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """What the chat template has to be told, so that the prompt shows the tools."""
        return {"tools": [dict(tool.schema) for tool in self.tools.values()]}

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book what the large LLMs among the tools spend into `budget`."""
        for tool in self.tools.values():
            if tool.chat is not None:
                charge(budget, **{account: tool.chat})

    async def step(self, rollout: Rollout) -> Observation:
        """Run the calls of the last turn."""
        started = time.perf_counter()
        bodies = self.grammar.bodies(rollout.turns[-1].text)
        said = await asyncio.gather(*(self._call(body, rollout) for body in bodies))
        return Observation(
            self.grammar.together([one.text[: self.max_chars] for one in said]),
            error=next((one.error for one in said if one.error), None),
            replies=tuple(reply for one in said for reply in one.replies),
            seconds=time.perf_counter() - started,
        )

    async def _call(self, body: str, rollout: Rollout) -> Observation:
        try:
            asked = json.loads(body)
            name, arguments = asked["name"], asked.get("arguments", {})
            if not isinstance(arguments, dict):
                raise TypeError("arguments are not a JSON object")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            example = '{"name": "...", "arguments": {...}}'
            return Observation(f"Error: a call must be {example} ({type(error).__name__}: {str(error)[:80]})")
        if not isinstance(name, str) or name not in self.tools:
            return Observation(f"Error: there is no tool {str(name)[:40]!r}, only: {', '.join(self.tools)}")
        try:
            return await self.tools[name].call(arguments, rollout)
        except LLMError as error:
            return Observation(error=error)
        except self.outages as error:
            kind = TimedOut if isinstance(error, TimeoutError) else Unreachable
            return Observation(error=kind(f"the tool {name} raised {type(error).__name__}: {str(error)[:200]}"))
        except Exception as error:  # the tool's own word on what it was asked
            return Observation(f"Error: {type(error).__name__}: {str(error)[:500]}")


async def called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a function gives, awaited if need be; a plain one runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


def text_of(value: Any) -> str:
    """What the agent reads of a tool's return value: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
