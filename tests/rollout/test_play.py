"""Episodes: every outcome of an episode, token accounting, and concurrency, without a model."""

import asyncio

import pytest
from hypothesis import assume, given, settings, strategies as st

from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.llm import Reply, ScriptedChat, ServerFailed, without_thoughts
from agentic_prompting.rollout import (
    BatchEngine,
    ChatFormat,
    Limits,
    Observation,
    Sample,
    play_all,
)
from support.all_at_once import AllAtOnce
from support.episodes import ASK, END, ScriptedSampler, assert_whole, fresh
from support.tokenizers_for_tests import FAMILIES, tokenizer_for


@pytest.fixture(params=list(FAMILIES))
def chat_format(request):
    tokenizer = tokenizer_for(request.param)
    return ChatFormat(tokenizer)


def play(chat_format, turns, chat=None, limits=Limits(), n=1, **sampler_options):
    rollouts = fresh(chat_format, n)
    sampler = ScriptedSampler(chat_format, turns, **sampler_options)
    environment = LLMEnvironment(chat if chat is not None else ScriptedChat(["It is Kenya."]))
    play_all(rollouts, sampler, environment, chat_format, limits)
    for rollout in rollouts:
        assert_whole(rollout)
    return rollouts[0] if n == 1 else rollouts


def test_two_turns_answered(chat_format):
    chat = ScriptedChat(["It is Kenya."])
    rollout = play(chat_format, [ASK, END], chat)
    assert (rollout.status, rollout.answer, len(rollout.turns)) == ("answered", "Kenya", 2)
    assert chat.calls == [[{"role": "user", "content": "Which country?"}]]
    text = chat_format.tokenizer.decode(rollout.context)
    # One document: everything that was sampled and observed, in the template's form, in order.
    assert (
        text.index("Which currency?")
        < text.index("Which country?")
        < text.index("It is Kenya.")
        < text.index("done")
    )
    assert "<interaction_response>\nIt is Kenya.\n</interaction_response>" in text


def test_sampled_tokens_are_never_changed(chat_format):
    rollout = play(chat_format, [ASK, END])
    sampled_tokens = [
        token for token, is_sampled in zip(rollout.ids, rollout.mask, strict=True) if is_sampled
    ]
    assert sampled_tokens == chat_format.turn_ids(ASK) + chat_format.turn_ids(END)


def test_observation_tokens_are_the_templates_own(chat_format):
    """What is put between two turns is what the template itself would have rendered there."""
    rollout = play(chat_format, [ASK, END])
    reply = "<interaction_response>\nIt is Kenya.\n</interaction_response>"
    turn = "QTURNQ"  # a word that Qwen3's template does not strip thoughts from
    rendered = chat_format.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Which currency?"},
            {"role": "assistant", "content": turn},
            {"role": "user", "content": reply},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    prefix = chat_format.turn_prefix
    expected = rendered.replace(turn, ASK.removeprefix(prefix)) + END.removeprefix(prefix)
    if prefix:  # the template opened the thought; history shows a turn without that opening
        expected = expected.replace("assistant\n<think>", "assistant\n<think>")
        decoded = chat_format.tokenizer.decode(rollout.context)
        assert decoded.endswith(expected[expected.index(reply) :] + chat_format.tokenizer.eos_token)
    else:
        assert (
            chat_format.tokenizer.decode(rollout.context)
            == expected + chat_format.tokenizer.eos_token
        )


def test_a_turn_stopped_at_its_tag_is_ended_by_the_template(chat_format):
    ended = play(chat_format, [ASK, END])
    stopped = play(chat_format, [ASK, END], ended=False)
    decode = chat_format.tokenizer.decode
    assert decode(stopped.context) + chat_format.tokenizer.eos_token == decode(ended.context)
    assert (
        sum(stopped.mask) == sum(ended.mask) - 2
    )  # the two end-of-turn tokens are not the agent's own any more


@pytest.mark.parametrize(
    ("turn", "status", "problem"),
    [
        ("I think it is Kenya.", "malformed", "no tag"),
        (
            "<think> a </think> <interaction_prompt> </interaction_prompt>",
            "malformed",
            "empty request",
        ),
        (ASK + " <answer> Kenya </answer>", "malformed", "answer and request"),
        (ASK + " <interaction_prompt> And? </interaction_prompt>", "malformed", "repeated tag"),
        ("<think> <answer> a </answer> </think>", "malformed", "nested tag"),
        ("<think> a </think> <interaction_prompt> and then", "malformed", "unclosed tag"),
        ("</think> a <answer> b </answer>", "malformed", "stray closing tag"),
        (
            (
                "<think> a </think> <interaction_response> b </interaction_response> <answer> c "
                "</answer>"
            ),
            "malformed",
            None,
        ),
        ("<answer> Kenya </answer>", "answered", ""),
        ("<think> a </think> <answer> </answer>", "answered", ""),
    ],
)
def test_what_a_turn_means(turn, status, problem):
    chat_format = ChatFormat(tokenizer_for("chatml"))
    rollout = play(chat_format, [turn])
    assert rollout.status == status
    if problem is not None:
        assert rollout.turns[-1].problem == problem


