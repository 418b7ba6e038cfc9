"""A session without a server: ends and races of its calls."""

import asyncio

import pytest

from agentic_prompting.programs import Asked, Entry, Refusal
from agentic_prompting.programs.rendering import Renderer
from agentic_prompting.programs.session import Session
from agentic_prompting.rollout import Limits, Rollout
from support.programs import LIMITS, Scripted, byte_format

LONG = "long " * 6000  # is rendered in a thread


def session_of(say=lambda text, request: "hello", limits=LIMITS, **options):
    chat_format = byte_format()
    policy = Scripted(say, chat_format)
    return Session(Rollout([1], row={}), policy, Renderer(chat_format), limits, **options)


def user(text):
    return Entry("user", text)


def request(*entries, **options):
    return Asked("agent", entries or (user("q"),), **options)


def sampled(session):
    return [sum(sequence.mask) for sequence, _ in session.sequences()]


def test_a_call_sampled_after_the_end_is_refused():
    """Its client had to be told first that a stream begins."""

    async def check():
        session = session_of()
        await session.reply(await session.ask(request()))
        late = await session.ask(request(user("late")))
        session.close("the program has ended")
        sampling = asyncio.ensure_future(session.reply(late))
        await asyncio.sleep(0)
        found = sampled(session)
        with pytest.raises(Refusal) as refused:
            await sampling
        return refused.value.code, len(session.calls), found

    assert asyncio.run(check()) == ("rollout_ended", 1, [6])


@pytest.mark.parametrize("how", ["lost", "asked again"])
def test_a_parent_cannot_go_while_its_continuation_is_rendered(how):
    """A client that goes on from a reply has got it."""

    async def check():
        session = session_of(limits=Limits(5, 400, 80_000, 80_000))
        first = await session.ask(request())
        reply = await session.reply(first)
        history = [user("q"), Entry("assistant", reply.text), user(LONG)]
        rendering = asyncio.ensure_future(session.ask(request(*history)))
        await asyncio.sleep(0)
        if how == "lost":
            session.lost(first)
        else:
            await session.ask(request(), is_retry=True)
        await session.reply(await rendering)
        session.close("the program has ended")
        return sampled(session)

    assert asyncio.run(check()) == [12]


def test_limits_hold_for_calls_at_one_moment():
    async def check():
        session = session_of(limits=Limits(5, 400, 80_000, 80_000), max_sequences=2)
        asked = [session.ask(request(user(f"{number} {LONG}"))) for number in range(6)]
        calls = await asyncio.gather(*asked, return_exceptions=True)
        accepted = [call for call in calls if not isinstance(call, Refusal)]
        for call in accepted:
            await session.reply(call)
        session.close("the program has ended")
        return len(accepted), len(session.sequences())

    assert asyncio.run(check()) == (2, 2)


def test_seeds_of_equal_calls_differ_after_a_loss():
    """The first vote is lost while the second is sampled, and asked again."""

    async def check():
        session = session_of()
        first, second = [await session.ask(request()) for _ in range(2)]
        await asyncio.gather(session.reply(first), session.reply(second))
        session.lost(first)
        await session.reply(await session.ask(request()))
        return [one.seed for one in session.policy.requests]

    first, second, again = asyncio.run(check())
    assert first != second and again == first


def test_an_empty_or_accidental_reply_is_not_used():
    """An empty title is in every message, and `no` in `now`."""

    async def check(reply):
        replies = iter([reply, "work", "work"])
        session = session_of(lambda text, request: next(replies))
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        for asked in (
            request(user("a title")),
            request(user("do it now"), tools=(tool,)),
            request(user("go on"), tools=(tool,)),
        ):
            await session.reply(await session.ask(asked))
        session.close("the program has ended")
        session.assign_roles()
        return [call.role for call in session.calls]

    for reply in ("", " \n", "no"):
        assert asyncio.run(check(reply)) == ["auxiliary", "agent", "agent"]
    for reply in ("now", "do it"):
        assert asyncio.run(check(reply)) == ["agent", "agent", "agent"]


def test_a_template_that_drops_a_part_refuses_the_request():
    """A request that a command writes itself must not end the run."""

    async def check():
        chat_format = byte_format("gemma")
        policy = Scripted(lambda text, request: "hello", chat_format)
        session = Session(Rollout([1], row={}), policy, Renderer(chat_format), LIMITS)
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        with pytest.raises(Refusal) as refused:
            await session.ask(request(tools=(tool,)))
        await session.reply(await session.ask(request()))
        return refused.value.status, session.over, len(session.calls)

    assert asyncio.run(check()) == (400, "", 1)
