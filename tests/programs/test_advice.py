"""Warnings about programs whose rollouts look wrong: each once, and none where nothing is wrong."""

import asyncio
import itertools
import json
import os
import re
import time

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

from agentic_prompting.programs import (
    Call,
    ChatMessage,
    CompletionRequest,
    Program,
    advice as advice_module,
    agent_program,
)
from agentic_prompting.programs.advice import Advice, find_changed_message
from agentic_prompting.programs.call_tree import conversation_key
from support.programs import play_program

Q = {"role": "user", "content": "q"}


def program_of(agent, **options):
    """A program whose agent gets a function that asks, in place of the address."""
    clients = {}

    async def with_client(row, base_url, api_key):
        shared = clients.setdefault("one", DefaultAsyncHttpxClient())

        async def say(messages, **more):
            client = AsyncOpenAI(
                base_url=base_url, api_key=api_key, max_retries=0, http_client=shared
            )
            return (
                (await client.chat.completions.create(model="agent", messages=messages, **more))
                .choices[0]
                .message
            )

        return await agent(row, say)

    return Program(with_client, **options)


def warnings_in(caplog):
    return [
        record.getMessage() for record in caplog.records if record.name.endswith("programs.advice")
    ]


@pytest.mark.parametrize(("turns", "n", "warned"), [(1, 31, False), (1, 40, True), (2, 40, False)])
def test_most_rollouts_with_a_single_call(turns, n, warned, caplog):
    async def agent(row, say):
        messages = [Q]
        for _ in range(turns):
            messages += [await say(messages), Q]
        return "done"

    play_program(program_of(agent), n=n)
    warnings = warnings_in(caplog)
    assert [text.split(".")[0] for text in warnings] == [
        "32 of the last 32 rollouts made a single call"
    ] * warned
    assert all("base_url" in text and "tool" in text for text in warnings)


@pytest.mark.parametrize(("asks", "warned"), [(False, True), (True, False)])
def test_a_program_that_raises_before_any_request(asks, warned, caplog):
    async def agent(row, say):
        if asks:
            await say([Q])
        raise ConnectionError

    play_program(program_of(agent), n=2)
    assert [text for text in warnings_in(caplog) if "base_url" in text][1:] == []
    assert any("base_url" in text for text in warnings_in(caplog)) == warned


@pytest.mark.parametrize(("length", "warned"), [(900, True), (9, False)])
def test_cut_replies_are_warned_of_at_once(length, warned, caplog):
    async def agent(row, say):
        await say([Q])
        return "done"

    rollouts, _ = play_program(program_of(agent), lambda text, request: "x" * length, n=8)
    assert [rollout.counts["program/cut_replies"] for rollout in rollouts] == [warned] * 8
    assert any("were cut off" in text for text in warnings_in(caplog)) == warned


def changed_date(messages):
    return [{"role": "system", "content": f"it is {len(messages)} o'clock"}, *messages]


def changed_reply(messages):
    return [
        {**message, "content": "I said so."} if message["role"] == "assistant" else message
        for message in messages
    ]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            changed_date,
            'message 1 was system: "it is 1 o\'clock" and is system: "it is 3 o\'clock"',
        ),
        (changed_reply, "message 2 was assistant: 'turn 1' and is assistant: 'I said so.'"),
        (lambda messages: messages, None),
        (lambda messages: messages[-1:], None),  # a summary, or a sub-agent
        (lambda messages: [messages[0], *messages[-2:]], None),  # the last exchange alone
    ],
)
def test_a_history_that_comes_back_changed(changed, says, caplog):
    async def agent(row, say):
        messages = [Q]
        for i in range(4):
            completion = await say(changed(messages))
            messages += [
                {"role": "assistant", "content": completion.content},
                {"role": "user", "content": f"more {i}"},
            ]
        return "done"

    program = program_of(agent)
    for _ in range(2):
        turns = itertools.count(1)
        play_program(program, lambda text, request, turns=turns: f"turn {next(turns)}")
    warnings = warnings_in(caplog)
    assert len(warnings) == (says is not None) and all(says in text for text in warnings)


def test_tools_in_another_order(caplog):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {}}}
        for name in ("add", "less")
    ]

    async def agent(row, say):
        completion = await say([Q], tools=tools)
        await say([Q, {"role": "assistant", "content": completion.content}, Q], tools=tools[::-1])
        return "done"

    play_program(program_of(agent))
    assert ["the tools are not those" in text for text in warnings_in(caplog)] == [True]


def test_each_message_of_long_histories_is_hashed_once(monkeypatch):
    """Each of 60 conversations is compared with the ones before it, by the keys of its messages."""
    hashed = []

    def counted(key, message):
        hashed.append(1)
        return conversation_key(key, message)

    monkeypatch.setattr(advice_module, "conversation_key", counted)
    calls = []
    for number in range(60):
        entries = [ChatMessage("user", f"{number} {text}") for text in range(2000 + number)]
        calls.append(Call(CompletionRequest("agent", tuple(entries)), number))
    assert find_changed_message(calls) == ""
    assert len(hashed) == sum(len(call.request.messages) + 1 for call in calls), "and the reply"


