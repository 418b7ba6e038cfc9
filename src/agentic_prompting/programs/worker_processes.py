"""Worker processes for agents that are functions.

An agent that computes, or whose client costs much processor time, would otherwise hold up the
trainer's interpreter. The agent is sent by the name of its module and function, so a worker imports
only that module: neither torch nor the script that trains. It plays many episodes at once, `async`
ones on its event loop and plain ones in threads, and calls the gateway as any program does. It ends
when its pipe is closed, even if the trainer was killed.
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
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ..llm.guard import call_guarded_on, traceback_of
from ..llm.threads import DaemonThreads
from .failures import ProgramFailed, raised_by

THREADS = 1024  # plain functions at once


@dataclass(frozen=True)
class WorkerFailure:
    """The error that an agent raised in a worker, or the reason why the worker cannot run it.

    Args:
        message (`str`): What happened.
        traceback (`str`, *optional*, defaults to `""`): Where.
        is_mistake (`bool`, *optional*, defaults to `False`): Whether the policy is to blame.
    """

    message: str
    traceback: str = ""
    is_mistake: bool = False

    def to_error(self) -> ProgramFailed:
        error = ProgramFailed(self.message, is_mistake=self.is_mistake)
        error.add_note(self.traceback)
        return error


class WorkerProcesses:
    """Runs an agent in worker processes. Lives on the background loop.

    Args:
        agent (`Callable`): A function of a module, or another object that can be pickled.
        mistakes (`tuple[type, ...]`): Exceptions for which the policy is to blame.
        count (`int`): Number of processes.

    Raises:
        `TypeError`: The agent cannot be imported by another process.
    """

    def __init__(
        self, agent: Callable[..., Any], mistakes: tuple[type[BaseException], ...], count: int
    ):
        # A function is pickled by its module and name. Lambdas and inner functions cannot be.
        try:
            self._pickled_agent = pickle.dumps((agent, mistakes))
        except Exception as error:
            raise TypeError(
                f"an agent for workers must be a function at the top of a module: {error}"
            ) from None
        # In a worker `__main__` is another module. Any mention of it is refused, which is stricter
        # than needed: an agent that is picklable and holds this text as data can do without.
        if b"__main__" in self._pickled_agent:
            raise TypeError(
                "workers import the agent: put it into a module of its own, beside the script"
            )
        self._count = count
        self._workers: list[_WorkerProcess] = []

    async def run(
        self, row: Mapping[str, Any], base_url: str, key: str, options: Mapping[str, Any]
    ) -> Any:
        """Run the agent in the worker with the fewest episodes, and return its value.

        Raises:
            [`ProgramFailed`]: It raised, or its worker has ended.
        """
        # Replace workers that have ended. A new one starts with an episode, until there are enough.
        self._workers = [worker for worker in self._workers if worker.is_alive]
        if len(self._workers) < self._count:
            self._workers.append(_WorkerProcess(self._pickled_agent))
        worker = min(self._workers, key=lambda worker: len(worker.pending))
        return await worker.play((row, base_url, key), options)

    def stop(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.process.kill()


class _WorkerProcess:
    """The trainer's side of one worker.

    Args:
        pickled_agent (`bytes`): The agent and its mistakes.

    Attributes:
        pending (`dict[int, asyncio.Future]`): The episodes in progress, by number.
    """

    def __init__(self, pickled_agent: bytes):
        self.pending: dict[int, asyncio.Future[bytes]] = {}
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._pid = os.getpid()
        self._end_reason = ""

        # Start the process. Only it keeps the worker's end of the pipe, which then ends with it.
        self._pipe, worker_pipe = Pipe()
        with worker_pipe:
            descriptor = worker_pipe.fileno()
            command = [sys.executable, "-c", _COMMAND, str(descriptor), json.dumps(sys.path)]
            self.process = subprocess.Popen(
                command, pass_fds=[descriptor], stdin=subprocess.DEVNULL
            )

        # The agent is the first message. Outcomes are received in a thread, because that blocks.
        self._pipe.send_bytes(pickled_agent)
        threading.Thread(target=self._listen, name="agentic-prompting-worker", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        is_own_process = self._pid == os.getpid()  # a fork has no workers yet
        return is_own_process and self.process.returncode is None

    async def play(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Play one episode in the worker. If it is cancelled here, it is cancelled there."""
        # The number tells the outcomes of parallel episodes apart.
        number = next(self._numbers)
        outcome: asyncio.Future[bytes] = self._loop.create_future()
        self.pending[number] = outcome
        try:
            self._pipe.send((number, pickle.dumps((arguments, options))))
            return pickle.loads(await outcome)
        except OSError:
            raise ProgramFailed(f"the worker of the program has ended{self._end_reason}") from None
        except asyncio.CancelledError:
            # `None` in place of the arguments cancels the episode.
            with contextlib.suppress(OSError):
                self._pipe.send((number, None))
            raise
        finally:
            del self.pending[number]

    def _listen(self) -> None:
        """Receive outcomes until the process has ended. Runs in a thread."""
        try:
            while True:
                number, outcome = self._pipe.recv()
                self._loop.call_soon_threadsafe(self._receive, number, outcome)
        except (EOFError, OSError):
            # The worker has ended, and its episodes with it.
            self._loop.call_soon_threadsafe(self._fail_all, self.process.wait())

    def _receive(self, number: int | None, outcome: bytes | WorkerFailure) -> None:
        if number is None and isinstance(outcome, WorkerFailure):  # it could not import the agent
            self._end_reason = f": {outcome.message}"
            return
        # The episode may have been cancelled in the meantime.
        pending = self.pending.get(number) if number is not None else None
        if pending is None or pending.done():
            return
        if isinstance(outcome, WorkerFailure):
            pending.set_exception(outcome.to_error())
        else:
            pending.set_result(outcome)

    def _fail_all(self, code: int) -> None:
        failure = WorkerFailure(
            f"the worker of the program has ended with {code}{self._end_reason}"
        )
        for number in list(self.pending):
            self._receive(number, failure)


