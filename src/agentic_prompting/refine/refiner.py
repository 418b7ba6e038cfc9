"""[`ProRefiner`]: ProRefine (arXiv 2506.05305) over any [`ChatModel`]s, one in several roles or one for each.

The algorithm is in `loop.py`; here are the synchronous front doors, runs over many questions, and the refiner as a chat
model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ..llm import BadReply, BadRequest, Budget, ChatModel, Message, Reply, Usage, as_chat, charge
from ..llm.loop import in_parallel, run
from ..records import RecordFile, digest, only_writer
from ..rewards import check_answers
from ..rollout.progress import progress as progress_of
from .loop import LabelVerifier, RefineSettings, Verifier, refine
from .templates import DEFAULT_PROMPT
from .types import Failure, Query, RefinementResult, check_prompt, read_query

logger = logging.getLogger(__name__)

PaperSetting = Literal["no_verifier", "verifier", "optimal_verifier"]


@dataclass(frozen=True, eq=False)
class ProRefiner(RefineSettings):
    """ProRefine: a task model answers in small steps, a critic comments, an optimizer rewrites the prompt.

    Algorithm 1, see [`refine`] for how it goes. A failed call, or an optimizer's reply without a prompt in
    `<IMPROVED_PROMPT>` tags, keeps the prompt and is counted.

    Args:
        task ([`ChatModel`]): LLM_task. Gets the prompt as its system message.
        feedback ([`ChatModel`]): LLM_feedback.
        optimizer ([`ChatModel`]): LLM_optimizer. May be the same object as `feedback`.
        verifier ([`ChatModel`] or [`Judge`], *optional*): Judges the first answer; without one every query is refined.

    By keyword, all settings of [`RefineSettings`] besides: `tokens_per_step`, `max_steps`, ...

    Raises:
        `ValueError`: If a number is below 1, or a name is not known.
        `TypeError`: If a model is none.

    Example:

        >>> refiner = ProRefiner(task=small, feedback=large, optimizer=large, verifier=large)  # doctest: +SKIP
        >>> refiner.refine("Think step by step.", "I have a flute and two drums. How many instruments?").answer
    """

    task: ChatModel
    feedback: ChatModel
    optimizer: ChatModel
    verifier: Verifier | None = None

    def __post_init__(self):
        super().__post_init__()
        for role in ("task", "feedback", "optimizer"):
            model = getattr(self, role)
            if not callable(model):
                wanted = "a chat model or a function of the messages"
                raise TypeError(f"the {role} model must be {wanted}, got {model!r:.100}")
            try:
                as_chat(model)
            except TypeError as error:
                raise TypeError(f"the {role} model: {error}") from None
        if self.verifier is not None and not (
            isinstance(self.verifier, ChatModel) or callable(self.verifier)
        ):
            raise TypeError(
                f"verifier must be None, a ChatModel or callable, got {self.verifier!r:.100}"
            )

    @classmethod
    def from_paper(
        cls,
        setting: PaperSetting,
        task: ChatModel,
        critic: ChatModel,
        score: Callable[[str, Sequence[str]], float] | None = None,
        **options: Any,
    ) -> Self:
        """One of the paper's three settings (section "Unifying Verifier and Feedback"), with its k and n.

        Args:
            setting (`str`): `"no_verifier"`: all queries are refined. `"verifier"`: `critic` also judges the first
                answer. `"optimal_verifier"`: `score` and the rows' `answers` do.
            task ([`ChatModel`]): LLM_task.
            critic ([`ChatModel`]): One model for feedback, optimization and verification.
            score (`Callable`, *optional*): For `"optimal_verifier"`: score of an answer given the accepted ones.
            **options: As in [`ProRefiner`].

        Raises:
            `ValueError`: If the setting is not known, or `score` is missing or not used.
        """
        if setting not in get_args(PaperSetting):
            raise ValueError(
                f"setting must be one of {', '.join(get_args(PaperSetting))}, got {setting!r}"
            )
        verifier: Verifier | None = critic if setting == "verifier" else None
        if setting == "optimal_verifier":
            verifier = LabelVerifier(score)  # type: ignore[arg-type]  # None is refused there
        elif score is not None:
            raise ValueError(
                f"score is for the optimal verifier; {setting!r} does not look at answers"
            )
        return cls(task, critic, critic, verifier, **options)

    def refine(self, prompt: str, query: str | Mapping[str, Any]) -> RefinementResult:
        """Refine a prompt for one question, and wait for it; in `async` code: `await refiner.arefine(...)`.

        As [`refine`]; and `ValueError` if a label verifier has no labels.
        """
        result = run(self.arefine(prompt, self._read(prompt, [query])[0]))
        self._warn_of_missing_tags([result])
        return result

    def arefine(
        self, prompt: str, query: Query | str | Mapping[str, Any]
    ) -> Coroutine[Any, Any, RefinementResult]:
        """The coroutine of [`ProRefiner.refine`]: [`refine`] with the models and settings of this refiner."""
        return refine(query, prompt, **self.models, settings=self)

    @property
    def models(self) -> dict[str, Any]:
        """By role; the verifier is there too, `None` or a function as it may be."""
        return {role: getattr(self, role) for role in ("task", "feedback", "optimizer", "verifier")}

    def refine_all(
        self,
        prompt: str,
        queries: Sequence[str | Mapping[str, Any]],
        max_in_flight: int = 128,
        output: str | Path | None = None,
        progress: bool = True,
    ) -> list[RefinementResult]:
        """Refine a prompt for each of many questions, concurrently.

        Args:
            prompt (`str`): p, the same for all.
            queries (`Sequence[str]` or rows): The questions; see [`ProRefiner.refine`].
            max_in_flight (`int`, *optional*, defaults to `128`): Questions on their way at once. How many calls a model
                gets at once is the model's own setting.
            output (`str` or `Path`, *optional*): A JSON-lines file. Each result is written when it is there. Questions
                that are in the file are not asked again, except those that ended with an error. Give the models a
                [`ReplayCache`] as well, and the calls of questions that were not finished are not paid twice.
            progress (`bool`, *optional*, defaults to `True`): A bar after two seconds, or in a file a line a minute.

        Returns:
            `list[RefinementResult]`: In the order of the questions. After a fatal failure (a wrong key, a spent budget)
            no further question is begun; those left have this failure as their `error` and are not in `output`.

        Raises:
            `ValueError`: Before the first call: the prompt or a question is empty, a label verifier has no labels, or
                `output` holds something else, or another process is writing it.
        """
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {max_in_flight}")
        asked = self._read(prompt, queries)
        with nullcontext() if output is None else only_writer(output):
            file = None if output is None else ResultsFile(output, self.digest())
            return self._refine_asked(prompt, asked, max_in_flight, file, progress)

    def _read(self, prompt: str, queries: Sequence[str | Mapping[str, Any]]) -> list[Query]:
        """The questions as queries; `ValueError` for what [`ProRefiner.refine_all`] refuses before the first call."""
        check_prompt(prompt)
        asked = [read_query(query, number) for number, query in enumerate(queries)]
        for number, query in enumerate(asked):
            if getattr(self.verifier, "needs_answers", False) and not query.answers:
                raise ValueError(
                    f"{self.verifier!r} compares with accepted answers, and query {number} has none: pass a row "
                    "with `question` and `answers`, or another verifier"
                )
            if query.answers and isinstance(self.verifier, LabelVerifier):
                try:
                    check_answers(self.verifier.score, query.answers)
                except ValueError as error:
                    raise ValueError(f"query {number}: {error}") from None
        return asked

    def _refine_asked(
        self,
        prompt: str,
        asked: Sequence[Query],
        max_in_flight: int,
        file: ResultsFile | None,
        progress: bool,
    ) -> list[RefinementResult]:
        done, keys = {} if file is None else file.done, list(_keys(prompt, asked))
        results = {
            i: replace(done[key], id=asked[i].id) for i, key in enumerate(keys) if key in done
        }
        left = [i for i in range(len(asked)) if i not in results]
        fatal: list[Failure] = []
        works = (
            self.arefine(prompt, asked[i]) for i in left if not fatal
        )  # taken as others finish
        bars = progress_of(len(asked), "refined", done=len(results), shown=progress)
        with bars as bar, closing(in_parallel(works, max_in_flight)) as finished:
            for position, result in finished:
                i = left[position]
                results[i] = result
                if file is not None:
                    file.add(keys[i], result)
                if result.error is not None and result.error.fatal:
                    fatal.append(result.error)
                bar.update()
        self._warn_of_missing_tags(results[i] for i in left if i in results)
        if fatal:
            logger.error(f"stopped after {len(results)} of {len(asked)} queries: {fatal[0]}")
        for i in set(left) - set(results):
            results[i] = RefinementResult(
                asked[i].id, asked[i].text, "", prompt, prompt, "failed", error=fatal[0]
            )
        return [results[i] for i in range(len(asked))]

    def _warn_of_missing_tags(self, results: Iterable[RefinementResult]) -> None:
        """One line for all replies of the optimizer without a new prompt, which changed nothing."""
        steps = [
            step
            for result in results
            for step in result.steps
            if step.feedback and step.problem != "optimizer failed"
        ]
        missing = Counter(step.problem for step in steps if step.problem)
        if missing:
            logger.warning(
                "%d of %d replies of the optimizer had no new prompt between <IMPROVED_PROMPT> tags (%s): the prompt "
                "stayed as it was: take a model that follows its instructions (prompts.optimizer_role), or more "
                "max_tokens for it",
                *(
                    missing.total(),
                    len(steps),
                    ", ".join(f"{n} {why}" for why, n in missing.items()),
                ),
            )

    def digest(self) -> str:
        """Identifies settings, models and verifier, so that a file of results is not continued with others."""
        own = {one.name: getattr(self, one.name) for one in fields(RefineSettings)}
        plain = vars(RefineSettings())  # left out: a setting that comes later changes no digest
        settings = {name: value for name, value in own.items() if value != plain[name]}
        names = {role: _name_of(model) for role, model in self.models.items() if model is not None}
        return digest([settings, names])

    def charge_to(self, budget: Budget, account: str = "") -> None:
        """Book what each role spends into `budget`: under its own name, behind `account/` where one is given."""
        charge(
            budget,
            **{
                f"{account}/{role}" if account else role: model
                for role, model in self.models.items()
            },
        )

    def check(self) -> None:
        """Raise the [`LLMError`] that a first call would meet, of the models that can be checked."""
        for model in {id(model): model for model in self.models.values()}.values():
            check = getattr(model, "check", None)
            if check is not None:
                check()


class ResultsFile:
    """Results of one setting, a line each, written as they finish; a run that was stopped goes on where it was.

    Args:
        path (`str` or `Path`): The file; made, with its folders, where it is missing.
        settings (`str`): What identifies the settings; see [`ProRefiner.digest`].

    Attributes:
        done (`dict[str, RefinementResult]`): Those that were there, by key; those with an error are taken out.

    Raises:
        `ValueError`: If the file holds something else, or results of other settings. It is left as it is.
    """

    def __init__(self, path: str | Path, settings: str):
        self.settings, self._records = settings, RecordFile(path)
        self.done: dict[str, RefinementResult] = {}
        for number, record in enumerate(self._records, start=1):
            if not {"key", "settings", "error"} <= set(record):
                raise ValueError(
                    f"line {number} of {path} is no refinement result: give another file as output"
                )
            if record["settings"] != settings:
                raise ValueError(
                    f"{path} holds results of other settings or models: give another file as output, or go on with "
                    "the settings it was begun with"
                )
            result = RefinementResult.from_dict(record)
            if result.error is None:
                self.done.setdefault(record["key"], result)
        self._records.keep(lambda record: record["error"] is None)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).open(
            "ab"
        ).close()  # where it cannot be written, that is known before the first call

    def add(self, key: str, result: RefinementResult) -> None:
        """Write one result; with the operating system when this returns."""
        self._records.append([{"key": key, "settings": self.settings, **result.to_dict()}])


def _keys(prompt: str, queries: Sequence[Query]) -> Iterator[str]:
    """What identifies each query of a run in its file: prompt and question, and a number among equal ones."""
    seen: Counter[str] = Counter()
    for key in (query.digest(prompt)[:32] for query in queries):
        seen[key] += 1
        yield f"{key}-{seen[key]}"


def _name_of(model: Any) -> str:
    """The name of a model: that of its endpoint, the path of a local model, or the name of the function or class."""
    named = getattr(model, "model", None)
    loaded_from = getattr(getattr(named, "config", None), "name_or_path", None)
    own = (
        repr(model)
        if isinstance(model, LabelVerifier)
        else getattr(model, "__qualname__", type(model).__name__)
    )
    return next((name for name in (named, loaded_from) if isinstance(name, str) and name), str(own))


class RefinedChat:
    """A [`ChatModel`] that refines its system message for each question before it answers.

    So a refiner can be an environment, a judge, or be served. The system message of a conversation is the prompt, its
    last user message the question; the messages in between go to the task model unchanged.

    Args:
        refiner ([`ProRefiner`]): Without a verifier that needs accepted answers: a conversation has none.
        prompt (`str`, *optional*): For conversations without a system message.

    Raises:
        `ValueError`: If the prompt is empty or the verifier needs accepted answers.
    """

    def __init__(self, refiner: ProRefiner, prompt: str = DEFAULT_PROMPT):
        check_prompt(prompt)
        if getattr(refiner.verifier, "needs_answers", False):
            raise ValueError(
                f"{refiner.verifier!r} compares with accepted answers, which a conversation does not have"
            )
        self.refiner, self.prompt = refiner, prompt

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`]. `max_tokens` limits the answer; other sampling arguments go to the task model."""
        own, limit = self.refiner.sampling or {}, sampling.pop("max_tokens", None)
        try:
            prompt, query = self._read(messages, repeat or 0)
            refiner = replace(
                self.refiner,
                final_max_tokens=self.refiner.final_max_tokens if limit is None else limit,
                sampling={**own, "task": {**own.get("task", {}), **sampling}},
            )
        except (ValueError, KeyError, TypeError) as error:
            return Reply(
                error=BadRequest(f"not a conversation to refine: {error}", "refiner", attempts=0)
            )
        return as_reply(await refiner.arefine(prompt, query))

    def check(self) -> None:
        """Raise the [`LLMError`] that a first call would meet, of the models that can be checked."""
        self.refiner.check()

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book what each role spends under `account/role`."""
        self.refiner.charge_to(budget, account)

    def _read(self, messages: Sequence[Message], repeat: int) -> tuple[str, Query]:
        """The prompt and the question in a conversation.

        Raises:
            `ValueError`: If it does not end with a user's message that is not empty.
        """
        said = [message for message in messages if message["role"] != "system"]
        if not said or said[-1]["role"] != "user" or not said[-1]["content"].strip():
            raise ValueError("it must end with a user message that is not empty")
        system = "\n\n".join(
            message["content"] for message in messages if message["role"] == "system"
        )
        query = Query(said[-1]["content"], context=tuple(said[:-1]), repeat=repeat)
        return system if system.strip() else self.prompt, query


def as_reply(result: RefinementResult) -> Reply:
    """A result as a large LLM's reply: its answer, or its error where there is none; the usage of all roles.

    An answer that is there is given although something failed on the way: the agent gets the best there is. Not where
    the failure is for good: with a role's key wrong or its budget spent, no question would be refined any more.
    """
    roles = result.usage.values()
    usage = Usage(*(sum(getattr(role, one.name) for role in roles) for one in fields(Usage)))
    cached = 0 < sum(role.calls for role in roles) == sum(role.cached for role in roles)
    saved = Usage(cost_usd=sum(role.worth_usd for role in roles) - usage.cost_usd)
    reply = Reply(
        usage=usage, saved=saved, cached=cached, attempts=0 if cached else 1, seconds=result.seconds
    )
    if result.error is not None and (result.error.fatal or not result.finish_reason):
        return replace(reply, error=result.error.as_error())
    if not result.answer.strip():
        return replace(reply, error=BadReply("the refined answer is empty", "refiner"))
    return replace(reply, text=result.answer, finish_reason=result.finish_reason)
