"""`agentic-prompting refine` and `evolve`: better prompts for models whose weights stay as they are.

And `main`, the program that fills a row group of ProRefine's Table 1: one of its sets in three verifier settings.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..evolution import EvolveConfig, EvolveResult, StepLog, evolve as evolve_prompt
from ..llm import ChatModel, LLMError, charge
from ..llm.guard import describe
from ..records import atomic_write, only_writer
from ..refine import (
    DEFAULT_PROMPT,
    START_PROMPTS,
    LabelVerifier,
    ProRefiner,
    RefinementResult,
    summarize,
)
from ..refine.loop import RefineSettings
from ..refine.refiner import PaperSetting
from ..refine.types import described_lines
from .loader import REWARDS, SCORES, load_reward, load_score
from .options import (
    AsJson,
    HeldOutRows,
    Recording,
    ReferenceModel,
    Spending,
    TaskRows,
    Tracing,
    say,
    setting,
)

NOTHING_LEARNED = 3
"""The exit status of `evolve` when it has no new prompt to show."""

_STYLES = {"-": "red", "+": "green", "#": "bold", "": ""}


# --- refine ----------------------------------------------------------------------------------------------------------


@dataclass
class Questions:
    """The questions, and how answers are judged."""

    prompt: str = setting("The prompt to begin with.", DEFAULT_PROMPT)
    query: str | None = setting("One question.")
    input: Path | None = setting("JSON lines: texts, or objects with `question` (`answers`, `id`).")
    output: Path | None = setting("JSON lines of results; run again, a stopped run goes on.")
    paper_setting: PaperSetting = setting(
        "The judge of the first answer: a model, the labels, or none.", "verifier"
    )
    score: str = setting(
        f"How `answers` are compared: {', '.join(SCORES)}, or your own, module:name of score(answer, answers).",
        "exact_match",
    )
    max_in_flight: int = setting("Questions on their way at once.", 128)

    def rows(self) -> list[Any]:
        """The questions that the command line names.

        Raises:
            `ValueError`: It names none, or a line is no JSON.
        """
        if (self.query is None) == (self.input is None):
            raise ValueError(
                "say what to answer with either --query TEXT or --input FILE (or try --sandbox)"
            )
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
    """The models that answer and criticise."""

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
            raise ValueError(
                "name the feedback model with --feedback-model NAME (or try --sandbox)"
            )
        roles: dict[str, ChatModel] = {}
        for role in ("task", "feedback", "optimizer", "verifier"):
            name, url = getattr(self, f"{role}_model"), getattr(self, f"{role}_base_url")
            if role == "task" and self.local_model is not None:
                roles[role] = stack.enter_context(local_chat(self.local_model))
            else:
                url = url if name else url or self.feedback_base_url
                roles[role] = self.connect(stack, name or self.feedback_model, url)
        return roles


def refine(
    asked: Questions,
    models: Models,
    loop: RefineSettings,
    tracing: Tracing,
    as_json: AsJson = False,
) -> int:
    """Repair a prompt for each question while the answer is being written (ProRefine).

    One question is shown step by step with the changes of its prompt, many as a summary.
    """
    output, compare = asked.output, load_score(asked.score)
    tracing.start()
    with ExitStack() as stack:
        if models.sandbox:
            roles, rows, compare = _in_sandbox(asked)
        else:
            rows, roles = asked.rows(), models.roles(stack)
        verifiers = {
            "no_verifier": None,
            "verifier": roles["verifier"],
            "optimal_verifier": LabelVerifier(compare),
        }
        roles["verifier"] = verifiers[asked.paper_setting]
        refiner = ProRefiner(**roles, **vars(loop))
        budget = models.budget(output and output.with_suffix(".spending.sqlite"))
        refiner.charge_to(budget)
        try:
            results = refiner.refine_all(asked.prompt, rows, asked.max_in_flight, output)
        except KeyboardInterrupt:
            where = (
                f"the same command goes on from {output}"
                if output
                else "with --output the command could go on"
            )
            print(f"agentic-prompting: stopped; {where}", file=sys.stderr)
            return 130
    summary = summarize(results) | _accuracy(results, rows, compare)
    if as_json:
        shown = (
            {"output": str(output)}
            if output
            else {"results": [result.to_dict() for result in results]}
        )
        say(json.dumps({"summary": summary, **shown}, ensure_ascii=False))
    else:
        show(results, summary)
    failed = [result.error for result in results if result.error is not None]
    if failed:
        bill = f". Spent so far: {budget}" if budget.limit else ""
        what = f"{len(failed)} of {len(results)} questions failed; first: {failed[0]}{bill}"
        print(f"agentic-prompting: {what}", file=sys.stderr)
    return int(bool(failed))


def _in_sandbox(asked: Questions) -> tuple[dict[str, Any], list[Any], Any]:
    """Scripted models, the puzzles' score, and, where no question is given, the first puzzle that goes wrong."""
    from ..sandbox.puzzles import PuzzleSolver, make_puzzles, puzzle_models, score_puzzle

    if asked.query is not None or asked.input is not None:
        return puzzle_models(), asked.rows(), score_puzzle
    solver, puzzles = PuzzleSolver(), make_puzzles(50, seed=4)
    wrong = (
        row
        for row in puzzles
        if not score_puzzle(solver.answer(asked.prompt, row["question"]), row["answers"])
    )
    return puzzle_models(), [next(wrong, puzzles[0])], score_puzzle


