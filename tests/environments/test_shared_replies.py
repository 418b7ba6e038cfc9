"""Identical requests of a batch are sent once."""

import asyncio
import pickle

import pytest

from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.llm import (
    OpenAIChat,
    Reply,
    RoutedChat,
    Usage,
)
from agentic_prompting.rollout import (
    Rollout,
    Sample,
)
from support.llm_rollouts import Recording, turn_of


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
