"""OpenEnv environments, by the WebSocket protocol of their servers: an episode is a session, an action a tool call.

The protocol is spoken here, in three messages: the package (`openenv` 0.10) wants an older `mcp` than ours beside it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp

from ..llm import LLMError, ServerFailed, TimedOut, Unreachable
from ..llm.loop import run, start
from ..rollout import Observation, Rollout
from .tools import Tool
from .trl import TRLEnvironment

_OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # what a server says of an action that cannot be


def shown(observation: Mapping[str, Any]) -> str:
    """What the agent reads of an observation: its one field, or all of them as JSON; metadata left out."""
    said = {name: value for name, value in observation.items() if name != "metadata"}
    (only,) = said.values() if len(said) == 1 else (said,)
    return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)


class OpenEnv(TRLEnvironment):
    """An environment behind an OpenEnv server. The agent acts by calls of one tool, with the action's own fields.

    A row's columns are what `reset` gets (those that it takes); what it observes follows the prompt. Every episode has
    a session, all at once: the server's `max_concurrent_envs` must be a batch or more. An action that the server
    refuses is text for the agent. A server that is gone, full or too slow, and a `reset` that fails, are outages.

    Args:
        url (`str`): Of the server, `http://...`.
        action (`str`, *optional*, defaults to `"act"`): The tool's name.
        show (`Callable`, *optional*): What the agent reads of an observation, a dict. Defaults to [`shown`].
        timeout (`float`, *optional*, defaults to `60`): Seconds for each answer of the server.
        headers (`dict`, *optional*): Sent when connecting: `{"Authorization": ...}` for a private Space.
        **kwargs: Of [`ToolEnvironment`].

    Attributes:
        reward (`Callable`): For a trainer's `reward_funcs`: the sum of an episode's rewards.

    Raises:
        [`Unreachable`]: If there is no such server now.
    """

    def __init__(
        self,
        url: str,
        action: str = "act",
        show: Callable[[Mapping[str, Any]], str] = shown,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
        **kwargs: Any,
    ):
        self.action, connect = action, partial(_Session, url.rstrip("/"), show, timeout, headers)
        self.schema = run(connect()._schema())
        super().__init__(connect, **kwargs)
        assert self.reward is not None
        self.reward.__name__ = "OpenEnv"

    def _tool(self, instance: Any, name: str) -> Tool:  # type: ignore[override]
        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            return Observation(await rollout.row["environments"].act(arguments))

        function = {"name": self.action, "description": "Acts in the environment.", "parameters": self.schema}
        return Tool({"type": "function", "function": function}, call)

    async def step(self, rollout: Rollout) -> Observation | None:  # type: ignore[override]
        observation = await super().step(rollout)
        over = observation.error is None and rollout.row["environments"].done
        return None if over else observation


class _Session:
    """One episode on the server."""

    def __init__(self, url: str, show: Callable[..., str], timeout: float, headers: Mapping[str, str] | None):
        self._url, self._show, self._timeout, self._headers = url, show, timeout, headers
        self._lock, self._rewards, self.done = asyncio.Lock(), list[float](), False
        self._http: aiohttp.ClientSession | None = None

    async def _schema(self) -> dict[str, Any]:
        """Of an action, without what no agent has to say."""
        get = partial(aiohttp.request, "GET", f"{self._url}/schema", headers=self._headers, raise_for_status=True)
        async with self._reaching(), get() as answer:
            found = (await answer.json())["action"]
        found["properties"].pop("metadata", None)
        return found

    async def reset(self, **row: Any) -> str:
        plain = json.loads(json.dumps({**row, "prompt": None}, default=lambda one: None))
        self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            async with self._reaching():
                self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=0)
            return "\n\n" + await self._say("reset", {name: one for name, one in plain.items() if one is not None})
        except LLMError:
            await self._http.close()
            raise

    async def act(self, action: dict[str, Any]) -> str:
        async with self._lock:  # calls of one turn come in their order
            if self.done:
                raise RuntimeError("the episode is over")
            return await self._say("step", action)

    async def get_reward(self) -> float:
        if self._http is not None:
            await self._http.close()
        return sum(self._rewards)

    async def _say(self, kind: str, data: dict[str, Any]) -> str:
        async with self._reaching():
            await self._socket.send_json({"type": kind, "data": data})
            message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise Unreachable(f"the OpenEnv server ended the session during {kind}")
        answer = json.loads(message.data)
        said = answer["data"]
        if answer["type"] == "error":
            if kind == "step" and said["code"] in _OF_THE_ACTION:
                raise ValueError(f"{said['message']} {said.get('errors', '')}".strip())
            raise ServerFailed(f"the OpenEnv server failed during {kind}: {said['code']}: {said['message']}"[:300])
        self.done = said["done"]
        self._rewards += [] if said["reward"] is None else [float(said["reward"])]
        return self._show(said["observation"])

    @asynccontextmanager
    async def _reaching(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            raise TimedOut(f"the OpenEnv server at {self._url} took more than {self._timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"no OpenEnv server at {self._url}: {type(error).__name__}: {error}"[:300]) from None

    def __del__(self) -> None:  # of an episode that nobody scored
        if self._http is not None and not self._http.closed:
            with suppress(RuntimeError):  # the loop is gone, and with it the connection
                start(self._http.close())
