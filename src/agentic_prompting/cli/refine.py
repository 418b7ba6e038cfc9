"""`agentic-prompting refine`: a prompt repaired for each question while the answer is being written
(ProRefine).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm import ChatModel
from ..llm.numbers import count_in_words, format_usd, is_missing, value_text
from ..llm.types import cost_in_words
from ..refine import DEFAULT_PROMPT, LabelVerifier, ProRefiner, RefinementResult, summarize
from ..refine.description import describe_lines
from ..refine.loop import RefineSettings
from ..refine.refiner import PaperSetting
from ..refine.templates import Unit
from ..refine.types import RoleUsage
from .client_settings import client_help
from .hub import find_model
from .loader import SCORES, load_score
from .option_parser import OptionParser
from .options import (
    JSON_HELP,
    Recording,
    Spending,
    Tracing,
    option,
    read_columns,
    refuse_options,
)
from .rows_file import RowsFile, read_answers
from .script import INTERRUPTED, print_error
from .task_rows import TaskRows
from .terminal import print_json, print_styled

if TYPE_CHECKING:
    from ..evaluation import Estimate
    from ..local import TransformersChat

# Styles by the mark that `describe_lines` gives to a line.
_STYLES = {"-": "red", "+": "green", "#": "bold", "": ""}


@dataclass
class RefineModels(Recording, Spending):
    """The models that answer and criticise."""

    task_model: str | None = option("The model that answers, by its name at its endpoint.")
    task_base_url: str | None = option("The answering model's OpenAI-compatible endpoint.")
    task_client: str | None = option(client_help("the answering model"))
    local_model: Path | None = option(
        "A transformers model's folder, or smollm2, run here instead of --task-model."
    )
    feedback_model: str | None = option("The model that criticises, by its name at its endpoint.")
    feedback_base_url: str | None = option("The feedback model's endpoint.")
    feedback_client: str | None = option(client_help("the feedback model"))
    optimizer_model: str | None = option("The model that edits. The feedback model by default.")
    optimizer_base_url: str | None = option("The optimizer model's endpoint.")
    optimizer_client: str | None = option(
        "How the optimizer model is called; as the feedback model if it is the same."
    )
    verifier_model: str | None = option("The model that judges. The feedback model by default.")
    verifier_base_url: str | None = option("The verifier model's endpoint.")
    verifier_client: str | None = option(
        "How the verifier model is called; as the feedback model if it is the same."
    )

    def connect_roles(self, stack: ExitStack) -> dict[str, ChatModel]:
        """A client for each role; a role without a model of its own is played by the feedback
        model.

        Raises:
            `ValueError`: If a model is missing or given twice.
        """
        # One task model, at an endpoint or on this machine, and a feedback model.
        if (self.task_model is None) == (self.local_model is None):
            raise ValueError(
                "name the task model with either --task-model NAME or --local-model FOLDER (or try "
                "--sandbox)"
            )
        if self.feedback_model is None:
            raise ValueError(
                "name the feedback model with --feedback-model NAME (or try --sandbox)"
            )

        if self.local_model is not None:
            refuse_options(
                self,
                ("task_base_url", "task_client"),
                "--local-model runs here; --task-model NAME is asked at an endpoint",
            )

        # The task model is local or at an endpoint; the other roles share the feedback model.
        roles: dict[str, ChatModel] = {}
        if self.local_model is not None:
            roles["task"] = stack.enter_context(self._load_local_model(self.local_model))
        else:
            roles["task"] = self.connect_role(stack, "task")
        # A role without a model of its own takes the feedback model.
        for role in ("feedback", "optimizer", "verifier"):
            model = getattr(self, f"{role}_model")
            base_url = getattr(self, f"{role}_base_url")
            client_role = role
            if model is None:
                model = self.feedback_model
                base_url = base_url or self.feedback_base_url
                # Its settings too, unless the role has some of its own.
                if getattr(self, f"{role}_client") is None:
                    client_role = "feedback"
            roles[role] = self.connect(stack, model, base_url, client_role)
        return roles

    def _load_local_model(self, name: Path) -> TransformersChat:
        folder = Path(find_model(str(name)))
        if not (folder / "config.json").exists():
            raise ValueError(
                f"{folder} holds no transformers model (no config.json); give the folder of a "
                "downloaded one"
            )
        # Large packages are imported only once the folder is known to hold a model.
        from ..local import TransformersChat

        return TransformersChat.from_pretrained(folder)


ROLE_OPTIONS = tuple(RefineModels.__annotations__)
"""The options that [`RefineModels`] adds: which models play the roles, and how they are called."""


@dataclass
class RefineOptions(RefineModels, Tracing):
    """The options of `refine`: the questions, how answers are judged, the models and the loop."""

    sandbox: bool = option("Scripted models and a puzzle: no key.", False)
    prompt: str = option("The prompt to begin with.", DEFAULT_PROMPT)
    query: str | None = option("The question, if there is only one.")
    input: Path | None = option(
        "File of questions as JSON lines: texts, or objects with `question` (`answers`, `id`); or "
        "a table: .csv, .tsv, .xlsx, .parquet."
    )
    dataset: str | None = option(
        "Your own rows, with accepted answers, as the other commands read them (.jsonl, .json, "
        ".csv, .tsv, .xlsx, .parquet)."
    )
    held_out: float | None = option(
        "Share of the rows of --dataset for evaluation, such as 0.3: only these are refined, the "
        "same rows in every command."
    )
    columns: str | None = option("Which column of a table is which: question=q,answers=a.")
    output: Path | None = option(
        "File for the results, as JSON lines; run again, a stopped run goes on."
    )
    paper_setting: PaperSetting = option(
        "The judge of the first answer: a model, the labels, or none.", "verifier"
    )
    score: str = option(
        f"How `answers` are compared: {', '.join(SCORES)}, or your own, module:name of "
        "score(answer, answers).",
        "exact_match",
    )
    max_in_flight: int = option("Questions in flight at once.", 128)
    tokens_per_step: int = option(
        "k: tokens that the answer grows by between two looks of the critic.",
        RefineSettings.tokens_per_step,
    )
    max_steps: int = option("n: the most looks of the critic.", RefineSettings.max_steps)
    unit: Unit = option(
        "The unit of a step: k tokens, a sentence or a paragraph.", RefineSettings.unit
    )
    history: bool = option("Critic and optimizer see their earlier steps for the question.", False)
    final_max_tokens: int = option(
        "Token limit of the final and the first answer.", RefineSettings.final_max_tokens
    )
    max_failures: int = option(
        "Failed calls after which a question is no longer refined.", RefineSettings.max_failures
    )
    json: bool = option(JSON_HELP, False)

    def check(self) -> None:
        """Raise `ValueError` for options that would have no effect."""
        if self.sandbox:
            refuse_options(
                self,
                (*ROLE_OPTIONS, "replay_cache"),
                "the sandbox has scripted models; leave it out",
            )
            refuse_options(self, ("score",), "the sandbox scores its own puzzles; leave it out")
        if self.input is None and self.dataset is None:
            refuse_options(self, ("columns",), "it is for a table, --input FILE or --dataset FILE")
        if self.dataset is None:
            refuse_options(self, ("held_out",), "it is for the rows of --dataset FILE")
        if self.query is not None:
            refuse_options(
                self,
                ("score",),
                "--query has no accepted answers; give both with --input FILE or --dataset FILE",
            )
        if self.unit != "tokens":
            refuse_options(self, ("tokens_per_step",), f"a step is one {self.unit} with --unit")
        if self.paper_setting != "verifier":
            refuse_options(
                self,
                ("verifier_model", "verifier_base_url", "verifier_client"),
                f"no model judges with --paper-setting {self.paper_setting}",
            )


SETTINGS = (RefineOptions,)  # the parser returns an object of each


def refine(arguments: Sequence[str]) -> int:
    """Repair a prompt for each question while the answer is being written (ProRefine).

    One question is shown step by step with the changes of its prompt, many as a summary.
    """
    (options,) = OptionParser("refine", SETTINGS, refine.__doc__).parse(arguments)
    # A wrong score is found before any model is asked.
    score = load_score(options.score)
    options.check()
    options.start_tracing()
    with ExitStack() as stack:
        # Scripted models and a puzzle, or the named models and questions.
        if options.sandbox:
            from ..sandbox.puzzles import puzzle_models, score_puzzle

            roles: dict[str, Any] = dict(puzzle_models())
            rows = _sandbox_rows(options)
            score = score_puzzle
        else:
            rows = _read_rows(options)
            roles = dict(options.connect_roles(stack))

        # The paper's three settings differ in who judges the first answer.
        if options.paper_setting == "no_verifier":
            roles["verifier"] = None
        elif options.paper_setting == "optimal_verifier":
            roles["verifier"] = LabelVerifier(score)
        refiner = ProRefiner(
            **roles,
            tokens_per_step=options.tokens_per_step,
            max_steps=options.max_steps,
            unit=options.unit,
            history=options.history,
            final_max_tokens=options.final_max_tokens,
            max_failures=options.max_failures,
        )
        # The account of the budget is beside the results, so that a resumed run continues it.
        account = None
        if options.output is not None:
            account = options.output.with_suffix(".spending.sqlite")
        budget = options.budget(account)
        refiner.charge_to(budget)
        # Refine all questions; with a file of results a stopped run goes on.
        size_before = _file_size(options.output)
        try:
            results = refiner.refine_all(
                options.prompt, rows, options.max_in_flight, options.output
            )
        except KeyboardInterrupt:
            advice = "with --output the command could go on"
            if options.output is not None:
                advice = f"the same command goes on from {options.output}"
            print_error(f"stopped; {advice}")
            return INTERRUPTED

    # Print the results, then the questions that failed.
    from ..evaluation.refined_accuracy import measure_accuracy

    summary = summarize(results)
    accuracy = measure_accuracy(results, rows, score)
    if options.json:
        print_json(_make_record(results, summary, accuracy, options.output))
    else:
        _print_results(results, summary, accuracy)
    # The summary looks new even where every result was already in the file: say so.
    if size_before and size_before == _file_size(options.output):
        print_error(
            f"all {count_in_words(len(results), 'question')} were in {options.output} already, "
            "with these costs; another --output asks anew"
        )

    errors = [result.error for result in results if result.error is not None]
    if not errors:
        return 0
    message = f"{len(errors)} of {count_in_words(len(results), 'question')} failed"
    if accuracy:
        # A first answer that is judged right ends its question early, so that it fails less often.
        message += " and are left out of the accuracy (they may be the harder ones)"
    message += f"; first: {errors[0]}"
    if budget.limit:
        message += f". Spent so far: {budget}"
    print_error(message)
    return 1


def _file_size(file: Path | None) -> int:
    """The size of the file of results, 0 if there is none. Every new result adds a line."""
    return file.stat().st_size if file is not None and file.is_file() else 0


def _read_rows(options: RefineOptions) -> list[Any]:
    """The questions that the options name.

    Raises `ValueError` if they name none, or a line is not JSON.
    """
    sources = [options.query, options.input, options.dataset]
    if sum(source is not None for source in sources) != 1:
        raise ValueError(
            "name the questions with one of --query TEXT, --input FILE and --dataset FILE (or try "
            "--sandbox)"
        )
    if options.dataset is not None:
        return _load_dataset(options)
    if options.input is None:
        return [options.query]
    # Tables, and files whose columns have other names.
    if options.columns or options.input.suffix.lower() not in (".jsonl", ".json", ".txt", ""):
        return _read_table(options.input, options.columns)
    return [_with_answers(row) for row in _read_lines(options.input)]


def _load_dataset(options: RefineOptions) -> list[dict[str, Any]]:
    """The rows of `--dataset`, or the share of them that `--held-out` sets aside in every command."""
    rows = TaskRows(
        dataset=options.dataset, columns=options.columns, held_out=options.held_out
    ).load_for_evaluation("")
    return list(rows.select_columns(["id", "question", "answers"]))


def _with_answers(row: Any) -> Any:
    """A row with its accepted answers as a list, from `answers` or `answer`, as [`load_task`] reads
    them.
    """
    if not isinstance(row, dict):
        return row
    answers = row.get("answers")
    is_list_of_texts = isinstance(answers, list) and all(isinstance(text, str) for text in answers)
    return row if is_list_of_texts else {**row, "answers": read_answers(row)}


def _read_lines(file: Path) -> list[Any]:
    """The questions of a file, each line a text or an object in JSON, or the elements of one list."""
    text = file.read_text(encoding="utf-8-sig")
    # Other commands read a file that is one list, too.
    if text.lstrip().startswith("["):
        with suppress(ValueError):
            return list(json.loads(text))
    rows = []
    # Not `splitlines`, which also splits at characters that a JSON string may hold.
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number} of {file} is not JSON: {error}") from None
    return rows


def _read_table(file: Path, columns: str | None) -> list[dict[str, Any]]:
    """The questions of a table, with their accepted answers if it has any."""
    from ..data import load_task
    from ..data.validation import describe_missing_questions

    names = read_columns(columns)
    rows = RowsFile(str(file), names).rows
    has_answers = not {"answers", "answer"}.isdisjoint(rows[0])
    if has_answers or "question" not in rows[0]:
        dataset = load_task(str(file), columns=names or None)
        return list(dataset.select_columns(["id", "question", "answers"]))

    # A table of questions alone, which `load_task` would refuse.
    queries = []
    missing = []
    for number, row in enumerate(rows):
        question = "" if is_missing(row["question"]) else value_text(row["question"])
        if not question.strip():
            missing.append(f"row {number}")
        query = {"question": question}
        # An empty cell is no id.
        if not is_missing(row.get("id")) and value_text(row["id"]):
            query["id"] = value_text(row["id"])
        queries.append(query)
    if missing:
        column = names.get("question", "question")
        raise ValueError(describe_missing_questions(str(file), column, missing))
    return queries


def _sandbox_rows(options: RefineOptions) -> list[Any]:
    """The named questions, or else the first puzzle that the scripted model gets wrong under the
    prompt.
    """
    from ..sandbox.puzzles import PuzzleSolver, make_puzzles, score_puzzle

    if any(source is not None for source in (options.query, options.input, options.dataset)):
        return _read_rows(options)
    solver = PuzzleSolver()
    puzzles = make_puzzles(50, seed=4)
    # A puzzle that is solved at once would show no refinement.
    for puzzle in puzzles:
        answer = solver.answer(options.prompt, puzzle["question"])
        if not score_puzzle(answer, puzzle["answers"]):
            return [puzzle]
    return [puzzles[0]]


def _make_record(
    results: Sequence[RefinementResult],
    summary: Mapping[str, float],
    accuracy: Mapping[str, Estimate],
    output: Path | None,
) -> dict[str, Any]:
    """What `--json` prints: the summary, and the results if they are in no file."""
    figures: dict[str, Any] = {**summary}
    for name, estimate in accuracy.items():
        figures[name] = estimate.mean
        figures[f"{name}_interval"] = [estimate.low, estimate.high]
    record = {"summary": figures, "cost_usd": _add_up_usage(results).cost_usd}
    if output is not None:
        return {**record, "output": str(output)}
    return {**record, "results": [result.to_dict() for result in results]}


def _add_up_usage(results: Sequence[RefinementResult]) -> RoleUsage:
    """The usage of all roles together."""
    total = RoleUsage()
    for result in results:
        for usage in result.usage.values():
            total += usage
    return total


def _print_results(
    results: Sequence[RefinementResult],
    summary: Mapping[str, float],
    accuracy: Mapping[str, Estimate],
) -> None:
    """Print one result step by step with the changes of its prompt; for many, only the summary."""
    # All steps of a single question, with the changes of its prompt in colour.
    if len(results) == 1:
        for mark, line in describe_lines(results[0]):
            print_styled(line, _STYLES[mark])
        print()
    # Zeros are left out, but not an accuracy of 0. Counts are written out.
    for name, value in summary.items():
        if value:
            number = f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"
            if name.endswith("_usd"):
                number = format_usd(value)
            print(f"{name:28} {number}")
    total = _add_up_usage(results)
    cost = cost_in_words(total.cost_usd, was_used=total.tokens > 0)
    calls = count_in_words(total.calls, "call")
    print(f"{'all roles together':28} {calls}, {count_in_words(total.tokens, 'token')}, {cost}")
    for name, estimate in accuracy.items():
        interval = f"[{estimate.low:.3f}, {estimate.high:.3f}] of {estimate.n}"
        print(f"{name.replace('_', ' '):28} {estimate.mean:.4g} {interval}")
    gain = accuracy.get("accuracy_gained")
    if gain is not None and gain.low <= 0 <= gain.high:
        print("no gain was shown: the interval contains 0")
