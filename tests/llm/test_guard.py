"""Code of a user's may raise anything: its call fails, nothing hangs, and a loop that ends is
noticed.
"""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import httpx
import openai
import pytest

from agentic_prompting.llm import ScriptedChat, complete, gather, loop as loop_module, run, start
from agentic_prompting.llm.guard import (
    Escaped,
    call_guarded,
    describe,
    guard_function,
    to_ordinary_exception,
)
from agentic_prompting.llm.loop import LoopEnded, in_parallel, loop_error
from agentic_prompting.rollout import (
    BatchEngine,
    ChatFormat,
    Sample,
    SampleRequest,
    play_all,
    run_with_engine,
)
from support.base_exceptions import DOORS, KINDS, in_own_process, raising
from support.episodes import ASK, END, ScriptedSampler, fresh
from support.tokenizers_for_tests import tokenizer_for


def test_every_exception_of_user_code_is_named():
    """Red before the guard: 30 of these 50 hung, others ended the rollouts beside them."""
    outcomes = in_own_process()
    assert len(outcomes) == 2 * len(KINDS) * len(DOORS) >= 40
    assert [case for case, outcome in outcomes.items() if outcome is None] == []
    wrong = [
        case
        for case, text in outcomes.items()
        if f"{case.split()[2]}: from the user's code" not in text
    ]
    assert wrong == []


# Texts


class Mute(Exception):
    def __str__(self):
        raise SystemExit("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a" * 300), "ValueError: " + "a" * 200),
        (KeyError(), "KeyError"),
        (SystemExit(3), "SystemExit: 3"),
        (to_ordinary_exception(SystemExit(3)), "SystemExit: 3"),
        (Mute(), "Mute: (its text cannot be shown: SystemExit)"),
    ],
)
def test_every_exception_has_a_text(error, text):
    assert describe(error) == text


def test_a_refusal_of_a_vendor_is_its_message():
    """Their clients write the body of the reply as a Python dict."""
    body = {"error": {"message": "The context is too long.", "type": "invalid", "param": None}}
    request = httpx.Request("POST", "http://localhost/v1")
    reply = httpx.Response(400, request=request, json=body)
    text = f"Error code: 400 - {body}"
    expected = "BadRequestError: Error code: 400 - The context is too long."
    # OpenAI's client keeps the inner object of the body, Anthropic's the whole.
    for kept in (body["error"], body):
        error = openai.BadRequestError(text, response=reply, body=kept)
        assert describe(error) == expected
    # Without a message the text stays as it is.
    error.body = {"type": "invalid"}
    assert describe(error, 1000) == f"BadRequestError: {error}"


def test_exception_without_a_text_is_survived_everywhere():
    def mute(*args, **kwargs):
        raise Mute

    async def mute_later(*args, **kwargs):
        raise Mute

    for function in (mute, mute_later):
        for door in DOORS.values():
            assert "Mute" in door(function)
    assert "Mute" in str(complete(ScriptedChat(mute), "q").error)


# One call


def test_ordinary_exceptions_pass_as_they_are():
    assert to_ordinary_exception(error := ValueError("x")) is error
    with pytest.raises(KeyError):
        run(call_guarded({}.__getitem__, "x"))


def test_names_of_arguments_are_the_functions_own():
    assert run(
        call_guarded(lambda function, executor: (function, executor), function=1, executor=2)
    ) == (1, 2)


def test_only_our_own_cancellation_passes_through():
    ended = []

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def ours():
        task = asyncio.create_task(call_guarded(waits))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ours())
    assert ended == [True]
    with pytest.raises(Escaped, match="CancelledError"):
        asyncio.run(call_guarded(raising(asyncio.CancelledError, is_async=True)))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(call_guarded(waits), 0.01))


def test_a_coroutine_that_is_closed_ends_there():
    reached = []

    @types.coroutine
    def suspends():
        yield

    async def user():
        await suspends()

    async def ours():
        await call_guarded(user)
        reached.append("after")

    coroutine = ours()
    coroutine.send(None)
    coroutine.close()
    assert reached == []


