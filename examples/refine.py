"""ProRefine on one of the paper's sets, in its three verifier settings: a row group of its Table 1.

    python examples/refine.py                                  # the sandbox: scripted models and puzzles
    python examples/refine.py --task bbh_word_sorting --task_model llama-3.2-1b \\
        --task_base_url http://localhost:8000/v1 --critic_model gpt-4o-mini --output_dir runs/sorting

Each setting writes its results to a file of its own in `--output_dir`, and a run that was stopped goes on when started
again. For prompts and questions of your own there is the command: `agentic-prompting refine --help`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from agentic_prompting import OpenAIChat, ReplayCache, load_task
from agentic_prompting.refine import START_PROMPTS, LabelVerifier, ProRefiner
from agentic_prompting.report.refinement import accuracy_of, accuracy_table, iterations_of, plot_iterations
from agentic_prompting.rewards import REASONING_SCORERS
from agentic_prompting.sandbox.puzzle_models import puzzle_models
from agentic_prompting.sandbox.puzzles import SORTING, make_puzzles


@dataclass
class ScriptArguments:
    task: str | None = field(default=None, metadata={"help": f"One of {', '.join(REASONING_SCORERS)}."})
    split: str = field(default="test", metadata={"help": "Its split."})
    rows: int = field(default=100, metadata={"help": "How many questions."})
    data_files: str | None = field(default=None, metadata={"help": "Local file instead of the hub."})
    task_model: str | None = field(default=None, metadata={"help": "The model that answers."})
    task_base_url: str | None = field(default=None, metadata={"help": "Any OpenAI-compatible endpoint."})
    critic_model: str | None = field(default=None, metadata={"help": "Feedback, optimizer and verifier in one."})
    critic_base_url: str | None = field(default=None, metadata={"help": "Its endpoint."})
    budget_usd: float | None = field(default=None, metadata={"help": "For each model: stop when so much is spent."})
    output_dir: str = field(default="runs/refine", metadata={"help": "For results, replies and the picture."})


def connect(script: ScriptArguments, stack: ExitStack) -> dict[str, Any]:
    """The four roles: two endpoints, or the sandbox's scripts."""
    if script.task is None:
        return puzzle_models()
    if script.task not in REASONING_SCORERS or script.task_model is None or script.critic_model is None:
        raise SystemExit(f"--task is one of {', '.join(REASONING_SCORERS)}, with --task_model and --critic_model")
    shared = {"cache": ReplayCache(Path(script.output_dir) / "replies.sqlite"), "budget_usd": script.budget_usd}
    task = stack.enter_context(OpenAIChat(script.task_model, base_url=script.task_base_url, **shared))
    critic = stack.enter_context(OpenAIChat(script.critic_model, base_url=script.critic_base_url, **shared))
    return {"task": task, "feedback": critic, "optimizer": critic, "verifier": critic}


def main() -> None:
    (script,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    name, folder = script.task or SORTING, Path(script.output_dir)
    score, results = REASONING_SCORERS[name], {}
    with ExitStack() as stack:
        roles = connect(script, stack)
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
    model = script.task_model or "scripted (sandbox)"
    accuracy = {setting: {model: accuracy_of(found, rows, score)} for setting, found in results.items()}
    print(accuracy_table({name: accuracy}))
    for setting, found in results.items():
        print(f"{setting:18} {iterations_of(found).mean:.2f} iterations")
    plot_iterations({name: results}, folder / "iterations.png")


if __name__ == "__main__":
    main()
