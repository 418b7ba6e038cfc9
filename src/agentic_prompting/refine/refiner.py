"""[`ProRefiner`]: ProRefine (arXiv 2506.05305) with any [`ChatModel`]s, one per role or shared.

The algorithm itself is in `loop.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ..llm import Budget, ChatModel, as_chat, charge
from ..llm.loop import in_parallel, run
from ..records import digest, only_writer
from ..rewards import check_answers
from ..rollout.progress import show_progress
from ..versions import code_version, combine_versions, weights_version
from .loop import RefineSettings, refine
from .results_file import ResultsFile, result_keys
from .types import Failure, Query, RefinementResult, check_prompt, read_query
from .verifiers import LabelVerifier, Verifier

logger = logging.getLogger(__name__)

PaperSetting = Literal["no_verifier", "verifier", "optimal_verifier"]


@dataclass(frozen=True, eq=False)
class ProRefiner(RefineSettings):
    """ProRefine: a task model answers in small steps, a critic comments, an optimizer rewrites the
    prompt.

    This is Algorithm 1; see [`refine`] for the details. A failed call, or an optimizer's reply
    without a prompt in `<IMPROVED_PROMPT>` tags, leaves the prompt as it is and is counted. All
    settings of [`RefineSettings`] are keyword arguments: `tokens_per_step`, `max_steps`, ...

    Args:
        task ([`ChatModel`]): LLM_task. Its system message is the prompt.
        feedback ([`ChatModel`]): LLM_feedback.
        optimizer ([`ChatModel`]): LLM_optimizer. May be the same object as `feedback`.
        verifier ([`ChatModel`] or [`VerifierFunction`], *optional*): Judges the first answer.
            Without one every query is refined.

    Raises:
        `ValueError`: A number is below 1, or a name is not known.
        `TypeError`: A model is not a chat model.

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
        # Refuse unsuitable models now rather than in the first call.
        models = {"task": self.task, "feedback": self.feedback, "optimizer": self.optimizer}
        for role, model in models.items():
            if not callable(model):
                raise TypeError(
                    f"the {role} model must be a chat model or a function of the messages, "
                    f"got {model!r:.100}"
                )
            try:
                as_chat(model)
            except TypeError as error:
                raise TypeError(f"the {role} model: {error}") from None
        is_verifier = isinstance(self.verifier, ChatModel) or callable(self.verifier)
        if self.verifier is not None and not is_verifier:
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
        """Create one of the paper's three settings (section "Unifying Verifier and Feedback"), with
        its k and n.

        Args:
            setting (`str`): `"no_verifier"`: all queries are refined. `"verifier"`: `critic` also
                judges the first answer. `"optimal_verifier"`: `score` and the rows' `answers` do.
            task ([`ChatModel`]): LLM_task.
            critic ([`ChatModel`]): The model for feedback, optimization and verification.
            score (`Callable`, *optional*): For `"optimal_verifier"`: scores an answer, given the
                accepted ones.
            **options: As for [`ProRefiner`].

        Raises:
            `ValueError`: The setting is not known, or `score` is missing or has no effect.
        """
        if setting not in get_args(PaperSetting):
            raise ValueError(
                f"setting must be one of {', '.join(get_args(PaperSetting))}, got {setting!r}"
            )
        # The settings differ in who judges the first answer.
        verifier: Verifier | None = None
        if setting == "verifier":
            verifier = critic
        elif setting == "optimal_verifier":
            verifier = LabelVerifier(score)  # type: ignore[arg-type]  # it refuses None
        if score is not None and setting != "optimal_verifier":
            raise ValueError(
                f"score is for the optimal verifier; {setting!r} does not look at answers"
            )
        return cls(task, critic, critic, verifier, **options)

    def refine(self, prompt: str, query: str | Mapping[str, Any]) -> RefinementResult:
        """Refine a prompt for one question, and wait for the result.

        In `async` code use `await refiner.arefine(...)`.

        Args:
            prompt (`str`): p.
            query (`str` or `dict`): As for [`refine`].

        Raises:
            `ValueError`: The prompt or the question is empty, or a verifier needs accepted answers
                and the question has none.
        """
        # Check before the first call, and wait on the background loop.
        (checked_query,) = self._read_queries(prompt, [query])
        result = run(self.arefine(prompt, checked_query))
        self._warn_of_unread_replies([result])
        return result

    def arefine(
        self, prompt: str, query: Query | str | Mapping[str, Any]
    ) -> Coroutine[Any, Any, RefinementResult]:
        """Return the coroutine of [`ProRefiner.refine`]."""
        return refine(
            query,
            prompt,
            task=self.task,
            feedback=self.feedback,
            optimizer=self.optimizer,
            verifier=self.verifier,
            settings=self,
        )

    @property
    def models(self) -> dict[str, Any]:
        """The models by role, including the verifier, which may be `None` or a function."""
        return {
            "task": self.task,
            "feedback": self.feedback,
            "optimizer": self.optimizer,
            "verifier": self.verifier,
        }

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
            queries (`Sequence[str | dict]`): The questions; see [`ProRefiner.refine`].
            max_in_flight (`int`, *optional*, defaults to `128`): How many questions are refined at
                the same time. How many calls a model gets at once is a setting of the model.
            output (`str` or `Path`, *optional*): A JSON-lines file, to which each result is written
                when it is there. Questions that the file already has are not asked again, except
                those that ended with an error. With a [`ReplayCache`] for the models, the calls of
                unfinished questions are not paid twice either.
            progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar after
                two seconds, or to log one line per minute if the output is a file.

        Returns:
            `list[RefinementResult]`: In the order of the questions. After a fatal failure (a wrong
            key, a spent budget) no further question is started. The remaining results have this
            failure as their `error` and are not in `output`.

        Raises:
            `ValueError`: Before the first call: the prompt or a question is empty, a verifier needs
                accepted answers and a question has none, or `output` holds something else or is
                being written by another process.
        """
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {max_in_flight}")
        # Find mistakes before the first call is paid.
        checked_queries = self._read_queries(prompt, queries)
        # Two processes must not write the same file.
        with nullcontext() if output is None else only_writer(output):
            # Results of other settings are not mixed into the file.
            file = None if output is None else ResultsFile(output, self.digest(), self.version())
            return self._refine_queries(prompt, checked_queries, max_in_flight, file, progress)

    def _refine_queries(
        self,
        prompt: str,
        queries: Sequence[Query],
        max_in_flight: int,
        file: ResultsFile | None,
        progress: bool,
    ) -> list[RefinementResult]:
        # Take the results that the file already has.
        keys = result_keys(prompt, queries)
        results: dict[int, RefinementResult] = {}
        if file is not None:
            for number, key in enumerate(keys):
                if key in file.results:
                    results[number] = replace(file.results[key], id=queries[number].id)
        open_numbers = [number for number in range(len(queries)) if number not in results]

        # Refine the others.
        failure: Failure | None = None

        def start_refinements() -> Iterator[Coroutine[Any, Any, RefinementResult]]:
            # `in_parallel` asks for the next query as others finish. After a fatal failure there is
            # none: queries in flight, which are paid for, still end.
            for number in open_numbers:
                if failure is not None:
                    return
                yield self.arefine(prompt, queries[number])

        with (
            show_progress(len(queries), "refined", done=len(results), shown=progress) as bar,
            closing(in_parallel(start_refinements(), max_in_flight)) as finished,
        ):
            for position, result in finished:
                # Results come as they finish: write each one at once, so that an abort loses none.
                number = open_numbers[position]
                results[number] = result
                if file is not None:
                    file.add(keys[number], result)
                if failure is None and result.error is not None and result.error.fatal:
                    failure = result.error
                bar.update()
        self._warn_of_unread_replies(
            [results[number] for number in open_numbers if number in results]
        )

        if failure is not None:
            # Queries that were in flight have a result, too: the failure.
            finished_count = sum(result.error is None for result in results.values())
            logger.error(f"stopped after {finished_count} of {len(queries)} queries: {failure}")
            # Queries that were not started have the failure as their result.
            for number in open_numbers:
                if number not in results:
                    results[number] = RefinementResult(
                        id=queries[number].id,
                        query=queries[number].text,
                        answer="",
                        initial_prompt=prompt,
                        prompt=prompt,
                        stop_reason="failed",
                        error=failure,
                    )
        return [results[number] for number in range(len(queries))]

    def _read_queries(self, prompt: str, rows: Sequence[str | Mapping[str, Any]]) -> list[Query]:
        """Check the prompt and convert the questions; see [`ProRefiner.refine_all`] for errors."""
        check_prompt(prompt)
        queries = [read_query(row, number) for number, row in enumerate(rows)]
        # A verifier that compares answers cannot judge a query without any.
        needs_answers = getattr(self.verifier, "needs_answers", False)
        for number, query in enumerate(queries):
            if needs_answers and not query.answers:
                raise ValueError(
                    f"{self.verifier!r} compares with accepted answers, and query {number} has "
                    "none: pass a row with `question` and `answers`, or another verifier"
                )
            # An accepted answer that no reply can match would make every answer wrong.
            if query.answers and isinstance(self.verifier, LabelVerifier):
                try:
                    check_answers(self.verifier.score, query.answers)
                except ValueError as error:
                    raise ValueError(f"query {number}: {error}") from None
        return queries

    def _warn_of_unread_replies(self, results: Sequence[RefinementResult]) -> None:
        """Log a warning for each role whose replies could not be read."""
        self._warn_of_missing_tags(results)
        # A verifier that is a function may be undecided on purpose.
        if isinstance(self.verifier, ChatModel):
            verdicts = [result.verdict for result in results if not result.failures]
            unread_count = verdicts.count("none")
            if unread_count:
                logger.warning(
                    f"{unread_count} of {len(verdicts)} verdicts on a first answer could not be "
                    "read (no <ACCURACY> tags), so these answers were refined as wrong ones are: "
                    "use a model that follows its instructions (prompts.verifier_role), or raise "
                    "its max_tokens"
                )

    def _warn_of_missing_tags(self, results: Sequence[RefinementResult]) -> None:
        """Log one warning about all replies of the optimizer that had no new prompt."""
        # Count the replies of the optimizer, and those without a new prompt by their fault.
        reply_count = 0
        problems: Counter[str] = Counter()
        for result in results:
            for step in result.steps:
                # The optimizer is only called with feedback.
                if not step.feedback or step.problem == "optimizer failed":
                    continue
                reply_count += 1
                if step.problem:
                    problems[step.problem] += 1
        if problems:
            counts = ", ".join(f"{count} {problem}" for problem, count in problems.items())
            logger.warning(
                f"{problems.total()} of {reply_count} replies of the optimizer had no new prompt "
                f"between <IMPROVED_PROMPT> tags ({counts}), so the prompt stayed as it was: use a "
                "model that follows its instructions (prompts.optimizer_role), or raise its "
                "max_tokens"
            )

    def digest(self) -> str:
        """Return a text that identifies settings, models and verifier.

        A file of results is not continued with others.
        """
        # Leave out defaults, so that a setting that is added later does not change the digest.
        defaults = vars(RefineSettings())
        settings = {}
        for item in fields(RefineSettings):
            value = getattr(self, item.name)
            if value != defaults[item.name]:
                settings[item.name] = value
        # Models are identified by their names.
        names = {
            role: _model_name(model) for role, model in self.models.items() if model is not None
        }
        return digest([settings, names])

    def version(self) -> str | None:
        """Return a digest of what may change under the same names; `None` if there is nothing.

        It covers the code of functions, the weights of local models, and the sampling and system
        prompt of the clients. A file of results is not continued with others.
        """
        versions = [_model_version(model) for model in self.models.values() if model is not None]
        return combine_versions(versions)

    def charge_to(self, budget: Budget, account: str = "") -> None:
        """Book the spending of each role.

        Args:
            budget ([`Budget`]): The budget.
            account (`str`, *optional*): A role is booked under `account/role`; by default under its
                name alone.
        """
        prefix = f"{account}/" if account else ""
        accounts = {f"{prefix}{role}": model for role, model in self.models.items()}
        # A model in several roles is booked under all their names.
        charge(budget, **accounts)

    def check(self) -> None:
        """Raise the [`LLMError`] that a first call would meet, for models that can be checked."""
        # Several roles may share a model.
        different_models = {id(model): model for model in self.models.values()}
        for model in different_models.values():
            check = getattr(model, "check", None)
            if check is not None:
                check()


def _model_version(model: object) -> str | None:
    """Return a digest of what identifies a model besides its name; `None` if there is nothing."""
    if isinstance(model, LabelVerifier):
        return code_version(model.score)
    # A client at an endpoint has defaults of its own, a local model a folder, all others code.
    client_settings = {}
    for name in ("sampling", "system_prompt"):
        value = getattr(model, name, None)
        if value and isinstance(value, Mapping | str):
            client_settings[name] = value
    weights = weights_version(_model_name(model))
    return combine_versions([client_settings, weights, code_version(model)])


def _model_name(model: object) -> str:
    """Return the name of an endpoint's model, the path of a local model, or the name of a function
    or class."""
    # Clients of endpoints and local models both have an attribute `model`.
    model_attribute = getattr(model, "model", None)
    config = getattr(model_attribute, "config", None)
    for name in (model_attribute, getattr(config, "name_or_path", None)):
        if isinstance(name, str) and name:
            return name
    if isinstance(model, LabelVerifier):
        return repr(model)
    return str(getattr(model, "__qualname__", type(model).__name__))
