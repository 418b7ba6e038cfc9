"""The end of the background loop: what a process prints while it ends."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from agentic_prompting.llm import start
from agentic_prompting.llm.loop import run

HEAD = """
import asyncio, os, signal, sys, threading, time
from agentic_prompting.llm import start
from agentic_prompting.llm.loop import background_loop, run

async def stubborn():
    while True:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            pass
"""
SCRIPTS = {
    "a call waits": """
        start(asyncio.sleep(100))
        time.sleep(0.2)
    """,
    "a call in a thread catches its cancellation": """
        threading.Thread(target=run, args=[stubborn()], daemon=True).start()
        time.sleep(0.2)
    """,
    "Ctrl-C of a call that catches its cancellation": """
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            run(stubborn())
        except KeyboardInterrupt:
            pass
    """,
    "an environment's step catches its cancellation": """
        from agentic_prompting.rollout import Rollout, as_environment
        from agentic_prompting.rollout.play import observe

        async def step(rollout):
            await stubborn()

        start(observe(as_environment(step), Rollout([1]), step_timeout=60.0))
        time.sleep(0.2)
    """,
    "cancelled calls start others": """
        async def clean_up():
            try:
                await asyncio.sleep(100)
            finally:
                asyncio.create_task(asyncio.sleep(0.2))
                asyncio.create_task(stubborn())

        for _ in range(20):
            start(clean_up())
        time.sleep(0.2)
    """,
    "calls clean up after their cancellation": """
        from agentic_prompting.llm import gather

        start(gather([stubborn() for _ in range(4)]))
        time.sleep(0.2)
    """,
    "a command runs": """
        from agentic_prompting import CommandProgram, Limits, Workspace
        from agentic_prompting.rollout import Rollout
        from support.isolation import ISOLATION
        from support.programs import Scripted, byte_format

        chat_format = byte_format()
        policy = Scripted(lambda text, request: "x", chat_format)
        program = CommandProgram(["sleep", "30"], workspace=Workspace(isolation=ISOLATION))
        rollout = Rollout([1], row={"question": "q"})
        start(program.play_episode(rollout, policy, chat_format, Limits()))
        time.sleep(2)
    """,
    "a thread goes on to make calls": """
        def make_calls():
            while True:
                try:
                    start(asyncio.sleep(100))
                except RuntimeError:
                    return
                time.sleep(0.0005)

        threading.Thread(target=make_calls, daemon=True).start()
        time.sleep(0.3)
    """,
    "a call blocks the loop": """
        async def block():
            time.sleep(10)

        start(asyncio.sleep(100))
        start(block())
        time.sleep(0.2)
    """,
    "the loop has ended before": """
        import logging

        logging.getLogger("agentic_prompting").setLevel(logging.CRITICAL + 1)
        start(asyncio.sleep(100))
        time.sleep(0.2)
        background_loop().call_soon_threadsafe(sys.exit)
        time.sleep(0.2)
    """,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_process_ends_without_a_word(script):
    """asyncio printed "Task was destroyed but it is pending!" for each task that was left."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=240,  # a command needs torch, which takes long to import on a busy machine
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_client_may_be_collected_while_a_call_is_started(monkeypatch):
    """Its finalizer starts a coroutine of its own, on the thread that is starting one."""
    schedule = asyncio.run_coroutine_threadsafe
    collected = []

    async def close():
        return "closed"

    def schedule_during_a_collection(coroutine, loop):
        if not collected:
            collected.append(None)
            collected.append(start(close()))
        return schedule(coroutine, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", schedule_during_a_collection)
    answers = []

    async def call():
        return "answer"

    thread = threading.Thread(target=lambda: answers.append(run(call())), daemon=True)
    thread.start()
    thread.join(20)
    assert answers == ["answer"] and collected[1].result(20) == "closed"
