"""Findings about options and packages, which `doctor` prints and a training program raises before it begins."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata as metadata
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    "serve": (("fastapi", "uvicorn", "prometheus-client"), "agentic-prompting serve"),
    "otel": (
        ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
        "traces (OpenTelemetry)",
    ),
    "tracking": (("tensorboard",), "report_to: tensorboard"),
    "real": (("gguf", "bm25s"), "`demo --real`, and reading GGUF files"),
    "report": (("matplotlib",), "pictures (PNG) of runs and reports"),
}
"""By extra: its distributions, and what needs them."""


class Finding(NamedTuple):
    """One line: `ok`, `warning` (something will not work) or `problem` (the run will fail), and what to type then."""

    level: Literal["ok", "warning", "problem"]
    says: str
    fix: str = ""


def ok(says: str) -> Finding:
    """A finding that needs nothing."""
    return Finding("ok", says)


def warning(says: str, fix: str) -> Finding:
    """A finding about something that will not work."""
    return Finding("warning", says, fix)


def problem(says: str, fix: str) -> Finding:
    """A finding because of which the run will fail."""
    return Finding("problem", says, fix)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises `ValueError`, in one line, if it is no YAML."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


# --- installed packages ----------------------------------------------------------------------------------------------


def missing_extras(values: Mapping[str, Any]) -> Iterator[Finding]:
    """A finding for each extra that is not installed: a problem if the values need it, else a warning."""
    needed = {
        "vllm": values.get("use_vllm"),
        "math": "math"
        in ([reward] if isinstance(reward := values.get("reward"), str) else reward or ()),
        "search": values.get("environment") == "search",
        "real": values.get("real"),
        "deepspeed": values.get("deepspeed"),
        "otel": values.get("traces"),
        "tracking": "tensorboard" in str(values.get("report_to")),
    }
    for extra, (distributions, purpose) in EXTRAS.items():
        missing = [name for name in distributions if version_of(name) is None]
        if missing:
            says = f"extra [{extra}] is missing ({', '.join(missing)}), needed for {purpose}"
            # With constraints.txt pip searches for minutes and ends in ResolutionImpossible.
            apart = (
                ", with `-c constraints-gpu.txt`: vLLM pins other versions"
                if extra == "vllm"
                else ""
            )
            yield (problem if needed.get(extra) else warning)(
                says, f"pip install '{PACKAGE}[{extra}]'{apart}"
            )


def version_of(name: str) -> str | None:
    """The installed version of a package, or of its build for a CPU; `None` if there is none."""
    for one in (name, f"{name}-cpu"):  # the name of vLLM's build for a CPU
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(one)
    return None


def misspelt(
    values: Mapping[str, Any], fields: Collection[str], where: str, program: str
) -> Iterator[Finding]:
    """A problem for each name that is no option, with the option that is most like it."""
    for name in [name for name in values if name not in fields]:
        near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.6)
        fix = f"delete the line; {program} --help-all shows every option"
        if near:  # a long value would hide the name
            fix = (
                f"{near[0]}: {value}"
                if len(value := str(values[name])) < 40
                else f"did you mean {near[0]}?"
            )
        yield problem(f"{where}{name!r} is no option of {program}", fix)
