"""`evolve`: E-SPL for a model behind an endpoint, whose weights are not trained.

No trainer, no torch: the policy is a [`ChatModel`]. A run is a loop of [`EvolveRun.step`]; it
continues from its checkpoint as if it had not been interrupted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..llm import Budget, BudgetExceeded, charge, loop
from ..records import only_writer
from .evolve_result import EvolveResult, StepLog, ends_without_answers
from .evolve_run import Chat, EvolutionStopped, EvolveRun
from .journal import EvolutionJournal, journal_beside, read_journal
from .least_budget import LeastBudget, estimate_least_budget
from .no_evidence import NO_ANSWER_FOUND
from .operators import MAX_TRACE_CHARS
from .population import Population, load_state
from .results import question_of
from .run_inputs import check_run_inputs
from .scoring import Reward
from .settings import EvolveConfig
from .system_prompt import SystemPrompt
from .templates import shorten

logger = logging.getLogger(__name__)


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
    on_start: Callable[[LeastBudget], None] | None = None,
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
            the run is resumed from it, with the same training rows, policy and its sampling,
            reward, prompt template and grammar. The code of a reward or a policy of your own
            counts, too, unless the run ended because the reward failed.
            The journal of all children is written beside it, see [`journal_beside`].
        budget ([`Budget`], *optional*): The common budget of the roles: `policy`, `reference` and,
            if the reward is a language model with a `charge_to`, `judge`. A warning is logged
            before the first call if it does not pay for two steps ([`LeastBudget`]).
        eval_rows (`Sequence`, *optional*): Held-out problems, which change no rating. The first and
            the best prompt are evaluated on them after the last step; see also `eval_every` and
            `eval_all` of the settings.
        on_start (`Callable[[LeastBudget], None]`, *optional*): Called once with the least useful
            budget, after the arguments are checked and before the first call of a model.

    Returns:
        [`EvolveResult`]. A run that cannot continue (budget spent, too many failures) returns its
        last complete state with the reason in `stopped`, and can be resumed from its checkpoint.

    Raises:
        `TypeError`: An argument, or the value of the reward function, has a wrong type.
        `ValueError`: There are fewer rows than `problems_per_step`, the checkpoint is damaged or
            that of another run (another first prompt, other training rows, ...), or another process
            is writing it.
        `RuntimeError`: Called on the thread of the background event loop, which would wait for
            itself.

    Example:

        >>> result = evolve(OpenAIChat("gpt-4o-mini"), OpenAIChat("gpt-4o"), rows, exact_match_reward,
        ...                 prompt="Answer in <answer></answer>.")  # doctest: +SKIP
    """
    # All roles draw on the common budget.
    if budget is not None:
        charge(budget, policy=policy, reference=reference, judge=reward)
    run = EvolveRun(policy, reference, rows, reward, prompt, config, eval_rows)
    least = estimate_least_budget(policy, reference, rows, prompt, run.config)
    if on_start is not None:
        on_start(least)
    path = None if checkpoint is None else Path(checkpoint)
    # Two processes that write one checkpoint would undo the steps of each other.
    with nullcontext() if path is None else only_writer(path):
        if path is not None and path.exists():
            _resume(run, path)
        # Say so before the first call, not when the money is gone.
        if budget is not None and not run.logs and least.exceeds(budget):
            logger.warning(
                "the budget is below the least useful one, which pays for %s: raise budget_usd or "
                "budget_tokens, or lower problems_per_step or num_generations",
                least,
            )
        stopped = _run_until_stopped(run, on_step, path, budget)
    result = EvolveResult(
        best=run.population.best(),
        population=run.population,
        steps=run.logs,
        usage=run.usage,
        stopped=stopped,
    )
    # A run may end without an error, and still have no new prompt to show.
    has_ended = stopped is None or result.is_without_answers
    if has_ended and result.why_nothing_learned:
        logger.warning("nothing was learned: %s", result.why_nothing_learned)
    return result


def _run_until_stopped(
    run: EvolveRun,
    on_step: Callable[[StepLog], None] | None,
    path: Path | None,
    budget: Budget | None,
) -> str | None:
    """Run the remaining steps. Return why the run has to stop early; `None` if it is complete."""
    try:
        _run_steps(run, on_step, path)
    except EvolutionStopped as error:
        # The run cannot go on: keep its last complete step, and say how to resume it.
        stopped = f"{error}{_describe_spending(budget, str(error))}"
        advice = "a run with a checkpoint can be resumed"
        # Without a step and without a cost there is nothing to keep: a policy with another name
        # may begin in the same folder.
        has_begun = bool(run.logs) or any(usage.tokens for usage in run.usage.values())
        if path is not None and has_begun:
            run.save(path)  # with the cost of the failed step
        # Resumed, it would find no answer either.
        if ends_without_answers(run.logs):
            advice = "the prompt is as it was"
        elif path is not None and has_begun:
            advice = f"run again to resume from {path}"
        elif path is not None:
            advice = "run again"
        step_number = len(run.logs)
        logger.warning("evolution stopped at step %d: %s; %s", step_number, stopped, advice)
        return stopped
    except Exception:
        # If the reward has failed, its code is fixed before the run is resumed. Without a file no
        # step is complete yet, and there is nothing to resume.
        if path is not None and path.exists():
            run.allow_other_reward_code()
            run.save(path)
        raise
    return None


