"""A large LLM as the environment."""

import asyncio

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.environments import CUT_MARK, LLMEnvironment
from agentic_prompting.llm import (
    BadReply,
    Misconfigured,
    RateLimited,
    Reply,
    RoutedChat,
    ScriptedChat,
    Usage,
)
from agentic_prompting.rollout import (
    BatchEngine,
    ChatFormat,
    Limits,
    Observation,
    Rollout,
    Sample,
    play_all,
)
from support.all_at_once import AllAtOnce
from support.llm_rollouts import Recording, turn_of
from support.tokenizers_for_tests import tokenizer_for


def rollout_after(n, seed=0):
    """A rollout that has had `n` replies and asks once more: `ask 0`, `reply 0`, ..., `ask n`."""
    rollout = Rollout(
        [1, 2, 3], row={"question": "the question itself", "answers": ["gold"]}, seed=seed
    )
    for i in range(n):
        rollout.add_turn(Sample([4]), turn_of(f"ask {i}"))
        rollout.add_observation(Observation(f"reply {i}"), [5])
    rollout.add_turn(Sample([4]), turn_of(f"ask {n}"))
    return rollout


def history(*numbers, last):
    pairs = [
        ({"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"reply {i}"})
        for i in numbers
    ]
    return [
        *(message for pair in pairs for message in pair),
        {"role": "user", "content": f"ask {last}"},
    ]


@pytest.mark.parametrize(
    ("kept", "numbers"),
    [
        ("full", [0, 1, 2]),
        ("last", []),
        (0, []),
        (1, [2]),
        (2, [1, 2]),
        (3, [0, 1, 2]),
        (99, [0, 1, 2]),
    ],
)
def test_how_much_history(kept, numbers):
    chat = ScriptedChat(["ok"])
    observation = asyncio.run(LLMEnvironment(chat, history=kept).step(rollout_after(3)))
    assert chat.calls == [history(*numbers, last=3)]
    assert observation.text == "ok"


@pytest.mark.parametrize("kept", ["full", "last", 0, 2])
def test_the_first_request_has_no_history(kept):
    assert LLMEnvironment(ScriptedChat(["ok"]), history=kept).messages(rollout_after(0)) == history(
        last=0
    )


def test_history_from_a_function():
    seen = []

    def summary(earlier):
        seen.append(list(earlier))
        return [{"role": "user", "content": f"so far: {len(earlier) // 2} exchanges"}]

    messages = LLMEnvironment(ScriptedChat(["ok"]), history=summary).messages(rollout_after(2))
    assert messages == [
        {"role": "user", "content": "so far: 2 exchanges"},
        {"role": "user", "content": "ask 2"},
    ]
    assert seen == [history(0, 1, last=2)[:-1]]


@pytest.mark.parametrize("wrong", ["some", "", -1, 1.5, None, ["full"]])
def test_history_that_is_none_of_these(wrong):
    with pytest.raises(ValueError, match="history.*'full', 'last'") as raised:
        LLMEnvironment(ScriptedChat(["ok"]), history=wrong)
    assert repr(wrong) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("kept", ["full", "last"])
def test_the_system_prompt_comes_first(kept):
    messages = LLMEnvironment(
        ScriptedChat(["ok"]), system_prompt="Be exact.", history=kept
    ).messages(rollout_after(1))
    assert messages[0] == {"role": "system", "content": "Be exact."}
    assert [message["role"] for message in messages].count("system") == 1
    assert messages[-1] == {"role": "user", "content": "ask 1"}


@pytest.mark.parametrize("kept", ["full", "last", 1, list])
def test_it_sees_neither_thoughts_nor_question_nor_answer(kept):
    text = str(LLMEnvironment(ScriptedChat(["ok"]), history=kept).messages(rollout_after(2)))
    assert "ask 2" in text
    for hidden in ("secret", "think", "interaction", "the question itself", "gold"):
        assert hidden not in text


def test_asking_changes_nothing_in_the_rollout():
    rollout = rollout_after(2)
    before = (
        list(rollout.ids),
        list(rollout.mask),
        list(rollout.turns),
        list(rollout.observations),
        rollout.status,
    )
    asyncio.run(LLMEnvironment(ScriptedChat(["ok"])).step(rollout))
    assert before == (
        rollout.ids,
        rollout.mask,
        rollout.turns,
        rollout.observations,
        rollout.status,
    )


def test_sampling_goes_with_every_call():
    chat = ScriptedChat(["ok"])
    environment = LLMEnvironment(chat, temperature=0.3, max_tokens=77)
    for n in range(2):
        asyncio.run(environment.step(rollout_after(n)))
    assert chat.sampling == [{"temperature": 0.3, "max_tokens": 77}] * 2


def test_rollouts_are_told_apart_by_their_seed():
    """N rollouts that ask the same get N replies of their own, the same again in a replayed run;
    all calls of one rollout are one session.
    """
    chat = Recording(["ok"])
    environment = LLMEnvironment(chat)
    for rollout in (
        rollout_after(0, seed=11),
        rollout_after(0, seed=12),
        rollout_after(1, seed=11),
    ):
        asyncio.run(environment.step(rollout))
    assert chat.identities == [(11, "11"), (12, "12"), (11, "11")]


def observed(reply, **options):
    return asyncio.run(LLMEnvironment(ScriptedChat([reply]), **options).step(rollout_after(0)))


def test_a_reply_is_kept_as_it_is():
    reply = Reply(
        " two\nlines <answer>x</answer> ", usage=Usage(3, 4, 0.5), seconds=1.25, attempts=2
    )
    observation = observed(reply)
    assert observation == Observation(reply.text, None, (reply,), 1.25)


def test_the_thought_of_a_reply_is_not_shown():
    """It would also be what is left of a reply that is cut."""
    assert observed(f"<think>{'well ' * 100}</think>\nRome.", max_reply_chars=20).text == "Rome."
    cut_off = observed("<think>cut off")
    assert cut_off.text == "" and isinstance(cut_off.error, BadReply)
    assert [reply.text for reply in cut_off.replies] == ["<think>cut off"]


@pytest.mark.parametrize("length", [19, 20, 21, 500])
def test_long_replies_are_cut_with_a_mark(length):
    text = "".join(chr(ord("a") + i % 26) for i in range(length))
    shown_text = observed(text, max_reply_chars=20).text
    if length <= 20:
        assert shown_text == text
    else:
        assert shown_text == text[: 20 - len(CUT_MARK)] + CUT_MARK and len(shown_text) == 20
    assert observed(text, max_reply_chars=20).replies[0].text == text, (
        "the whole reply is kept for the log"
    )


def test_the_default_is_the_released_codes():
    assert observed("x" * 2048).text == "x" * 2048
    assert len(observed("x" * 2049).text) == 2048
    assert observed("x" * 2049).text.endswith("x" + CUT_MARK)


@given(text=st.text(max_size=40), limit=st.integers(len(CUT_MARK) + 1, 30))
def test_cut_at_a_character_boundary(text, limit):
    """Never half of a character: emoji are one, and what is left is a beginning of the reply that
    can be encoded.
    """
    reply = text or "x"
    shown_text = observed(reply, max_reply_chars=limit).text
    assert len(shown_text) <= limit
    if len(reply) > limit:
        assert shown_text.endswith(CUT_MARK) and reply.startswith(shown_text.removesuffix(CUT_MARK))
    else:
        assert shown_text == reply
    assert shown_text.encode("utf-8").decode("utf-8") == shown_text


@pytest.mark.parametrize("cluster", ["🙂", "e\u0301", "日", "\U0001d11e"])
@pytest.mark.parametrize("limit", [10, 11, 12])
def test_wide_characters_are_counted_as_characters(cluster, limit):
    """2048 characters, not 2048 bytes, and the tokenizer gets back what was kept of them."""
    text = observed(cluster * 30, max_reply_chars=limit).text
    assert len(text) == limit
    tokenizer = tokenizer_for("chatml")
    chat_format = ChatFormat(tokenizer)
    assert tokenizer.decode(chat_format.plain_ids(text)) == text and "\ufffd" not in text


@pytest.mark.parametrize("limit", [0, 1, len(CUT_MARK), -5])
def test_room_for_the_mark_alone_is_too_little(limit):
    with pytest.raises(ValueError, match=f"max_reply_chars.*{len(CUT_MARK)}.*got {limit}"):
        LLMEnvironment(ScriptedChat(["ok"]), max_reply_chars=limit)


def test_an_error_is_no_text():
    error = RateLimited("too many requests", "m", attempts=6, status=429)
    observation = observed(error)
    assert observation.error is error and observation.text == ""
    assert observation.replies[0].error is error


def test_cancelling_takes_the_call_off_the_wire():
    """An episode that is not needed any more."""
    ended = []

    async def slow(messages):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def cancelled():
        step = asyncio.create_task(LLMEnvironment(slow).step(rollout_after(0)))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        return step.cancelled()

    assert asyncio.run(cancelled()) and ended


def play(environment, n=1):
    """Rollouts of an agent that asks and then answers, through the real loop."""
    chat_format = ChatFormat(tokenizer_for("chatml"))
    ask = "<think> a </think> <interaction_prompt> b </interaction_prompt>"
    end = "<think> a </think> <answer> c </answer>"

    def sampler(requests):
        tag_ids = chat_format.tokenizer("<interaction_response>", add_special_tokens=False)[
            "input_ids"
        ]
        ends = [
            any(r.context[i : i + len(tag_ids)] == tag_ids for i in range(len(r.context)))
            for r in requests
        ]
        return [Sample(chat_format.turn_ids(end if done else ask)) for done in ends]

    prompt = chat_format.prompt_ids([{"role": "user", "content": "Q?"}])
    rollouts = [Rollout(prompt, seed=i) for i in range(n)]
    play_all(rollouts, BatchEngine(sampler), environment, chat_format, Limits())
    return rollouts


def test_in_the_loop_a_failed_call_fails_its_own_rollout():
    chat = ScriptedChat(lambda messages: "ok", fail_on=lambda n: n == 1)
    rollouts = play(LLMEnvironment(chat), n=3)
    assert [rollout.status for rollout in rollouts] == ["answered", "failed", "answered"]
    assert [rollout.answer for rollout in rollouts] == ["c", None, "c"]


def test_in_the_loop_a_history_function_that_raises_fails_its_own_rollout():
    calls = []

    def summary(earlier):
        calls.append(earlier)
        return earlier if len(calls) > 1 else 1 / 0

    rollouts = play(LLMEnvironment(ScriptedChat(["ok"]), history=summary), n=2)
    assert [rollout.status for rollout in rollouts] == ["failed", "answered"]
    assert "ZeroDivisionError" in str(rollouts[0].error)


def test_step_does_not_wait():
    """The reply comes when a second call is there: a step that waited for it would wait for ever."""
    environment = LLMEnvironment(AllAtOnce(ScriptedChat(["ok"]), 2))

    async def two():
        return await asyncio.gather(*(environment.step(rollout_after(0)) for _ in range(2)))

    assert [observation.text for observation in asyncio.run(two())] == ["ok", "ok"]


def test_check_asks_the_model_if_it_can_be_asked():
    class Wrong(ScriptedChat):
        def check(self):
            raise Misconfigured("no such model")

    with pytest.raises(Misconfigured, match="no such model"):
        LLMEnvironment(Wrong(["ok"])).check()
    chat = ScriptedChat(["ok"])
    assert LLMEnvironment(chat).check() is None and chat.calls == []


def test_the_rule_of_a_router_gets_the_question_not_the_request():
    """rho(m | q) of the paper: q is the question, which the environment's messages do not hold."""
    seen = []

    def rule(question, names, request):
        seen.append((question, names, request))
        return "a"

    chat = RoutedChat({"a": ScriptedChat(["ok"])}, rule)
    rollout = rollout_after(0)
    assert asyncio.run(LLMEnvironment(chat).step(rollout)).text == "ok"
    asyncio.run(LLMEnvironment(chat).step(rollout))
    assert seen == [("the question itself", ["a"], "ask 0")], "once a session"
    broken = LLMEnvironment(RoutedChat({"a": ScriptedChat(["ok"])}, lambda question, names: "b"))
    assert isinstance(asyncio.run(broken.step(rollout)).error, Misconfigured)
