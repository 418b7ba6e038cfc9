"""The call tree without a server, a policy or a tokenizer: parents, keys, sequences, roles."""

import random
import re
import zlib
from array import array

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.programs import Call, ChatMessage, CompletionRequest, ToolCall
from agentic_prompting.programs.call_tree import (
    CallTree,
    MalformedArguments,
    contains_words,
    conversation_keys,
    normalize_arguments,
    normalize_text,
    share_messages,
)
from agentic_prompting.rollout import Sample
from support.linear import processor_seconds
from support.programs import ADD


def user(text):
    return ChatMessage("user", text)


def assistant(text, handle="", tool_calls=()):
    return ChatMessage("assistant", text, handle=handle, tool_calls=tool_calls)


def ask(tree, *messages, reply="yes", model="agent", tools=(), handle="", tool_calls=()):
    """Add a call with its reply, as a session does. The ids are the bytes of the texts."""
    keys = list(conversation_keys(tools, messages))
    parent, new_messages = tree.find_parent(messages, keys)
    new_text = "".join(message.text for message in new_messages)
    call = Call(
        CompletionRequest(model, messages, tools),
        number=len(tree.calls) + 1,
        new_messages=tuple(new_messages),
        new_ids=list(new_text.encode()),
        parent=parent,
        key=keys[-1],
    )
    tree.add(call)
    call.sample = Sample(list(reply.encode()))
    tree.set_reply(call, assistant(reply, handle, tool_calls))
    return call


def texts(tree):
    """Prompt and completion of each sequence as text."""
    return [
        (bytes(row.prompt_ids).decode(), bytes(row.ids).decode()) for row, _ in tree.sequences()
    ]


# ---- parents ----


def test_a_returned_reply_is_continued():
    tree = CallTree()
    first = ask(tree, user("a"), reply="b")
    second = ask(tree, user("a"), assistant(" b\n"), user("c"), reply="d")
    assert second.parent is first and second.root is first and second.is_continuation
    assert second.new_messages == (user("c"),)
    assert bytes(second.context) == b"abc" and second.context_length == 3
    assert texts(tree) == [("a", "bcd")] and tree.sequence_count == 1


def test_the_latest_reply_is_the_parent():
    tree = CallTree()
    history = [user("a")]
    for reply in ("b", "c", "d"):
        ask(tree, *history, reply=reply)
        history += [assistant(reply), user("more")]
    assert ask(tree, *history).parent is tree.calls[2]


@pytest.mark.parametrize(
    "history",
    [
        [user("other"), assistant("b")],
        [user("a"), assistant("rewritten")],
        [user("a"), user("b")],
        [ChatMessage("system", "new"), user("a"), assistant("b")],
    ],
)
def test_a_changed_history_starts_a_sequence(history):
    tree = CallTree()
    ask(tree, user("a"), reply="b")
    call = ask(tree, *history, user("c"))
    assert call.parent is None and tree.sequence_count == 2


def test_other_tools_start_a_sequence():
    tree = CallTree()
    ask(tree, user("a"), reply="b")
    assert ask(tree, user("a"), assistant("b"), user("c"), tools=(ADD,)).parent is None


def test_a_conversation_that_ends_on_a_reply():
    """The reply is then the message to respond to, and not one to continue."""
    tree = CallTree()
    ask(tree, user("a"), reply="b")
    assert ask(tree, user("a"), assistant("b")).parent is None


@pytest.mark.parametrize(
    ("handle", "tool_call_id", "expected"),
    [("handle_2", "", 2), ("", "call_1", 1), ("unknown", "unknown", 0)],
)
def test_handles_and_ids_decide_between_equal_replies(handle, tool_call_id, expected):
    tree = CallTree()
    votes = []
    for number in range(3):
        tool_call = ToolCall(f"call_{number}", "add", "{}")
        votes.append(ask(tree, user("a"), handle=f"handle_{number}", tool_calls=(tool_call,)))
    returned = assistant("", handle, (ToolCall(tool_call_id, "add", "{}"),))
    assert ask(tree, user("a"), returned, user("b")).parent is votes[expected]


