"""[`OpenEnv`]: environments on OpenEnv servers. An episode is a session, an action a tool call.

The servers' WebSocket protocol has three messages and is implemented here, because the package
(`openenv` 0.10) needs an older `mcp` than ours.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import aiohttp

from ..llm import LLMError, ServerFailed, TimedOut, Unreachable
from ..llm.addresses import find_url_secrets, redact_url
from ..llm.loop import run, start
from ..llm.masking import mask_secrets
from ..llm.numbers import finite_float
from ..rollout import Observation, Rollout
from .tools import Tool
from .trl import TRLEnvironment

# A JSON object of the server.
JSONObject: TypeAlias = Mapping[str, Any]

# The error codes of an action that the server refuses. The agent reads the refusal.
_ACTION_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_MAX_MESSAGE_BYTES = 64 << 20


def render_observation(observation: JSONObject) -> str:
    """Return the text that the agent reads of an observation, without its `metadata`.

    Args:
        observation (`dict`): The observation. If it has one field, the text is the field's value;
            otherwise all fields as JSON.
    """
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    content: object = fields
    if len(fields) == 1:
        content = next(iter(fields.values()))
    if isinstance(content, str):
        return content
    return json.dumps(content, ensure_ascii=False)


class OpenEnv(TRLEnvironment):
    """An environment on an OpenEnv server.

    The agent acts by calls of one tool, whose arguments are the fields of an action.

    `reset` gets the columns of the row that the server knows, and its observation follows the
    prompt. Every episode has a session, and all run at the same time: the server's
    `max_concurrent_envs` must be at least a batch. An action that the server refuses is text for
    the agent. A server that is gone, full, too slow or breaks the protocol, and a `reset` that
    fails, are outages. Redirects are not followed, so `headers` reach no other server.

    Args:
        url (`str`): The server's address, `http://...`.
        action (`str`, *optional*, defaults to `"act"`): The name of the tool.
        render (`Callable`, *optional*): Converts an observation, a dict, to the text that the agent
            reads. Defaults to [`render_observation`].
        timeout (`float`, *optional*, defaults to `60`): The limit of each answer of the server, in
            seconds.
        headers (`dict`, *optional*): Sent when connecting, for example `{"Authorization": ...}` for
            a private Space. Their values are masked in errors.
        **kwargs: Further arguments of [`ToolEnvironment`].

    Attributes:
        reward (`Callable`): For a trainer's `reward_funcs`: the sum of an episode's rewards.

    Raises:
        [`Unreachable`]: There is no server, or it redirects.
        [`TimedOut`]: It took longer than `timeout`.
        [`ServerFailed`]: Its schema breaks the protocol.
    """

    def __init__(
        self,
        url: str,
        action: str = "act",
        render: Callable[[JSONObject], str] = render_observation,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
        **kwargs: Any,
    ):
        def create_session() -> OpenEnvSession:
            return OpenEnvSession(url.rstrip("/"), render, timeout, headers)

        # The schema shows early whether there is a server.
        self.action = action
        self.schema = run(create_session()._fetch_action_schema())
        super().__init__(create_session, **kwargs)
        assert self.reward is not None
        # Otherwise the reward would have the name of the session's class.
        self.reward.__name__ = "OpenEnv"

    def _create_tool(self, instance: OpenEnvSession, name: str) -> Tool:
        """Create the tool for `act`, with the server's schema of an action."""

        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            return Observation(await self._session_of(rollout).act(arguments))

        return Tool.create(self.action, "Acts in the environment.", self.schema, call)

    async def step(self, rollout: Rollout) -> Observation | None:  # type: ignore[override]
        observation = await super().step(rollout)
        # The server says that the episode is over.
        if observation.error is None and self._session_of(rollout).done:
            return None
        return observation

    @staticmethod
    def _session_of(rollout: Rollout) -> OpenEnvSession:
        """The session of an episode, which the base class keeps under the key that TRL uses."""
        session: OpenEnvSession = rollout.row["environments"]
        return session


