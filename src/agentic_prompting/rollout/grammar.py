"""The turn grammar: what an agent may write, and what a turn of text means.

A [`Grammar`] reads turns and frames observations. [`TagGrammar`] is Prompt-R1's: its tags are data,
the reading of a turn is a pure function ([`parse_turn`]). [`QuestionGrammar`] has no tags, for
small models that cannot write them yet. [`FreeText`] is for tasks of a single turn.

Two questions are kept apart. *What happens next?* needs little: one request, or one answer. *Was it
well formed?* is the question of the format reward: a thought and a request (or answer), each once,
not empty, and nothing else. A turn can be acted on without being well formed, for example when the
thought is missing.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Literal, Protocol

from ..llm import split_thoughts

TurnKind = Literal["act", "answer", "malformed"]


@dataclass(frozen=True)
class Turn:
    """One turn of the agent, parsed.

    Args:
        text (`str`): As written.
        kind (`str`): `act` (asks the environment), `answer` (ends the episode) or `malformed`.
        well_formed (`bool`): Thought and request (or answer), each once, not empty, nothing else.
        thought (`str`, *optional*): Stripped; `None` without exactly one thought.
        request (`str`, *optional*): The request, stripped, not empty; `None` unless `kind` is
            `act`.
        answer (`str`, *optional*): Stripped, may be empty; `None` unless `kind` is `answer`.
        problem (`str`, *optional*, defaults to `""`): Why it is malformed: `no tag`, `unclosed
            tag`, `stray closing tag`, `nested tag`, `repeated tag`, `answer and request`, `empty
            request`, `observation tag`.
        answer_reference (`int`, *optional*): The number of the part of an observation that the
            answer refers to; see [`Observation`]. `answer` is then the text of that part.
    """

    text: str
    kind: TurnKind
    well_formed: bool
    thought: str | None = None
    request: str | None = None
    answer: str | None = None
    problem: str = ""
    answer_reference: int | None = None


class Grammar(Protocol):
    """The form of a conversation's turns.

    Attributes:
        stops (`tuple[str, ...]`): Texts after which a turn is over.
        frame (`tuple[str, str]`): The texts before and after an observation in its message.
        thought_opening (`str`): The text that opens a thought: a chat template may have written it
            already. May be empty.
        separator (`str`, *optional*): The text between several observations of one turn, if a
            grammar has them. It is the only part of an observation that is tokenised like the
            template's text.
        bodies (`Callable`, *optional*): Returns the texts of the tool calls in a turn, if a grammar
            has tools. Reward functions then get the calls in `completions`.
        read_calls (`Callable`, *optional*): Returns them as [`FunctionCall`]s. A chat template
            whose calls it cannot read is refused.
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
        """Return `text` with the grammar's own tags defused."""
        ...


@dataclass(frozen=True)
class TagGrammar:
    """The tags of a conversation between agent and environment.

    Args:
        think (`str`, *optional*, defaults to `"think"`): The agent's thought.
        act (`str`, *optional*, defaults to `"interaction_prompt"`): The agent's request to the
            environment.
        observation (`str`, *optional*, defaults to `"interaction_response"`): The environment's
            reply.
        answer (`str`, *optional*, defaults to `"answer"`): The agent's final answer.

    Raises:
        `ValueError`: If a tag is not a plain word or two tags are equal.
    """

    think: str = "think"
    act: str = "interaction_prompt"
    observation: str = "interaction_response"
    answer: str = "answer"

    def __post_init__(self):
        # Each tag is a plain word, and no two tags are equal.
        for role, tag in asdict(self).items():
            if not re.fullmatch(r"\w[\w-]*", tag):
                raise ValueError(
                    f"grammar: {role}={tag!r} is not a tag name; use letters, digits, '_' and '-'"
                )
        if len(set(asdict(self).values())) < 4:
            raise ValueError(f"grammar: tags must differ from each other, got {asdict(self)}")

    @cached_property
    def any_tag(self) -> re.Pattern[str]:
        """Matches every opening or closing tag of this grammar; groups: slash, name."""
        names = "|".join(map(re.escape, asdict(self).values()))
        return re.compile(rf"<(/?)({names})>")

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
    """No tags, for tasks of one turn: everything that the agent writes is its answer.

    The thought of a thinking model is not part of it.
    """

    stops: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    thought_opening: str = ""

    def parse(self, text: str) -> Turn:
        thought, visible = split_thoughts(text)
        answer = visible.strip()
        # A thought with nothing after it was cut off.
        was_cut_off = bool(thought) and not answer
        return Turn(text, "answer", not was_cut_off, thought=thought or None, answer=answer)

    def escape(self, text: str) -> str:
        return text


# Latin, full-width (Chinese and Japanese), Arabic.
_QUESTION_MARKS = ("?", "\uff1f", "\u061f")
_FIRST_QUESTION_MARK = re.compile(f"[{''.join(_QUESTION_MARKS)}]")