def _run_steps(
    run: EvolveRun, on_step: Callable[[StepLog], None] | None, path: Path | None
) -> None:
    """Run the remaining steps, each saved to `path`, and the evaluation after the last one."""
    logs = run.logs
    journal = None
    if path is not None:
        # The journal may have one step more than the saved state. That step is run again.
        journal = EvolutionJournal(journal_beside(path))
        journal.keep_before(len(logs))
    while len(logs) < run.config.steps:
        log = loop.run(run.step())

        # The journal comes before the state: a step without a saved state is run again.
        if journal is not None:
            journal.append(run.attempts)
        if path is not None:
            run.save(path)

        # Warn about the first step without evidence.
        notes = [earlier_log.note for earlier_log in logs if earlier_log.note]
        if log.note and len(notes) == 1:
            logger.warning("no evidence at step %d: %s", log.step + 1, log.note)
        if on_step is not None:
            on_step(log)
        # Without evidence the prompt stays as it is, so further steps would find no answer either.
        if ends_without_answers(logs):
            raise EvolutionStopped(f"in two steps in a row {NO_ANSWER_FOUND}, in a new run")

    # Evaluate on the held-out rows: every rated prompt (Figure 8), or the first and the best one.
    population = run.population
    if run.config.eval_all:
        prompts = [member.prompt for member in population.members if member.matches]
    else:
        prompts = [population.members[0].prompt, population.best()]
    if run.eval_rows and prompts:
        loop.run(run.evaluate(prompts))
        if path is not None:
            run.save(path)


def _describe_spending(budget: Budget | None, reason: str) -> str:
    """Return the spending per role, for the reason why a run stopped.

    It names a spent budget too, because a judge that returned `None` hides that cause.
    """
    if budget is None:
        return ""
    try:
        # Raises if the budget is spent.
        budget.stop_when_spent()
    except BudgetExceeded as error:
        # The reason has named it already, unless it comes from a judge.
        if str(error) not in reason:
            return f" ({error}). Spent so far: {budget}"
    return f". Spent so far: {budget}"


# Resuming ----------------------------------------------------------------------------------------


def _resume(run: EvolveRun, path: Path) -> None:
    def load(state: dict[str, Any]) -> None:
        run.load_state_dict(state)
        _check_held_out_rows(run, path)
        # Files of older versions do not say what their run was given.
        saved_inputs = state.get("inputs", {})
        check_run_inputs(saved_inputs, run.inputs)
        _discard_stale_held_out_scores(run, saved_inputs)

    load_state(path, load)
    finished_steps = len(run.logs)
    steps = run.config.steps
    if finished_steps < steps:
        logger.warning("resuming from %s: %d of %d steps are done", path, finished_steps, steps)
    else:
        logger.warning(
            "%s holds a finished run of %d steps: raise steps to continue, or use another "
            "checkpoint file (--output-dir)",
            path,
            finished_steps,
        )


def _check_held_out_rows(run: EvolveRun, path: Path) -> None:
    """Check the held-out rows of a resumed run against what it has learned from.

    Raises:
        `ValueError`: The saved run has learned from problems that are held out now.
    """
    eval_rows = run.eval_rows
    if not eval_rows:
        return

    # Problems that reflections have read, as the journal shortens them. A problem that is also a
    # training row of this call is held out on purpose.
    learned: set[str] = set()
    for attempt in read_journal(journal_beside(path)):
        learned.update(problem["question"] for problem in attempt.get("evidence", ()))
    learned -= {shorten(question_of(row), MAX_TRACE_CHARS) for row in run.rows}
    overlap = learned & {shorten(question_of(row), MAX_TRACE_CHARS) for row in eval_rows}
    if overlap:
        raise ValueError(
            f"its run has learned from {len(overlap)} of the rows that are held out now, such as "
            f"{min(overlap)[:80]!r}: hold out the same rows as before, or use another checkpoint "
            "file (--output-dir) for another run"
        )


def _discard_stale_held_out_scores(run: EvolveRun, saved_inputs: Mapping[str, Any]) -> None:
    """Discard the scores on held-out rows that are not those of the resumed run.

    They cannot be compared with new ones. The prompts are evaluated again at the end.
    """
    if not run.eval_rows:
        return
    saved_eval_rows = saved_inputs.get("eval_rows")
    is_changed = saved_eval_rows is not None and saved_eval_rows != run.inputs["eval_rows"]
    discarded = 0
    for member in run.population.members:
        if member.held_out is not None and (
            is_changed or member.held_out["n"] != len(run.eval_rows)
        ):
            member.held_out = None
            member.held_out_scores = None
            discarded += 1
    if discarded:
        logger.warning(
            "the held-out rows are not those of the saved run: its scores on them (of %d prompts) "
            "are discarded, and the first and the best prompt are measured anew",
            discarded,
        )
