"""`agentic-prompting`: its sub-commands, and their common treatment of errors.

A sub-command is the function of its name in the file of its name (`_` for `-`): it takes the words
after the name and returns the exit status. Its options are the fields of the dataclasses in the
file's `SETTINGS`, which transformers' parser reads. To add a sub-command, write such a file and put
its name into [`COMMANDS`]. The file is imported when the command is called, so `--help` stays
quick. The functions of [`TYPER_COMMANDS`] have their few options as parameters instead:
transformers' parser would take seconds to import.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from .script import print_error, run_script

COMMANDS = {
    "demo": "See a method work in the sandbox: a tiny policy, a scripted large LLM; no key.",
    "train": "Train through accelerate.",
    "evaluate": "Ask systems the questions of tasks and write a table.",
    "ask": "Ask a trained agent, and see how it asks the large LLM.",
    "refine": "Repair a prompt for each question while the answer is being written (ProRefine).",
    "evolve": "Evolve the system prompt of a closed model (E-SPL without weights).",
    "serve": "Serve a trained agent and its large LLM as one model, for any OpenAI client.",
    "merge": "Save a trained agent as an ordinary model, for vLLM, llama.cpp or Ollama.",
    "report": "Show what a run left behind.",
    "rescore": "Other rewards for a run's stored rollouts, without generating.",
    "data": "List the data sets, show one, or check them against their sources.",
    "check-env": "Play three episodes with an environment of your own, without training.",
    "headroom": "What can be gained on a task, and whether the signal exists, before a run.",
    "plan": "Memory, largest batch, calls, dollars and hours of a run before anything is loaded.",
    "doctor": "Check the installation, and whatever a run needs.",
}
"""Sub-commands in the order of `--help`."""

TYPER_COMMANDS = ("merge", "report", "data")

# The words after a sub-command's name are left to its own parser, `--help` too.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

# Exceptions are left to `run_script`, and help is plain text.
app = typer.Typer(
    pretty_exceptions_enable=False, rich_markup_mode=None, invoke_without_command=True
)


def load_command(name: str) -> Callable[..., int]:
    """The function of a sub-command."""
    function_name = name.replace("-", "_")
    return getattr(import_module(f".{function_name}", __package__), function_name)


def _add_command(name: str) -> None:
    """Add a command whose module is imported only when it is called."""

    def call(context: typer.Context) -> int:
        return load_command(name)(context.args)

    app.command(name, help=COMMANDS[name], context_settings=_PASS_ON)(call)


for _name in COMMANDS:
    if _name in TYPER_COMMANDS:
        app.command(_name, short_help=COMMANDS[_name])(load_command(_name))
    else:
        _add_command(_name)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print("agentic-prompting", version("agentic-prompting"))
        raise typer.Exit


@app.callback()
def _agentic_prompting(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Language models that learn to prompt other language models."""
    # Without a sub-command, show the help.
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0, 1 if something failed on the way, 2 for bad input, 3 if `evolve`
    learned nothing, 130 after Ctrl-C or SIGTERM.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    # Both spellings of options are accepted.
    words = [_with_dashes(word) for word in (sys.argv[1:] if arguments is None else arguments)]

    def run_command() -> int | None:
        # Every command treats SIGTERM and warnings in the same way.
        with _sigterm_as_ctrl_c(), _warnings_as_lines():
            try:
                return app(args=words, prog_name="agentic-prompting", standalone_mode=False)
            except TyperException as error:
                # For `run_script` an error of Typer is bad input, as any ValueError.
                raise ValueError(error.format_message()) from error

    sys.exit(run_script(run_command) or 0)


def _with_dashes(word: str) -> str:
    """Options may be written as in TRL's scripts: `--output_dir` is `--output-dir`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """A context in which SIGTERM, sent by schedulers and containers, ends a command like Ctrl-C."""
    previous = signal.getsignal(signal.SIGTERM)
    is_main_thread = threading.current_thread() is threading.main_thread()
    # Another handler stays as it is, and only the main thread may set one.
    is_replaced = previous is signal.SIG_DFL and is_main_thread
    if is_replaced:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if is_replaced:
            signal.signal(signal.SIGTERM, previous)


class _WarningLines(logging.Handler):
    """Prints the library's warnings as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        print_error(record.getMessage())


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """A context in which the library's warnings are printed as lines on standard error."""
    logger = logging.getLogger(__package__.partition(".")[0])
    handler = _WarningLines(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
