"""Tools as the model writes them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several in a turn.

The format of Qwen3, Hermes and their kin, whose chat template shows the tools itself (`tools=`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..rollout import Turn


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