@pytest.mark.parametrize(
    ("failing", "mistakes", "warned"),
    [
        ("short", (), True),
        ("short", (json.JSONDecodeError,), False),
        ("long", (), False),
        ("each third", (), False),
    ],
)
def test_rollouts_that_fail_where_the_policy_writes_little(failing, mistakes, warned, caplog):
    """Whatever the order of the replies: the number in a rollout's question says their length."""
    numbers = itertools.count()

    def length_of(number):
        return (5, 30, 31, 32)[number % 4]

    def fails(number):
        if failing == "each third":
            return number % 3 == 0
        return (length_of(number) < 20) == (failing == "short")

    async def agent(row, say):
        number = next(numbers)
        question = {"role": "user", "content": f"question {number};"}
        text = (await say([question])).content
        await say([{"role": "user", "content": f"and then, after question {number};"}])
        if fails(number):
            json.loads("")
        return text

    def answer(text, request):
        number = int(re.search(r"question (\d+);", text)[1])
        return "x" * length_of(number)

    play_program(program_of(agent, mistakes=mistakes), answer, n=48)
    warnings = [text for text in warnings_in(caplog) if "wrote less" in text]
    assert len(warnings) == warned and all("mistakes=" in text for text in warnings)


@pytest.mark.parametrize(
    ("names", "warned"),
    [(["agent", "orcale"], True), (["gpt-4o", "orcale"], True), (["gpt-4o", "gpt-4o"], False)],
)
def test_several_models_that_the_policy_answers(names, warned, caplog):
    async def agent(row, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        for name in [*names, "oracle"]:
            await client.chat.completions.create(model=name, messages=[Q])
        return "done"

    program = Program(agent, llms={"oracle": lambda messages: "yes"})
    for _ in range(2):
        play_program(program)
    warnings = warnings_in(caplog)
    assert len(warnings) == warned
    assert all("orcale" in text and "has oracle" in text for text in warnings)


def test_a_program_that_hangs_is_noticed(caplog, monkeypatch):
    monkeypatch.setattr(agent_program, "_IDLE_SECONDS", 0.1)

    async def agent(row, say):
        await say([Q])
        await asyncio.Event().wait()

    rollout, _ = play_program(program_of(agent, timeout=2))
    assert rollout.status == "failed"
    assert ["neither called" in text for text in warnings_in(caplog)] == [True]


def test_a_program_that_hangs_is_noticed_in_time(caplog, monkeypatch):
    monkeypatch.setattr(agent_program, "_IDLE_SECONDS", 1.0)
    last_calls = []

    async def agent(row, say):
        await say([Q])
        last_calls.append(time.time())
        await asyncio.Event().wait()

    play_program(program_of(agent, timeout=4))
    (warning,) = [record for record in caplog.records if "neither called" in record.message]
    assert 0.9 < warning.created - last_calls[0] < 1.3


def test_a_program_that_ends_in_time_is_not_taken_for_a_hanging_one(caplog):
    async def agent(row, say):
        await say([Q])
        return "done"

    rollout, _ = play_program(program_of(agent, timeout=60))
    assert rollout.status == "answered"
    assert not any("neither called" in text for text in warnings_in(caplog))


def test_wishes_that_make_no_difference_are_said_once(caplog):
    async def agent(row, say):
        await say([Q], temperature=0.3, max_tokens=5)
        await say([Q], temperature=0.4, top_p=0.5)
        return "done"

    program = program_of(agent)
    for _ in range(2):
        play_program(program)
    assert [text.partition(",")[0] for text in warnings_in(caplog)] == [
        "the program asked for temperature=0.4"
    ]
    assert "top_p=0.5" in warnings_in(caplog)[0]
    assert "tools" not in warnings_in(caplog)[0], "it has asked for none"


def test_tools_of_a_vendor_are_no_sampling(caplog):
    Advice().look_at([], {"tools": "web_search"}, changed_message="", has_raised=False)
    (warning,) = warnings_in(caplog)
    assert "web_search" in warning and "vendor" in warning and "samples" not in warning


def test_a_key_in_the_shared_environment(caplog, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "")

    def agent(row, base_url, api_key):
        os.environ["OPENAI_API_KEY"] = api_key
        asked = [{"role": "user", "content": "q"}]
        with OpenAI(base_url=base_url, max_retries=0) as client:
            reply = client.chat.completions.create(model="agent", messages=asked)
        return reply.choices[0].message.content

    rollout, _ = play_program(agent, lambda text, request: "yes")
    assert rollout.answer == "yes"
    assert "OPENAI_API_KEY" in " ".join(warnings_in(caplog))


def test_a_used_up_limit_names_its_option(caplog):
    async def agent(row, say):
        for number in range(3):
            await say([{"role": "user", "content": f"question {number}"}])

    program = program_of(agent, max_sequences=2)
    rollout, _ = play_program(program, lambda text, request: "yes")
    assert rollout.status == "out_of_turns"
    assert "max_sequences=" in " ".join(warnings_in(caplog))
