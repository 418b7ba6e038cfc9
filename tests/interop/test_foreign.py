"""Environments of packages that cannot be installed beside ours: in interpreters of their own
(`make foreign`), and against stand-ins that speak the same messages where there are none.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentic_prompting.interop import openenv
from agentic_prompting.interop.openenv import OpenEnv
from agentic_prompting.llm import ServerFailed, Unreachable
from agentic_prompting.llm.loop import run
from agentic_prompting.rollout import Rollout, Sample

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("foreign")

OPENENV_STAND_IN = """
import json, os
from aiohttp import web

def told(said, reward=None, done=False):
    observation = {"said": said, "metadata": {}}
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}

async def schema(request):
    fields = {"metadata": {"type": "object"}, "number": {"type": "integer"}}
    return web.json_response({"action": {"type": "object", "properties": fields, "required": ["number"]}})

async def session(request):
    socket, secret = web.WebSocketResponse(), None
    await socket.prepare(request)
    async for message in socket:
        asked = json.loads(message.data)
        data, failed = asked["data"], lambda code, text: {"type": "error", "data": {"code": code, "message": text}}
        if asked["type"] == "reset":
            secret = data.get("secret", 3)
            answer = told("Guess a number.") if secret >= 0 else failed("EXECUTION_ERROR", "no such secret")
        elif "number" not in data:
            answer = failed("VALIDATION_ERROR", "Invalid message")
        elif data["number"] == 99:
            os._exit(1)
        elif data["number"] > 10:
            answer = failed("EXECUTION_ERROR", "at most 10")
        else:
            right = data["number"] == secret
            answer = told("right" if right else "wrong", 1.0 if right else -0.25, right)
        await socket.send_json(answer)
    return socket

app = web.Application()
app.add_routes([web.get("/schema", schema), web.get("/ws", session)])
runner = web.AppRunner(app)

async def serve():
    import asyncio
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

import asyncio
asyncio.run(serve())
"""


def interpreter(package: str) -> Path:
    """Of the environment that `make foreign` creates for a package."""
    found = Path(os.environ.get("FOREIGN", ROOT / ".venv-foreign")) / package / "bin" / "python"
    if not found.exists():
        pytest.skip(f"needs {package} in an environment of its own: make foreign")
    return found


def call(**arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': 'act', 'arguments': arguments})}</tool_call>"


def said(environment, rollout: Rollout, *turns: str):
    """What the environment says to the last of these turns."""
    for at, text in enumerate(turns):
        if at:
            rollout.add_observation(observation, [2])  # noqa: F821
        rollout.add_turn(Sample([1]), environment.grammar.parse(text))
        observation = run(environment.step(rollout))
    return observation


def begun(environment, **columns: object) -> Rollout:
    return Rollout(
        [1],
        row=run(environment.reset({"prompt": [{"role": "user", "content": "Play."}], **columns})),
    )


# --- OpenEnv --------------------------------------------------------------------------------------


@pytest.fixture(params=["stand-in", "openenv"])
def game(request):
    """The address of a game's server."""
    command = [sys.executable, "-c", OPENENV_STAND_IN]
    if request.param == "openenv":
        command = [interpreter("openenv"), SCRIPTS / "openenv_server.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        server.kill()


def test_an_openenv_episode(game):
    environment = OpenEnv(game)
    parameters = environment.chat_template_kwargs["tools"][0]["function"]["parameters"]
    assert set(parameters["properties"]) == {"number"} and parameters["required"] == ["number"]
    rollout = begun(environment, secret=4, answers=["4"], image=object())
    other = begun(environment)
    assert rollout.row["prompt"][-1]["content"] == "Play.\n\nGuess a number."
    assert said(environment, rollout, call(number=3)).text == "wrong"
    assert (
        said(environment, other, call(number=3) + call(number=3)) is None
    )  # right, and over before the second
    refused = said(environment, rollout, call(number=11) + call(digit=1))
    assert refused.error is None
    assert "Error: ValueError: at most 10" in refused.text
    assert "Invalid" in refused.text
    assert said(environment, rollout, call(number=4)) is None
    rewards = run(
        environment.reward(
            environments=[episode.row["environments"] for episode in (rollout, other)]
        )
    )
    assert rewards == [0.75, 1.0] and environment.reward.__name__ == "OpenEnv"


def test_an_openenv_server_that_fails_is_an_outage(game):
    environment = OpenEnv(game)
    failed = begun(environment, secret=-1)
    assert isinstance(said(environment, failed, call(number=3)).error, ServerFailed)
    assert run(environment.reward(environments=[failed.row["environments"]])) == [None]
    assert isinstance(said(environment, begun(environment), call(number=99)).error, Unreachable)
    assert isinstance(begun(environment).row["environments"], Unreachable)
    with pytest.raises(Unreachable, match="no OpenEnv server"):
        OpenEnv(game)


def test_what_the_agent_reads_of_an_observation():
    assert openenv.render_observation({"said": "wrong", "metadata": {"n": 1}}) == "wrong"
    assert (
        openenv.render_observation({"said": "wrong", "left": 2}) == '{"said": "wrong", "left": 2}'
    )
    assert openenv.render_observation({"n": 2}) == "2"
