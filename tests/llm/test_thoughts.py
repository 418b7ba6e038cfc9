"""The thought of a reply: where it begins and ends, cut off, mentioned, and in linear time."""

import gc
import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.llm import (
    BadReply,
    Reply,
    ServerFailed,
    Usage,
    split_thoughts,
    strip_thoughts,
    without_thoughts,
)
from support.linear import processor_seconds

VISIBLE = {
    "closed": ("<think>a</think> b", "b"),
    "opened by the template": ("a</think> b", "b"),
    "opened by the template, with a pair inside": ("I write <think>a</think> so </think> b", "b"),
    "cut off": ("<think>a and", ""),
    "cut off behind text": ("b\n<think>a and", "b"),
    "behind the answer": ("b <think>a</think>", "b"),
    "two": ("<think>a</think> b <think>a</think>c", "b c"),
    "mentions a pair": ("<think>in <think>...</think> tags</think> b", "b"),
    "mentions an opening mark": ("<think>I use <think> first.</think> b", "b"),
    "mentions in backticks": (
        "<think>`</think>` comes last</think> write `<think>`",
        "write `<think>`",
    ),
    "a closing mark in the text": ("<think>a</think> end with </think>.", "end with </think>."),
    "Magistral": ("[THINK]a[/THINK]b", "b"),
    "other marks": ("<THINKING>a</THINKING>b ◁think▷a◁/think▷ c", "b  c"),
    "further marks": ("<thought>a</thought>b <reasoning>a</reasoning>c <reasoning>a", "b c"),
    "none": (" b ", "b"),
    "empty": ("", ""),
}


@pytest.mark.parametrize(("reply", "visible"), VISIBLE.values(), ids=VISIBLE)
def test_thoughts_are_stripped(reply, visible):
    assert strip_thoughts(reply) == visible


def test_the_thought_is_kept_apart():
    assert split_thoughts("<think> a </think>b<think>c</think>") == ("a\n\nc", "b")
    assert split_thoughts("a</think>b").thought == "a"
    assert split_thoughts("<think>cut").thought == "cut"


def test_marks_in_a_payload_are_content():
    payload = re.compile("<prompt>")
    prompt = "<prompt>Think in <think></think> tags, then <think>."
    assert strip_thoughts(f"<think>I try <prompt>x</prompt></think>{prompt}", payload) == prompt
    assert strip_thoughts("Well. <think>I try <prompt>x</prompt> but", payload) == "Well."


def test_an_agent_is_shown_no_thought():
    """A reply that ends inside of its thought has nothing to show: it failed, as any reply without
    text.
    """
    usage = Usage(3, 4)
    reply = Reply("<think>Is it Rome?</think>\nIt is.\n", finish_reason="stop", usage=usage)
    assert without_thoughts(reply) == replace(reply, text="It is.")

    cut = Reply("<think>Is it Rome, or", finish_reason="length", usage=usage)
    visible = without_thoughts(cut)
    assert isinstance(visible.error, BadReply) and "max_tokens" in str(visible.error)
    assert (visible.text, visible.usage, visible.finish_reason) == ("", usage, "length")

    for unchanged in (Reply(" It is.\n"), Reply("<think>"), Reply(error=ServerFailed("down"))):
        assert without_thoughts(unchanged) is unchanged


PIECES = ["<think>", "</think>", "[THINK]", "`", "text", "<prompt>", "\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_mixture_is_split(text):
    thought, visible = split_thoughts(text)
    assert len(visible) <= len(text) and (visible == text or thought or len(visible) < len(text))
    assert strip_thoughts(text) == visible.strip()


@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", "<think><think></think>", "<think></think>", "`<think>", "<"]
)
def test_time_is_linear(piece):
    payload = re.compile("<prompt>")

    def seconds(count: int) -> float:
        text = piece * count
        gc.collect()
        return processor_seconds(lambda: split_thoughts(text, payload))

    # Eight times the text: quadratic time would be 64 times as long.
    assert seconds(80_000) < 24 * seconds(10_000) + 0.1
