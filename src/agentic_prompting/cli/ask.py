"""`agentic-prompting ask`: a question for a trained agent, with its conversation with the large LLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.numbers import count_in_words
from .hub import check_trained_agent
from .option_parser import OptionParser
from .options import JSON_HELP, LargeLLM, Tracing, option
from .terminal import (
    print_json,
    print_observation,
    print_styled,
    print_turn,
    print_turns,
    show_progress,
)

if TYPE_CHECKING:
    from ..rollout import Environment, Observation, Rollout


@dataclass
class AskOptions(LargeLLM, Tracing):
    """The options of `ask`."""

    run: Path | None = option("The trained agent's folder, the same as the argument RUN.")
    seed: int = option("Seed of the conversation: the same seed gives the same one.", 0)
    json: bool = option(JSON_HELP, False)


SETTINGS = (AskOptions,)


def ask(arguments: Sequence[str]) -> int:
    """Ask a trained agent, and see how it asks the large LLM."""
    parser = OptionParser("ask", SETTINGS, ask.__doc__, words="RUN QUESTION")
    options, words = parser.parse_with_words(arguments)
    # RUN may also be given as an option.
    if options.run is not None:
        words.insert(0, str(options.run))
    if len(words) != 2:
        raise ValueError(
            "name the trained agent and the question: agentic-prompting ask RUN QUESTION. "
            "`agentic-prompting demo` trains one, in runs/demo"
        )
    run = Path(words[0])
    question = words[1]
    # Everything that can be wrong is found before the model is loaded.
    options.check_environment()
    check_trained_agent(run)
    options.start_tracing()
    if options.sandbox:
        question = _in_words_of_sandbox(question)

    with ExitStack() as stack:
        with show_progress(f"loading {run}"):
            from transformers.utils.logging import disable_progress_bar

            from ..agent import PromptAgent

            environment: Any = options.open_environment(stack, options.budget())
            # Requests and replies are printed as they happen.
            if not options.json:
                source = "large LLM" if options.environment is None else "environment"
                environment = _PrintingEnvironment(environment, source)
            disable_progress_bar()  # show_progress does it, and only on a terminal
            agent = PromptAgent.from_pretrained(run, environment)
        rollout = agent.answer(question, options.seed)

    if options.json:
        print_json(_conversation(question, rollout))
    else:
        _print_end(rollout)
    return 1 if rollout.answer is None else 0


def _in_words_of_sandbox(question: str) -> str:
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


def _conversation(question: str, rollout: Rollout) -> dict[str, Any]:
    """The conversation and its cost, for `--json`."""
    # Turns and replies in the order of the conversation.
    messages: list[dict[str, Any]] = []
    for position, turn in enumerate(rollout.turns):
        messages.append(
            {"role": "agent", "kind": turn.kind, "text": turn.text, "request": turn.request}
        )
        # The last turn, an answer, has no observation.
        for observation in rollout.observations[position : position + 1]:
            error = observation.error and str(observation.error)
            messages.append({"role": "environment", "text": observation.text, "error": error})

    # The bill: replies of the large LLM, and the tokens that the agent sampled.
    usages = [reply.usage for reply in rollout.replies]
    return {
        "question": question,
        "answer": rollout.answer,
        "status": rollout.status,
        "error": rollout.error and str(rollout.error),
        "conversation": messages,
        "usage": {
            "calls": len(usages),
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
            "cost_usd": sum(usage.cost_usd for usage in usages),
            "agent_tokens": sum(sum(sequence.mask) for sequence in rollout.sequences),
        },
    }


class _PrintingEnvironment:
    """An environment that prints its requests and replies while the episode runs."""

    step_timeout = math.inf  # the limit is in `step`

    def __init__(self, environment: Environment, source: str):
        self.environment = environment
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)  # such as its grammar

    async def step(self, rollout: Rollout) -> Observation | None:
        from ..rollout import Limits, observe

        # The request is shown while the reply is still awaited.
        print_turn(rollout.turns[-1])
        observation = await observe(self.environment, rollout, Limits().step_timeout)
        if observation is not None:
            print_observation(self.source, observation)
        return observation


def _print_end(rollout: Rollout) -> None:
    """Print the last turn, how the conversation ended, and its turns, calls and cost."""
    # A program plays the whole episode, so nothing was printed while it ran.
    if "program/calls" in rollout.counts:
        print_turns(rollout)
    # Turns that asked something were printed by the environment.
    elif rollout.turns and rollout.turns[-1].kind != "act":
        print_turn(rollout.turns[-1])
    # The answer, or why there is none.
    if rollout.answer is not None:
        print_styled(f"\n{rollout.answer}", "bold green")
    else:
        cause = f": {rollout.error}" if rollout.error else ""
        print_styled(f"\nno answer ({rollout.status.replace('_', ' ')}{cause})", "bold red")

    # The turns, calls and cost of the conversation.
    turns = len(rollout.turns)
    calls = len(rollout.replies)
    cost = sum(reply.usage.cost_usd for reply in rollout.replies)
    summary = count_in_words(turns, "turn")
    # An environment of the user's may ask a model without saying so.
    if calls:
        summary += f", {count_in_words(calls, 'call')} to the large LLM"
    print_styled(summary + (f", ${cost:.4f}" if cost else ""), "dim")
