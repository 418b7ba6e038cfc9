"""`evolve`: the evolution of system prompts alone, for models whose weights nobody can train. No trainer, no torch.

The policy is a [`ChatModel`]. A step is done whole or not at all, and a run continues from its checkpoint exactly as if
it had not been interrupted.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..llm import Budget, BudgetExceeded, ChatModel, Reply, Usage, as_chat, charge
from ..llm.guard import call_guarded
from ..llm.loop import in_parallel
from ..records import atomic_write
from ..rollout import AgentSpec, Grammar, Rollout, Sample, TagGrammar, gather
from .lineage import EvolutionJournal, attempt_records, journal_beside
from .operators import Outcome, propose_children
from .population import ESPLSettings, Population, load_state, one_of, rng_of, rng_state, setting
from .ratings import Attempt, ProblemResult, PromptResult, best_result, mean, question_of, scores_of, truth_of
from .system_prompt import SystemPrompt

logger = logging.getLogger(__name__)

Chat = ChatModel | Callable[..., Any]
"""A chat model, or a function of the messages that returns a text."""
Reward = Callable[..., Any]
"""TRL's reward signature: called with `prompts`, `completions`, `rollout` and the columns of the rows, all lists; plain
(then on a thread of its own, as it may block) or `async`."""

_FORMAT = 1  # of the state; raised when a reader of the old one would go wrong


@dataclass
class EvolveConfig(ESPLSettings):
    """The settings of [`evolve`]: those of [`ESPLSettings`] and these.

    Args:
        steps (`int`, *optional*, defaults to `20`): Steps in all, those before a resume included (our choice).
        mode (`str`, *optional*, defaults to `"evolution"`): `evolution`, or `reflection`: one prompt, the newest, and
            mutation alone (the paper's baseline, 4.1).
        problems_per_step (`int`, *optional*, defaults to `10`): b.
        prompt_template (`str`, *optional*, defaults to `"{question}"`): The user message; a row's own `prompt` wins.
        grammar ([`Grammar`], *optional*): How rewards find the answer in a reply: in Prompt-R1's tags if not set; with
            `FreeText()` the whole reply is the answer.
        policy_sampling (`dict`, *optional*): As `reference_sampling`, for the policy (the paper samples at a
            temperature of .6 to .7 and top-p .95).
        eval_every (`int`, *optional*, defaults to `0`): Every so many steps the best prompt is tried on `eval_rows`, N
            times each (Figure 12). 0: never.
        max_failed (`float`, *optional*, defaults to `0.5`): If more than this share of a step's policy calls fails, the
            run stops.
        seed (`int`, *optional*, defaults to `0`): Of the order of problems, selection and crossover.

    Raises:
        `ValueError`: A value is out of range.
    """

    steps: int = setting(20, "Steps in all.")
    mode: str = setting("evolution", "evolution, or reflection: one prompt.")
    problems_per_step: int = setting(10, "b: problems per step.")
    prompt_template: str = "{question}"
    grammar: Grammar = field(default_factory=TagGrammar)
    policy_sampling: dict[str, Any] = field(default_factory=dict)
    eval_every: int = setting(0, "Steps between two looks at held-out problems.")
    max_failed: float = 0.5
    seed: int = setting(0, "Of everything that is drawn.")

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("evolution", "reflection"))
        if self.problems_per_step < 1 or min(self.steps, self.eval_every) < 0 or not 0 <= self.max_failed <= 1:
            raise ValueError(
                "need problems_per_step >= 1, steps >= 0, eval_every >= 0 and 0 <= max_failed <= 1, got "
                f"{self.problems_per_step}, {self.steps}, {self.eval_every} and {self.max_failed}"
            )
        super().__post_init__()


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
        held_out (`float`, *optional*): The best prompt's mean reward on `eval_rows`, where it was measured.
        note (`str`): Why there was nothing to reflect on, if there was nothing, and what to do about it.
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
        rows, self.eval_rows = _problems(rows, "rows"), _problems(eval_rows or (), "eval_rows")
        if (config.eval_every or config.eval_all) and not self.eval_rows:
            raise ValueError(f"eval_every={config.eval_every}, eval_all={config.eval_all} need held-out eval_rows")
        if len(rows) < config.problems_per_step:
            raise ValueError(f"problems_per_step={config.problems_per_step} of only {len(rows)} rows: use {len(rows)}")
        self.policy, self.reference = as_chat(policy), as_chat(reference)
        self.rows, self.reward, self.config = rows, reward, config
        self.spec = AgentSpec(prompt_template=config.prompt_template, grammar=config.grammar)
        self.alone = config.mode == "reflection"
        if isinstance(prompt, Population):
            if self.alone and prompt.window != 1:
                raise ValueError("mode='reflection' needs a Population with window=1")
            config.check_own_population()
            self.population = prompt
        else:
            self.population = config.population(SystemPrompt.of(prompt), config.seed, window=1 if self.alone else None)
        self.rng = random.Random(f"{config.seed}:crossover")
        self.logs: list[StepLog] = []
        self.attempts: list[dict[str, Any]] = []  # of the latest step: for the journal
        self.usage = {"policy": Usage(), "reference": Usage()}

    async def step(self) -> StepLog:
        """One step (Algorithm 1): draw problems, select prompts, play, rate, reflect; the children join.

        Raises:
            [`EvolutionStopped`]: It failed; everything but `usage` is as before it.
        """
        before = self.state_dict()
        try:
            log = await self._step()
        except BaseException:
            spent = self.usage
            self.load_state_dict(before)
            self.usage = spent
            raise
        self.logs.append(log)
        return log

    async def _step(self) -> StepLog:
        population, config = self.population, self.config
        epoch, places = self._draw()
        drawn = population.select(1 if self.alone else config.prompts_per_step)
        prompts = list({prompt.id: prompt for prompt in drawn}.values())
        results = await self._play(prompts, [self.rows[place] for place in places], epoch)
        values = population.record(prompts, [result.row for result in results])
        crosses = self.rng.random() < (0.0 if self.alone else config.p_crossover)
        best = best_result(results, values)
        outcomes = await self._reflect(best, results if crosses else None)
        children = [population.add(outcome.child) if outcome.child else None for outcome in outcomes]
        self.attempts = attempt_records(len(self.logs), outcomes, children, scores_of(results), population)
        rewards = [attempt.reward for result in results for attempt in result.attempts]
        held_out = None
        if config.eval_every and (len(self.logs) + 1) % config.eval_every == 0:
            (held_out,) = await self.evaluate([population.best()])
        ids, born = [prompt.id or 0 for prompt in prompts], [child.id if child else None for child in children]
        ratings = {name: population.rating(name) for name in [*ids, *born] if name is not None}
        return StepLog(
            step=len(self.logs),
            prompts=ids,
            values=values,
            reward=mean(rewards),
            failed=rewards.count(None) / len(rewards),
            operators=[
                {"operator": one.operator, "reason": one.reason, "child": child, "counts": dict(one.counts)}
                for one, child in zip(outcomes, born, strict=True)
            ],
            ratings={str(name): [rating.mu, rating.sigma] for name, rating in ratings.items()},
            diversity=population.diversity(),
            held_out=held_out,
            note=self._no_evidence(best) if best and outcomes[0].reason == "no_evidence" else "",
        )

    def _no_evidence(self, best: PromptResult) -> str:
        """Why there was nothing to reflect on, and what to do about it."""
        n = self.config.num_generations
        if all(attempt.reward is not None and attempt.reward >= 1 for attempt in best.attempts):
            return "every attempt at every problem got the reward 1: take harder problems"
        said = [[attempt.text for attempt in problem.attempts] for problem in best.problems]
        if all(self.spec.grammar.parse(text).kind != "answer" for texts in said for text in texts):
            return (
                "no reply had an answer that the grammar finds; with EvolveConfig(grammar=FreeText()) all of it is one"
            )
        if n > 1 and all(len(set(texts)) == 1 for texts in said):
            return (
                f"the policy said the same in all {n} attempts at every problem: sample it at a temperature above 0 "
                "(policy_sampling={'temperature': 0.7}), or look at failures as well (reflect_on='imperfect')"
            )
        return "all attempts at a problem got the same reward, at every problem"

    async def evaluate(self, prompts: Sequence[SystemPrompt]) -> list[float | None]:
        """The mean reward of members on `eval_rows`, measured once each, because the policy does not change, and kept
        as `held_out` of the [`Member`]."""
        members = self.population.members
        new = [prompt for prompt in prompts if members[prompt.id or 0].held_out is None]
        for result in await self._play(new, self.eval_rows, 0) if new else ():
            rewards = [attempt.reward for attempt in result.attempts if attempt.reward is not None]
            self.population.note_held_out(result.prompt, rewards)
        return [(members[prompt.id or 0].held_out or {}).get("mean") for prompt in prompts]

    def _draw(self) -> tuple[int, list[int]]:
        """The pass over the data and the rows of this step: a function of the step alone, each row once a pass."""
        size = self.config.problems_per_step
        epoch, part = divmod(len(self.logs), len(self.rows) // size)
        order = list(range(len(self.rows)))
        random.Random(f"{self.config.seed}:{epoch}").shuffle(order)
        return epoch, order[part * size : (part + 1) * size]

    async def _play(
        self, prompts: Sequence[SystemPrompt], rows: Sequence[Mapping[str, Any]], epoch: int
    ) -> list[PromptResult]:
        """Every prompt on every problem, N times, all calls at once."""
        n, place = self.config.num_generations, self.config.prompt_place
        # The number of a sample: a pass later the same conversation is asked for other samples, not for recorded ones.
        repeats = range(epoch * n, (epoch + 1) * n)
        replies = await gather(
            self.policy(conversation, repeat=repeat, **self.config.policy_sampling)
            for prompt in prompts
            for row in rows
            for conversation in [prompt.messages(self.spec.messages(row), place)]  # type: ignore[arg-type]
            for repeat in repeats
        )
        self.usage["policy"] += sum((reply.usage for reply in replies), Usage())
        asked = [row for _ in prompts for row in rows for _ in repeats]
        rewards = await _score(self.reward, asked, replies, self.spec.grammar)
        self._check_failures(replies, rewards)
        attempts = [Attempt(reply.text, score) for reply, score in zip(replies, rewards, strict=True)]
        cells = iter([tuple(attempts[start : start + n]) for start in range(0, len(attempts), n)])
        return [
            PromptResult(prompt, tuple(ProblemResult(question_of(row), truth_of(row), next(cells)) for row in rows))
            for prompt in prompts
        ]

    def _check_failures(self, replies: Sequence[Reply], rewards: Sequence[float | None]) -> None:
        """Stops for an error that cannot get better by waiting, and for too many rollouts without a reward."""
        errors = [reply.error for reply in replies if reply.error is not None]
        if fatal := next((error for error in errors if error.fatal), None):
            raise EvolutionStopped(f"the policy cannot be asked any more: {fatal}")
        share, limit = rewards.count(None) / len(rewards), self.config.max_failed
        if share > limit:
            why = errors[0] if errors else "the reward gave None"
            raise EvolutionStopped(f"{share:.0%} of the policy's calls failed (max_failed={limit:.0%}): {why}")

    async def _reflect(self, best: PromptResult | None, crossing: list[PromptResult] | None) -> list[Outcome]:
        sampling: Any = self.config.reference_sampling or {}
        outcomes = await propose_children(self.reference, best, crossing, self.config, **sampling)
        self.usage["reference"] += sum((outcome.usage for outcome in outcomes), Usage())
        if fatal := next((one.error for one in outcomes if one.error is not None and one.error.fatal), None):
            raise EvolutionStopped(f"the reference cannot be asked any more: {fatal}")
        return outcomes

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain JSON."""
        return {
            "format": _FORMAT,
            "population": self.population.state_dict(),
            "rng": rng_state(self.rng),
            "steps": [asdict(log) for log in self.logs],
            "usage": {name: asdict(usage) for name, usage in self.usage.items()},
        }

    def save(self, path: str | Path) -> None:
        """Write [`Evolution.state_dict`] to a file, all or nothing."""
        atomic_write(path, json.dumps(self.state_dict(), ensure_ascii=False))

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
        self.rng = rng_of(state["rng"])
        self.logs = [StepLog(**log) for log in state["steps"]]
        self.usage = {name: Usage(**usage) for name, usage in state["usage"].items()}


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
    """Evolve a system prompt for a model that is only asked, never trained. Also works in a notebook.

    Args:
        policy ([`ChatModel`] or `Callable`): The model that solves the problems, or a function of the messages that
            returns a text.
        reference ([`ChatModel`] or `Callable`): The model that reflects and edits; may be the same object.
        rows (`Sequence`): Problems: mappings with `question` (or `prompt`), `answers` and whatever the reward reads,
            `(question, answer)` pairs, or questions. A `datasets.Dataset` will do.
        reward (`Callable`): With TRL's reward signature, like all of `rewards/`. `None` leaves a rollout out.
        prompt ([`SystemPrompt`], `str` or [`Population`]): Where to start; a text as [`SystemPrompt.of`] reads it. A
            population brings its own window and rule: settings that would be ignored with it are an error.
        config ([`EvolveConfig`], *optional*): The settings.
        on_step (`Callable[[StepLog], None]`, *optional*): Called after each step.
        checkpoint (`str` or `Path`, *optional*): File that holds the state after each step. If it exists, the run
            continues from it. What led to each child is kept beside it, see [`journal_beside`].
        budget ([`Budget`], *optional*): What the roles may spend together: `policy`, `reference` and, where the reward
            is a language model with a `charge_to`, `judge`.
        eval_rows (`Sequence`, *optional*): Held-out problems, from which nothing is learned; see `eval_every` and
            `eval_all` of the settings.

    Returns:
        [`EvolveResult`]. A run that cannot go on (budget spent, too many failures) returns what it has, says why in
        `stopped`, and can be continued from its checkpoint.

    Raises:
        `TypeError`: An argument, or what the reward returns, is of a wrong type.
        `ValueError`: There are fewer rows than `problems_per_step`, or the checkpoint is another run's or damaged.
        `RuntimeError`: On the background loop's own thread, which would wait for itself.

    Example:

        >>> result = evolve(OpenAIChat("gpt-4o-mini"), OpenAIChat("gpt-4o"), rows, exact_match_reward,
        ...                 prompt="Answer in <answer></answer>.")  # doctest: +SKIP
    """
    if budget is not None:
        charge(budget, policy=policy, reference=reference, judge=reward)
    evolution = Evolution(policy, reference, rows, reward, prompt, config, eval_rows)
    path, stopped = None if checkpoint is None else Path(checkpoint), None
    if path is not None:
        if path.exists():
            load_state(path, evolution.load_state_dict)
        journal = EvolutionJournal(journal_beside(path))
        journal.keep_before(len(evolution.logs))
    config, population, logs = evolution.config, evolution.population, evolution.logs
    try:
        while len(logs) < config.steps:
            ((_, log),) = in_parallel([evolution.step()], max_in_flight=1)
            if path is not None:
                journal.append(evolution.attempts)  # first: a step whose state is not there yet is done again
                evolution.save(path)
            if log.note and sum(bool(one.note) for one in logs) == 1:
                logger.warning("no evidence at step %d: %s", log.step, log.note)
            if on_step is not None:
                on_step(log)
        if config.eval_all:
            played = [member.prompt for member in population.members if member.matches]
            list(in_parallel([evolution.evaluate(played)], max_in_flight=1))
            if path is not None:
                evolution.save(path)
    except EvolutionStopped as error:
        stopped = f"{error}{_bill(budget)}"
        logger.warning("evolution stopped at step %d: %s", len(logs), stopped)
    if logs and all(log.note for log in logs):
        logger.warning("no step of %d had evidence: the prompt is as it was", len(logs))
    return EvolveResult(population.best(), population, logs, evolution.usage, stopped)


def _check_types(policy: Any, reference: Any, reward: Any, config: Any) -> None:
    """Raises a `TypeError` that names what cannot be worked with."""
    chat = "a chat model or a function of the messages"
    for name, given, wanted in (
        ("policy", policy, chat),
        ("reference", reference, chat),
        ("reward", reward, "a function of lists of completions and columns"),
    ):
        if not callable(given):
            hint = f"; for an endpoint: OpenAIChat({given!r})" if wanted == chat and isinstance(given, str) else ""
            raise TypeError(f"{name} must be {wanted}, not {given!r}{hint}")
    if not isinstance(config, EvolveConfig):
        raise TypeError(f"config must be an EvolveConfig(...), not a {type(config).__name__}")


def _problems(rows: Any, name: str) -> list[Mapping[str, Any]]:
    """Rows, pairs and questions as mappings. Raises a `TypeError` that names what is none of them."""
    if isinstance(rows, (str, Mapping)) or not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")):
        raise TypeError(f"{name} must be a list or a Dataset of problems, not a {type(rows).__name__}")
    problems: list[Mapping[str, Any]] = []
    for number, row in enumerate(rows):
        if isinstance(row, str):
            row = {"question": row}
        elif isinstance(row, (tuple, list)) and len(row) == 2:
            row = {"question": row[0], "answers": row[1] if isinstance(row[1], list) else [row[1]]}
        if not isinstance(row, Mapping):
            raise TypeError(f"{name}[{number}] must be a mapping, a (question, answer) pair or a question, not {row!r}")
        if not (row.get("question") or row.get("prompt")):
            raise TypeError(f"{name}[{number}] has neither `question` nor `prompt`: {', '.join(map(str, row))}")
        problems.append(row)
    return problems


def _bill(budget: Budget | None) -> str:
    """What was spent by whom; and that it was all there was, which a judge that gives nothing does not say."""
    if budget is None:
        return ""
    try:
        budget.stop_when_spent()
    except BudgetExceeded as error:
        return f" ({error}). Spent so far: {budget}"
    return f". Spent so far: {budget}"


async def _score(
    reward: Reward, rows: Sequence[Mapping[str, Any]], replies: Sequence[Reply], grammar: Grammar
) -> list[float | None]:
    """Rewards of all replies that are none of them an error, in one call; `None` for the others."""
    answered = [number for number, reply in enumerate(replies) if reply.error is None]
    scores: list[float | None] = [None] * len(replies)
    if not answered:
        return scores
    shown = [rows[number] for number in answered]
    texts = [replies[number].text for number in answered]
    columns = {name: [row.get(name) for row in shown] for name in shown[0] if name not in ("prompt", "completion")}
    columns |= {
        "prompts": [row.get("prompt") or row["question"] for row in shown],
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "rollout": [_rollout(row, text, grammar) for row, text in zip(shown, texts, strict=True)],
    }
    given = await call_guarded(reward, **columns)
    try:
        for number, score in zip(answered, given, strict=True):
            scores[number] = None if score is None else float(score)
    except (TypeError, ValueError):
        wanted = f"one number or None for each of the {len(answered)} completions"
        raise TypeError(f"the reward must return {wanted}, not {repr(given)[:200]}") from None
    return scores


def _rollout(row: Mapping[str, Any], text: str, grammar: Grammar) -> Rollout:
    """A reply as an episode of one turn, for rewards that read rollouts. It has no tokens: one stands for the turn."""
    rollout = Rollout([0], dict(row))
    turn = grammar.parse(text)
    rollout.add_turn(Sample([0]), turn)
    return rollout.finish("answered" if turn.kind == "answer" else "malformed")
