"""Runs a program: one line for an error that the user can correct, and the exit status of a shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

BAD_INPUT = 2
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


def run_script(main: Callable[[], object]) -> None:
    """Run a program's `main`: no traceback for errors that the user can correct.

    Args:
        main (`Callable`): Called without arguments.

    Raises:
        `SystemExit`: With status 2 after a line about a bad option, value, file or part of your own; with 1 after a
            line about an endpoint; with 130 after Ctrl-C.
    """
    from ..llm import LLMError
    from ..llm.guard import raised_in

    try:
        main()
    except (ValueError, OSError, LLMError) as error:
        line = f"{' '.join(str(error).split())}{raised_in(error)}"
        print(f"agentic-prompting: {line}", file=sys.stderr, flush=True)
        sys.exit(1 if isinstance(error, LLMError) else BAD_INPUT)
    except KeyboardInterrupt as interrupted:
        if os.environ.get("RANK", "0") == "0":  # the first process of the job speaks for all
            print(
                str(interrupted) or "interrupted; what is not in a checkpoint is lost",
                file=sys.stderr,
                flush=True,
            )
        sys.exit(INTERRUPTED)
