"""ProRefine on one of the paper's sets, in its three verifier settings: a row group of its Table 1.

Each setting writes its results to a file of its own in `--output_dir`, and a run that was stopped goes on when started
again. For prompts and questions of your own there is the command: `agentic-prompting refine --help`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import load_task
from ..llm import Budget, OpenAIChat, ReplayCache, charge
from ..refine import START_PROMPTS, LabelVerifier, ProRefiner
from ..report.plots import accuracy_of, accuracy_table, iterations_of, plot_iterations
from ..rewards import REASONING_SCORERS
from ..sandbox.puzzles import SORTING, make_puzzles, puzzle_models
from .running import run_script, setting

CRITICS = ("feedback", "optimizer", "verifier")


@dataclass
class ScriptArguments:
    """Which set, and which models."""

    task: str | None = setting(f"One of {', '.join(REASONING_SCORERS)}.")
    split: str = setting("Its split.", "test")
    rows: int = setting("How many questions.", 100)
    data_files: str | None = setting("Local file instead of the hub.")
    task_model: str | None = setting("The model that answers.")
    task_base_url: str | None = setting("Any OpenAI-compatible endpoint.")
    critic_model: str | None = setting("Feedback, optimizer and verifier in one.")
    critic_base_url: str | None = setting("Its endpoint.")
    budget_usd: float | None = setting("What all models together may spend, in US $.")
    budget_tokens: int | None = setting("The same in tokens, read and written.")
    output_dir: str = setting("For results, replies and the picture.", "runs/refine")


def connect(script: ScriptArguments, stack: ExitStack) -> dict[str, Any]:
    """The four roles: two endpoints, or the sandbox's scripts."""
    if script.task is None:
        return puzzle_models()
    if script.task not in REASONING_SCORERS or script.task_model is None or script.critic_model is None:
        raise SystemExit(f"--task is one of {', '.join(REASONING_SCORERS)}, with --task_model and --critic_model")
    cache = ReplayCache(Path(script.output_dir) / "replies.sqlite")
    critic = (script.critic_model, script.critic_base_url)
    named = {"task": (script.task_model, script.task_base_url), **dict.fromkeys(CRITICS, critic)}
    # One client for each role, also where the model is the same: each has its own bill.
    return {
        role: stack.enter_context(OpenAIChat(model, base_url=url, cache=cache)) for role, (model, url) in named.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Refine, and print accuracy and iterations in the three settings.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    from transformers import HfArgumentParser

    given = None if arguments is None else list(arguments)
    (script,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(args=given)
    name, folder = script.task or SORTING, Path(script.output_dir)
    score, results = REASONING_SCORERS[name], {}
    with ExitStack() as stack:
        roles = connect(script, stack)
        budget = Budget(script.budget_usd, script.budget_tokens, folder / "spending.sqlite")
        charge(budget, **roles)
        rows = (
            list(load_task(name, script.split, script.rows, data_files=script.data_files))
            if script.task
            else make_puzzles(script.rows, kinds=(SORTING,))
        )
        verifiers = {"no verifier": None, "verifier": roles["verifier"], "optimal verifier": LabelVerifier(score)}
        for setting, verifier in verifiers.items():
            refiner = ProRefiner(roles["task"], roles["feedback"], roles["optimizer"], verifier)
            file = folder / f"{setting.replace(' ', '_')}.jsonl"
            results[setting] = refiner.refine_all(START_PROMPTS[name], rows, output=file)
            fatal = next((one.error for one in results[setting] if one.error is not None and one.error.fatal), None)
            if fatal is not None:
                raise SystemExit(f"stopped: {fatal}. Spent so far: {budget}; the same command goes on")
    model = script.task_model or "scripted (sandbox)"
    accuracy = {setting: {model: accuracy_of(found, rows, score)} for setting, found in results.items()}
    print(accuracy_table({name: accuracy}))
    for setting, found in results.items():
        print(f"{setting:18} {iterations_of(found).mean:.2f} iterations")
    try:
        plot_iterations({name: results}, folder / "iterations.png")
    except ImportError as error:
        print(f"no picture: {error}")


if __name__ == "__main__":
    run_script(main)
