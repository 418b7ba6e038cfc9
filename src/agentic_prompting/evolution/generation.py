"""E-SPL's Algorithm 1 for the prompts: draw, rate, choose what is reflected on, let the children join.

[`ESPLTrainer`] and [`evolve`] share it. It needs no torch and knows no trainer. The caller plays the prompts and passes
their results to [`Generation.record`]. A reflector works on the [`Job`] that this returns ([`propose_children`]), and
[`Generation.join`] adds the children. The population's random generator is the only source of chance: all processes
that record the same matches make the same decisions, and a resumed run continues exactly.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..llm import ChatModel, gather, spans
from .one_call import revise
from .operators import Outcome, crossover, mutate
from .population import Population
from .ratings import Rating
from .results import PromptResult, Row, best_result, scores_of
from .settings import ESPLSettings
from .system_prompt import SystemPrompt

Match = Sequence[PromptResult]
"""The prompts that were played on the same problems. Only such results can be compared."""


@dataclass(frozen=True)
class Job:
    """The part of a batch that is reflected on: plain data, which checkpoints keep.

    Args:
        batch (`int`): The number of the batch, from 0.
        best ([`PromptResult`]): The best prompt of the batch, which mutates (eq 4).
        crossing (`tuple[PromptResult, ...]`, *optional*): The prompts that cross, if there is a crossover.
        scores (`dict[int, list[float | None]]`): By prompt id its mean reward on each problem, for the journal.
        ratings (`dict[int, Rating]`): By prompt id its rating after the batch. The children inherit it, although the
            parents may have been rated again when the children join.
    """

    batch: int
    best: PromptResult
    crossing: tuple[PromptResult, ...] | None = None
    scores: Mapping[int, Row] = field(default_factory=dict)
    ratings: Mapping[int, Rating] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`Job.from_json`] gives an equal job back."""
        return {
            "batch": self.batch,
            "best": self.best.to_json(),
            "crossing": None
            if self.crossing is None
            else [result.to_json() for result in self.crossing],
            "scores": [[name, list(row)] for name, row in self.scores.items()],
            "ratings": [[name, rating.mu, rating.sigma] for name, rating in self.ratings.items()],
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Job:
        """The inverse of [`Job.to_json`]."""
        crossing = saved["crossing"]
        return cls(
            saved["batch"],
            PromptResult.from_json(saved["best"]),
            None if crossing is None else tuple(map(PromptResult.from_json, crossing)),
            dict(saved["scores"]),
            {name: Rating(mu, sigma) for name, mu, sigma in saved["ratings"]},
        )


class Generation:
    """The evolution of a population, batch by batch.

    Args:
        population ([`Population`]): Its prompts, and the random generator of every decision.
        p_crossover (`float`, *optional*, defaults to `0.2`): Probability of a crossover after a batch.

    Attributes:
        batches (`int`): Batches recorded so far.
        pending (`list[Job]`): Jobs whose children have not joined yet, oldest first.
        values (`list[list[float | None]]`): V_i of each prompt of the latest batch, match by match. For logs.

    Example:

        >>> from agentic_prompting.evolution import Attempt, Outcome, ProblemResult
        >>> generation = Generation(Population(SystemPrompt("Solve it.", ())), p_crossover=0.0)
        >>> [prompt] = generation.draw(1)
        >>> problem = ProblemResult("1 + 1?", "2", (Attempt("2", 1.0), Attempt("3", 0.0)))
        >>> job = generation.record([[PromptResult(prompt, (problem,))]])
        >>> child = SystemPrompt("Solve it.", ("Count twice.",), parents=(0,), operator="mutation")
        >>> [joined] = generation.join(job, [Outcome("mutation", child)])
        >>> joined.id, joined.born_at
        (1, 1)
    """

    def __init__(self, population: Population, p_crossover: float = 0.2):
        self.population, self.p_crossover = population, p_crossover
        self.batches = 0
        self.pending: list[Job] = []
        self.values: list[list[float | None]] = []

    def draw(self, k: int) -> list[SystemPrompt]:
        """The prompts of the next batch; see [`Population.select`]."""
        return self.population.select(k)

    def record(self, matches: Sequence[Match], reflect: bool = True) -> Job | None:
        """Rate the prompts of a batch, and decide what is reflected on.

        Args:
            matches (`Sequence[Sequence[PromptResult]]`): The results of the batch. Problems that were played under
                other prompts are other matches; the one with the most problems is reflected on, of equal ones the last.
            reflect (`bool`, *optional*, defaults to `True`): Whether this batch may have children.

        Returns:
            [`Job`]: Also appended to `pending`. `None` if no prompt has a score, or `reflect` is off.
        """
        self.values = [
            self.population.record(
                [result.prompt for result in match], [result.row for result in match]
            )
            for match in matches
        ]
        batch, self.batches = self.batches, self.batches + 1
        largest = max(
            range(len(matches)), key=lambda place: (len(matches[place][0].row), place), default=None
        )
        if not reflect or largest is None:
            return None
        match = matches[largest]
        best = best_result(match, self.values[largest])
        if best is None:
            return None
        crosses = self.population.rng.random() < self.p_crossover
        ratings = {result.prompt.id or 0: self.population.rating(result.prompt) for result in match}
        job = Job(batch, best, tuple(match) if crosses else None, scores_of(match), ratings)
        self.pending.append(job)
        return job

    def due(self, lag: int = 0) -> list[Job]:
        """The pending jobs of batches that lie more than `lag` batches before the next one, oldest first.

        They are counted in batches, not in seconds: a run does not depend on how fast the reference LLM is.
        """
        return [job for job in self.pending if job.batch < self.batches - lag]

    def join(self, job: Job, outcomes: Sequence[Outcome]) -> list[SystemPrompt | None]:
        """Let the children of a job join the population, each with the rating of its parents after the job's batch.

        A child that says what a prompt of the population says joins nowhere: played beside that prompt it would have a
        rating of its own for the same text, and take a place in the window. The reason of its outcome becomes `known`.

        Args:
            job ([`Job`]): A pending one. It is pending no longer.
            outcomes (`Sequence[Outcome]`): What the reflector made of it.

        Returns:
            `list[SystemPrompt | None]`: Per outcome the child with its id, or `None`.
        """
        self.pending = [other for other in self.pending if other is not job]
        return [self._joined(outcome, job) for outcome in outcomes]

    def _joined(self, outcome: Outcome, job: Job) -> SystemPrompt | None:
        if outcome.child is not None and self.population.knows(outcome.child):
            outcome.finish("known")
        if (child := outcome.child) is None:
            return None
        # A population of the user's own may have been drawn from before this run: its later children are no older.
        child = replace(child, born_at=max(self.batches, self.population.turns))
        return self.population.add(child, job.ratings)

    def metrics(self) -> dict[str, float]:
        """The population in numbers, for logs: its size and diversity, the best rating, the latest batch's scores."""
        best = self.population.rating(self.population.best())
        numbers = {
            "population/size": float(len(self.population.members)),
            "population/diversity": self.population.diversity(),
            "population/best_mu": best.mu,
            "population/best_sigma": best.sigma,
        }
        known = [value for values in self.values for value in values if value is not None]
        return numbers | (
            {"population/value_best": max(known), "population/value_worst": min(known)}
            if known
            else {}
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during a run, as plain JSON."""
        return {
            "population": self.population.state_dict(),
            "batches": self.batches,
            "pending": [job.to_json() for job in self.pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`Generation.state_dict`].

        Raises:
            `ValueError`: The saved population is damaged. Nothing has changed then.
        """
        batches, pending = state["batches"], [Job.from_json(saved) for saved in state["pending"]]
        self.population.load_state_dict(state["population"])
        self.batches, self.pending = batches, pending


async def propose_children(
    reference: ChatModel, job: Job, settings: ESPLSettings | None = None, **sampling: Any
) -> list[Outcome]:
    """The work of a reflector: the best prompt of the batch mutates and, if the job says so, several cross.

    Both operators run at the same time. The arguments that are not named are those of [`mutate`].

    Args:
        job ([`Job`]): What to reflect on.
    """
    mutation = revise if settings is not None and settings.reflection == "one_call" else mutate
    operators = [_traced("mutation", mutation(reference, job.best, settings, **sampling))]
    if job.crossing is not None:
        operators.append(
            _traced("crossover", crossover(reference, job.crossing, settings, **sampling))
        )
    return await gather(operators)


async def _traced(operator: str, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """The outcome of an operator, in a span where traces are on."""
    with spans.workflow(operator) as own:
        outcome = await work
        own.set(
            {
                f"{spans.OWN}.outcome": outcome.reason,
                f"{spans.OWN}.cost_usd": outcome.usage.cost_usd,
            }
        )
        if outcome.error is not None:
            own.fail(outcome.error.kind)
        return outcome
