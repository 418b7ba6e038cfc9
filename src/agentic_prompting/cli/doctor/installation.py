"""Is what is installed what this package asks for, and what would not work without the rest?"""

from __future__ import annotations

import importlib.metadata as metadata
import platform
from collections.abc import Iterator

from .finding import Finding, Level, Setup

PACKAGE = "agentic-prompting"

EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "deepspeed": (("deepspeed",), "DeepSpeed (ZeRO) with accelerate"),
    "vllm": (("vllm",), "use_vllm (faster rollouts on GPUs)"),
    "math": (("math-verify",), "the reward `math`"),
    "similarity": (("sentence-transformers",), "the metric semantic_similarity"),
    "optimizers": (("gepa", "textgrad"), "GEPA and TextGrad as baselines in tables"),
    "search": (("bm25s", "requests"), "agentic search with BM25 or over HTTP"),
    "serve": (("fastapi", "uvicorn", "prometheus-client"), "agentic-prompting serve"),
    "tracking": (("tensorboard",), "report_to: tensorboard"),
    "report": (("matplotlib",), "pictures (PNG) of runs and reports"),
}
"""By extra: its distributions, and what needs them."""

_CORE = ("torch", "trl", "transformers", "accelerate", "peft", "datasets", "openai")
_BESIDE = ("vllm", "deepspeed")  # asked for by extras, and looked at where they are installed


def python_version(setup: Setup) -> Iterator[Finding]:
    """Python against `requires-python`."""
    from packaging.specifiers import SpecifierSet

    asked = str(metadata.metadata(PACKAGE).json.get("requires_python", ""))
    running = platform.python_version()
    if SpecifierSet(asked).contains(running, prereleases=True):
        yield Finding("ok", f"python {running}")
    else:
        yield Finding(
            "problem", f"python {running}, but {asked} is needed", f"python{asked.lstrip('>=~')} -m venv .venv"
        )


def versions(setup: Setup) -> Iterator[Finding]:
    """The packages that matter against the ranges of pyproject.toml."""
    ranges = _ranges()
    for name in (*_CORE, *_BESIDE):
        installed = _version(name)
        asked = ranges.get(name)
        if installed is None:
            if name in _CORE:
                yield Finding("problem", f"{name} is not installed", f"pip install '{name}{asked or ''}'")
        elif asked is not None and not asked.contains(installed, prereleases=True):
            says = f"{name} {installed} is not supported: {asked} is needed"
            yield Finding("problem", says, f"pip install '{name}{asked}'")
        else:
            yield Finding("ok", f"{name} {installed}")


def extras(setup: Setup) -> Iterator[Finding]:
    """Which extras are missing. One that the configuration needs is a problem, any other a warning."""
    needed = _needed_extras(setup)
    for extra, (distributions, purpose) in EXTRAS.items():
        missing = [name for name in distributions if _version(name) is None]
        if missing:
            level: Level = "problem" if extra in needed else "warning"
            says = f"extra [{extra}] is missing ({', '.join(missing)}), needed for {purpose}"
            yield Finding(level, says, f"pip install '{PACKAGE}[{extra}]'")


def _needed_extras(setup: Setup) -> set[str]:
    needs = {
        "vllm": bool(setup.values.get("use_vllm")),
        "math": setup.values.get("reward") == "math",
        "search": setup.values.get("environment") == "search",
        "deepspeed": bool(setup.values.get("deepspeed")),
        "tracking": "tensorboard" in str(setup.values.get("report_to")),
    }
    return {extra for extra, needed in needs.items() if needed}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ranges():
    """What this package asks of each other one, extras included: `packaging`'s specifiers by name."""
    from packaging.requirements import Requirement

    asked = [Requirement(line) for line in metadata.requires(PACKAGE) or ()]
    return {one.name: one.specifier for one in asked if str(one.specifier)}