# ---- in the worker ----

# A worker finds the agent's module where this process would.
_COMMAND = f"""import json, sys
sys.path[:] = json.loads(sys.argv[2])
from {__name__} import main
main(int(sys.argv[1]))"""


def main(descriptor: int) -> None:
    """Play the episodes that come through the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which closes the pipe
    pipe = Connection(descriptor)
    try:
        agent, mistakes = pickle.loads(pipe.recv_bytes())
    except Exception as error:
        # Without a number: no episode can be played.
        pipe.send((None, _to_failure(error, ())))
        raise
    asyncio.run(_serve(pipe, agent, mistakes))


async def _serve(
    pipe: Connection, agent: Callable[..., Any], mistakes: tuple[type[BaseException], ...]
) -> None:
    # Plain functions run in threads, `async` ones as tasks of this loop.
    loop = asyncio.get_running_loop()
    threads = DaemonThreads(THREADS, "agentic-prompting-program")
    episodes: dict[int, asyncio.Task[None]] = {}

    async def play(number: int, pickled_arguments: bytes) -> None:
        try:
            arguments, options = pickle.loads(pickled_arguments)
            value = await call_guarded_on(threads, agent, *arguments, **options)
            pipe.send((number, pickle.dumps(value)))
        except Exception as error:  # of the agent, or because a value cannot be pickled
            pipe.send((number, _to_failure(error, mistakes)))
        finally:
            del episodes[number]

    def receive(number: int, pickled_arguments: bytes | None) -> None:
        # A message without arguments cancels its episode.
        if pickled_arguments is not None:
            episodes[number] = loop.create_task(play(number, pickled_arguments))
        elif number in episodes:
            episodes[number].cancel()

    def listen() -> None:
        try:
            while True:
                number, pickled_arguments = pipe.recv()
                loop.call_soon_threadsafe(receive, number, pickled_arguments)
        finally:
            os._exit(0)  # the trainer has ended, or has no more use for this process

    # The pipe is read in a thread, because that blocks. The thread also ends the process.
    threading.Thread(target=listen, daemon=True).start()
    await asyncio.Event().wait()


def _to_failure(error: Exception, mistakes: tuple[type[BaseException], ...]) -> WorkerFailure:
    failure = raised_by(error, mistakes)
    return WorkerFailure(str(failure), traceback_of(failure), failure.is_mistake)
