"""[`Harness`]: how a command-line agent gets an address, as data."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..llm import Misconfigured
from ..llm.surrogates import replace_surrogates

logger = logging.getLogger(__name__)

MAX_RECORD_BYTES = 2**26  # bytes of a harness's own file; an agent can write larger ones


class NotInstalled(Misconfigured, ValueError):
    """The program of a harness is not there."""


@dataclass(frozen=True)
class Harness:
    """Settings of a command-line agent. Its texts are templates.

    They may hold `{base_url}` (it ends with `/v1`), `{address}` (without that), `{url}` (what the
    dialect needs), `{api}` (the harness's own name of that dialect), `{api_key}`, `{model}`,
    `{window}` and `{output}` (tokens of a context and of a reply, as the trainer has them),
    `{home}`, `{work}`, `{task}`, and every column of the row.

    Args:
        name (`str`): Its name.
        command (`tuple[str, ...]`): Program and arguments.
        dialects (`dict[str, tuple[str, str]]`): The dialects that it speaks, the first by default:
            its own name of each and the template of `{url}`.
        environment (`dict[str, str]`, *optional*): Variables of its environment.
        files (`dict[str, str]`, *optional*): Files below its home, by path.
        prompt_file (`str`, *optional*): Where it looks for a prompt of the user's, below its home;
            the system prompt of the run goes there. Without one that prompt stands in front of
            every conversation.
        answer (`tuple[str, ...]`, *optional*): A file below its home and the keys at which that has
            the answer. By default the answer is the last line of its output.
        trace (`str`, *optional*): Its own record of a session, below its home: a pattern of files
            with JSON.
        version (`str`, *optional*): The version that these settings were tried with.
        package (`str`, *optional*): How it is installed.
        task (`str`, *optional*, defaults to `"{question}"`): Its task, as a template over the row.
        dialect (`str`, *optional*): The dialect in use.

    Example:

    ```python
    mine = Harness(
        "mine",
        ("my-agent", "--ask", "{task}"),
        {"chat": ("", "{base_url}")},
        {"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{api_key}", "OPENAI_MODEL": "{model}"},
    )
    program = CommandProgram(mine)
    ```
    """

    name: str
    command: tuple[str, ...]
    dialects: Mapping[str, tuple[str, str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    prompt_file: str | None = None
    answer: tuple[str, ...] = ()
    trace: str = ""
    version: str = ""
    package: str = ""
    task: str = "{question}"
    dialect: str = ""

    def __post_init__(self):
        # The class is frozen, and the default dialect is the first one.
        object.__setattr__(self, "dialect", self.dialect or next(iter(self.dialects)))
        if self.dialect not in self.dialects:
            raise ValueError(f"{self.name} speaks {', '.join(self.dialects)}, not {self.dialect!r}")

    def check(self) -> None:
        """Warn where another version is installed than was tried.

        Raises:
            [`NotInstalled`]: Its program is not in `PATH`.
        """
        program = shutil.which(self.command[0])
        if program is None:
            instruction = f": {self.package}" if self.package else ""
            raise NotInstalled(
                f"there is no program {self.command[0]!r} in PATH: install {self.name}{instruction}"
            )

        # Another version may read other settings, or work all the same: only warn.
        installed_version = _find_version(Path(program).resolve(), self.package)
        if self.version and installed_version not in ("", self.version):
            logger.warning(
                "%s is installed in version %s; its settings here were tried with %s: see what "
                "check-env says",
                self.name,
                installed_version,
                self.version,
            )

    def read_answer(self, home: Path) -> str | None:
        """Return the answer that it left in a file; `None` if there is none."""
        file_name, *keys = self.answer
        file = home / file_name
        try:
            # An agent may have left anything at this path.
            if file.stat().st_size > MAX_RECORD_BYTES:
                return None
            text = file.read_text(encoding="utf-8")
            value = _look_up(json.loads(text), keys)
            if isinstance(value, int | float):
                # As it is written: 12.50 is another text than 12.5.
                verbatim = json.loads(text, parse_float=str, parse_int=str, parse_constant=str)
                value = _look_up(verbatim, keys)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        answer = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return replace_surrogates(answer).strip() or None


def _look_up(value: Any, keys: Sequence[str]) -> Any:
    """Return the value at a path of keys."""
    for key in keys:
        value = value[key]
    return value


def _find_version(program: Path, package: str) -> str:
    """Return the version of an installed program, of npm or of pip; empty if neither says it."""
    # npm: the nearest package.json above the program.
    for folder in program.parents:
        file = folder / "package.json"
        if file.is_file():
            return str(json.loads(file.read_text()).get("version", ""))

    # pip: the folder of metadata, named after the package and its version.
    if not package:
        return ""
    install_target = package.split("==")[0].split()[-1]
    distribution = install_target.replace("-", "_")
    for info in program.parent.parent.glob(f"lib/python*/site-packages/{distribution}-*.dist-info"):
        return info.name.removeprefix(f"{distribution}-").removesuffix(".dist-info")
    return ""
