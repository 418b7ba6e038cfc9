"""Checks that a chat template supports conversations with tools.

Some templates drop a part of them without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .turn_reader import FunctionCall

# Words that no template rewrites.
_USER = "QUSERQ"
_RESULT = "QRESULTQ"
_TOOL = "QTOOLQ"
_ARGUMENTS = {"word": "QWORDQ"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": _USER},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": _TOOL, "arguments": _ARGUMENTS},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "name": _TOOL, "content": _RESULT},
]

_CALL_FORMS = (
    "<tool_call> with JSON or <function=...> in it, as the Qwen, Hermes and Nemotron 3 families "
    "write them"
)


def find_tool_problem(
    render: Callable[[Sequence[Any], Sequence[Any]], str],
    read_calls: Callable[[str], Sequence[FunctionCall]] | None = None,
) -> str:
    """Return why a chat template cannot be used with tools; empty if it can.

    Args:
        render (`Callable`): Renders messages and tools as text, up to where the next turn begins.
            May raise.
        read_calls (`Callable`, *optional*): Reads the calls in the text of a turn. Without it only
            the list of tools is checked.
    """
    try:
        # The prompt must show the list of tools.
        prompt = render(_CONVERSATION[:1], [_PROBE_TOOL])
        if _TOOL not in prompt:
            return "the model's chat template never shows the agent its tools"
        if read_calls is None:
            return ""
        # Render a conversation with a call and its result.
        rendered = render(_CONVERSATION, [_PROBE_TOOL])
    except Exception as error:  # a template raises errors of its own
        return f"the model's chat template cannot render tools: {str(error)[:200]}"

    # Some templates show an example in front of the conversation.
    agents_turn = rendered.rpartition(_USER)[2]
    # The call must be read back exactly as it was rendered.
    if list(read_calls(agents_turn)) != [FunctionCall(_TOOL, _ARGUMENTS)]:
        return (
            "the model's chat template writes tool calls in a form that is not supported: it must "
            f"be {_CALL_FORMS}"
        )
    return ""
