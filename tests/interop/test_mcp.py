"""The tools of an MCP server."""

import asyncio
import sys
import threading

import pytest

from agentic_prompting.interop import (
    MCPTools,
    ToolEnvironment,
)
from agentic_prompting.llm import (
    Unreachable,
)
from support.tool_episodes import call, currency, step

SERVER = """
import os
from mcp.server.mcpserver import MCPServer
server = MCPServer("capitals")
@server.tool()
def capital(country: str) -> str:
    "The capital of a country."
    if country == "die":
        os._exit(1)
    return {"Kenya": "Nairobi"}[country]
server.run("stdio")
"""


def stdio() -> MCPTools:
    mcp = pytest.importorskip("mcp", reason="needs the extra mcp")
    return MCPTools(
        mcp.StdioServerParameters(
            command=sys.executable, args=["-c", SERVER], env={"PYTHONPATH": ":".join(sys.path)}
        )
    )


def test_the_tools_of_an_mcp_server():
    tools = stdio()
    environment = ToolEnvironment([tools, currency])
    assert set(environment.tools) == {"capital", "currency"}
    observation = step(
        environment, call("capital", country="Kenya") + call("currency", country="Kenya")
    )
    assert observation.error is None and observation.text.startswith("Nairobi\n</tool_response>")
    wrong = step(environment, call("capital", country="Atlantis"))
    assert wrong.error is None and wrong.text.startswith("Error: ")
    tools.close()


def test_an_mcp_server_over_http_answers_the_calls_of_a_turn_side_by_side():
    pytest.importorskip("mcp", reason="needs the extra mcp")
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("meetings")
    both = asyncio.Barrier(2)

    @server.tool()
    async def meet(who: str) -> str:
        "Waits for the other."
        await asyncio.wait_for(both.wait(), 60)
        return who

    http = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), port=0, log_level="error"))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not http.started:
        threading.Event().wait(0.05)
    tools = MCPTools(f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/mcp")
    observation = step(ToolEnvironment([tools]), call("meet", who="a") + call("meet", who="b"))
    assert observation.error is None and observation.text.split()[::3] == ["a", "b"]
    tools.close()
    http.should_exit = True
    thread.join(30)


def test_an_mcp_server_that_dies_is_an_outage_and_is_started_again():
    tools = stdio()
    environment = ToolEnvironment([tools])
    assert isinstance(step(environment, call("capital", country="die")).error, Unreachable)
    assert step(environment, call("capital", country="Kenya")).text == "Nairobi"
    tools.close()


def test_an_mcp_server_that_is_not_there():
    pytest.importorskip("mcp", reason="needs the extra mcp")
    with pytest.raises(Unreachable, match="no MCP server"):
        MCPTools("http://127.0.0.1:9/mcp")
