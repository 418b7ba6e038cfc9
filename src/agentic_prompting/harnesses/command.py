"""Runs an external command once per rollout; the row is passed as a file, stdin is closed."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..llm import ServerFailed, fill
from ..llm.spans import carrier
from ..llm.surrogates import replace_surrogates
from ..programs.failures import LimitExceeded, ProgramFailed
from .bubblewrap import paths_of
from .harness import Harness
from .workspace import RolloutWorkspace

_MAX_ANSWER_BYTES = 2**20  # bytes of the output's last line, which is the answer
_MAX_COMPLAINT_LENGTH = 300  # characters of the error output that an error quotes
_MAX_INTEGER_DIGITS = 4300  # Python reads no longer ones

# The variables in which each vendor's client looks for its address and its key.
_VENDOR_VARIABLES = {
    "OPENAI_BASE_URL": "base_url",
    "ANTHROPIC_BASE_URL": "address",
    "GOOGLE_GEMINI_BASE_URL": "address",
    "OPENAI_API_KEY": "api_key",
    "ANTHROPIC_API_KEY": "api_key",
    "GEMINI_API_KEY": "api_key",
}


class CommandFailed(ProgramFailed):
    """A command ended with an exit code other than 0.

    Args:
        message (`str`): The last lines of its output.
        code (`int`): The exit code.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


async def run_command(
    command: Sequence[str],
    row: Mapping[str, Any],
    placeholders: Mapping[str, Any],
    rollout_workspace: RolloutWorkspace,
    harness: Harness | None = None,
    system_prompt: str | None = None,
    on_start: Callable[[], Awaitable[None]] | None = None,
) -> str | dict[str, Any] | None:
    """Run a command for one rollout, and end all its processes with it.

    Args:
        command (`Sequence[str]`): Program and arguments. `{column}` in an argument is that column
            of the row.
        row (`dict`): The row, without the columns that the command must not see.
        placeholders (`dict`): Values of the placeholders besides the row's columns: `base_url`,
            `address`, `api_key`, and what else the templates of a harness name.
        rollout_workspace ([`RolloutWorkspace`]): Its folders, and the limits of its processes.
        harness ([`Harness`], *optional*): The settings, if the command is a harness.
        system_prompt (`str`, *optional*): The run's system prompt, for a harness that has a file
            for it.
        on_start (`Callable`, *optional*): Awaited when the command runs.

    Returns:
        `str`, `dict` or `None`: Its answer, as [`read_output`] reads it; of a harness always a
            text.

    Raises:
        [`CommandFailed`]: The exit code is not 0.
        [`LimitExceeded`]: It used more than its workspace allows.
        [`ServerFailed`]: It could not be started.
    """
    # Write the row and the settings of a harness.
    row_text = json.dumps(row, default=str, ensure_ascii=False)
    rollout_workspace.row.write_text(row_text, encoding="utf-8", errors="replace")
    values = {**row, **placeholders}
    # Templates name the folders as the command sees them, inside of its sandbox.
    values["row"] = rollout_workspace.path_for_command(rollout_workspace.row)
    values["home"] = rollout_workspace.path_for_command(rollout_workspace.home)
    values["work"] = rollout_workspace.path_for_command(rollout_workspace.work)
    if harness is not None:
        values["task"] = fill(harness.task, **values)
        _write_settings(harness, rollout_workspace.home, values, system_prompt)

    # Fill the arguments and the environment.
    arguments = [_fill_argument(part, values) for part in command]
    environment = {"AGENTIC_PROMPTING_ROW": str(values["row"])}
    environment |= _address_variables(harness, values)
    for name, value in carrier().items():  # TRACEPARENT
        environment[name.upper()] = value

    # Files, not pipes: a grandchild that holds a pipe open would be waited for, and output fills no
    # memory.
    root = rollout_workspace.root
    with open(root / "out", "w+b") as out, open(root / "err", "w+b") as err:
        try:
            # The paths of the command as its user wrote it: a row could name any path.
            needed_paths = await asyncio.to_thread(paths_of, command)
            has_started = await rollout_workspace.start(
                arguments, environment, out, err, needed_paths
            )
            if not has_started:
                raise ServerFailed(f"the command could not be started: {_complaint(out, err)}")
            if on_start is not None:
                await on_start()
            code = await rollout_workspace.wait()
        finally:
            await rollout_workspace.end()

        # A broken limit comes first: it is often the cause of the exit code.
        if rollout_workspace.violation is not None:
            raise LimitExceeded(rollout_workspace.violation)
        if code:
            complaint = _complaint(out, err)
            message = f"the command ended with {code}: {complaint}"
            if rollout_workspace.is_confined:
                message += _hint_at_hidden_files(complaint)
            raise CommandFailed(message, code)
        last_line = _last_line(out)

    # Read the answer.
    if harness is None:
        return read_output(last_line)
    if harness.answer:
        return await asyncio.to_thread(harness.read_answer, rollout_workspace.home)
    return last_line