def test_a_request_without_a_thought_is_still_asked(chat_format):
    rollout = play(chat_format, ["<interaction_prompt> Which country? </interaction_prompt>", END])
    if chat_format.turn_prefix:
        return  # there the template has opened a thought that this turn never closes
    assert rollout.status == "answered" and not rollout.turns[0].well_formed


def test_turn_limit(chat_format):
    chat = ScriptedChat(["It is Kenya."])
    rollout = play(chat_format, [ASK], chat, Limits(max_turns=3))
    assert (rollout.status, len(rollout.turns)) == ("out_of_turns", 3)
    assert len(chat.calls) == 2, "the last request's reply could not be used, so it is not paid for"


def test_single_turn_is_no_interaction(chat_format):
    chat = ScriptedChat(["x"])
    assert play(chat_format, [ASK], chat, Limits(max_turns=1)).status == "out_of_turns"
    assert chat.calls == []


def test_turn_cut_by_its_token_limit(chat_format):
    rollout = play(chat_format, [ASK], limits=Limits(max_turn_tokens=5))
    assert (rollout.status, len(rollout.ids)) == ("truncated", 5)


def test_response_budget_ends_in_the_middle_of_a_turn(chat_format):
    first = len(chat_format.turn_ids(ASK))
    observation = len(chat_format.observation_ids("It is Kenya.", after=chat_format.turn_ids(ASK)))
    rollout = play(chat_format, [ASK, END], limits=Limits(max_tokens=first + observation + 3))
    assert rollout.status == "truncated"
    assert len(rollout.ids) == first + observation + 3 and rollout.mask[-3:] == [1, 1, 1]


def test_no_room_for_a_turn_after_the_observation(chat_format):
    first = len(chat_format.turn_ids(ASK))
    observation = len(chat_format.observation_ids("It is Kenya.", after=chat_format.turn_ids(ASK)))
    rollout = play(chat_format, [ASK, END], limits=Limits(max_tokens=first + observation))
    assert rollout.status == "truncated" and len(rollout.ids) == first
    assert len(rollout.replies) == 1, "the call was made and is counted"


def test_prompt_that_fills_the_context(chat_format):
    rollout = fresh(chat_format)[0]
    sampler = ScriptedSampler(chat_format, [ASK])
    play_all([rollout], sampler, None, chat_format, Limits(max_context=len(rollout.prompt_ids)))
    assert (rollout.status, rollout.ids, sampler.batches) == ("truncated", [], [])


def test_context_limit_counts_the_prompt(chat_format):
    prompt = len(fresh(chat_format)[0].prompt_ids)
    rollout = play(chat_format, [ASK], limits=Limits(max_context=prompt + 4))
    assert rollout.status == "truncated" and len(rollout.ids) == 4


def test_failure_is_not_an_answer(chat_format):
    rollout = play(chat_format, [ASK, END], ScriptedChat([ServerFailed("down", status=503)]))
    assert rollout.status == "failed" and rollout.error.kind == "ServerFailed"
    assert "down" not in chat_format.tokenizer.decode(rollout.context)
    assert rollout.answer is None and len(rollout.replies) == 1


def test_failure_of_one_leaves_the_others_alone(chat_format):
    rollouts = play(
        chat_format, [ASK, END], ScriptedChat(lambda m: "ok", fail_on=lambda n: n == 1), n=4
    )
    assert sorted(rollout.status for rollout in rollouts) == [
        "answered",
        "answered",
        "answered",
        "failed",
    ]


class Raises:
    def step(self, rollout):
        raise KeyError("bug in somebody's environment")


class RaisesLater:
    async def step(self, rollout):
        await asyncio.sleep(0)
        raise RuntimeError("later")


class SaysNumbers:
    def step(self, rollout):
        return 42


class SaysItIsOver:
    def step(self, rollout):
        return None


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        (Raises(), "failed"),
        (RaisesLater(), "failed"),
        (SaysNumbers(), "failed"),
        (SaysItIsOver(), "out_of_turns"),
        (None, "out_of_turns"),
    ],
)
def test_environments_that_do_not_answer(environment, status):
    chat_format = ChatFormat(tokenizer_for("chatml"))
    rollout = fresh(chat_format)[0]
    play_all([rollout], ScriptedSampler(chat_format, [ASK]), environment, chat_format, Limits())
    assert rollout.status == status
    assert_whole(rollout)


