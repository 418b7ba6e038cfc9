"""Servers and tools that misbehave: what they do wrong is an outage, ends within a bound, and shows
no secret.
"""

import asyncio
import http.server
import json
import logging
import sys
import threading

import pytest
from aiohttp import web

from agentic_prompting.interop import MCPTools, OpenEnv, ToolEnvironment, TRLEnvironment
from agentic_prompting.llm import LLMError, ServerFailed, Unreachable
from agentic_prompting.llm.loop import run, start
from agentic_prompting.llm.masking import mask_secrets
from agentic_prompting.rollout import Rollout, Sample, observe

SECRETS = {
    "a password in an address": ("postgres://reader:hunter22@db.example.com/rows", "hunter22"),
    "a key in a query": (
        "GET https://api.example.com/v1/find?q=kenya&api_key=abc123def failed",
        "abc123def",
    ),
    "a token in a query": ("https://api.example.com/find?access_token=abc123def#top", "abc123def"),
    "a key of OpenAI's form": ("wrong key sk-proj-abc123def456", "abc123def"),
    "a bearer token": ("sent Authorization: Bearer abc123def", "abc123def"),
    "a header": ("{'x-api-key': 'abc123def'}", "abc123def"),
    "a basic login": ("authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpw"),
    "a long text before it": ("x" * 470 + " https://user:hunter22@db.example.com", "hunter"),
}


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(environment, text: str, row: dict | None = None):
    rollout = Rollout([1], row=row or {}, seed=7)
    rollout.add_turn(Sample([1]), environment.grammar.parse(text))
    return run(environment.step(rollout))


# --- secrets --------------------------------------------------------------------------------------


@pytest.fixture(params=SECRETS, ids=str)
def leaking(request):
    """A text with a secret, and the secret."""
    return SECRETS[request.param]


def test_a_masked_text_has_no_secret(leaking):
    text, secret = leaking
    masked = mask_secrets(text)
    assert secret not in masked and "[key]" in masked and mask_secrets(masked) == masked


def test_masking_keeps_what_helps():
    text = (
        "GET https://api.example.com/v1/find?q=kenya&key=abc123def (404), no page 'kenya' "
        "(user@example.com)"
    )
    assert mask_secrets(text) == text.replace("abc123def", "[key]")
    assert mask_secrets(
        "the key none is in the log, and so is verysecret", "none", "verysecret", None
    ) == ("the key none is in the log, and so is [key]")


def failing_tool(error: Exception):
    def broken() -> str:
        """Fails."""
        raise error

    return ToolEnvironment([broken])


def test_a_tools_error_shows_the_agent_no_secret(leaking):
    observation = step(failing_tool(ValueError(leaking[0])), call("broken"))
    assert observation.error is None and "Error: ValueError" in observation.text
    assert leaking[1] not in observation.text


@pytest.mark.parametrize("kind", [ConnectionError, ServerFailed])
def test_a_tools_outage_shows_the_log_no_secret(leaking, kind):
    error = step(failing_tool(kind(leaking[0])), call("broken")).error
    assert leaking[1] not in str(error) and leaking[1] not in repr(error)


def test_an_environments_outage_shows_the_log_no_secret(leaking):
    class Fails:
        def step(self, rollout):
            raise RuntimeError(leaking[0])

    class FailsToReset:
        def reset(self, **row):
            raise RuntimeError(leaking[0])

    observation = run(observe(Fails(), Rollout([1])))
    row = run(
        TRLEnvironment(FailsToReset, [len_of]).reset(
            {"prompt": [{"role": "user", "content": "Play."}]}
        )
    )
    for error in (observation.error, row["environments"]):
        assert isinstance(error, ServerFailed)
        assert leaking[1] not in str(error) and leaking[1] not in repr(error)


def len_of(text: str) -> int:
    """Counts.

    Args:
        text: Any.
    """
    return len(text)


# --- MCP ------------------------------------------------------------------------------------------

