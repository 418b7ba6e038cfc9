"""Runs a program: one line for an error that the user can correct, and the exit status of a shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from .loader import UnknownPart

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


def run_script(main: Callable[[], object]) -> None:
    """Run a program's `main`: no traceback for errors that the user can correct.

    Args:
        main (`Callable`): Called without arguments.

    Raises:
        `SystemExit`: With status 2 and a line about a part of your own that cannot be loaded; with 1 and a line about
            a bad option, file or endpoint; with 130 after Ctrl-C.
    """
    from ..llm import LLMError

    try:
        main()
    except UnknownPart as error:
        print(f"agentic-prompting: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(2)
    except (ValueError, OSError, LLMError) as error:
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
    except KeyboardInterrupt as interrupted:
        if os.environ.get("RANK", "0") == "0":  # the first process of the job speaks for all
            print(str(interrupted) or "interrupted; what is not in a checkpoint is lost", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
