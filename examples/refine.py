"""Refine a prompt for one question, or for each line of a file, with ProRefine.

    python examples/refine.py --task_model llama-3.2-1b --task_base_url http://localhost:8000/v1 \\
        --feedback_model gpt-4o-mini --prompt "Think step by step." --query "How many legs have three spiders?"

    python examples/refine.py ... --task bbh_word_sorting --data_files word_sorting.json --verifier optimal \\
        --output runs/sorting.jsonl --replay_cache runs/replies.sqlite

    python examples/refine.py ... --prompt "Be exact." --input queries.jsonl --output results.jsonl

One question is shown step by step, with each change of the prompt as a diff. Lines of `--input` are JSON texts or
objects with `question` and, for `--verifier optimal`, `answers`. A run that was stopped goes on when started again.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from agentic_prompting.data import load_task
from agentic_prompting.llm import ChatModel, OpenAIChat, ReplayCache
from agentic_prompting.refine import DEFAULT_PROMPT, START_PROMPTS, LabelVerifier, ProRefiner, describe, summarize
from agentic_prompting.rewards import REASONING_SCORERS, exact_match

_OTHER = "the feedback model's by default"


@dataclass
class ScriptArguments:
    prompt: str | None = field(default=None, metadata={"help": "The prompt to begin with; a plain one by default."})
    query: str | None = field(default=None, metadata={"help": "One question."})
    input: str | None = field(default=None, metadata={"help": "A JSON-lines file of questions."})
    task: str | None = field(
        default=None, metadata={"help": f"A task of load_task: {', '.join(REASONING_SCORERS)}, ..."}
    )
    task_split: str = field(default="test", metadata={"help": "Its split."})
    task_rows: int | None = field(default=None, metadata={"help": "Sample this many rows; all by default."})
    data_files: str | None = field(default=None, metadata={"help": "Local file instead of the hub."})
    output: str | None = field(default=None, metadata={"help": "JSON-lines file for the results."})
    verifier: str = field(default="model", metadata={"help": "Who judges the first answer: model, none or optimal."})
    max_in_flight: int = field(default=128, metadata={"help": "Questions on their way at once."})
    replay_cache: str | None = field(default=None, metadata={"help": "SQLite file to record replies to and reuse."})
    budget_usd: float | None = field(default=None, metadata={"help": "For each model: stop when so much is spent."})


@dataclass
class ModelArguments:
    task_model: str = field(metadata={"help": "The model that answers, by its name at its endpoint."})
    feedback_model: str = field(metadata={"help": "The model that criticises."})
    task_base_url: str | None = field(default=None, metadata={"help": "Any OpenAI-compatible endpoint."})
    feedback_base_url: str | None = field(default=None, metadata={"help": "Its endpoint."})
    optimizer_model: str | None = field(default=None, metadata={"help": f"The model that edits; {_OTHER}."})
    optimizer_base_url: str | None = field(default=None, metadata={"help": "Its endpoint."})
    verifier_model: str | None = field(default=None, metadata={"help": f"The model that judges; {_OTHER}."})
    verifier_base_url: str | None = field(default=None, metadata={"help": "Its endpoint."})


@dataclass
class RefineArguments:
    tokens_per_step: int = field(default=10, metadata={"help": "k of the paper."})
    max_steps: int = field(default=25, metadata={"help": "n of the paper."})
    unit: str = field(default="tokens", metadata={"help": "What a step adds: tokens, sentence or paragraph."})
    history: bool = field(default=False, metadata={"help": "Show critic and optimizer their earlier steps."})
    final_max_tokens: int = field(default=512, metadata={"help": "For the answer."})
    max_failures: int = field(default=3, metadata={"help": "Failed calls after which a question is given up."})
    stop_when_correct: int | None = field(default=None, metadata={"help": "Stop at so many CORRECT; 2 is sensible."})


def main() -> None:
    script, models, options = HfArgumentParser(
        (ScriptArguments, ModelArguments, RefineArguments)  # type: ignore[arg-type]
    ).parse_args_into_dataclasses()
    score = REASONING_SCORERS.get(script.task or "", exact_match)
    queries = read_queries(script)
    with ExitStack() as stack:
        chats = connect(script, models, stack)
        verifiers = {"model": chats["verifier"], "none": None, "optimal": LabelVerifier(score)}
        if script.verifier not in verifiers:
            raise SystemExit(f"--verifier must be one of {', '.join(verifiers)}")
        refiner = ProRefiner(
            chats["task"], chats["feedback"], chats["optimizer"], verifiers[script.verifier], **vars(options)
        )
        prompt = script.prompt or START_PROMPTS.get(script.task or "", DEFAULT_PROMPT)
        results = refiner.refine_all(prompt, queries, script.max_in_flight, script.output)

    if len(results) == 1:
        print(describe(results[0]))
    for name, value in summarize(results).items():
        print(f"{name:28} {value:.4g}")
    scored = [score(r.answer, row["answers"]) for r, row in zip(results, queries, strict=True) if row.get("answers")]
    if scored:
        print(f"{'accuracy (' + score.__name__ + ')':28} {sum(scored) / len(scored):.4g}")


def read_queries(script: ScriptArguments) -> list[dict[str, Any]]:
    """The questions as rows, from wherever the command line says."""
    if sum(value is not None for value in (script.query, script.input, script.task)) != 1:
        raise SystemExit("say what to answer with one of --query TEXT, --input FILE and --task NAME")
    if script.query is not None:
        return [{"question": script.query}]
    if script.task is not None:
        return list(load_task(script.task, script.task_split, script.task_rows, data_files=script.data_files))
    lines = Path(script.input or "").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    return [{"question": row} if isinstance(row, str) else row for row in rows]


def connect(script: ScriptArguments, models: ModelArguments, stack: ExitStack) -> dict[str, ChatModel]:
    """A client for each role; roles with the same model and address share one."""
    cache = ReplayCache(script.replay_cache) if script.replay_cache else None
    clients: dict[tuple[str, str | None], OpenAIChat] = {}
    roles: dict[str, ChatModel] = {}
    for role in ("task", "feedback", "optimizer", "verifier"):
        model, url = getattr(models, f"{role}_model"), getattr(models, f"{role}_base_url")
        if model is None:
            model, url = models.feedback_model, url or models.feedback_base_url
        if (model, url) not in clients:
            chat = OpenAIChat(model, base_url=url, cache=cache, budget_usd=script.budget_usd)
            clients[model, url] = stack.enter_context(chat)
        roles[role] = clients[model, url]
    return roles


if __name__ == "__main__":
    main()
