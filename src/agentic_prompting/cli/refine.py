"""`agentic-prompting refine`: ProRefine for one question, or for each line of a file.

And `main`, the program that fills a row group of the paper's Table 1: one of its sets in three verifier settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .options import AsJson, Recording, Spending, setting
from .show import say, show

if TYPE_CHECKING:
    from ..llm import Budget, ChatModel
    from ..refine import RefinementResult

# The names of what is imported late: choices have to be known for `--help`. Tests hold them to the originals.
PaperSetting = Literal["no_verifier", "verifier", "optimal_verifier"]
Score = Literal["exact_match", "integer_match", "letter_match", "word_sorting_match"]
Unit = Literal["tokens", "sentence", "paragraph"]

ROLES = ("task", "feedback", "optimizer", "verifier")


@dataclass
class Questions:
    """What is asked, and how answers are judged."""

    prompt: str | None = setting("The prompt to begin with; a plain one by default.")
    query: str | None = setting("One question.")
    input: Path | None = setting("JSON lines: texts, or objects with `question` (`answers`, `id`).")
    output: Path | None = setting("JSON lines of results; run again, a stopped run goes on.")
    paper_setting: PaperSetting = setting("Who judges the first answer.", "verifier")
    score: Score = setting("How `answers` are compared.", "exact_match")
    max_in_flight: int = setting("Questions on their way at once.", 128)

    def rows(self) -> list[Any]:
        """The questions, from wherever the command line says.

        Raises:
            `ValueError`: If it does not say, or a line is no JSON.
        """
        if (self.query is None) == (self.input is None):
            raise ValueError("say what to answer with either --query TEXT or --input FILE (or try --sandbox)")
        if self.input is None:
            return [self.query]
        rows = []
        for number, line in enumerate(self.input.read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"line {number} of {self.input} is no JSON: {error}") from None
        return rows


@dataclass
class Models(Spending, Recording):
    """Who answers and who criticises."""

    task_model: str | None = setting("The model that answers, by its name at its endpoint.")
    task_base_url: str | None = setting("Its OpenAI-compatible endpoint.")
    local_model: Path | None = setting("Instead: a transformers model's folder, run here.")
    feedback_model: str | None = setting("The model that criticises.")
    feedback_base_url: str | None = setting("Its endpoint.")
    optimizer_model: str | None = setting("The model that edits. The feedback model by default.")
    optimizer_base_url: str | None = setting("Its endpoint.")
    verifier_model: str | None = setting("The model that judges. The feedback model by default.")
    verifier_base_url: str | None = setting("Its endpoint.")
    sandbox: bool = setting("Scripted models and a puzzle: no key.", False)

    def roles(self, stack: ExitStack) -> dict[str, ChatModel]:
        """A client for each role; one that is not named is the feedback model.

        Raises:
            `ValueError`: If a model is missing or given twice.
        """
        if (self.task_model is None) == (self.local_model is None):
            raise ValueError(
                "name the task model with either --task-model NAME or --local-model FOLDER (or try --sandbox)"
            )
        if self.feedback_model is None:
            raise ValueError("name the feedback model with --feedback-model NAME (or try --sandbox)")
        roles: dict[str, ChatModel] = {}
        for role in ROLES:
            name, url = getattr(self, f"{role}_model"), getattr(self, f"{role}_base_url")
            if name is None:
                name, url = self.feedback_model, url or self.feedback_base_url
            if role == "task" and self.local_model is not None:
                roles[role] = stack.enter_context(local_chat(self.local_model))
            else:
                roles[role] = self.connect(stack, name, url)
        return roles


@dataclass
class Loop:
    """The settings of the loop: those of [`RefineSettings`] that have names on a command line, with its defaults."""

    tokens_per_step: int = setting("k of the paper.", 10)
    max_steps: int = setting("n of the paper.", 25)
    unit: Unit = setting("What a step adds.", "tokens")
    history: bool = setting("Show critic and optimizer their earlier steps.", False)
    final_max_tokens: int = setting("Of the answer.", 512)
    max_failures: int = setting("Failed calls after which a question is given up.", 3)


def refine(asked: Questions, models: Models, loop: Loop, as_json: AsJson = False) -> int:
    """Repair a prompt for each question while the answer is being written (ProRefine).

    One question is shown step by step with the changes of its prompt, many as a summary.
    """
    from ..refine import DEFAULT_PROMPT, LabelVerifier, ProRefiner
    from ..rewards import qa, reasoning

    prompt, output = DEFAULT_PROMPT if asked.prompt is None else asked.prompt, asked.output
    compare = getattr(reasoning, asked.score, None) or getattr(qa, asked.score)
    with ExitStack() as stack:
        if models.sandbox:
            roles, rows, compare = _in_sandbox(prompt, asked)
        else:
            rows, roles = asked.rows(), models.roles(stack)
        verifiers = {"no_verifier": None, "verifier": roles["verifier"], "optimal_verifier": LabelVerifier(compare)}
        roles["verifier"] = verifiers[asked.paper_setting]
        refiner = ProRefiner(**roles, **vars(loop))
        budget = models.budget(output and output.with_suffix(".spending.sqlite"))
        refiner.charge_to(budget)
        try:
            results = refiner.refine_all(prompt, rows, asked.max_in_flight, output)
        except KeyboardInterrupt:
            where = f"the same command goes on from {output}" if output else "with --output the command could go on"
            print(f"agentic-prompting: stopped; {where}", file=sys.stderr)
            return 130
        return _report(results, rows, compare, output, as_json, budget)


def _in_sandbox(prompt: str, asked: Questions) -> tuple[dict[str, Any], list[Any], Any]:
    """Scripted models, the puzzles' score, and, where no question is given, the first puzzle that goes wrong."""
    from ..sandbox.puzzles import PuzzleSolver, make_puzzles, puzzle_models, score_puzzle

    if asked.query is not None or asked.input is not None:
        return puzzle_models(), asked.rows(), score_puzzle
    solver, puzzles = PuzzleSolver(), make_puzzles(50, seed=4)
    wrong = (row for row in puzzles if not score_puzzle(solver.answer(prompt, row["question"]), row["answers"]))
    return puzzle_models(), [next(wrong, puzzles[0])], score_puzzle


