"""The optional dependencies: what needs them, and which of them are not installed."""

from __future__ import annotations

import importlib.metadata as metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PACKAGE = "agentic-prompting"
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "deepspeed": (("deepspeed",), "DeepSpeed (ZeRO) with accelerate"),
    "vllm": (("vllm",), "use_vllm (faster rollouts on GPUs)"),
    "math": (("math-verify",), "the reward `math`"),
    "similarity": (("sentence-transformers",), "the metric semantic_similarity"),
    "optimizers": (("gepa", "textgrad"), "GEPA and TextGrad as baselines in tables"),
    "mcp": (("mcp",), "tools of MCP servers"),
    "dspy": (("dspy",), "agents in DSPy"),
    "search": (("bm25s", "requests"), "agentic search with BM25 or over HTTP"),
    "serve": (("prometheus-client",), "agentic-prompting serve"),
    "otel": (
        ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
        "traces (OpenTelemetry)",
    ),
    "tracking": (("tensorboard",), "report_to: tensorboard"),
    "real": (("gguf", "bm25s"), "`demo --real`, and reading GGUF files"),
    "report": (("matplotlib",), "pictures (PNG) of runs and reports"),
}
"""By extra: its distributions, and what needs them."""


@dataclass(frozen=True)
class MissingExtra:
    """An extra that is not installed."""

    name: str
    distributions: list[str]  # those of it that are missing
    purpose: str
    is_needed: bool  # whether the options of a run need it

    @property
    def message(self) -> str:
        missing = ", ".join(self.distributions)
        return f"extra [{self.name}] is missing ({missing}), needed for {self.purpose}"

    @property
    def fix(self) -> str:
        command = f"pip install '{PACKAGE}[{self.name}]'"
        if self.name == "vllm":
            # With constraints.txt pip searches for minutes and ends in ResolutionImpossible.
            command += ", with `-c constraints-gpu.txt`: vLLM pins other versions"
        return command


def find_missing_extras(options: Mapping[str, Any]) -> list[MissingExtra]:
    """The extras that are not installed, and whether the options of a run need them."""
    # A single reward may be given without a list.
    rewards = options.get("reward") or []
    if isinstance(rewards, str):
        rewards = [rewards]
    # The options that need an extra.
    is_needed = {
        "vllm": options.get("use_vllm"),
        "math": "math" in rewards,
        "search": options.get("environment") == "search",
        "real": options.get("real"),
        "deepspeed": options.get("deepspeed"),
        "otel": options.get("traces"),
        "tracking": "tensorboard" in str(options.get("report_to")),
    }
    extras = []
    for name, (distributions, purpose) in EXTRAS.items():
        # An extra is missing if any of its packages is.
        missing = [
            distribution for distribution in distributions if version_of(distribution) is None
        ]
        if missing:
            extras.append(MissingExtra(name, missing, purpose, bool(is_needed.get(name))))
    return extras


def check_extras(options: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the options of a run need an extra that is not installed."""
    for extra in find_missing_extras(options):
        if extra.is_needed:
            raise ValueError(f"{extra.message}: {extra.fix}")


def version_of(name: str) -> str | None:
    """The installed version of a package, or of its build for a CPU; `None` if there is none."""
    for distribution in (name, f"{name}-cpu"):  # vLLM's build for a CPU has a name of its own
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
