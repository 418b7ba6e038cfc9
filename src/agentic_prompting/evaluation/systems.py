"""The systems to evaluate, from questions to [`Answer`]s: a prompted model, an agent, ProRefine, any function.

An answer keeps three outcomes apart: an answer (a text), none (the system was asked and gave none: wrong), and a
failure (an outage, a spent budget: not the system's doing, no score).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from ..llm import ChatModel, LLMError, Message, Reply, as_chat, with_system
from ..llm.guard import call_guarded, call_guarded_now, describe
from ..llm.loop import in_parallel
from ..refine import ProRefiner, RefinementResult
from ..refine.types import read_query
from ..rewards import read_answer
from ..rollout import Rollout, rollout_seed
from ..rollout.recording import rollout_record

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One system's answer to one question.

    Args:
        text (`str`, *optional*): The answer itself; `None` if the system gave none.
        whole (`str`, *optional*): The reply that it was read from, for metrics that read it in their own way.
        judged (`float`, *optional*): 1.0 or 0.0, a judge's verdict, where one was asked.
        error (`str`, *optional*): Why there is nothing to score.
        fatal (`bool`, *optional*, defaults to `False`): Whether no later question can go better.
        calls (`int`), cached (`int`): Model calls, and those of them that were replayed, unpaid.
        tokens (`int`), cost_usd (`float`): Read and written, and what they cost.
        worth_usd (`float`, *optional*): What they would have cost without a recording. Defaults to `cost_usd`.
        seconds (`float`): From question to answer.
        trajectory (*optional*): JSON-able; how it came about.
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
        """Its fields, those that say nothing left out."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and value is not False
        }


