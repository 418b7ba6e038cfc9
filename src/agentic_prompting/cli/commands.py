"""The commands that are a few lines over their rooms: `ask`, `evolve`, `report` and `data`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..scripts import evolve as evolving
from .conversation import Conversation
from .options import AsJson, LargeLLM, OutputDir, large_llm, option
from .show import busy, say

if TYPE_CHECKING:
    from ..rollout import Rollout


def ask(
    question: Annotated[str, typer.Argument(help="What to ask the agent.")],
    llm: LargeLLM,
    run: Annotated[Path | None, option("The trained agent: the folder that its trainer saved.")] = None,
    seed: Annotated[int, option("The same seed gives the same conversation: 0.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Ask a trained agent, and see how it asks the large LLM."""
    if run is None:
        raise ValueError(
            "say which trained agent to ask: --run FOLDER. `agentic-prompting demo` trains one in the sandbox, in "
            "runs/demo"
        )
    if llm.sandbox == (llm.environment_model is not None):
        raise ValueError("name the large LLM with --environment-model NAME, or say --sandbox")
    if not run.is_dir():
        raise ValueError(f"{run} does not exist; `agentic-prompting demo --output-dir {run}` trains an agent there")
    if llm.sandbox:
        question = _in_the_sandbox(question)
    from rich.console import Console

    watched = Conversation(None if as_json else Console(soft_wrap=True, highlight=False))
    with ExitStack() as stack:
        with busy(f"loading {run}"):
            from transformers.utils.logging import disable_progress_bar

            from ..agent import PromptAgent
            from ..environments import LLMEnvironment

            most = llm.environment_max_tokens
            sampling: dict[str, Any] = {} if most is None else {"max_tokens": most}
            chat = large_llm(
                llm.environment_model, llm.environment_base_url, llm.sandbox, llm.replay_cache, llm.budget_usd, stack
            )
            environment = LLMEnvironment(chat, **sampling)
            environment.check()
            disable_progress_bar()  # of loading weights: `busy` says it, on a terminal alone
            agent = PromptAgent.from_pretrained(run, watched.around(environment))
        rollout = agent.answer(question, seed)
        watched.end(rollout)
    if as_json:
        say(json.dumps(_as_json(question, rollout), ensure_ascii=False))
    return int(rollout.answer is None)


def _in_the_sandbox(question: str) -> str:
    """The question in the sandbox's own wording, which is all that its policy can read.

    Raises:
        `ValueError`: If it is none of the sandbox's questions; shows some.
    """
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
        said.append({"role": "agent", "kind": turn.kind, "text": turn.text, "request": turn.act})
        if i < len(rollout.observations):
            observation = rollout.observations[i]
            error = None if observation.error is None else str(observation.error)
            said.append({"role": "environment", "text": observation.text, "error": error})
    replies = rollout.replies
    usage = {
        "calls": len(replies),
        "prompt_tokens": sum(reply.usage.prompt_tokens for reply in replies),
        "completion_tokens": sum(reply.usage.completion_tokens for reply in replies),
        "cost_usd": sum(reply.usage.cost_usd for reply in replies),
        "agent_tokens": sum(rollout.mask),
    }
    error = None if rollout.error is None else str(rollout.error)
    shown = {"question": question, "answer": rollout.answer, "status": rollout.status, "error": error}
    return {**shown, "conversation": said, "usage": usage}


def evolve(script: evolving.ScriptArguments, options: evolving.EvolveArguments, as_json: AsJson = False) -> int:
    """Evolve the system prompt of a closed model (E-SPL without weights); run again, a stopped run goes on."""
    try:
        result = evolving.evolve_prompt(script, options, None if as_json else evolving.show)
    except KeyboardInterrupt:
        print(f"agentic-prompting: stopped; the same command goes on from {script.output_dir}", file=sys.stderr)
        return 130
    if as_json:
        usage = {name: asdict(used) for name, used in result.usage.items()}
        shown = {"prompt": result.best.text, "steps": len(result.steps), "usage": usage, "stopped": result.stopped}
        say(json.dumps({**shown, "output_dir": str(script.output_dir)}, ensure_ascii=False))
    else:
        say(evolving.as_text(result, script.output_dir))
    if result.stopped:
        print(f"agentic-prompting: stopped early: {result.stopped}; the same command goes on", file=sys.stderr)
    return int(bool(result.stopped))


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one file: refinement results, or a population.")],
    output_dir: OutputDir = None,
    max_trajectories: Annotated[int, typer.Option(help="Show at most this many, drawn evenly over the run.")] = 20_000,
    pictures: Annotated[bool, typer.Option(help="Write PNGs as well.")] = True,
    as_json: AsJson = False,
) -> int:
    """Show what a run left behind: curves, trajectories, the evolution of system prompts, refined prompts."""
    from ..report import write_report

    if pictures and find_spec("matplotlib") is None:
        print(
            "agentic-prompting: no pictures without matplotlib: pip install 'agentic-prompting[report]'",
            file=sys.stderr,
        )
        pictures = False
    page = write_report(run, output_dir, max_trajectories, pictures)
    drawn = sorted(str(path) for path in page.parent.glob("*.png")) if pictures else []
    print(json.dumps({"page": str(page), "pictures": drawn}) if as_json else page)
    return 0


def data(
    action: Annotated[
        Literal["list", "show", "check"], typer.Argument(help="list all, show one in full, or check the records.")
    ],
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; check takes all by default.")] = None,
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
            raise ValueError("say which data set: agentic-prompting data show NAME; `data list` shows their names")
        print(_sets_as_json(names) if as_json else "\n\n".join(map(describe_task, names)))
        return 0
    checks = check_sources(names or (), online)
    wrong = [check for check in checks if check.problem]
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}))
        return int(bool(wrong))
    print(check_table(checks if online else wrong) if online or wrong else f"{len(checks)} records are consistent")
    return int(bool(wrong))


def _sets_as_json(names: Iterable[str]) -> str:
    """The sets with their splits (rows), metrics, sources and licence."""
    from ..data.loading import find_task

    found = [find_task(name)[::2] for name in names]
    sets = [
        {
            "name": name,
            "splits": dict(task.expected_rows),
            "metrics": list(task.metrics),
            "sources": list(map(str, task.sources)),
            "licence": task.licence,
        }
        for name, task in found
    ]
    return json.dumps({"sets": sets}, ensure_ascii=False)
