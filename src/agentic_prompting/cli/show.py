"""What a terminal shows: conversations, refinements, models' words. Plain text in a pipe."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ..refine import RefinementResult
    from ..rollout import Environment, Observation, Rollout, Turn

_STYLES = {"-": "red", "+": "green", "#": "bold", "": ""}


def show(results: Sequence[RefinementResult], summary: Mapping[str, float]) -> None:
    """One result step by step, with its prompt's changes; many as a summary.

    Args:
        results (`Sequence[RefinementResult]`): Of one run.
        summary (`Mapping[str, float]`): What to print below.
    """
    from rich.console import Console
    from rich.text import Text

    from ..llm.wire import visible
    from ..refine.types import described_lines

    console = Console(soft_wrap=True)
    if len(results) == 1:
        for mark, line in described_lines(results[0]):
            console.print(Text(visible(line), style=_STYLES[mark]))  # Text: brackets in it are no markup
        console.print()
    for name, value in summary.items():
        if value or name == "accuracy":
            console.print(Text(f"{name:28} {value:.4g}"))


def say(text: str) -> None:
    """Print what may hold a model's words: what in it would steer the terminal is shown instead."""
    from ..llm.wire import visible

    print(visible(text))


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Says what takes so long, while it does, on a terminal's error stream; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield


class Conversation:
    """What agent and large LLM say, printed as it is said.

    Args:
        console (`rich.console.Console`, *optional*): Where to; nowhere by default.
    """

    def __init__(self, console: Console | None = None):
        self.console = console
        self.lock = threading.Lock()  # replies arrive on the client's thread

    def around(self, environment: Environment) -> Environment:
        """The same environment, overheard."""
        return _Overheard(environment, self)

    def end(self, rollout: Rollout) -> None:
        """The last turn, how the conversation ended, and what it took."""
        if rollout.turns and rollout.turns[-1].kind != "act":
            self.agent_says(rollout.turns[-1])
        replies = rollout.replies
        cost = sum(reply.usage.cost_usd for reply in replies)
        if rollout.answer is not None:
            self.line(f"\n{rollout.answer}", "bold green")
        else:
            cause = f": {rollout.error}" if rollout.error else ""
            self.line(f"\nno answer ({rollout.status.replace('_', ' ')}{cause})", "bold red")
        spent = f", ${cost:.4f}" if cost else ""
        self.line(f"{_many(len(rollout.turns), 'turn')}, {_many(len(replies), 'call')} to the large LLM{spent}", "dim")

    def agent_says(self, turn: Turn) -> None:
        """A turn: its thought, then its request or answer; as it was written where it has no form."""
        if turn.thought:
            self.line(f"agent thinks   {turn.thought}", "dim")
        said = {"act": f"agent asks     {turn.request}", "answer": f"agent answers  {turn.answer}"}
        self.line(said.get(turn.kind, f"agent writes   {turn.text.strip()}  ({turn.problem})"), "cyan")

    def large_llm_says(self, observation: Observation) -> None:
        """A reply, or why there is none."""
        if observation.error is None:
            self.line(f"large LLM      {observation.text}")
        else:
            self.line(f"large LLM      no reply: {observation.error}", "red")

    def line(self, text: str, style: str = "") -> None:
        from rich.text import Text

        from ..llm.wire import visible

        if self.console is not None:
            with self.lock:
                self.console.print(Text(visible(text), style=style))  # Text: brackets in it are no markup


class _Overheard:
    """An environment whose requests and replies are shown."""

    def __init__(self, environment: Environment, conversation: Conversation):
        self.environment, self.conversation = environment, conversation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)  # its grammar, where it has one

    async def step(self, rollout: Rollout) -> Observation | None:
        from ..rollout import observe

        self.conversation.agent_says(rollout.turns[-1])
        observation = await observe(self.environment, rollout)
        if observation is not None:
            self.conversation.large_llm_says(observation)
        return observation


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
