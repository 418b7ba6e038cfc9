"""Whether a reader takes time linear in its input, in processor time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

TAGS = [
    f"<{slash}{name}>"
    for name in (
        "think",
        "tool_call",
        "function_call",
        "interaction_prompt",
        "answer",
        "tool_response",
        "parameter",
    )
    for slash in ("", "/")
]
PIECES = [
    *TAGS,
    "<think><think></think>",
    "<tool_call></think>",
    "<tool_call></tool_call>",
    "<tool_call></function_call>",
    "<tool_call>{",
    '<tool_call>{"',
    '<tool_call>{"</tool_call>',
    '<tool_call>{" </tool_call>"',
    '<tool_call>{\\" </tool_call>',
    '<tool_call>{"a": "</think>"}</tool_call>',
    '<tool_call>{"name": "f",</tool_call>',
    "<function=f>",
    "<function=",
    "<parameter=a>",
    "<parameter=",
    "<parameter=a>1</parameter>",
    "<tool_call><function=f>",
    "<tool_call><function=f><parameter=a>x</tool_call>",
    "<tool_call><function=f><parameter=a>x</tool_call></parameter><parameter=b>",
    "</parameter></function></tool_call>",
    "\n",
    " ",
    "<",
    "[",
    '{"a":',
    '"',
    "\\",
    "Answer:",
]
FRAMES = [
    ("", ""),
    ("<think>", ""),
    ("<tool_call>", ""),
    ("<tool_call>", "</tool_call>"),
    ('<tool_call>{"name": "f", "arguments": {"a": "', '"}}</tool_call>'),
    ("<tool_call><function=f><parameter=a>", "</parameter></function></tool_call>"),
]


def processor_seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """The least processor time of this process that `work` takes in a few repetitions.

    Other processes on the machine disturb it less than they disturb the clock.
    """
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def assert_linear(
    read: Callable[[str], Any], piece: str, opening: str = "", closing: str = "", size: int = 10_000
):
    """Read repetitions of a piece, four times as many the second time.

    Linear readers take four times as long then, quadratic ones sixteen times.
    """

    def seconds(length: int) -> float:
        text = opening + piece * (length // len(piece)) + closing
        return processor_seconds(lambda: read(text), repeats=2)

    seconds(1000)  # the first call may compile patterns
    short = seconds(size)
    long = seconds(4 * size)
    assert long < 8 * short + 0.03, (
        f"{long:.3f} s for {4 * size} characters, {short:.3f} s for {size}"
    )
