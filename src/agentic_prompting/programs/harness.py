"""[`Harness`]: how a command-line agent gets an address, as data; and the table of the agents that were tried."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..llm import Misconfigured

logger = logging.getLogger(__name__)

LARGEST_RECORD = 2**26  # bytes of a harness's own file; an agent can write larger ones


class NotInstalled(Misconfigured, ValueError):
    """The program of a harness is not there."""


@dataclass(frozen=True)
class Harness:
    """Settings of a command-line agent. Its texts are templates.

    They may hold `{base_url}` (it ends with `/v1`), `{address}` (without that), `{url}` (what the dialect needs),
    `{api}` (the harness's own name of that dialect), `{api_key}`, `{model}`, `{window}` and `{output}` (tokens of a
    context and of a reply, as the trainer has them), `{home}`, `{work}`, `{task}`, and every column of the row.

    Args:
        name (`str`): Its name.
        command (`tuple[str, ...]`): Program and arguments.
        dialects (`dict[str, tuple[str, str]]`): The dialects that it speaks, the first by default: its own name of each
            and the template of `{url}`.
        environment (`dict[str, str]`, *optional*): Variables of its environment.
        files (`dict[str, str]`, *optional*): Files below its home, by path.
        prompt_file (`str`, *optional*): Where it looks for a prompt of the user's, below its home; the system prompt of
            the run goes there. Without one that prompt stands in front of every conversation.
        answer (`tuple[str, ...]`, *optional*): A file below its home and the keys at which that has the answer. By
            default the answer is the last line of its output.
        trace (`str`, *optional*): Its own record of a session, below its home: a pattern of files with JSON.
        version (`str`, *optional*): The version that these settings were tried with.
        package (`str`, *optional*): How it is installed.
        task (`str`, *optional*, defaults to `"{question}"`): Its task, as a template over the row.
        dialect (`str`, *optional*): The dialect in use.

    Example:

    ```python
    mine = Harness("mine", ("my-agent", "--ask", "{task}"), {"chat": ("", "{base_url}")}, {"OPENAI_MODEL": "{model}"})
    program = Program(mine)
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
        object.__setattr__(self, "dialect", self.dialect or next(iter(self.dialects)))
        if self.dialect not in self.dialects:
            raise ValueError(f"{self.name} speaks {', '.join(self.dialects)}, not {self.dialect!r}")

    def check(self) -> None:
        """Warn where another version is installed than was tried.

        Raises:
            [`NotInstalled`]: Its program is not in `PATH`.
        """
        found = shutil.which(self.command[0])
        if found is None:
            how = f": {self.package}" if self.package else ""
            raise NotInstalled(
                f"there is no program {self.command[0]!r} in PATH: install {self.name}{how}"
            )
        installed = _version_of(Path(found).resolve(), self.package)
        if self.version and installed not in ("", self.version):
            logger.warning(
                "%s is installed in version %s; its settings here were tried with %s: see what check-env says",
                self.name, installed, self.version,
            )  # fmt: skip

    def answer_in(self, home: Path) -> str | None:
        """The answer that it left in a file; `None` if there is none."""
        file, keys = home / self.answer[0], self.answer[1:]
        try:
            if file.stat().st_size > LARGEST_RECORD:
                return None
            text = file.read_text(encoding="utf-8")
            value = _value_at(keys, json.loads(text))
            if isinstance(value, int | float):  # as it is written: 12.50 is another text than 12.5
                value = _value_at(
                    keys, json.loads(text, parse_float=str, parse_int=str, parse_constant=str)
                )
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        answer = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        # JSON can hold half a surrogate pair, which no tokenizer and no file takes.
        return answer.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip() or None


def _value_at(keys: Sequence[str], value: Any) -> Any:
    for key in keys:
        value = value[key]
    return value


def _version_of(program: Path, package: str) -> str:
    """The version of an installed program, of npm or of pip; empty if neither says it."""
    for folder in program.parents:
        if (file := folder / "package.json").is_file():
            return str(json.loads(file.read_text()).get("version", ""))
    name = package.split("==")[0].split()[-1].replace("-", "_") if package else ""
    for found in program.parent.parent.glob(f"lib/python*/site-packages/{name}-*.dist-info"):
        return found.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return ""


def harness(name: str, dialect: str = "", task: str = "{question}", **changes: Any) -> Harness:
    """The settings of a known harness.

    Args:
        name (`str`): `codex`, `opencode`, `pi`, `qwen-code`, `gemini-cli` or `mini-swe-agent`.
        dialect (`str`, *optional*): `chat`, `responses`, `messages` or `google`, where it speaks several.
        task (`str`, *optional*, defaults to `"{question}"`): Its task, as a template over the row.
        **changes: Other fields of [`Harness`].

    Raises:
        `ValueError`: There is no such harness, or it does not speak the dialect.

    Example:

    ```python
    program = Program(harness("codex", task="{question} The tests are in tests/."))
    ```
    """
    if name not in HARNESSES:
        raise ValueError(
            f"there are settings for {', '.join(HARNESSES)}; for {name!r} make a Harness"
        )
    return replace(
        HARNESSES[name], dialect=dialect or HARNESSES[name].dialect, task=task, **changes
    )


_CODEX = """\
model = "{model}"
model_provider = "local"
model_context_window = {window}
model_max_output_tokens = {output}
check_for_update_on_startup = false
[model_providers.local]
name = "local"
base_url = "{url}"
env_key = "POLICY_KEY"
wire_api = "{api}"
request_max_retries = 2
stream_max_retries = 2
[analytics]
enabled = false
"""
_GEMINI = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False, "disableUpdateNag": True},
}
_OPENCODE = """\
{"model": "local/{model}", "small_model": "local/{model}", "autoupdate": false, "share": "disabled", "provider":
{"local": {"npm": "@ai-sdk/{api}", "options": {"baseURL": "{url}", "apiKey": "{api_key}"}, "models": {"{model}":
{"name": "{model}", "tool_call": true, "reasoning": true, "limit": {"context": {window}, "output": {output}}}}}}}
"""
_PI = """\
{"providers": {"local": {"baseUrl": "{url}", "api": "{api}", "apiKey": "{api_key}", "models": [{"id": "{model}",
"reasoning": true, "contextWindow": {window}, "maxTokens": {output}}]}}}
"""


def _auth(kind: str) -> str:
    return json.dumps({**_GEMINI, "security": {"auth": {"selectedType": kind}}})


HARNESSES: dict[str, Harness] = {
    one.name: one
    for one in (
        Harness(
            "mini-swe-agent",
            (
                "mini", "-y", "--exit-immediately", "-t", "{task}", "-m", "openai/{model}", "-c", "mini.yaml",
                "--model-class", "{api}", "-o", "{home}/run.traj.json",
            ),
            {"chat": ("litellm", "{base_url}"), "responses": ("litellm_response", "{base_url}")},
            {
                "OPENAI_API_BASE": "{url}", "OPENAI_API_KEY": "{api_key}", "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
                "TYPER_STANDARD_TRACEBACK": "1",  # a drawn one of an error in litellm takes up to 14 s
            },
            answer=("run.traj.json", "info", "submission"),
            trace="run.traj.json",
            version="2.4.6",
            package="pip install mini-swe-agent",
        ),
        Harness(
            "codex",
            ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{task}"),
            {"responses": ("responses", "{base_url}")},
            {"CODEX_HOME": "{home}/.codex", "POLICY_KEY": "{api_key}"},
            {".codex/config.toml": _CODEX},
            prompt_file=".codex/AGENTS.md",
            trace=".codex/sessions/**/rollout-*.jsonl",
            version="0.169.0",
            package="npm install -g @openai/codex",
        ),
        Harness(
            "opencode",
            ("opencode", "run", "--model", "local/{model}", "{task}"),
            {
                "chat": ("openai-compatible", "{base_url}"), "responses": ("openai", "{base_url}"),
                "messages": ("anthropic", "{base_url}"), "google": ("google", "{address}/v1beta"),
            },
            {
                "OPENCODE_CONFIG_CONTENT": _OPENCODE, "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            },
            prompt_file=".config/opencode/AGENTS.md",
            trace=".local/share/opencode/opencode.db",
            version="1.18.33",
            package="npm install -g opencode-ai",
        ),
        Harness(
            "pi",
            ("pi", "--provider", "local", "--model", "{model}", "--print", "{task}"),
            {
                "chat": ("openai-completions", "{base_url}"), "responses": ("openai-responses", "{base_url}"),
                "messages": ("anthropic-messages", "{address}"), "google": ("google-generative-ai", "{address}/v1beta"),
            },
            {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"},
            {".pi/agent/models.json": _PI},
            prompt_file=".pi/agent/AGENTS.md",
            trace=".pi/agent/sessions/**/*.jsonl",
            version="0.73.1",
            package="npm install -g @mariozechner/pi-coding-agent",
        ),
        Harness(
            "qwen-code",
            ("qwen", "--yolo", "--prompt", "{task}"),
            {"chat": ("openai", "{base_url}")},
            {
                "OPENAI_API_KEY": "{api_key}", "OPENAI_BASE_URL": "{url}", "OPENAI_MODEL": "{model}",
                "QWEN_CODE_NO_RELAUNCH": "true",  # else it starts itself anew for a larger heap: seconds
            },
            {".qwen/settings.json": _auth("openai")},
            prompt_file=".qwen/QWEN.md",
            trace=".qwen/projects/*/chats/*.jsonl",
            version="0.15.10",
            package="npm install -g @qwen-code/qwen-code",
        ),
        Harness(
            "gemini-cli",
            ("gemini", "--yolo", "--model", "{model}", "--prompt", "{task}"),
            {"google": ("gemini-api-key", "{address}")},
            {
                "GEMINI_API_KEY": "{api_key}", "GOOGLE_GEMINI_BASE_URL": "{url}", "GEMINI_TELEMETRY_ENABLED": "false",
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
            },
            {".gemini/settings.json": _auth("gemini-api-key")},
            prompt_file=".gemini/GEMINI.md",
            trace=".gemini/tmp/*/chats/session-*.jsonl",
            version="0.61.0",
            package="npm install -g @google/gemini-cli",
        ),
    )
}  # fmt: skip
"""The harnesses whose settings are known, by name."""
