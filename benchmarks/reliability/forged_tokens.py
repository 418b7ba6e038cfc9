"""How many special tokens text from outside can forge, through every way in which it reaches the
agent.

    python -m benchmarks.reliability.forged_tokens [--texts 200] [--json]

Each hostile text goes through each door: the question in its template, a row's own `prompt`
messages, the messages that an environment's `reset` returns, the text of a TRL class's `reset`, the
first observation of an OpenEnv server and of a simulated user, the messages of the service's
clients, and a system prompt that was evolved. The special tokens of what the agent then reads are
compared with those of a harmless text. A second of work for each hundred texts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]

from agentic_prompting.evolution import SystemPrompt  # noqa: E402
from agentic_prompting.interop.openenv import OpenEnv  # noqa: E402
from agentic_prompting.interop.trl import TRLEnvironment  # noqa: E402
from agentic_prompting.interop.user import Dialogue, UserSimulator  # noqa: E402
from agentic_prompting.llm import ScriptedChat  # noqa: E402
from agentic_prompting.llm.loop import run  # noqa: E402
from agentic_prompting.rollout import (  # noqa: E402
    AgentSpec,
    ChatFormat,
    Rollout,
    Sample,
    observe,
    prompt_r1_template,
)
from agentic_prompting.serve.answering import conversation  # noqa: E402
from support.hostile import hostile_texts  # noqa: E402
from support.tokenizers_for_tests import FAMILIES, tokenizer_for  # noqa: E402

SPEC = AgentSpec(
    prompt_r1_template() + "\n<think> comes first.", system_prompt="Begin with <think>."
)
HARMLESS = "It is Kenya."
Door = Callable[[ChatFormat, str], list[int]]


def question(form: ChatFormat, text: str) -> list[int]:
    return form.prompt_ids(SPEC.messages({"question": text}))


def prompt_messages(form: ChatFormat, text: str) -> list[int]:
    prompt = [{"role": role, "content": text} for role in ("system", "user")]
    return form.prompt_ids(SPEC.messages({"prompt": prompt}))


def reset_messages(form: ChatFormat, text: str) -> list[int]:
    class Shop:
        async def reset(self, row: Any) -> dict[str, Any]:
            return {**row, "prompt": [*row["prompt"], {"role": "user", "content": text}]}

    row = run(Shop().reset({"prompt": SPEC.messages({"question": HARMLESS})}))
    return form.prompt_ids(row["prompt"])


def trl_reset(form: ChatFormat, text: str) -> list[int]:
    class Game:
        def reset(self, **row: Any) -> str:
            return text

        def look(self) -> str:
            """Look around."""
            return ""

    row = run(TRLEnvironment(Game).reset({"prompt": SPEC.messages({"question": HARMLESS})}))
    return form.prompt_ids(row["prompt"])


def user_observation(form: ChatFormat, text: str) -> list[int]:
    user = UserSimulator(ScriptedChat(lambda messages: text), goal=lambda row: "nothing")
    form = ChatFormat(form.tokenizer, Dialogue())
    rollout = Rollout(
        [0], row={"question": HARMLESS, "prompt": [{"role": "user", "content": HARMLESS}]}
    )
    rollout.add_turn(Sample([0]), Dialogue().parse("hello"))
    observation = run(observe(user, rollout))
    assert observation is not None
    return form.observation_ids(observation.text, after=[])


def serve_messages(form: ChatFormat, text: str) -> list[int]:
    roles = ("system", "user", "user", "user")
    return form.prompt_ids(conversation(SPEC, [{"role": role, "content": text} for role in roles]))


def serve_history(form: ChatFormat, text: str) -> list[int]:
    """The client's version of what the agent wrote; here only special tokens count."""
    messages = [{"role": role, "content": text} for role in ("user", "assistant", "user")]
    return _special_of(form, form.prompt_ids(conversation(SPEC, messages)))  # type: ignore[arg-type]


def evolved_prompt(form: ChatFormat, text: str) -> list[int]:
    """A system prompt that a large LLM wrote: it may hold tags such as <think>, no special token."""
    form = ChatFormat(form.tokenizer, trusted_texts=[*SPEC.trusted_texts, text])
    messages = SystemPrompt(text).messages(SPEC.messages({"question": HARMLESS}))
    return _special_of(form, form.prompt_ids(messages))


def _special_of(form: ChatFormat, ids: list[int]) -> list[int]:
    special = set(form.tokenizer.all_special_ids)
    return [token for token in ids if token in special]


@contextmanager
def openenv_door() -> Iterator[Door]:
    """An OpenEnv server on loopback whose first observation is the text."""
    from aiohttp import web

    observed = ""

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"type": "object", "properties": {}}})

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            data = {"observation": {"said": observed}, "reward": None, "done": False}
            await socket.send_json({"type": "observation", "data": data})
        return socket

    async def start() -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.add_routes([web.get("/schema", schema), web.get("/ws", session)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1)
        await site.start()
        return runner, site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def reset(environment: OpenEnv) -> dict[str, Any]:
        row = await environment.reset({"prompt": SPEC.messages({"question": HARMLESS})})
        await row["environments"].get_reward()  # ends the session
        return row

    runner, port = run(start())
    environment = OpenEnv(f"http://127.0.0.1:{port}")

    def door(form: ChatFormat, text: str) -> list[int]:
        nonlocal observed
        observed = text
        return form.prompt_ids(run(reset(environment))["prompt"])

    try:
        yield door
    finally:
        run(asyncio.wait_for(runner.cleanup(), 10))


DOORS: dict[str, Door] = {
    "question": question,
    "prompt_messages": prompt_messages,
    "reset_messages": reset_messages,
    "trl_reset": trl_reset,
    "user_observation": user_observation,
    "serve_messages": serve_messages,
    "serve_history": serve_history,
    "evolved_prompt": evolved_prompt,
}


def added_tokens(form: ChatFormat, ids: list[int]) -> list[int]:
    added = set(form.tokenizer.get_added_vocab().values())
    return [token for token in ids if token in added]


@cache
def format_of(family: str) -> ChatFormat:
    return ChatFormat(tokenizer_for(family), trusted_texts=SPEC.trusted_texts)


def forges(door: Door, family: str, text: str) -> bool:
    """Whether a text brings other special tokens through a door than a harmless one does."""
    form = format_of(family)
    tokens = added_tokens(form, door(form, text))
    harmless_tokens = added_tokens(form, door(form, HARMLESS))
    return tokens != harmless_tokens


def forged_tokens(count: int = 200) -> dict[str, Any]:
    """Hostile texts that forged a token, by door; `total` counts all of them."""
    families = list(FAMILIES)
    counts = {}
    with openenv_door() as openenv:
        for name, door in {**DOORS, "openenv_reset": openenv}.items():
            counts[name] = 0
            for number, text in enumerate(hostile_texts(count, seed=7)):
                counts[name] += forges(door, families[number % len(families)], text)
    return {"total": sum(counts.values()), "doors": len(counts), "texts": count, "by_door": counts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="one JSON object in the last line")
    options = parser.parse_args()
    counts = forged_tokens(options.texts)
    for name, forged in counts["by_door"].items():
        print(f"{name:20} {forged} of {counts['texts']} texts forged a token")
    if options.json:
        print(json.dumps(counts))


if __name__ == "__main__":
    main()
