"""`agentic-prompting`: its sub-commands, and what every one of them does with errors.

To add a sub-command, write a function whose parameters are its options (of a dataclass: its fields), and put it into
[`COMMANDS`]. A command's file is imported when the command is called, so that `--help` stays quick.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from .loader import register_selections
from .options import command

COMMANDS = {
    "demo": (
        "train",
        "See a method work in the sandbox: a tiny policy, a scripted large LLM; no key.",
    ),
    "train": ("train", "Train through accelerate."),
    "evaluate": ("evaluate", "Ask systems the questions of tasks and write a table."),
    "ask": ("commands", "Ask a trained agent, and see how it asks the large LLM."),
    "refine": (
        "optimize",
        "Repair a prompt for each question while the answer is being written (ProRefine).",
    ),
    "evolve": ("optimize", "Evolve the system prompt of a closed model (E-SPL without weights)."),
    "serve": (
        "serve",
        "Serve a trained agent and its large LLM as one model, for any OpenAI client.",
    ),
    "report": ("commands", "Show what a run left behind."),
    "data": ("commands", "List the data sets, show one, or check them against their sources."),
    "check-env": (
        "check_env",
        "Play three episodes with an environment of your own, without training.",
    ),
    "headroom": (
        "headroom",
        "What can be gained on a task, and whether the signal exists, before a run.",
    ),
    "plan": (
        "plan",
        "Memory, largest batch, calls, dollars and hours of a run before anything is loaded.",
    ),
    "doctor": ("doctor", "Check the installation, and whatever a run needs."),
}
"""Sub-commands in the order of `--help`: the file of the function of that name (`_` for `-`), and what it does. The
function returns the exit status; its docstring is its own `--help`."""

BAD_INPUT = 2
_PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}
# The demonstrations take the options of the programs they run.
_SETTINGS = {"demo": {"allow_extra_args": True, "ignore_unknown_options": True}}


class _Commands(TyperGroup):
    """The sub-commands, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        found = getattr(
            import_module(f".{COMMANDS[cmd_name][0]}", __package__), cmd_name.replace("-", "_")
        )
        if not isinstance(found, typer.Typer):
            one = typer.Typer(**_PLAIN)
            one.command(cmd_name, context_settings=_SETTINGS.get(cmd_name))(command(found))
            found = one
        return get_command(found)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in COMMANDS.items()])


app = typer.Typer(cls=_Commands, invoke_without_command=True, **_PLAIN | {"add_completion": True})


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print("agentic-prompting", version("agentic-prompting"))
        raise typer.Exit


@app.callback()
def _group(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Language models that learn to prompt other language models."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, 1 if something failed on the way, 2 for bad input, 3 if `evolve` learned nothing,
    130 after Ctrl-C or SIGTERM (of which Typer takes care, or a command that has something to say).

    A [`ValueError`] or [`OSError`] of a command is bad input: one line that says what to do, no traceback. It, and the
    warnings of the library, name options of the command where they would name arguments of Python.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if given[:1] == [
            "evolve"
        ]:  # your own rule is known before the settings, which name it, are made
            register_selections(given)
        with _sigterm_as_ctrl_c(), _warnings_as_lines(given):
            words = [_with_dashes(word) for word in given]
            status = app(args=words, prog_name="agentic-prompting", standalone_mode=False)
    except TyperException as error:
        status = _refuse(getattr(error, "format_message", error.__str__)())
    except (ValueError, OSError) as error:
        status = _refuse(in_options(str(error), given))
    except Exception as error:
        from ..llm import LLMError

        if not isinstance(error, LLMError):
            raise
        status = _refuse(f"the large LLM cannot be asked: {error}", status=1)
    sys.exit(status if isinstance(status, int) else 0)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Within it SIGTERM, which schedulers and containers send, ends a command as Ctrl-C does, with the same words."""
    before = signal.getsignal(signal.SIGTERM)
    ours = before is signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _warnings_as_lines(given: Sequence[str]) -> Iterator[None]:
    """Within it the library's warnings are lines on standard error, in the words of the command line."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _refuse(in_options(record.getMessage(), given))

    logger, lines = logging.getLogger(__package__.partition(".")[0]), Lines(logging.WARNING)
    logger.addHandler(lines)
    try:
        yield
    finally:
        logger.removeHandler(lines)


def in_options(message: str, given: Sequence[str]) -> str:
    """A message of the Python API for the command line: `reflect_on='imperfect'` is `--reflect-on imperfect`.

    Args:
        message (`str`): It may name arguments: alone, where they have an underscore, or with a value.
        given (`Sequence[str]`): The command line: only options of its command are named.
    """
    names: set[str] = set()
    if given and given[0] in COMMANDS:
        with suppress(ValueError):  # of a command that needs an extra
            names = {str(one.name) for one in _Commands().get_command(None, given[0]).params}

    def option(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if name not in names or (value is None and "_" not in name):
            return found[0]
        with suppress(ValueError, SyntaxError):
            read = ast.literal_eval(value or "")
            value = shlex.quote(json.dumps(read) if isinstance(read, dict) else str(read))
        return " ".join(["--" + name.replace("_", "-"), *([value] if value else [])])

    return re.sub(
        r"(?<![\w/.`'\"-])(?P<name>[a-z]\w*)(?:=(?P<value>'[^']*'|{[^}]*}|[\w.-]*\w|))?(?![\w/(=])",
        option,
        message,
    )


def _with_dashes(word: str) -> str:
    """Options may be written as TRL's scripts have them: `--output_dir` is `--output-dir`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _refuse(message: str, status: int = BAD_INPUT) -> int:
    from ..llm.masking import escape_controls

    print(f"agentic-prompting: {escape_controls(' '.join(message.split()))}", file=sys.stderr)
    return status