def test_a_reply_without_continuation_is_preferred():
    tree = CallTree()
    votes = [ask(tree, user("a")), ask(tree, user("a"))]
    continuations = []
    sequence_counts = []
    for _ in range(3):
        continuations.append(ask(tree, user("a"), assistant("yes"), user("b")))
        sequence_counts.append(tree.sequence_count)
    assert [call.parent for call in continuations] == [votes[0], votes[1], votes[0]]
    assert sequence_counts == [2, 2, 3], "only the second continuation of a reply adds a sequence"


def test_a_reply_with_a_pending_continuation_is_not_preferred():
    tree = CallTree()
    votes = [ask(tree, user("a")), ask(tree, user("a"))]
    with votes[0].preparing_continuation():
        assert ask(tree, user("a"), assistant("yes"), user("b")).parent is votes[1]


# ---- calls that are removed or repeated ----


def test_a_removed_call_is_not_continued():
    tree = CallTree()
    removed = ask(tree, user("a"), reply="four")
    assert [tree.remove(removed) for _ in range(2)] == [True, False]
    assert tree.calls == [] and tree.undelivered_tokens == 4 and tree.sequences() == []
    assert ask(tree, user("a"), assistant("four"), user("c")).parent is None


def test_an_uncontinued_reply_is_the_latest():
    tree = CallTree()
    first = ask(tree, user("a"), handle="first")
    second = ask(tree, user("a"), handle="second")
    assert tree.find_uncontinued(first.key) is second
    ask(tree, user("a"), assistant("yes", "second"), user("b"))
    assert tree.find_uncontinued(first.key) is first
    with first.preparing_continuation():
        assert tree.find_uncontinued(first.key) is None
    assert tree.find_uncontinued(first.key) is first
    assert tree.find_uncontinued(b"another conversation") is None


def test_repeats_distinguish_equal_contexts():
    tree = CallTree()
    calls = [ask(tree, user("a")) for _ in range(3)]
    other = ask(tree, user("b"))
    assert [call.repeat_index for call in calls] == [0, 1, 2] and other.repeat_index == 0
    tree.remove(calls[1])
    assert [ask(tree, user("a")).repeat_index for _ in range(2)] == [1, 3]


def test_the_context_hash_is_of_all_ids():
    tree = CallTree()
    ask(tree, user("a"), reply="b")
    call = ask(tree, user("a"), assistant("b"), user("c"))
    assert call.context_hash == zlib.crc32(array("q", list(b"abc")).tobytes())


# ---- sequences and roles ----


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_branches_in_any_order(order):
    tree = CallTree()
    ask(tree, user("plan "), reply="ok ")
    for number in order:
        ask(tree, user("plan "), assistant("ok "), user(f"branch{number} "), reply=f"reply{number}")
    assert texts(tree) == [
        ("plan ", "ok branch0 reply0"),
        ("plan ok branch1 ", "reply1"),
        ("plan ok branch2 ", "reply2"),
    ]
    assert [row.mask.count(1) for row, _ in tree.sequences()] == [9, 6, 6], "each token once"


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_count_their_sequences(seed):
    draw = random.Random(seed)
    tree = CallTree()
    histories = [(user("a"),), (user("b"),)]
    for number in range(40):
        history = draw.choice(histories)
        call = ask(tree, *history, reply=f"reply {number}")
        if draw.random() < 0.3:
            tree.remove(call)
        else:
            histories.append((*history, call.reply, user(draw.choice("cd"))))
        assert tree.sequence_count == len(tree.sequences())
    sampled = sum(row.mask.count(1) for row, _ in tree.sequences())
    assert sampled == sum(len(call.sample.ids) for call in tree.calls)
    repeats = {(call.context_hash, call.repeat_index) for call in tree.calls}
    assert len(repeats) == len(tree.calls), "each call has its own seed"


def roles(tree):
    tree.assign_roles("agent")
    return [call.role for call in tree.calls]


def test_another_model_is_auxiliary():
    tree = CallTree()
    ask(tree, user("a"), model="small")
    assert roles(tree) == ["agent"], "no call names the policy"
    ask(tree, user("b"))
    assert roles(tree) == ["auxiliary", "agent"]
    assert [call.in_loss for call in tree.calls] == [False, True]


