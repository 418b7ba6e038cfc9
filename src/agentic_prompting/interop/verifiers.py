"""Task sets of `verifiers` (0.4), out of process: the package wants other versions of `openai` and `mcp` than ours.

Another interpreter, with `verifiers` and the task sets in it, runs `verifiers_bridge.py`: rows, what the agent is told
between its turns, and rewards come from there; sampling stays here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..llm import LLMError, ServerFailed, TimedOut, Unreachable
from ..llm.loop import background_loop, run
from ..rollout import Environment, Observation, Rollout, gather
from .user import Dialogue

_BRIDGE = Path(__file__).with_name("verifiers_bridge.py")


class VerifiersTasks(Environment):
    """A task set as rows, environment and reward.

    What the agent writes is its reply, thoughts left out; what the environment says to it is the next user message.
    With tasks of one reply, set `max_turns=1`. Multi-agent environments, tools and containers are refused.

    Args:
        taskset (`str`): The task set's id, as `--env.taskset.id`.
        python (`str` or `Path`): The interpreter that has it.
        timeout (`float`, *optional*, defaults to `300`): Seconds for each answer.
        **config: Further fields of the environment's config: `taskset={"num_tasks": 100}`, `id="..."`.

    Raises:
        [`ServerFailed`]: There is no such task set, or it cannot be played here; the message says why.
    """

    grammar = Dialogue()

    def __init__(self, taskset: str, python: str | Path, timeout: float = 300.0, **config: Any):
        self.config = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
        self.python, self.timeout = str(python), timeout
        self._bridge: asyncio.subprocess.Process | None = None
        self._asked, self._waiting = itertools.count(), dict[int, asyncio.Future[dict[str, Any]]]()
        self._lock = asyncio.Lock()
        background_loop(self)

    def rows(self, n: int | None = None) -> list[dict[str, Any]]:
        """The first `n` tasks, or all, as a dataset's rows."""
        return run(self._ask(rows=n))["rows"]

    def close(self) -> None:
        """End the other process; a later call starts it again."""
        if self._bridge is not None and self._bridge.returncode is None:
            self._bridge.kill()

    async def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with the first messages of an episode of its task. Never raises."""
        try:
            begun = await self._ask(begin=row["task"])
        except LLMError as error:
            return {**row, "environments": error}
        return {**row, "prompt": begun["messages"], "environments": {"episode": begun["episode"], "heard": 0}}

    async def step(self, rollout: Rollout) -> Observation | None:
        """What the task's environment says to the last turn; `None` if it was the last."""
        if isinstance(episode := rollout.row["environments"], LLMError):
            return Observation(error=episode)
        try:
            told = await self._ask(episode=episode["episode"], text=rollout.turns[-1].request or "")
        except LLMError as error:
            return Observation(error=error)
        episode["heard"] += 1
        if "reward" in told:
            episode.update(told)
            return None
        return Observation("\n\n".join(str(message["content"]) for message in told["messages"]))

    async def reward(self, rollout: Sequence[Rollout], **columns: Any) -> list[float | None]:
        """For a trainer's `reward_funcs`: the task's own; `None` where it could not be had."""
        return await gather(map(self._reward, rollout))

    async def _reward(self, rollout: Rollout) -> float | None:
        episode = rollout.row["environments"]
        if rollout.error is not None or isinstance(episode, LLMError):
            return None
        try:
            if len(rollout.turns) > episode["heard"]:  # the turn that used up the limit
                await self.step(rollout)
            if "reward" not in episode:
                episode.update(await self._ask(episode=episode["episode"], text=None))
        except LLMError:
            return None
        return episode["reward"]

    async def _ask(self, **request: Any) -> dict[str, Any]:
        bridge, number = await self._running(), next(self._asked)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            bridge.stdin.write(json.dumps({**request, "id": number}).encode() + b"\n")
            answer = await asyncio.wait_for(answered, self.timeout)
        except TimeoutError:
            raise TimedOut(f"verifiers took more than {self.timeout:g} s") from None
        except OSError as error:
            raise Unreachable(f"the process of verifiers has ended: {error}") from None
        finally:
            del self._waiting[number]
        if "error" in answer:
            raise ServerFailed(f"verifiers: {answer['error']}"[:500])
        return answer

    async def _running(self) -> Any:
        """The other process; it is started if there is none."""
        async with self._lock:
            if self._bridge is None or self._bridge.returncode is not None:
                pipe = asyncio.subprocess.PIPE
                command = (self.python, "-P", str(_BRIDGE), json.dumps(self.config))
                self._bridge = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=2**28)
                self._reader = asyncio.create_task(self._read(self._bridge))
            return self._bridge

    async def _read(self, bridge: asyncio.subprocess.Process) -> None:
        assert bridge.stdout is not None
        while line := await bridge.stdout.readline():
            answer = json.loads(line)
            if waiting := self._waiting.get(answer["id"]):
                waiting.set_result(answer)
        code = await bridge.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Unreachable(f"the process of verifiers ended with {code}"))
