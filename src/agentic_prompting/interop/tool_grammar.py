"""Tools as the model writes them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several in a turn.

Qwen3, Hermes and similar models use this format; their chat template shows the tools (`tools=`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..rollout import Turn


@dataclass(frozen=True)
class ToolGrammar:
    """Turns with native tool calls. A turn with calls is a request; one without is the answer, without its thought.

    Args:
        call (`str`, *optional*, defaults to `"tool_call"`): The tag around the JSON of a call.
        response (`str`, *optional*, defaults to `"tool_response"`): The tag around the result of a tool.
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
        thought, _, visible = text.rpartition("</think>")
        thought = thought.strip().removeprefix("<think>").strip()
        bodies = self.bodies(visible)
        if len(self._tags.findall(visible)) != 2 * len(bodies):
            return Turn(text, "malformed", False, thought=thought or None, problem="unclosed tag")
        if bodies:
            return Turn(text, "act", True, thought=thought or None, request="\n".join(bodies))
        answer = visible.strip()
        return Turn(text, "answer", bool(answer) and "<think>" not in answer, thought=thought or None, answer=answer)

    def bodies(self, text: str) -> list[str]:
        """The text in each call of a turn, in order; calls in its thought do not count."""
        visible = text.rpartition("</think>")[2]
        return [body.strip() for body in re.findall(rf"<{self.call}>(.*?)</{self.call}>", visible, re.DOTALL)]

    def escape(self, text: str) -> str:
        return self._tags.sub(r"[\1\2]", text)

    @property
    def separator(self) -> str:
        """The template's text between the responses to the calls of one turn."""
        opening, closing = self.frame
        return f"{closing}\n{opening}"

    def together(self, texts: Sequence[str]) -> str:
        """Several responses as one observation. Each is escaped, so that none can look like two."""
        return self.separator.join(map(self.escape, texts))