def test_ctrl_c_on_the_main_thread_passes():
    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        guard_function(interrupted, lambda error: "swallowed")()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [one for one in KINDS.values() if one is not KeyboardInterrupt])
def test_a_guarded_function(kind, is_async):
    """As a trainer wraps a reward function."""

    def failed(error, **columns):
        assert kind.__name__ in describe(error)
        return [None] * len(columns["completions"])

    reward = guard_function(raising(kind, is_async), failed)
    assert asyncio.iscoroutinefunction(reward) == is_async and reward.__name__ == "look"
    given = reward(prompts=["p", "p"], completions=["a", "b"])
    assert (asyncio.run(given) if is_async else given) == [None, None]
    unmapped = guard_function(raising(kind, is_async))
    with pytest.raises(Escaped, match=kind.__name__):
        given = unmapped(completions=[])
        asyncio.run(given)


def test_a_guarded_object_keeps_its_name_and_result():
    class Length:
        def __call__(self, completions):
            return [float(len(completion)) for completion in completions]

    reward = guard_function(Length())
    assert reward.__name__ == "Length" and reward(completions=["abc"]) == [3.0]


# The loop


@pytest.fixture
def own_loop(monkeypatch):
    """A background loop that may end."""
    monkeypatch.setattr(loop_module, "_current", None)


def end_the_loop():
    async def stray():
        async def exits():
            raise SystemExit("from a stray task")

        asyncio.get_running_loop().create_task(exits())

    start(stray())


def never():
    return asyncio.Event().wait()


@pytest.mark.parametrize(
    "wait",
    [
        lambda: run(never()),
        lambda: list(in_parallel([never()], 1)),
        lambda: run_with_engine(lambda request: None, never()),
        lambda: run_with_engine(BatchEngine(lambda requests: [], on_callers_thread=True), never()),
        lambda: asyncio.run(wrapped()),
        lambda: run(BatchEngine(slow_sampler)(SampleRequest([1], 1, 0))),
    ],
    ids=[
        "run",
        "in_parallel",
        "run_with_engine",
        "engine on this thread",
        "another loop",
        "engine of its own",
    ],
)
def test_ended_loop_fails_all_waiters_with_cause(own_loop, wait):
    assert loop_error() is None
    threading.Timer(0.2, end_the_loop).start()
    with pytest.raises(LoopEnded, match="SystemExit: from a stray task"):
        wait()
    assert "stray" in str(loop_error())
    with pytest.raises(LoopEnded, match="stray"):
        complete(ScriptedChat(["x"]), "q")


async def wrapped():
    return await asyncio.wrap_future(start(never()))


def slow_sampler(requests):
    time.sleep(1)
    return [Sample([1])] * len(requests)


def test_exit_in_our_own_task_stays_there(own_loop):
    async def exits():
        raise SystemExit

    async def lives():
        return 3

    with pytest.raises(Escaped):
        run(exits())
    with pytest.raises(Escaped):
        run(gather([lives(), exits()]))
    assert run(lives()) == 3


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_sampler_that_exits_fails_its_requests(own_loop, kind):
    """On the engine's own thread; red before: the thread ended and every request waited for ever."""

    def sampler(requests):
        raise kind("in the sampler")

    engine = BatchEngine(sampler)
    for _ in range(2):  # the next request gets the error as well, from a new thread
        with pytest.raises(Escaped, match="in the sampler"):
            start(engine(SampleRequest([1], 1, 0))).result(10)


