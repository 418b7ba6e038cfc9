"""[`Program`]: an agent that is a function.

    async def agent(row, base_url, api_key): ...     # or a plain function

The gateway runs on the background loop, `async` agents on a loop of their own. An agent that blocks
its loop (with a synchronous client in a coroutine) would otherwise wait for a reply that only this
loop can send.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Unpack

from ..llm import ServerFailed
from ..llm.guard import call_guarded_on
from ..llm.threads import DaemonThreads
from ..rollout import Rollout
from .agent_program import AgentProgram, AgentRun, ProgramOptions, RunRequest, read_reward
from .session import Session
from .worker_processes import THREADS, WorkerProcesses


class Program(AgentProgram):
    """An agent function as an environment: it calls `base_url` as it would call OpenAI, and the
    policy answers.

    A command is a `harnesses.CommandProgram`.

    Args:
        agent (`Callable`): A function of `(row, base_url, api_key)`, plain or `async`, which also
            gets `system_prompt` if it has such a parameter. It returns its answer as a text, its
            reward as a number (whose text is then the answer), or a dict with `answer`, `reward`
            and whatever else rewards read.
        workers (`int`, *optional*, defaults to `0`): Processes that run the agent, which is then a
            function of a module that they can import. 0 runs it in this process. Use some where the
            agent computes, or where its clients cost more processor time than this process can
            spare.
        mistakes (`tuple`, *optional*): Exceptions for which the policy is to blame; see
            [`AgentProgram`].
        **options: The other options of [`AgentProgram`]: `llms`, `trains`, the limits and the
            address.

    Raises:
        `TypeError`: The agent is not a function of three arguments.
        `ValueError`: A limit is not positive, or a large LLM has the policy's name.

    Example:

    ```python
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    shared = DefaultAsyncHttpxClient()  # a client of its own costs each rollout 30 ms


    async def agent(row, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=shared)
        messages = [{"role": "user", "content": row["question"]}]
        reply = await client.chat.completions.create(model="agent", messages=messages)
        return reply.choices[0].message.content


    args = MultiTurnGRPOConfig("runs/agent")
    rows = load_task("hotpotqa", split="train", n=64)
    MultiTurnGRPOTrainer("Qwen/Qwen3-4B", exact_match_reward, args, rows, environment=Program(agent)).train()
    ```
    """

    def __init__(
        self,
        agent: Callable[..., Any],
        *,
        workers: int = 0,
        mistakes: Sequence[type[BaseException]] = (),
        **options: Unpack[ProgramOptions],
    ):
        _check_signature(agent)
        super().__init__(mistakes=mistakes, **options)
        self.agent = agent
        # The processes start with their first episodes.
        self._workers = WorkerProcesses(agent, self.mistakes, workers) if workers else None

    @property
    def described_by(self) -> Any:
        return self.agent if inspect.isroutine(self.agent) else type(self)

    @property
    def returns_reward(self) -> bool:
        """A function may return a reward; whether it does is seen in an episode."""
        return True

    @asynccontextmanager
    async def open_run(self, rollout: Rollout) -> AsyncIterator[AgentRun]:
        """The run of an episode."""
        yield FunctionRun(self.agent, self._workers)

    def close(self) -> None:
        """Stop the gateway and the workers."""
        if self._workers is not None:
            self._workers.stop()
        super().close()


class FunctionRun(AgentRun):
    """One call of a function, in a worker or in this process.

    Args:
        agent (`Callable`): The function.
        workers ([`WorkerProcesses`], *optional*): Where it runs. By default in this process.
    """

    def __init__(self, agent: Callable[..., Any], workers: WorkerProcesses | None):
        self.agent = agent
        self.workers = workers
        self.takes_system_prompt = _takes_system_prompt(agent)

    async def play(self, request: RunRequest) -> dict[str, Any] | None:
        """Call the function, and read what it returns."""
        # Not every function has a parameter for the system prompt.
        options = {}
        if self.takes_system_prompt:
            options["system_prompt"] = request.system_prompt

        # In a worker process, which unpickles a row of its own.
        if self.workers is not None:
            row = dict(request.row)
            returned = await self.workers.run(row, request.base_url, request.api_key, options)
            return _read_returned(returned)

        # In this process: a plain function in a thread, an `async` one on the loop of programs.
        call = call_guarded_on(
            _program_threads(os.getpid()),
            self.agent,
            _copy_row(request.row),
            request.base_url,
            request.api_key,
            **options,
        )
        running = asyncio.run_coroutine_threadsafe(call, _program_loop(os.getpid()))
        return _read_returned(await asyncio.wrap_future(running))

    async def finish(self, rollout: Rollout, session: Session) -> None:
        """Nothing remains to be done: the function has returned its reward."""


# ---- arguments of a program ----


def is_agent(value: object) -> bool:
    """Return whether a value can be called as an agent: with `(row, base_url, api_key)`.

    A function that can also be called with one argument alone is an environment, unless its
    parameters have these names. An object with a `step` is one, too.
    """
    if not callable(value) or inspect.isclass(value) or hasattr(value, "step"):
        return False
    try:
        signature = inspect.signature(value)
    except ValueError:  # a function written in C may have no signature
        return False
    if {"base_url", "api_key"} <= signature.parameters.keys():
        return True
    return _can_bind(signature, None, None, None) and not _can_bind(signature, None)


def _can_bind(signature: inspect.Signature, *arguments: object) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _check_signature(agent: Callable[..., Any]) -> None:
    if not callable(agent):
        raise TypeError(
            "the agent must be a function of (row, base_url, api_key), not a "
            f"{type(agent).__name__}: for a command use harnesses.CommandProgram"
        )

    # Bind the arguments as a run does. What the first three are called does not matter.
    options = {}
    if _takes_system_prompt(agent):
        options["system_prompt"] = ""
    try:
        inspect.signature(agent).bind(None, None, None, **options)
    except TypeError as error:
        raise TypeError(f"the agent must take (row, base_url, api_key): {error}") from None


def _takes_system_prompt(agent: Callable[..., Any]) -> bool:
    return "system_prompt" in inspect.signature(agent).parameters


# ---- rows and returned values ----


def _copy_row(value: Any) -> Any:
    """A row that an agent may change: copies dicts and lists at every depth, and nothing in them."""
    if isinstance(value, Mapping):
        return {name: _copy_row(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy_row(item) for item in value]
    return value


def _read_returned(value: Any) -> dict[str, Any] | None:
    """Return a function's result as a dict; `None` if it is no answer.

    Raises:
        [`ServerFailed`]: It is neither a text, a number nor a dict, or its reward is not a number.
    """
    if value is None:
        return None
    # An empty text is no answer.
    if isinstance(value, str):
        return {"answer": value} if value.strip() else None
    # A dict is one if it has a reward, or an answer that is not empty.
    if isinstance(value, Mapping):
        if "reward" in value:
            return {**value, "reward": read_reward(value["reward"], "the program")}
        has_answer = value.get("answer") not in (None, "")
        return dict(value) if has_answer else None
    # A number is both: the reward, and as text the answer.
    if isinstance(value, int | float):
        return {"answer": str(value), "reward": read_reward(value, "the program")}
    raise ServerFailed(
        f"the program returned {type(value).__name__}: return a text, a number, a dict or None"
    )


# ---- where functions run ----


@cache
def _program_threads(pid: int) -> DaemonThreads:
    """Threads for plain functions.

    Those of the background loop may be needed by large LLMs meanwhile.
    """
    return DaemonThreads(THREADS, "agentic-prompting-program")


@cache
def _program_loop(pid: int) -> asyncio.AbstractEventLoop:
    """The loop of `async` programs.

    A program that blocks it holds up other programs, but not the gateway.
    """
    loop = asyncio.new_event_loop()
    # A daemon thread does not keep the process from ending.
    threading.Thread(
        target=loop.run_forever, name="agentic-prompting-programs", daemon=True
    ).start()
    return loop
