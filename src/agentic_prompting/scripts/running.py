"""What all programs do alike: end with one line that says what to do, and with a status that a shell can read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ..llm import LLMError

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


def run_script(main: Callable[[], object]) -> None:
    """Run a program's `main`: no traceback for what the user can mend.

    Args:
        main (`Callable`): Called without arguments.

    Raises:
        `SystemExit`: With status 1 and a line about a bad option, file or endpoint; with 130 after Ctrl-C.
    """
    try:
        main()
    except (ValueError, FileNotFoundError, LLMError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt as interrupted:
        if os.environ.get("RANK", "0") == "0":  # the first process of the job speaks for all
            print(str(interrupted) or "interrupted; what is not in a checkpoint is lost", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
