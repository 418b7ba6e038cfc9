"""Environments that hang: the step fails at its time limit, and a warning names who is waited for."""

import asyncio
import logging
import math
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from agentic_prompting import Environment, OpenAIChat
from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.interop.tools import ToolEnvironment
from agentic_prompting.llm import RoutedChat, ScriptedChat, TimedOut, run, start
from agentic_prompting.llm.guard import guard_function, wait_for
from agentic_prompting.llm.threads import DaemonThreads
from agentic_prompting.rollout import (
    RESET_ERROR,
    ChatFormat,
    Limits,
    Rollout,
    Sample,
    Turn,
    as_environment,
    observe,
    play_all,
    reset_rows,
)
from support.episodes import ASK, END, ScriptedSampler, fresh
from support.tokenizers_for_tests import tokenizer_for

SOON = Limits(step_timeout=0.3)


@pytest.fixture(autouse=True)
def released():
    """Threads that hang do so until the test ends."""
    event = threading.Event()
    Hangs.event = event
    yield event
    event.set()


class Hangs(Environment):
    """Every second step never returns."""

    event: threading.Event
    steps = 0

    def is_hung(self):
        self.steps += 1
        return self.steps % 2 == 0


class Plain(Hangs):
    def step(self, rollout):
        if self.is_hung():
            self.event.wait()
        return "It is Kenya."


class Async(Hangs):
    async def step(self, rollout):
        if self.is_hung():
            await asyncio.sleep(10**6)
        return "It is Kenya."


class CatchesAll(Hangs):
    """Cannot be cancelled: a careless environment retries after any exception, for ever."""

    async def step(self, rollout):
        hangs = self.is_hung()
        while hangs and not self.event.is_set():
            try:
                await asyncio.sleep(0.01)
            except BaseException:  # on purpose: this swallows the cancellation at the time limit
                continue
        return "It is Kenya."


def play(environment, limits, rollouts=4):
    chat_format = ChatFormat(tokenizer_for("chatml"))
    played = fresh(chat_format, rollouts)
    play_all(played, ScriptedSampler(chat_format, [ASK, END]), environment, chat_format, limits)
    return played


@pytest.mark.parametrize("kind", [Plain, Async, CatchesAll])
@pytest.mark.timeout(120)  # a step that is waited for never returns
def test_a_hung_step_fails_its_rollout_alone(kind):
    rollouts = play(kind(), SOON)
    assert sorted(rollout.status for rollout in rollouts) == [
        "answered",
        "answered",
        "failed",
        "failed",
    ]
    error = next(rollout.error for rollout in rollouts if rollout.error is not None)
    assert isinstance(error, TimedOut) and not error.fatal
    assert f"{kind.__name__}.step (" in str(error) and "step_timeout" in str(error)


def test_a_hung_reset_fails_its_rollout_alone():
    class Starts(Plain):
        async def reset(self, row):
            if row["question"] == "bad":
                await asyncio.sleep(10**6)
            return row

    rows = run(reset_rows(Starts(), [{"question": "good"}, {"question": "bad"}], SOON))
    assert rows[0][RESET_ERROR] is None
    assert isinstance(rows[1][RESET_ERROR], TimedOut)
    assert "Starts.reset" in str(rows[1][RESET_ERROR])


def test_each_of_several_environments_has_its_limit():
    limits = Limits(environments={"slow": {"step_timeout": 0.2}})
    rollout = Rollout([1], {"environment": "slow"})
    slow = CatchesAll()
    quick = Plain()
    slow.steps = 1
    environment = as_environment({"slow": slow, "quick": quick})
    observation = run(observe(environment, rollout, limits.for_row(rollout.row).step_timeout))
    assert isinstance(observation.error, TimedOut) and "CatchesAll.step" in str(observation.error)


def test_an_environments_limit_takes_precedence():
    class Duck:
        step_timeout = 0.2

        async def step(self, rollout):
            await asyncio.sleep(10**6)

    observation = run(observe(as_environment(Duck()), Rollout([1]), 10**6))
    assert isinstance(observation.error, TimedOut) and "0.2 s" in str(observation.error)
    Duck.step_timeout = -1
    with pytest.raises(ValueError, match="step_timeout"):
        as_environment(Duck())


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf])
def test_a_limit_must_be_above_zero(limit):
    with pytest.raises(ValueError, match="step_timeout"):
        Limits(step_timeout=limit)


def test_clients_with_limits_are_exempt():
    """A call of theirs may wait for its turn for longer than any step should take."""
    chat = OpenAIChat("m", "http://127.0.0.1:1/v1")
    assert LLMEnvironment(chat).step_timeout == math.inf
    assert LLMEnvironment(RoutedChat({"a": chat}, {"a": 1})).step_timeout == math.inf
    assert LLMEnvironment(lambda messages: "x").step_timeout is None
    assert (
        LLMEnvironment(RoutedChat({"a": chat, "b": ScriptedChat(["x"])}, {"a": 1})).step_timeout
        is None
    )


# Who is waited for