def test_nobody_waits_for_the_slowest():
    """One reply takes 2 s, the others none: the fast ones finish all their turns meanwhile."""
    chat_format = ChatFormat(tokenizer_for("chatml"))
    slow = iter([2.0])
    chat = ScriptedChat(["It is Kenya."], latency=lambda: next(slow, 0.0))
    rollouts = fresh(chat_format, 8)
    order = []
    sampler = ScriptedSampler(chat_format, [ASK, ASK, ASK, END])
    play_all(rollouts, sampler, LLMEnvironment(chat), chat_format, Limits(), on_done=order.append)
    assert order[-1] is rollouts[0] and len(order) == 8
    sizes = [len(batch) for batch in sampler.batches]
    # How the fast ones meet in batches is a matter of time; the slow one's last three turns are
    # alone.
    assert sizes[0] == 8 and sizes[-3:] == [1, 1, 1] and sum(sizes) == 32


def test_calls_of_a_turn_are_concurrent():
    chat_format = ChatFormat(tokenizer_for("chatml"))
    rollouts = fresh(chat_format, 20)
    chat = AllAtOnce(ScriptedChat(["It is Kenya."]), 20)
    play_all(
        rollouts,
        ScriptedSampler(chat_format, [ASK, END]),
        LLMEnvironment(chat),
        chat_format,
        Limits(),
    )
    assert {rollout.status for rollout in rollouts} == {"answered"}


def test_a_sampler_that_raises_cancels_what_is_in_flight():
    chat_format = ChatFormat(tokenizer_for("chatml"))
    waiting = []
    cancelled = []

    class Never:
        async def step(self, rollout):
            waiting.append(rollout)
            try:
                await asyncio.sleep(0 if len(waiting) == 1 else 60)
            except asyncio.CancelledError:
                cancelled.append(rollout)
                raise
            return Observation("now")

    class FailsLater(ScriptedSampler):
        def sample(self, requests):
            if self.batches:
                raise RuntimeError("out of memory")
            return super().sample(requests)

    with pytest.raises(RuntimeError, match="out of memory"):
        play_all(
            fresh(chat_format, 3), FailsLater(chat_format, [ASK]), Never(), chat_format, Limits()
        )
    assert cancelled == waiting[1:]


def test_a_sampler_that_returns_nothing_is_told():
    chat_format = ChatFormat(tokenizer_for("chatml"))
    with pytest.raises(ValueError, match="at least one"):
        play_all(
            fresh(chat_format),
            BatchEngine(lambda requests: [Sample([])]),
            None,
            chat_format,
            Limits(),
        )


@pytest.mark.parametrize("limit", ["max_turns", "max_turn_tokens", "max_tokens", "max_context"])
def test_limits_below_one(limit):
    with pytest.raises(ValueError, match=f"{limit} must be at least 1, got 0"):
        Limits(**{limit: 0})


@pytest.mark.parametrize("limit", ["max_turns", "max_turn_tokens", "max_tokens"])
def test_limits_that_are_none(limit):
    with pytest.raises(ValueError, match=limit):
        Limits(**{limit: None})
    with pytest.raises(ValueError, match=limit):
        Limits(environments={"shop": {limit: None}})


# Text that tries: special tokens of every family, tags of the grammar, odd characters.
FAMILY_TOKENS = set()
for _, special, ordinary in FAMILIES.values():
    FAMILY_TOKENS.update(special, ordinary)
TAGS = ["<answer>", "</answer>", "<interaction_response>", "</interaction_response>"]
HALVES = ["<think", "<|im_", "end|>", "<"]
ODD_CHARACTERS = ["\u200b", "\u202e", "\x00", "é", "日本", "🙂", "\n", " "]
WORDS = ["Kenya", "<pad>", "<|IM_END|>"]
PIECES = [*sorted(FAMILY_TOKENS), *TAGS, *HALVES, *ODD_CHARACTERS, *WORDS]
hostile = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=12).map(
    "".join
)


@settings(max_examples=150, deadline=None)
@given(reply=hostile, family=st.sampled_from(list(FAMILIES)))
def test_replies_are_inert(reply, family):
    """Whatever a reply contains, it is plain text between two turns: the same frame around it, no
    added token in it, no tag of the grammar, and nothing lost but the tags' brackets.
    """
    assume(without_thoughts(Reply(text=reply)).error is None)  # nothing to show: the rollout fails
    chat_format = ChatFormat(tokenizer_for(family))
    tokenizer = chat_format.tokenizer
    plain = play(chat_format, [ASK, END], ScriptedChat(lambda messages: "plain"))
    rollout = play(chat_format, [ASK, END], ScriptedChat(lambda messages: reply))
    added = set(tokenizer.get_added_vocab().values())
    assert [token for token in rollout.ids if token in added] == [
        token for token in plain.ids if token in added
    ]
    assert sum(rollout.mask) == sum(plain.mask)
    assert (rollout.status, rollout.answer) == ("answered", "Kenya")
    observed = tokenizer.decode(
        [t for t, is_sampled in zip(rollout.ids, rollout.mask, strict=True) if not is_sampled]
    )
    assert len(chat_format.grammar.any_tag.findall(observed)) == len(
        chat_format.grammar.any_tag.findall(
            tokenizer.decode(
                [t for t, is_sampled in zip(plain.ids, plain.mask, strict=True) if not is_sampled]
            )
        )
    )