class OpenEnvSession:
    """One episode on the server: an environment class in TRL's form, whose only tool is `act`.

    Args:
        url (`str`): The server's address, without a slash at the end.
        render (`Callable`): Converts an observation to text.
        timeout (`float`): The limit of each answer of the server, in seconds.
        headers (`dict`, *optional*): Sent when connecting.
    """

    def __init__(
        self,
        url: str,
        render: Callable[[JSONObject], str],
        timeout: float,
        headers: Mapping[str, str] | None,
    ):
        self.done = False
        self._url = url
        self._render = render
        self._timeout = timeout
        self._headers = headers
        self._lock = asyncio.Lock()
        self._rewards: list[float] = []
        self._http: aiohttp.ClientSession | None = None

    async def reset(self, **row: Any) -> str:
        # Send the columns that JSON can hold, without the prompt.
        columns = json.loads(json.dumps({**row, "prompt": None}, default=lambda value: None))
        data = {name: value for name, value in columns.items() if value is not None}
        # Open the session, which lasts for the whole episode.
        self._http = self._create_client()
        try:
            async with self._connection_errors():
                self._socket = await self._http.ws_connect(
                    f"{self._url}/ws", max_msg_size=_MAX_MESSAGE_BYTES
                )
            return "\n\n" + await self._request("reset", data)
        except LLMError:
            # An episode that has not started leaves no connection open.
            await self._http.close()
            raise

    async def act(self, action: dict[str, Any]) -> str:
        # The calls of one turn start together, but are carried out in their order.
        async with self._lock:
            if self.done:
                raise RuntimeError("the episode is over")
            return await self._request("step", action)

    async def get_reward(self) -> float:
        # The reward is read after the last turn, so the session can end.
        if self._http is not None:
            await self._http.close()
        return sum(self._rewards)

    # Public methods are tools, so the others start with an underscore.

    async def _fetch_action_schema(self) -> dict[str, Any]:
        """Return the JSON schema of an action, without `metadata`, which no agent fills in."""
        async with (
            self._connection_errors(),
            self._create_client() as http,
            http.get(f"{self._url}/schema", raise_for_status=True) as response,
        ):
            body = await response.text(errors="replace")
        # Read the schema of an action, in whatever form the server sends it.
        try:
            schema = json.loads(body)["action"]
            properties = dict(schema["properties"])
            properties.pop("metadata", None)
            return {**schema, "properties": properties}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ServerFailed(
                f"the OpenEnv server's schema has no action: {self._describe(error)}"
            ) from None

    async def _request(self, message_type: str, data: JSONObject) -> str:
        """Send a message, and return the text of the observation that answers it.

        Raises:
            `ValueError`: The server refuses this action. The message is for the agent.
            [`LLMError`]: Any other failure.
        """
        # Send the message and wait for its answer.
        async with self._connection_errors():
            await self._socket.send_json({"type": message_type, "data": data})
            message = await self._socket.receive()
        if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            raise Unreachable(f"the OpenEnv server ended the session during {message_type}")

        # Read the answer: a refusal for the agent, or an observation.
        try:
            answer = json.loads(message.data)
            refusal = self._find_refusal(answer, message_type)
            observation = None if refusal else self._read_observation(answer)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ServerFailed(
                f"the OpenEnv server's answer to {message_type} breaks the protocol: "
                f"{self._describe(error)}"
            ) from None
        if observation is None:
            raise ValueError(refusal)
        try:
            return self._render(observation)
        except Exception as error:  # the user's code
            raise ServerFailed(
                f"render= failed on an observation: {self._describe(error)}"
            ) from None

    def _find_refusal(self, answer: JSONObject, message_type: str) -> str:
        """Return why the server refused the action, or an empty text if it did not.

        Raises:
            [`ServerFailed`]: The answer is an error that is not the agent's fault.
        """
        if answer["type"] != "error":
            return ""
        data = answer["data"]
        text = self._mask(f"{data['message']} {data.get('errors', '')}".strip())
        # Only a step can be the agent's mistake.
        if message_type == "step" and data["code"] in _ACTION_ERRORS:
            return text or str(data["code"])
        raise ServerFailed(
            f"the OpenEnv server failed during {message_type}: {text[:300]} ({data['code']})"
        )

    def _read_observation(self, answer: JSONObject) -> JSONObject:
        """Return the observation of an answer, and store its reward and whether it is the last."""
        data = answer["data"]
        observation = data["observation"]
        reward = data["reward"]
        done = data["done"]
        # The server is not trusted to follow the protocol.
        is_observation = answer["type"] == "observation" and isinstance(observation, dict)
        if not is_observation or not isinstance(done, bool):
            raise TypeError("an observation is expected, and whether the episode is done")
        # A reward is a finite number; `None` means that the step has none.
        if reward is not None:
            if isinstance(reward, bool) or finite_float(reward) is None:
                raise TypeError(f"{reward!r} is no reward")
            self._rewards.append(float(reward))
        self.done = done
        return observation

    def _create_client(self) -> aiohttp.ClientSession:
        """Return an HTTP client that follows no redirect, not even a WebSocket's."""
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(self._refuse_redirect)
        return aiohttp.ClientSession(headers=self._headers, trace_configs=[trace])

    async def _refuse_redirect(
        self,
        session: aiohttp.ClientSession,
        context: object,
        redirect: aiohttp.TraceRequestRedirectParams,
    ) -> None:
        location = redirect.response.headers.get("location", "")
        target = redact_url(location) or "another address"
        raise Unreachable(
            f"the OpenEnv server at {redact_url(self._url)} redirects to {target}, which is not "
            "followed: if that is the server you want, pass its address"
        )

    def _mask(self, text: str) -> str:
        header_values = (self._headers or {}).values()
        return mask_secrets(text, *find_url_secrets(self._url), *header_values)

    def _describe(self, error: Exception) -> str:
        return f"{type(error).__name__}: {self._mask(str(error))[:300]}"

    @asynccontextmanager
    async def _connection_errors(self) -> AsyncIterator[None]:
        """The context of a request: limits its time, and raises the [`LLMError`] for a failure."""
        address = redact_url(self._url)
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            raise TimedOut(
                f"the OpenEnv server at {address} took more than {self._timeout:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"no OpenEnv server at {address}: {self._describe(error)}") from None

    def __del__(self) -> None:
        # An episode that was not scored has an open connection.
        if self._http is not None and not self._http.closed:
            # If the loop has ended, so has the connection.
            with suppress(RuntimeError):
                start(self._http.close())
