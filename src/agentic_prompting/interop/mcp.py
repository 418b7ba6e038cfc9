"""The tools of an MCP server, over stdio or HTTP, by the official `mcp` package (the extra `mcp`)."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..llm import LLMError, ServerFailed, TimedOut, Unreachable
from ..llm.addresses import find_url_secrets
from ..llm.loop import background_loop, run
from ..llm.masking import mask_secrets
from ..rollout import Observation, Rollout
from .tools import Tool

if TYPE_CHECKING:
    from mcp import Client

_MOST_PAGES = 100  # of a server's list of tools
_LOGGERS = (  # httpx2 logs every address, as it is, at level INFO
    "mcp.client.streamable_http", "mcp.client.stdio", "mcp.client.client", "mcp.shared.jsonrpc_dispatcher", "httpx2",
)  # fmt: skip
_SECRET_NAMES = (
    "KEY",
    "TOKEN",
    "SECRET",
    "PASS",
)  # in the names of a command's environment variables


class MCPTools:
    """A connection to an MCP server and the tools it offers; pass it to [`ToolEnvironment`] beside others.

    An error that a tool reports is text for the agent. A server that is gone, too slow, or breaks the protocol is an
    outage; the next call connects again. Secrets are masked in both: keys in the address, and variables of the
    command's environment with names such as `API_KEY`.

    Args:
        server (`str`, `mcp.StdioServerParameters` or `MCPServer`): An address (streamable HTTP), a command to start, or
            a server in this process.
        timeout (`float`, *optional*, defaults to `60`): Seconds for each call, and for the whole list of tools.

    Raises:
        `ImportError`: The extra `mcp` is not installed.
        [`Unreachable`]: No connection, or no list of tools within `timeout`.
        [`ServerFailed`]: The list of tools breaks the protocol or does not end.
    """

    def __init__(self, server: Any, timeout: float = 60.0):
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "MCPTools needs the extra mcp: pip install 'agentic-prompting[mcp]'"
            ) from error

        self.server, self.timeout = server, timeout
        self._client: asyncio.Future[Client] | None = None
        self._keeper: asyncio.Task[None] | None = None
        _hide_in_log(_known_secrets(server))
        try:
            self.tools: list[Tool] = run(self._list_within_timeout())
        except BaseException:
            self.close()
            raise
        background_loop(self)

    def close(self) -> None:
        """Leave the server; a later call connects again."""
        keeper = self._keeper
        if keeper is not None and not background_loop().is_closed():
            background_loop().call_soon_threadsafe(keeper.cancel)

    async def _list_within_timeout(self) -> list[Tool]:
        from mcp import MCPError

        try:
            async with asyncio.timeout(self.timeout):
                return await self._list()
        except TimeoutError:
            raise Unreachable(
                f"the MCP server took more than {self.timeout:g} s to list its tools"
            ) from None
        except ValidationError as error:
            raise ServerFailed(
                f"the MCP server's list of tools breaks the protocol: {self._described(error)}"
            ) from None
        except (MCPError, OSError, RuntimeError) as error:
            raise Unreachable(
                f"the MCP server did not list its tools: {self._described(error)}"
            ) from None

    async def _list(self) -> list[Tool]:
        client, found, cursor = await self._connected(), [], None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += [
                self._tool(one.name, one.description or "", one.input_schema) for one in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ServerFailed(f"the MCP server's list of tools has more than {_MOST_PAGES} pages")

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> Tool:
        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            return await self._call(name, arguments)

        function = {"name": name, "description": description, "parameters": parameters}
        return Tool({"type": "function", "function": function}, call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Observation:
        from mcp import MCPError

        try:
            client = await self._connected()
        except LLMError as error:
            return Observation(error=error)
        keeper = self._keeper
        assert keeper is not None
        answer = asyncio.ensure_future(
            client.call_tool(name, arguments, read_timeout_seconds=self.timeout)
        )
        await asyncio.wait({answer, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():  # the connection ended during the call
            answer.cancel()
            return Observation(
                error=Unreachable(f"the MCP server went away during a call of {name}")
            )
        try:
            result = await answer
        except MCPError as error:
            return self._failed(name, error, keeper)
        except (OSError, RuntimeError, ValidationError) as error:
            self._drop(keeper)
            return Observation(
                error=ServerFailed(f"the MCP server failed: {self._described(error)}")
            )
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        return Observation(f"Error: {self._masked(text)}" if result.is_error else text)

    def _failed(self, name: str, error: Any, keeper: asyncio.Task[None]) -> Observation:
        """The observation for an error of the protocol: an outage, or text for the agent about this one call."""
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        if error.error.code == REQUEST_TIMEOUT:
            return Observation(
                error=TimedOut(f"the MCP tool {name} took more than {self.timeout:g} s")
            )
        if error.error.code == CONNECTION_CLOSED:
            self._drop(keeper)
            return Observation(
                error=Unreachable(f"the MCP server went away during a call of {name}")
            )
        return Observation(f"Error: {self._described(error)}")

    def _masked(self, text: str) -> str:
        return mask_secrets(text, *_known_secrets(self.server))

    def _described(self, error: BaseException) -> str:
        """The error's type and text, masked and short. The package wraps the cause in groups, which say nothing."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return f"{type(error).__name__}: {self._masked(str(error))[:500]}"

    def _drop(self, keeper: asyncio.Task[None]) -> None:
        """Give up a broken connection; the next call opens another."""
        keeper.cancel()
        if self._keeper is keeper:
            self._keeper = None

    async def _connected(self) -> Client:
        """The open connection, opened first if there is none. Callers that wait for the same one share its failure."""
        if self._keeper is None or self._keeper.done():
            self._client = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._client))
            self._keeper.add_done_callback(partial(_fail, self._client))
        assert self._client is not None
        return await asyncio.shield(self._client)

    async def _keep(self, opened: asyncio.Future[Client]) -> None:
        """Enter and leave the connection in one task, as the package demands."""
        from mcp import Client

        try:
            async with Client(self.server, read_timeout_seconds=self.timeout) as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except (
            BaseException
        ) as error:  # a cancellation too: calls that wait for `opened` would hang
            if not opened.done():
                opened.set_exception(Unreachable(f"no MCP server: {self._described(error)}"))
            if not isinstance(error, Exception):
                raise


def _fail(opened: asyncio.Future[Any], keeper: asyncio.Task[None]) -> None:
    """End the wait for a connection whose task has ended without one, as after `close()`."""
    if not opened.done():
        opened.set_exception(
            Unreachable("the connection to the MCP server was closed while it opened")
        )


def _known_secrets(server: Any) -> list[str]:
    """Keys in a server's address, or in the environment of its command."""
    if isinstance(server, str):
        pieces = find_url_secrets(server)
        return [*pieces, *(piece.partition("=")[2] for piece in pieces)]
    variables = getattr(server, "env", None) or {}
    return [
        value
        for name, value in variables.items()
        if any(word in name.upper() for word in _SECRET_NAMES)
    ]


class _MaskedLog(logging.Filter):
    """Masks secrets in what the package logs about its connections, tracebacks included."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = mask_secrets(record.getMessage(), *self.known), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text, record.exc_info = mask_secrets(record.exc_text, *self.known), None
        return True


_masked_log = _MaskedLog()


def _hide_in_log(secrets: list[str]) -> None:
    _masked_log.known.update(secrets)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_masked_log)  # adding it again changes nothing
