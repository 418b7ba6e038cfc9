"""`agentic-prompting ask`: a question for a trained agent, with its conversation with the large
LLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.numbers import count_in_words, format_usd
from .hub import check_trained_agent, read_trained_columns
from .loader import text_or_file
from .option_parser import OptionParser
from .options import JSON_HELP, AskedAgent, option, read_columns
from .script import print_error
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
class AskOptions(AskedAgent):
    """The options of `ask`."""

    row: str | None = option(
        "Further fields of the question's row, which --program or --environment reads: a JSON "
        "object, or a file of it."
    )
    seed: int = option("Seed of the conversation: the same seed gives the same one.", 0)
    json: bool = option(JSON_HELP, False)


SETTINGS = (AskOptions,)  # the parser returns an object of each
_ROW_EXAMPLE = """--row '{"context": "..."}', or a file of it"""


def ask(arguments: Sequence[str]) -> int:
    """Ask a trained agent, and see how it asks the large LLM."""
    parser = OptionParser("ask", SETTINGS, ask.__doc__, words="RUN QUESTION")
    options, words = parser.parse_with_words(arguments)
    # RUN may also be given as an option.
    if options.run is not None:
        words.insert(0, str(options.run))
    if len(words) not in (1, 2) or (len(words) == 1 and options.row is None):
        raise ValueError(
            "name the trained agent and the question: agentic-prompting ask RUN QUESTION. "
            "`agentic-prompting demo` trains one, in runs/demo"
        )
    from ..harnesses import SOLUTION_COLUMNS

    run = Path(words[0])
    # Everything that can be wrong is found before the model is loaded.
    options.check_environment()
    row = _read_row(options.row)
    check_trained_agent(run)
    trained_columns = read_trained_columns(run)
    columns = {**trained_columns, **read_columns(options.columns)}
    row = _complete_row(row, columns, words[1:])
    # A program may do without these fields, which its rows had in training.
    for name in trained_columns:
        if name not in (*row, *SOLUTION_COLUMNS, "id"):
            example = json.dumps({name: "..."}, ensure_ascii=False)
            print_error(
                f"in training a row also had {name!r}, and this one has not; give it with --row "
                f"'{example}'"
            )
    options.start_tracing()
    if options.sandbox:
        row["question"] = _in_words_of_sandbox(row["question"])

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
            options.name_columns(agent)
        (rollout,) = agent.answer_all([row], options.seed, progress=False)

    if options.json:
        print_json(_conversation(row["question"], rollout))
    else:
        _print_end(rollout)
    return 1 if rollout.answer is None else 0


# --- the row of the question ----------------------------------------------------------------------


def _read_row(text: str | None) -> dict[str, Any]:
    """The fields of `--row`."""
    try:
        row = json.loads(text_or_file(text) or "{}")
    except ValueError as error:
        raise ValueError(f"--row is no JSON ({error}): {_ROW_EXAMPLE}") from None
    if not isinstance(row, dict):
        raise ValueError(f"--row takes an object with the fields of the row: {_ROW_EXAMPLE}")
    if "prompt" in row:
        raise ValueError(
            "--row has `prompt`, which would take the place of the question: leave it out, and "
            "give the question itself"
        )
    return row


def _complete_row(
    row: Mapping[str, Any], columns: Mapping[str, str], questions: Sequence[str]
) -> dict[str, Any]:
    """The row of the question, with both names of each column.

    Args:
        row (`Mapping[str, Any]`): The fields of `--row`.
        columns (`Mapping[str, str]`): Our name for a column -> that of the data in training.
        questions (`Sequence[str]`): The argument QUESTION, if there is one.
    """
    from ..rollout import AgentSpec

    # The question is an argument, or a field of the row under one of its two names.
    names = [name for name in ("question", columns.get("question")) if name in row]
    if questions and names:
        raise ValueError(
            f"the question is given twice, as QUESTION and as {names[0]!r} of --row: leave one of "
            "them out"
        )
    if questions:
        row = {**row, "question": questions[0]}
    completed = AgentSpec(columns=dict(columns)).with_both_names(row)
    if not isinstance(completed.get("question"), str) or not completed["question"].strip():
        raise ValueError(
            "there is no question: agentic-prompting ask RUN QUESTION, or a text `question` in "
            "--row"
        )
    return completed


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
    from ..rollout import rollout_record

    # Turns and replies in the order of the conversation.
    messages: list[dict[str, Any]] = []
    source = "program" if "program/calls" in rollout.counts else "environment"
    if rollout.first_request:
        messages.append({"role": source, "text": rollout.first_request, "error": None})
    for position, turn in enumerate(rollout.turns):
        messages.append(
            {"role": "agent", "kind": turn.kind, "text": turn.text, "request": turn.request}
        )
        # The last turn, an answer, has no observation.
        for observation in rollout.observations[position : position + 1]:
            error = observation.error and str(observation.error)
            messages.append({"role": source, "text": observation.text, "error": error})

    # The bill: replies of the large LLM, and the tokens that the agent sampled.
    usages = [reply.usage for reply in rollout.replies]
    return {
        "question": question,
        "answer": rollout.answer,
        "status": rollout.status,
        "error": rollout.error and str(rollout.error),
        "returned": rollout_record(rollout).get("returned", {}),
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
    last_turn = rollout.turns[-1] if rollout.turns else None
    # A program plays the whole episode, so nothing was printed while it ran.
    if "program/calls" in rollout.counts:
        print_turns(rollout)
    # Turns that asked something were printed by the environment.
    elif last_turn is not None and last_turn.kind != "act":
        print_turn(last_turn)
    # Why there is no answer, or the answer, unless it is that of the last turn.
    if rollout.answer is None:
        cause = f": {rollout.error}" if rollout.error else ""
        print_styled(f"\nno answer ({rollout.status.replace('_', ' ')}{cause})", "bold red")
    elif last_turn is None or last_turn.answer != rollout.answer:
        print_styled(f"\n{rollout.answer}", "bold green")

    # The turns, calls and cost of the conversation.
    turns = len(rollout.turns)
    calls = len(rollout.replies)
    cost = sum(reply.usage.cost_usd for reply in rollout.replies)
    summary = count_in_words(turns, "turn")
    # An environment of the user's may ask a model without saying so.
    if calls:
        summary += f", {count_in_words(calls, 'call')} to the large LLM"
    print_styled(summary + (f", ${format_usd(cost)}" if cost else ""), "dim")
