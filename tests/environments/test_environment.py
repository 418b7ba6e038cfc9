"""The large LLM as environment: what it is sent, what the agent reads of its reply, and what becomes of failure."""

import asyncio
import pickle

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.environments import CUT_MARK, LLMEnvironment
from agentic_prompting.llm import (
    Misconfigured,
    OpenAIChat,
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
    parse_turn,
    play_all,
)
from support.all_at_once import AllAtOnce
from support.tokenizers_for_tests import tokenizer_for


def turn_of(request, thought="a secret thought"):
    return parse_turn(
        f"<think> {thought} </think> <interaction_prompt> {request} </interaction_prompt>"
    )


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


class Recording(ScriptedChat):
    """Also keeps how each call was told apart from others."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.identities = []

    async def __call__(self, messages, *, repeat=None, session=None, **sampling):
        self.identities.append((repeat, session))
        return await super().__call__(messages, repeat=repeat, session=session, **sampling)


# --- what it is sent ----------------------------------------------------------------------------------------------


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
    with pytest.raises(
        ValueError, match="history must be 'full', 'last', a number of turns or a function"
    ) as raised:
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
    """N rollouts that ask the same get N replies of their own, the same again in a replayed run; all calls of one
    rollout are one session."""
    chat = Recording(["ok"])
    environment = LLMEnvironment(chat)
    for rollout in (
        rollout_after(0, seed=11),
        rollout_after(0, seed=12),
        rollout_after(1, seed=11),
    ):
        asyncio.run(environment.step(rollout))
    assert chat.identities == [(11, "11"), (12, "12"), (11, "11")]


# --- what the agent reads -----------------------------------------------------------------------------------------


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
    assert observed("<think>cut off").text == "<think>cut off"


@pytest.mark.parametrize("length", [19, 20, 21, 500])
def test_long_replies_are_cut_with_a_mark(length):
    text = "".join(chr(ord("a") + i % 26) for i in range(length))
    seen = observed(text, max_reply_chars=20).text
    if length <= 20:
        assert seen == text
    else:
        assert seen == text[: 20 - len(CUT_MARK)] + CUT_MARK and len(seen) == 20
    assert observed(text, max_reply_chars=20).replies[0].text == text, (
        "the whole reply is kept for the log"
    )


def test_the_default_is_the_released_codes():
    assert observed("x" * 2048).text == "x" * 2048
    assert len(observed("x" * 2049).text) == 2048 and observed("x" * 2049).text.endswith(
        "x" + CUT_MARK
    )


@given(text=st.text(max_size=40), limit=st.integers(len(CUT_MARK) + 1, 30))
def test_cut_at_a_character_boundary(text, limit):
    """Never half of a character: emoji are one, and what is left is a beginning of the reply that can be encoded."""
    reply = text or "x"
    seen = observed(reply, max_reply_chars=limit).text
    assert len(seen) <= limit
    if len(reply) > limit:
        assert seen.endswith(CUT_MARK) and reply.startswith(seen.removesuffix(CUT_MARK))
    else:
        assert seen == reply
    assert seen.encode("utf-8").decode("utf-8") == seen


@pytest.mark.parametrize("cluster", ["🙂", "e\u0301", "日", "\U0001d11e"])
@pytest.mark.parametrize("limit", [10, 11, 12])
def test_wide_characters_are_counted_as_characters(cluster, limit):
    """2048 characters, not 2048 bytes, and the tokenizer gets back what was kept of them."""
    seen = observed(cluster * 30, max_reply_chars=limit).text
    assert len(seen) == limit
    tokenizer = tokenizer_for("chatml")
    chat_format = ChatFormat(tokenizer)
    assert tokenizer.decode(chat_format.plain_ids(seen)) == seen and "\ufffd" not in seen


@pytest.mark.parametrize("limit", [0, 1, len(CUT_MARK), -5])
def test_room_for_the_mark_alone_is_too_little(limit):
    with pytest.raises(
        ValueError, match=f"max_reply_chars must be more than {len(CUT_MARK)}, got {limit}"
    ):
        LLMEnvironment(ScriptedChat(["ok"]), max_reply_chars=limit)


# --- failure ------------------------------------------------------------------------------------------------------


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
        asked = chat_format.tokenizer("<interaction_response>", add_special_tokens=False)[
            "input_ids"
        ]
        ends = [
            any(r.context[i : i + len(asked)] == asked for i in range(len(r.context)))
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


# --- said once, paid once -----------------------------------------------------------------------------------------


def rollouts_of(batch, groups, asked="ask 0"):
    """One rollout for each group named, that asks for the first time."""
    made = []
    for seed, group in enumerate(groups):
        rollout = Rollout(
            [1], row={"question": f"q{group}"}, seed=100 + seed, batch=batch, group=group
        )
        rollout.add_turn(Sample([4]), turn_of(asked))
        made.append(rollout)
    return made


def steps(environment, rollouts):
    async def all_of_them():
        return await asyncio.gather(*(environment.step(rollout) for rollout in rollouts))

    return asyncio.run(all_of_them())


def numbered(**settings):
    """A chat that never says the same twice, at two tokens a reply."""
    count = iter(range(100))
    return Recording(
        lambda messages: Reply(text=f"said {next(count)}", usage=Usage(1, 1, 0.5)), **settings
    )


@pytest.mark.parametrize(("share", "texts"), [("never", 4), ("group", 2), ("step", 1)])
def test_the_same_is_asked_once_among_those_who_share(share, texts):
    chat = numbered(latency=0.01)
    observations = steps(LLMEnvironment(chat, share_replies=share), rollouts_of("1", [0, 0, 1, 1]))
    assert len({observation.text for observation in observations}) == len(chat.calls) == texts
    replies = [observation.replies[0] for observation in observations]
    assert sum(reply.shared for reply in replies) == 4 - texts
    assert sum((reply.usage for reply in replies), Usage()).cost_usd == 0.5 * texts, "paid once"
    assert all(reply.worth.cost_usd == 0.5 for reply in replies), "worth the same, whoever paid"


def test_what_was_said_is_kept_for_the_step_and_forgotten_after():
    chat = numbered()
    environment = LLMEnvironment(chat, share_replies="step")
    batches = [
        "1",
        "1",
        "2",
        "1",
        *map(str, range(3, 19)),
        "1",
    ]  # 16 others after the first one was last asked
    texts = [steps(environment, rollouts_of(batch, [0]))[0].text for batch in batches]
    assert texts == [f"said {n}" for n in (0, 0, 1, 0, *range(2, 19))]
    assert len({repeat for repeat, _ in chat.identities}) == 18, (
        "a recording finds the reply of a batch again"
    )


def test_another_conversation_or_model_or_a_batch_unknown_is_asked_itself():
    chat = numbered()
    environment = LLMEnvironment(chat, share_replies="step")
    steps(
        environment,
        [*rollouts_of("1", [0]), *rollouts_of("1", [0], asked="else"), *rollouts_of("", [0, 0])],
    )
    assert len(chat.calls) == 4 and [repeat for repeat, _ in chat.identities[2:]] == [100, 101]
    routed = {name: numbered() for name in "ab"}
    rule = lambda question, names: "a" if question == "q0" else "b"  # noqa: E731
    steps(
        LLMEnvironment(RoutedChat(routed, rule), share_replies="step"),
        rollouts_of("1", [0, 1, 1, 0]),
    )
    assert [len(chat.calls) for chat in routed.values()] == [1, 1]


@pytest.mark.parametrize(
    ("chat", "sampling", "share"),
    [
        ({}, {}, "never"),
        ({"temperature": 0}, {}, "step"),
        ({}, {"temperature": 0.0}, "step"),
        ({"temperature": 0}, {"temperature": 1}, "never"),
        ({"temperature": 0}, {"share_replies": "never"}, "never"),
    ],
)
def test_only_what_is_deterministic_is_shared_unasked(chat, sampling, share):
    assert LLMEnvironment(OpenAIChat("m", "http://h/v1", **chat), **sampling).share_replies == share


def test_a_failed_reply_is_not_shared():
    chat = numbered(latency=0.01, fail_on=lambda number: number < 2)
    observations = steps(LLMEnvironment(chat, share_replies="step"), rollouts_of("1", [0] * 6))
    assert [observation.error is None for observation in observations] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    assert len(chat.calls) == 6, "after two failures nobody waits for another's luck"
    assert observations[2].text != observations[3].text


def test_a_cancelled_call_passes_the_turn_on():
    chat = numbered(latency=0.05)
    environment = LLMEnvironment(chat, share_replies="step")

    async def first_gives_up():
        first, second = (
            asyncio.ensure_future(environment.step(one)) for one in rollouts_of("1", [0, 0])
        )
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    assert asyncio.run(first_gives_up()).text == "said 0" and len(chat.calls) == 2
    assert (
        pickle.loads(
            pickle.dumps(LLMEnvironment(RoutedChat({"a": None}, {"a": 1.0})))
        ).share_replies
        == "never"
    )


# --- which large LLM ----------------------------------------------------------------------------------------------


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
