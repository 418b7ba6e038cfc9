"""The small commands `ask`, `report` and `data`; the work is done in their rooms."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options import AsJson, LargeLLM, OutputDir, RunOption, Tracing, busy, check_agent, option, say

if TYPE_CHECKING:
    from ..rollout import Environment, Observation, Rollout, Turn


# --- ask -------------------------------------------------------------------------------------------------------------


def ask(
    run_or_question: Annotated[
        str,
        typer.Argument(metavar="RUN", help="The trained agent: the folder that its trainer saved."),
    ],
    llm: LargeLLM,
    tracing: Tracing,
    of_run: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="What to ask the agent.")
    ] = None,
    run: RunOption = None,
    seed: Annotated[int, option("The same seed gives the same conversation: 0.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Ask a trained agent, and see how it asks the large LLM."""
    if (run is None) == (of_run is None):
        raise ValueError(
            "name the trained agent and the question: agentic-prompting ask RUN QUESTION. "
            "`agentic-prompting demo` trains one, in runs/demo"
        )
    run, question = (Path(run_or_question), str(of_run)) if run is None else (run, run_or_question)
    llm.check()
    check_agent(run)
    tracing.start()
    if llm.sandbox:
        question = _in_the_sandbox(question)
    with ExitStack() as stack:
        with busy(f"loading {run}"):
            from transformers.utils.logging import disable_progress_bar

            from ..agent import PromptAgent

            who = "environment" if llm.environment is not None else "large LLM"
            environment = llm.opened(stack, llm.budget())
            disable_progress_bar()  # `busy` shows progress, and only on a terminal
            agent = PromptAgent.from_pretrained(
                run, environment if as_json else _Printing(environment, who)
            )
        rollout = agent.answer(question, seed)
    if as_json:
        say(json.dumps(_as_json(question, rollout), ensure_ascii=False))
    else:
        _show_end(rollout)
    return int(rollout.answer is None)


def _in_the_sandbox(question: str) -> str:
    """The question in the sandbox's own wording, the only one that its policy understands."""
    from ..sandbox.world import parse_question

    parsed = parse_question(question)
    if parsed is None:
        raise ValueError(
            "the sandbox knows countries, capitals, airports, currencies, languages and continents only; ask, for "
            'example, "what is the currency of the country whose capital is Nairobi ?" or "which country has the '
            'capital served by airport NBO ?"'
        )
    return parsed.text


def _as_json(question: str, rollout: Rollout) -> dict[str, Any]:
    said: list[dict[str, Any]] = []
    for i, turn in enumerate(rollout.turns):
        said.append(
            {"role": "agent", "kind": turn.kind, "text": turn.text, "request": turn.request}
        )
        for heard in rollout.observations[i : i + 1]:
            said.append(
                {
                    "role": "environment",
                    "text": heard.text,
                    "error": heard.error and str(heard.error),
                }
            )
    spent = [reply.usage for reply in rollout.replies]
    return {
        "question": question,
        "answer": rollout.answer,
        "status": rollout.status,
        "error": rollout.error and str(rollout.error),
        "conversation": said,
        "usage": {
            "calls": len(spent),
            "prompt_tokens": sum(usage.prompt_tokens for usage in spent),
            "completion_tokens": sum(usage.completion_tokens for usage in spent),
            "cost_usd": sum(usage.cost_usd for usage in spent),
            "agent_tokens": sum(sum(one.mask) for one in rollout.sequences),
        },
    }


class _Printing:
    """An environment that prints its requests and replies while the episode runs."""

    step_timeout = math.inf  # the environment's step has the limit

    def __init__(self, environment: Environment, who: str):
        self.environment, self.who = environment, who

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)  # its grammar, where it has one

    async def step(self, rollout: Rollout) -> Observation | None:
        from ..rollout import Limits, observe

        show_turn(rollout.turns[-1])
        observation = await observe(self.environment, rollout, Limits().step_timeout)
        if observation is not None:
            show_reply(self.who, observation)
        return observation


def show_reply(who: str, observation: Observation) -> None:
    """Print what the environment, called `who`, has returned, or its error."""
    if observation.error is not None:
        line(f"{who:14} no reply: {observation.error}", "red")
    else:
        line(f"{who:14} {observation.text}")


def show_turn(turn: Turn) -> None:
    """Print the thought, then the request or answer; a malformed turn is printed as it was written."""
    if turn.thought:
        line(f"agent thinks   {turn.thought}", "dim")
    said = {
        "act": f"agent asks     {turn.request or turn.text.strip()}",
        "answer": f"agent answers  {turn.answer}",
    }
    line(said.get(turn.kind, f"agent writes   {turn.text.strip()}  ({turn.problem})"), "cyan")


