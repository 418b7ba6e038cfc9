"""Processes of their own for agents that are functions: one that computes, or whose client costs much processor time,
then does not hold up the trainer's interpreter.

The agent is sent by the name of its module and function. So a worker imports that module alone, neither torch nor the
script that trains. It plays many episodes at once, `async` ones on its event loop and plain ones on threads, and calls
the gateway as any program does. It ends when its pipe does, also where the trainer was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ..llm.guard import call_guarded_on, traceback_of
from .failures import ProgramFailed, raised_by

THREADS = 1024  # plain functions at once


class Workers:
    """Plays the episodes of an agent in other processes. Lives on the background loop.

    Args:
        agent (`Callable`): A function of a module, or another object that can be pickled.
        mistakes (`tuple[type, ...]`): Exceptions for which the policy is to blame.
        count (`int`): Processes.

    Raises:
        `TypeError`: The agent cannot be imported by another process.
    """

    def __init__(self, agent: Callable[..., Any], mistakes: tuple[type[BaseException], ...], count: int):
        try:
            self._pickled = pickle.dumps((agent, mistakes))
        except Exception as error:
            raise TypeError(f"an agent for workers must be a function at the top of a module: {error}") from None
        if b"__main__" in self._pickled:
            raise TypeError("workers import the agent: put it into a module of its own, beside the script")
        self._count, self._workers = count, list[_Worker]()

    async def run(self, row: Mapping[str, Any], base_url: str, key: str, options: Mapping[str, Any]) -> Any:
        """What the agent returns.

        Raises:
            [`ProgramFailed`]: It raised, or its worker has ended.
        """
        self._workers = [one for one in self._workers if one.is_alive]
        if len(self._workers) < self._count:
            self._workers.append(_Worker(self._pickled))
        return await min(self._workers, key=lambda one: len(one.waiting)).play((row, base_url, key), options)

    def stop(self) -> None:
        """End the processes."""
        for one in self._workers:
            one.process.kill()


class _Worker:
    """The trainer's side of one process."""

    def __init__(self, pickled: bytes):
        self._loop, self._numbers = asyncio.get_running_loop(), itertools.count()
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self._pid, self._why = os.getpid(), ""
        self._pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", _COMMAND, str(theirs.fileno()), json.dumps(sys.path)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._pipe.send_bytes(pickled)
        threading.Thread(target=self._listen, name="agentic-prompting-worker", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None and self._pid == os.getpid()  # a fork has no workers yet

    async def play(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        number, played = next(self._numbers), self._loop.create_future()
        self.waiting[number] = played
        try:
            self._pipe.send((number, pickle.dumps((arguments, options))))
            return pickle.loads(await played)
        except OSError:
            raise ProgramFailed(f"the worker of the program has ended{self._why}") from None
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._pipe.send((number, None))
            raise
        finally:
            del self.waiting[number]

    def _listen(self) -> None:
        """Read outcomes until the process has ended, on a thread."""
        try:
            while True:
                self._loop.call_soon_threadsafe(self._end, *self._pipe.recv())
        except (EOFError, OSError):
            self._loop.call_soon_threadsafe(self._end_all, self.process.wait())

    def _end_all(self, code: int) -> None:
        for number in [*self.waiting]:
            self._end(number, None, (f"the worker of the program has ended with {code}{self._why}", "", False))

    def _end(self, number: int | None, value: bytes | None, failed: tuple[str, str, bool] | None) -> None:
        if number is None and failed is not None:  # it could not import the agent
            self._why = f": {failed[0]}"
        played = self.waiting.get(number) if number is not None else None
        if played is None or played.done():
            return
        if failed is None:
            played.set_result(value)
            return
        error = ProgramFailed(failed[0], is_mistake=failed[2])
        error.add_note(failed[1])
        played.set_exception(error)


# --- in the worker ---------------------------------------------------------------------------------------------------

_COMMAND = f"""import json, sys
sys.path[:] = json.loads(sys.argv[2])
from {__name__} import main
main(int(sys.argv[1]))"""


def main(descriptor: int) -> None:
    """Play what comes through the pipe, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which closes the pipe
    pipe = Connection(descriptor)
    try:
        agent, mistakes = pickle.loads(pipe.recv_bytes())
    except Exception as error:
        pipe.send((None, None, _outcome_of(error, ())))
        raise
    asyncio.run(_serve(pipe, agent, mistakes))


async def _serve(pipe: Connection, agent: Callable[..., Any], mistakes: tuple[type[BaseException], ...]) -> None:
    loop, threads, playing = asyncio.get_running_loop(), ThreadPoolExecutor(THREADS), dict[int, asyncio.Task[None]]()

    async def play(number: int, given: bytes) -> None:
        try:
            arguments, options = pickle.loads(given)
            value = await call_guarded_on(threads, agent, *arguments, **options)
            pipe.send((number, pickle.dumps(value), None))
        except Exception as error:  # of the agent, or of values that cannot be pickled
            pipe.send((number, None, _outcome_of(error, mistakes)))
        finally:
            del playing[number]

    def take(number: int, given: bytes | None) -> None:
        if given is not None:
            playing[number] = loop.create_task(play(number, given))
        elif number in playing:
            playing[number].cancel()

    def listen() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(take, *pipe.recv())
        finally:
            os._exit(0)  # the trainer has ended, or needs this process no more

    threading.Thread(target=listen, daemon=True).start()
    await asyncio.Event().wait()


def _outcome_of(error: Exception, mistakes: tuple[type[BaseException], ...]) -> tuple[str, str, bool]:
    failure = raised_by(error, mistakes)
    return str(failure), traceback_of(failure), failure.is_mistake
