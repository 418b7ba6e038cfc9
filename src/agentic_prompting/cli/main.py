"""`agentic-prompting`: its sub-commands, and what every one of them does with errors.

To add a sub-command, write a function whose parameters are its options (of a dataclass: its fields), and put it into
`COMMANDS`. What is imported at the top of its file is loaded for every `--help`: heavy imports stand in the function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from .commands import ask, data, evaluate, report, serve
from .doctor import doctor
from .evolve import evolve
from .options import command, show_help
from .refine import refine
from .train import demo, train

COMMANDS: dict[str, Callable[..., int] | typer.Typer] = {
    "demo": demo,
    "train": train,
    "evaluate": evaluate,
    "ask": ask,
    "refine": refine,
    "evolve": evolve,
    "serve": serve,
    "report": report,
    "data": data,
    "doctor": doctor,
}
"""By name, in the order of `--help`: functions that return the exit status, or a group of them."""

# The demonstrations take the options of the programs they run.
_SETTINGS = {"demo": {"allow_extra_args": True, "ignore_unknown_options": True}}

BAD_INPUT = 2

app = typer.Typer(
    help="Language models that learn to prompt other language models.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name, _command in COMMANDS.items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name, context_settings=_SETTINGS.get(_name))(command(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print("agentic-prompting", version("agentic-prompting"))
        raise typer.Exit


@app.callback()
def _group(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Language models that learn to prompt other language models."""
    show_help(context)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, 1 if something failed on the way, 2 for bad input, 130 after
    Ctrl-C (of which Typer takes care, or a command that has something to say).

    A [`ValueError`] or [`OSError`] of a command is bad input: one line that says what to do, no traceback.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = app(args=[_with_dashes(word) for word in given], prog_name="agentic-prompting", standalone_mode=False)
    except TyperException as error:
        _refuse(getattr(error, "format_message", error.__str__)())
    except (ValueError, OSError) as error:
        _refuse(str(error))
    except Exception as error:
        from ..llm import LLMError

        if not isinstance(error, LLMError):
            raise
        _say(f"the large LLM cannot be asked: {error}")
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _with_dashes(word: str) -> str:
    """Options may be written as TRL's scripts have them: `--output_dir` is `--output-dir`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _refuse(message: str) -> NoReturn:
    _say(message)
    sys.exit(BAD_INPUT)


def _say(message: str) -> None:
    from ..llm.wire import visible

    print(f"agentic-prompting: {visible(' '.join(message.split()))}", file=sys.stderr)
