"""`agentic-prompting ask`: one question to a trained agent, and what it and the large LLM say to each other."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .conversation import Conversation
from .models import large_llm
from .options import option
from .show import busy, say

if TYPE_CHECKING:
    from ..rollout import Rollout


def ask(
    question: Annotated[str, typer.Argument(help="What to ask the agent.")],
    run: Annotated[Path | None, option("The trained agent: the folder that its trainer saved.")] = None,
    environment_model: Annotated[str | None, option("The large LLM, by its name at its endpoint.")] = None,
    environment_base_url: Annotated[str | None, option("Its OpenAI-compatible endpoint.")] = None,
    environment_max_tokens: Annotated[int | None, option("Of each of its replies.")] = None,
    sandbox: Annotated[
        bool, option("The sandbox's oracle is the large LLM: no key, no network.", None, "--sandbox")
    ] = False,
    replay_cache: Annotated[Path | None, option("SQLite file: replies in it are not paid twice.")] = None,
    budget_usd: Annotated[float | None, option("Stop asking when so much is spent.")] = None,
    seed: Annotated[int, option("The same seed gives the same conversation: 0.")] = 0,
    as_json: Annotated[bool, option("Print one JSON object instead of text.", None, "--json")] = False,
) -> int:
    """Ask a trained agent, and see how it asks the large LLM."""
    if run is None:
        raise ValueError(
            "say which trained agent to ask: --run FOLDER. `agentic-prompting demo` trains one in the sandbox, in "
            "runs/demo"
        )
    if sandbox == (environment_model is not None):
        raise ValueError("name the large LLM with --environment-model NAME, or say --sandbox")
    if not run.is_dir():
        raise ValueError(f"{run} does not exist; `agentic-prompting demo --output-dir {run}` trains an agent there")
    if sandbox:
        question = _in_the_sandbox(question)
    from rich.console import Console

    watched = Conversation(None if as_json else Console(soft_wrap=True, highlight=False))
    with ExitStack() as stack:
        with busy(f"loading {run}"):
            from transformers.utils.logging import disable_progress_bar

            from ..agent import PromptAgent
            from ..environments import LLMEnvironment

            sampling: dict[str, Any] = {} if environment_max_tokens is None else {"max_tokens": environment_max_tokens}
            chat = large_llm(environment_model, environment_base_url, sandbox, replay_cache, budget_usd, stack)
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
    from ..sandbox.questions import parse_question

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