def _show_end(rollout: Rollout) -> None:
    """Print the last turn, how the conversation ended, and its turns, calls and cost."""
    if rollout.turns and rollout.turns[-1].kind != "act":
        show_turn(rollout.turns[-1])
    if rollout.answer is not None:
        line(f"\n{rollout.answer}", "bold green")
    else:
        cause = f": {rollout.error}" if rollout.error else ""
        line(f"\nno answer ({rollout.status.replace('_', ' ')}{cause})", "bold red")
    turns, calls = len(rollout.turns), len(rollout.replies)
    cost = sum(reply.usage.cost_usd for reply in rollout.replies)
    spent = f", ${cost:.4f}" if cost else ""
    line(
        f"{turns} turn{'s' * (turns != 1)}, {calls} call{'s' * (calls != 1)} to the large LLM{spent}",
        "dim",
    )


def line(text: str, style: str = "") -> None:
    """Print a text in one of rich's styles, without control characters."""
    from rich.console import Console
    from rich.text import Text

    from ..llm.wire import visible

    Console(soft_wrap=True, highlight=False).print(
        Text(visible(text), style=style)
    )  # Text: brackets are no markup


# --- report and data -------------------------------------------------------------------------------------------------


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="A run's or an evaluation's folder, or one file; several are put side by side.",
        ),
    ] = None,
    run: Annotated[list[Path] | None, option("The same as RUN.", "--run")] = None,
    output_dir: OutputDir = None,
    max_trajectories: Annotated[
        int, option("Show at most this many, drawn evenly over the run: 20000.")
    ] = 20_000,
    pictures: Annotated[bool, typer.Option(help="Write PNGs as well.")] = True,
    watch: Annotated[
        bool, option("Write it anew while the run goes on, until Ctrl-C.", "--watch")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show what runs left behind: curves, trajectories, evolved and refined prompts, evaluations."""
    from ..report import watch_report, write_report

    runs = [*(runs or ()), *(run or ())]
    if not runs:
        raise ValueError("name the run to show: agentic-prompting report RUN")
    if watch:
        if len(runs) > 1:
            raise ValueError("--watch follows one run; several are compared when they are there")
        print(
            f"{output_dir or runs[0] / 'report'}/index.html is written as {runs[0]} goes on (Ctrl-C stops)",
            flush=True,
        )
        watch_report(runs[0], output_dir, max_trajectories)
        return 0
    if pictures and importlib.util.find_spec("matplotlib") is None:
        needed = "no pictures without matplotlib: pip install 'agentic-prompting[report]'"
        print(f"agentic-prompting: {needed}", file=sys.stderr)
        pictures = False
    page = write_report(runs if len(runs) > 1 else runs[0], output_dir, max_trajectories, pictures)
    drawn = sorted(str(path) for path in page.parent.glob("*.png")) if pictures else []
    print(json.dumps({"page": str(page), "pictures": drawn}) if as_json else page)
    return 0


def data(
    action: Annotated[
        Literal["list", "show", "check"],
        typer.Argument(help="list all, show one in full, or check the records."),
    ],
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets; check takes all by default.")
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="check: ask the hub; streams one row of each split.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List the data sets, show one, or check them against their sources."""
    from ..data import TASKS, check_sources, check_table, describe_task, list_tasks

    if action == "list":
        print(_sets_as_json(TASKS) if as_json else list_tasks())
        return 0
    if action == "show":
        if not names:
            raise ValueError(
                "say which data set: agentic-prompting data show NAME; `data list` shows their names"
            )
        print(_sets_as_json(names) if as_json else "\n\n".join(map(describe_task, names)))
        return 0
    checks = check_sources(names or (), online)
    wrong = [check for check in checks if check.problem]
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}))
    else:
        shown = checks if online else wrong
        print(check_table(shown) if shown else f"{len(checks)} records are consistent")
    return int(bool(wrong))


def _sets_as_json(names: Iterable[str]) -> str:
    """The sets with their splits (rows), metrics, sources and licence."""
    from ..data import find_task

    sets = [
        {
            "name": name,
            "splits": dict(task.expected_rows),
            "metrics": list(task.metrics),
            "sources": list(map(str, task.sources)),
            "licence": task.licence,
        }
        for name, task in (find_task(name)[::2] for name in names)
    ]
    return json.dumps({"sets": sets}, ensure_ascii=False)
