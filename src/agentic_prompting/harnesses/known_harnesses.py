"""The settings of the command-line agents that were tried, and [`get_harness`], which returns them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from .harness import Harness


def get_harness(name: str, dialect: str = "", task: str = "{question}", **changes: Any) -> Harness:
    """The settings of a known harness.

    Args:
        name (`str`): `codex`, `claude-code`, `opencode`, `pi`, `qwen-code`, `gemini-cli` or
            `mini-swe-agent`.
        dialect (`str`, *optional*): `chat`, `responses`, `messages` or `google`, where it speaks
            several.
        task (`str`, *optional*, defaults to `"{question}"`): Its task, as a template over the row.
        **changes: Other fields of [`Harness`].

    Raises:
        `ValueError`: There is no such harness, or it does not speak the dialect.

    Example:

    ```python
    program = CommandProgram(get_harness("codex", task="{question} The tests are in tests/."))
    ```
    """
    if name not in HARNESSES:
        raise ValueError(
            f"there are settings for {', '.join(HARNESSES)}; for {name!r} make a Harness"
        )
    settings = HARNESSES[name]
    return replace(settings, dialect=dialect or settings.dialect, task=task, **changes)


# Files of settings. They name the gateway as the provider, where a harness wants that in a file,
# and turn off updates and reports of use, where it has such settings.
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


def _settings_with_authentication(method: str) -> str:
    """Settings of gemini-cli and qwen-code, which come from the same program."""
    return json.dumps({**_GEMINI, "security": {"auth": {"selectedType": method}}})


_KNOWN = (
    Harness(
        name="mini-swe-agent",
        command=(
            "mini",
            "-y",
            "--exit-immediately",
            "-t",
            "{task}",
            "-m",
            "openai/{model}",
            "-c",
            "mini.yaml",
            "--model-class",
            "{api}",
            "-o",
            "{home}/run.traj.json",
        ),
        dialects={
            "chat": ("litellm", "{base_url}"),
            "responses": ("litellm_response", "{base_url}"),
        },
        environment={
            "OPENAI_API_BASE": "{url}",
            "OPENAI_API_KEY": "{api_key}",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            # The table of prices that is installed, in place of a download.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "TYPER_STANDARD_TRACEBACK": "1",  # a traceback drawn by rich takes up to 14 s
        },
        answer=("run.traj.json", "info", "submission"),
        trace="run.traj.json",
        version="2.4.6",
        package="pip install mini-swe-agent",
    ),
    Harness(
        name="codex",
        command=(
            "codex",
            "exec",
            "--skip-git-repo-check",
            # The workspace confines the command, and there is no user to approve its actions.
            "--dangerously-bypass-approvals-and-sandbox",
            "{task}",
        ),
        dialects={"responses": ("responses", "{base_url}")},
        environment={"CODEX_HOME": "{home}/.codex", "POLICY_KEY": "{api_key}"},
        files={".codex/config.toml": _CODEX},
        prompt_file=".codex/AGENTS.md",
        trace=".codex/sessions/**/rollout-*.jsonl",
        version="0.169.0",
        package="npm install -g @openai/codex",
    ),
    Harness(
        name="claude-code",
        command=(
            "claude",
            "--print",
            "--dangerously-skip-permissions",
            "--model",
            "{model}",
            "{task}",
        ),
        dialects={"messages": ("", "{address}")},
        environment={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "{api_key}",
            # Its small model, which writes titles, is the policy too.
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "CLAUDE_CONFIG_DIR": "{home}/.claude",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{output}",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{window}",
            # No fields that only Anthropic's own API knows, such as `context_management`.
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            # The workspace confines it; as root it would refuse to skip permissions otherwise.
            "IS_SANDBOX": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # A line in the system prompt that differs from call to call.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        },
        prompt_file=".claude/CLAUDE.md",
        trace=".claude/projects/*/*.jsonl",
        version="2.1.332",
        package="npm install -g @anthropic-ai/claude-code",
    ),
    Harness(
        name="opencode",
        command=("opencode", "run", "--model", "local/{model}", "{task}"),
        dialects={
            "chat": ("openai-compatible", "{base_url}"),
            "responses": ("openai", "{base_url}"),
            "messages": ("anthropic", "{base_url}"),
            "google": ("google", "{address}/v1beta"),
        },
        environment={
            "OPENCODE_CONFIG_CONTENT": _OPENCODE,
            # No downloads: a network of the rollout's own has the gateway alone.
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        prompt_file=".config/opencode/AGENTS.md",
        trace=".local/share/opencode/opencode.db",
        version="1.18.33",
        package="npm install -g opencode-ai",
    ),
    Harness(
        name="pi",
        command=("pi", "--provider", "local", "--model", "{model}", "--print", "{task}"),
        dialects={
            "chat": ("openai-completions", "{base_url}"),
            "responses": ("openai-responses", "{base_url}"),
            "messages": ("anthropic-messages", "{address}"),
            "google": ("google-generative-ai", "{address}/v1beta"),
        },
        environment={"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"},
        files={".pi/agent/models.json": _PI},
        prompt_file=".pi/agent/AGENTS.md",
        trace=".pi/agent/sessions/**/*.jsonl",
        version="0.73.1",
        package="npm install -g @mariozechner/pi-coding-agent",
    ),
    Harness(
        name="qwen-code",
        command=("qwen", "--yolo", "--prompt", "{task}"),
        dialects={"chat": ("openai", "{base_url}")},
        environment={
            "OPENAI_API_KEY": "{api_key}",
            "OPENAI_BASE_URL": "{url}",
            "OPENAI_MODEL": "{model}",
            # It would start itself anew for a larger heap, which takes seconds.
            "QWEN_CODE_NO_RELAUNCH": "true",
        },
        files={".qwen/settings.json": _settings_with_authentication("openai")},
        prompt_file=".qwen/QWEN.md",
        trace=".qwen/projects/*/chats/*.jsonl",
        version="0.15.10",
        package="npm install -g @qwen-code/qwen-code",
    ),
    Harness(
        name="gemini-cli",
        command=("gemini", "--yolo", "--model", "{model}", "--prompt", "{task}"),
        dialects={"google": ("gemini-api-key", "{address}")},
        environment={
            "GEMINI_API_KEY": "{api_key}",
            "GOOGLE_GEMINI_BASE_URL": "{url}",
            "GEMINI_TELEMETRY_ENABLED": "false",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        },
        files={".gemini/settings.json": _settings_with_authentication("gemini-api-key")},
        prompt_file=".gemini/GEMINI.md",
        trace=".gemini/tmp/*/chats/session-*.jsonl",
        version="0.61.0",
        package="npm install -g @google/gemini-cli",
    ),
)

HARNESSES: dict[str, Harness] = {harness.name: harness for harness in _KNOWN}
"""The harnesses whose settings are known, by name."""
