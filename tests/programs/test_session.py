"""A session without a server: its ends, its limits, races between its calls, and what it cuts."""

import asyncio

import pytest

from agentic_prompting.programs import ChatMessage, CompletionRequest, Refusal
from agentic_prompting.programs.rendering import Renderer
from agentic_prompting.programs.session import Session, context_exceeded_message, cut_at_stop
from agentic_prompting.rollout import Limits, Rollout, Sample
from support.programs import ADD, LIMITS, Scripted, byte_format

LONG_LIMITS = Limits(5, 400, 80_000, 80_000)
LONG_TEXT = "long " * 6000  # is rendered in a thread
END = "the program has ended"


def session_of(say=lambda text, request: "hello", limits=LIMITS, template="qwen3", **options):
    chat_format = byte_format(template)
    policy = Scripted(say, chat_format)
    return Session(Rollout([1], row={}), policy, Renderer(chat_format), limits, **options)


def user(text):
    return ChatMessage("user", text)


def request_of(*messages, **options):
    return CompletionRequest("agent", messages or (user("q"),), **options)


async def ask(session, request):
    return await session.sample_reply(await session.accept(request))


async def refusal_of(awaitable):
    with pytest.raises(Refusal) as refused:
        await awaitable
    return refused.value


def sampled_tokens(session):
    return [sum(sequence.mask) for sequence, _ in session.tree.sequences()]


# ---- the end ----


def test_the_first_end_counts():
    async def check():
        failed = session_of()
        assert failed.end.reason == "" and not failed.end.is_over
        failed.end.fail(MemoryError("no memory"))
        failed.end.fail(ValueError("later"))
        failed.close(END)
        assert failed.end.reason == "failed"
        assert isinstance(failed.end.future.exception(), MemoryError)

        closed = session_of()
        closed.close(END)
        closed.end.fail(ValueError("later"))
        assert closed.end.reason == closed.end.future.result() == END
        return [await refusal_of(session.accept(request_of())) for session in (failed, closed)]

    for refusal in asyncio.run(check()):
        assert refusal.status == 400 and refusal.code == "rollout_ended"


@pytest.mark.parametrize(("grace_period", "ends"), [(0.01, True), (None, False)])
def test_a_session_closes_after_its_grace_period(grace_period, ends):
    async def check():
        session = session_of(max_calls=0, grace_period=grace_period)
        for _ in range(2):
            assert (await refusal_of(session.accept(request_of()))).code == "rollout_ended"
        assert session.limit_reached.status == "out_of_turns" and not session.end.is_over
        await asyncio.wait({session.end.future}, timeout=2 if ends else 0.1)
        return session.end.is_over

    assert asyncio.run(check()) == ends


def test_a_call_sampled_after_the_end_is_refused():
    """Its client had to be told first that a stream begins."""

    async def check():
        session = session_of()
        await ask(session, request_of())
        late_call = await session.accept(request_of(user("late")))
        session.close(END)
        sampling = asyncio.ensure_future(session.sample_reply(late_call))
        await asyncio.sleep(0)
        tokens = sampled_tokens(session)
        refusal = await refusal_of(sampling)
        return refusal.code, len(session.tree.calls), tokens

    assert asyncio.run(check()) == ("rollout_ended", 1, [6])


# ---- races ----


@pytest.mark.parametrize("event", ["undelivered", "retried"])
def test_a_parent_stays_while_its_continuation_is_rendered(event):
    """A client that continues a reply has received it."""

    async def check():
        session = session_of(limits=LONG_LIMITS)
        parent = await session.accept(request_of())
        reply = await session.sample_reply(parent)
        history = [user("q"), ChatMessage("assistant", reply.text), user(LONG_TEXT)]
        rendering = asyncio.ensure_future(session.accept(request_of(*history)))
        await asyncio.sleep(0)
        if event == "undelivered":
            session.mark_undelivered(parent)
        else:
            await session.accept(request_of(), is_retry=True)
        await session.sample_reply(await rendering)
        session.close(END)
        return sampled_tokens(session)

    assert asyncio.run(check()) == [12]


