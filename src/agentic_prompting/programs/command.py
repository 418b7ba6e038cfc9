"""Runs an external command once per rollout; the row is passed as a file, stdin is closed."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..llm import ServerFailed, fill
from ..llm.spans import carrier
from .bubblewrap import paths_of
from .failures import OverLimit, ProgramFailed
from .harness import Harness
from .workspace import Place

_LONGEST_ANSWER = 2**20  # bytes of the last line
_LONGEST_COMPLAINT = 300  # characters of the error output that an error quotes


async def run_command(
    command: Sequence[str],
    row: Mapping[str, Any],
    address: Mapping[str, Any],
    place: Place,
    harness: Harness | None = None,
    system: str | None = None,
    started: Callable[[], Awaitable[None]] | None = None,
) -> str | dict[str, Any] | None:
    """Run a command for one rollout, and end all its processes with it.

    Args:
        command (`Sequence[str]`): Program and arguments. `{column}` in an argument is that column of the row.
        row (`dict`): The row, without the columns that the command must not see.
        address (`dict`): `base_url` and `api_key`, and what else the texts of a harness name.
        place ([`Place`]): Its folders and its limits.
        harness ([`Harness`], *optional*): Whose command it is.
        system (`str`, *optional*): The run's system prompt, for a harness that has a file for it.
        started (`Callable`, *optional*): Awaited when the command runs.

    Returns:
        `str`, `dict` or `None`: Its answer, as [`read_output`] reads it; of a harness always a text.

    Raises:
        [`ProgramFailed`]: The exit code is not 0.
        [`OverLimit`]: It used more than its place allows.
        [`ServerFailed`]: It could not be started.
    """
    place.row.write_text(
        json.dumps(row, default=str, ensure_ascii=False), encoding="utf-8", errors="replace"
    )
    values = {**row, **address}
    values |= {
        name: place.path_for_command(getattr(place, name)) for name in ("row", "home", "work")
    }
    if harness is not None:
        values["task"] = fill(harness.task, **values)
        _write_settings(harness, place.home, values, system)
    environment = {"AGENTIC_PROMPTING_ROW": str(values["row"]), **_environment(harness, values)}
    environment |= {name.upper(): value for name, value in carrier().items()}  # TRACEPARENT
    arguments = [_fill_argument(part, values) for part in command]

    # Files, not pipes: a grandchild that holds a pipe open would be waited for, and output fills no memory.
    with open(place.root / "out", "w+b") as out, open(place.root / "err", "w+b") as err:
        try:
            needed_paths = await asyncio.to_thread(paths_of, command)
            if not await place.start(arguments, environment, out, err, needed_paths):
                raise ServerFailed(f"the command could not be started: {_complaint(out, err)}")
            if started is not None:
                await started()
            code = await place.wait()
        finally:
            await place.end()
        if place.violation is not None:
            raise OverLimit(place.violation)
        if code:
            raise ProgramFailed(f"the command ended with {code}: {_complaint(out, err)}", code)
        last_line = _last_line(out)
    if harness is None:
        return read_output(last_line)
    return await asyncio.to_thread(harness.answer_in, place.home) if harness.answer else last_line


def read_output(line: str) -> str | dict[str, Any]:
    """The answer in the last line of a command's output.

    The policy may have written that line, so it is data and nothing else: no line fails the rollout, and none sets a
    reward. A text stays that text (`12.50`, `1e3`, `[1, 2]`). A JSON object with an `answer` that is a text or a number
    has its answer there, and its other fields are kept beside it.

    Returns:
        `str` or `dict`: The text, or the object with `answer` as a text.
    """
    if not (line.startswith("{") and line.endswith("}")):
        return line
    try:
        # Numbers as they are written: 12.50 is another text than 12.5.
        written = json.loads(line, parse_float=str, parse_int=str, parse_constant=str)
        fields = json.loads(line, parse_float=_finite, parse_int=_short, parse_constant=str)
        answer = written.get("answer")
        if "answer" not in written or not (answer is None or isinstance(answer, str)):
            return line
        fields |= {"answer": answer or ""}
        fields.pop("reward", None)
        # JSON can hold half a surrogate pair, which no tokenizer and no file takes.
        text = (
            json.dumps(fields, ensure_ascii=False)
            .encode("utf-16", "surrogatepass")
            .decode("utf-16", "replace")
        )
        returned: dict[str, Any] = json.loads(text)
        return returned
    except (ValueError, RecursionError):
        return line


def _finite(number: str) -> float | str:
    """A number of JSON; as its text where no float has its value (1e400)."""
    return value if math.isfinite(value := float(number)) else number


def _short(number: str) -> int | str:
    """An integer of JSON; as its text where Python refuses to read so many digits."""
    return int(number) if len(number) < 4300 else number


def _fill_argument(template: str, values: Mapping[str, Any]) -> str:
    """An argument of the command. A value at its beginning is never read as an option: one that begins with `-` gets a
    space in front."""
    text = fill(template, **values)
    return " " + text if text.startswith("-") and not template.startswith("-") else text


def _environment(harness: Harness | None, values: Mapping[str, Any]) -> dict[str, str]:
    """How the command learns of the address: a harness by its own settings, any other by each vendor's variables."""
    if harness is not None:
        return {name: fill(text, **values) for name, text in harness.environment.items()}
    vendors = {
        "OPENAI_BASE_URL": "base_url",
        "ANTHROPIC_BASE_URL": "address",
        "GOOGLE_GEMINI_BASE_URL": "address",
        "OPENAI_API_KEY": "api_key",
        "ANTHROPIC_API_KEY": "api_key",
        "GEMINI_API_KEY": "api_key",
    }
    return {name: str(values[value]) for name, value in vendors.items()}


def _write_settings(
    harness: Harness, home: Path, values: Mapping[str, Any], system: str | None
) -> None:
    files = {name: fill(text, **values) for name, text in harness.files.items()}
    if system and harness.prompt_file:
        files[harness.prompt_file] = system
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _complaint(out: BinaryIO, err: BinaryIO) -> str:
    """The end of what a command that failed wrote."""
    complaint = _tail(err, 2**12).strip() or _tail(out, 2**12).strip()
    return complaint[-_LONGEST_COMPLAINT:]


def _last_line(file: BinaryIO) -> str:
    """The last line that is not blank.

    Raises:
        [`OverLimit`]: It is longer than an answer may be.
    """
    text = _tail(file, _LONGEST_ANSWER).rstrip()
    _, newline, line = text.replace("\r", "\n").rpartition("\n")
    if not newline and os.fstat(file.fileno()).st_size > _LONGEST_ANSWER:
        raise OverLimit(
            f"the last line of the command's output has more than {_LONGEST_ANSWER} bytes"
        )
    return line.strip()


def _tail(file: BinaryIO, size: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read().decode("utf-8", "replace")