def _report(
    results: list[RefinementResult], rows: list[Any], compare: Any, output: Path | None, as_json: bool, budget: Budget
) -> int:
    """Print the results; returns the exit status."""
    from ..refine import summarize

    summary = summarize(results)
    labelled = [
        (result, row["answers"])
        for result, row in zip(results, rows, strict=True)
        if isinstance(row, dict) and row.get("answers") and result.error is None
    ]
    if labelled:
        summary["accuracy"] = sum(compare(result.answer, answers) for result, answers in labelled) / len(labelled)
    if as_json:
        shown: dict[str, Any] = {"summary": summary}
        shown |= {"output": str(output)} if output else {"results": [result.to_dict() for result in results]}
        say(json.dumps(shown, ensure_ascii=False))
    else:
        show(results, summary)
    failed = [result.error for result in results if result.error is not None]
    if failed:
        bill = f". Spent so far: {budget}" if budget.limit else ""
        what = f"{len(failed)} of {len(results)} questions failed; first: {failed[0]}{bill}"
        print(f"agentic-prompting: {what}", file=sys.stderr)
    return int(bool(failed))


def local_chat(folder: Path) -> Any:
    """A local model in float32, on the GPU where there is one, with lossless drafting.

    Raises:
        `ValueError`: If there is no model in the folder, or its tokenizer has no chat template.
    """
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no transformers model (no config.json); give the folder of a downloaded one")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..local import TransformersChat

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    return TransformersChat(model, AutoTokenizer.from_pretrained(folder))


# The paper's three settings on one of its sets ------------------------------------------------------------------------


@dataclass
class ScriptArguments(Spending):
    """Which set, and which models."""

    task: str | None = setting("One of ProRefine's five sets; by default the sandbox's puzzles.")
    split: str = setting("Its split.", "test")
    rows: int = setting("How many questions.", 100)
    data_files: str | None = setting("Local file instead of the hub.")
    task_model: str | None = setting("The model that answers.")
    task_base_url: str | None = setting("Any OpenAI-compatible endpoint.")
    critic_model: str | None = setting("Feedback, optimizer and verifier in one.")
    critic_base_url: str | None = setting("Its endpoint.")
    output_dir: str = setting("For results, replies and the picture.", "runs/refine")

    def roles(self, stack: ExitStack) -> dict[str, Any]:
        """Two endpoints, a client for each role, or the sandbox's scripts."""
        from ..rewards import REASONING_SCORERS
        from ..sandbox.puzzles import puzzle_models

        if self.task is None:
            return puzzle_models()
        if self.task not in REASONING_SCORERS or self.task_model is None or self.critic_model is None:
            raise SystemExit(f"--task is one of {', '.join(REASONING_SCORERS)}, with --task_model and --critic_model")
        recording, critic = (
            Recording(Path(self.output_dir) / "replies.sqlite"),
            (self.critic_model, self.critic_base_url),
        )
        named = dict.fromkeys(ROLES, critic) | {"task": (self.task_model, self.task_base_url)}
        return {role: recording.connect(stack, *one) for role, one in named.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Refine, and print accuracy and iterations in the three verifier settings.

    Each setting writes its results to a file of its own in `--output_dir`; a run that was stopped goes on when started
    again.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    from transformers import HfArgumentParser

    from ..data import load_task
    from ..llm import charge
    from ..refine import START_PROMPTS, LabelVerifier, ProRefiner
    from ..report.plots import accuracy_of, accuracy_table, iterations_of, plot_iterations
    from ..rewards import REASONING_SCORERS
    from ..sandbox.puzzles import SORTING, make_puzzles

    given = None if arguments is None else list(arguments)
    (script,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(args=given)  # type: ignore[arg-type]
    name, folder = script.task or SORTING, Path(script.output_dir)
    score, results = REASONING_SCORERS[name], {}
    with ExitStack() as stack:
        roles = script.roles(stack)
        budget = script.budget(folder / "spending.sqlite")
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
