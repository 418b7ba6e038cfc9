"""Exceptions that end more than their call, raised by code of a user's at every door it has: which
of them hang?

Used by test_guard.py and `benchmarks/reliability/faults.py`. A case that hangs blocks the event
loop of its process, so this file is also a script: it plays all cases in a process of its own and
prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

KINDS: dict[str, type[BaseException]] = {
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
}
LIMIT = 15.0  # seconds for each case; one takes milliseconds on a free machine
ASK = '<tool_call>{"name": "look", "arguments": {"word": "x"}}</tool_call>'


def raising(kind: type[BaseException], is_async: bool) -> Callable[..., Any]:
    """A function of any arguments that raises."""
    if is_async:

        async def look(word: Any = None, *args: Any, **kwargs: Any) -> str:
            await asyncio.sleep(0)
            raise kind("from the user's code")

        return look

    def plain(word: Any = None, *args: Any, **kwargs: Any) -> str:
        raise kind("from the user's code")

    plain.__name__ = "look"
    return plain


# Each door plays one case and returns the text of the failure that it became.


def environment(function: Callable[..., Any]) -> str:
    from agentic_prompting.llm import run
    from agentic_prompting.rollout import Rollout, observe

    class Own:
        step = staticmethod(function)

    return str(run(observe(Own(), Rollout([1]))).error)


def tool(function: Callable[..., Any]) -> str:
    from agentic_prompting.interop.tools import Tool, ToolEnvironment
    from agentic_prompting.llm import run
    from agentic_prompting.rollout import Observation, Rollout, Sample, Turn, observe

    async def call(arguments: dict[str, Any], rollout: Rollout) -> Observation:
        from agentic_prompting.llm.guard import call_guarded

        return Observation(await call_guarded(function, **arguments))

    schema = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    rollout = Rollout([1])
    rollout.add_turn(Sample([2]), Turn(ASK, "act", True, request=ASK))
    observation = run(observe(ToolEnvironment([Tool(schema, call)]), rollout))
    return str(observation.error or observation.text)


def chat(function: Callable[..., Any]) -> str:
    from agentic_prompting.llm import complete

    return str(complete(function, "hello").error)


def reward(function: Callable[..., Any]) -> str:
    from agentic_prompting.evolution.scoring import score as _score
    from agentic_prompting.llm import Reply, run
    from agentic_prompting.rollout import FreeText

    try:
        return str(run(_score(function, [{"question": "q"}], [Reply("a")], FreeText())))
    except Exception as error:
        return str(error) if type(error).__name__ == "Escaped" else type(error).__name__


def judge(function: Callable[..., Any]) -> str:
    from agentic_prompting.llm import ScriptedChat, run
    from agentic_prompting.refine.loop import refine

    script = ScriptedChat(["an answer"])
    result = run(
        refine("q", "prompt", task=script, feedback=script, optimizer=script, verifier=function)
    )
    return str(result.failures[0])


DOORS = {"environment": environment, "tool": tool, "chat": chat, "reward": reward, "judge": judge}


def played(door: str, kind: str, is_async: bool) -> str | None:
    """What a case became; `None` if it hung."""
    outcome: list[str] = []

    def play() -> None:
        try:
            outcome.append(DOORS[door](raising(KINDS[kind], is_async)))
        except BaseException as error:
            outcome.append(f"{door} raised {type(error).__name__}")

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    thread.join(LIMIT)
    return outcome[0] if outcome else None


def play_all(kinds: list[str]) -> dict[str, str | None]:
    # Imports are slow on a busy machine, and no part of a case.
    import agentic_prompting.evolution.evolve
    import agentic_prompting.interop.tools
    import agentic_prompting.refine.loop  # noqa: F401

    outcomes = {}
    for kind, door, is_async in product(kinds, DOORS, (False, True)):
        function = "async" if is_async else "plain"
        outcomes[f"{function} {door} {kind}"] = played(door, kind, is_async)
    return outcomes


def in_own_process(*kinds: str) -> dict[str, str | None]:
    """All cases of some kinds (by default of all), by name; `None` for those that hung."""
    kinds = kinds or tuple(KINDS)
    source = Path(__file__).parents[2] / "src"
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, __file__, *kinds],
        capture_output=True,
        text=True,
        timeout=120 + LIMIT * len(kinds) * len(DOORS) * 2,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(play_all(sys.argv[1:] or list(KINDS))), flush=True)
    os._exit(0)  # whatever hangs