def _accuracy(
    results: Sequence[RefinementResult], rows: Sequence[Any], compare: Any
) -> dict[str, float]:
    """The accuracy over the rows that have answers; failed questions are left out."""
    scores = [
        compare(result.answer, row["answers"])
        for result, row in zip(results, rows, strict=True)
        if isinstance(row, dict) and row.get("answers") and result.error is None
    ]
    return {"accuracy": sum(scores) / len(scores)} if scores else {}


def show(results: Sequence[RefinementResult], summary: Mapping[str, float]) -> None:
    """Print one result step by step with the changes of its prompt; for many, only the summary."""
    from rich.console import Console
    from rich.text import Text

    from ..llm.masking import escape_controls

    console = Console(soft_wrap=True)
    if len(results) == 1:
        for mark, line in described_lines(results[0]):
            console.print(
                Text(escape_controls(line), style=_STYLES[mark])
            )  # Text: brackets in it are no markup
        console.print()
    for name, value in summary.items():
        if value or name == "accuracy":
            console.print(Text(f"{name:28} {value:.4g}"))


def local_chat(folder: Path) -> Any:
    """A local model in float32, on the GPU where there is one, with lossless drafting.

    Raises:
        `ValueError`: If there is no model in the folder, or its tokenizer has no chat template.
    """
    if not (folder / "config.json").exists():
        raise ValueError(
            f"{folder} holds no transformers model (no config.json); give the folder of a downloaded one"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..local import TransformersChat

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    return TransformersChat(model, AutoTokenizer.from_pretrained(folder))


# --- ProRefine's three settings on one of the paper's sets -----------------------------------------------------------


@dataclass
class ScriptArguments(Spending):
    """The data set and the models."""

    task: str | None = setting("One of ProRefine's five sets; by default the sandbox's puzzles.")
    split: str = setting("Its split.", "test")
    rows: int = setting("How many questions.", 100)
    data_files: str | None = setting("Local file instead of the hub.")
    task_model: str | None = setting("The model that answers.")
    task_base_url: str | None = setting("Any OpenAI-compatible endpoint.")
    critic_model: str | None = setting("Feedback, optimizer and verifier in one.")
    critic_base_url: str | None = setting("Its endpoint.")
    output_dir: Path = setting("For results, replies and the picture.", Path("runs/refine"))

    def roles_and_rows(
        self, stack: ExitStack, sets: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Two endpoints with a client for each role, and the task's rows; or the sandbox's scripts and puzzles."""
        from ..data import load_task
        from ..sandbox.puzzles import SORTING, make_puzzles, puzzle_models

        if self.task is None:
            return puzzle_models(), make_puzzles(self.rows, kinds=(SORTING,))
        if self.task not in sets or self.task_model is None or self.critic_model is None:
            raise SystemExit(
                f"--task is one of {', '.join(sets)}, with --task_model and --critic_model"
            )
        models = Models(
            replay_cache=self.output_dir / "replies.sqlite",
            task_model=self.task_model,
            task_base_url=self.task_base_url,
            feedback_model=self.critic_model,
            feedback_base_url=self.critic_base_url,
        )
        return models.roles(stack), list(
            load_task(self.task, self.split, self.rows, data_files=self.data_files)
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Refine, and print accuracy and iterations in the three verifier settings.

    Each setting writes its results to a file of its own in `--output_dir`; a run that was stopped goes on when started
    again.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of the command line's.
    """
    from transformers import HfArgumentParser

    from ..report.plots import accuracy_of, accuracy_table, iterations_of, plot_iterations
    from ..rewards import REASONING_SCORERS
    from ..sandbox.puzzles import SORTING

    given = None if arguments is None else list(arguments)
    (script,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses(args=given)  # type: ignore[arg-type]
    name, folder = script.task or SORTING, script.output_dir
    results = {}
    with ExitStack() as stack:
        stack.enter_context(only_writer(folder / "refine"))
        roles, rows = script.roles_and_rows(stack, REASONING_SCORERS)
        score = REASONING_SCORERS[name]
        budget = script.budget(folder / "spending.sqlite")
        charge(budget, **roles)
        verifiers = {
            "no verifier": None,
            "verifier": roles.pop("verifier"),
            "optimal verifier": LabelVerifier(score),
        }
        for setting, verifier in verifiers.items():
            file = folder / f"{setting.replace(' ', '_')}.jsonl"
            refiner = ProRefiner(**roles, verifier=verifier)
            results[setting] = refiner.refine_all(START_PROMPTS[name], rows, output=file)
            fatal = next(
                (
                    one.error
                    for one in results[setting]
                    if one.error is not None and one.error.fatal
                ),
                None,
            )
            if fatal is not None:
                raise SystemExit(
                    f"stopped: {fatal}. Spent so far: {budget}; the same command goes on"
                )
    model = script.task_model or "scripted (sandbox)"
    print(
        accuracy_table(
            {
                name: {
                    one: {model: accuracy_of(found, rows, score)} for one, found in results.items()
                }
            }
        )
    )
    for setting, found in results.items():
        print(f"{setting:18} {iterations_of(found).mean:.2f} iterations")
    try:
        plot_iterations({name: results}, folder / "iterations.png")
    except ImportError as error:
        print(f"no picture: {error}")


# --- evolve ----------------------------------------------------------------------------------------------------------


@dataclass
class Evolving(TaskRows, HeldOutRows, Spending, ReferenceModel):
    """The models, the rows and the reward."""

    policy_model: str | None = setting("The model that solves, by its name.")
    policy_base_url: str | None = setting("Its OpenAI-compatible endpoint.")
    sandbox: bool = setting("A tiny agent and a scripted reflector: no key.", False)
    task: str = setting("What it is to solve. `agentic-prompting data list` has all.", "gsm8k")
    reward: str = setting(
        f"How answers are judged: {', '.join(REWARDS)}, or your own as module:name.", "exact_match"
    )
    initial_prompt: str = setting("Where to begin; lines [G0]. ... are its principles.", "")
    warm_start_steps: int = setting("Sandbox: supervised steps of the tiny agent.", 450)
    output_dir: Path = setting("Folder for state and best prompt.", Path("runs/evolve"))

    def with_models(self, config: EvolveConfig, stack: ExitStack) -> dict[str, Any]:
        """The arguments of [`evolve`], with models at real endpoints."""
        if not (self.policy_model and self.reference_model):
            raise ValueError(
                "say which models: --policy-model NAME --reference-model NAME, or --sandbox"
            )
        return {
            "policy": self.connect(stack, self.policy_model, self.policy_base_url),
            "reference": self.reference(stack),
            "rows": list(self.load(self.task, config.seed)),
            "reward": load_reward(self.reward),
            "prompt": self.initial_prompt,
            "config": config,
            "eval_rows": self.held_out(config.seed),
        }

    def in_sandbox(self, config: EvolveConfig) -> dict[str, Any]:
        """The arguments of [`evolve`], with a tiny agent of fixed weights and a scripted reflector."""
        from ..agent import PromptAgent
        from ..environments import LLMEnvironment
        from ..rewards import exact_match_reward
        from ..sandbox import GuardedReflector
        from ..sandbox.setup import ROOT, AgentChat, Transcript, prepare_guarded

        sandbox = prepare_guarded(
            self.output_dir, config.seed, warm_start_steps=self.warm_start_steps
        )
        agent = PromptAgent.from_pretrained(
            sandbox.model, LLMEnvironment(sandbox.oracle), max_batch_size=256
        )
        own: dict[str, Any] = {
            "prompt_template": sandbox.spec.prompt_template,
            "grammar": Transcript(),
        }
        return {
            "policy": AgentChat(agent, config.seed),
            "reference": GuardedReflector(seed=config.seed),
            "rows": list(sandbox.train),
            "reward": exact_match_reward,
            "prompt": ROOT,
            "config": replace(config, reflect_on="imperfect", **own),
            "eval_rows": list(sandbox.test)[: self.eval_task_rows or 32],
        }


def evolve(
    script: Evolving, config: EvolveConfig, tracing: Tracing, as_json: AsJson = False
) -> int:
    """Evolve the system prompt of a closed model (E-SPL without weights); run again, a stopped run goes on."""
    folder = script.output_dir
    tracing.start()
    try:
        result = _evolved(script, config, None if as_json else _show_step)
    except KeyboardInterrupt:
        print(
            f"agentic-prompting: stopped; the same command goes on from {folder}", file=sys.stderr
        )
        return 130
    except (ValueError, OSError, LLMError):
        raise
    except Exception as error:  # of the reward: the only code of the user's that may raise here
        if isinstance(error, TypeError) and str(error).startswith("the reward"):
            raise ValueError(str(error)) from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if Path(frame.filename).is_relative_to(Path(__file__).parents[1]):
            raise
        raise ValueError(
            f"{script.reward} failed at {Path(frame.filename).name}:{frame.lineno}: {describe(error)}"
        ) from error
    if as_json:
        usage = {name: asdict(used) for name, used in result.usage.items()}
        shown = {
            "prompt": result.best.text,
            "steps": len(result.steps),
            "usage": usage,
            "stopped": result.stopped,
        }
        say(json.dumps({**shown, "output_dir": str(folder)}, ensure_ascii=False))
    elif result.steps:
        best = result.best.text if result.best.text.strip() else "(it is empty)"
        say(f"\nthe best of {len(result.population.members)} prompts, by rating:\n{best}\n")
        say("\n".join(f"{name}: {usage}" for name, usage in result.usage.items()))
        say(f"written to {folder}: system_prompt.txt, state.json")
    # `evolve` has logged the reasons.
    return 1 if result.stopped else NOTHING_LEARNED if result.nothing_learned else 0


def _evolved(
    script: Evolving, config: EvolveConfig, on_step: Callable[[StepLog], None] | None
) -> EvolveResult:
    """Evolve, and write `system_prompt.txt` and `state.json` into `script.output_dir`; a stopped run is resumed."""
    folder = script.output_dir
    with ExitStack() as stack:
        with only_writer(
            folder / "state.json"
        ):  # which `evolve_prompt` locks again: nothing is made beside a run
            run = script.in_sandbox(config) if script.sandbox else script.with_models(config, stack)
        budget = script.budget(folder / "spending.sqlite")
        result = evolve_prompt(
            **run, on_step=on_step, checkpoint=folder / "state.json", budget=budget
        )
    atomic_write(folder / "system_prompt.txt", result.best.text)
    return result


def _show_step(log: StepLog) -> None:
    values = zip(log.prompts, log.values, strict=True)
    line = ", ".join(f"{name}: {value:.2f}" for name, value in values if value is not None)
    born = [str(operator["child"]) for operator in log.operators if operator["child"] is not None]
    held_out = "" if log.held_out is None else f"; held out: {log.held_out:.2f}"
    print(
        f"step {log.step}: prompt {line}{'; born: ' + ', '.join(born) if born else ''}{held_out}",
        flush=True,
    )
