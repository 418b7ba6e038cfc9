"""`agentic-prompting check-env --harness codex`: prints what `harnesses.check_harness` reports."""

from __future__ import annotations

import json

from .loader import load_object
from .terminal import print_styled, print_text


def check_harness(name: str, dialect: str, isolation: str, as_json: bool) -> int:
    """Play one task in a harness, and show what was seen: calls, token sequences, seconds, names that it looked up.

    Returns:
        `int`: The exit code: 0 if the harness did the task.
    """
    from ..harnesses import Harness, get_harness
    from ..harnesses.check_harness import check_harness as play_and_report

    # Your own is named as module:name, a known one by a word.
    harness = load_object(name, "harness") if ":" in name else get_harness(name, dialect)
    if not isinstance(harness, Harness):
        raise ValueError(f"{name} is a {type(harness).__name__}, and not a Harness")
    report = play_and_report(harness, isolation)  # type: ignore[arg-type]  # Workspace checks it
    if as_json:
        print_text(json.dumps(report, default=str))
    else:
        for label, value in report.items():
            print_styled(f"{label:22}{value}")
    return int(not report["wrote_the_file"])
