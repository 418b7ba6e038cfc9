"""Runs a program: one line for an error that the user can correct, and the exit status of a shell."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

BAD_INPUT = 2
_LIBRARIES = r"(transformers|trl|peft|accelerate|datasets|huggingface_hub)(\.|$)"
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


def run_script(main: Callable[[], T]) -> T:
    """Run a program's `main` and return its result: no traceback for errors that the user can
    correct.

    Args:
        main (`Callable`): Called without arguments.

    Raises:
        `SystemExit`: With status 2 after a line about a bad option, value, file or part of your
            own; with 1 after a line about an endpoint; with 130 after Ctrl-C.
    """
    # They tell developers of these libraries about renamed arguments, and users nothing.
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=FutureWarning, module=_LIBRARIES)
    try:
        return main()
    except (ValueError, OSError) as error:
        _print_with_place(error)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":  # the first process of the job prints for all
            message = str(interrupt) or "interrupted; what is not in a checkpoint is lost"
            print(message, file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        from ..llm import LLMError  # imported late, so that `--help` stays quick
        from ..llm.guard import raised_in, source_of

        # An error in a function of the user's, which its note names with file and line.
        if source_of(error) and raised_in(error):
            _print_with_place(error)
            sys.exit(BAD_INPUT)
        # Any other error may be a bug, so its traceback is wanted.
        if not isinstance(error, LLMError):
            raise
        _print_with_place(error)
        sys.exit(1)


def print_error(message: str) -> None:
    """Print a message on one line of standard error, with terminal control characters made visible."""
    from ..llm.masking import escape_controls

    print(
        f"agentic-prompting: {escape_controls(' '.join(message.split()))}",
        file=sys.stderr,
        flush=True,
    )


def _print_with_place(error: Exception) -> None:
    """Print an error and, if the user's code raised it, the function and the line that did."""
    from ..llm.guard import raised_in, source_of

    source = source_of(error)
    if not source:
        print_error(f"{error}{raised_in(error)}")
        return
    # Other notes say what was kept, and how to go on.
    advice = [note for note in error.__notes__ if note != source]
    print_error("; ".join([source, *advice]))
