"""The line with which `train` and `evolve` point to `headroom`, before they spend anything."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..evaluation.headroom_figures import HEADROOM_FILE


def point_to_headroom(folder: Path, options: Mapping[str, Any], stream: TextIO) -> None:
    """Print a line, unless `headroom` has written its file into the folder of the run.

    Args:
        folder (`Path`): The folder of the run.
        options (`Mapping[str, Any]`): The options of `headroom` that measure this run, by name.
            Those that are not set are left out.
        stream (`TextIO`): Where to print.
    """
    if (folder / HEADROOM_FILE).exists():
        return
    words = []
    for name, value in options.items():
        if value not in (None, ""):
            words += [f"--{name}", str(value)]
    print(
        f"nothing was measured before this run; `agentic-prompting headroom {shlex.join(words)}` "
        "says what it can gain",
        file=stream,
        flush=True,
    )
