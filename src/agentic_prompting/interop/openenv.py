"""OpenEnv environments, by the WebSocket protocol of their servers: an episode is a session, an action a tool call.

The protocol is three messages and is spoken here: the package (`openenv` 0.10) needs an older `mcp` than ours.
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
from ..llm.addresses import find_url_secrets, redact_url
from ..llm.loop import run, start
from ..llm.masking import mask_secrets
from ..llm.numbers import finite_float
from ..rollout import Observation, Rollout
from .tools import Tool
from .trl import TRLEnvironment

_ACTION_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # the action's fault: text for the agent
_MOST_BYTES = 64 << 20  # in one message of the server


def shown(observation: Mapping[str, Any]) -> str:
    """The text that the agent reads of an observation: its one field, or all as JSON, without `metadata`."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    (only,) = fields.values() if len(fields) == 1 else (fields,)
    return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)


class OpenEnv(TRLEnvironment):
    """An environment behind an OpenEnv server. The agent acts by calls of one tool, with the fields of an action.

    `reset` gets the columns of the row that it knows, and its observation follows the prompt. Every episode has a
    session, and all run at once: the server's `max_concurrent_envs` must be a batch or more. An action that the server
    refuses is text for the agent. A server that is gone, full, too slow or breaks the protocol, and a `reset` that
    fails, are outages. Redirects are not followed, so that `headers` reach no other server.

    Args:
        url (`str`): The server's address, `http://...`.
        action (`str`, *optional*, defaults to `"act"`): The tool's name.
        show (`Callable`, *optional*): Makes the text that the agent reads of an observation, a dict. Defaults to
            [`shown`].
        timeout (`float`, *optional*, defaults to `60`): Seconds for each answer of the server.
        headers (`dict`, *optional*): Sent when connecting: `{"Authorization": ...}` for a private Space. Their values
            are masked in errors.
        **kwargs: Further arguments of [`ToolEnvironment`].

    Attributes:
        reward (`Callable`): For a trainer's `reward_funcs`: the sum of an episode's rewards.

    Raises:
        [`Unreachable`]: No server answers there, or it redirects.
        [`TimedOut`]: It took longer than `timeout`.
        [`ServerFailed`]: Its schema breaks the protocol.
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

        function = {
            "name": self.action,
            "description": "Acts in the environment.",
            "parameters": self.schema,
        }
        return Tool({"type": "function", "function": function}, call)

    async def step(self, rollout: Rollout) -> Observation | None:  # type: ignore[override]
        observation = await super().step(rollout)
        over = observation.error is None and rollout.row["environments"].done
        return None if over else observation


class _Session:
    """One episode on the server."""

    def __init__(
        self, url: str, show: Callable[..., str], timeout: float, headers: Mapping[str, str] | None
    ):
        self._url, self._show, self._timeout, self._headers = url, show, timeout, headers
        self._lock, self._rewards, self.done = asyncio.Lock(), list[float](), False
        self._http: aiohttp.ClientSession | None = None

    async def _schema(self) -> dict[str, Any]:
        """The JSON schema of an action, without `metadata`, which no agent fills in."""
        get = partial(aiohttp.ClientSession.get, url=f"{self._url}/schema", raise_for_status=True)
        async with self._reaching(), self._client() as http, get(http) as answer:
            body = await answer.text(errors="replace")
        try:
            schema = json.loads(body)["action"]
            fields = {
                name: field for name, field in schema["properties"].items() if name != "metadata"
            }
            return {**schema, "properties": fields}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ServerFailed(
                f"the OpenEnv server's schema has no action: {self._described(error)}"
            ) from None

    async def reset(self, **row: Any) -> str:
        plain = json.loads(json.dumps({**row, "prompt": None}, default=lambda one: None))
        self._http = self._client()
        try:
            async with self._reaching():
                self._socket = await self._http.ws_connect(
                    f"{self._url}/ws", max_msg_size=_MOST_BYTES
                )
            return "\n\n" + await self._request(
                "reset", {name: one for name, one in plain.items() if one is not None}
            )
        except LLMError:
            await self._http.close()
            raise

    async def act(self, action: dict[str, Any]) -> str:
        async with self._lock:  # the calls of one turn are carried out in their order
            if self.done:
                raise RuntimeError("the episode is over")
            return await self._request("step", action)

    async def get_reward(self) -> float:
        if self._http is not None:
            await self._http.close()
        return sum(self._rewards)

    async def _request(self, kind: str, data: dict[str, Any]) -> str:
        """Send a message; return the text of the observation that answers it.

        Raises:
            `ValueError`: The server refuses this action; the text is for the agent.
            [`LLMError`]: Any other failure.
        """
        async with self._reaching():
            await self._socket.send_json({"type": kind, "data": data})
            message = await self._socket.receive()
        if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            raise Unreachable(f"the OpenEnv server ended the session during {kind}")
        try:
            refusal = self._read(json.loads(message.data), kind)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            what = f"the OpenEnv server's answer to {kind} breaks the protocol: {self._described(error)}"
            raise ServerFailed(what) from None
        if refusal is not None:
            raise ValueError(refusal)
        try:
            return self._show(self._observation)
        except Exception as error:
            raise ServerFailed(
                f"show= failed on an observation: {self._described(error)}"
            ) from None

    def _read(self, answer: Any, kind: str) -> str | None:
        """Take over an answer's observation, reward and end; or return why the server refused the action."""
        data = answer["data"]
        if answer["type"] == "error":
            text = f"{data['message']} {data.get('errors', '')}".strip()
            if kind == "step" and data["code"] in _ACTION_ERRORS:
                return self._masked(text)
            raise ServerFailed(
                f"the OpenEnv server failed during {kind}: {self._masked(text)[:300]} ({data['code']})"
            )
        observation, reward, done = data["observation"], data["reward"], data["done"]
        if (
            answer["type"] != "observation"
            or not isinstance(observation, dict)
            or not isinstance(done, bool)
        ):
            raise TypeError("an observation is expected, and whether the episode is done")
        if reward is not None and (isinstance(reward, bool) or finite_float(reward) is None):
            raise TypeError(f"{reward!r} is no reward")
        self._observation, self.done = observation, done
        self._rewards += [] if reward is None else [float(reward)]
        return None

    def _client(self) -> aiohttp.ClientSession:
        """An HTTP client that follows no redirect, a WebSocket's neither."""
        watch = aiohttp.TraceConfig()
        watch.on_request_redirect.append(self._refuse_redirect)
        return aiohttp.ClientSession(headers=self._headers, trace_configs=[watch])

    async def _refuse_redirect(self, session: Any, context: Any, redirect: Any) -> None:
        to = redact_url(redirect.response.headers.get("location", "")) or "another address"
        raise Unreachable(
            f"the OpenEnv server at {redact_url(self._url)} redirects to {to}, which is not followed: if that is the "
            "server you want, pass its address"
        )

    def _masked(self, text: str) -> str:
        return mask_secrets(text, *find_url_secrets(self._url), *(self._headers or {}).values())

    def _described(self, error: Exception) -> str:
        return f"{type(error).__name__}: {self._masked(str(error))[:300]}"

    @asynccontextmanager
    async def _reaching(self) -> AsyncIterator[None]:
        where = redact_url(self._url)
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            raise TimedOut(
                f"the OpenEnv server at {where} took more than {self._timeout:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"no OpenEnv server at {where}: {self._described(error)}") from None

    def __del__(self) -> None:  # an episode that was not scored has an open connection
        if self._http is not None and not self._http.closed:
            with suppress(RuntimeError):  # the loop has ended, and the connection with it
                start(self._http.close())
