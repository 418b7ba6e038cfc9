"""One step of [`evolve`]: play the prompts on problems, rate them, reflect, let the children join.

Algorithm 1 itself is [`Generation`]; this module plays the prompts and asks the reference LLM. A step that fails
changes nothing but the usage.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..llm import ChatModel, Reply, Usage, as_chat, gather, spans
from ..records import atomic_write
from ..rewards.answer_checks import check_answers_of_rows
from ..rollout import AgentSpec
from .generation import Generation, Job, propose_children
from .lineage import attempt_records
from .operators import Outcome
from .population import Population
from .results import Attempt, ProblemResult, PromptResult, mean, question_of, truth_of
from .scoring import Reward, read_problems, score
from .settings import EvolveConfig
from .system_prompt import SystemPrompt

Chat = ChatModel | Callable[..., Any]
"""A chat model, or a function of the messages that returns a text."""

_FORMAT = 2  # of the state; raised when a reader of the old one would go wrong


@dataclass
class StepLog:
    """One step, for logs and plots; plain JSON through `dataclasses.asdict`.

    Args:
        step (`int`): From 0.
        prompts (`list[int]`): Ids of the prompts that were played.
        values (`list[float | None]`): V_i of each.
        reward (`float`, *optional*): The mean reward over all rollouts that have one.
        failed (`float`): Share of the rollouts that have no reward because the call or the grader failed.
        operators (`list[dict]`): Per operator `operator`, `reason`, `child` (its id or `None`), `counts`.
        ratings (`dict[str, list[float]]`): μ and σ after the step, of the prompts that were played and of the children.
        diversity (`float`): See [`Population.diversity`].
        held_out (`float`, *optional*): The best prompt's mean reward on `eval_rows`, if it was evaluated.
        note (`str`): If no problem was worth reflecting on: why, and what to do about it.
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


class EvolutionStopped(RuntimeError):
    """A step failed: a fatal error (budget, key), or too many failed calls. None of its changes were kept."""


