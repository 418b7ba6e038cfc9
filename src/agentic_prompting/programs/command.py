"""Commands as programs: a process group of its own for each rollout, its row in a file, nothing on stdin."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..llm import ServerFailed, fill
from ..llm.spans import carrier

_TAIL = 2**16  # bytes of the output that are read


class CommandFailed(ServerFailed):
    """The command ended with an exit code other than 0.

    Args:
        code (`int`): The exit code.
        what (`str`): The end of its error output.
    """

    def __init__(self, code: int, what: str):
        super().__init__(f"the command ended with {code}: {what}")
        self.code = code


async def run_command(
    command: Sequence[str], row: Mapping[str, Any], hidden: Collection[str], base_url: str, api_key: str
) -> Any:
    """Run a command for one rollout, and end its whole process group with it.

    Args:
        command (`Sequence[str]`): Program and arguments. `{column}` in an argument is that column of the row.
        row (`dict`): The row of the data set.
        hidden (`Collection[str]`): Columns that the command must not see: they hold the truth.
        base_url (`str`): In its environment as `OPENAI_BASE_URL`.
        api_key (`str`): In its environment as `OPENAI_API_KEY`.

    Returns:
        `Any`: The last line of its output: JSON as what it says, else the text; `None` if there is none.

    Raises:
        [`CommandFailed`]: The exit code is not 0.
    """
    shown = {name: value for name, value in row.items() if name not in hidden}
    with tempfile.TemporaryDirectory(prefix="agentic-prompting-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "row.json")
        path.write_text(json.dumps(shown, default=str, ensure_ascii=False), encoding="utf-8")
        values = {**shown, "row": path, "base_url": base_url, "api_key": api_key}
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "AGENTIC_PROMPTING_ROW": str(path)}
        own |= {name.upper(): value for name, value in carrier().items()}  # TRACEPARENT
        # Files, not pipes: a grandchild that holds a pipe open would be waited for, and output fills no memory.
        with open(Path(folder, "out"), "w+b") as out, open(Path(folder, "err"), "w+b") as err:
            process = await asyncio.create_subprocess_exec(
                *(fill(part, **values) for part in command),
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **own},
                start_new_session=True,
            )  # fmt: skip
            try:
                code = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            said, complaint = _tail(out), _tail(err)
    if code:
        raise CommandFailed(code, (complaint.strip() or said.strip())[-300:])
    last = (said.strip().splitlines() or [""])[-1].strip()
    try:
        return json.loads(last)
    except ValueError:
        return last or None


def _tail(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
    return file.read().decode("utf-8", "replace")
