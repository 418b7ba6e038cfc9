"""Environments of packages that cannot be installed beside ours: in interpreters of their own (`make foreign`), and
against stand-ins that speak the same messages where there are none."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentic_prompting.interop import openenv, verifiers
from agentic_prompting.interop.openenv import OpenEnv
from agentic_prompting.interop.verifiers import VerifiersTasks
from agentic_prompting.llm import ServerFailed, TimedOut, Unreachable
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
    return Rollout([1], row=run(environment.reset({"prompt": [{"role": "user", "content": "Play."}], **columns})))


# --- OpenEnv -----------------------------------------------------------------------------------------------------


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
    rollout, other = begun(environment, secret=4, answers=["4"], image=object()), begun(environment)
    assert rollout.row["prompt"][-1]["content"] == "Play.\n\nGuess a number."
    assert said(environment, rollout, call(number=3)).text == "wrong"
    assert said(environment, other, call(number=3) + call(number=3)) is None  # right, and over before the second
    refused = said(environment, rollout, call(number=11) + call(digit=1))
    assert refused.error is None and "Error: ValueError: at most 10" in refused.text and "Invalid" in refused.text
    assert said(environment, rollout, call(number=4)) is None
    rewards = run(environment.reward(environments=[one.row["environments"] for one in (rollout, other)]))
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
    assert openenv.shown({"said": "wrong", "metadata": {"n": 1}}) == "wrong"
    assert (
        openenv.shown({"said": "wrong", "left": 2}) == '{"said": "wrong", "left": 2}' and openenv.shown({"n": 2}) == "2"
    )


# --- verifiers ---------------------------------------------------------------------------------------------------


VERIFIERS_STAND_IN = """
    import json, sys
    for line in sys.stdin:
        asked = json.loads(line)
        if "rows" in asked:
            answer = {"rows": [{"task": n, "question": f"The capital {n}?"} for n in range(2)][: asked["rows"]]}
        elif "begin" in asked:
            answer = {"episode": "e", "messages": [{"role": "user", "content": f"The capital {asked['begin']}?"}]}
        elif asked["text"] in ("die", "hang", "outage"):
            if asked["text"] == "die":
                sys.exit(3)
            answer = {"error": "the judge is down"}
            if asked["text"] == "hang":
                continue
        elif asked["text"] == "Kenya.":
            answer = {"messages": [{"role": "user", "content": "You said Kenya. Its capital?"}]}
        else:
            answer = {"reward": float(asked["text"] is not None), "metrics": {}}
        print(json.dumps({**answer, "id": asked["id"]}), flush=True)
"""


@pytest.fixture
def bridged(tmp_path, monkeypatch):
    """A task set behind a process that answers as the bridge does."""
    bridge = tmp_path / "bridge.py"
    bridge.write_text(textwrap.dedent(VERIFIERS_STAND_IN))
    monkeypatch.setattr(verifiers, "_BRIDGE", bridge)
    tasks = VerifiersTasks("any", sys.executable)
    yield tasks
    tasks.close()


def reward_of(tasks: VerifiersTasks, rollout: Rollout) -> float | None:
    return run(tasks.reward(rollout=[rollout]))[0]


def test_a_task_set_in_another_process(bridged):
    assert [row["task"] for row in bridged.rows()] == [0, 1] and len(bridged.rows(1)) == 1
    rollout = begun(bridged, task=1)
    assert rollout.row["prompt"] == [{"role": "user", "content": "The capital 1?"}]
    told = said(bridged, rollout, "Kenya.")
    assert told.text == "You said Kenya. Its capital?"
    rollout.add_observation(told, [2])
    assert said(bridged, rollout, "<think>hm</think>Nairobi") is None and reward_of(bridged, rollout) == 1.0
    stopped = begun(bridged, task=1)  # by its limit: the last turn has not been heard yet
    stopped.add_turn(Sample([1]), bridged.grammar.parse("Kenya."))
    assert reward_of(bridged, stopped) == 0.0


def test_a_process_of_a_task_set_that_ends_is_an_outage_and_is_started_again(bridged):
    for text, kind in (("outage", ServerFailed), ("die", Unreachable)):
        rollout = begun(bridged, task=0)
        failed = said(bridged, rollout, text)
        assert isinstance(failed.error, kind)
        assert reward_of(bridged, rollout.fail(failed)) is None
    assert said(bridged, begun(bridged, task=0), "Nairobi") is None
    bridged.timeout = 0.01
    assert isinstance(said(bridged, begun_slowly(bridged), "hang").error, TimedOut)


def begun_slowly(tasks: VerifiersTasks) -> Rollout:
    patience, tasks.timeout = tasks.timeout, 60
    rollout = begun(tasks, task=0)
    tasks.timeout = patience
    return rollout


@pytest.mark.slow
def test_task_sets_of_verifiers(monkeypatch):
    python = interpreter("verifiers")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    tasks = VerifiersTasks("capitals", python)
    rows = tasks.rows()
    assert [row["question"] for row in rows] == ["The capital of Kenya?", "The capital of Peru?"]
    rollout = begun(tasks, **rows[1])
    assert [message["role"] for message in rollout.row["prompt"]] == ["system", "user"]
    assert said(tasks, rollout, "<think>Nairobi?</think>Lima") is None and reward_of(tasks, rollout) == 1.0
    assert rollout.row["environments"]["metrics"] == {"replies": 1.0}
    for text, kind in (("outage", ServerFailed), ("die", Unreachable)):
        rollout = begun(tasks, **rows[0])
        failed = said(tasks, rollout, text)
        assert isinstance(failed.error, kind) and reward_of(tasks, rollout.fail(failed)) is None
    tasks.close()

    tasks = VerifiersTasks("talk", python)
    rollout = begun(tasks, **tasks.rows()[0])
    told = said(tasks, rollout, "Kenya.")
    assert told.text == "You said Kenya. Its capital?"
    rollout.add_observation(told, [2])
    assert said(tasks, rollout, "It is Nairobi.") is None and reward_of(tasks, rollout) == 1.5
    stopped = begun(tasks, task=0)
    assert said(tasks, stopped, "Kenya.").text and reward_of(tasks, stopped) == 0.5
    tasks.close()

    with pytest.raises(ServerFailed, match="none_such"):
        VerifiersTasks("none_such", python).rows()
