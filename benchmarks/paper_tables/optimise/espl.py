"""E-SPL's evolution of system prompts as an optimiser among others: [`evolve`], without training
weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentic_prompting.evaluation.systems import Answer, read_answer
from agentic_prompting.evolution import EvolveConfig, LeastBudget, SystemPrompt, evolve
from agentic_prompting.rollout import FreeText, Rollout

from .common import Found, Objective

logger = logging.getLogger(__name__)

_MANY_STEPS = 10_000  # the calls run out first, not the steps


def optimise_espl(objective: Objective, prompt: str, config: EvolveConfig | None = None) -> Found:
    """Evolve a prompt until the calls are used up; the result is the best by conservative rating (μ
    - λσ).

    Args:
        objective ([`Objective`]): What to optimise, and its budget.
        prompt (`str`): The preamble to begin with; principles are evolved below it.
        config ([`EvolveConfig`], *optional*): The paper's by default, with at most as many problems
            as there are.
    """
    config = config or EvolveConfig(problems_per_step=min(10, len(objective.rows)))
    config = replace(
        config,
        steps=_MANY_STEPS,
        grammar=FreeText(),
        seed=objective.seed,
        policy_sampling=objective.sampling,
    )

    def reward(rollout: Sequence[Rollout], **columns: Any) -> list[float]:
        answers = [Answer(read_answer(episode.texts[-1]), episode.texts[-1]) for episode in rollout]
        rows = [episode.row for episode in rollout]
        return [trial.score for trial in objective.judged(rows, answers)]

    def check_calls(least: LeastBudget) -> None:
        if not objective.count.affords(least.policy_calls + least.reference_calls):
            logger.warning(
                "E-SPL: calls_budget=%s may end before a prompt was compared with its child, which "
                "takes %d calls of the model and up to %d of the editor: raise calls_budget, or "
                "its result says nothing",
                objective.count.most,
                least.policy_calls,
                least.reference_calls,
            )

    result = evolve(
        objective.chat,
        objective.editor,
        objective.rows,
        reward,
        SystemPrompt(prompt, ()),
        config,
        on_start=check_calls,
    )

    # The best prompt's mean over the steps in which it was.
    values = []
    for log in result.steps:
        for prompt_id, value in zip(log.prompts, log.values, strict=True):
            if prompt_id == result.best.id and value is not None:
                values.append(value)
    score = sum(values) / len(values) if values else float("nan")
    attempts = result.attempts
    unreadable = attempts.get("unreadable", 0)
    note = ""
    if unreadable:
        note = f"{unreadable} of {sum(attempts.values())} replies of the editor could not be read"
    return objective.found(result.best.text, score, note)
