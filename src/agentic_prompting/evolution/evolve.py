"""`evolve`: the evolution of system prompts alone, for models whose weights nobody can train. No trainer, no torch.

The same population, ratings and operators as in joint training; the policy is a [`ChatModel`]. A step: draw problems,
select prompts, play, rate, reflect, and the children join. A step is done whole or not at all, and a run continues from
its state, or from its checkpoint, exactly as if it had not been interrupted.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..llm import Budget, BudgetExceeded, ChatModel, Usage, charge
from ..llm.files import write_whole
from ..rollout import AgentSpec
from .evidence import Trial
from .evolve_config import EvolveConfig, StepLog, step_log
from .journal import EvolutionJournal, attempt_records, journal_beside, scores_of
from .operators import best_trial, breed
from .play import Reward, play
from .population import Population, load_state
from .reflection import Outcome, run_operators
from .system_prompt import SystemPrompt

logger = logging.getLogger(__name__)

_FORMAT = 1  # of the state; raised when a reader of the old one would go wrong


@dataclass
class EvolveResult:
    """What [`evolve`] returns.

    Args:
        best ([`SystemPrompt`]): By `config.best_rule`.
        population ([`Population`]): With everything that ever lived.
        steps (`list[StepLog]`): One per step.
        usage (`dict[str, Usage]`): Of the `policy` and of the `reference`, failed steps included.
        stopped (`str`, *optional*): Why the run ended early; `None` if it did not. What is above is then as after the
            last step that was done whole.
    """

    best: SystemPrompt
    population: Population
    steps: list[StepLog]
    usage: dict[str, Usage]
    stopped: str | None = None


class EvolutionStopped(RuntimeError):
    """A step could not be done: a fatal error (budget, key), or too many failed calls. Nothing of it was kept."""


class Evolution:
    """An evolution step by step. [`evolve`] is the loop around it; the arguments are described there."""

    def __init__(
        self,
        policy: ChatModel,
        reference: ChatModel,
        rows: Sequence[Mapping[str, Any]],
        reward: Reward,
        prompt: SystemPrompt | Population,
        config: EvolveConfig = EvolveConfig(),
    ):
        if len(rows) < config.problems_per_step:
            raise ValueError(f"problems_per_step={config.problems_per_step} of only {len(rows)} rows: use {len(rows)}")
        self.policy, self.reference, self.rows, self.reward, self.config = policy, reference, rows, reward, config
        self.spec = AgentSpec(prompt_template=config.prompt_template, grammar=config.grammar)
        window = config.sizes[1]
        if isinstance(prompt, Population):
            if config.mode == "reflection" and (prompt.window, prompt.include_newest) != (1, True):
                raise ValueError("mode='reflection' needs a Population with window=1 and include_newest=True")
            self.population = prompt
        else:
            self.population = Population(prompt, window, include_newest=window == 1, seed=config.seed)
        self.rng = random.Random(f"{config.seed}:crossover")
        self.logs: list[StepLog] = []
        self.attempts: list[dict[str, Any]] = []  # of the latest step: for the journal
        self.usage = {"policy": Usage(), "reference": Usage()}

    def step(self) -> StepLog:
        """One step.

        Raises:
            [`EvolutionStopped`]: It failed; everything but `usage` is as before it.
        """
        before = self.state_dict()
        try:
            log = self._step()
        except BaseException:
            spent = self.usage
            self.load_state_dict(before)
            self.usage = spent
            raise
        self.logs.append(log)
        return log

    def _step(self) -> StepLog:
        count, _, probability = self.config.sizes
        epoch, places = self._problems()
        prompts = list({prompt.id: prompt for prompt in self.population.select(count)}.values())
        trials = self._play(prompts, places, epoch)
        values = self.population.record(prompts, [trial.row for trial in trials], list(map(str, places)))
        crossing = self.rng.random() < probability
        outcomes = self._reflect(trials, values, crossing)
        children = [self.population.add(outcome.child) if outcome.child else None for outcome in outcomes]
        self.attempts = attempt_records(len(self.logs), outcomes, children, scores_of(trials), self.population)
        return step_log(len(self.logs), self.population, trials, values, outcomes, children)

    def _problems(self) -> tuple[int, list[int]]:
        """The pass over the data and the rows of this step: a function of the step alone, each row once a pass."""
        size = self.config.problems_per_step
        epoch, part = divmod(len(self.logs), len(self.rows) // size)
        order = list(range(len(self.rows)))
        random.Random(f"{self.config.seed}:{epoch}").shuffle(order)
        return epoch, order[part * size : (part + 1) * size]

    def _play(self, prompts: list[SystemPrompt], places: list[int], epoch: int) -> list[Trial]:
        config = self.config
        rows = [self.rows[place] for place in places]
        # The number of a sample: a pass later the same conversation is asked for other samples, not for recorded ones.
        repeats = range(epoch * config.num_generations, (epoch + 1) * config.num_generations)
        trials, failures, usage = play(
            self.policy, prompts, rows, self.reward, self.spec, config.place, repeats, config.policy_sampling
        )
        self.usage["policy"] += usage
        if failures.fatal:
            raise EvolutionStopped(f"the policy cannot be asked any more: {failures.first}")
        if failures.share > config.max_failed:
            raise EvolutionStopped(
                f"{failures.share:.0%} of the policy's calls failed (max_failed={config.max_failed:.0%}): "
                f"{failures.first}"
            )
        return trials

    def _reflect(self, trials: list[Trial], values: list[float | None], crossing: bool) -> list[Outcome]:
        operators = breed(best_trial(trials, values), trials if crossing else None, self.config.reflection)
        outcomes = run_operators(self.reference, operators, **self.config.reference_sampling)
        for outcome in outcomes:
            self.usage["reference"] += outcome.usage
        for outcome in outcomes:
            if outcome.error is not None and outcome.error.fatal:
                raise EvolutionStopped(f"the reference cannot be asked any more: {outcome.error}")
        return outcomes

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain JSON."""
        version, state, gauss = self.rng.getstate()
        return {
            "format": _FORMAT,
            "population": self.population.state_dict(),
            "rng": [version, list(state), gauss],
            "steps": [asdict(log) for log in self.logs],
            "usage": {name: asdict(usage) for name, usage in self.usage.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`Evolution.state_dict`].

        Raises:
            `ValueError`: It was written by a newer version, or began with another prompt.
        """
        if state["format"] > _FORMAT:
            raise ValueError("this state was written by a newer agentic-prompting; upgrade to read it")
        root = SystemPrompt.from_json(state["population"]["members"][0]["prompt"])
        if root.text != self.population.members[0].prompt.text:
            raise ValueError(
                f"the saved run began with another system prompt, {root.text[:80]!r}: use another checkpoint file for "
                "another run"
            )
        self.population.load_state_dict(state["population"])
        version, numbers, gauss = state["rng"]
        self.rng.setstate((version, tuple(numbers), gauss))
        self.logs = [StepLog(**log) for log in state["steps"]]
        self.usage = {name: Usage(**usage) for name, usage in state["usage"].items()}


def evolve(
    policy: ChatModel,
    reference: ChatModel,
    rows: Sequence[Mapping[str, Any]],
    reward: Reward,
    prompt: SystemPrompt | Population,
    config: EvolveConfig = EvolveConfig(),
    on_step: Callable[[StepLog], None] | None = None,
    checkpoint: str | Path | None = None,
    budget: Budget | None = None,
) -> EvolveResult:
    """Evolve a system prompt for a model that is only asked, never trained.

    Args:
        policy ([`ChatModel`]): The model that solves the problems.
        reference ([`ChatModel`]): The model that reflects and edits; may be the same object.
        rows (`Sequence[Mapping]`): Problems: `question` (or `prompt`), `answers`, and whatever the reward reads. A
            `datasets.Dataset` will do.
        reward (`Callable`): With TRL's reward signature, like all of `rewards/`. `None` leaves a rollout out.
        prompt ([`SystemPrompt`] or [`Population`]): Where to start. A population brings its own window and rule.
        config ([`EvolveConfig`], *optional*): The settings.
        on_step (`Callable[[StepLog], None]`, *optional*): Called after each step.
        checkpoint (`str` or `Path`, *optional*): File that holds the state after each step. If it exists, the run
            continues from it. What led to each child is kept beside it, see [`journal_beside`].
        budget ([`Budget`], *optional*): What the roles may spend together: `policy`, `reference` and, where the reward
            is a language model with a `charge_to`, `judge`.

    Returns:
        [`EvolveResult`]. A run that cannot go on (budget spent, too many failures) returns what it has, says why in
        `stopped`, and can be continued from its checkpoint.

    Raises:
        `ValueError`: There are fewer rows than `problems_per_step`, or the checkpoint is another run's or damaged.

    Example:

        >>> result = evolve(OpenAIChat("gpt-4o-mini"), OpenAIChat("gpt-4o"), rows, exact_match_reward,
        ...                 SystemPrompt("Answer in <answer></answer>.", ()))  # doctest: +SKIP
    """
    if budget is not None:
        charge(budget, policy=policy, reference=reference, judge=reward)
    evolution = Evolution(policy, reference, rows, reward, prompt, config)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        load_state(path, evolution.load_state_dict)
    journal = None if path is None else EvolutionJournal(journal_beside(path))
    if journal is not None:
        journal.keep_before(len(evolution.logs))
    stopped = None
    while len(evolution.logs) < config.steps:
        try:
            log = evolution.step()
        except EvolutionStopped as error:
            stopped = f"{error}{_bill(budget)}"
            logger.warning("evolution stopped before step %d: %s", len(evolution.logs), stopped)
            break
        if path is not None and journal is not None:
            journal.write(evolution.attempts)  # first: a step whose state is not there yet is done again
            write_whole(path, json.dumps(evolution.state_dict(), ensure_ascii=False))
        if on_step is not None:
            on_step(log)
    population = evolution.population
    return EvolveResult(population.best(config.best_rule), population, evolution.logs, evolution.usage, stopped)


def _bill(budget: Budget | None) -> str:
    """What was spent by whom; and that it was all there was, which a judge that gives nothing does not say."""
    if budget is None:
        return ""
    try:
        budget.stop_when_spent()
    except BudgetExceeded as error:
        return f" ({error}). Spent so far: {budget}"
    return f". Spent so far: {budget}"
