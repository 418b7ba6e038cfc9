"""[`ProRefiner`]: repair a prompt for one question while the answer is being written (ProRefine, arXiv 2506.05305).

Pure over [`ChatModel`]: an endpoint, a local model or a script, one model in several roles or one for each. The
algorithm is in `loop.py`; here are its settings, its models, and runs over many questions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from ..llm import ChatModel, Reply
from ..rollout.progress import progress as progress_of
from .driver import run_all
from .loop import Call, refinement
from .parsing import Unit
from .query import Query, check_prompt, distinct_keys, read_query
from .result import Failure, RefinementResult
from .results_file import ResultsFile
from .settings import RefineSettings
from .templates import RolePrompts
from .verifiers import LabelVerifier, Verifier, check_answers

logger = logging.getLogger(__name__)

PaperSetting = Literal["no_verifier", "verifier", "optimal_verifier"]


class ProRefiner:
    """ProRefine: a task model answers in small steps, a critic comments, an optimizer rewrites the prompt.

    Algorithm 1: in step i the task model begins its answer anew under the present prompt, with at most i·k tokens,
    decoding greedily; the critic reads question and output, the optimizer prompt and feedback. It ends when the task
    model came to its end of sequence (`finish_reason` is not `length`) or after n steps. The answer is then a fresh one
    under the last prompt. A call whose reply is known beforehand is not made: the same prompt with the same limit, or
    with a higher one when the output was complete.

    A failed call, or an optimizer's reply without a prompt in `<IMPROVED_PROMPT>` tags, keeps the prompt and is
    counted.

    Args:
        task ([`ChatModel`]): LLM_task. Gets the prompt as its system message.
        feedback ([`ChatModel`]): LLM_feedback.
        optimizer ([`ChatModel`]): LLM_optimizer. May be the same object as `feedback`.
        verifier ([`ChatModel`] or [`Judge`], *optional*): Judges the first answer; without one every query is refined.
        tokens_per_step (`int`, *optional*, defaults to `10`): k (section "Experimental Setup").
        max_steps (`int`, *optional*, defaults to `25`): n (section "Experimental Setup").
        unit (`str`, *optional*, defaults to `"tokens"`):
            What a step adds: `"tokens"`: k tokens; `"sentence"` or `"paragraph"`: one of these (section "Implementation
            Details"; `tokens_per_step` is not read). Then the task model writes up to `final_max_tokens` whenever the
            prompt has changed, and the critic is shown the beginning.
        history (`bool`, *optional*, defaults to `False`): Whether critic and optimizer see their earlier steps for the
            query. The paper found no consistent gain in it.
        final_max_tokens (`int`, *optional*, defaults to `512`): For the final and the first answer.
        prompts ([`RolePrompts`], *optional*): The words of the roles.
        max_failures (`int`, *optional*, defaults to `3`): After so many failed calls no more refining is done for the
            query: it ends with the best answer there is and `error` set. A fatal failure ends it at once.
        stop_when_correct (`int`, *optional*): Stop when the critic has said CORRECT so often under one prompt (2 is
            sensible). Not in the paper; off by default.
        if_no_verdict (`str`, *optional*, defaults to `"refine"`): What to do if the verifier fails or does not say:
            `"refine"`, or `"accept"` the first answer.
        sampling (`dict[str, dict]`, *optional*): Sampling arguments by role (`task`, `feedback`, `optimizer`,
            `verifier`), over the defaults: temperature 0, and 2,048 tokens for all but the task model. `None` takes a
            default out. With another temperature for the task model every call is made.

    Raises:
        `ValueError`: If a number is below 1, or a name is not known.
        `TypeError`: If a model is none.

    Example:

        >>> refiner = ProRefiner(task=small, feedback=large, optimizer=large, verifier=large)  # doctest: +SKIP
        >>> refiner.refine("Think step by step.", "I have a flute and two drums. How many instruments?").answer
    """

    def __init__(
        self,
        task: ChatModel,
        feedback: ChatModel,
        optimizer: ChatModel,
        verifier: Verifier | None = None,
        tokens_per_step: int = 10,
        max_steps: int = 25,
        unit: Unit = "tokens",
        history: bool = False,
        final_max_tokens: int = 512,
        prompts: RolePrompts = RolePrompts(),
        max_failures: int = 3,
        stop_when_correct: int | None = None,
        if_no_verdict: Literal["refine", "accept"] = "refine",
        sampling: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        self.models: dict[str, ChatModel] = {"task": task, "feedback": feedback, "optimizer": optimizer}
        for role, model in self.models.items():
            if not isinstance(model, ChatModel):
                raise TypeError(f"the {role} model must have a `submit` method like a ChatModel, got {model!r:.100}")
        if isinstance(verifier, ChatModel):
            self.models["verifier"] = verifier
        elif verifier is not None and not callable(verifier):
            raise TypeError(f"verifier must be None, a ChatModel or callable, got {verifier!r:.100}")
        self.verifier = verifier
        self.settings = RefineSettings(
            tokens_per_step=tokens_per_step,
            max_steps=max_steps,
            unit=unit,
            history=history,
            final_max_tokens=final_max_tokens,
            prompts=prompts,
            max_failures=max_failures,
            stop_when_correct=stop_when_correct,
            if_no_verdict=if_no_verdict,
            sampling=dict(sampling or {}),
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
        verifiers: dict[str, Callable[[], Verifier | None]] = {
            "no_verifier": lambda: None,
            "verifier": lambda: critic,
            "optimal_verifier": lambda: LabelVerifier(score),  # type: ignore[arg-type]  # None is refused there
        }
        if setting not in verifiers:
            raise ValueError(f"setting must be one of {', '.join(verifiers)}, got {setting!r}")
        if score is not None and setting != "optimal_verifier":
            raise ValueError(f"score is for the optimal verifier; {setting!r} does not look at answers")
        return cls(task, critic, critic, verifiers[setting](), **options)

    def refine(self, prompt: str, query: str | Mapping[str, Any]) -> RefinementResult:
        """Refine a prompt for one question.

        Args:
            prompt (`str`): p, the task model's system message to begin with.
            query (`str` or row): q, or a row with `question` and, for verifiers that need them, `answers`.

        Returns:
            [`RefinementResult`]: Also if calls failed: see its `error`.

        Raises:
            `ValueError`: If the prompt or the question is empty, or a label verifier has no labels.
        """
        return self.refine_all(prompt, [query], progress=False)[0]

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
            output (`str` or `Path`, *optional*):
                A JSON-lines file. Each result is written when it is there. Questions that are in the file are not asked
                again, except those that ended with an error. Give the models a [`ReplayCache`] as well, and the calls
                of questions that were not finished are not paid twice.
            progress (`bool`, *optional*, defaults to `True`): Show how far it is: a bar after two seconds, or in a
                file or a pipe a line a minute.

        Returns:
            `list[RefinementResult]`: In the order of the questions. After a fatal failure (a wrong key, a spent budget)
            no further question is begun; those left have this failure as their `error` and are not in `output`.

        Raises:
            `ValueError`: Before the first call: the prompt or a question is empty, a label verifier has no labels, or
                `output` holds something else.
        """
        check_prompt(prompt)
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {max_in_flight}")
        asked = [read_query(query, number) for number, query in enumerate(queries)]
        check_answers(self.verifier, asked)
        file = ResultsFile(output, self.digest()) if output is not None else None
        try:
            return self._refine_all(prompt, asked, max_in_flight, file, progress)
        finally:
            if file is not None:
                file.close()

    def _refine_all(
        self, prompt: str, queries: list[Query], max_in_flight: int, file: ResultsFile | None, progress: bool
    ) -> list[RefinementResult]:
        keys = distinct_keys(prompt, queries)
        done = file.done if file is not None else {}
        results = {i: replace(done[key], id=queries[i].id) for i, key in enumerate(keys) if key in done}
        left = [i for i in range(len(queries)) if i not in results]
        fatal: list[Failure] = []

        def works() -> Iterator[Any]:
            for i in left:
                if fatal:
                    return
                yield refinement(self.settings, prompt, queries[i], self.verifier)

        bars = progress_of(len(queries), "refined", done=len(results), shown=progress)
        with bars as bar, closing(run_all(works(), self.submit_call, max_in_flight)) as finished:
            for position, result in finished:
                i = left[position]
                results[i] = result
                if file is not None:
                    file.add(keys[i], result)
                if result.error is not None and result.error.fatal:
                    fatal.append(result.error)
                bar.update()
        if fatal:
            logger.error(f"stopped after {len(results)} of {len(queries)} queries: {fatal[0]}")
        return [results[i] if i in results else _not_begun(prompt, queries[i], fatal[0]) for i in range(len(queries))]

    def submit_call(self, call: Call) -> Future[Reply]:
        """Send one call of a refinement to the model of its role."""
        model = self.models[call.role]
        return model.submit(call.messages, repeat=call.repeat, session=call.session, **call.sampling)

    def digest(self) -> str:
        """Identifies settings, models and verifier, so that a file of results is not continued with others."""
        names = {role: _name_of(model) for role, model in self.models.items()}
        if self.verifier is not None and "verifier" not in names:
            name = getattr(self.verifier, "__qualname__", type(self.verifier).__name__)
            names["verifier"] = repr(self.verifier) if isinstance(self.verifier, LabelVerifier) else str(name)
        return self.settings.digest(**names)

    def check(self) -> None:
        """Raise the [`LLMError`] that a first call would meet, of the models that can be checked."""
        for model in {id(model): model for model in self.models.values()}.values():
            check = getattr(model, "check", None)
            if check is not None:
                check()


def _name_of(model: ChatModel) -> str:
    """As its endpoint calls it, or where a local model was loaded from, or its class."""
    named = getattr(model, "model", None)
    loaded_from = getattr(getattr(named, "config", None), "name_or_path", None)
    return next((name for name in (named, loaded_from) if isinstance(name, str) and name), type(model).__name__)


def _not_begun(prompt: str, query: Query, failure: Failure) -> RefinementResult:
    return RefinementResult(query.id, query.text, "", prompt, prompt, "failed", error=failure)
