"""`evolve`: E-SPL for a model behind an endpoint, whose weights are not trained.

No trainer, no torch: the policy is a [`ChatModel`]. A run is a loop of [`Evolution.step`]; it
continues from its checkpoint as if it had not been interrupted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..llm import Budget, BudgetExceeded, Usage, charge
from ..llm.loop import in_parallel
from ..records import only_writer
from .generation import EvolutionJournal, journal_beside
from .least_budget import estimate_least_budget
from .population import Population, load_state
from .scoring import Reward
from .settings import EvolveConfig
from .steps import Chat, Evolution, EvolutionStopped, StepLog
from .system_prompt import SystemPrompt

logger = logging.getLogger(__name__)


@dataclass
class EvolveResult:
    """The result of [`evolve`].

    Args:
        best ([`SystemPrompt`]): The best prompt by `config.best_rule`.
        population ([`Population`]): All prompts of the run.
        steps (`list[StepLog]`): One per step.
        usage (`dict[str, Usage]`): Usage of the `policy` and of the `reference`, including failed
            steps.
        stopped (`str`, *optional*): Why the run ended early; `None` if it did not. The other fields
            then describe the last complete step.
    """

    best: SystemPrompt
    population: Population
    steps: list[StepLog]
    usage: dict[str, Usage]
    stopped: str | None = None

    @property
    def nothing_learned(self) -> str:
        """Why the run has no new prompt to show, and what to change; empty if it has one."""
        operators = []
        for log in self.steps:
            operators += log.operators

        # A child was made, but none is better than an empty first prompt.
        if any(operator["child"] is not None for operator in operators):
            if self.best.text.strip():
                return ""
            return (
                "the best prompt is still the empty one; a child needs matches to be rated above "
                "it: more steps=, or more problems_per_step="
            )

        # No child was made: for want of evidence, of steps, or of usable edits.
        notes = [log.note for log in self.steps if log.note]
        if notes and len(notes) == len(self.steps):
            return f"no step had evidence; {notes[-1]}"
        if not operators:
            return "no step has rated a prompt; raise steps="
        counts = sum((Counter(operator["counts"]) for operator in operators), Counter())
        count_texts = ", ".join(f"{name} {count}" for name, count in counts.items())
        return (
            f"the reference LLM made no usable edit ({count_texts}); take a more capable one, or "
            "raise max_words="
        )


def evolve(
    policy: Chat,
    reference: Chat,
    rows: Sequence[Any],
    reward: Reward,
    prompt: SystemPrompt | Population | str,
    config: EvolveConfig | None = None,
    on_step: Callable[[StepLog], None] | None = None,
    checkpoint: str | Path | None = None,
    budget: Budget | None = None,
    eval_rows: Sequence[Any] | None = None,
) -> EvolveResult:
    """Evolve a system prompt for a model that is only called, not trained; also in a notebook.

    Args:
        policy ([`ChatModel`] or `Callable`): The model that solves the problems, or a function of
            the messages that returns a text.
        reference ([`ChatModel`] or `Callable`): The model that reflects and edits; may be the same
            object.
        rows (`Sequence`): Problems: mappings with `question` (or `prompt`), `answers` and whatever
            the reward reads, `(question, answer)` pairs, or questions. A `datasets.Dataset` works
            too.
        reward (`Callable`): With TRL's reward signature, like all of `rewards/`. A reward of `None`
            excludes the rollout.
        prompt ([`SystemPrompt`], `str` or [`Population`]): The first prompt; a text as
            [`SystemPrompt.of`] reads it. A population has its own window and rule: settings that
            would be ignored with it are an error.
        config ([`EvolveConfig`], *optional*): The settings.
        on_step (`Callable[[StepLog], None]`, *optional*): Called after each step.
        checkpoint (`str` or `Path`, *optional*): File for the state after each step. If it exists,
            the run is resumed from it. The journal of all children is written beside it, see
            [`journal_beside`].
        budget ([`Budget`], *optional*): The common budget of the roles: `policy`, `reference` and,
            if the reward is a language model with a `charge_to`, `judge`. One that does not pay for
            two steps ([`LeastBudget`]) is warned of before the first call.
        eval_rows (`Sequence`, *optional*): Held-out problems, which change no rating; see
            `eval_every` and `eval_all` of the settings.

    Returns:
        [`EvolveResult`]. A run that cannot continue (budget spent, too many failures) returns its
        last complete state with the reason in `stopped`, and can be resumed from its checkpoint.

    Raises:
        `TypeError`: An argument, or the value of the reward function, has a wrong type.
        `ValueError`: There are fewer rows than `problems_per_step`, the checkpoint is another run's
            or damaged, or another process is writing it.
        `RuntimeError`: Called on the thread of the background event loop, which would wait for
            itself.

    Example:

        >>> result = evolve(OpenAIChat("gpt-4o-mini"), OpenAIChat("gpt-4o"), rows, exact_match_reward,
        ...                 prompt="Answer in <answer></answer>.")  # doctest: +SKIP
    """
    # All roles draw on the common budget.
    if budget is not None:
        charge(budget, policy=policy, reference=reference, judge=reward)
    evolution = Evolution(policy, reference, rows, reward, prompt, config, eval_rows)
    least = estimate_least_budget(policy, reference, rows, prompt, evolution.config)
    path = None if checkpoint is None else Path(checkpoint)
    stopped = None
    # Two processes that write one checkpoint would undo the steps of each other.
    with nullcontext() if path is None else only_writer(path):
        if path is not None and path.exists():
            _resume(evolution, path)
        # Say so before the first call, not when the money is gone.
        if budget is not None and not evolution.logs and least.exceeds(budget):
            logger.warning(
                "the budget is below the least useful one, which pays for %s: raise budget_usd= or "
                "budget_tokens=, or lower problems_per_step= or num_generations=",
                least,
            )
        try:
            _run_steps(evolution, on_step, path)
        except EvolutionStopped as error:
            # The run cannot go on: keep its last complete step, and say how to resume it.
            stopped = f"{error}{_describe_spending(budget)}"
            advice = "with checkpoint= a run can be resumed"
            if path is not None:
                evolution.save(path)  # with the cost of the failed step
                advice = f"run again to resume from {path}"
            step_number = len(evolution.logs)
            logger.warning("evolution stopped at step %d: %s; %s", step_number, stopped, advice)
    result = EvolveResult(
        best=evolution.population.best(),
        population=evolution.population,
        steps=evolution.logs,
        usage=evolution.usage,
        stopped=stopped,
    )
    # A run may end without an error, and still have no new prompt to show.
    if stopped is None and result.nothing_learned:
        logger.warning("nothing was learned: %s", result.nothing_learned)
    return result


def _resume(evolution: Evolution, path: Path) -> None:
    load_state(path, evolution.load_state_dict)
    finished_steps = len(evolution.logs)
    steps = evolution.config.steps
    if finished_steps < steps:
        logger.warning("resuming from %s: %d of %d steps are done", path, finished_steps, steps)
    else:
        logger.warning(
            "%s holds a finished run of %d steps: raise steps= to continue, or use another "
            "checkpoint file",
            path,
            finished_steps,
        )


def _run_steps(
    evolution: Evolution, on_step: Callable[[StepLog], None] | None, path: Path | None
) -> None:
    """Run the remaining steps, each saved to `path`, and the evaluation after the last one."""
    logs = evolution.logs
    journal = None
    if path is not None:
        # The journal may have one step more than the saved state. That step is run again.
        journal = EvolutionJournal(journal_beside(path))
        journal.keep_before(len(logs))
    while len(logs) < evolution.config.steps:
        ((_, log),) = in_parallel([evolution.step()], max_in_flight=1)

        # The journal comes before the state: a step without a saved state is run again.
        if journal is not None:
            journal.append(evolution.attempts)
        if path is not None:
            evolution.save(path)

        # Warn about the first step without evidence.
        notes = [earlier_log.note for earlier_log in logs if earlier_log.note]
        if log.note and len(notes) == 1:
            logger.warning("no evidence at step %d: %s", log.step, log.note)
        if on_step is not None:
            on_step(log)

    # Evaluate every rated prompt on the held-out rows (Figure 8).
    if evolution.config.eval_all:
        members = evolution.population.members
        rated_prompts = [member.prompt for member in members if member.matches]
        list(in_parallel([evolution.evaluate(rated_prompts)], max_in_flight=1))
        if path is not None:
            evolution.save(path)


def _describe_spending(budget: Budget | None) -> str:
    """Return the spending per role, for the reason why a run stopped.

    It names a spent budget too, because a judge that returned `None` hides that cause.
    """
    if budget is None:
        return ""
    try:
        # Raises if the budget is spent.
        budget.stop_when_spent()
    except BudgetExceeded as error:
        return f" ({error}). Spent so far: {budget}"
    return f". Spent so far: {budget}"