def read_output(line: str) -> str | dict[str, Any]:
    """Return the answer in the last line of a command's output.

    The policy may have written that line, so it is data and nothing else: no line fails the
    rollout, and none sets a reward. A text stays that text (`12.50`, `1e3`, `[1, 2]`). A JSON
    object with an `answer` that is a text or a number has its answer there, and its other fields
    are kept beside it.

    Returns:
        `str` or `dict`: The text, or the object with `answer` as a text.
    """
    if not (line.startswith("{") and line.endswith("}")):
        return line
    try:
        # Read the answer as it is written: 12.50 is another text than 12.5.
        verbatim = json.loads(line, parse_float=str, parse_int=str, parse_constant=str)
        answer = verbatim.get("answer")
        has_text = answer is None or isinstance(answer, str)
        if "answer" not in verbatim or not has_text:
            return line

        # Keep the other fields as values.
        fields = json.loads(line, parse_float=_read_float, parse_int=_read_int, parse_constant=str)
        fields["answer"] = answer or ""
        fields.pop("reward", None)
        returned: dict[str, Any] = json.loads(
            replace_surrogates(json.dumps(fields, ensure_ascii=False))
        )
        return returned
    except (ValueError, RecursionError):
        return line


def _read_float(text: str) -> float | str:
    """Return a number of JSON; as its text where no float has its value (1e400)."""
    number = float(text)
    if math.isfinite(number):
        return number
    return text


def _read_int(text: str) -> int | str:
    """Return an integer of JSON; as its text where Python refuses to read so many digits."""
    if len(text) < _MAX_INTEGER_DIGITS:
        return int(text)
    return text


def _fill_argument(template: str, values: Mapping[str, Any]) -> str:
    """Return an argument of the command.

    A value at its beginning is never read as an option: one that begins with `-` gets a space in
    front.
    """
    text = fill(template, **values)
    if text.startswith("-") and not template.startswith("-"):
        return " " + text
    return text


def _address_variables(harness: Harness | None, values: Mapping[str, Any]) -> dict[str, str]:
    """Return how the command learns of the address: a harness by its own settings, any other by
    each vendor's variables.
    """
    if harness is not None:
        return {name: fill(text, **values) for name, text in harness.environment.items()}
    return {variable: str(values[name]) for variable, name in _VENDOR_VARIABLES.items()}


def _write_settings(
    harness: Harness, home: Path, values: Mapping[str, Any], system_prompt: str | None
) -> None:
    files = {name: fill(text, **values) for name, text in harness.files.items()}
    # The run's system prompt goes where the harness looks for one of its user's.
    if system_prompt and harness.prompt_file:
        files[harness.prompt_file] = system_prompt
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _complaint(out: BinaryIO, err: BinaryIO) -> str:
    """Return the end of what a command that failed wrote."""
    # Some commands write their errors to the standard output.
    complaint = _tail(err, 2**12).strip() or _tail(out, 2**12).strip()
    return complaint[-_MAX_COMPLAINT_LENGTH:]


def _hint_at_hidden_files(complaint: str) -> str:
    """Return a hint if a confined command missed a file that exists outside, or a module."""
    missing_paths = re.findall(r"No such file or directory: '(/[^']+)'", complaint)
    is_hidden = any(os.path.exists(path) for path in missing_paths)
    if not is_hidden and "ModuleNotFoundError" not in complaint:
        return ""
    return (
        " (a confined command sees only the paths that it names: CommandProgram(..., "
        "workspace=Workspace(shows=[...])) adds others)"
    )


def _last_line(file: BinaryIO) -> str:
    """Return the last line that is not blank.

    Raises:
        [`LimitExceeded`]: It is longer than an answer may be.
    """
    text = _tail(file, _MAX_ANSWER_BYTES).rstrip()
    # A carriage return ends a line, too: progress bars write over theirs.
    _, newline, line = text.replace("\r", "\n").rpartition("\n")

    # The line begins before the tail: it is too long.
    if not newline and os.fstat(file.fileno()).st_size > _MAX_ANSWER_BYTES:
        raise LimitExceeded(
            f"the last line of the command's output has more than {_MAX_ANSWER_BYTES} bytes"
        )
    return line.strip()


def _tail(file: BinaryIO, size: int) -> str:
    """Return the end of a file, at most `size` bytes of it."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read().decode("utf-8", "replace")
