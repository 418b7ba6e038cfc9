"""Conversations with tools as token ids, and turns read back: whole, or what is new since a reply of the policy.

A call that goes on from an earlier reply keeps the ids of that reply. What the template puts behind it, and the new
messages, are rendered behind a short placeholder conversation that has the reply's own tool calls in it: some templates
write results into the same turn, or take the tool's name from the call. The first seam of each kind is compared with
the rendering of the whole conversation; if a template writes it differently there, such calls begin a new sequence.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
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
_USER, _AGENT, _SYSTEM, _RESULT, _MORE = "QUSERQ", "QAGENTQ", "QSYSTEMQ", "QRESULTQ", "QMOREQ"
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


class Renderer:
    """Renders conversations for one tokenizer and its chat template.

    Args:
        form ([`ChatFormat`]): The tokenizer, the template's arguments, the tokens that end a turn.

    Attributes:
        turn_prefix (`str`): What the template has already written of a turn when sampling starts.
    """

    def __init__(self, form: ChatFormat):
        self.form, self._tokenizer = form, form.tokenizer
        self._text = PlainText(form.tokenizer, keep_ordinary=True)
        self._ends = [self._tokenizer.decode([token]) for token in sorted(form.end_of_turn_ids)]
        self._problems: dict[tuple[bool, bool], Misconfigured | None] = {}
        self._seams: dict[
            Any, bool
        ] = {}  # by kind: whether the template writes it as in the whole conversation
        self._needs_tools: dict[Any, bool] = {}
        self._takes_text: bool | None = (
            None  # whether arguments may be a text; unknown until it matters
        )
        self._warned: set[str] = set()
        self._closing = (
            ""  # the placeholder conversation without calls and tools, which most calls need
        )
        # Whether the template opens the thought itself, as those of thinking models do.
        begun = self._text.render([{"role": "user", "content": _USER}], **form.chat_template_kwargs)
        self.turn_prefix = "<think>\n" if begun.rstrip().endswith("<think>") else ""

    def problem(self, with_tools: bool, with_system: bool = True) -> Misconfigured | None:
        """Why the template cannot hold such conversations: some drop a part without an error. Looked at once."""
        kind = with_tools, with_system
        if kind not in self._problems:
            self._problems[kind] = self._find_problem(*kind)
        return self._problems[kind]

    def warn_of(self, problem: Misconfigured) -> None:
        """Log once that requests are refused because of the chat template: an agent may hide it."""
        if str(problem) not in self._warned:
            self._warned.add(str(problem))
            logger.warning("requests of the agent are refused: %s", problem)

    def whole_ids(self, entries: Sequence[ChatMessage], tools: Sequence[Any]) -> list[int]:
        """The ids of a conversation, up to where the policy's turn begins.

        Raises:
            [`Refusal`]: The template cannot render it.
        """
        return self._ids(self._render(_folded(entries), tools))

    def ids_after(
        self,
        ids: Sequence[int],
        reply: ChatMessage,
        new: Sequence[ChatMessage],
        entries: Sequence[ChatMessage],
        tools: Sequence[Any],
    ) -> list[int] | None:
        """The ids between a reply and the next turn of the policy.

        Args:
            ids (`Sequence[int]`): The sampled ids of the reply.
            reply ([`ChatMessage`]): The reply, with its calls.
            new (`Sequence[ChatMessage]`): The messages since, at least one.
            entries (`Sequence[ChatMessage]`): The whole conversation, for the comparison.
            tools (`Sequence[dict]`): The tools of the request.

        Returns:
            `list[int]`: `None` if the template writes them in another way than behind the reply.
        """
        kind = (len(reply.tool_calls), tuple(dict.fromkeys(one.role for one in new)), bool(tools))
        if self._seams.get(kind) is False:
            return None
        try:
            seam = self._seam(reply, new, tools if self._needs_tools.get(kind, True) else ())
        except Refusal:  # of these messages alone: others of this kind may be fine
            return None
        if seam is None:
            self._seams[kind] = False
            return None
        closing, behind = seam
        if kind not in self._seams:
            whole = self._render(_folded(entries), tools).replace(self._text.mark, "")
            self._seams[kind] = whole.endswith(behind.replace(self._text.mark, ""))
            self._needs_tools[kind] = bool(tools) and self._seam_without_tools(reply, new) != seam
            if not self._seams[kind]:
                logger.warning(
                    "the chat template writes %s after a reply in another way than in the whole conversation: such "
                    "calls begin a new token sequence each", " and ".join(kind[1]),
                )  # fmt: skip
                return None
        if ids and ids[-1] in self.form.end_of_turn_ids:
            closing = closing.removeprefix(next(filter(closing.startswith, self._ends), ""))
        return self._ids(closing + behind)

    def _seam(
        self, reply: ChatMessage, new: Sequence[ChatMessage], tools: Sequence[Any]
    ) -> tuple[str, str] | None:
        """What the template writes to end the reply, and what behind it; `None` if it changes the reply.

        Raises:
            [`Refusal`]: The template cannot render them.
        """
        base = [
            ChatMessage("user", _USER),
            ChatMessage("assistant", _AGENT, tool_calls=reply.tool_calls),
        ]
        if reply.tool_calls or tools:
            before = self._render(base, tools, generation_prompt=False)
        else:
            before = self._closing = self._closing or self._render(
                base, (), generation_prompt=False
            )
        after = self._render([*base, *_folded(new, leads=False)], tools)
        if (
            _AGENT in before and _AGENT in after
        ):  # thoughts in front of the last turn alone make no difference
            before, after = before.rpartition(_AGENT)[2], after.partition(_AGENT)[2]
        end = max((before.rfind(text) for text in self._ends), default=-1)
        if not after.startswith(before):
            return None
        return (before[end:] if end >= 0 else ""), after[len(before) :]

    def _seam_without_tools(
        self, reply: ChatMessage, new: Sequence[ChatMessage]
    ) -> tuple[str, str] | None:
        try:
            return self._seam(reply, new, ())
        except Refusal:
            return None

    def _render(
        self, entries: Sequence[ChatMessage], tools: Sequence[Any], generation_prompt: bool = True
    ) -> str:
        messages = self._text.marked(self._to_messages(entries))
        options = {**self.form.chat_template_kwargs, **({"tools": list(tools)} if tools else {})}
        try:
            return self._text.render(messages, generation_prompt, **options)
        except Exception as error:
            what = f"The chat template cannot render these messages: {str(error)[:200]}"
            raise Refusal(400, what, "invalid_value", "messages") from error

    def _ids(self, rendered: str) -> list[int]:
        return self._text.ids_of(rendered)

    def _find_problem(self, with_tools: bool, with_system: bool) -> Misconfigured | None:
        """Render one message of each kind and look for it."""
        calls = (_PROBE,) if with_tools else ()
        probe = [*[ChatMessage("system", _SYSTEM)] * with_system, ChatMessage("user", _USER)]
        probe += (
            [ChatMessage("assistant", tool_calls=calls), ChatMessage("tool", _RESULT)]
            if calls
            else []
        )
        probe += [ChatMessage("assistant", _AGENT), ChatMessage("user", _MORE)]
        try:
            rendered = self._render(probe, [_PROBE_TOOL] if calls else ())
        except Refusal as error:
            return Misconfigured(error.message)
        parts = {_USER: "user messages", _AGENT: "earlier replies", _MORE: "later user messages"}
        parts |= {_SYSTEM: "system messages"} if with_system else {}
        parts |= {_WORD: "tool calls", _RESULT: "results of tools"} if calls else {}
        if missing := [what for word, what in parts.items() if word not in rendered]:
            return Misconfigured(
                f"the chat template drops {' and '.join(missing)}: an agent would lose them unseen"
            )
        problem = find_tool_problem(self._render_messages, _read_calls) if with_tools else ""
        if problem:
            return Misconfigured(
                f"{problem}: give the agent no tools, or use a model of another family"
            )
        return None

    def _render_messages(self, messages: Sequence[Any], tools: Sequence[Any]) -> str:
        options = {**self.form.chat_template_kwargs, "tools": list(tools)}
        return self._text.render(messages, **options)

    def _to_messages(self, entries: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """The messages as chat templates take them. Results belong to calls by their place, as ids may have been
        dropped; the ids shown are numbers, so that rollouts of a group read the same tokens."""
        messages: list[dict[str, Any]] = []
        pending_results: list[
            tuple[str, str]
        ] = []  # id and name of the calls whose results come next
        number = 0
        for entry in entries:
            message: dict[str, Any] = {"role": entry.role, "content": entry.text}
            if entry.thought:
                message["reasoning_content"] = entry.thought
            if entry.tool_calls:
                pending_results = []
                message["tool_calls"] = []
                for call in entry.tool_calls:
                    id = f"call_{number}"
                    number += 1
                    pending_results.append((id, call.name))
                    function = {"name": call.name, "arguments": self._to_arguments(call.arguments)}
                    message["tool_calls"].append(
                        {"id": id, "type": "function", "function": function}
                    )
            if entry.role == "tool" and pending_results:
                message["tool_call_id"], message["name"] = pending_results.pop(0)
            messages.append(message)
        return messages

    def _to_arguments(self, text: str) -> Any:
        """Arguments as the template takes them: an object, also where the policy wrote something else."""
        try:
            arguments = load_json(text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            return arguments
        if self._takes_text is None:
            self._takes_text = self._find_takes_text()
        return text if self._takes_text else {"arguments": text}

    def _find_takes_text(self) -> bool:
        """Whether the template shows arguments that are a text. Qwen3.5's can only render objects."""
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
    """A turn of the policy: its thought, its text, the tools that it calls.

    Args:
        text (`str`): As sampled, without the tokens that end a turn.
        tools (`Sequence[dict]`): The tools that there are to call; without any, everything is text.
        custom (`frozenset[str]`, *optional*): Tools that take free text.
    """
    turn = split_turn(text, ("tool_call",) if tools else ())
    thought = turn.thought or ""
    calls = [read_call(call.body, tools) for call in turn.calls]
    if not calls or not all(call.name for call in calls):
        return ChatMessage(
            "assistant", turn.visible if turn.thought is None else turn.visible.strip(), thought
        )
    text_before_calls = turn.visible[: turn.calls[0].start].strip()
    tool_calls = tuple(_to_tool_call(call, call.name in custom) for call in calls)
    return ChatMessage("assistant", text_before_calls, thought, tool_calls)


def _to_tool_call(call: FunctionCall, is_custom: bool) -> ToolCall:
    """A call as clients get it: its arguments are a JSON text, or what the policy wrote if that is no JSON."""
    arguments = call.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", call.name, arguments, is_custom)


def _folded(entries: Sequence[ChatMessage], leads: bool = True) -> list[ChatMessage]:
    """The conversation as every template can hold it: one system message at its head, a later one as the user's.

    Several system messages are dropped without a word by some templates and refused by others.
    """
    system: list[str] = []
    shown: list[ChatMessage] = []
    for entry in entries:
        if entry.role != "system":
            shown.append(entry)
        elif leads and not shown:
            system.append(entry.text)
        else:
            shown.append(ChatMessage("user", entry.text))
    return [ChatMessage("system", "\n\n".join(system)), *shown] if system else shown