class System:
    """Something that answers questions: a sub-class has an `async def answer`, or an `answer_batch` of its own.

    Attributes:
        fit_calls (`int`): Model calls it took to make it (prompt optimisation), for the table.
        max_in_flight (`int`): Questions on their way at once.
        batch_size (`int`): Questions given to `answer_batch` at once; what is answered is saved.
    """

    fit_calls: int = 0
    max_in_flight: int = 64
    batch_size: int = 64

    async def answer(self, row: Row, seed: int) -> Answer:
        """Answer one row with a `question`. An exception fails this question; another seed draws another sample."""
        raise NotImplementedError(f"{type(self).__name__} has neither `answer` nor `answer_batch`")

    def answer_batch(self, rows: Sequence[Row], seed: int) -> Sequence[Answer]:
        """Answer rows together, in order: for what does not answer one by one."""
        raise NotImplementedError

    async def try_answer(self, row: Row, seed: int) -> Answer:
        """[`System.answer`], with an exception as the answer's error."""
        try:
            return await call_guarded(self.answer, row, seed)
        except (
            Exception
        ) as error:  # whatever is inside is not ours, and its question is not answered wrong
            return _failed(error)

    def answer_each(self, rows: Sequence[Row], seed: int = 0) -> Iterator[tuple[int, Answer]]:
        """Answer rows with a `question`, yielding `(position, answer)` as each is there.

        Args:
            rows (`Sequence[Mapping]`): The questions.
            seed (`int`, *optional*, defaults to `0`): Another seed is another run: other samples.
        """
        if type(self).answer_batch is System.answer_batch:
            yield from in_parallel((self.try_answer(row, seed) for row in rows), self.max_in_flight)
            return
        for start in range(0, len(rows), self.batch_size):
            yield from enumerate(
                self.answer_batch(rows[start : start + self.batch_size], seed), start
            )

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that identify this system, JSON-able: results of other settings are not continued."""
        return {"class": type(self).__name__}

    def __call__(self, questions: Sequence[str | Row], seed: int = 0) -> list[Answer]:
        """All answers, in the order of the questions."""
        rows = [
            {"question": question} if isinstance(question, str) else question
            for question in questions
        ]
        answers = dict(self.answer_each(rows, seed))
        return [answers[number] for number in range(len(rows))]


def _failed(error: Exception) -> Answer:
    return Answer(error=describe(error, 1000), fatal=isinstance(error, LLMError) and error.fatal)


class FunctionSystem(System):
    """A function of texts as a system.

    Args:
        function (`Callable[[list[str]], Sequence[str | None]]`): Maps questions to answers, in order. An exception
            fails all questions of the call.
        batch_size (`int`, *optional*, defaults to `32`): Questions for each call; answers are saved after it.
    """

    def __init__(self, function: Callable[[list[str]], Sequence[str | None]], batch_size: int = 32):
        self.function, self.batch_size = function, batch_size

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"function": getattr(self.function, "__qualname__", type(self.function).__name__)}

    def answer_batch(self, rows: Sequence[Row], seed: int) -> list[Answer]:
        started = time.perf_counter()
        try:
            texts = call_guarded_now(lambda: list(self.function([row["question"] for row in rows])))
        except (
            Exception
        ) as error:  # whatever is inside is not ours, and its questions are not answered wrong
            return [_failed(error)] * len(rows)
        if len(texts) != len(rows):
            raise ValueError(f"the system gave {len(texts)} answers to {len(rows)} questions")
        seconds = (time.perf_counter() - started) / len(rows)
        return [Answer(text, seconds=seconds) for text in texts]


def as_system(system: System | Callable[..., Any]) -> System:
    """A system as it is, or a function of texts made one.

    Raises:
        `TypeError`: If it is neither.
    """
    if isinstance(system, System):
        return system
    if not callable(system):
        raise TypeError(
            f"a system is a System or a function from questions to answers, got {system!r:.100}"
        )
    return FunctionSystem(system)


class PromptedSystem(System):
    """A model under a prompt, asked once: direct, chain of thought, or the prompt that an optimiser found.

    Args:
        chat ([`ChatModel`]): The model; each question is a conversation of its own, and they run concurrently.
        prompt (`str`, *optional*): Its system message.
        fit_calls (`int`, *optional*, defaults to `0`): Calls that were made to find the prompt.
        max_in_flight (`int`, *optional*, defaults to `64`): Questions on their way at once.
        **sampling: Sent with every call.
    """

    def __init__(
        self,
        chat: ChatModel,
        prompt: str | None = None,
        fit_calls: int = 0,
        max_in_flight: int = 64,
        **sampling: Any,
    ):
        self.chat, self.prompt, self.sampling = chat, prompt, sampling
        self.fit_calls, self.max_in_flight = fit_calls, max_in_flight

    @property
    def settings(self) -> Mapping[str, Any]:
        own = getattr(self.chat, "sampling", None)  # the defaults of every call to the model
        system_prompt = getattr(self.chat, "system_prompt", None)
        return {
            "class": type(self).__name__,
            "model": str(getattr(self.chat, "model", type(self.chat).__name__)),
            "prompt": self.prompt,
            "sampling": {**(own if isinstance(own, Mapping) else {}), **self.sampling},
            **({"system_prompt": system_prompt} if system_prompt else {}),
        }

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        reply = await self.call(
            with_system(self.prompt, [{"role": "user", "content": row["question"]}]), seed
        )
        return answer_of_replies([reply], time.perf_counter() - started)

    async def call(self, messages: Sequence[Message], seed: int) -> Reply:
        """One call of this system; another seed is another sample."""
        return await as_chat(self.chat)(messages, repeat=seed, **self.sampling)


class Agent(Protocol):
    """The protocol of agents that [`AgentSystem`] asks; [`PromptAgent`] has it."""

    def answer_all(
        self, questions: Sequence[Row], seed: int = 0, progress: bool = True
    ) -> list[Rollout]: ...


class AgentSystem(System):
    """A trained agent, with its environment or without.

    Args:
        agent ([`PromptAgent`]): The agent.
        name (`str`): Distinguishes its results from others': the folder it was loaded from, and its environment.
        batch_size (`int`, *optional*, defaults to `64`): Episodes played together; what is finished is saved.
    """

    def __init__(self, agent: Agent, name: str, batch_size: int = 64):
        self.agent, self.name, self.batch_size = agent, name, batch_size

    @property
    def settings(self) -> Mapping[str, Any]:
        environment = getattr(self.agent, "environment", None)
        identity = dict(getattr(environment, "identity", {}))
        return {"agent": self.name, **({"environment": identity} if identity else {})}

    def answer_batch(self, rows: Sequence[Row], seed: int) -> list[Answer]:
        started = time.perf_counter()
        # The seed depends on the batch's first question, so that a resumed run repeats the rest as it would have been.
        rollouts = self.agent.answer_all(
            rows, seed=rollout_seed(seed, rows[0]["question"]), progress=False
        )
        seconds = (time.perf_counter() - started) / len(rollouts)
        return [answer_of_rollout(rollout, seconds) for rollout in rollouts]


class ProRefineSystem(System):
    """ProRefine: the prompt is refined for each question.

    Args:
        refiner ([`ProRefiner`]): In one of the paper's three verifier settings ([`ProRefiner.from_paper`]).
        prompt (`str`): The prompt to begin with.
        max_in_flight (`int`, *optional*, defaults to `64`): Questions on their way at once.
    """

    def __init__(self, refiner: ProRefiner, prompt: str, max_in_flight: int = 64):
        self.refiner, self.prompt, self.max_in_flight = refiner, prompt, max_in_flight

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"refiner": self.refiner.digest(), "prompt": self.prompt}

    async def answer(self, row: Row, seed: int) -> Answer:
        return answer_of_refinement(
            await self.refiner.arefine(self.prompt, replace(read_query(row), repeat=seed))
        )


# From replies, rollouts and refinements to answers --------------------------------------------------------------------


def answer_of_replies(replies: Sequence[Reply], seconds: float, trajectory: Any = None) -> Answer:
    """The answer in the last of the replies, with what all of them took. A failed call is a failed answer."""
    used = Answer(**_used(replies), seconds=seconds, trajectory=trajectory)
    error = next((reply.error for reply in replies if reply.error is not None), None)
    if error is not None:
        return replace(used, error=f"{error.kind}: {error}", fatal=error.fatal)
    return replace(used, text=read_answer(replies[-1].text), whole=replies[-1].text)


def answer_of_rollout(rollout: Rollout, seconds: float) -> Answer:
    """An episode as an answer. `seconds`: its share of the batch's time."""
    error, used = rollout.error, _used(rollout.replies)
    return Answer(
        text=rollout.answer,
        error=None if error is None else f"{error.kind}: {error}",
        fatal=error is not None and error.fatal,
        **{**used, "tokens": used["tokens"] + sum(rollout.mask)},
        seconds=seconds,
        trajectory=rollout_record(rollout),
    )


def answer_of_refinement(result: RefinementResult) -> Answer:
    """A refined question as an answer; the best there is, if a failure ended it early but left one."""
    usage = result.usage.values()
    failed = result.error is not None and not result.finish_reason
    return Answer(
        text=None if failed else read_answer(result.answer),
        whole=None if failed else result.answer,
        error=str(result.error) if failed else None,
        fatal=result.error is not None and result.error.fatal,
        calls=sum(role.calls for role in usage),
        cached=sum(role.cached for role in usage),
        tokens=sum(role.tokens for role in usage),
        cost_usd=sum(role.cost_usd for role in usage),
        worth_usd=sum(role.worth_usd for role in usage),
        seconds=result.seconds,
        trajectory={name: getattr(result, name) for name in ("prompt", "stop_reason", "verdict")}
        | {"steps": len(result.steps)},
    )


def _used(replies: Sequence[Reply]) -> dict[str, Any]:
    return {
        "calls": len(replies),
        "cached": sum(reply.cached for reply in replies),
        "tokens": sum(reply.usage.tokens for reply in replies),
        "cost_usd": sum(reply.usage.cost_usd for reply in replies),
        "worth_usd": sum(reply.worth.cost_usd for reply in replies),
    }
