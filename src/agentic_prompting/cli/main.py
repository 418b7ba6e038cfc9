"""`agentic-prompting`: its sub-commands, and what every one of them does with errors.

To add a sub-command, write `cli/<name>.py` with a function whose parameters are its options, and put it into
`COMMANDS`. What is imported at the top of such a file is loaded for every `--help`, so heavy imports stand in the
function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from .data import data
from .evaluate import evaluate
from .refine import refine
from .report import report
from .serve import serve

COMMANDS: dict[str, Callable[..., int]] = {
    "data": data,
    "evaluate": evaluate,
    "refine": refine,
    "report": report,
    "serve": serve,
}
"""By name: functions that return the exit status."""

BAD_INPUT = 2

app = typer.Typer(
    help="Language models that learn to prompt other language models.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name, _function in COMMANDS.items():
    app.command(_name)(_function)


@app.callback()
def _group() -> None:
    """Language models that learn to prompt other language models."""  # keeps `refine` a sub-command while it is alone


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, 1 if something failed on the way, 2 for bad input, 130 after
    Ctrl-C (of which Typer takes care, or a command that has something to say).

    A [`ValueError`] or [`OSError`] of a command is bad input: one line that says what to do, no traceback.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    try:
        status = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except TyperException as error:
        _refuse(getattr(error, "format_message", error.__str__)())
    except (ValueError, OSError) as error:
        _refuse(str(error))
    sys.exit(status if isinstance(status, int) else 0)


def _refuse(message: str) -> NoReturn:
    print(f"agentic-prompting: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(BAD_INPUT)
