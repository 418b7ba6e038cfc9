"""The turn grammar: what an agent may write, and what a turn of text means.

A [`Grammar`] reads turns and frames observations. [`TagGrammar`] is Prompt-R1's: its tags are data, the reading of a
turn is a pure function ([`parse_turn`]). [`FreeText`] is for tasks of a single turn.

Two questions are kept apart. *What happens next* needs little: one request, or one answer. *Was it well formed* is what
the format reward asks: a thought and a request (or answer), each once, not empty, and nothing else. A turn can be acted
on without being well formed, for example when the thought is missing.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, Protocol


@dataclass(frozen=True)
class TagGrammar:
    """The tags of a conversation between agent and environment.

    Args:
        think (`str`, *optional*, defaults to `"think"`): The agent's thought.
        act (`str`, *optional*, defaults to `"interaction_prompt"`): The agent's request to the environment.
        observation (`str`, *optional*, defaults to `"interaction_response"`): The environment's reply.
        answer (`str`, *optional*, defaults to `"answer"`): The agent's final answer.

    Raises:
        `ValueError`: If a tag is no plain word or two tags are equal.
    """

    think: str = "think"
    act: str = "interaction_prompt"
    observation: str = "interaction_response"
    answer: str = "answer"

    def __post_init__(self):
        for role, tag in asdict(self).items():
            if not re.fullmatch(r"\w[\w-]*", tag):
                raise ValueError(f"grammar: {role}={tag!r} is not a tag name; use letters, digits, '_' and '-'")
        if len(set(asdict(self).values())) < 4:
            raise ValueError(f"grammar: tags must differ from each other, got {asdict(self)}")

    @cached_property
    def any_tag(self) -> re.Pattern[str]:
        """Matches every opening or closing tag of this grammar; groups: slash, name."""
        return re.compile(rf"<(/?)({'|'.join(map(re.escape, asdict(self).values()))})>")

    @property
    def stops(self) -> tuple[str, ...]:
        return f"</{self.act}>", f"</{self.answer}>"

    @property
    def frame(self) -> tuple[str, str]:
        return f"<{self.observation}>\n", f"\n</{self.observation}>"

    @property
    def thought_opening(self) -> str:
        return f"<{self.think}>"

    def parse(self, text: str) -> Turn:
        return parse_turn(text, self)

    def escape(self, text: str) -> str:
        return escape(text, self)


@dataclass(frozen=True)
class FreeText:
    """No tags: whatever the agent writes is its answer. For tasks of one turn."""

    stops: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    thought_opening: str = ""

    def parse(self, text: str) -> Turn:
        return Turn(text, "answer", True, answer=text.strip())

    def escape(self, text: str) -> str:
        return text


class Grammar(Protocol):
    """What a conversation's turns look like.

    Attributes:
        stops (`tuple[str, ...]`): Texts after which a turn is over.
        frame (`tuple[str, str]`): What stands before and after an observation in the message that carries it.
        thought_opening (`str`): What opens a thought: a chat template may have written it already. May be empty.
        separator (`str`, *optional*): What stands between several observations of one turn, in a grammar that has them;
            the only part of an observation that is tokenised as the template's.
    """

    @property
    def stops(self) -> tuple[str, ...]: ...
    @property
    def frame(self) -> tuple[str, str]: ...
    @property
    def thought_opening(self) -> str: ...

    def parse(self, text: str) -> Turn:
        """Read one turn. Never raises."""
        ...

    def escape(self, text: str) -> str:
        """`text` such that none of it can be taken for the grammar's own marks."""
        ...


Kind = Literal["act", "answer", "malformed"]


@dataclass(frozen=True)
class Turn:
    """One turn of the agent, parsed.

    Args:
        text (`str`): As written.
        kind (`str`): `act` (asks the environment), `answer` (ends the episode) or `malformed`.
        well_formed (`bool`): Thought and request (or answer), each once, not empty, nothing else.
        thought (`str`, *optional*): Stripped; `None` without exactly one thought.
        request (`str`, *optional*): The request, stripped, not empty; `None` unless `kind` is `act`.
        answer (`str`, *optional*): Stripped, may be empty; `None` unless `kind` is `answer`.
        problem (`str`, *optional*, defaults to `""`): Why it is malformed: `no tag`, `unclosed tag`, `stray closing
            tag`, `nested tag`, `repeated tag`, `answer and request`, `empty request`, `observation tag`.
    """

    text: str
    kind: Kind
    well_formed: bool
    thought: str | None = None
    request: str | None = None
    answer: str | None = None
    problem: str = ""


def parse_turn(text: str, grammar: TagGrammar = TagGrammar()) -> Turn:
    """Read one turn of the agent. Never raises.

    The rules, in order: tags must open and close without nesting; the observation's tag is not the agent's to write;
    each tag occurs at most once; a turn either asks or answers, not both; a request is not empty. An empty answer is
    an answer (and scores as one).
    """
    elements, outside, problem = _elements(text, grammar)
    thoughts, acts, answers = (elements.get(tag, []) for tag in (grammar.think, grammar.act, grammar.answer))
    thought = thoughts[0] if len(thoughts) == 1 else None
    if not problem:
        problem = _what_is_wrong(thoughts, acts, answers, observed=grammar.observation in elements)
    if problem:
        return Turn(text, "malformed", False, thought=thought, problem=problem)
    request_or_answer = (acts or answers)[0]
    well_formed = bool(thought) and bool(request_or_answer) and not outside
    well_formed = well_formed and text.find(f"<{grammar.think}>") < text.find(
        f"<{grammar.act if acts else grammar.answer}>"
    )
    if acts:
        return Turn(text, "act", well_formed, thought=thought, request=request_or_answer)
    return Turn(text, "answer", well_formed, thought=thought, answer=request_or_answer)


def _elements(text: str, grammar: TagGrammar) -> tuple[dict[str, list[str]], str, str]:
    """The contents by tag, the text outside of all tags, and the first structural problem."""
    elements: dict[str, list[str]] = {}
    outside, opened, start, position = "", None, 0, 0
    for match in grammar.any_tag.finditer(text):
        closing, tag = match[1] == "/", match[2]
        if opened is None:
            if closing:
                return elements, outside, "stray closing tag"
            outside += text[position : match.start()]
            opened, start = tag, match.end()
        elif closing and tag == opened:
            elements.setdefault(tag, []).append(text[start : match.start()].strip())
            opened, position = None, match.end()
        else:
            return elements, outside, "nested tag"
    if opened is not None:
        return elements, outside, "unclosed tag"
    return elements, (outside + text[position:]).strip(), ""


def _what_is_wrong(thoughts: list[str], acts: list[str], answers: list[str], observed: bool) -> str:
    if observed:
        return "observation tag"
    if max(len(thoughts), len(acts), len(answers)) > 1:
        return "repeated tag"
    if acts and answers:
        return "answer and request"
    if not acts and not answers:
        return "no tag"
    if acts and not acts[0]:
        return "empty request"
    return ""


def escape(text: str, grammar: TagGrammar) -> str:
    """`text` with the grammar's tags turned into brackets, so that a reply cannot pose as the agent or end a turn.

    `<answer>Paris</answer>` becomes `[answer]Paris[/answer]`: readable, and inert whatever is done to it again.
    """
    return grammar.any_tag.sub(r"[\1\2]", text)
