"""Turns that ask one or several workers, each by name: [`AskGrammar`]."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from .grammar import Grammar, TagGrammar, Turn
from .turn_reader import FunctionCall

_WORKER_ATTRIBUTE = re.compile(r"""\bto\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")


class CallGrammar(Grammar, Protocol):
    """A [`Grammar`] whose turns may hold several calls: [`AskGrammar`], `interop.ToolGrammar`."""

    def read_calls(self, text: str, tools: Iterable[Any] = ()) -> list[FunctionCall]:
        """Return the calls of a turn, in order."""
        ...

    def join_responses(self, texts: Sequence[str]) -> str:
        """Return the replies to the calls of one turn as one observation."""
        ...


@dataclass(frozen=True)
class _Element:
    """A pair of tags in a turn, with the text between them."""

    tag: str
    attributes: str
    content: str


@dataclass(frozen=True)
class AskGrammar(TagGrammar):
    """A thought, and then one or several requests, or one answer.

        <think>...</think> <ask to="A">...</ask> <ask to="B">...</ask>
        <think>...</think> <answer>...</answer>

    A turn has no stop text for requests, because it may hold several: it ends with the end-of-turn
    token.

    Args:
        think (`str`, *optional*, defaults to `"think"`): The agent's thought.
        act (`str`, *optional*, defaults to `"ask"`): A request. Its attribute `to` names the
            worker.
        observation (`str`, *optional*, defaults to `"replies"`): The replies to the requests of a
            turn.
        answer (`str`, *optional*, defaults to `"answer"`): The agent's final answer.
    """

    act: str = "ask"
    observation: str = "replies"

    @cached_property
    def any_tag(self) -> re.Pattern[str]:
        """Matches every opening or closing tag of this grammar; groups: slash, name, attributes."""
        names = "|".join(map(re.escape, (self.think, self.act, self.observation, self.answer)))
        return re.compile(rf"<(/?)({names})((?:\s[^<>]*)?)>")

    @property
    def stops(self) -> tuple[str, ...]:
        return (f"</{self.answer}>",)

    def parse(self, text: str) -> Turn:
        # Sort the elements of the turn by their tags.
        elements, outside, problem = self._read_elements(text)
        tags = [element.tag for element in elements]
        thoughts = [element.content for element in elements if element.tag == self.think]
        answers = [element.content for element in elements if element.tag == self.answer]
        requests = [element for element in elements if element.tag == self.act]
        thought = thoughts[0] if len(thoughts) == 1 else None

        # The same problems as in Prompt-R1's form, but that a turn may ask more than once.
        problems = {
            problem: bool(problem),
            "observation tag": self.observation in tags,
            "repeated tag": len(thoughts) > 1 or len(answers) > 1,
            "answer and request": bool(requests and answers),
            "no tag": not requests and not answers,
            "empty request": any(not request.content for request in requests),
        }
        for name, is_present in problems.items():
            if is_present:
                return Turn(text, "malformed", False, thought=thought, problem=name)

        # Well formed: a thought first, nothing outside of the tags, and a worker for each request.
        begins_with_thought = tags[0] == self.think and bool(thought)
        is_in_form = begins_with_thought and not outside
        if requests:
            is_in_form = is_in_form and all(map(_find_worker, requests))
            # As text, each request follows the name of its worker.
            request_text = "\n".join(
                f"{_find_worker(request)}: {request.content}" for request in requests
            )
            return Turn(text, "act", is_in_form, thought=thought, request=request_text)
        answer = answers[0]
        return Turn(text, "answer", is_in_form and bool(answer), thought=thought, answer=answer)

    def read_calls(self, text: str, tools: Iterable[Any] = ()) -> list[FunctionCall]:
        """Return the requests of a turn as calls of the tool `ask(worker, request)`."""
        # Each request is a call of the same tool.
        calls = []
        for element in self._read_elements(text)[0]:
            if element.tag == self.act:
                arguments = {"worker": _find_worker(element), "request": element.content}
                calls.append(FunctionCall("ask", arguments))
        return calls

    def join_responses(self, texts: Sequence[str]) -> str:
        """Return the replies to the requests of one turn, each on lines of its own."""
        return "\n".join(texts)

    def escape(self, text: str) -> str:
        return self.any_tag.sub(r"[\1\2\3]", text)

    def _read_elements(self, text: str) -> tuple[list[_Element], str, str]:
        """Return the elements of a turn, the text outside of them, and the first problem."""
        elements: list[_Element] = []
        outside = ""
        opening: re.Match[str] | None = None
        position = 0
        # Opening and closing tags alternate; the content of an element is the text in between.
        for mark in self.any_tag.finditer(text):
            slash, tag, _ = mark.groups()
            between = text[position : mark.start()]
            if opening is None:
                outside += between
                if slash:
                    return elements, outside.strip(), "stray closing tag"
                opening = mark
            elif slash and opening[2] == tag:
                elements.append(_Element(tag, opening[3], between.strip()))
                opening = None
            else:
                return elements, outside.strip(), "nested tag"
            position = mark.end()
        # An element that is still open at the end of the turn has no closing tag.
        problem = "unclosed tag" if opening is not None else ""
        return elements, (outside + text[position:]).strip(), problem


def _find_worker(request: _Element) -> str:
    """Return the name in the attribute `to`; empty if there is none."""
    match = _WORKER_ATTRIBUTE.search(request.attributes)
    if match is None:
        return ""
    # The name is in double quotes, in single quotes, or in none.
    return (match[1] or match[2] or match[3] or "").strip()
