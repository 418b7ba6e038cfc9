"""[`ToolGrammar`]: turns with native tool calls, `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`.

Qwen3, Hermes and similar models write this form; Qwen3.5 and Nemotron 3 write `<function=name>` and
`<parameter=key>` in the tags. Both are read. The model's chat template shows the tools (`tools=`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..rollout import FunctionCall, Turn, read_call, split_turn


@dataclass(frozen=True)
class ToolGrammar:
    """Turns with native tool calls.

    A turn with calls is a request; one without is the answer, from which thoughts are removed.

    Args:
        call (`str`, *optional*, defaults to `"tool_call"`): The tag around a call.
        response (`str`, *optional*, defaults to `"tool_response"`): The tag around a tool's result.
    """

    call: str = "tool_call"
    response: str = "tool_response"
    # No stop text: a turn may hold several calls, and the model ends it with its end-of-turn token.
    stops: tuple[str, ...] = field(default=(), init=False)
    thought_opening: str = field(default="<think>", init=False)

    @property
    def frame(self) -> tuple[str, str]:
        return f"<{self.response}>\n", f"\n</{self.response}>"

    @cached_property
    def _tags(self) -> re.Pattern[str]:
        return re.compile(rf"<(/?)({re.escape(self.call)}|{re.escape(self.response)})>")

    def parse(self, text: str) -> Turn:
        parts = split_turn(text, (self.call,))
        thought = parts.thought or None
        # Outside of complete calls a turn may not have the grammar's tags.
        if parts.is_cut or self._tags.search(parts.outside):
            return Turn(text, "malformed", False, thought=thought, problem="unclosed tag")
        # A turn with calls is a request, and one without calls is the answer.
        if parts.calls:
            request = "\n".join(call.body for call in parts.calls)
            return Turn(text, "act", True, thought=thought, request=request)
        answer = parts.outside.strip()
        # A lone tag of a thought in the answer is a mistake of the agent.
        is_well_formed = bool(answer) and "<think>" not in answer and "</think>" not in answer
        return Turn(text, "answer", is_well_formed, thought=thought, answer=answer)

    def bodies(self, text: str) -> list[str]:
        """Return the text in each call of a turn, in order. Calls in its thoughts do not count."""
        return [call.body for call in split_turn(text, (self.call,)).calls]

    def read_calls(self, text: str, tools: Iterable[Mapping[str, Any]] = ()) -> list[FunctionCall]:
        """Parse the calls of a turn.

        Args:
            text (`str`): The turn.
            tools (`Iterable[dict]`, *optional*): The tools, as for [`read_call`].
        """
        return [read_call(body, tools) for body in self.bodies(text)]

    def escape(self, text: str) -> str:
        return self._tags.sub(r"[\1\2]", text)

    @property
    def separator(self) -> str:
        """The template's text between the responses to the calls of one turn."""
        opening, closing = self.frame
        return f"{closing}\n{opening}"

    def join_responses(self, texts: Sequence[str]) -> str:
        """Join several responses to one observation.

        Each is escaped, so that none looks like two.
        """
        return self.separator.join(self.escape(text) for text in texts)