@dataclass(frozen=True)
class QuestionGrammar:
    """A turn with a question mark asks the environment; any other text is the answer.

    There is nothing to learn before a turn can be acted on, so an untrained model of 100 million
    parameters can use this form at once. A turn ends right after its first question mark. A thought
    (`<think>...</think>`) is not part of the request or answer, but a question mark inside it ends
    the turn as malformed: use this form for models that write no thoughts, or with thinking turned
    off (`chat_template_kwargs={"enable_thinking": False}`).

    Args:
        frame (`tuple[str, str]`, *optional*): The texts before and after an observation, for
            example `("Search result: ", "\\nAnswer in a few words.")`. Empty by default.
    """

    frame: tuple[str, str] = ("", "")
    stops: tuple[str, ...] = field(default=_QUESTION_MARKS, init=False)
    thought_opening: str = field(default="<think>", init=False)

    def parse(self, text: str) -> Turn:
        # Take off a thought at the start.
        before_thought, opened, after_opening = text.partition(self.thought_opening)
        thought: str | None = None
        visible = text
        if opened and not before_thought.strip():
            content, closed, visible = after_opening.partition("</think>")
            if not closed:
                return Turn(text, "malformed", False, problem="unclosed tag")
            thought = content.strip() or None

        # A turn without a question is the answer.
        mark = _FIRST_QUESTION_MARK.search(visible)
        if mark is None:
            answer = visible.strip()
            return Turn(text, "answer", bool(answer), thought=thought, answer=answer)

        # The request ends with the question mark, and so should the turn.
        request = visible[: mark.end()].strip()
        if not any(character.isalnum() for character in request):
            return Turn(text, "malformed", False, thought=thought, problem="empty request")
        well_formed = not visible[mark.end() :].strip()
        return Turn(text, "act", well_formed, thought=thought, request=request)

    def escape(self, text: str) -> str:
        return text  # the form has no marks that an observation could forge


def parse_turn(text: str, grammar: TagGrammar = TagGrammar()) -> Turn:
    """Read one turn of the agent. Never raises.

    The rules, in order: tags must open and close without nesting; the agent must not write the
    observation's tag; each tag occurs at most once; a turn either asks or answers, not both; a
    request is not empty. An empty answer is an answer (and scores as one).
    """
    elements = _split_elements(text, grammar)
    # The contents of each tag, in the order of the turn.
    thoughts = elements.contents.get(grammar.think, [])
    requests = elements.contents.get(grammar.act, [])
    answers = elements.contents.get(grammar.answer, [])
    thought = thoughts[0] if len(thoughts) == 1 else None

    problem = _find_problem(elements, grammar)
    if problem:
        return Turn(text, "malformed", False, thought=thought, problem=problem)

    # Well formed: a thought and a request (or answer), in this order, and nothing else.
    content = requests[0] if requests else answers[0]
    expected_tags = [grammar.think, grammar.act if requests else grammar.answer]
    is_complete = bool(thought) and bool(content)
    in_order = list(elements.contents) == expected_tags
    well_formed = in_order and is_complete and not elements.outside
    if requests:
        return Turn(text, "act", well_formed, thought=thought, request=content)
    return Turn(text, "answer", well_formed, thought=thought, answer=content)


def _find_problem(elements: _TurnElements, grammar: TagGrammar) -> str:
    """Return the first rule that a turn breaks, or `""`."""
    if elements.problem:
        return elements.problem
    if grammar.observation in elements.contents:
        return "observation tag"
    if any(len(contents) > 1 for contents in elements.contents.values()):
        return "repeated tag"
    requests = elements.contents.get(grammar.act, [])
    answers = elements.contents.get(grammar.answer, [])
    if requests and answers:
        return "answer and request"
    if not requests and not answers:
        return "no tag"
    return "empty request" if requests == [""] else ""


@dataclass
class _TurnElements:
    """The tagged elements of a turn: contents by tag, the text outside, the first problem."""

    contents: dict[str, list[str]] = field(default_factory=dict)
    outside: str = ""
    problem: str = ""


def _split_elements(text: str, grammar: TagGrammar) -> _TurnElements:
    """Split a turn at its tags, up to the first structural problem."""
    before, *parts = grammar.any_tag.split(text)
    elements = _TurnElements(outside=before)
    # After each tag: its slash, its name, and the text after it.
    tags = list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
    for (slash, name, content), closing in zip_longest(tags[::2], tags[1::2]):
        # Tags come in pairs: an opening tag, and then the closing tag of the same name.
        if slash:
            elements.problem = "stray closing tag"
        elif closing is None:
            elements.problem = "unclosed tag"
        elif closing[:2] != ("/", name):
            elements.problem = "nested tag"
        # Behind the first problem, tags cannot be paired reliably.
        if elements.problem:
            return elements
        elements.contents.setdefault(name, []).append(content.strip())
        elements.outside += closing[2]
    elements.outside = elements.outside.strip()
    return elements


def escape(text: str, grammar: TagGrammar) -> str:
    """Return `text` with brackets for the grammar's tags.

    A reply then cannot forge a turn of the agent or end one. `<answer>Paris</answer>` becomes
    `[answer]Paris[/answer]`: readable, and inert if it is escaped again.
    """
    return grammar.any_tag.sub(r"[\1\2]", text)