def test_titles_are_auxiliary_and_summaries_are_not():
    tree = CallTree()
    ask(tree, user("title, please"), reply="A title")
    ask(tree, user("work"), tools=(ADD,))
    ask(tree, user("sum up"), reply="we did much")
    ask(tree, user("so far: we did  much"), tools=(ADD,))
    ask(tree, user("the last call"))
    assert roles(tree) == ["auxiliary", "agent", "agent", "agent", "agent"]
    tree.assign_roles("agent", is_trained=lambda call: "title" in call.request.messages[0].text)
    assert [call.in_loss for call in tree.calls] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("reply", "role"),
    [
        ("", "auxiliary"),
        (" \n", "auxiliary"),
        ("no", "auxiliary"),
        ("now", "agent"),
        ("do it", "agent"),
    ],
)
def test_an_accidental_match_is_no_use(reply, role):
    """An empty title is in every later message, and `no` in `now`."""
    tree = CallTree()
    ask(tree, user("a title"), reply=reply)
    ask(tree, user("do it now"), tools=(ADD,))
    ask(tree, user("go on"), tools=(ADD,))
    assert roles(tree) == [role, "agent", "agent"]


@given(st.text("ab -", max_size=12), st.text("ab -", max_size=4))
def test_words_are_found_as_by_a_pattern(text, words):
    pattern = re.escape(words)
    if words[:1].isalnum():
        pattern = r"(?<![^\W_])" + pattern
    if words[-1:].isalnum():
        pattern += r"(?![^\W_])"
    assert contains_words(text, words) == bool(words and re.search(pattern, text))


def test_words_are_sought_in_linear_time():
    def seek(count):
        text = "-aab" * (12 * count)
        words = "-aab-aa" + "-aab" * count + "-aa"
        assert not contains_words(text, words)

    few = processor_seconds(lambda: seek(2_000))
    many = processor_seconds(lambda: seek(20_000), repeats=1)
    # Ten times as many: quadratic time would be 100 times as long.
    assert many < 30 * few + 0.1


# ---- keys and normal forms ----


@given(st.lists(st.sampled_from(["<think>", "</think>", "<think", ">", "a", "\n"]), max_size=12))
def test_thoughts_are_removed_as_by_a_pattern(pieces):
    text = "".join(pieces)
    without_thoughts = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    assert normalize_text(text) == " ".join(without_thoughts.split())


def test_unclosed_thoughts_take_linear_time():
    def normalize(count):
        text = "<think>" * count
        assert normalize_text(text) == text

    few = processor_seconds(lambda: normalize(5_000))
    many = processor_seconds(lambda: normalize(50_000), repeats=1)
    # Ten times as many: quadratic time would be 100 times as long.
    assert many < 30 * few + 0.1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1.0, "a": "\\u00e9"}', '{"a": "\\u00e9", "b": 1}'),
        ('{"a":"é","b":1}', '{"a": "\\u00e9", "b": 1}'),
        ("", "{}"),
        (" {broken ", "{broken"),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": 1e999}', '{"a": Infinity}'),
    ],
)
def test_arguments_are_compared_by_value(arguments, expected):
    assert normalize_arguments(arguments) == expected


def test_malformed_arguments_are_restored():
    written = (ToolCall("call_1", "add", '{"a": one}'), ToolCall("call_2", "add", "{}"))
    malformed = MalformedArguments()
    malformed.record(assistant("", "handle", written))

    wrapped = ToolCall("call_1", "add", '{"INVALID": "..."}')
    without_id = (ToolCall("", "add", '{"INVALID": "..."}'), ToolCall("", "add", "{}"))
    assert malformed.restore(assistant("", "handle", without_id)).tool_calls == written
    assert malformed.restore(assistant("", "", (wrapped,))).tool_calls == written[:1]
    unknown = assistant("", "other handle", without_id)
    assert malformed.restore(unknown) is unknown


def test_equal_messages_are_shared():
    earlier = CompletionRequest("agent", (user("a"), assistant("b")), (ADD,))
    request = CompletionRequest("agent", (user("a"), assistant("c"), user("d")), (dict(ADD),))
    shared = share_messages(request, earlier)
    assert shared == request and shared.tools is earlier.tools
    assert shared.messages[0] is earlier.messages[0]
    assert shared.messages[1] is request.messages[1]
