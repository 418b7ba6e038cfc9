"""`agentic-prompting refine`: ProRefine for one question, or for each line of a file."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from .options import connect_roles, option
from .show import say, show

if TYPE_CHECKING:
    from ..llm import Budget
    from ..refine import RefinementResult

# The names of what is imported late: choices have to be known for `--help`. Tests hold them to the originals.
PaperSetting = Literal["no_verifier", "verifier", "optimal_verifier"]
Score = Literal["exact_match", "integer_match", "letter_match", "word_sorting_match"]
Unit = Literal["tokens", "sentence", "paragraph"]

_MODELS, _LOOP, _FILES = "Models", "Refinement", "Files and output"
_ELSE = "The feedback model by default."


def refine(
    prompt: Annotated[str | None, option("The prompt to begin with; a plain one by default.", _FILES)] = None,
    query: Annotated[str | None, option("One question.", _FILES)] = None,
    input: Annotated[
        Path | None, option("JSON lines: texts, or objects with `question` (`answers`, `id`).", _FILES)
    ] = None,
    output: Annotated[Path | None, option("JSON lines of results; run again, a stopped run goes on.", _FILES)] = None,
    as_json: Annotated[bool, option("Print one JSON object instead of text.", _FILES, "--json")] = False,
    task_model: Annotated[str | None, option("The model that answers, by its name at its endpoint.", _MODELS)] = None,
    local_model: Annotated[Path | None, option("Instead: a transformers model's folder, run here.", _MODELS)] = None,
    feedback_model: Annotated[str | None, option("The model that criticises.", _MODELS)] = None,
    optimizer_model: Annotated[str | None, option(f"The model that edits. {_ELSE}", _MODELS)] = None,
    verifier_model: Annotated[str | None, option(f"The model that judges. {_ELSE}", _MODELS)] = None,
    task_base_url: Annotated[str | None, option("Its OpenAI-compatible endpoint.", _MODELS)] = None,
    feedback_base_url: Annotated[str | None, option("Its endpoint.", _MODELS)] = None,
    optimizer_base_url: Annotated[str | None, option("Its endpoint.", _MODELS)] = None,
    verifier_base_url: Annotated[str | None, option("Its endpoint.", _MODELS)] = None,
    replay_cache: Annotated[Path | None, option("SQLite file: replies in it are not paid twice.", _MODELS)] = None,
    budget_usd: Annotated[float | None, option("What all models together may spend.", _MODELS)] = None,
    budget_tokens: Annotated[int | None, option("The same in tokens.", _MODELS)] = None,
    sandbox: Annotated[bool, option("Scripted models and a puzzle: no key.", _MODELS, "--sandbox")] = False,
    paper_setting: Annotated[PaperSetting, option("Who judges the first answer.", _LOOP)] = "verifier",
    score: Annotated[Score, option("How `answers` are compared.", _LOOP)] = "exact_match",
    tokens_per_step: Annotated[int, option("k of the paper: 10.", _LOOP)] = 10,
    max_steps: Annotated[int, option("n of the paper: 25.", _LOOP)] = 25,
    unit: Annotated[Unit, option("What a step adds.", _LOOP)] = "tokens",
    history: Annotated[bool, option("Show critic and optimizer their earlier steps.", _LOOP, "--history")] = False,
    final_max_tokens: Annotated[int, option("Of the answer: 512.", _LOOP)] = 512,
    max_failures: Annotated[int, option("Failed calls after which a question is given up: 3.", _LOOP)] = 3,
    stop_when_correct: Annotated[int | None, option("Stop at so many CORRECT; 2 is sensible.", _LOOP)] = None,
    max_in_flight: Annotated[int, option("Questions on their way at once: 128.", _LOOP)] = 128,
) -> int:
    """Repair a prompt for each question while the answer is being written (ProRefine).

    One question is shown step by step with the changes of its prompt, many as a summary.
    """
    from ..llm import Budget
    from ..refine import DEFAULT_PROMPT, LabelVerifier, ProRefiner
    from ..rewards import qa, reasoning

    prompt = DEFAULT_PROMPT if prompt is None else prompt
    compare = getattr(reasoning, score, None) or getattr(qa, score)
    with ExitStack() as stack:
        if sandbox:
            roles, rows, compare = _sandbox_roles(prompt, query, input)
        else:
            rows = _read_rows(query, input)
            named = {
                "task": (task_model, task_base_url),
                "feedback": (feedback_model, feedback_base_url),
                "optimizer": (optimizer_model, optimizer_base_url),
                "verifier": (verifier_model, verifier_base_url),
            }
            roles = connect_roles(named, local_model, replay_cache, stack)
        verifiers = {"no_verifier": None, "verifier": roles["verifier"], "optimal_verifier": LabelVerifier(compare)}
        refiner = ProRefiner(
            roles["task"],
            roles["feedback"],
            roles["optimizer"],
            verifiers[paper_setting],
            tokens_per_step=tokens_per_step,
            max_steps=max_steps,
            unit=unit,
            history=history,
            final_max_tokens=final_max_tokens,
            max_failures=max_failures,
            stop_when_correct=stop_when_correct,
        )
        # Beside the results, so that a run that goes on does not get the budget again.
        budget = Budget(budget_usd, budget_tokens, output and output.with_suffix(".spending.sqlite"))
        refiner.charge_to(budget)
        try:
            results = refiner.refine_all(prompt, rows, max_in_flight, output)
        except KeyboardInterrupt:
            where = f"the same command goes on from {output}" if output else "with --output the command could go on"
            print(f"agentic-prompting: stopped; {where}", file=sys.stderr)
            return 130
        return _report(results, rows, compare, output, as_json, budget)


def _read_rows(query: str | None, file: Path | None) -> list[Any]:
    """The questions, from wherever the command line says.

    Raises:
        `ValueError`: If it does not say, or a line is no JSON.
    """
    if (query is None) == (file is None):
        raise ValueError("say what to answer with either --query TEXT or --input FILE (or try --sandbox)")
    if file is None:
        return [query]
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number} of {file} is no JSON: {error}") from None
    return rows


def _sandbox_roles(prompt: str, query: str | None, file: Path | None) -> tuple[dict[str, Any], list[Any], Any]:
    """Scripted models, the puzzles' score, and, where no question is given, the first puzzle that goes wrong."""
    from ..sandbox.puzzles import PuzzleSolver, make_puzzles, puzzle_models, score_puzzle

    if query is not None or file is not None:
        return puzzle_models(), _read_rows(query, file), score_puzzle
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