def test_ctrl_c_ends_a_batch_that_hangs():
    """In a process of its own: exit status, and no thread that keeps it alive."""
    script = """
        import os, signal, threading, asyncio, sys
        from agentic_prompting.llm import run
        from agentic_prompting.rollout import Rollout, observe

        class Waits:
            async def step(self, rollout):
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                await asyncio.sleep(600)

        run(observe(Waits(), Rollout([1])))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert "KeyboardInterrupt" in done.stderr and done.returncode != 0


def test_exit_waits_for_the_engines_step():
    """A thread in torch's code while the interpreter is torn down aborted the process, after its
    last line.
    """
    script = """
        import threading, time
        from agentic_prompting.llm import start
        from agentic_prompting.rollout import BatchEngine, Sample, SampleRequest

        began = threading.Event()

        def sampler(requests):
            began.set()
            time.sleep(0.5)
            print("the step has ended", flush=True)
            return [Sample([1], [0.0]) for _ in requests]

        start(BatchEngine(sampler)(SampleRequest([1], 1, 0)))
        began.wait()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the step has ended\n", "")


def test_exiting_environment_fails_its_own_rollout_only():
    class ExitsOnce:
        def __init__(self):
            self.kinds = list(KINDS.values())

        async def step(self, rollout):
            if self.kinds:
                raise self.kinds.pop()("from the environment")
            return "It is Kenya."

    chat_format = ChatFormat(tokenizer_for("chatml"))
    rollouts = fresh(chat_format, 8)
    play_all(rollouts, ScriptedSampler(chat_format, [ASK, END]), ExitsOnce(), chat_format)
    assert sorted(one.status for one in rollouts) == ["answered"] * 3 + ["failed"] * 5
    assert {str(one.error).split(": ")[0] for one in rollouts if one.error} == {
        f"the environment raised {name}" for name in KINDS
    }


def test_connection_cancelled_while_opening_is_an_outage(monkeypatch):
    """Red before: calls that waited for an MCP server while its connection was dropped waited for
    ever.
    """
    mcp = pytest.importorskip("mcp")
    from agentic_prompting.interop.mcp import MCPTools
    from agentic_prompting.llm import Unreachable

    class NeverOpens:
        def __init__(self, *args, **kwargs):
            pass

        async def __aenter__(self):
            await asyncio.Event().wait()

        async def __aexit__(self, *args):
            pass

    monkeypatch.setattr(mcp, "Client", NeverOpens)
    tools = object.__new__(MCPTools)
    tools.server = "nowhere"
    tools.timeout = 1.0
    tools._client = None
    tools._keeper = None

    async def drops():
        waiting = asyncio.create_task(tools._connect())
        await asyncio.sleep(0.01)
        tools._keeper.cancel()
        await asyncio.wait_for(waiting, 5)

    with pytest.raises(Unreachable, match="CancelledError"):
        asyncio.run(drops())


MANY_WAIT = """
import os, sys, time
from agentic_prompting.llm import OpenAIChat, ReplayCache, Reply, complete, start
from agentic_prompting.llm.guard import call_guarded

def plain(messages):
    return f"heard {messages[-1]['content']}"

cache = ReplayCache(sys.argv[1])
for i in range(300):
    cache.put(cache.key("m", [{"role": "user", "content": str(i)}], {}, 0), Reply(f"heard {i}"))
model = plain if sys.argv[2] == "function" else OpenAIChat("m", base_url="http://127.0.0.1:9/v1", cache=cache)

def tool(i):
    time.sleep(0.3)  # until all threads are taken
    return complete(model, str(i)).text

waiting = [start(call_guarded(tool, i)) for i in range(300)]
try:
    heard = [one.result(timeout=15) for one in waiting]
except TimeoutError:
    heard = "nothing"
os._exit(heard != [f"heard {i}" for i in range(300)])  # without a join of threads that wait for ever
"""


@pytest.mark.parametrize("model", ["endpoint", "function"])
def test_more_functions_than_threads_may_call_models(model, tmp_path):
    """Each held a thread while its call waited for one, to read the recording or to run the model's
    function: from 256 functions at once on, all of them waited for ever.
    """
    command = [sys.executable, "-c", MANY_WAIT, str(tmp_path / "cache.sqlite"), model]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-2000:] or "they wait for ever"
