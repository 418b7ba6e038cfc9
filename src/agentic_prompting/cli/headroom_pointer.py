"""The line with which `train` and `evolve` point to `headroom`, before they spend anything."""

from __future__ import annotations

import sys
from pathlib import Path

from ..evaluation.headroom_file import HEADROOM_FILE


def point_to_headroom(folder: Path, options: str) -> None:
    """Print a line on standard error, unless `headroom` has written its file into the folder.

    Args:
        folder (`Path`): The folder of the run.
        options (`str`): The options of `headroom` that measure this run.
    """
    if not (folder / HEADROOM_FILE).exists():
        print(
            "agentic-prompting: nothing was measured before this run; `agentic-prompting "
            f"headroom {options}` says what it can gain",
            file=sys.stderr,
            flush=True,
        )