class Evolution:
    """An evolution step by step. [`evolve`] is the loop around it and describes the arguments."""

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
        rows, self.eval_rows = (
            read_problems(rows, "rows"),
            read_problems(eval_rows or (), "eval_rows"),
        )
        for problems in (rows, self.eval_rows):
            check_answers_of_rows(reward, problems)
        if (config.eval_every or config.eval_all) and not self.eval_rows:
            raise ValueError(
                f"eval_every={config.eval_every}, eval_all={config.eval_all} need held-out eval_rows"
            )
        if len(rows) < config.problems_per_step:
            raise ValueError(
                f"problems_per_step={config.problems_per_step} of only {len(rows)} rows: use {len(rows)}"
            )
        self.policy, self.reference = as_chat(policy), as_chat(reference)
        self.rows, self.reward, self.config = rows, reward, config
        self.sampling: Any = config.policy_sampling or {}
        grammar: Any = config.grammar  # no longer a name
        self.spec = AgentSpec(prompt_template=config.prompt_template, grammar=grammar)
        self.alone = config.mode == "reflection"
        self.population = config.start_population(prompt, config.seed, self.alone)
        self.generation = Generation(self.population, 0.0 if self.alone else config.p_crossover)
        self.logs: list[StepLog] = []
        self.attempts: list[dict[str, Any]] = []  # journal lines of the latest step
        self.usage = {"policy": Usage(), "reference": Usage()}

    async def step(self) -> StepLog:
        """Run one step (Algorithm 1): draw problems and prompts, play, rate, reflect, add the children.

        Raises:
            [`EvolutionStopped`]: The step failed. Everything but `usage` is as before it.
        """
        before = self.state_dict()
        try:
            with spans.span("evolution_step", {f"{spans.OWN}.step": len(self.logs)}) as own:
                log = await self._step()
                own.set({f"{spans.OWN}.reward": log.reward, f"{spans.OWN}.failed": log.failed})
        except BaseException:
            spent = self.usage
            self.load_state_dict(before)
            self.usage = spent
            raise
        self.logs.append(log)
        return log

    async def _step(self) -> StepLog:
        generation, population, config = self.generation, self.population, self.config
        epoch, places = self._draw()
        drawn = generation.draw(1 if self.alone else config.prompts_per_step)
        prompts = list({prompt.id: prompt for prompt in drawn}.values())
        results = await self._play(prompts, [self.rows[place] for place in places], epoch)
        job = generation.record([results])
        outcomes, children = [], []
        self.attempts = []
        if job is not None:
            outcomes = await self._reflect(job)
            children = generation.join(job, outcomes)
            self.attempts = attempt_records(
                len(self.logs), outcomes, children, job.scores, population
            )
        rewards = [attempt.reward for result in results for attempt in result.attempts]
        held_out = None
        if config.eval_every and (len(self.logs) + 1) % config.eval_every == 0:
            (held_out,) = await self.evaluate([population.best()])
        ids, born = (
            [prompt.id or 0 for prompt in prompts],
            [child.id if child else None for child in children],
        )
        ratings = {name: population.rating(name) for name in [*ids, *born] if name is not None}
        return StepLog(
            step=len(self.logs),
            prompts=ids,
            values=generation.values[0],
            reward=mean(rewards),
            failed=rewards.count(None) / len(rewards),
            operators=[
                {
                    "operator": one.operator,
                    "reason": one.reason,
                    "child": child,
                    "counts": dict(one.counts),
                }
                for one, child in zip(outcomes, born, strict=True)
            ],
            ratings={str(name): [rating.mu, rating.sigma] for name, rating in ratings.items()},
            diversity=population.diversity(),
            held_out=held_out,
            note=self._no_evidence(job.best) if job and outcomes[0].reason == "no_evidence" else "",
        )

    def _no_evidence(self, best: PromptResult) -> str:
        """Why no problem was worth reflecting on, and what to do about it."""
        n = self.config.num_generations
        if all(attempt.reward is not None and attempt.reward >= 1 for attempt in best.attempts):
            return "every attempt at every problem got the reward 1: take harder problems"
        replies = [[attempt.text for attempt in problem.attempts] for problem in best.problems]
        if all(
            self.spec.grammar.parse(text).kind != "answer" for texts in replies for text in texts
        ):
            return (
                "the grammar found no answer in any reply; with grammar='free' the whole reply is the answer, or let "
                "the prompt ask for <answer> tags"
            )
        if n == 1 and self.config.reflect_on == "mixed":
            return "with num_generations=1 no two attempts differ: take more, or reflect_on='imperfect'"
        if all(len(set(texts)) == 1 for texts in replies):
            return (
                f"the policy gave the same reply in all {n} attempts at every problem: sample it at a temperature "
                "above 0 (policy_sampling={'temperature': 0.7}), or reflect on failures too (reflect_on='imperfect')"
            )
        return (
            "all attempts at a problem got the same reward, at every problem; reflect_on='imperfect' looks at failures "
            "without a success, too"
        )

    async def evaluate(self, prompts: Sequence[SystemPrompt]) -> list[float | None]:
        """The mean reward of members on `eval_rows`, also kept as `held_out` of the [`Member`]. Each member is
        evaluated only once, because the policy does not change."""
        members = self.population.members
        new = [prompt for prompt in prompts if members[prompt.id or 0].held_out is None]
        for result in await self._play(new, self.eval_rows, 0) if new else ():
            self.population.note_held_out(
                result.prompt, [value for value in result.row if value is not None]
            )
        return [(members[prompt.id or 0].held_out or {}).get("mean") for prompt in prompts]

    def _draw(self) -> tuple[int, list[int]]:
        """The pass over the data and the rows of this step, a function of the step alone. A pass has each row once."""
        size = self.config.problems_per_step
        epoch, part = divmod(len(self.logs), len(self.rows) // size)
        order = list(range(len(self.rows)))
        random.Random(f"{self.config.seed}:{epoch}").shuffle(order)
        return epoch, order[part * size : (part + 1) * size]

    async def _play(
        self, prompts: Sequence[SystemPrompt], rows: Sequence[Mapping[str, Any]], epoch: int
    ) -> list[PromptResult]:
        """Play every prompt on every problem, N times, all calls at once."""
        n, place = self.config.num_generations, self.config.prompt_place
        # The number of a sample: in a later pass a replay cache must not return the samples of an earlier one.
        repeats = range(epoch * n, (epoch + 1) * n)
        replies = await gather(
            self.policy(conversation, repeat=repeat, **self.sampling)
            for prompt in prompts
            for row in rows
            for conversation in [prompt.messages(self.spec.messages(row), place)]  # type: ignore[arg-type]
            for repeat in repeats
        )
        self.usage["policy"] += sum((reply.usage for reply in replies), Usage())
        row_of_reply = [row for _ in prompts for row in rows for _ in repeats]
        rewards = await score(self.reward, row_of_reply, replies, self.spec.grammar)
        self._check_failures(replies, rewards)
        attempts = [
            Attempt(reply.text, reward) for reply, reward in zip(replies, rewards, strict=True)
        ]
        cells = iter([tuple(attempts[start : start + n]) for start in range(0, len(attempts), n)])
        return [
            PromptResult(
                prompt,
                tuple(ProblemResult(question_of(row), truth_of(row), next(cells)) for row in rows),
            )
            for prompt in prompts
        ]

    def _check_failures(self, replies: Sequence[Reply], rewards: Sequence[float | None]) -> None:
        """Raise [`EvolutionStopped`] for a fatal error and for too many rollouts without a reward."""
        errors = [reply.error for reply in replies if reply.error is not None]
        if fatal := next((error for error in errors if error.fatal), None):
            raise EvolutionStopped(f"the policy failed with a fatal error: {fatal}")
        share, limit = rewards.count(None) / len(rewards), self.config.max_failed
        if share > limit:
            why = errors[0] if errors else "the reward function returned None"
            raise EvolutionStopped(
                f"{share:.0%} of the rollouts have no reward (max_failed={limit:.0%}): {why}"
            )

    async def _reflect(self, job: Job) -> list[Outcome]:
        sampling: Any = self.config.reference_sampling or {}
        outcomes = await propose_children(self.reference, job, self.config, **sampling)
        self.usage["reference"] += sum((outcome.usage for outcome in outcomes), Usage())
        if fatal := next(
            (one.error for one in outcomes if one.error is not None and one.error.fatal), None
        ):
            raise EvolutionStopped(f"the reference LLM failed with a fatal error: {fatal}")
        return outcomes

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain JSON."""
        return {
            "format": _FORMAT,
            **self.generation.state_dict(),
            "steps": [asdict(log) for log in self.logs],
            "usage": {name: asdict(usage) for name, usage in self.usage.items()},
        }

    def save(self, path: str | Path) -> None:
        """Write [`Evolution.state_dict`] to a file. A crash leaves the old file as it was."""
        atomic_write(path, json.dumps(self.state_dict(), ensure_ascii=False))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`Evolution.state_dict`].

        Raises:
            `ValueError`: It was written by another version, or its run began with another prompt.
        """
        if state["format"] != _FORMAT:
            raise ValueError(
                f"it has format {state['format']}, and this version of agentic-prompting reads format {_FORMAT}: "
                "resume with the version that wrote it, or start a new run with another checkpoint file"
            )
        root = SystemPrompt.from_json(state["population"]["members"][0]["prompt"])
        if root.text != self.population.members[0].prompt.text:
            raise ValueError(
                f"the saved run began with another system prompt, {root.text[:80]!r}: use another checkpoint file for "
                "another run"
            )
        self.generation.load_state_dict(state)
        self.logs = [StepLog(**log) for log in state["steps"]]
        self.usage = {name: Usage(**usage) for name, usage in state["usage"].items()}


def _check_types(policy: Any, reference: Any, reward: Any, config: Any) -> None:
    """Raise a `TypeError` that names the first argument of a wrong type."""
    chat = "a chat model or a function of the messages"
    for name, value, expected in (
        ("policy", policy, chat),
        ("reference", reference, chat),
        ("reward", reward, "a function of lists of completions and columns"),
    ):
        if not callable(value):
            hint = (
                f"; for an endpoint: OpenAIChat({value!r})"
                if expected == chat and isinstance(value, str)
                else ""
            )
            raise TypeError(f"{name} must be {expected}, not {value!r}{hint}")
    if not isinstance(config, EvolveConfig):
        raise TypeError(f"config must be an EvolveConfig(...), not a {type(config).__name__}")
