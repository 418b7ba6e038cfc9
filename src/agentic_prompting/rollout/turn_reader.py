"""Reads thoughts and tool calls in the text of a turn, in one pass.

The Qwen, Hermes and Nemotron 3 families write `<think>...</think>`, then text, then calls. A call
is `<tool_call>` around JSON, `{"name": ..., "arguments": {...}}`, or around the XML form,
`<function=name>` with `<parameter=key>` in it.

Arguments may quote these tags: an agent that edits a file writes whatever the file holds. A tag in
a JSON string or in the value of a parameter is therefore text, and the call goes on after it.

A model wrote the text, so every function here takes time linear in its length and never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..llm.surrogates import replace_surrogates

_THINK = "<think>"
_END_OF_THINK = "</think>"
# Serializers, chat templates and clients recurse into arguments.
_MAX_DEPTH = 100

_QUOTE_OR_TAG = re.compile(r'["<\\]')
_QUOTE_OR_BACKSLASH = re.compile(r'["\\]')
_NOT_SPACE = re.compile(r"\S")


@dataclass(frozen=True)
class CallText:
    """A tool call as it stands in a turn.

    Args:
        body (`str`): The text between the tags, stripped.
        start (`int`): Offset in the `visible` text of [`TurnText`] where its opening tag begins.
        end (`int`): Offset after its closing tag.
    """

    body: str
    start: int
    end: int


@dataclass(frozen=True)
class TurnText:
    """A turn, split into its parts.

    Args:
        thought (`str`, *optional*): The thought in front, stripped and without its tags; `None` if
            there is none.
        is_cut (`bool`): The thought has no end: all of the turn belongs to it.
        visible (`str`): The text after the thought, as written.
        calls (`tuple[CallText, ...]`): The tool calls in it. Calls in a thought do not count.
        outside (`str`): The visible text without the calls and without further thoughts.
    """

    thought: str | None
    is_cut: bool
    visible: str
    calls: tuple[CallText, ...]
    outside: str


@dataclass(frozen=True)
class FunctionCall:
    """A tool call, read.

    Args:
        name (`str`): The tool; empty if the call names none.
        arguments (`Any`): A `dict` by name, unless the policy wrote another value. Text if it wrote
            no JSON.
        problem (`str`, *optional*, defaults to `""`): Why there is no name, or why `arguments` is
            no `dict`.
    """

    name: str
    arguments: Any
    problem: str = ""


class _Tag(NamedTuple):
    """A tag in a text.

    The `name` of a closing tag begins with `/`; `<function=f>` has the label `f`.
    """

    name: str
    label: str
    start: int
    end: int


def remove_closed_thoughts(text: str) -> str:
    """Remove each `<think>...</think>`. A thought without an end stays."""
    # Keep the pieces between closed thoughts.
    pieces = []
    position = 0
    while (start := text.find(_THINK, position)) >= 0:
        end = text.find(_END_OF_THINK, start)
        if end < 0:
            break
        pieces.append(text[position:start])
        position = end + len(_END_OF_THINK)
    pieces.append(text[position:])
    return "".join(pieces)


# --- a turn -> its parts --------------------------------------------------------------------------


def split_turn(text: str, call_tags: Sequence[str] = ("tool_call",)) -> TurnText:
    """Split a turn into its thought, its text and its tool calls.

    A thought begins with `<think>` at the start of the turn, or without it where the chat template
    has opened the thought. It ends at the first `</think>` that is not in the arguments of a call;
    it may mention a pair of the tags.

    Args:
        text (`str`): The turn, without the tokens that end it.
        call_tags (`Sequence[str]`, *optional*): Names of the tags that enclose a call.
    """
    reader = _TurnReader(text, tuple(call_tags))
    thought = reader.read_leading_thoughts()
    # The thought fills the rest of the turn: there is neither text nor a call.
    if thought is not None and reader.is_cut:
        return TurnText(thought, True, "", (), "")

    # Walk over the tags after the thought, and find the calls and the further thoughts.
    visible_start = reader.offset
    calls: list[CallText] = []
    spans: list[tuple[int, int]] = []  # of calls and thoughts, tags included
    tags = reader.tags
    tag_index = reader.tag_index
    while tag_index < len(tags):
        tag = tags[tag_index]
        closing = None
        if tag.name in call_tags:
            closing = reader.find_end_of_call(tag_index, ignore_drafts=thought is None)
            if closing is not None:
                body = text[tag.end : tags[closing].start].strip()
                calls.append(
                    CallText(body, tag.start - visible_start, tags[closing].end - visible_start)
                )
        elif tag.name == "think":
            # A further thought. Without an end it is text: an answer may speak of the tag.
            closing = reader.find_end_of_thought(tag_index)
        elif tag.name == "/think" and thought is None:
            # The chat template opened the thought, so everything in front belongs to it.
            thought = text[: tag.start].strip()
            visible_start = tag.end
            calls = []
            spans = []

        # A tag without a partner is text. After a pair, go on after its closing tag.
        if closing is None:
            tag_index += 1
        else:
            spans.append((tag.start, tags[closing].end))
            tag_index = closing + 1

    # The text outside of them.
    pieces = []
    position = visible_start
    for start, end in spans:
        pieces.append(text[position:start])
        position = end
    pieces.append(text[position:])
    return TurnText(thought, False, text[visible_start:], tuple(calls), "".join(pieces))


class _TurnReader:
    """The tags of a turn, and which of them belong together.

    A tag is named by its index in `tags`, a place in the text by its offset.

    Args:
        text (`str`): The turn.
        call_tags (`tuple[str, ...]`): As in [`split_turn`].

    Attributes:
        tags (`list[_Tag]`): All tags, in order.
        offset (`int`): Where the text after the leading thoughts begins.
        tag_index (`int`): The first tag after them.
        is_cut (`bool`): The last of them has no end.
    """

    def __init__(self, text: str, call_tags: tuple[str, ...]):
        self.text = text
        self.call_tags = call_tags
        self.tags = _find_tags(text, call_tags)
        self.offset = 0
        self.tag_index = 0
        self.is_cut = False
        # For each tag name: for each tag, the next one of that name. Filled by `find_next`.
        self._next: dict[str, list[int]] = {}
        # The tag that begins at an offset.
        self._tag_index_at = {tag.start: tag_index for tag_index, tag in enumerate(self.tags)}
        self._end_of_xml_call = self._match_xml_calls()
        self._partners = _match_brackets(self.tags, "think")

    def read_leading_thoughts(self) -> str | None:
        """Read the thoughts at the start of the turn, usually one; `None` if there is none."""
        thoughts = []
        while self.tag_index < len(self.tags):
            tag = self.tags[self.tag_index]
            if tag.name != "think" or not self._is_blank(self.offset, tag.start):
                break
            closing = self.find_end_of_thought(self.tag_index)
            # Without an end the rest of the turn is the thought.
            if closing is None:
                self.is_cut = True
                thoughts.append(self.text[tag.end :].strip())
                break

            # Go on after the thought: another one may follow.
            thoughts.append(self.text[tag.end : self.tags[closing].start].strip())
            self.offset = self.tags[closing].end
            self.tag_index = closing + 1
        return "\n\n".join(thoughts) if thoughts else None

    def find_next(self, tag_name: str, tag_index: int) -> int | None:
        """Return the index of the first tag of this name at or after `tag_index`."""
        if tag_name not in self._next:
            # From the end, so that all tags take linear time.
            next_indices = [len(self.tags)] * (len(self.tags) + 1)
            for index in reversed(range(len(self.tags))):
                is_match = self.tags[index].name == tag_name
                next_indices[index] = index if is_match else next_indices[index + 1]
            self._next[tag_name] = next_indices
        next_index = self._next[tag_name][tag_index]
        return None if next_index == len(self.tags) else next_index

    def find_end_of_thought(self, tag_index: int) -> int | None:
        """Return the index of the tag that ends the thought of a tag; `None` without an end.

        A pair of tags in the thought is a mention of them, unless a call follows: its arguments may
        hold such tags too.
        """
        closing = self.find_next("/think", tag_index + 1)
        partner = self._partners.get(tag_index)
        # Without a matching tag the first closing tag is the end, if there is one.
        if closing is None or partner is None:
            return closing
        # Look for a call between the first closing tag and the matching one.
        next_calls = [self.find_next(call_tag, closing) for call_tag in self.call_tags]
        has_call = any(next_call is not None and next_call < partner for next_call in next_calls)
        return closing if has_call else partner

    def find_end_of_call(self, tag_index: int, ignore_drafts: bool) -> int | None:
        """Return the index of the tag that closes the call of a tag; `None` if it is no call.

        Args:
            tag_index (`int`): The opening tag.
            ignore_drafts (`bool`): Ignore a call that spans the closing `</think>`: it was a draft,
                in a thought that the chat template opened. Not if the tag is in its arguments.
        """
        closing_name = f"/{self.tags[tag_index].name}"
        first_closing = self.find_next(closing_name, tag_index + 1)
        if first_closing is None:
            return None
        # Calls in the XML form have been matched already.
        if tag_index in self._end_of_xml_call:
            return self._end_of_xml_call[tag_index]

        # JSON ends at a closing tag that is in none of its strings.
        opening = self.tags[tag_index]
        body = _NOT_SPACE.search(self.text, opening.end)
        if body is not None and body[0] == "{":
            end = _find_end_of_json(self.text, body.start())
            closing = self._tag_index_at.get(end)
            if closing == first_closing:
                return closing
            # A later closing tag ends the call only if all of the text in front of it is JSON.
            is_closing = closing is not None and self.tags[closing].name == closing_name
            if is_closing and _is_json(self.text[body.start() : end]):
                return closing

        # Neither form: the call ends at the first closing tag, whatever is in front of it.
        end_of_thought = self.find_next("/think", tag_index + 1)
        # The thought ends inside of the call, which was only a draft then.
        if ignore_drafts and end_of_thought is not None and end_of_thought < first_closing:
            return None
        return first_closing

    def _match_xml_calls(self) -> dict[int, int]:
        """Return the index of the closing tag of each call in the XML form, by its opening tag's.

        They are matched like brackets, because the value of a parameter may quote whole calls. A
        lone closing tag in a value does not count: no parameter ends in front of it.
        """
        # Opening tags wait on a stack for their closing tags.
        matches: dict[int, int] = {}
        unmatched: list[int] = []
        for tag_index, tag in enumerate(self.tags):
            if tag.name in self.call_tags and self._is_followed_by(tag_index, "function"):
                unmatched.append(tag_index)
            elif (
                unmatched
                and tag.name == f"/{self.tags[unmatched[-1]].name}"
                and self._ends_xml_call(tag_index)
            ):
                matches[unmatched.pop()] = tag_index
        return matches

    def _ends_xml_call(self, tag_index: int) -> bool:
        # The end of a call: `</parameter>` or `<function=f>`, then `</function>`, then this tag.
        ends_function = tag_index >= 2 and self._is_followed_by(tag_index - 2, "/function")
        last = self.tags[tag_index - 2].name if ends_function else ""
        return last in ("/parameter", "function") and self._is_followed_by(
            tag_index - 1, self.tags[tag_index].name
        )

    def _is_followed_by(self, tag_index: int, tag_name: str) -> bool:
        """Return whether the next tag has this name, with at most white space in between."""
        if tag_index + 1 >= len(self.tags) or self.tags[tag_index + 1].name != tag_name:
            return False
        return self._is_blank(self.tags[tag_index].end, self.tags[tag_index + 1].start)

    def _is_blank(self, start: int, end: int) -> bool:
        return _NOT_SPACE.search(self.text, start, end) is None


@lru_cache
def _tag_pattern(call_tags: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, ("think", "function", "parameter", *call_tags)))
    # `<name>`, `</name>` or `<name=label>`
    return re.compile(rf"<(/?)({names})(=[^<>\n]*)?>")


def _find_tags(text: str, call_tags: tuple[str, ...]) -> list[_Tag]:
    """Return the tags of thoughts, calls, functions and parameters in a text."""
    tags = []
    for match in _tag_pattern(call_tags).finditer(text):
        slash, name, label = match.groups()
        # Exactly the opening tags of functions and parameters have a label. Anything else is text.
        needs_label = name in ("function", "parameter") and not slash
        if needs_label == (label is not None):
            tags.append(_Tag(slash + name, (label or "=")[1:].strip(), match.start(), match.end()))
    return tags


def _match_brackets(tags: Sequence[_Tag], tag_name: str) -> dict[int, int]:
    """Return the index of the closing tag of each opening tag of a name, as brackets match."""
    partners: dict[int, int] = {}
    unmatched: list[int] = []
    for tag_index, tag in enumerate(tags):
        if tag.name == tag_name:
            unmatched.append(tag_index)
        elif tag.name == f"/{tag_name}" and unmatched:
            partners[unmatched.pop()] = tag_index
    return partners


def _find_end_of_json(text: str, start: int) -> int:
    """Return the offset of the first `<` after `start` that is outside of JSON strings.

    It is -1 if there is none, or if this is not JSON.
    """
    position = start
    in_string = False
    while True:
        # Inside of a string look for its end or an escape, outside for a string or a tag.
        match = (_QUOTE_OR_BACKSLASH if in_string else _QUOTE_OR_TAG).search(text, position)
        if match is None:
            return -1
        position = match.end()
        if match[0] == '"':
            in_string = not in_string
        elif in_string:
            position += 1  # the character after a backslash
        else:
            return match.start() if match[0] == "<" else -1


def _is_json(text: str) -> bool:
    """Return whether a text is JSON. Line breaks in strings are tolerated, as models write them."""
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


# --- the body of a call -> a function call --------------------------------------------------------


def read_call(body: str, tools: Iterable[Any] = ()) -> FunctionCall:
    """Read a tool call in either form. Never raises.

    Args:
        body (`str`): The text between its tags: the `body` of a [`CallText`].
        tools (`Iterable[dict]`, *optional*): The tools in the form of chat templates. The XML form
            writes texts without quotes, so the schema of a parameter decides whether `12` is a
            number.
    """
    # The XML form is recognised by its beginning; everything else should be JSON.
    if body.startswith("<function="):
        return _read_xml_call(body, tools)
    try:
        call = load_json(body)
    except (ValueError, RecursionError) as error:
        # Find the name and the arguments in the broken JSON.
        return FunctionCall(
            _find_name(body), _find_arguments(body), f"{type(error).__name__}: {str(error)[:80]}"
        )
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return FunctionCall("", body, "it is no JSON object with a name")

    # Some models write the arguments as a JSON text.
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _decode_object(arguments)
    if arguments is None:
        arguments = {}
    problem = "" if isinstance(arguments, dict) else "arguments are not a JSON object"
    return FunctionCall(call["name"], arguments, problem)


def load_json(text: str) -> Any:
    """Parse JSON of a model into values that every client, template and tokenizer can take.

    Half a surrogate pair becomes a replacement character.

    Raises:
        `ValueError`: The text is not JSON. `NaN`, `Infinity`, numbers that overflow, and nesting of
            over 100 levels are refused too.
        `RecursionError`: It is nested far too deeply.
    """
    value = json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_float)

    # Measure the depth level by level, without recursion.
    level = [value]
    for _ in range(_MAX_DEPTH):
        if not level:
            break
        level = _list_children(level)
    if level:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")

    # An escaped surrogate can only be seen after decoding.
    if "\\ud" in text.lower():
        value = json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False)))
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return number


def _list_children(values: Iterable[Any]) -> list[Any]:
    """Return the lists and objects directly inside of lists and objects."""
    children: list[Any] = []
    for value in values:
        items: Iterable[Any] = ()
        if isinstance(value, dict):
            items = value.values()
        elif isinstance(value, list):
            items = value
        children += [item for item in items if isinstance(item, dict | list)]
    return children


def _decode_object(text: str) -> Any:
    """Return the object in arguments that are a JSON text, or the text if it has no object."""
    try:
        value = load_json(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _find_name(body: str) -> str:
    """Return the name in a call that is not JSON; empty if there is none."""
    # The name is the text in quotes after `"name":`.
    rest_of_body = body.partition('"name"')[2].lstrip()
    quote, _, rest = rest_of_body.removeprefix(":").lstrip().partition('"')
    name, closed, _ = rest.partition('"')
    return name if rest_of_body.startswith(":") and not quote and closed else ""


def _find_arguments(body: str) -> str:
    """Return the text of the arguments in a call that is not JSON."""
    return body.partition('"arguments"')[2].lstrip(" :")


# --- the XML form ---------------------------------------------------------------------------------


def _read_xml_call(body: str, tools: Iterable[Any]) -> FunctionCall:
    tags = _find_tags(body, ())
    if not tags or tags[0].start != 0 or not tags[0].label:
        return FunctionCall("", body, "it has no <function=name>")
    name = tags[0].label
    # Look up the schemas of the tool's parameters.
    schema = _find_parameters(name, tools)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}

    # Read each parameter by the types that its schema accepts.
    arguments: dict[str, Any] = {}
    types_by_label: dict[str, set[str]] = {}
    ends = _match_parameters(body, tags)
    tag_index = 0
    while tag_index < len(tags):
        tag = tags[tag_index]
        end = ends.get(tag_index) if tag.name == "parameter" else None
        if end is not None:
            value = body[tag.end : tags[end].start].removeprefix("\n").removesuffix("\n")
            if tag.label not in types_by_label:
                types_by_label[tag.label] = accepted_types(properties.get(tag.label), schema)
            arguments[tag.label] = _read_value(value, types_by_label[tag.label])
            # Tags in a value are text, so go on after it.
            tag_index = end
        tag_index += 1
    return FunctionCall(name, arguments)


def _match_parameters(body: str, tags: Sequence[_Tag]) -> dict[int, int]:
    """Return the index of the closing tag of each parameter, by its opening tag's.

    A closing tag in a value is text. The real one is followed by another parameter or the end of
    the call. Of those, the one that matches like a bracket is preferred, because a value may quote
    whole calls.
    """
    brackets = _match_brackets(tags, "parameter")

    # From the end: the next closing tag, and the next one that is followed by what belongs there.
    ends: dict[int, int] = {}
    next_closing: int | None = None
    next_end: int | None = None
    followed_by_end: set[int] = set()
    for tag_index in reversed(range(len(tags))):
        tag = tags[tag_index]
        if tag.name == "/parameter":
            next_closing = tag_index
            if _ends_value(body, tags, tag_index):
                next_end = tag_index
                followed_by_end.add(tag_index)
        elif tag.name == "parameter":
            bracket = brackets.get(tag_index)
            # Prefer the matching tag, then one that is followed by what belongs there, then any.
            end = bracket if bracket in followed_by_end else next_end
            end = next_closing if end is None else end
            if end is not None:
                ends[tag_index] = end
    return ends


def _ends_value(body: str, tags: Sequence[_Tag], tag_index: int) -> bool:
    """Return whether a `</parameter>` is followed by another one or by the end of the call."""
    # Only white space may stand between this tag and the next one.
    following = tags[tag_index + 1] if tag_index + 1 < len(tags) else None
    until = len(body) if following is None else following.start
    if _NOT_SPACE.search(body, tags[tag_index].end, until) is not None:
        return False
    if following is None or following.name == "parameter":
        return True
    # The end of the function must be the end of the call, too.
    return following.name == "/function" and _NOT_SPACE.search(body, following.end) is None


def _find_parameters(name: str, tools: Iterable[Any]) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's parameters; empty if there is none."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def accepted_types(schema: Any, root: Any) -> set[str]:
    """Return the JSON types that a schema accepts, such as `{"string", "null"}`.

    Empty if it names none.

    Reads `type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf` and `$ref`, as pydantic and TypeScript
    write optional types, unions and enums.

    Args:
        schema (`Any`): The schema of one parameter.
        root (`Any`): The schema that its references point into.
    """
    types: set[str] = set()
    pending = [schema]
    references: set[str] = set()
    # Work through the parts of the schema. Each reference is followed once, so that cycles end.
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping):
            continue
        declared = part.get("type")
        values = part.get("enum")
        if "const" in part:
            values = [part["const"]]
        # Listed values take precedence over the declared type.
        if isinstance(values, list):
            types |= {_json_type(value) for value in values}
        elif isinstance(declared, str):
            types.add(declared.lower())  # Google's schemas have them in capitals
        elif isinstance(declared, list):
            types |= {name.lower() for name in declared if isinstance(name, str)}
        if part.get("nullable") is True:
            types.add("null")
        # The alternatives of a union are parts of their own.
        for keyword in ("anyOf", "oneOf", "allOf"):
            alternatives = part.get(keyword)
            if isinstance(alternatives, list):
                pending += alternatives
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            pending.append(_resolve_reference(reference, root))
    return types


def _resolve_reference(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/Color` points to, or `None`."""
    document, _, pointer = reference.partition("#")
    # Only references into the same schema can be followed.
    if document:
        return None

    # Follow a JSON pointer.
    part = root
    for key in pointer.split("/")[1:]:
        # `~1` and `~0` are a JSON pointer's escapes for `/` and `~`.
        key = key.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, Mapping):
            return None
        part = part.get(key)
    return part


def _read_value(text: str, types: set[str]) -> Any:
    """Return the value of a parameter. Templates write text unquoted, everything else as JSON."""
    if types == {"string"}:
        return text
    # Templates for Qwen3-Coder write Python's booleans.
    if types == {"boolean"} and text in ("True", "False"):
        return text == "True"
    # Everything else is JSON. What cannot be parsed stays a text.
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        return text
    # Where texts are accepted too, only a value of one of the other types is not a text.
    if "string" in types and not _is_of_type(value, types - {"string"}):
        return text
    return value


def _is_of_type(value: object, types: set[str]) -> bool:
    value_type = _json_type(value)
    # In JSON Schema an integer is a number, too.
    return value_type in types or (value_type == "integer" and "number" in types)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    # In Python a `bool` is an `int`, so this test comes first.
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"
