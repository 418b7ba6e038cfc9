"""Resolves each extra of pyproject.toml, and each documented combination, under its constraints.

    make resolve                                  # with uv in .venv
    python docs/tools/resolve.py vllm,deepspeed   # some of them

Nothing is installed. Exit status 1 if one has no solution; its first lines say why.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
GPU = "constraints-gpu.txt"
DOCUMENTED = ["vllm,deepspeed", "vllm,deepspeed,serve,report,math,search,mcp", "serve,report,mcp"]
"""Combinations of the pages, README and workflows."""


def combinations() -> list[str]:
    """Each extra alone, and those documented."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["optional-dependencies"], *DOCUMENTED]


def constraints_of(extras: str) -> str:
    """The file that some extras are installed with."""
    return GPU if "vllm" in extras.split(",") else "constraints.txt"


def why_not(extras: str) -> str:
    """Empty if some extras resolve, else what uv says."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "pyproject.toml",
        "-c",
        constraints_of(extras),
    ]
    command += ["--python-version", "3.11.9", "--python-platform", "x86_64-manylinux_2_28"]
    chosen = [word for one in extras.split(",") for word in ("--extra", one)]
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True)
    return done.stderr.strip()[:2000] if done.returncode else ""


def main() -> None:
    failed = 0
    for extras in sys.argv[1:] or combinations():
        why = why_not(extras)
        failed += bool(why)
        print(f"[{extras}] with {constraints_of(extras)}: {why or 'resolves'}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
