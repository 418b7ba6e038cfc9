"""Mutation in one call: the reference LLM reads failed attempts of the whole batch and edits the prompt at once.

Not the paper's way, which summarises every attempt, draws lessons from each problem and unites them (`operators.py`):
for a batch of 10 problems with 5 attempts each up to 61 calls.
"""

from __future__ import annotations

from itertools import islice, zip_longest
from typing import Any

from ..llm import ChatModel
from . import templates
from .operators import OperatorTrace, Outcome, Work, known_ids
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
    """Mutation by one call; takes and returns what [`mutate`] does.

    The call shows the prompt and up to `MAX_FAILURES` failed attempts at the problems worth reflecting on, one of each
    problem before a second of any. At most `max_ops` edits per problem shown are applied. A reply without a JSON list
    of edits is a failed mutation.
    """
    settings, prompt = settings or ESPLSettings(), result.prompt
    outcome = Outcome("mutation", trace=OperatorTrace(known_ids([prompt.id])))
    chosen = _choose(result, settings.reflect_on)
    if not chosen:
        return outcome.finish("no_evidence")
    shown = []
    for column, attempts in chosen.items():
        problem = result.problems[column]
        outcome.trace.show(column, problem, attempts)
        shown.append((problem.question, problem.truth, attempts))
    work, limit = (
        Work(outcome, prompt, reference, settings, sampling),
        settings.max_ops * len(chosen),
    )
    values = {"prompt": prompt.text, "failures": templates.render_failures(shown), "max_ops": limit}
    reply = await work.ask(templates.REVISE, "revise", **values)
    return work.finish(reply, Draft(prompt, settings.max_words), OPERATIONS, limit)


def _choose(result: PromptResult, reflect_on: str) -> dict[int, list[tuple[float, str]]]:
    """Failed attempts by problem, as reward and text."""
    failed = [
        [
            (column, reward, shorten(text, MAX_FAILURE_CHARS))
            for text, reward in problem.failed(reflect_on)
        ]
        for column, problem in enumerate(result.problems)
    ]
    rounds = (one for nth in zip_longest(*failed) for one in nth if one is not None)
    chosen: dict[int, list[tuple[float, str]]] = {}
    for column, reward, text in islice(rounds, MAX_FAILURES):
        chosen.setdefault(column, []).append((reward, text))
    return dict(sorted(chosen.items()))
