"""[`MCPTools`]: the tools of an MCP server, over stdio or HTTP.

Uses the official `mcp` package (the extra `mcp`).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ValidationError

from ..llm import LLMError, ServerFailed, TimedOut, Unreachable
from ..llm.addresses import find_url_secrets
from ..llm.loop import background_loop, run
from ..llm.masking import mask_secrets
from ..rollout import Observation, Rollout
from .tools import Tool

if TYPE_CHECKING:
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.server import MCPServer

    ServerAddress: TypeAlias = str | StdioServerParameters | MCPServer[Any]

_MAX_TOOL_PAGES = 100

# The loggers of the package and of its HTTP client, which logs every address as it is.
_LOGGERS = (
    "mcp.client.streamable_http",
    "mcp.client.stdio",
    "mcp.client.client",
    "mcp.shared.jsonrpc_dispatcher",
    "httpx2",
)

# Environment variables of a command with such names hold secrets.
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS")


class MCPTools:
    """A connection to an MCP server, and the tools it offers. Pass it to [`ToolEnvironment`].

    An error that a tool reports is text for the agent. A server that is gone, too slow, or breaks
    the protocol is an outage; the next call connects again. Secrets are masked in both: keys in the
    address, and variables of the command's environment with names such as `API_KEY`.

    Args:
        server (`str`, `mcp.StdioServerParameters` or `MCPServer`): An address (streamable HTTP), a
            command to start, or a server in this process.
        timeout (`float`, *optional*, defaults to `60`): The limit of each call, and of listing all
            tools, in seconds.

    Raises:
        `ImportError`: The extra `mcp` is not installed.
        [`Unreachable`]: There is no connection, or no list of tools within `timeout`.
        [`ServerFailed`]: The list of tools breaks the protocol or does not end.
    """

    def __init__(self, server: ServerAddress, timeout: float = 60.0):
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "MCPTools needs the extra mcp: pip install 'agentic-prompting[mcp]'"
            ) from error

        # The connection belongs to the background loop and is opened by the first call.
        self.server = server
        self.timeout = timeout
        self._client: asyncio.Future[Client] | None = None
        # The task that keeps the connection open.
        self._keeper: asyncio.Task[None] | None = None
        # The package must not log secrets, even while it connects.
        _mask_in_logs(_find_secrets(server))
        try:
            self.tools: list[Tool] = run(self._list_tools_in_time())
        except BaseException:
            self.close()
            raise
        background_loop(self)

    def close(self) -> None:
        """Leave the server. A later call connects again."""
        keeper = self._keeper
        if keeper is not None and not background_loop().is_closed():
            background_loop().call_soon_threadsafe(keeper.cancel)

    async def _list_tools_in_time(self) -> list[Tool]:
        from mcp import MCPError

        try:
            async with asyncio.timeout(self.timeout):
                return await self._list_tools()
        except TimeoutError:
            raise Unreachable(
                f"the MCP server took more than {self.timeout:g} s to list its tools"
            ) from None
        except ValidationError as error:
            raise ServerFailed(
                f"the MCP server's list of tools breaks the protocol: {self._describe(error)}"
            ) from None
        except (MCPError, OSError, RuntimeError) as error:
            raise Unreachable(
                f"the MCP server did not list its tools: {self._describe(error)}"
            ) from None

    async def _list_tools(self) -> list[Tool]:
        # Connect, and read the list page by page.
        client = await self._connect()
        tools = []
        cursor = None
        # A server sends its list in pages; a broken one never ends.
        for _ in range(_MAX_TOOL_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                tools.append(
                    self._create_tool(tool.name, tool.description or "", tool.input_schema)
                )
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise ServerFailed(f"the MCP server's list of tools has more than {_MAX_TOOL_PAGES} pages")

    def _create_tool(self, name: str, description: str, parameters: dict[str, Any]) -> Tool:
        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            return await self._call(name, arguments)

        return Tool.create(name, description, parameters, call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Observation:
        """Call a tool. An outage is the observation's error."""
        from mcp import MCPError

        # Connect again if the connection is gone.
        try:
            client = await self._connect()
        except LLMError as error:
            return Observation(error=error)

        # Wait for the result, or for the end of the connection.
        keeper = self._keeper
        assert keeper is not None
        call = asyncio.ensure_future(
            client.call_tool(name, arguments, read_timeout_seconds=self.timeout)
        )
        await asyncio.wait({call, keeper}, return_when=asyncio.FIRST_COMPLETED)
        # The connection ended before the call did.
        if not call.done():
            call.cancel()
            return self._connection_lost(name)
        try:
            result = await call
        except MCPError as error:
            return self._read_error(name, error, keeper)
        except (OSError, RuntimeError, ValidationError) as error:
            self._drop_connection(keeper)
            failure = ServerFailed(f"the MCP server failed: {self._describe(error)}")
            return Observation(error=failure)

        # Only text can be shown to the agent; of other parts it gets the type.
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            return Observation(f"Error: {self._mask(text)}")
        return Observation(text)

    def _read_error(self, name: str, error: MCPError, keeper: asyncio.Task[None]) -> Observation:
        """Return the observation for an error of the protocol: an outage, or text for the agent."""
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        # Too slow, or gone: an outage. The agent reads any other error.
        if error.error.code == REQUEST_TIMEOUT:
            failure = TimedOut(f"the MCP tool {name} took more than {self.timeout:g} s")
            return Observation(error=failure)
        if error.error.code == CONNECTION_CLOSED:
            self._drop_connection(keeper)
            return self._connection_lost(name)
        return Observation(f"Error: {self._describe(error)}")

    def _connection_lost(self, name: str) -> Observation:
        return Observation(error=Unreachable(f"the MCP server went away during a call of {name}"))

    def _mask(self, text: str) -> str:
        return mask_secrets(text, *_find_secrets(self.server))

    def _describe(self, error: BaseException) -> str:
        """Return the error's type and text, masked and short."""
        # The package wraps errors in groups, which say nothing about the cause.
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return f"{type(error).__name__}: {self._mask(str(error))[:500]}"

    async def _connect(self) -> Client:
        """Return the open connection, opened first if there is none.

        Callers that wait for the same connection share its failure.
        """
        # The connection is open as long as its task runs.
        if self._keeper is None or self._keeper.done():
            self._client = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep_connection(self._client))
            self._keeper.add_done_callback(partial(_fail_if_not_open, self._client))
        assert self._client is not None
        return await asyncio.shield(self._client)

    async def _keep_connection(self, opened: asyncio.Future[Client]) -> None:
        """Enter and leave the connection in one task, as the package requires."""
        from mcp import Client

        try:
            async with Client(self.server, read_timeout_seconds=self.timeout) as client:
                opened.set_result(client)
                # Keep the connection open until this task is cancelled.
                await asyncio.Event().wait()
        except BaseException as error:
            # After a cancellation, too, the calls that wait for `opened` must not hang.
            if not opened.done():
                opened.set_exception(Unreachable(f"no MCP server: {self._describe(error)}"))
            if not isinstance(error, Exception):
                raise

    def _drop_connection(self, keeper: asyncio.Task[None]) -> None:
        """Leave a broken connection. The next call opens another."""
        keeper.cancel()
        if self._keeper is keeper:
            self._keeper = None


