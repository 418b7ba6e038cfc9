"""Prints the output of the commands: texts of models without control characters, episodes, tables,
and a progress display.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .script import print_error

if TYPE_CHECKING:
    from ..rollout import Observation, Rollout, Turn

REQUEST_LABEL = "agent asks"
"""Stands in front of a request."""
_SECONDS_IN_SILENCE = 15.0  # of an activity, after which a log has a line about it
_SHOWN_LENGTH = 2_000  # characters of a program's first request, of its turns and its answer
_REPEATED_LENGTH = 200  # characters of an answer that is printed although the last turn has it
_EMPTY_CELLS = {"0", "0.0", "0.00000", "–", ""}


def print_text(text: str) -> None:
    """Print text that may come from a model, with terminal control characters made visible."""
    from ..llm.masking import escape_controls

    print(escape_controls(text))


def print_json(record: Any) -> None:
    """Print one JSON object, on one line. An object that JSON does not know is printed as text."""
    print_text(json.dumps(record, ensure_ascii=False, default=str))


def print_styled(text: str, style: str = "") -> None:
    """Print text that may come from a model in one of rich's styles."""
    from rich.console import Console
    from rich.text import Text

    from ..llm.masking import escape_controls

    # A Text, because brackets in a plain string would be read as markup.
    Console(soft_wrap=True, highlight=False).print(Text(escape_controls(text), style=style))


def print_turn(turn: Turn) -> None:
    """Print the thought, then the request or the answer; a malformed turn is printed as it was
    written.
    """
    if turn.thought:
        print_styled(f"agent thinks   {turn.thought}", "dim")
    # The words before the text say what kind of turn it is.
    if turn.kind == "act":
        text = f"{REQUEST_LABEL:14} {turn.request or turn.text.strip()}"
    elif turn.kind == "answer":
        text = f"agent answers  {turn.answer}"
    else:
        text = f"agent writes   {turn.text.strip()}  ({turn.problem})"
    print_styled(text, "cyan")


def print_observation(source: str, observation: Observation) -> None:
    """Print the reply or the error of an environment, which is called `source`."""
    if observation.error is not None:
        print_styled(f"{source:14} no reply: {observation.error}", "red")
    else:
        print_styled(f"{source:14} {observation.text}")


def print_turns(rollout: Rollout) -> None:
    """Print each turn of an episode that is over, and the environment's reply to it."""
    from ..rollout.recording import shorten_middle

    is_program = "program/calls" in rollout.counts
    source = "program" if is_program else "environment"
    # The first request has what the program made of the row.
    if rollout.first_request:
        print_styled(f"{source:14} {shorten_middle(rollout.first_request, _SHOWN_LENGTH)}")
    for position, turn in enumerate(rollout.turns):
        # What the model writes in a program is a request or an answer only for the program.
        if is_program and turn.kind == "act":
            if turn.thought:
                print_styled(f"model thinks   {shorten_middle(turn.thought, _SHOWN_LENGTH)}", "dim")
            text = shorten_middle(turn.request or turn.text.strip(), _SHOWN_LENGTH)
            print_styled(f"model writes   {text}", "cyan")
        else:
            print_turn(turn)
        # The last turn may have no observation.
        if position >= len(rollout.observations):
            continue
        observation = rollout.observations[position]
        # A program has nothing to reply to its last turn.
        if not is_program or observation.text or observation.error is not None:
            print_observation(source, observation)


def print_answer(rollout: Rollout) -> None:
    """Print the answer of a program, below its turns, or that it gave none."""
    from ..rollout.recording import shorten_middle

    if rollout.answer is None:
        # Such a rollout trains, so that nothing else says why it earns nothing.
        if rollout.error is None:
            print_styled(f"no answer      the program gave none: {rollout.status}")
        return
    # A long text has just been printed.
    answer = rollout.answer
    last_text = rollout.turns[-1].text.strip() if rollout.turns else ""
    if len(answer) > _REPEATED_LENGTH and answer.strip() == last_text:
        answer = "the text of the last turn"
    print_styled(f"answer         {shorten_middle(answer, _SHOWN_LENGTH)}")


def print_table(rows: Sequence[Mapping[str, str]], title: str = "") -> None:
    """Print rows with the same columns, without columns that hold nothing.

    In a pipe each row is one line.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..llm.masking import escape_controls

    console = Console(highlight=False)
    # A pipe has no width at which rows would have to be wrapped.
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    # A column with nothing in it is left out, but that of failures is always shown.
    names = []
    for name in rows[0] if rows else ():
        cells = {row[name] for row in rows}
        if cells - _EMPTY_CELLS or name == "failed":
            names.append(name)
    table = Table(
        *names, title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    # A Text, because brackets in a plain string would be read as markup.
    for row in rows:
        table.add_row(*(Text(escape_controls(row[name])) for name in names))
    console.print(table)


@contextmanager
def show_progress(activity: str) -> Iterator[None]:
    """Show on standard error what is going on: at once on a terminal, else on a line once it takes
    long.
    """
    from rich.console import Console

    # On standard error, apart from results.
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(activity):
            yield
        return
    # A log has no line for what is over soon.
    timer = threading.Timer(_SECONDS_IN_SILENCE, print_error, [f"{activity}, please wait"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
