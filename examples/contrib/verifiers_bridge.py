"""The other end of `verifiers_tasks.py`, which runs this file in an interpreter that has
`verifiers` 0.4.

    .venv-verifiers/bin/python -P verifiers_bridge.py '{"taskset": {"id": "my-task-set"}}'

It reads requests from standard input and writes answers to standard output, one JSON object a line;
an answer has the `id` of its request. `{"rows": n}` lists tasks. `{"begin": number}` starts an
episode and returns its first messages. `{"episode": ..., "text": ...}` sends the agent's turn
(`null`: there is no further turn) and returns the messages that follow it, or the reward of the
episode.
"""

import asyncio
import contextlib
import copy
import functools
import inspect
import itertools
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.session import call_hook, hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import invoke


class Seat:
    """Takes the place of a `vf.Agent`, whose turns come from the other end.

    It is its own `vf.Interaction`.
    """

    def __init__(self) -> None:
        self.ended = False
        self.answers = asyncio.Queue[Any]()
        self.texts = asyncio.Queue[Any]()

    def __getattr__(
        self, name: str
    ) -> Any:  # `agents.player`: each environment has its own name for the seat
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    async def run(self, task: Any, **ignored: Any) -> Any:
        async with self.interaction(task):
            await self.turn()
        return self.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **ignored: Any) -> Any:
        data = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        self.task = task
        self.trace = vf.Trace(task=data, state=state_cls(type(task))(), agent=agent)
        self.traces.append(self.trace)
        first = (
            [vf.SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []
        )
        prompt = task.data.prompt or []
        self.unsent = [
            *first,
            *([vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt),
        ]
        await invoke(task.setup, {"trace": self.trace, "runtime": None})
        yield self
        self.trace.stop("user_closed")
        await invoke(task.finalize, {"trace": self.trace, "runtime": None})
        await task.score(self.trace)

    async def turn(self, message: Any = None) -> Any:
        messages = [vf.UserMessage(content=message)] if isinstance(message, str) else message or []
        if not self.ended:
            unsent = [*self.unsent, *messages]
            self.unsent = []
            for sent in unsent:
                self.remember(sent)
            self.answers.put_nowait(
                {"messages": [{"role": sent.role, "content": text_of(sent)} for sent in unsent]}
            )
            text = await self.texts.get()
            self.ended = text is None
        if self.ended:
            return vf.Segment(messages=[], terminated=True)
        reply = vf.AssistantMessage(content=text)
        self.remember(reply, sampled=True)
        for stop in self.task.hooks("stop"):
            self.ended = self.ended or bool(await call_hook(stop, {vf.Trace: self.trace}))
        return vf.Segment(messages=[reply])

    def remember(self, message: Any, sampled: bool = False) -> None:
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))

    async def play(self, env: Any, task: Any) -> None:
        """Run an episode by the environment's own `run_episode`, with this in its seat."""

        def seats(ctx: Any, completed: list[Any], *ignored: Any) -> Any:
            self.traces = completed
            return self

        env = copy.copy(env)
        env._episode_agents = seats
        try:
            episode = await env.run_episode(task, None)
        except Exception as error:  # else it would end the process, and with it every other episode
            return self.answers.put_nowait({"error": f"{type(error).__name__}: {error}"})
        errors = "; ".join(f"{error.type}: {error.message}" for error in episode.errors)
        trace = episode.traces[0] if episode.traces else None
        if errors or trace is None or not trace.rewards or None in trace.rewards.values():
            return self.answers.put_nowait({"error": errors or "there is no reward"})
        self.answers.put_nowait({"reward": trace.reward, "metrics": trace.metrics})


def text_of(message: Any) -> str:
    """The text of a message.

    Raises a `ValueError` if it holds more: the other end reads text alone.
    """
    content = message.content or ""
    if isinstance(content, str):
        return content
    if other := [part.type for part in content if part.type != "text"]:
        raise ValueError(f"only tasks of text: a message holds {other[0]}")
    return "\n".join(part.text for part in content)


class Bridge:
    """One environment of `verifiers`, its tasks and the episodes that are running."""

    def __init__(self, config: dict[str, Any], group: asyncio.TaskGroup):
        self.env = vf.load_environment(vf.resolve_env_config(config))
        self.group = group
        taskset = self.env.taskset
        seats = list(agent_config_fields(self.env.config))
        kind = type(taskset).task_type()
        tools = [*taskset.toolsets(taskset.config), *kind.toolsets(taskset.config.task)]
        if len(seats) != 1 or tools or kind.NEEDS_CONTAINER:
            raise ValueError(
                f"only tasks with one agent and without tools or a container: {seats}, "
                f"{len(tools)} tools"
            )
        self.stream = iter(taskset)
        self.tasks = list[Any]()
        self.seats = dict[str, Seat]()
        self.checked = 0  # how many of the tasks can be played here

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "rows" in request:
            prompts = [task.data.prompt_text for task in self.load(request["rows"])]
            return {
                "rows": [
                    {"task": n, "question": text or f"task {n}"} for n, text in enumerate(prompts)
                ]
            }
        if "begin" in request:
            name = str(request["id"])
            task = self.load(request["begin"] + 1)[request["begin"]]
            self.seats[name] = seat = Seat()
            self.group.create_task(seat.play(self.env, task))
            return {"episode": name, **await seat.answers.get()}
        seat = self.seats[request["episode"]]
        seat.texts.put_nowait(request["text"])
        answer = await seat.answers.get()
        if "messages" not in answer:
            del self.seats[request["episode"]]
        return answer

    def load(self, n: int | None) -> list[Any]:
        """The first `n` tasks, or all. A task that cannot be played here is an error each time."""
        self.tasks += itertools.islice(
            self.stream, None if n is None else max(0, n - len(self.tasks))
        )
        wanted = self.tasks[:n]
        for task in wanted[self.checked :]:
            check_task(task)
            self.checked += 1
        return wanted


def check_task(task: Any) -> None:
    """Raise a `ValueError` if a task needs a runtime, a stop that reads requests, or images."""
    judged = [fn for kind in ("reward", "metric") for fn in task.hooks(kind)]
    stops = [hook_boundary(fn, allow_trace=True) for fn in task.hooks("stop")]
    if any("runtime" in inspect.signature(fn).parameters for fn in judged) or {*stops} - {vf.Trace}:
        raise ValueError("there is no runtime, and a @stop can only ask for the trace")
    if not isinstance(task.data.prompt, str):
        for message in task.data.prompt or []:
            text_of(message)


async def serve(config: dict[str, Any], answers: Any) -> None:
    async with asyncio.TaskGroup() as group:
        bridge = functools.cache(lambda: Bridge(config, group))

        async def one(request: dict[str, Any]) -> None:
            try:
                answer = await bridge().answer(request)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(
                json.dumps({**answer, "id": request["id"]}, default=str), file=answers, flush=True
            )

        while line := await asyncio.to_thread(sys.stdin.readline):
            group.create_task(one(json.loads(line)))
        os._exit(0)  # the other end has closed the input


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # text that a task prints must not mix with answers
    asyncio.run(serve(json.loads(sys.argv[1]), pipe))
