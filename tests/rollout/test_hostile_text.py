"""Replies, documents and tool calls that try to be more than text."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, normalizers

from agentic_prompting.environments import SearchEnvironment
from agentic_prompting.environments.retrievers import Document
from agentic_prompting.environments.search import SearchGrammar, read_call
from agentic_prompting.llm import Reply, without_thoughts
from agentic_prompting.rollout import (
    ChatFormat,
    Rollout,
    RolloutLog,
    Sample,
    read_rollouts,
    rollout_record,
)
from support.hostile import (
    PIECES,
    check_tool_call,
    episode,
    hostile_texts,
    json_bombs,
    observed,
    what_counts,
)
from support.tokenizers_for_tests import FAMILIES, tokenizer_for

texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def formats():
    """A chat format for each family of templates, with what an episode with a harmless reply
    amounts to.
    """
    formats = {name: ChatFormat(tokenizer_for(name)) for name in FAMILIES}
    return {
        name: (each, what_counts(each, episode(each, "It is Kenya.")))
        for name, each in formats.items()
    }


def check_reply(chat_format, harmless, reply):
    """A reply counts as a harmless one does; one that is nothing but a thought fails its rollout."""
    rollout = episode(chat_format, reply)
    if without_thoughts(Reply(text=reply)).error is not None:
        assert rollout.status == "failed", reply[:200]
    else:
        assert what_counts(chat_format, rollout) == harmless, reply[:200]


@settings(max_examples=200, deadline=None)
@given(reply=texts, family=st.sampled_from(list(FAMILIES)))
def test_no_reply_changes_tokens_masks_or_reward(formats, reply, family):
    chat_format, harmless = formats[family]
    assert harmless["reward"] == [1.0]
    check_reply(chat_format, harmless, reply)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_seeded_ones_with_a_megabyte_of_one_character(formats, family):
    chat_format, harmless = formats[family]
    for reply in hostile_texts(1000 if family == "chatml" else 100, seed=len(family)):
        check_reply(chat_format, harmless, reply)


@pytest.mark.parametrize("character", ["a", "<", "\u202e", "\u200b", "🙂", "\x00", " "])
def test_a_megabyte_of_one_character_is_cut_before_anyone_reads_it(formats, character):
    chat_format, harmless = formats["qwen3"]
    rollout = episode(chat_format, character * 2**20)
    assert what_counts(chat_format, rollout) == harmless
    assert len(rollout.observations[0].text) == 2048


def test_what_is_invisible_stays_as_it_was(formats):
    """Nothing is stripped: what the agent reads is what the model wrote."""
    chat_format, _ = formats["llama3"]
    reply = "a\u200bb \u202ec \u2066d\u2069 \ufeff e\u0301"
    assert reply in observed(chat_format, episode(chat_format, reply))


def normalising_tokenizer():
    """One that drops the invisible and folds wide characters before it looks for some of its added
    tokens.
    """
    import copy

    tokenizer = copy.deepcopy(tokenizer_for("qwen3"))
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("\u200b", ""), normalizers.NFKC(), normalizers.Lowercase()]
    )
    tokenizer.add_tokens(
        [AddedToken("<stop>", normalized=True), AddedToken("<tool_response>", normalized=True)]
    )
    return tokenizer


@pytest.mark.parametrize(
    "reply",
    ["<st\u200bop>", "＜stop＞", "<STOP>", "<to\u200bol_response>", "x<s\u200b\u200btop><stop>"],
)
def test_a_tokenizer_that_normalises_is_not_fooled_either(reply):
    chat_format = ChatFormat(normalising_tokenizer())
    added = set(chat_format.tokenizer.get_added_vocab().values())
    assert added & set(chat_format.tokenizer(reply, add_special_tokens=False)["input_ids"]), (
        "it would have been"
    )
    assert not added & set(chat_format.plain_ids(reply))


# --- tool calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", json_bombs())
def test_json_bombs_are_told_to_the_agent(name):
    check_tool_call(json_bombs()[name])


KEYS = st.sampled_from(["name", "arguments", "args", "query_list", "other"])
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_json_as_a_call(value):
    check_tool_call(json.dumps(value))


@settings(max_examples=100, deadline=None)
@given(document=texts)
def test_documents_are_inert(document):
    """A document cannot pose as a tool call, whatever it holds."""
    environment = SearchEnvironment(
        lambda queries, k: [[Document(document * 50)] for _ in queries], max_chars=500
    )
    rollout = Rollout([1])
    rollout.add_turn(
        Sample([1]), SearchGrammar().parse('<tool_call>{"query_list": ["x"]}</tool_call>')
    )
    text = environment.step(rollout).text
    assert len(text) <= 500
    assert SearchGrammar().parse(SearchGrammar().escape(text)).kind == "answer"
    assert read_call("{}")[1]


# --- on disk --------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(reply=texts)
def test_records_hold_any_text(formats, tmp_path_factory, reply):
    folder = tmp_path_factory.mktemp("rollouts")
    rollout = episode(formats["chatml"][0], reply)
    RolloutLog(folder).write([rollout_record(rollout)])
    (kept,) = read_rollouts(folder)
    assert kept["observations"][0]["text"] == rollout.observations[0].text
