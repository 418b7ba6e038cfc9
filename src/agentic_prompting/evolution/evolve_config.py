"""The settings of [`evolve`], and what it logs of a step: two plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..rollout import Grammar, TagGrammar
from .evidence import Trial
from .matrix import mean
from .population import BestRule, Population
from .reflection import Outcome, Reflection
from .system_prompt import Place, SystemPrompt


@dataclass(frozen=True)
class EvolveConfig:
    """The settings of [`evolve`]; the defaults are the paper's (A.5) unless said otherwise.

    Args:
        steps (`int`, *optional*, defaults to `20`): Steps in all, those before a resume included (our choice).
        mode (`str`, *optional*, defaults to `"evolution"`): `evolution`, or `reflection`: one prompt, the newest, and
            mutation alone (the paper's baseline, 4.1).
        prompts_per_step (`int`, *optional*, defaults to `3`): M. A prompt is played once a step, so that the first
            steps, when there are fewer, cost less.
        problems_per_step (`int`, *optional*, defaults to `10`): b.
        num_generations (`int`, *optional*, defaults to `5`): N rollouts per prompt and problem.
        crossover_probability (`float`, *optional*, defaults to `0.2`): How often prompts cross over, beside mutation.
        window (`int`, *optional*, defaults to `10`): K. For more settings pass a [`Population`].
        reflection ([`Reflection`], *optional*): How the operators work.
        prompt_template (`str`, *optional*, defaults to `"{question}"`): The user message; a row's own `prompt` wins.
        grammar ([`Grammar`], *optional*): How rewards find the answer in a reply: in Prompt-R1's tags by default;
            with `FreeText()` the whole reply is the answer.
        place (`str`, *optional*, defaults to `"system"`): Where the system prompt goes: `system` or `user` message.
        policy_sampling (`dict`, *optional*), reference_sampling (`dict`, *optional*): Passed on with each call:
            `temperature`, `top_p`, `max_tokens`, ... (the paper samples at a temperature of .6 to .7 and top-p .95).
        max_failed (`float`, *optional*, defaults to `0.5`): If more than this share of a step's policy calls fails,
            the run stops.
        best_rule (`str`, *optional*, defaults to `"conservative"`): See [`Population.best`].
        seed (`int`, *optional*, defaults to `0`): Of the order of problems, selection and crossover.

    Raises:
        `ValueError`: An argument is out of range.
    """

    steps: int = 20
    mode: Literal["evolution", "reflection"] = "evolution"
    prompts_per_step: int = 3
    problems_per_step: int = 10
    num_generations: int = 5
    crossover_probability: float = 0.2
    window: int = 10
    reflection: Reflection = Reflection()
    prompt_template: str = "{question}"
    grammar: Grammar = TagGrammar()
    place: Place = "system"
    policy_sampling: Mapping[str, Any] = field(default_factory=dict)
    reference_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_failed: float = 0.5
    best_rule: BestRule = "conservative"
    seed: int = 0

    def __post_init__(self):
        if self.mode not in ("evolution", "reflection"):
            raise ValueError(f"mode must be 'evolution' or 'reflection', got {self.mode!r}")
        if min(self.prompts_per_step, self.problems_per_step, self.num_generations, self.window) < 1 or self.steps < 0:
            raise ValueError(
                "prompts_per_step, problems_per_step, num_generations and window must be at least 1 and steps at least "
                f"0, got {self.prompts_per_step}, {self.problems_per_step}, {self.num_generations}, {self.window} and "
                f"{self.steps}"
            )
        for name in ("crossover_probability", "max_failed"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")

    @property
    def sizes(self) -> tuple[int, int, float]:
        """Prompts a step, window and crossover probability, as the mode wants them."""
        if self.mode == "reflection":
            return 1, 1, 0.0
        return self.prompts_per_step, self.window, self.crossover_probability


@dataclass
class StepLog:
    """One step, for logs and plots; plain JSON through `dataclasses.asdict`.

    Args:
        step (`int`): From 0.
        prompts (`list[int]`): Ids of the prompts that played.
        values (`list[float | None]`): V_i of each.
        reward (`float`, *optional*): The mean reward over all rollouts that have one.
        failed (`float`): Share of the rollouts that have no reward: the call failed, or the grader did.
        operators (`list[dict]`): Per operator `operator`, `reason`, `child` (its id or `None`), `counts`.
        ratings (`dict[str, list[float]]`): μ and σ after the step, of those that played and of the children.
        diversity (`float`): See [`Population.diversity`].
    """

    step: int
    prompts: list[int]
    values: list[float | None]
    reward: float | None
    failed: float
    operators: list[dict[str, Any]]
    ratings: dict[str, list[float]]
    diversity: float


def step_log(
    step: int,
    population: Population,
    trials: Sequence[Trial],
    values: Sequence[float | None],
    outcomes: Sequence[Outcome],
    children: Sequence[SystemPrompt | None],
) -> StepLog:
    """The log of a step that has just been done; `children` are those of `outcomes`, with their ids."""
    attempts = [attempt.reward for trial in trials for problem in trial.evidence for attempt in problem.attempts]
    born = [None if child is None else child.id for child in children]
    ids = [trial.prompt.id for trial in trials if trial.prompt.id is not None]
    shown = [*ids, *(child for child in born if child is not None)]
    ratings = {str(name): population.rating(name) for name in shown}
    return StepLog(
        step=step,
        prompts=ids,
        values=list(values),
        reward=mean(attempts),
        failed=attempts.count(None) / len(attempts) if attempts else 0.0,
        operators=[
            {"operator": outcome.operator, "reason": outcome.reason, "child": child, "counts": dict(outcome.counts)}
            for outcome, child in zip(outcomes, born, strict=True)
        ],
        ratings={name: [rating.mu, rating.sigma] for name, rating in ratings.items()},
        diversity=population.diversity(),
    )