def test_limits_hold_for_parallel_calls():
    async def check():
        session = session_of(limits=LONG_LIMITS, max_sequences=2)
        accepting = [
            session.accept(request_of(user(f"{number} {LONG_TEXT}"))) for number in range(6)
        ]
        calls = await asyncio.gather(*accepting, return_exceptions=True)
        accepted = [call for call in calls if not isinstance(call, Refusal)]
        for call in accepted:
            await session.sample_reply(call)
        session.close(END)
        return len(accepted), len(session.tree.sequences())

    assert asyncio.run(check()) == (2, 2)


def test_seeds_of_equal_calls_differ():
    """Also if the first of two votes is lost while the second one is sampled."""

    async def check():
        session = session_of()
        calls = [await session.accept(request_of()) for _ in range(2)]
        await asyncio.gather(*map(session.sample_reply, calls))
        session.mark_undelivered(calls[0])
        await ask(session, request_of())
        return [request.seed for request in session.policy.requests]

    first_seed, second_seed, retry_seed = asyncio.run(check())
    assert first_seed != second_seed and retry_seed == first_seed


# ---- requests that are refused ----


def test_a_template_that_drops_tools_refuses_the_request():
    """A request that a command writes itself must not end the run."""

    async def check():
        session = session_of(template="gemma")
        refusal = await refusal_of(session.accept(request_of(tools=(ADD,))))
        await ask(session, request_of())
        return refusal.status, session.end.reason, len(session.tree.calls)

    assert asyncio.run(check()) == (400, "", 1)


def test_refused_calls_count():
    async def check():
        session = session_of(template="gemma", max_calls=3)
        for _ in range(2):
            await refusal_of(session.accept(request_of(tools=(ADD,))))
        session.count_unreadable_request()
        refusals = []
        for refuse in (session.check_calls_left, session.count_request):
            try:
                refuse()
            except Refusal as refusal:
                refusals.append(refusal.code)
        return refusals

    assert asyncio.run(check()) == ["rollout_ended"], (
        "requests of other kinds have a limit of their own"
    )


@pytest.mark.parametrize("max_calls", [1, 10])
def test_requests_of_all_kinds_have_a_limit(max_calls):
    async def check():
        session = session_of(max_calls=max_calls)
        count = 0
        with pytest.raises(Refusal):
            while True:
                session.count_request()
                count += 1
        return count, session.limit_reached.status

    assert asyncio.run(check()) == (64 + 4 * max_calls, "out_of_turns")


@pytest.mark.parametrize(
    ("options", "limit_name"), [({"max_calls": 1}, "calls"), ({"max_sequences": 1}, "sequences")]
)
def test_a_refusal_names_the_limit_that_is_reached(options, limit_name):
    async def check():
        session = session_of(**options)
        await ask(session, request_of())
        return await refusal_of(session.accept(request_of(user("another conversation"))))

    refusal = asyncio.run(check())
    assert refusal.code == "rollout_ended" and limit_name in str(refusal)


def test_a_refusal_names_the_limit_of_requests():
    async def check():
        session = session_of(max_calls=1)
        for _ in range(session.max_requests + 1):
            session.count_request()

    with pytest.raises(Refusal, match="requests"):
        asyncio.run(check())


# ---- texts ----


@pytest.mark.parametrize(
    ("stops", "kept", "text"),
    [
        (["</a>"], "<a>x</a>", "<a>x"),
        (["x<", "</a>"], "<a>x<", "<a>"),
        (["zzz"], "<a>x</a> and more", "<a>x</a> and more"),
        ([], "<a>x</a> and more", "<a>x</a> and more"),
    ],
)
def test_samples_are_cut_at_a_stop(stops, kept, text):
    chat_format = byte_format()
    ids = chat_format.tokenizer("<a>x</a> and more")["input_ids"]
    sample = Sample(ids, logprobs=[-1.0] * len(ids), finished=False)
    cut_reply = cut_at_stop(sample, stops, chat_format)
    cut = cut_reply.sample
    assert chat_format.tokenizer.decode(cut.ids) == kept and cut_reply.text == text
    assert cut_reply.stop_text == (stops[0] if kept != "<a>x</a> and more" else None)
    assert len(cut.logprobs) == len(cut.ids) and cut.finished == (kept != "<a>x</a> and more")


@pytest.mark.parametrize(
    "phrase",
    [
        "maximum context length is 100 tokens",
        "prompt is too long: 120 tokens > 100 maximum",
        "exceeds the maximum number of tokens",
    ],
)
def test_clients_recognize_a_full_context(phrase):
    assert phrase in context_exceeded_message(120, 100)