# Speaks MCP by hand: a server of the package's own does not misbehave like this.
MCP_BY_HAND = """
import json, sys, time
how, page = sys.argv[1], 0
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "by hand", "version": "1"}}
    elif asked["method"] == "tools/list":
        page += 1
        if how == "hang":
            continue
        if how == "slow":
            time.sleep(0.2)
        schema = {"type": "object", "properties": {}}
        tools = [{"name": f"tool_{page}", "inputSchema": schema}]
        result = {"tools": tools, "nextCursor": str(page)}
        if how == "garbage":
            result = {"tools": 3}
        if how == "call":
            result = {"tools": [{"name": "leak", "inputSchema": schema}]}
    elif asked["method"] == "tools/call":
        result = {"content": 3}
    else:
        error = {"code": -32601, "message": "no such method"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def by_hand(how: str, timeout: float = 60.0) -> MCPTools:
    mcp = pytest.importorskip("mcp", reason="needs the extra mcp")
    command = mcp.StdioServerParameters(command=sys.executable, args=["-c", MCP_BY_HAND, how])
    return MCPTools(command, timeout=timeout)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "timeout", "kind", "what"),
    [
        ("endless", 60, ServerFailed, "more than .* pages"),
        ("slow", 3, Unreachable, "took more than 3 s to list its tools"),
        ("hang", 3, Unreachable, "took more than 3 s to list its tools"),
        ("garbage", 60, ServerFailed, "list of tools"),
    ],
)
def test_an_mcp_server_that_cannot_list_its_tools_is_an_outage(how, timeout, kind, what):
    with pytest.raises(kind, match=what):
        by_hand(how, timeout)


def test_an_mcp_answer_that_breaks_the_protocol_is_an_outage():
    tools = by_hand("call")
    assert isinstance(step(ToolEnvironment([tools]), call("leak")).error, ServerFailed)
    tools.close()


def test_an_mcp_connection_closed_while_it_opens_fails_whoever_waits_for_it():
    """`close()` beside a call: the call ends as an outage, it does not wait for ever."""
    tools = by_hand("call")
    tools.close()

    async def closed_meanwhile():
        waiting = asyncio.ensure_future(tools._connect())
        while tools._keeper is None or tools._keeper.done():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        tools._keeper.cancel()
        return await asyncio.wait_for(waiting, 20)

    while tools._keeper is not None and not tools._keeper.done():
        threading.Event().wait(0.02)
    with pytest.raises(Unreachable):
        run(closed_meanwhile())


def test_an_mcp_servers_error_shows_nobody_a_secret(leaking):
    pytest.importorskip("mcp", reason="needs the extra mcp")
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("leaking")

    @server.tool()
    def leak() -> str:
        "Fails."
        raise ValueError(leaking[0])

    tools = MCPTools(server)
    observation = step(ToolEnvironment([tools], max_chars=100_000), call("leak"))
    assert observation.error is None and observation.text.startswith("Error: ")
    assert leaking[1] not in observation.text
    tools.close()


@pytest.mark.parametrize("status", [401, 307, 500])
def test_an_mcp_address_shows_nobody_its_key(status, caplog):
    """User, password, query and path: not in the error, and not in the log of the package or of
    httpx.
    """
    pytest.importorskip("mcp", reason="needs the extra mcp")
    caplog.set_level(logging.INFO)

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.send_header("location", "http://127.0.0.1:9/pathkey1")
            self.end_headers()

        do_GET = do_DELETE = do_POST

        def log_message(self, *ignored):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(Unreachable) as failed:
        MCPTools(
            f"http://user:hunter22@127.0.0.1:{server.server_port}/pathkey1/mcp?api_key=querykey1",
            timeout=10,
        )
    server.shutdown()
    for secret in ("hunter22", "querykey1", "pathkey1"):
        assert secret not in str(failed.value) and secret not in caplog.text
    assert "TaskGroup" not in str(failed.value), "the cause is named, not the package's machinery"


# --- OpenEnv --------------------------------------------------------------------------------------

SCHEMA = {
    "action": {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
    }
}


def told(said: object = "hello", reward: object = None, done: object = False) -> dict:
    return {
        "type": "observation",
        "data": {"observation": {"said": said}, "reward": reward, "done": done},
    }


class OpenEnvServer:
    """A server in this process: gives `schema`, and to each message of a session the next of
    `answers`.
    """

    def __init__(self, answers: list = [], schema: object = SCHEMA, redirect: str = ("")):  # noqa: B006
        self.answers = answers
        self.schema = schema
        self.redirect = redirect
        self.headers = []

    async def _schema(self, request):
        self.headers.append(dict(request.headers))
        if self.redirect and self.redirect.endswith("/schema"):
            raise web.HTTPFound(self.redirect)
        text = self.schema if isinstance(self.schema, str) else json.dumps(self.schema)
        return web.Response(text=text, content_type="application/json")

    async def _session(self, request):
        self.headers.append(dict(request.headers))
        if self.redirect and self.redirect.endswith("/ws"):
            raise web.HTTPFound(self.redirect)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        answers = iter(self.answers)
        async for _ in socket:
            answer = next(answers)
            if isinstance(answer, bytes):
                await socket.send_bytes(answer)
            else:
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        return socket

    async def _serve(self):
        app = web.Application()
        app.add_routes([web.get("/schema", self._schema), web.get("/ws", self._session)])
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    def __enter__(self):
        self.port = run(self._serve())
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *ignored):
        start(self.runner.cleanup()).result(20)


def begun(environment: OpenEnv) -> dict:
    return run(environment.reset({"prompt": [{"role": "user", "content": "Play."}]}))


GARBAGE = {
    "no JSON": "hello",
    "no object": [1],
    "no data": {"type": "observation"},
    "data that is no object": {"type": "observation", "data": "x"},
    "no observation": {"type": "observation", "data": {"reward": None, "done": False}},
    "an observation that is no object": {
        "type": "observation",
        "data": {"observation": 3, "reward": 1, "done": False},
    },
    "an empty observation": {
        "type": "observation",
        "data": {"observation": None, "reward": 1, "done": False},
    },
    "a word for a reward": told(reward="much"),
    "a truth value for a reward": told(reward=True),
    "a reward without end": json.dumps(told()).replace("null", "Infinity"),
    "a word for done": told(done="false"),
    "no done": {"type": "observation", "data": {"observation": {"said": "x"}, "reward": 1.0}},
    "another type": {**told(), "type": "state"},
    "no type": {"data": told()["data"]},
    "an error without a message": {"type": "error", "data": {"code": "EXECUTION_ERROR"}},
    "an error without data": {"type": "error"},
    "bytes": b"\x00\x01",
    "JSON nested without end": "[" * 100_000,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_an_openenv_answer_that_breaks_the_protocol_is_an_outage(garbage):
    """In a step and in a reset: an error of the rollout, no text for the agent, and no score."""
    with OpenEnvServer([told(), garbage]) as server:
        environment = OpenEnv(server.url)
        row = begun(environment)
        observation = step(environment, call("act", number=1), row)
        assert isinstance(observation.error, ServerFailed) and not observation.text
        server.answers = [garbage]
        assert isinstance(begun(environment)["environments"], ServerFailed)
        run(environment.reward([row["environments"]]))


def test_a_show_function_that_fails_on_an_observation_is_an_outage():
    with OpenEnvServer([told(), told()]) as server:
        environment = OpenEnv(server.url, render=lambda observation: observation["nothing"])
        assert "nothing" in str(begun(environment)["environments"])


@pytest.mark.parametrize(
    "schema", ["hello", [], {}, {"action": 3}, {"action": {"type": "object"}}, "[" * 100_000]
)
def test_an_openenv_schema_that_is_none_is_an_outage(schema):
    with OpenEnvServer(schema=schema) as server, pytest.raises(LLMError, match="schema"):
        OpenEnv(server.url)


@pytest.mark.parametrize("path", ["schema", "ws"])
def test_an_openenv_key_reaches_no_other_origin(path):
    """Neither request follows a redirect: the other server is not asked at all, and the error names
    it.
    """
    with (
        OpenEnvServer([told()]) as other,
        OpenEnvServer([told()], redirect=f"{other.url}/{path}") as server,
    ):
        headers = {"Authorization": "Bearer secretkey", "X-Api-Key": "secretkey"}
        with pytest.raises(LLMError, match=f"127.0.0.1:{other.port}.*not followed") as failed:
            if isinstance(
                error := begun(OpenEnv(server.url, headers=headers))["environments"], LLMError
            ):
                raise error
        assert other.headers == [] and server.headers[0]["X-Api-Key"] == "secretkey"
        assert "secretkey" not in str(failed.value)


def test_an_openenv_error_shows_nobody_a_secret(leaking):
    """What the server says of an action is text for the agent, of a reset an error; the address has
    a key as well.
    """
    error = {
        "type": "error",
        "data": {"code": "EXECUTION_ERROR", "message": leaking[0] + " headerkey1 querykey1"},
    }
    with OpenEnvServer([told(), error]) as server:
        environment = OpenEnv(
            server.url.replace("://", "://user:hunter33@"),
            headers={"X-Other": "headerkey1"},
            max_chars=100_000,
        )
        observation = step(environment, call("act", number=1), begun(environment))
        server.answers = [error]
        failed = begun(environment)["environments"]
        assert observation.error is None and isinstance(failed, ServerFailed)
        for text in (observation.text, str(failed)):
            assert leaking[1] not in text and "headerkey1" not in text
        url = server.url
    with pytest.raises(Unreachable) as gone:
        OpenEnv(url.replace("://", "://user:hunter33@") + "/pathkey1")
    assert "hunter33" not in str(gone.value) and "pathkey1" not in str(gone.value)
