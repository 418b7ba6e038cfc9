"""Headroom's sandbox: a world without headroom has none, and the tables count what was recorded."""

import pytest

from agentic_prompting.evaluation import PromptedSystem
from agentic_prompting.llm import Reply
from benchmarks.learning import headroom_worlds

ROWS = [{"question": f"q{number}", "answers": ["a"]} for number in range(3)]


def test_unread_prompts_have_one_conversation():
    calls = []

    async def chat(messages, repeat=None, **options):
        calls.append((str(messages), repeat))
        return Reply("a")

    unread = headroom_worlds.UnreadPrompts(chat, "the start prompt")
    headroom_worlds.assert_no_headroom(unread, ["the start prompt", "another", ""], ROWS)
    for prompt in ("the start prompt", "another", None):
        PromptedSystem(unread, prompt)(ROWS[:1], seed=5)
    conversations, repeats = zip(*calls, strict=True)
    assert len(set(conversations)) == 1
    assert len(set(repeats)) == 3


def test_a_model_that_reads_prompts_is_refused():
    class Reads(headroom_worlds.UnreadPrompts):
        def conversation(self, messages):
            return messages

    with pytest.raises(AssertionError):
        headroom_worlds.assert_no_headroom(Reads(None, "start"), ["start", "another"], ROWS)


def test_a_truths_error_widens_the_interval():
    assert not headroom_worlds.holds([0.2, 0.1, 0.3], 0.32)
    assert headroom_worlds.holds([0.2, 0.1, 0.3], 0.32, error=0.05)


def test_the_protocols_are_counted_apart():
    draw = {
        "what": "world",
        "world": "rules",
        "verdict": "worth it",
        "gain": [0.2, 0.1, 0.3],
        "truth": 0.35,
        "topped_up": False,
        "calls": 512,
        "seconds": 1.0,
    }
    second = {**draw, "protocol": 2, "truth_error": 0.1}
    assert "0 of 1" in headroom_worlds.table([draw, second], protocol=1)
    assert "1 of 1" in headroom_worlds.table([draw, second])
    assert headroom_worlds.table([draw]) == headroom_worlds.NOT_RECORDED
