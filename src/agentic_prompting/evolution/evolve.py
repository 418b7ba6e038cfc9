"""`evolve`: E-SPL for a model behind an endpoint, whose weights are not trained.

No trainer, no torch: the policy is a [`ChatModel`]. A run is a loop of [`EvolveRun.step`]; it
continues from its checkpoint as if it had not been interrupted. Algorithm 1 itself is
[`PopulationEvolution`]; a step plays the prompts on problems, lets the reference LLM reflect, and
adds the children. A step that fails changes only the usage.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..llm import (
    Budget,
    BudgetExceeded,
    ChatModel,
    LLMError,
    Reply,
    Usage,
    as_chat,
    charge,
    gather,
    loop,
    spans,
)
from ..llm.numbers import count_in_words
from ..records import atomic_write, digest, only_writer
from ..rewards.answer_checks import check_answers_of_rows
from ..rewards.reward_columns import (
    check_columns,
    refuse_reserved_columns,
    required_columns,
)
from ..rollout import AgentSpec, FreeText, Grammar
from ..versions import code_version, row_version
from .journal import EvolutionJournal, attempt_records, journal_beside, read_journal
from .least_budget import LeastBudget, estimate_least_budget
from .operators import FAILURES_IN_WORDS, MAX_CHARS, WITHOUT_ATTEMPT, Outcome
from .population import Population, load_state, member_id
from .population_evolution import PopulationEvolution, ReflectionTask, propose_children
from .results import (
    TRUTH_SEPARATOR,
    Attempt,
    ProblemResult,
    PromptResult,
    mean,
    question_of,
    truth_of,
)
from .scoring import Reward, read_problems, score
from .settings import EvolveConfig
from .system_prompt import SystemPrompt
from .templates import shorten

logger = logging.getLogger(__name__)

Chat = ChatModel | Callable[..., Any]
"""A chat model, or a function of the messages that returns a text."""

_NO_ANSWER_FOUND = (
    "the grammar found no answer in any reply; set grammar to 'marked', which reads the text after "
    "'Answer:' and otherwise takes the whole reply, or let the prompt ask for <answer> tags"
)
_FORMAT = 2  # version of the saved state; increased when older readers would misread it


@dataclass
class StepLog:
    """One step, for logs and plots; plain JSON through `dataclasses.asdict`.

    Args:
        step (`int`): From 0.
        prompts (`list[int]`): Ids of the prompts that were played.
        values (`list[float | None]`): V_i of each.
        reward (`float`, *optional*): The mean reward over all rollouts that have one.
        failed (`float`): Share of the rollouts without a reward because the call or the grader
            failed.
        operators (`list[dict]`): Per operator `operator`, `reason`, `child` (its id or `None`),
            `counts`.
        ratings (`dict[str, list[float]]`): μ and σ after the step, of the prompts that were played
            and of the children.
        diversity (`float`): See [`Population.diversity`].
        held_out (`float`, *optional*): The best prompt's mean reward on `eval_rows`, if it was
            evaluated.
        note (`str`): If no problem was worth reflecting on: why, and what to do about it.
        found_no_answer (`bool`): Whether the grammar found no answer in any reply.
    """

    step: int
    prompts: list[int]
    values: list[float | None]
    reward: float | None
    failed: float
    operators: list[dict[str, Any]]
    ratings: dict[str, list[float]]
    diversity: float
    held_out: float | None = None
    note: str = ""
    found_no_answer: bool = False


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
    def attempts(self) -> dict[str, int]:
        """The attempts to write a new prompt by how they ended.

        The keys are those of `Outcome.reason`. Operators without evidence made no attempt.
        """
        reasons: Counter[str] = Counter()
        for log in self.steps:
            reasons.update(operator["reason"] for operator in log.operators)
        for reason in WITHOUT_ATTEMPT:
            del reasons[reason]
        return dict(reasons)

    @property
    def is_without_answers(self) -> bool:
        """Whether the last two steps had no answer in any reply, which ends a run."""
        return _ends_without_answers(self.steps)

    @property
    def why_nothing_learned(self) -> str:
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
                "it: raise steps or problems_per_step"
            )

        # No child was made: for want of evidence, of steps, or of usable edits.
        notes = [log.note for log in self.steps if log.note]
        if notes and len(notes) == len(self.steps):
            return f"no step had evidence; {notes[-1]}"
        if not operators:
            return "no step has rated a prompt; raise steps"
        # The reference LLM may rightly find nothing to change.
        attempts = self.attempts
        no_change = attempts.pop("no_change", 0)
        if no_change and not attempts:
            return (
                f"the reference LLM proposed no change in {count_in_words(no_change, 'attempt')}, "
                "which is a valid reply: the first prompt stays; take harder problems, or another "
                "reference LLM"
            )
        counts = sum((Counter(operator["counts"]) for operator in operators), Counter())
        reason_texts = [
            f"{FAILURES_IN_WORDS.get(name, name)} {count}" for name, count in attempts.items()
        ]
        # The counts of the journal name some reasons again.
        reason_texts += [
            f"{name} {count}" for name, count in counts.items() if name not in FAILURES_IN_WORDS
        ]
        proposed_nothing = f"; {no_change} more proposed no change" if no_change else ""
        return (
            f"{count_in_words(sum(attempts.values()), 'attempt')} of the reference LLM had no "
            f"usable edit ({', '.join(reason_texts)}){proposed_nothing}; take a more capable one, "
            "or raise max_words"
        )


def _find_wrapped_answer(result: PromptResult) -> str:
    """Return a reply with an accepted answer inside that did not get the reward 1; or an empty text."""
    for problem in result.problems:
        answers = [re.escape(answer) for answer in problem.truth.split(TRUTH_SEPARATOR) if answer]
        accepted = re.compile(rf"(?<!\w)({'|'.join(answers)})(?!\w)")
        for attempt in problem.attempts:
            is_imperfect = attempt.reward is not None and attempt.reward < 1
            if answers and is_imperfect and accepted.search(attempt.text):
                return attempt.text
    return ""


def _ends_without_answers(steps: Sequence[StepLog]) -> bool:
    return [log.found_no_answer for log in steps[-2:]] == [True, True]


class EvolutionStopped(RuntimeError):
    """A step failed: a fatal error (budget, key), or too many failed calls. It changed nothing."""


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


def _resume(run: EvolveRun, path: Path) -> None:
    def load(state: dict[str, Any]) -> None:
        run.load_state_dict(state)
        _check_held_out_rows(run, path)
        # Files of older versions do not say what their run was given.
        saved_inputs = state.get("inputs", {})
        _check_inputs(run, saved_inputs)
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
    learned -= {shorten(question_of(row), MAX_CHARS) for row in run.rows}
    overlap = learned & {shorten(question_of(row), MAX_CHARS) for row in eval_rows}
    if overlap:
        raise ValueError(
            f"its run has learned from {len(overlap)} of the rows that are held out now, such as "
            f"{min(overlap)[:80]!r}: hold out the same rows as before, or use another checkpoint "
            "file (--output-dir) for another run"
        )


def _check_inputs(run: EvolveRun, saved_inputs: Mapping[str, Any]) -> None:
    """Compare what a resumed run is given with what its saved part was given.

    The ratings hold for its training rows, policy, reward, template and grammar only. The held-out
    rows may change, because nothing is learned from them.

    Args:
        run ([`EvolveRun`]): The resumed run, with the saved state.
        saved_inputs (`Mapping[str, Any]`): The `inputs` of the saved state; an input that is
            missing or `None` is not compared.

    Raises:
        `ValueError`: Another input than the held-out rows has changed.
    """
    inputs = run.inputs
    other_run = "or use another checkpoint file (--output-dir) for another run"
    saved_rows = saved_inputs.get("rows")
    if saved_rows is not None and saved_rows != inputs["rows"]:
        raise ValueError(
            "the training rows are not those of the saved run, by question or accepted answers "
            f"({saved_rows['n']} then, {inputs['rows']['n']} now): pass the same rows, and hold "
            f"out the same share, {other_run}"
        )
    for name in ("policy", "reward", "grammar", "prompt_template", "prompt_place"):
        saved_value = saved_inputs.get(name)
        if None not in (saved_value, inputs[name]) and saved_value != inputs[name]:
            raise ValueError(
                f"the {name} of the saved run was {saved_value!r}, not {inputs[name]!r}: pass the "
                f"same one, {other_run}"
            )
    for name, description in (
        ("policy_sampling", "the sampling options of the policy are"),
        ("reward_columns", "the columns that the reward reads are"),
        ("policy_code", "the code of the policy is"),
        ("reward_code", "the code of the reward is"),
    ):
        saved_digest = saved_inputs.get(name)
        if None not in (saved_digest, inputs[name]) and saved_digest != inputs[name]:
            raise ValueError(
                f"{description} not as in the saved run, whose ratings hold for what it had: undo "
                f"the change, {other_run}"
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
        if _ends_without_answers(run.logs):
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
            logger.warning("no evidence at step %d: %s", log.step, log.note)
        if on_step is not None:
            on_step(log)
        # Without evidence the prompt stays as it is, so further steps would find no answer either.
        if _ends_without_answers(logs):
            raise EvolutionStopped(f"in two steps in a row {_NO_ANSWER_FOUND}, in a new run")

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


# One step ---------------------------------------------------------------------------------------


class EvolveRun:
    """A run of [`evolve`], step by step: that is the loop around it, and describes the arguments."""

    def __init__(
        self,
        policy: Chat,
        reference: Chat,
        rows: Sequence[Any],
        reward: Reward,
        prompt: SystemPrompt | Population | str,
        config: EvolveConfig | None = None,
        eval_rows: Sequence[Any] | None = None,
    ):
        config = EvolveConfig() if config is None else config
        _check_types(policy, reference, reward, config)

        # Read and check the rows.
        self.rows = read_problems(rows, "rows")
        # Sorted, because a resumed run may get them in another order, and scores are saved by
        # place.
        self.eval_rows = sorted(
            read_problems(eval_rows or (), "eval_rows"),
            key=lambda row: (question_of(row), truth_of(row)),
        )
        columns: dict[str, Any] = {}
        for row in self.rows:
            columns.update(row)
        # The names under which `score` passes what it has made itself.
        refuse_reserved_columns({"prompts", "completions", "rollout"} & columns.keys())
        check_columns(reward, columns)
        check_answers_of_rows(reward, self.rows)
        check_answers_of_rows(reward, self.eval_rows)
        if (config.eval_every or config.eval_all) and not self.eval_rows:
            raise ValueError(
                f"eval_every={config.eval_every}, eval_all={config.eval_all} need held-out "
                "eval_rows"
            )
        if len(self.rows) < config.problems_per_step:
            raise ValueError(
                f"problems_per_step is {config.problems_per_step}, but there are only "
                f"{len(self.rows)} rows: use at most {len(self.rows)}"
            )

        # The models, and how the policy's replies are read.
        self.policy = as_chat(policy)
        self.reference = as_chat(reference)
        self.reward = reward
        self.config = config
        self.grammar: Grammar = config.grammar  # type: ignore[assignment]  # no longer a name
        self.spec = AgentSpec(prompt_template=config.prompt_template, grammar=self.grammar)

        # In the mode `reflection` one prompt is played at a time, and nothing crosses.
        self.is_reflection_only = config.mode == "reflection"
        self.evolution = PopulationEvolution.start(
            prompt, config, config.seed, self.is_reflection_only
        )
        self.population = self.evolution.population

        # Saved with the state, and compared when the run is resumed.
        policy_name = getattr(policy, "model", None)
        policy_sampling: dict[str, Any] = {}
        for options in (getattr(policy, "sampling", None), config.policy_sampling):
            if isinstance(options, Mapping):
                policy_sampling.update(options)
        self.inputs: dict[str, Any] = {
            "rows": _summarize_rows(self.rows),
            "eval_rows": _summarize_rows(self.eval_rows),
            # A local model has no name: its `model` is the network.
            "policy": policy_name if isinstance(policy_name, str) else None,
            "reward": getattr(reward, "__name__", type(reward).__name__),
            "grammar": type(self.grammar).__name__,
            "prompt_template": config.prompt_template,
            "prompt_place": config.prompt_place,
            # Digests, because sampling options may hold secrets.
            "policy_sampling": digest(policy_sampling),
            "reward_columns": _summarize_columns(self.rows, required_columns(reward)),
            "policy_code": code_version(policy),
            "reward_code": code_version(reward),
        }

        self.logs: list[StepLog] = []
        self.attempts: list[dict[str, Any]] = []  # journal lines of the latest step
        self.usage = {"policy": Usage(), "reference": Usage()}

    async def step(self) -> StepLog:
        """Run one step (Algorithm 1): draw problems and prompts, play, rate, reflect, add children.

        Raises:
            [`EvolutionStopped`]: The step failed. Everything but `usage` is as before it.
        """
        # Kept for a step that fails half way.
        state_before = self.state_dict()
        try:
            with spans.span("evolution_step", {f"{spans.OWN}.step": len(self.logs)}) as span:
                log = await self._step()
                span.set({f"{spans.OWN}.reward": log.reward, f"{spans.OWN}.failed": log.failed})
        except BaseException:
            # Undo the step, but remember its cost.
            usage = self.usage
            self.load_state_dict(state_before)
            self.usage = usage
            raise
        self.logs.append(log)
        return log

    async def _step(self) -> StepLog:
        evolution = self.evolution
        population = self.population
        step_number = len(self.logs)

        # Draw problems and prompts, and play every prompt on every problem.
        epoch, rows = self._draw_rows()
        k = 1 if self.is_reflection_only else self.config.prompts_per_step
        # A prompt that was drawn twice is played once.
        prompts = list({prompt.id: prompt for prompt in evolution.draw(k)}.values())
        results = await self._play(prompts, rows, epoch)

        # Rate the prompts, reflect on the batch, and add the children.
        outcomes: list[Outcome] = []
        children: list[SystemPrompt | None] = []
        self.attempts = []
        task = evolution.record([results])
        if task is not None:
            outcomes = await self._reflect(task)
            children = self._join(task, outcomes)
            self.attempts = attempt_records(task, outcomes, children, population)

        # Evaluate the best prompt on held-out rows, if it is time.
        held_out = None
        if self.config.eval_every and (step_number + 1) % self.config.eval_every == 0:
            (held_out,) = await self.evaluate([population.best()])

        # If the mutation had no evidence, say why.
        note = ""
        found_no_answer = False
        if task is not None and outcomes[0].reason == "no_evidence":
            found_no_answer = self._found_no_answer(results)
            note = _NO_ANSWER_FOUND if found_no_answer else self._explain_no_evidence(task.best)
        log = self._make_step_log(results, outcomes, children)
        return replace(log, held_out=held_out, note=note, found_no_answer=found_no_answer)

    def _make_step_log(
        self,
        results: Sequence[PromptResult],
        outcomes: Sequence[Outcome],
        children: Sequence[SystemPrompt | None],
    ) -> StepLog:
        """Return the log of a step whose children have joined the population."""
        rewards: list[float | None] = []
        for result in results:
            rewards += [attempt.reward for attempt in result.attempts]
        child_ids = [child.id if child else None for child in children]
        operators = []
        for outcome, child_id in zip(outcomes, child_ids, strict=True):
            operators.append(
                {
                    "operator": outcome.operator,
                    "reason": outcome.reason,
                    "child": child_id,
                    "counts": dict(outcome.counts),
                }
            )
        # Ratings after the step, of the prompts that were played and of the children.
        prompt_ids = [member_id(result.prompt) for result in results]
        ratings = {}
        for prompt_id in [*prompt_ids, *child_ids]:
            if prompt_id is not None:
                rating = self.population.rating(prompt_id)
                ratings[str(prompt_id)] = [rating.mu, rating.sigma]
        return StepLog(
            step=len(self.logs),
            prompts=prompt_ids,
            values=self.evolution.values[0],
            reward=mean(rewards),
            failed=rewards.count(None) / len(rewards),
            operators=operators,
            ratings=ratings,
            diversity=self.population.diversity(),
        )

    def _found_no_answer(self, results: Sequence[PromptResult]) -> bool:
        """Return whether no reply of a step was right, and the grammar found no answer in any."""
        for attempt in chain.from_iterable(result.attempts for result in results):
            is_right = attempt.reward is not None and attempt.reward >= 1
            if is_right or self.grammar.parse(attempt.text).kind == "answer":
                return False
        return True

    def _explain_no_evidence(self, best: PromptResult) -> str:
        """Return why no problem was worth reflecting on, and what to do about it.

        `best` is the result of the step's best prompt.
        """
        # Everything was right.
        num_generations = self.config.num_generations
        attempts = best.attempts
        if all(attempt.reward is not None and attempt.reward >= 1 for attempt in attempts):
            return (
                f"under prompt {best.prompt.id}, the best of the step, every attempt at every "
                "problem got the reward 1: take harder problems"
            )

        # Right answers were compared together with the words around them.
        if isinstance(self.grammar, FreeText):
            wrapped = _find_wrapped_answer(best)
            if wrapped:
                return (
                    "an accepted answer stands inside replies that did not get the reward 1, such "
                    f"as the one that ends in {wrapped[-60:]!r}: set grammar to 'marked', which "
                    "reads the text after 'Answer:', or let the prompt ask for the answer alone"
                )

        # The attempts at a problem could not differ.
        if num_generations == 1 and self.config.reflect_on == "mixed":
            return (
                "num_generations is 1, so no two attempts differ: raise it, or set reflect_on to "
                "'imperfect'"
            )
        distinct_replies = []
        for problem in best.problems:
            distinct_replies.append({attempt.text for attempt in problem.attempts})
        if all(len(texts) == 1 for texts in distinct_replies):
            return (
                f"the policy gave the same reply in all {num_generations} attempts at every "
                "problem: sample it at a temperature above 0 "
                '(set policy_sampling to {"temperature": 0.7}), or reflect on failures too '
                "(set reflect_on to 'imperfect')"
            )
        return (
            "all attempts at a problem got the same reward, at every problem; set reflect_on to "
            "'imperfect' to look at failures without a success, too"
        )

    async def evaluate(self, prompts: Sequence[SystemPrompt]) -> list[float | None]:
        """Return the mean reward of members on `eval_rows`, also kept as `held_out` of the member.

        Each member is evaluated only once, because the policy does not change.
        """
        members = [self.population.member(prompt) for prompt in prompts]
        unevaluated = [member.prompt for member in members if member.held_out is None]
        if unevaluated:
            for result in await self._play(unevaluated, self.eval_rows, epoch=0):
                self.population.note_held_out(result.prompt, result.row)
        return [(member.held_out or {}).get("mean") for member in members]

    def _draw_rows(self) -> tuple[int, list[Mapping[str, Any]]]:
        """Return the epoch and the rows of this step, a function of the step alone.

        An epoch has each row once.
        """
        batch_size = self.config.problems_per_step
        batches_per_epoch = len(self.rows) // batch_size
        epoch, batch = divmod(len(self.logs), batches_per_epoch)
        # Each epoch has an order of its own; rows that fill no batch are left out.
        order = list(range(len(self.rows)))
        random.Random(f"{self.config.seed}:{epoch}").shuffle(order)
        positions = order[batch * batch_size : (batch + 1) * batch_size]
        return epoch, [self.rows[position] for position in positions]

    async def _play(
        self, prompts: Sequence[SystemPrompt], rows: Sequence[Mapping[str, Any]], epoch: int
    ) -> list[PromptResult]:
        """Play every prompt on every problem, N times, all calls at once."""
        num_generations = self.config.num_generations
        sampling: Any = self.config.policy_sampling or {}
        place: Any = self.config.prompt_place

        # The number of a sample: in a later epoch a replay cache must not return the samples of an
        # earlier one.
        repeats = range(epoch * num_generations, (epoch + 1) * num_generations)
        calls = []
        rows_of_calls = []
        for prompt in prompts:
            for row in rows:
                conversation = prompt.messages(self.spec.messages(row), place)
                for repeat in repeats:
                    calls.append(self.policy(conversation, repeat=repeat, **sampling))
                    rows_of_calls.append(row)
        replies = await gather(calls)
        self.usage["policy"] += sum((reply.usage for reply in replies), Usage())

        # Score all replies in one call of the reward function.
        judgements = await score(self.reward, rows_of_calls, replies, self.grammar)
        self._check_failures(replies, [judgement.reward for judgement in judgements])

        # Collect the attempts by prompt and problem, in the order of the calls.
        attempts = (
            Attempt(reply.text, judgement.reward, judgement.feedback)
            for reply, judgement in zip(replies, judgements, strict=True)
        )
        results = []
        for prompt in prompts:
            problems = []
            for row in rows:
                row_attempts = tuple(next(attempts) for _ in repeats)
                problems.append(ProblemResult(question_of(row), truth_of(row), row_attempts))
            results.append(PromptResult(prompt, tuple(problems)))
        return results

    def _check_failures(self, replies: Sequence[Reply], rewards: Sequence[float | None]) -> None:
        """Raise [`EvolutionStopped`] for a fatal error and for too many rollouts without reward."""
        # A wrong key or a spent budget ends the run at once.
        errors = [reply.error for reply in replies if reply.error is not None]
        for error in errors:
            if error.fatal:
                raise EvolutionStopped(_describe_end("the policy", error))

        # Other failures end it only if they are too many.
        failed_share = rewards.count(None) / len(rewards)
        if failed_share > self.config.max_failed_share:
            if not errors:
                self.allow_other_reward_code()  # it may be fixed before the run is resumed
            cause = errors[0] if errors else "the reward function returned None"
            raise EvolutionStopped(
                f"{failed_share:.0%} of the rollouts have no reward "
                f"(max_failed_share={self.config.max_failed_share:.0%}): {cause}"
            )

    async def _reflect(self, task: ReflectionTask) -> list[Outcome]:
        # Both operators run at the same time.
        sampling: Any = self.config.reference_sampling or {}
        outcomes = await propose_children(self.reference, task, self.config, **sampling)
        self.usage["reference"] += sum((outcome.usage for outcome in outcomes), Usage())
        return outcomes

    def _join(self, task: ReflectionTask, outcomes: Sequence[Outcome]) -> list[SystemPrompt | None]:
        try:
            return self.evolution.join(task, outcomes)
        except LLMError as error:
            # A wrong key or a spent budget of the reference LLM ends the run, too.
            raise EvolutionStopped(_describe_end("the reference LLM", error)) from None

    def allow_other_reward_code(self) -> None:
        """Let a run that resumes this one have other code of the reward than this one had."""
        self.inputs["reward_code"] = None  # an input of `None` is not compared

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as plain JSON."""
        return {
            "format": _FORMAT,
            **self.evolution.state_dict(),
            "steps": [asdict(log) for log in self.logs],
            "usage": {name: asdict(usage) for name, usage in self.usage.items()},
            "inputs": self.inputs,
        }

    def save(self, path: str | Path) -> None:
        """Write [`EvolveRun.state_dict`] to a file. A crash leaves the old file unchanged."""
        atomic_write(path, json.dumps(self.state_dict(), ensure_ascii=False))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from an [`EvolveRun.state_dict`].

        Raises:
            `ValueError`: It was written by another version, or its run began with another prompt.
        """
        if state["format"] != _FORMAT:
            raise ValueError(
                f"it has format {state['format']}, and this version of agentic-prompting reads "
                f"format {_FORMAT}: resume with the version that wrote it, or start a new run with "
                "another checkpoint file (--output-dir)"
            )

        # A checkpoint belongs to the prompt that its run began with.
        root = SystemPrompt.from_json(state["population"]["members"][0]["prompt"])
        if root.text != self.population.members[0].prompt.text:
            raise ValueError(
                f"the saved run began with another system prompt, {root.text[:80]!r}: use another "
                "checkpoint file (--output-dir) for another run"
            )
        self.evolution.load_state_dict(state)
        self.logs = [StepLog(**log) for log in state["steps"]]
        self.usage = {name: Usage(**usage) for name, usage in state["usage"].items()}


def _summarize_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of rows and a digest of their questions and accepted answers, in any order."""
    contents = sorted((question_of(row), truth_of(row)) for row in rows)
    return {"n": len(rows), "digest": digest(contents)}


def _summarize_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return a digest of the columns that a reward needs, in any order of the rows."""
    return digest(sorted(row_version(row, names) for row in rows))


def _check_types(policy: object, reference: object, reward: object, config: object) -> None:
    """Raise a `TypeError` that names the first argument of a wrong type."""
    for name, model in (("policy", policy), ("reference", reference)):
        if not callable(model):
            hint = f"; for an endpoint: OpenAIChat({model!r})" if isinstance(model, str) else ""
            raise TypeError(
                f"{name} must be a chat model or a function of the messages, not {model!r}{hint}"
            )
    if not callable(reward):
        raise TypeError(
            f"reward must be a function of lists of completions and columns, not {reward!r}"
        )
    if not isinstance(config, EvolveConfig):
        raise TypeError(f"config must be an EvolveConfig(...), not a {type(config).__name__}")


def _describe_end(role: str, error: LLMError) -> str:
    """Return why no further call can succeed. A limit that is reached is no failure of a model."""
    # An endpoint's error names the model and its address.
    if isinstance(error, BudgetExceeded) or error.where:
        return str(error)
    return f"{role} failed: {error}"
