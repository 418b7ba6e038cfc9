"""Renders conversations with tools as token ids, and parses the policy's turns.

A call that starts a token sequence has its whole conversation rendered. A call that continues an
earlier reply keeps the ids of that reply, and only what follows it is rendered: the end of the
reply's turn and the new messages, together the *seam*. A seam is rendered after a short
placeholder conversation that contains the reply's own tool calls, because some templates write
results into the same turn, or take the tool's name from the call.

A template may write a seam differently in the whole conversation. So the first seam of each type is
compared with the rendering of the whole conversation. If they differ, each call with a seam of this
type starts a token sequence.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..llm import Misconfigured
from ..rollout import (
    ChatFormat,
    FunctionCall,
    PlainText,
    find_tool_problem,
    load_json,
    read_call,
    split_turn,
)
from .protocol import ChatMessage, Refusal, ToolCall

logger = logging.getLogger(__name__)

# Words that no template rewrites.
_USER = "QUSERQ"
_AGENT = "QAGENTQ"
_SYSTEM = "QSYSTEMQ"
_RESULT = "QRESULTQ"
_MORE = "QMOREQ"
_WORD = "QWORDQ"
_PROBE = ToolCall("call_0", "probe", json.dumps({"word": _WORD}))
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}

# How a message follows a reply: the number of its calls, the roles of the new messages, whether
# there are tools.
_SeamType = tuple[int, tuple[str, ...], bool]


@dataclass(frozen=True)
class Seam:
    """The text that a template writes between a reply and the next turn.

    Args:
        closing (`str`): The end of the reply's turn.
        continuation (`str`): The new messages, and the beginning of the next turn.
    """

    closing: str
    continuation: str


class Renderer:
    """Renders conversations for one tokenizer and its chat template.

    Args:
        chat_format ([`ChatFormat`]): The tokenizer, the template's arguments, the tokens that end a
            turn.

    Attributes:
        turn_prefix (`str`): What the template has already written of a turn when sampling starts.
    """

    def __init__(self, chat_format: ChatFormat):
        self.chat_format = chat_format
        self._tokenizer = chat_format.tokenizer
        self._text = PlainText(self._tokenizer, keep_ordinary=True)
        # The texts of the tokens that end a turn, to find where a rendered turn ends.
        end_ids = sorted(chat_format.end_of_turn_ids)
        self._turn_ends = [self._tokenizer.decode([token]) for token in end_ids]

        # Facts about the template. Problems are keyed by whether there are tools and a system
        # message.
        self._problems: dict[tuple[bool, bool], Misconfigured | None] = {}
        self._warned: set[str] = set()

        # By type of seam: whether the template writes it as in the whole conversation, and whether
        # tools change it.
        self._is_seam_faithful: dict[_SeamType, bool] = {}
        self._seam_needs_tools: dict[_SeamType, bool] = {}

        # Whether arguments of calls may be a text; unknown until it matters.
        self._takes_text: bool | None = None
        # The placeholder conversation without calls and tools, which most calls need.
        self._plain_placeholder = ""

        # Whether the template opens the thought itself, as those of thinking models do.
        opening = self._text.render(
            [{"role": "user", "content": _USER}], **chat_format.chat_template_kwargs
        )
        self.turn_prefix = "<think>\n" if opening.rstrip().endswith("<think>") else ""

    def find_problem(self, with_tools: bool, with_system: bool = True) -> Misconfigured | None:
        """Find out why the template cannot hold such conversations; `None` if it can.

        Some templates drop a part of a conversation without an error. The result is cached.
        """
        parts = (with_tools, with_system)
        if parts not in self._problems:
            self._problems[parts] = self._probe_template(with_tools, with_system)
        return self._problems[parts]

    def warn_of(self, problem: Misconfigured) -> None:
        """Log once that requests are refused because of the chat template: an agent may hide it."""
        if str(problem) not in self._warned:
            self._warned.add(str(problem))
            logger.warning("requests of the agent are refused: %s", problem)

    def whole_ids(self, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> list[int]:
        """Return the ids of a conversation, up to where the policy's turn begins.

        Raises:
            [`Refusal`]: The template cannot render it.
        """
        return self._ids(self._render(_fold_system_messages(messages), tools))

    def ids_after(
        self,
        ids: Sequence[int],
        reply: ChatMessage,
        new_messages: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        tools: Sequence[Any],
    ) -> list[int] | None:
        """Return the ids between a reply and the next turn of the policy.

        Args:
            ids (`Sequence[int]`): The sampled ids of the reply.
            reply ([`ChatMessage`]): The reply, with its calls.
            new_messages (`Sequence[ChatMessage]`): The messages since, at least one.
            messages (`Sequence[ChatMessage]`): The whole conversation, for the comparison.
            tools (`Sequence[dict]`): The tools of the request.

        Returns:
            `list[int]`: `None` if the template writes them in another way than after the reply.
        """
        # Render the seam, unless the template is known to write this type differently.
        roles = tuple(dict.fromkeys(message.role for message in new_messages))
        seam_type: _SeamType = (len(reply.tool_calls), roles, bool(tools))
        if self._is_seam_faithful.get(seam_type) is False:
            return None
        # Tools that are known to change nothing in the seam need not be rendered.
        seam_tools = tools if self._seam_needs_tools.get(seam_type, True) else ()
        try:
            seam = self._render_seam(reply, new_messages, seam_tools)
        except Refusal:  # of these messages alone: others of this type may be fine
            return None
        if seam is None:
            self._is_seam_faithful[seam_type] = False
            return None

        # Compare the first seam of each type with the whole conversation.
        if seam_type not in self._is_seam_faithful:
            whole = self._render(_fold_system_messages(messages), tools)
            whole = whole.replace(self._text.mark, "")
            continuation = seam.continuation.replace(self._text.mark, "")
            self._is_seam_faithful[seam_type] = whole.endswith(continuation)
            # For later seams: whether the tools make a difference.
            without_tools = self._render_seam_without_tools(reply, new_messages)
            self._seam_needs_tools[seam_type] = bool(tools) and without_tools != seam
            if not self._is_seam_faithful[seam_type]:
                logger.warning(
                    "the chat template writes %s after a reply in another way than in the whole "
                    "conversation: such calls begin a new token sequence each",
                    " and ".join(roles),
                )
                return None

        # The policy may have sampled the end of its turn itself.
        closing = seam.closing
        if ids and ids[-1] in self.chat_format.end_of_turn_ids:
            for turn_end in self._turn_ends:
                if closing.startswith(turn_end):
                    closing = closing.removeprefix(turn_end)
                    break
        return self._ids(closing + seam.continuation)

    def _render_seam(
        self, reply: ChatMessage, new_messages: Sequence[ChatMessage], tools: Sequence[Any]
    ) -> Seam | None:
        """Return what the template writes after a reply; `None` if it changes the reply.

        Raises:
            [`Refusal`]: The template cannot render them.
        """
        # A placeholder conversation up to the reply, and with the new messages.
        placeholder = [
            ChatMessage("user", _USER),
            ChatMessage("assistant", _AGENT, tool_calls=reply.tool_calls),
        ]
        # Without calls and tools the beginning is always the same, so it is rendered once.
        if reply.tool_calls or tools:
            before = self._render(placeholder, tools, generation_prompt=False)
        else:
            if not self._plain_placeholder:
                self._plain_placeholder = self._render(placeholder, (), generation_prompt=False)
            before = self._plain_placeholder
        new_parts = _fold_system_messages(new_messages, leads=False)
        after = self._render([*placeholder, *new_parts], tools)

        # Compare what follows the reply: thoughts in front of the last turn alone make no
        # difference.
        if _AGENT in before and _AGENT in after:
            before = before.rpartition(_AGENT)[2]
            after = after.partition(_AGENT)[2]
        if not after.startswith(before):
            return None
        # The text before the end of the turn is the reply's calls, which were sampled.
        end = max((before.rfind(turn_end) for turn_end in self._turn_ends), default=-1)
        closing = before[end:] if end >= 0 else ""
        return Seam(closing, after[len(before) :])

    def _render_seam_without_tools(
        self, reply: ChatMessage, new_messages: Sequence[ChatMessage]
    ) -> Seam | None:
        try:
            return self._render_seam(reply, new_messages, ())
        except Refusal:
            return None

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Any],
        generation_prompt: bool = True,
    ) -> str:
        # Marks keep a text from forging special tokens.
        marked_messages = self._text.marked(self._to_messages(messages))
        options = dict(self.chat_format.chat_template_kwargs)
        if tools:
            options["tools"] = list(tools)
        try:
            return self._text.render(marked_messages, generation_prompt, **options)
        except Exception as error:
            message = f"The chat template cannot render these messages: {str(error)[:200]}"
            raise Refusal(400, message, "invalid_value", "messages") from error

    def _ids(self, rendered: str) -> list[int]:
        return self._text.ids_of(rendered)

    def _probe_template(self, with_tools: bool, with_system: bool) -> Misconfigured | None:
        """Render a conversation with a message of each role, and look for its words."""
        # The conversation, and what each of its words stands for.
        probe: list[ChatMessage] = []
        parts = {_USER: "user messages", _AGENT: "earlier replies", _MORE: "later user messages"}
        if with_system:
            probe.append(ChatMessage("system", _SYSTEM))
            parts[_SYSTEM] = "system messages"
        probe.append(ChatMessage("user", _USER))
        if with_tools:
            probe.append(ChatMessage("assistant", tool_calls=(_PROBE,)))
            probe.append(ChatMessage("tool", _RESULT))
            parts |= {_WORD: "tool calls", _RESULT: "results of tools"}
        probe += [ChatMessage("assistant", _AGENT), ChatMessage("user", _MORE)]

        # Find the parts that the template drops.
        try:
            rendered = self._render(probe, [_PROBE_TOOL] if with_tools else ())
        except Refusal as error:
            return Misconfigured(error.message)
        dropped_parts = [part for word, part in parts.items() if word not in rendered]
        if dropped_parts:
            message = (
                f"the chat template drops {' and '.join(dropped_parts)}: an agent would lose them "
                "unseen"
            )
            if with_tools:
                message += (
                    "; use a model whose template writes calls of tools, such as Qwen3, or change "
                    "the chat template in its folder"
                )
            return Misconfigured(message)

        # Whether calls are read back as the template writes them.
        problem = find_tool_problem(self._render_messages, _read_calls) if with_tools else ""
        if problem:
            return Misconfigured(
                f"{problem}: give the agent no tools, or use a model of another family"
            )
        return None

    def _render_messages(self, messages: Sequence[Any], tools: Sequence[Any]) -> str:
        options = {**self.chat_format.chat_template_kwargs, "tools": list(tools)}
        return self._text.render(messages, **options)

    def _to_messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return the messages as chat templates take them.

        Results belong to calls by their order, as ids may have been dropped. The ids shown are
        numbers, so that rollouts of a group read the same tokens.
        """
        converted_messages: list[dict[str, Any]] = []
        awaited_results: list[tuple[str, str]] = []  # ids and names of the last calls
        number = 0
        for message in messages:
            converted: dict[str, Any] = {"role": message.role, "content": message.text}
            # Templates of thinking models take a thought in this field.
            if message.thought:
                converted["reasoning_content"] = message.thought
            # Number the calls, and remember which results to expect.
            if message.tool_calls:
                awaited_results = []
                converted["tool_calls"] = []
                for call in message.tool_calls:
                    call_id = f"call_{number}"
                    number += 1
                    awaited_results.append((call_id, call.name))
                    function = {"name": call.name, "arguments": self._to_arguments(call.arguments)}
                    converted["tool_calls"].append(
                        {"id": call_id, "type": "function", "function": function}
                    )
            # Results come in the order of the calls.
            if message.role == "tool" and awaited_results:
                call_id, name = awaited_results.pop(0)
                converted["tool_call_id"] = call_id
                converted["name"] = name
            converted_messages.append(converted)
        return converted_messages

    def _to_arguments(self, text: str) -> Any:
        """Return arguments as the template takes them.

        That is an object. Anything else stays a text if the template shows texts, or is wrapped.
        """
        try:
            arguments = load_json(text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            return arguments
        # Wrap the text for templates that can only render objects.
        if self._takes_text is None:
            self._takes_text = self._find_takes_text()
        return text if self._takes_text else {"arguments": text}

    def _find_takes_text(self) -> bool:
        """Return whether the template shows arguments that are a text.

        Qwen3.5's can only render objects.
        """
        function = {"name": "probe", "arguments": _WORD}
        call = {"id": "call_0", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return _WORD in self._render_messages(messages, [_PROBE_TOOL])
        except Exception:  # a template raises errors of its own
            return False


def _read_calls(text: str) -> list[FunctionCall]:
    return [read_call(call.body) for call in split_turn(text).calls]


def read_turn(text: str, tools: Sequence[Any], custom: frozenset[str] = frozenset()) -> ChatMessage:
    """Return a turn of the policy: its thought, its text, the tools that it calls.

    Args:
        text (`str`): As sampled, without the tokens that end a turn.
        tools (`Sequence[dict]`): The tools that there are to call; without any, everything is text.
        custom (`frozenset[str]`, *optional*): Tools that take free text.
    """
    turn = split_turn(text, ("tool_call",) if tools else ())
    thought = turn.thought or ""
    calls = [read_call(call.body, tools) for call in turn.calls]
    # Without calls, or if a call has no name, the turn is text.
    if not calls or not all(call.name for call in calls):
        text = turn.visible if turn.thought is None else turn.visible.strip()
        return ChatMessage("assistant", text, thought)
    # The text of a turn with calls is what stands in front of the first one.
    text_before_calls = turn.visible[: turn.calls[0].start].strip()
    tool_calls = tuple(_to_tool_call(call, call.name in custom) for call in calls)
    return ChatMessage("assistant", text_before_calls, thought, tool_calls)


def _to_tool_call(call: FunctionCall, is_custom: bool) -> ToolCall:
    """Return a call as clients get it.

    Its arguments are a JSON text, or what the policy wrote if that is no JSON.
    """
    arguments = call.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", call.name, arguments, is_custom)


def _fold_system_messages(messages: Sequence[ChatMessage], leads: bool = True) -> list[ChatMessage]:
    """Return the conversation as every template can hold it.

    It has one system message at its head; a later one is the user's.

    Several system messages are dropped without a word by some templates and refused by others.
    """
    system_texts: list[str] = []
    other_messages: list[ChatMessage] = []
    for message in messages:
        if message.role != "system":
            other_messages.append(message)
        elif leads and not other_messages:
            # At the head of the conversation, before any other message.
            system_texts.append(message.text)
        else:
            other_messages.append(ChatMessage("user", message.text))
    if not system_texts:
        return other_messages
    return [ChatMessage("system", "\n\n".join(system_texts)), *other_messages]
