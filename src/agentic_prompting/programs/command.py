"""Commands as programs: processes of its own for each rollout, its row in a file, nothing on stdin."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..llm import fill
from ..llm.spans import carrier
from .failures import ProgramFailed
from .harness import Harness
from .workspace import Place, watch

_TAIL = 2**16  # bytes of the output that are read
_PATIENCE = 5.0  # seconds until a command that is to end is killed


async def run_command(
    command: Sequence[str],
    shown: Mapping[str, Any],
    address: Mapping[str, Any],
    folder: Path,
    place: Place | None = None,
    harness: Harness | None = None,
    system: str | None = None,
    started: Callable[[], Awaitable[None]] | None = None,
) -> Any:
    """Run a command for one rollout, and end all its processes with it.

    Args:
        command (`Sequence[str]`): Program and arguments. `{column}` in an argument is that column of the row.
        shown (`dict`): The row, without the columns that the command must not see.
        address (`dict`): `base_url` and `api_key`, and what else the texts of a harness name.
        folder (`Path`): Takes the row's file and the output.
        place ([`Place`], *optional*): Its home and work folder. By default it runs in this process's.
        harness ([`Harness`], *optional*): Whose command it is.
        system (`str`, *optional*): The run's system prompt, for a harness that has a file for it.
        started (`Callable`, *optional*): Awaited when the command runs.

    Returns:
        `Any`: The last line of its output: JSON as what it says, else the text; `None` if there is none. A harness's
            answer is always a text.

    Raises:
        [`ProgramFailed`]: The exit code is not 0.
        [`OverLimit`]: It used more than its place allows.
    """
    row = (place.work.parent if place is not None else folder) / "row.json"
    row.write_text(json.dumps(shown, default=str, ensure_ascii=False), encoding="utf-8")
    values = {**shown, **address, "row": place.shown(row) if place is not None else row}
    if place is not None:
        values |= {"home": place.shown(place.home), "work": place.shown(place.work)}
    if harness is not None:
        assert place is not None
        values["task"] = fill(harness.task, **values)
        _write_settings(harness, place.home, values, system)
    environment = {"AGENTIC_PROMPTING_ROW": str(values["row"]), **_environment(harness, values)}
    environment |= {name.upper(): value for name, value in carrier().items()}  # TRACEPARENT
    # Files, not pipes: a grandchild that holds a pipe open would be waited for, and output fills no memory.
    with open(folder / "out", "w+b") as out, open(folder / "err", "w+b") as err:
        words = [fill(part, **values) for part in command]
        if place is not None:
            process = await place.start(words, environment, out, err)
        else:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **environment},
                start_new_session=True,
            )  # fmt: skip
        try:
            if started is not None:
                await started()
            code = await _wait(process, place)
        finally:
            await _end(process, place)
        said, complaint = _tail(out), _tail(err)
    if code:
        raise ProgramFailed(f"the command ended with {code}: {(complaint.strip() or said.strip())[-300:]}", code)
    if harness is not None and harness.answer:
        assert place is not None
        return await asyncio.to_thread(harness.answer_in, place.home)
    last = (said.strip().splitlines() or [""])[-1].strip()
    try:
        return last or None if harness is not None else json.loads(last)
    except ValueError:
        return last or None


def _environment(harness: Harness | None, values: Mapping[str, Any]) -> dict[str, str]:
    """How the command learns of the address: a harness by its own settings, any other by each vendor's variables."""
    if harness is not None:
        return {name: fill(text, **values) for name, text in harness.environment.items()}
    named = {
        "OPENAI_BASE_URL": "base_url", "ANTHROPIC_BASE_URL": "address", "GOOGLE_GEMINI_BASE_URL": "address",
        "OPENAI_API_KEY": "api_key", "ANTHROPIC_API_KEY": "api_key", "GEMINI_API_KEY": "api_key",
    }  # fmt: skip
    return {name: str(values[value]) for name, value in named.items()}


def _write_settings(harness: Harness, home: Path, values: Mapping[str, Any], system: str | None) -> None:
    files = {name: fill(text, **values) for name, text in harness.files.items()}
    if system and harness.prompt_file:
        files[harness.prompt_file] = system
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


async def _wait(process: asyncio.subprocess.Process, place: Place | None) -> int:
    """The exit code, unless the command uses too much before."""
    if place is None:
        return await process.wait()
    ended, watched = asyncio.ensure_future(process.wait()), asyncio.ensure_future(watch(process.pid, place))
    try:
        await asyncio.wait({ended, watched}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            watched.result()
        return await ended
    finally:
        ended.cancel()
        watched.cancel()


async def _end(process: asyncio.subprocess.Process, place: Place | None) -> None:
    """Kill what is left of the command, and tidy its place. In a namespace the kernel kills, and is waited for."""
    if place is not None and place.namespaces and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _PATIENCE)
    if place is not None and place.lookups is not None:
        place.lookups.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if place is not None:
        await asyncio.to_thread(place.tidy)


def _tail(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
    return file.read().decode("utf-8", "replace")
