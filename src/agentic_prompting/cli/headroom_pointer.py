"""The line with which `train` and `evolve` point to `headroom`, before they spend anything."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from ..evaluation.headroom_figures import HEADROOM_FILE


def point_to_headroom(folder: Path, options: str, stream: TextIO) -> None:
    """Print a line, unless `headroom` has written its file into the folder of the run.

    Args:
        folder (`Path`): The folder of the run.
        options (`str`): The options of `headroom` that measure this run.
        stream (`TextIO`): Where to print.
    """
    if not (folder / HEADROOM_FILE).exists():
        print(
            "nothing was measured before this run; `agentic-prompting headroom "
            f"{options}` says what it can gain",
            file=stream,
            flush=True,
        )
