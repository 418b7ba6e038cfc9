"""E-SPL's Algorithm 1 for the prompts: draw, rate, choose parents, add the children.

[`ESPLTrainer`] and [`evolve`] share it. It needs no torch and knows no trainer. The caller plays
the prompts and passes their results to [`PopulationEvolution.record`]. A reflector works on the
[`ReflectionTask`] that this returns ([`propose_children`]), and [`PopulationEvolution.join`] adds
the children. The population's random generator is the only source of chance: all processes that
record the same matches make the same decisions, and a resumed run continues exactly.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

from ..llm import ChatModel, gather, spans
from .copied_text import refuse_copy
from .one_call import revise
from .operators import Outcome, crossover, mutate
from .population import Population, Rating, member_id
from .results import PromptResult, Row, best_result, scores_of
from .settings import ESPLSettings
from .system_prompt import SystemPrompt

Match = Sequence[PromptResult]
"""The results of prompts that were played on the same problems; only such can be compared."""


@dataclass(frozen=True)
class ReflectionTask:
    """The part of a batch that is reflected on: plain data, which checkpoints keep.

    Args:
        batch (`int`): The number of the batch, from 0.
        best ([`PromptResult`]): The best prompt of the batch, which mutates (eq 4).
        crossing (`tuple[PromptResult, ...]`, *optional*): The prompts that cross, if there is a
            crossover.
        scores (`dict[int, list[float | None]]`): By prompt id its mean reward on each problem, for
            the journal.
        ratings (`dict[int, Rating]`): By prompt id its rating after the batch. The children inherit
            it, although the parents may have been rated again when the children join.
    """

    batch: int
    best: PromptResult
    crossing: tuple[PromptResult, ...] | None = None
    scores: Mapping[int, Row] = field(default_factory=dict)
    ratings: Mapping[int, Rating] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; [`ReflectionTask.from_json`] gives an equal task back."""
        crossing = None
        if self.crossing is not None:
            crossing = [result.to_json() for result in self.crossing]
        return {
            "batch": self.batch,
            "best": self.best.to_json(),
            "crossing": crossing,
            # Lists, because the keys of JSON objects would be texts.
            "scores": [[prompt_id, list(row)] for prompt_id, row in self.scores.items()],
            "ratings": [
                [prompt_id, rating.mu, rating.sigma] for prompt_id, rating in self.ratings.items()
            ],
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> ReflectionTask:
        """Return the task of a [`ReflectionTask.to_json`]."""
        crossing = None
        if saved["crossing"] is not None:
            crossing = tuple(map(PromptResult.from_json, saved["crossing"]))
        return cls(
            batch=saved["batch"],
            best=PromptResult.from_json(saved["best"]),
            crossing=crossing,
            scores=dict(saved["scores"]),
            ratings={prompt_id: Rating(mu, sigma) for prompt_id, mu, sigma in saved["ratings"]},
        )


class PopulationEvolution:
    """The evolution of a population, batch by batch.

    Args:
        population ([`Population`]): Its prompts, and the random generator of every decision.
        p_crossover (`float`, *optional*, defaults to `0.2`): Probability of a crossover after a
            batch.

    Attributes:
        batches (`int`): Batches recorded so far.
        pending (`list[ReflectionTask]`): Tasks whose children have not joined yet, oldest first.
        values (`list[list[float | None]]`): V_i of each prompt of the latest batch, match by match.
            For logs.

    Example:

        >>> from agentic_prompting.evolution import Attempt, Outcome, ProblemResult
        >>> evolution = PopulationEvolution(Population(SystemPrompt("Solve it.", ())), p_crossover=0.0)
        >>> [prompt] = evolution.draw(1)
        >>> problem = ProblemResult("1 + 1?", "2", (Attempt("2", 1.0), Attempt("3", 0.0)))
        >>> task = evolution.record([[PromptResult(prompt, (problem,))]])
        >>> child = SystemPrompt("Solve it.", ("Count twice.",), parents=(0,), operator="mutation")
        >>> [joined] = evolution.join(task, [Outcome("mutation", child)])
        >>> joined.id, joined.born_at
        (1, 1)
    """

    def __init__(self, population: Population, p_crossover: float = 0.2):
        self.population = population
        self.p_crossover = p_crossover
        self.batches = 0
        self.pending: list[ReflectionTask] = []
        self.values: list[list[float | None]] = []

    @classmethod
    def start(
        cls,
        prompt: SystemPrompt | str | Population,
        settings: ESPLSettings,
        seed: int,
        is_alone: bool = False,
    ) -> Self:
        """Return the evolution that a run starts with.

        Args:
            prompt ([`SystemPrompt`], `str` or [`Population`]): The root, or a population of the
                user's own.
            settings ([`ESPLSettings`]): The settings of the run.
            seed (`int`): Seed of a new population.
            is_alone (`bool`, *optional*, defaults to `False`): Whether a single prompt, the newest,
                is played and revised (mode `reflection`). There is no crossover then.

        Raises:
            `ValueError`: A setting would have no effect because the population has its own.
        """
        population = settings.start_population(prompt, seed, is_alone)
        return cls(population, 0.0 if is_alone else settings.p_crossover)

    def draw(self, k: int) -> list[SystemPrompt]:
        """Draw the prompts of the next batch; see [`Population.select`]."""
        return self.population.select(k)

    def record(self, matches: Sequence[Match], reflect: bool = True) -> ReflectionTask | None:
        """Rate the prompts of a batch, and decide what is reflected on.

        Args:
            matches (`Sequence[Sequence[PromptResult]]`): The results of the batch. Problems that
                were played under other prompts are other matches; the match with the most problems
                is reflected on, the last of equally large ones.
            reflect (`bool`, *optional*, defaults to `True`): Whether this batch may have children.

        Returns:
            [`ReflectionTask`]: Also appended to `pending`. `None` if no prompt has a score, or
                `reflect` is off.
        """
        self._rate(matches)
        # Every batch counts, also one without children.
        batch = self.batches
        self.batches += 1
        if not reflect or not matches:
            return None
        task = self._choose_reflection(matches, batch)
        if task is not None:
            self.pending.append(task)
        return task

    def _rate(self, matches: Sequence[Match]) -> None:
        """Rate all prompts of a batch (TrueSkill, Appendix B)."""
        self.values = []
        for match in matches:
            prompts = [result.prompt for result in match]
            rows = [result.row for result in match]
            self.values.append(self.population.record(prompts, rows))

    def _choose_reflection(self, matches: Sequence[Match], batch: int) -> ReflectionTask | None:
        """Choose what is reflected on after a batch that was rated."""
        # The best prompt of the largest match mutates (eq 4).
        largest = max(range(len(matches)), key=lambda number: (len(matches[number][0].row), number))
        match = matches[largest]
        best = best_result(match, self.values[largest])
        # No prompt has a score: there is nothing to reflect on.
        if best is None:
            return None

        # With probability p_crossover the prompts of the match also cross.
        has_crossover = self.population.rng.random() < self.p_crossover
        # The children inherit today's ratings, even if they join many batches later.
        ratings = {
            member_id(result.prompt): self.population.rating(result.prompt) for result in match
        }
        return ReflectionTask(
            batch=batch,
            best=best,
            crossing=tuple(match) if has_crossover else None,
            scores=scores_of(match),
            ratings=ratings,
        )

    def due(self, lag: int = 0) -> list[ReflectionTask]:
        """Return the pending tasks of batches more than `lag` batches ago, oldest first.

        They are counted in batches, not in seconds: a run does not depend on how fast the reference
        LLM is.
        """
        return [task for task in self.pending if task.batch < self.batches - lag]

    def join(self, task: ReflectionTask, outcomes: Sequence[Outcome]) -> list[SystemPrompt | None]:
        """Add the children of a task to the population.

        Each child gets the rating of its parents after the task's batch. A child that says the same
        as a prompt of the population is not added: played beside that prompt it would have a rating
        of its own for the same text, and take a place in the window. The reason of its outcome
        becomes `known`.

        Args:
            task ([`ReflectionTask`]): A pending task. It is pending no longer.
            outcomes (`Sequence[Outcome]`): The reflector's results.

        Returns:
            `list[SystemPrompt | None]`: Per outcome the child with its id, or `None`.

        Raises:
            [`LLMError`]: A call of the reflector failed with a fatal error (its budget is spent,
                its key rejected). Nothing has changed: the task stays pending, so a resumed run
                reflects on it again.
        """
        for outcome in outcomes:
            if outcome.error is not None and outcome.error.fatal:
                raise outcome.error
        self.pending = [other for other in self.pending if other is not task]
        children: list[SystemPrompt | None] = []
        for outcome in outcomes:
            # A text that the population has already does not join: `finish` drops the child.
            if outcome.child is not None and self.population.knows(outcome.child):
                outcome.finish("known")
            if outcome.child is None:
                children.append(None)
                continue
            # A population of the user's own may have been drawn from before this run: its later
            # children are no older.
            born_at = max(self.batches, self.population.turns)
            child = replace(outcome.child, born_at=born_at)
            children.append(self.population.add(child, task.ratings))
        return children

    def metrics(self) -> dict[str, float]:
        """Return the population in numbers, for logs.

        These are its size and diversity, the best rating, and the latest batch's scores.
        """
        best = self.population.rating(self.population.best())
        metrics = {
            "population/size": float(len(self.population.members)),
            "population/diversity": self.population.diversity(),
            "population/best_mu": best.mu,
            "population/best_sigma": best.sigma,
        }

        # The best and the worst V_i of the latest batch.
        values = [value for value in chain.from_iterable(self.values) if value is not None]
        if values:
            metrics["population/value_best"] = max(values)
            metrics["population/value_worst"] = min(values)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during a run, as plain JSON."""
        return {
            "population": self.population.state_dict(),
            "batches": self.batches,
            "pending": [task.to_json() for task in self.pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`PopulationEvolution.state_dict`].

        Raises:
            `ValueError`: The saved population is damaged. Nothing has changed then.
        """
        # Read everything before anything changes.
        batches = state["batches"]
        pending = [ReflectionTask.from_json(saved) for saved in state["pending"]]
        self.population.load_state_dict(state["population"])
        self.batches = batches
        self.pending = pending


async def propose_children(
    reference: ChatModel,
    task: ReflectionTask,
    settings: ESPLSettings | None = None,
    **sampling: Any,
) -> list[Outcome]:
    """Mutate the best prompt of a batch and, if the task has a crossover, cross several.

    Both operators run at the same time. A child that copies a problem is refused ([`refuse_copy`]).
    The other arguments are those of [`mutate`].

    Args:
        task ([`ReflectionTask`]): What to reflect on.
    """
    # The paper's mutation, unless the settings ask for the one in a single call.
    in_one_call = settings is not None and settings.reflection != "paper"
    mutation = revise if in_one_call else mutate
    operators = [_traced("mutation", mutation(reference, task.best, settings, **sampling))]
    # The crossover runs beside it, if the batch has one.
    if task.crossing is not None:
        crossing = crossover(reference, task.crossing, settings, **sampling)
        operators.append(_traced("crossover", crossing))
    outcomes = await gather(operators)

    # A child must not repeat the problems that it is rated on.
    limit = (settings or ESPLSettings()).max_copied_share
    results = [task.best, *(task.crossing or ())]
    parents = [result.prompt for result in results]
    return [refuse_copy(outcome, parents, task.best.problems, limit) for outcome in outcomes]


async def _traced(operator: str, call: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Await the outcome of an operator, in a span where traces are on."""
    with spans.workflow(operator) as span:
        outcome = await call
        span.set(
            {
                f"{spans.OWN}.outcome": outcome.reason,
                f"{spans.OWN}.cost_usd": outcome.usage.cost_usd,
            }
        )
        # An error marks the span, even if there is a child in spite of it.
        if outcome.error is not None:
            span.fail(outcome.error.kind)
        return outcome