def _fail_if_not_open(opened: asyncio.Future[Client], keeper: asyncio.Task[None]) -> None:
    """End the wait for a connection whose task ended before it was open, as after `close()`."""
    if not opened.done():
        opened.set_exception(
            Unreachable("the connection to the MCP server was closed while it opened")
        )


def _find_secrets(server: ServerAddress) -> list[str]:
    """Return the keys in a server's address, or in the environment of its command."""
    if isinstance(server, str):
        pieces = find_url_secrets(server)
        # In `key=value` the value alone is a secret as well.
        return [*pieces, *(piece.partition("=")[2] for piece in pieces)]
    # Commands get their keys in environment variables.
    variables = getattr(server, "env", None) or {}
    secrets = []
    for name, value in variables.items():
        if any(word in name.upper() for word in _SECRET_WORDS):
            secrets.append(value)
    return secrets


class _SecretFilter(logging.Filter):
    """Masks secrets in what the package logs about its connections, including tracebacks."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        # Fill in the arguments, so that secrets in them are masked as well.
        record.msg = mask_secrets(record.getMessage(), *self.secrets)
        record.args = ()
        # Format a traceback here, before any handler prints it unmasked.
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = mask_secrets(record.exc_text, *self.secrets)
            record.exc_info = None
        return True


_secret_filter = _SecretFilter()


def _mask_in_logs(secrets: list[str]) -> None:
    _secret_filter.secrets.update(secrets)
    for name in _LOGGERS:
        # Adding the same filter again changes nothing.
        logging.getLogger(name).addFilter(_secret_filter)
