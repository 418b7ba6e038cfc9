"""Algorithm 1 of the ProRefine paper (arXiv 2506.05305) for one query: [`refine`], and its settings.

Failure is data here: a call that came to nothing keeps the prompt and is counted, and every query ends with a result.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from inspect import isawaitable
from typing import Any, Literal, get_args

from ..llm import ChatModel, Message, Reply, as_chat
from ..rewards import read_verdict
from ..rollout import fill
from .templates import RolePrompts, Unit, first_units, read_improved_prompt, says_correct
from .types import (
    Failure,
    Query,
    RefinementResult,
    RefinementStep,
    Role,
    RoleUsage,
    StopReason,
    Verdict,
    check_prompt,
    read_query,
)

# The paper decodes greedily; 2,048 tokens is the released code's limit for the other roles' replies.
GREEDY: dict[str, dict[str, Any]] = {
    "task": {"temperature": 0},
    "feedback": {"temperature": 0, "max_tokens": 2048},
    "optimizer": {"temperature": 0, "max_tokens": 2048},
    "verifier": {"temperature": 0, "max_tokens": 2048},
}

History = Literal[True, False, "task", "all"]
# Who is shown its own earlier steps.
_REMEMBERING: dict[History, tuple[Role, ...]] = {
    False: (),
    True: ("feedback", "optimizer"),
    "task": ("task",),
    "all": ("task", "feedback", "optimizer"),
}

Judge = Callable[[Query, str], "bool | Awaitable[bool | None] | None"]
"""A verifier that is no model: query and answer in; `True` (right), `False` (wrong) or `None` (no verdict) out.

A plain function runs on a thread that it shares with all others of the process, one call after another; an `async` one
on the event loop. What it raises is a failure of the verifier, not of the run. One that cannot work without accepted
answers says so with an attribute `needs_answers = True`; a query without any is then an error before the first call."""

Verifier = ChatModel | Judge
"""Who decides whether a query is refined at all: it judges the first answer, the one under the prompt as it was given.

