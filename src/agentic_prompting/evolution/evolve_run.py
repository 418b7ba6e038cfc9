"""[`EvolveRun`]: a run of [`evolve`], step by step.

A step plays the prompts on problems, lets the reference LLM reflect, and adds the children.
Algorithm 1 itself is [`PopulationEvolution`]. A step that fails changes only the usage.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..llm import BudgetExceeded, ChatModel, LLMError, Reply, Usage, as_chat, gather, spans
from ..records import atomic_write
from ..rewards.answer_checks import check_answers_of_rows
from ..rewards.reward_columns import check_columns, refuse_reserved_columns
from ..rollout import AgentSpec, Grammar
from .evolve_result import StepLog
from .journal import attempt_records
from .no_evidence import NO_ANSWER_FOUND, explain_no_evidence, has_no_answer
from .operators import Outcome
from .population import Population, member_id
from .population_evolution import PopulationEvolution, ReflectionTask, propose_children
from .results import Attempt, ProblemResult, PromptResult, mean, question_of, truth_of
from .run_inputs import describe_run_inputs
from .scoring import Reward, read_problems, score
from .settings import EvolveConfig
from .system_prompt import SystemPrompt

Chat = ChatModel | Callable[..., Any]
"""A chat model, or a function of the messages that returns a text."""

_FORMAT = 2  # version of the saved state; increased when older readers would misread it


class EvolutionStopped(RuntimeError):
    """A step failed: a fatal error (budget, key), or too many failed calls. It changed nothing."""


class EvolveRun:
    """The state of a run, and its steps. [`evolve`] is the loop around them.

    The arguments are those of [`evolve`].
    """

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

        self.rows = read_problems(rows, "rows")
        # Sorted, because a resumed run may get them in another order, and scores are saved by
        # place.
        self.eval_rows = sorted(
            read_problems(eval_rows or (), "eval_rows"),
            key=lambda row: (question_of(row), truth_of(row)),
        )
        _check_rows(self.rows, self.eval_rows, reward, config)

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
        self.inputs = describe_run_inputs(policy, reward, self.rows, self.eval_rows, config)

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

        return self._make_step_log(results, task, outcomes, children, held_out)

    def _make_step_log(
        self,
        results: Sequence[PromptResult],
        task: ReflectionTask | None,
        outcomes: Sequence[Outcome],
        children: Sequence[SystemPrompt | None],
        held_out: float | None,
    ) -> StepLog:
        """Return the log of a step whose children have joined the population."""
        # The mean reward, and what came of each operator.
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

        # If the mutation had no evidence, say why.
        note = ""
        found_no_answer = False
        if task is not None and outcomes[0].reason == "no_evidence":
            found_no_answer = has_no_answer(results, self.grammar)
            if found_no_answer:
                note = NO_ANSWER_FOUND
            else:
                note = explain_no_evidence(task.best, self.grammar, self.config)

        return StepLog(
            step=len(self.logs),
            prompts=prompt_ids,
            values=self.evolution.values[0],
            reward=mean(rewards),
            failed=rewards.count(None) / len(rewards),
            operators=operators,
            ratings=ratings,
            diversity=self.population.diversity(),
            held_out=held_out,
            note=note,
            found_no_answer=found_no_answer,
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
        prompt_place: Any = self.config.prompt_place

        # The number of a sample: in a later epoch a replay cache must not return the samples of an
        # earlier one.
        repeats = range(epoch * num_generations, (epoch + 1) * num_generations)
        calls = []
        rows_of_calls = []
        for prompt in prompts:
            for row in rows:
                conversation = prompt.messages(self.spec.messages(row), prompt_place)
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
        """Allow the code of the reward to change before the run is resumed."""
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


def _check_rows(
    rows: Sequence[Mapping[str, Any]],
    eval_rows: Sequence[Mapping[str, Any]],
    reward: Reward,
    config: EvolveConfig,
) -> None:
    """Raise if the rows are too few for the settings, or are not what the reward reads."""
    columns: dict[str, Any] = {}
    for row in rows:
        columns.update(row)
    # The names under which `score` passes what it has made itself.
    refuse_reserved_columns({"prompts", "completions", "rollout"} & columns.keys())
    check_columns(reward, columns)
    check_answers_of_rows(reward, rows)
    check_answers_of_rows(reward, eval_rows)
    if (config.eval_every or config.eval_all) and not eval_rows:
        raise ValueError(
            f"eval_every={config.eval_every}, eval_all={config.eval_all} need held-out eval_rows"
        )
    if len(rows) < config.problems_per_step:
        raise ValueError(
            f"problems_per_step is {config.problems_per_step}, but there are only {len(rows)} "
            f"rows: use at most {len(rows)}"
        )


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
