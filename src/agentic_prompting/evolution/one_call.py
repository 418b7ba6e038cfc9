"""Mutation in one call: the reference LLM reads failed attempts of the whole batch and edits.

Not the paper's way, which summarises every attempt, draws lessons from each problem and unites them
(`operators.py`): for a batch of 10 problems with 5 attempts each up to 61 calls.
"""

from __future__ import annotations

from typing import Any

from ..llm import ChatModel
from . import templates
from .operators import Operation, OperatorTrace, Outcome, known_ids
from .results import PromptResult
from .settings import ESPLSettings
from .system_prompt import OPERATIONS, Draft
from .templates import shorten

MAX_FAILURES = 12
"""Attempts that one call shows."""
MAX_FAILURE_CHARS = 4_000
"""Longer attempts are shown without their middle."""


async def revise(
    reference: ChatModel,
    result: PromptResult,
    settings: ESPLSettings | None = None,
    **sampling: Any,
) -> Outcome:
    """Mutate a prompt by one call; takes and returns what [`mutate`] does.

    The call shows the prompt and up to `MAX_FAILURES` failed attempts at the problems worth
    reflecting on, one of each problem before a second of any. At most `max_ops` edits per problem
    shown are applied. A reply without a JSON list of edits is a failed mutation. With
    `reflection="rewrite"` the reply has the whole new instructions instead.
    """
    settings = settings or ESPLSettings()
    prompt = result.prompt
    outcome = Outcome("mutation", trace=OperatorTrace(known_ids([prompt.id])))
    failures = _choose_failures(result, settings.reflect_on)
    if not failures:
        return outcome.finish("no_evidence")

    # Record and render the attempts that the call shows.
    problem_failures = []
    for column, attempts in failures.items():
        problem = result.problems[column]
        outcome.trace.show(column, problem, attempts)
        problem_failures.append((problem.question, problem.truth, attempts))

    # Ask for the edits, up to `max_ops` for each problem that the call shows.
    operation = Operation(outcome, prompt, reference, settings, sampling)
    limit = settings.max_ops * len(failures)
    reply = await operation.ask(
        templates.REVISE,
        "revise",
        prompt=prompt.text,
        failures=templates.render_failures(problem_failures),
        max_ops=limit,
    )
    # The reply is the plan itself, and may use every operation.
    return operation.finish(reply, Draft(prompt, settings.max_words), OPERATIONS, limit)


def _choose_failures(result: PromptResult, reflect_on: str) -> dict[int, list[tuple[float, str]]]:
    """Return failed attempts by problem, as reward and text, one of each problem per round."""
    # In each round take the next failed attempt at every problem, until there are enough.
    failed_attempts = [problem.failed(reflect_on) for problem in result.problems]
    rounds = max(map(len, failed_attempts), default=0)
    failures: dict[int, list[tuple[float, str]]] = {}
    count = 0
    for round_number in range(rounds):
        for column, attempts in enumerate(failed_attempts):
            if round_number < len(attempts) and count < MAX_FAILURES:
                text, reward = attempts[round_number]
                shortened = shorten(text, MAX_FAILURE_CHARS)
                failures.setdefault(column, []).append((reward, shortened))
                count += 1
    # In the order of the batch.
    return dict(sorted(failures.items()))
