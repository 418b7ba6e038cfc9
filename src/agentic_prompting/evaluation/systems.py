"""The systems to evaluate, from questions to [`Answer`]s: a prompted model, an agent, ProRefine,
any function.

An answer distinguishes three outcomes: an answer (a text), none (the system was asked and gave no
answer: wrong), and a failure (an outage or a spent budget, which is not the system's fault: no
score).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Number
from typing import Any, Protocol, TypedDict

from ..environments import LLMEnvironment, SearchEnvironment, Workers
from ..llm import ChatModel, LLMError, Message, Reply, as_chat, with_system
from ..llm.guard import call_guarded, call_guarded_now, describe
from ..llm.loop import in_parallel
from ..refine import ProRefiner, RefinementResult
from ..refine.types import read_query
from ..rewards import read_answer
from ..rollout import RESET_SEED, Environment, Environments, Rollout, rollout_seed
from ..rollout.recording import rollout_record
from ..versions import code_version, combine_versions, row_version

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One system's answer to one question.

    Args:
        text (`str`, *optional*): The answer, or `None` if the system gave no answer.
        whole (`str`, *optional*): The reply that contains the answer, for metrics that read it
            themselves.
        judged (`float`, *optional*): A judge's verdict, 1.0 or 0.0, if a judge was asked.
        error (`str`, *optional*): Why there is nothing to score.
        fatal (`bool`, *optional*, defaults to `False`): Whether the error affects all further
            questions.
        calls (`int`), cached (`int`): Model calls, and how many of them were replayed without
            payment.
        tokens (`int`): Tokens read and written, those of replayed calls included.
        cost_usd (`float`): What was paid.
        worth_usd (`float`, *optional*): The cost if no call had been replayed. Defaults to
            `cost_usd`.
        seconds (`float`): Time from question to answer.
        trajectory (*optional*): How the answer was found, JSON-able.
    """

    text: str | None = None
    whole: str | None = None
    judged: float | None = None
    error: str | None = None
    fatal: bool = False
    calls: int = 0
    cached: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    worth_usd: float | None = None
    seconds: float = 0.0
    trajectory: Any = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields, without those that are `None` or `False`."""
        fields = asdict(self)
        # By identity: 0 and 0.0 equal `False`, and they are kept.
        return {
            name: value
            for name, value in fields.items()
            if value is not None and value is not False
        }


class System:
    """A system that answers questions. A subclass overrides `async def answer` or `answer_batch`.

    Attributes:
        fit_calls (`int`): Model calls that were needed to make the system (prompt optimisation),
            for the table.
        max_in_flight (`int`): Largest number of questions in flight.
        batch_size (`int`): Questions per call of `answer_batch`. Answers are saved after each call.
    """

    fit_calls: int = 0
    max_in_flight: int = 64
    batch_size: int = 64

    async def answer(self, row: Row, seed: int) -> Answer:
        """Answer one row with a `question`. An exception fails this question only.

        A different seed draws a different sample.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither `answer` nor `answer_batch`")

    def answer_batch(self, rows: Sequence[Row], seed: int) -> Sequence[Answer]:
        """Answer several rows together, in order, if the system does not answer them separately."""
        raise NotImplementedError

    async def try_answer(self, row: Row, seed: int) -> Answer:
        """[`System.answer`], with an exception turned into the answer's error."""
        # The system is third-party code: a question on which it fails is not answered wrong.
        try:
            return await call_guarded(self.answer, row, seed)
        except Exception as error:
            return _failed_answer(error)

    def answer_each(self, rows: Sequence[Row], seed: int = 0) -> Iterator[tuple[int, Answer]]:
        """Answer rows with a `question`, yielding `(position, answer)` as the answers arrive.

        Args:
            rows (`Sequence[Mapping]`): The questions.
            seed (`int`, *optional*, defaults to `0`): Seed of the run. A different seed draws
                different samples.
        """
        # A system with `answer_batch` answers batch by batch, every other one question by question.
        has_batches = type(self).answer_batch is not System.answer_batch
        if not has_batches:
            yield from in_parallel((self.try_answer(row, seed) for row in rows), self.max_in_flight)
            return
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            yield from enumerate(self.answer_batch(batch, seed), start)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that identify this system, JSON-able.

        Only results with equal settings are resumed.
        """
        return {"class": type(self).__name__}

    @property
    def version(self) -> str | None:
        """A digest of code or weights behind the settings, `None` if there are none.

        Results of another version are not resumed. Those that were saved without one are.
        """
        return None

    def row_version(self, row: Row) -> str | None:
        """A digest of what an answer depends on in a row besides its question; `None` if nothing.

        If it has changed, the row is asked again.
        """
        return None

    def __call__(self, questions: Sequence[str | Row], seed: int = 0) -> list[Answer]:
        """Answer questions and return the answers in their order."""
        # A text is a row that has a question only.
        rows: list[Row] = []
        for question in questions:
            rows.append({"question": question} if isinstance(question, str) else question)
        # Answers arrive in any order.
        answers = dict(self.answer_each(rows, seed))
        return [answers[position] for position in range(len(rows))]


def worth_of(record: Mapping[str, Any]) -> float:
    """Return the US dollars of a recorded answer or rollout, as if each of its replies had been
    paid for it.
    """
    return record.get("worth_usd", record.get("cost_usd")) or 0.0


def _failed_answer(error: Exception) -> Answer:
    return Answer(error=describe(error, 1000), fatal=isinstance(error, LLMError) and error.fatal)


class FunctionSystem(System):
    """Makes a function of texts a system.

    Args:
        function (`Callable[[list[str]], Sequence[str | None]]`): Maps questions to answers, in
            order. An exception fails all questions of the call.
        batch_size (`int`, *optional*, defaults to `32`): Questions per call. Answers are saved
            after each call.
    """

    def __init__(self, function: Callable[[list[str]], Sequence[str | None]], batch_size: int = 32):
        self.function = function
        self.batch_size = batch_size

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"function": getattr(self.function, "__qualname__", type(self.function).__name__)}

    @property
    def version(self) -> str | None:
        return code_version(self.function)

    def answer_batch(self, rows: Sequence[Row], seed: int) -> list[Answer]:
        started = time.perf_counter()
        questions = [row["question"] for row in rows]
        # The function is third-party code: questions on which it fails are not answered wrong.
        try:
            texts = call_guarded_now(lambda: list(self.function(questions)))
        except Exception as error:
            return [_failed_answer(error)] * len(rows)
        # Without one answer per question, it is unknown which answer belongs to which question.
        if len(texts) != len(rows):
            raise ValueError(f"the system gave {len(texts)} answers to {len(rows)} questions")
        # Anything else would be compared as its Python text, and never be right.
        for text in texts:
            if not (text is None or isinstance(text, str | Number)):
                raise ValueError(
                    f"the system must give a text or None for each question, not a "
                    f"{type(text).__name__}: {text!r:.80}"
                )
        # The batch's time in equal shares.
        seconds = (time.perf_counter() - started) / len(rows)
        return [Answer(text, seconds=seconds) for text in texts]


def as_system(system: System | Callable[..., Any]) -> System:
    """Return a system unchanged, or make a function of texts a system.

    Raises:
        `TypeError`: If the argument is neither a system nor a function.
    """
    if isinstance(system, System):
        return system
    if not callable(system):
        raise TypeError(
            f"a system is a System or a function from questions to answers, got {system!r:.100}"
        )
    return FunctionSystem(system)


class PromptedSystem(System):
    """A model under a system prompt, called once per question.

    The prompt may be empty (direct), ask for a chain of thought, or come from an optimiser.

    Args:
        chat ([`ChatModel`]): The model. Each question is a separate conversation; they run
            concurrently.
        prompt (`str`, *optional*): The system message.
        fit_calls (`int`, *optional*, defaults to `0`): Calls that were needed to find the prompt.
        max_in_flight (`int`, *optional*, defaults to `64`): Largest number of questions in flight.
        **sampling: Sampling arguments of every call.
    """

    def __init__(
        self,
        chat: ChatModel,
        prompt: str | None = None,
        fit_calls: int = 0,
        max_in_flight: int = 64,
        **sampling: Any,
    ):
        self.chat = chat
        self.prompt = prompt
        self.sampling = sampling
        self.fit_calls = fit_calls
        self.max_in_flight = max_in_flight

    @property
    def settings(self) -> Mapping[str, Any]:
        # The arguments of this system override the model's defaults.
        default_sampling = getattr(self.chat, "sampling", None)
        if not isinstance(default_sampling, Mapping):
            default_sampling = {}
        settings = {
            "class": type(self).__name__,
            "model": str(getattr(self.chat, "model", type(self.chat).__name__)),
            "prompt": self.prompt,
            "sampling": {**default_sampling, **self.sampling},
        }
        # A model that has its own system prompt is another system than the one without.
        system_prompt = getattr(self.chat, "system_prompt", None)
        if system_prompt:
            settings["system_prompt"] = system_prompt
        return settings

    @property
    def version(self) -> str | None:
        # A function, and a class of the user's own, is known by its name alone.
        return code_version(self.chat)

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        # Each question is a conversation of its own.
        messages = with_system(self.prompt, [{"role": "user", "content": row["question"]}])
        reply = await self.call(messages, seed)
        return answer_of_replies([reply], time.perf_counter() - started)

    async def call(self, messages: Sequence[Message], seed: int) -> Reply:
        """Call the model once. A different seed draws a different sample."""
        return await as_chat(self.chat)(messages, repeat=seed, **self.sampling)


class Agent(Protocol):
    """The interface of agents that [`AgentSystem`] needs; [`PromptAgent`] implements it."""

    def answer_all(
        self, questions: Sequence[Row], seed: int = 0, progress: bool = True
    ) -> list[Rollout]: ...


class AgentSystem(System):
    """A trained agent, with or without its environment.

    Args:
        agent ([`PromptAgent`]): The agent.
        name (`str`): Identifies the agent's results: the folder it was loaded from, and its
            environment.
        batch_size (`int`, *optional*, defaults to `64`): Episodes played together. Answers are
            saved after each batch.
        version (`str`, *optional*): What changes under the same name, such as a digest of the
            weights; see [`System.version`]. The code of an environment of your own counts anyway.
    """

    def __init__(self, agent: Agent, name: str, batch_size: int = 64, version: str | None = None):
        self.agent = agent
        self.name = name
        self.batch_size = batch_size
        self._version = version

    @property
    def settings(self) -> Mapping[str, Any]:
        environment = getattr(self.agent, "environment", None)
        # The environment is part of what answers, so it is part of what identifies the answers.
        identity = dict(getattr(environment, "identity", {}))
        if not identity:
            return {"agent": self.name}
        return {"agent": self.name, "environment": identity}

    @property
    def version(self) -> str | None:
        environment = getattr(self.agent, "environment", None)
        # Several environments are of several files.
        members = [environment]
        if isinstance(environment, Environments):
            members = list(environment.by_name.values())
        codes = [code_version(getattr(member, "described_by", member)) for member in members]
        return combine_versions([self._version, *codes])

    def row_version(self, row: Row) -> str | None:
        columns = _columns_read_by(getattr(self.agent, "environment", None), row)
        return row_version(row, columns) if columns else None

    def answer_batch(self, rows: Sequence[Row], seed: int) -> list[Answer]:
        started = time.perf_counter()
        # The seed depends on the first question, so a resumed run samples the rest as an
        # unbroken one would.
        batch_seed = rollout_seed(seed, rows[0]["question"])
        rollouts = self.agent.answer_all(rows, seed=batch_seed, progress=False)
        seconds = (time.perf_counter() - started) / len(rollouts)
        return [answer_of_rollout(rollout, seconds) for rollout in rollouts]


def _columns_read_by(environment: Environment | None, row: Row) -> set[str]:
    """Return the columns besides the question that an environment may read in a row."""
    # A subclass counts as an environment of the user's own.
    if environment is None or type(environment) in (LLMEnvironment, SearchEnvironment):
        return set()
    if type(environment) is Workers:
        columns = {"pool", "budget", RESET_SEED}
        for worker in environment.pool.values():
            if worker.is_environment:
                columns |= _columns_read_by(worker.model, row)
        return columns
    # An environment of the user's own, or a program, may read any of them.
    return set(row) - {"id", "question", "task"}


class ProRefineSystem(System):
    """ProRefine: refines the prompt for each question.

    Args:
        refiner ([`ProRefiner`]): A refiner in one of the paper's three verifier settings
            ([`ProRefiner.from_paper`]).
        prompt (`str`): The prompt before refinement.
        max_in_flight (`int`, *optional*, defaults to `64`): Largest number of questions in flight.
    """

    def __init__(self, refiner: ProRefiner, prompt: str, max_in_flight: int = 64):
        self.refiner = refiner
        self.prompt = prompt
        self.max_in_flight = max_in_flight

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"refiner": self.refiner.digest(), "prompt": self.prompt}

    @property
    def version(self) -> str | None:
        return self.refiner.version()

    def row_version(self, row: Row) -> str | None:
        # A verifier that compares with the accepted answers decides what is refined.
        needs_answers = getattr(self.refiner.verifier, "needs_answers", False)
        return row_version(row, ("answers",)) if needs_answers else None

    async def answer(self, row: Row, seed: int) -> Answer:
        # The repeat number makes each run a different sample.
        query = replace(read_query(row), repeat=seed)
        return answer_of_refinement(await self.refiner.arefine(self.prompt, query))


# ---- from replies, rollouts and refinements to answers ----


def answer_of_replies(replies: Sequence[Reply], seconds: float, trajectory: Any = None) -> Answer:
    """Return the answer in the last reply, with the usage of all of them.

    A failed call makes a failed answer.
    """
    # A failed answer was paid for as well, so it has its usage.
    answer = Answer(**_sum_usage(replies), seconds=seconds, trajectory=trajectory)
    for reply in replies:
        if reply.error is not None:
            message = f"{reply.error.kind}: {reply.error}"
            return replace(answer, error=message, fatal=reply.error.fatal)
    last_text = replies[-1].text
    return replace(answer, text=read_answer(last_text), whole=last_text)


def answer_of_rollout(rollout: Rollout, seconds: float) -> Answer:
    """Return the answer of an episode.

    Args:
        rollout ([`Rollout`]): The finished episode.
        seconds (`float`): Its share of the batch's time.
    """
    usage = _sum_usage(rollout.replies)
    usage["tokens"] += sum(rollout.mask)  # those that the agent sampled
    answer = Answer(
        text=rollout.answer, **usage, seconds=seconds, trajectory=rollout_record(rollout)
    )
    if rollout.error is None:
        return answer
    message = f"{rollout.error.kind}: {rollout.error}"
    return replace(answer, error=message, fatal=rollout.error.fatal)


def answer_of_refinement(result: RefinementResult) -> Answer:
    """Return the answer of a refined question.

    If a failure ended the refinement early, the best answer so far.
    """
    usage = result.usage.values()
    # The usage of all roles together.
    answer = Answer(
        fatal=result.error is not None and result.error.fatal,
        calls=sum(role.calls for role in usage),
        cached=sum(role.cached for role in usage),
        tokens=sum(role.worth_tokens for role in usage),
        cost_usd=sum(role.cost_usd for role in usage),
        worth_usd=sum(role.worth_usd for role in usage),
        seconds=result.seconds,
        trajectory={
            "prompt": result.prompt,
            "stop_reason": result.stop_reason,
            "verdict": result.verdict,
            "steps": len(result.steps),
        },
    )
    # The best answer so far, unless a failure left none.
    has_failed = result.error is not None and not result.finish_reason
    if has_failed:
        return replace(answer, error=str(result.error))
    return replace(answer, text=read_answer(result.answer), whole=result.answer)


class _UsageFields(TypedDict):
    """The fields of [`Answer`] that are sums over calls."""

    calls: int
    cached: int
    tokens: int
    cost_usd: float
    worth_usd: float


def _sum_usage(replies: Sequence[Reply]) -> _UsageFields:
    return {
        "calls": len(replies),
        "cached": sum(reply.cached for reply in replies),
        "tokens": sum(reply.worth.tokens for reply in replies),
        "cost_usd": sum(reply.usage.cost_usd for reply in replies),
        "worth_usd": sum(reply.worth.cost_usd for reply in replies),
    }
