"""The tools of an MCP server, over stdio or HTTP, by the official `mcp` package (the extra `mcp`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..llm import ServerFailed, TimedOut, Unreachable
from ..llm.guard import describe
from ..llm.loop import background_loop, run
from ..rollout import Observation, Rollout
from .tools import Tool

if TYPE_CHECKING:
    from mcp import Client


class MCPTools:
    """A connection to an MCP server and the tools it offers; pass it to [`ToolEnvironment`] beside others.

    What a tool reports as its own error is text for the agent. A server that is gone, or too slow, is an outage; the
    next call connects again.

    Args:
        server (`str`, `mcp.StdioServerParameters` or `MCPServer`): An address (streamable HTTP), a command to start, or
            a server in this process.
        timeout (`float`, *optional*, defaults to `60`): Seconds for each call.

    Raises:
        `ImportError`: Without the extra `mcp`.
        [`Unreachable`]: If the server cannot be reached now.
    """

    def __init__(self, server: Any, timeout: float = 60.0):
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ImportError("MCPTools needs the extra mcp: pip install 'agentic-prompting[mcp]'") from error
        self.server, self.timeout = server, timeout
        self._client: asyncio.Future[Client] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.tools: list[Tool] = run(self._list())
        background_loop(self)

    def close(self) -> None:
        """Leave the server; a later call connects again."""
        keeper = self._keeper
        if keeper is not None and not background_loop().is_closed():
            background_loop().call_soon_threadsafe(keeper.cancel)

    async def _list(self) -> list[Tool]:
        client, found, cursor = await self._connected(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += [self._tool(one.name, one.description or "", one.input_schema) for one in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return found

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> Tool:
        async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
            return await self._call(name, arguments)

        function = {"name": name, "description": description, "parameters": parameters}
        return Tool({"type": "function", "function": function}, call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Observation:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        client = await self._connected()
        keeper = self._keeper
        assert keeper is not None
        asked = asyncio.ensure_future(client.call_tool(name, arguments, read_timeout_seconds=self.timeout))
        await asyncio.wait({asked, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():  # the connection ended under the call
            asked.cancel()
            return Observation(error=Unreachable(f"the MCP server went away during a call of {name}"))
        try:
            result = await asked
        except MCPError as error:
            if error.error.code == REQUEST_TIMEOUT:
                return Observation(error=TimedOut(f"the MCP tool {name} took more than {self.timeout:g} s"))
            if error.error.code == CONNECTION_CLOSED:
                self._drop(keeper)
                return Observation(error=Unreachable(f"the MCP server went away during a call of {name}"))
            raise  # the server's word on this call: text for the agent
        except (OSError, RuntimeError) as error:
            self._drop(keeper)
            return Observation(error=ServerFailed(f"the MCP server failed: {type(error).__name__}: {error}"))
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        return Observation(f"Error: {text}" if result.is_error else text)

    def _drop(self, keeper: asyncio.Task[None]) -> None:
        """Give a connection up that is of no more use; the next call opens another."""
        keeper.cancel()
        if self._keeper is keeper:
            self._keeper = None

    async def _connected(self) -> Client:
        """The open connection; one is opened if there is none. Who waits for the same one shares its failure."""
        if self._keeper is None or self._keeper.done():
            self._client = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._client))
        assert self._client is not None
        return await asyncio.shield(self._client)

    async def _keep(self, opened: asyncio.Future[Client]) -> None:
        """Enter and leave in one task, as the package demands."""
        from mcp import Client

        try:
            async with Client(self.server, read_timeout_seconds=self.timeout) as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except BaseException as error:  # a cancellation too: calls that wait for `opened` would hang
            if not opened.done():
                opened.set_exception(Unreachable(f"no MCP server: {describe(error)}"))
            if not isinstance(error, Exception):
                raise