@pytest.fixture
def warnings(monkeypatch, caplog):
    """The warnings that appear while the watch is impatient."""
    monkeypatch.setattr("agentic_prompting.llm.guard._FIRST_WARNING", 0.8)
    monkeypatch.setattr("agentic_prompting.llm.guard._TICK", 0.05)
    monkeypatch.setattr("agentic_prompting.llm.guard._BLOCKED", 0.2)
    caplog.set_level(logging.WARNING)

    def since_then(part):
        return [record.getMessage() for record in caplog.records if part in record.getMessage()]

    return since_then


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_warning_names_who_is_waited_for(warnings, monkeypatch):
    entered = []

    class Stuck(Hangs):
        def step(self, rollout):
            entered.append(1)
            self.event.wait()

    # Impatient only when all three wait: on a busy machine the first is warned of before the last.
    monkeypatch.setattr("agentic_prompting.llm.guard._FIRST_WARNING", math.inf)
    waiting = [start(observe(Stuck(), Rollout([1]), 600)) for _ in range(3)]
    until(lambda: entered == [1, 1, 1])
    monkeypatch.setattr("agentic_prompting.llm.guard._FIRST_WARNING", 0.0)
    until(lambda: warnings("Stuck.step"))
    (text,) = warnings("Stuck.step")
    assert "the environment" in text and "600 s" in text and "(3 calls)" in text
    for future in waiting:
        future.cancel()


def test_a_step_that_is_cancelled_twice_cleans_up():
    """The end of the loop cancels every task, and then its caller cancelled the step once more."""
    cleaned_up = []
    step_task = None

    async def step():
        nonlocal step_task
        step_task = asyncio.current_task()
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.05)
            cleaned_up.append("yes")

    async def end_all():
        waiting = asyncio.create_task(wait_for(step(), "a step"))
        await asyncio.sleep(0.01)
        for task in (step_task, waiting):
            task.cancel()
        await asyncio.wait({waiting})

    asyncio.run(end_all())
    assert cleaned_up == ["yes"]


def test_a_hung_tool_is_named(warnings, released):
    def dig(place: str) -> str:
        """Digs.

        Args:
            place: Where.
        """
        released.wait()
        return place

    environment = ToolEnvironment([dig])
    rollout = Rollout([1])
    call = '<tool_call>{"name": "dig", "arguments": {"place": "here"}}</tool_call>'
    rollout.add_turn(Sample([2]), Turn(call, "act", True, request=call))
    waiting = start(observe(environment, rollout, 600))
    until(lambda: warnings("tool dig"))
    waiting.cancel()


def test_who_blocks_the_event_loop_is_named(warnings):
    """The others cannot go on before that: they are not to blame."""

    class Blocks(Environment):
        async def step(self, rollout):
            await asyncio.sleep(0.2)
            time.sleep(3)
            return "x"

    class Waits(Environment):
        async def step(self, rollout):
            await asyncio.sleep(0.25)
            return "y"

    futures = [
        start(observe(environment, Rollout([1]), 600))
        for environment in (Waits(), Blocks(), Waits())
    ]
    until(lambda: warnings("Blocks.step"))
    assert "must not block" in warnings("Blocks.step")[0] and not warnings("Waits.step")
    assert [future.result(20).text for future in futures] == ["y", "x", "y"]


def test_quick_steps_are_not_named(warnings):
    play(as_environment(lambda rollout: "It is Kenya."), Limits(), rollouts=20)
    assert not warnings("environment")


def test_a_hung_reward_is_named(warnings):
    def slow_reward(completions):
        time.sleep(2)
        return [1.0 for _ in completions]

    assert guard_function(slow_reward, kind="reward function")(completions=["a"]) == [1.0]
    assert "reward function" in warnings("slow_reward")[0]


# Threads


def test_given_up_threads_are_replaced():
    threads = DaemonThreads(2, "test")
    event = threading.Event()
    ended = []
    hung = [threads.submit(event.wait) for _ in range(2)]
    waiting = threads.submit(lambda: "free")
    time.sleep(0.05)
    assert not waiting.done()
    assert not hung[0].cancel() and not hung[0].cancel(), "it runs"
    assert waiting.result(5) == "free"
    event.set()
    assert hung[1].result(5)
    assert [threads.submit(ended.append, i).result(5) for i in range(10)] == [None] * 10
    assert ended == list(range(10))


def test_threads_run_what_is_submitted():
    threads = DaemonThreads(4, "four")
    futures = [threads.submit(divmod, i, 7) for i in range(500)]
    assert [future.result(10) for future in futures] == [divmod(i, 7) for i in range(500)]
    assert sum(thread.name.startswith("four_") for thread in threading.enumerate()) <= 4
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(5)


def test_a_hung_step_does_not_stop_the_exit():
    """The interpreter waited for its thread."""
    code = """
        import threading
        from agentic_prompting.llm import run
        from agentic_prompting.rollout import Rollout, as_environment, observe
        print(run(observe(as_environment(lambda rollout: threading.Event().wait()), Rollout([1]), 0.2)).error.kind)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.strip() == "TimedOut"