Right: it is used as it is. Wrong: the prompt is refined. No verdict, the verifier failed or did not say: it is counted,
and by default the prompt is refined."""


@dataclass(frozen=True, kw_only=True)
class RefineSettings:
    """Everything about a refinement but its models.

    Args:
        tokens_per_step (`int`, *optional*, defaults to `10`): k (section "Experimental Setup").
        max_steps (`int`, *optional*, defaults to `25`): n (section "Experimental Setup").
        unit (`str`, *optional*, defaults to `"tokens"`):
            What a step adds: `"tokens"`: k tokens; `"sentence"` or `"paragraph"`: one of these (section "Implementation
            Details"; `tokens_per_step` is not read). Then the task model writes up to `final_max_tokens` whenever the
            prompt has changed, and the critic is shown the beginning.
        history (`bool` or `str`, *optional*, defaults to `False`): Who sees its own earlier steps for the query:
            `True`: critic and optimizer; `"task"`: the task model, as in the released code; `"all"`: all three, the
            full chat history of the paper, which found no consistent gain in it. The final answer is a fresh one.
        final_max_tokens (`int`, *optional*, defaults to `512`): For the final and the first answer.
        prompts ([`RolePrompts`], *optional*): The words of the roles.
        max_failures (`int`, *optional*, defaults to `3`): After so many failed calls no more refining is done for the
            query: it ends with the best answer there is and `error` set. A fatal failure ends it at once.
        stop_when_correct (`int`, *optional*): Stop when the critic has said CORRECT so often under one prompt (2 is
            sensible). Not in the paper; off by default.
        go_back (`int`, *optional*, defaults to `0`): For where refining makes things worse: if the verifier rejects the
            final answer, answer under up to so many earlier prompts, the latest first, and keep the first answer that
            it accepts; if there is none, the final one stays. Needs a verifier. Not in the paper.
        if_no_verdict (`str`, *optional*, defaults to `"refine"`): What to do if the verifier fails or does not say:
            `"refine"`, or `"accept"` the first answer.
        sampling (`dict[str, dict]`, *optional*): Sampling arguments by role (`task`, `feedback`, `optimizer`,
            `verifier`), over the defaults: temperature 0, and 2,048 tokens for all but the task model. `None` takes a
            default out. With another temperature for the task model every call is made.

    Raises:
        `ValueError`: If a number is below 1, or a name is not known.
    """

    tokens_per_step: int = 10
    max_steps: int = 25
    unit: Unit = "tokens"
    history: History = False
    final_max_tokens: int = 512
    prompts: RolePrompts = RolePrompts()
    max_failures: int = 3
    stop_when_correct: int | None = None
    go_back: int = 0
    if_no_verdict: Literal["refine", "accept"] = "refine"
    sampling: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self):
        least_of = dict.fromkeys(("tokens_per_step", "max_steps", "final_max_tokens", "max_failures"), 1)
        if self.stop_when_correct is not None:
            least_of["stop_when_correct"] = 1
        for name, least in (least_of | {"go_back": 0}).items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.history not in _REMEMBERING:
            raise ValueError(f"history must be one of True, False, 'task', 'all', got {self.history!r}")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit must be one of {', '.join(get_args(Unit))}, got {self.unit!r}")
        if self.if_no_verdict not in ("refine", "accept"):
            raise ValueError(f"if_no_verdict must be 'refine' or 'accept', got {self.if_no_verdict!r}")
        unknown = set(self.sampling or ()) - set(GREEDY)
        if unknown:
            raise ValueError(f"sampling is given by role ({', '.join(GREEDY)}); unknown: {', '.join(sorted(unknown))}")
        if "max_tokens" in (self.sampling or {}).get("task", {}):
            raise ValueError("the task model's max_tokens follow from tokens_per_step and final_max_tokens")

    def sampling_of(self, role: str) -> dict[str, Any]:
        """What is sent with a role's calls; a `None` of the user's takes a default out, for models that refuse it."""
        merged = {**GREEDY[role], **(self.sampling or {}).get(role, {})}
        return {name: value for name, value in merged.items() if value is not None}


def check_verifier(settings: RefineSettings, verifier: Verifier | None) -> None:
    """Raises `ValueError` if the settings ask for a verifier and there is none."""
    if settings.go_back and verifier is None:
        raise ValueError("go_back needs a verifier, which says when an answer is worse")


async def refine(
    query: Query | str | Mapping[str, Any],
    prompt: str,
    *,
    task: ChatModel,
    feedback: ChatModel,
    optimizer: ChatModel,
    verifier: Verifier | None = None,
    settings: RefineSettings = RefineSettings(),
) -> RefinementResult:
    """Algorithm 1: refine `prompt` for `query`, and answer.

    In step i the task model begins its answer anew under the present prompt, with at most i·k tokens, decoding
    greedily; the critic reads question and output, the optimizer prompt and feedback. It ends when the task model came
    to its end of sequence (`finish_reason` is not `length`) or after n steps. The answer is then a fresh one under the
    last prompt. A call whose reply is known beforehand is not made: the same prompt with the same limit, or with a
    higher one when the output was complete.

    The models and the verifier are those of [`ProRefiner`].

    Args:
        query ([`Query`], `str` or row): q, or a row with `question` and, for verifiers that need them, `answers`.
        prompt (`str`): p, the task model's system message to begin with.
        settings ([`RefineSettings`], *optional*): k, n, the roles' words, ...

    Returns:
        [`RefinementResult`]: Also if calls failed: see its `error`.

    Raises:
        `ValueError`: If the prompt or the question is empty, or `settings` ask for a verifier and there is none.
    """
    check_prompt(prompt)
    check_verifier(settings, verifier)
    started, query, k = time.perf_counter(), read_query(query), settings.tokens_per_step
    models = {"task": task, "feedback": feedback, "optimizer": optimizer, "verifier": verifier}
    roles = _Roles(models, query, prompt, settings)
    first: Reply | None = None
    verdict: Verdict | None = None
    reason: StopReason | None = None
    steps: list[RefinementStep] = []
    refined, times_correct = prompt, 0  # p*, and how often the critic had nothing to say against it
    went_back = 0

    if verifier is not None:
        first, verdict = await roles.verify(prompt)
        if verdict == "right" or (first is not None and verdict == "none" and settings.if_no_verdict == "accept"):
            reason = "verified"
        elif roles.given_up:
            reason = "failed"

    while reason is None:
        i, step_started = len(steps) + 1, time.perf_counter()
        steps.append(step := RefinementStep(refined, refined))
        roles.step = i
        try:
            output = await roles.task(refined, i * k if settings.unit == "tokens" else settings.final_max_tokens)
            step.output, step.tokens = first_units(output.text, i, settings.unit), output.usage.completion_tokens
            step.complete = _ended(output) and len(step.output) == len(output.text)
            roles.keep(2 if step.complete else 0, step.output, output.finish_reason if step.complete else "")

            step.feedback = await roles.feedback(step.output, step.complete)
            times_correct += says_correct(step.feedback)
            if times_correct != settings.stop_when_correct:
                improved, step.problem = read_improved_prompt(await roles.optimizer(refined, step.feedback))
                if improved is not None and improved != refined.strip():
                    step.new_prompt, times_correct = improved, 0
        except _NoReply as failed:
            step.problem = f"{failed} failed"
        refined, step.seconds = step.new_prompt, time.perf_counter() - step_started
        if roles.given_up:
            reason = "failed"
        elif step.complete:
            reason = "finished"
        elif times_correct == settings.stop_when_correct:
            reason = "satisfied"
        elif i == settings.max_steps:
            reason = "max_steps"

    if reason != "verified" and not (reason == "failed" and roles.failures[-1].role == "task"):
        try:
            roles.step = -1
            final = await roles.task(refined, settings.final_max_tokens)
            roles.keep(3, final.text, final.finish_reason)
            if settings.go_back and await roles.judge(final.text) == "wrong":
                judged = prompt if verdict == "wrong" else None
                tried = [step.prompt for step in steps if step.new_prompt != step.prompt != judged]
                went_back = await roles.go_back(tried[: -settings.go_back - 1 : -1])
                refined = tried[-went_back] if went_back else refined
        except _NoReply:
            reason = "failed"
    _, answer, finish_reason = roles.best
    return RefinementResult(
        id=query.id,
        query=query.text,
        answer=answer,
        initial_prompt=prompt,
        prompt=refined,
        stop_reason=reason,
        finish_reason=finish_reason,
        initial_answer=None if first is None else first.text,
        verdict=verdict,
        steps=tuple(steps),
        error=roles.failures[-1] if reason == "failed" else None,
        failures=tuple(roles.failures),
        went_back=went_back,
        usage=roles.usage,
        seconds=time.perf_counter() - started,
    )


class _NoReply(Exception):
    """A call came to nothing, which is written down already. Its text is the role."""


class _Roles:
    """The models in their roles for one query: what each is told, and what its calls came to."""

    def __init__(self, models: Mapping[str, Any], query: Query, prompt: str, settings: RefineSettings):
        self.models, self.query, self.settings = models, query, settings
        self.session = query.digest(prompt)[:32]
        self.step = 0
        self.failures: list[Failure] = []
        self.usage: dict[str, RoleUsage] = {}
        self.known: dict[str, tuple[int, Reply]] = {}  # per prompt the task model's longest output and its limit
        self.past: dict[str, list[Message]] = {role: [] for role in _REMEMBERING[settings.history]}
        self.best: tuple[int, str, str] = (-1, "", "")  # rank, text, finish reason of what is left if all else fails

    async def task(self, prompt: str, max_tokens: int) -> Reply:
        """The task model's output under p*, of at most `max_tokens`.

        Not asked again for what greedy decoding would only repeat: the prompt is the same and so is the limit, or the
        output had come to its end below the limit there was.
        """
        past = self.past.get("task", []) if self.step > 0 else []
        limit, known = self.known.get(prompt, (0, Reply()))
        greedy = self.settings.sampling_of("task").get("temperature") == 0
        if greedy and not past and (limit == max_tokens or (0 < limit < max_tokens and _ended(known))):
            return known
        question: Message = {"role": "user", "content": fill(self.settings.prompts.task, query=self.query.text)}
        messages: list[Message] = [{"role": "system", "content": prompt}, *self.query.context, *past, question]
        reply = await self._call("task", messages, max_tokens=max_tokens)
        if max_tokens > limit and not past:
            self.known[prompt] = (max_tokens, reply)
        return reply

    async def feedback(self, output: str, complete: bool) -> str:
        """f_i: what the critic says to the output so far."""
        state = self.settings.prompts.complete if complete else self.settings.prompts.cut_off
        return await self._ask("feedback", query=self.query.shown, output=output, state=state)

    async def optimizer(self, prompt: str, feedback: str) -> str:
        """The optimizer's reply, with the next p* in it."""
        return await self._ask("optimizer", prompt=prompt, feedback=feedback)

    async def verify(self, prompt: str) -> tuple[Reply | None, Verdict]:
        """The first answer, under the initial prompt, and its verdict."""
        try:
            first = await self.task(prompt, self.settings.final_max_tokens)
        except _NoReply:
            return None, "none"
        self.keep(1, first.text, first.finish_reason)
        return first, await self.judge(first.text)

    async def judge(self, answer: str) -> Verdict:
        """What the verifier says of a whole answer. What goes wrong with it is no verdict, and counted."""
        verifier = self.models["verifier"]
        try:
            if isinstance(verifier, ChatModel):
                verdict = read_verdict(await self._ask("verifier", query=self.query.shown, output=answer))
            else:
                verdict = await _judged(verifier, self.query, answer)
        except _NoReply:
            return "none"
        except Exception as error:  # the verifier is the user's code
            self.failures.append(Failure("verifier", self.step, type(error).__name__, str(error)[:300]))
            return "none"
        return "none" if verdict is None else "right" if verdict else "wrong"

    async def go_back(self, prompts: Sequence[str]) -> int:
        """Answer under these until the verifier accepts; returns under the how manieth it does, 0 where under none."""
        for number, prompt in enumerate(prompts, start=1):
            if self.given_up:
                return 0
            try:
                answer = await self.task(prompt, self.settings.final_max_tokens)
            except _NoReply:
                continue
            if await self.judge(answer.text) == "right":
                self.keep(3, answer.text, answer.finish_reason)
                return number
        return 0

    @property
    def given_up(self) -> bool:
        failures = self.failures
        return len(failures) >= self.settings.max_failures or bool(failures and failures[-1].fatal)

    def keep(self, rank: int, text: str, finish_reason: str) -> None:
        """Remember the best answer so far: final (3), complete under a refined prompt (2), first (1), cut off (0)."""
        if rank >= self.best[0]:
            self.best = (rank, text, finish_reason)

    async def _ask(self, role: Role, **values: str) -> str:
        """What a role other than the task model says to its filled-in template."""
        prompts, past = self.settings.prompts, self.past.get(role, [])
        request: Message = {"role": "user", "content": fill(getattr(prompts, role), **values)}
        return (await self._call(role, [{"role": "system", "content": prompts.role(role)}, *past, request])).text

    async def _call(self, role: Role, messages: Sequence[Message], **limit: int) -> Reply:
        """Raises `_NoReply` if the call failed."""
        sampling, session = {**self.settings.sampling_of(role), **limit}, f"{self.session}:{role}"
        reply = await as_chat(self.models[role])(messages, repeat=self.query.repeat, session=session, **sampling)
        self.usage[role] = self.usage.get(role, RoleUsage()).plus(reply)
        if reply.error is not None:
            self.failures.append(Failure(role, self.step, reply.error.kind, str(reply.error), reply.error.fatal))
            raise _NoReply(role)
        if role in self.past and self.step > 0:
            self.past[role] += [messages[-1], {"role": "assistant", "content": reply.text}]
        return reply


def _ended(reply: Reply) -> bool:
    """Whether the model came to its end of sequence rather than to the limit."""
    return reply.finish_reason != "length"


async def _judged(judge: Judge, query: Query, answer: str) -> bool | None:
    """The verdict of a callable.

    Raises:
        `TypeError`: If it is none of the three, a text for example, which would count as true.
        Whatever `judge` raises.
    """
    verdict = await asyncio.get_running_loop().run_in_executor(_judges(os.getpid()), _said, judge, query, answer)
    if isawaitable(verdict):
        verdict = await verdict
    if isinstance(verdict, str) or verdict not in (True, False, None):
        raise TypeError(f"a verifier returns True, False or None, not {verdict!r:.100}")
    return None if verdict is None else bool(verdict)


def _said(judge: Judge, query: Query, answer: str) -> Any:
    try:
        return judge(query, answer)
    except StopIteration:  # no future can hold it
        raise RuntimeError("the verifier raised StopIteration") from None


@cache
def _judges(process: int) -> ThreadPoolExecutor:
    """The thread of plain verifiers in this process; not one of the loop's own, for which a verifier may wait."""
    return ThreadPoolExecutor(1, "agentic-prompting-verifier")


class LabelVerifier:
    """The paper's optimal verifier: compares with the accepted answers. An upper bound, for experiments.

    Args:
        score (`Callable[[str, Sequence[str]], float]`): Score of an answer given the accepted ones, such as
            [`exact_match`] or [`integer_match`].
        threshold (`float`, *optional*, defaults to `1.0`): The least score that is right.
    """

    needs_answers = True

    def __init__(self, score: Callable[[str, Sequence[str]], float], threshold: float = 1.0):
        if not callable(score):
            raise ValueError(f"score must be a function of an answer and the accepted answers, got {score!r}")
        self.score, self.threshold = score, threshold

    def __call__(self, query: Query, answer: str) -> bool:
        return self.score(answer, query.answers) >= self.threshold

    def __repr__(self) -> str:
        return f"LabelVerifier({getattr(self.score, '__name__', repr(self.score))}, threshold={self.threshold})"
