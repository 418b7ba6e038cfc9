"""Algorithm 1 of the ProRefine paper (arXiv 2506.05305) for one query: [`refine`], its settings and its verifiers.

Failure is data here: a failed call keeps the prompt and is counted, and every query ends with a result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from ..llm import (
    BadReply,
    ChatModel,
    LLMError,
    Message,
    Reply,
    as_chat,
    fill,
    spans,
    strip_thoughts,
)
from ..llm.guard import Escaped, call_guarded_on, text_of
from ..rewards import read_verdict
from .templates import RolePrompts, Unit, first_units, read_improved_prompt
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
    **{
        role: {"temperature": 0, "max_tokens": 2048}
        for role in ("feedback", "optimizer", "verifier")
    },
}

History = Literal[True, False, "task", "all"]
# The roles that are shown their own earlier steps.
_REMEMBERING: dict[History, tuple[Role, ...]] = {
    False: (),
    True: ("feedback", "optimizer"),
    "task": ("task",),
    "all": ("task", "feedback", "optimizer"),
}

Judge = Callable[[Query, str], "bool | Awaitable[bool | None] | None"]
"""A verifier that is no model: query and answer in; `True` (right), `False` (wrong) or `None` (no verdict) out.

A plain function runs on one thread that all plain verifiers of the process share; an `async` one on the event loop. An
exception in it is a failure of the verifier and does not end the run. A verifier that needs accepted answers has an
attribute `needs_answers = True`; a query without any is then an error before the first call."""

Verifier = ChatModel | Judge
"""Decides whether a query is refined at all: it judges the first answer, which is given under the initial prompt.

Right: the answer is final. Wrong, or no verdict: the prompt is refined. Missing verdicts are counted."""


@dataclass(frozen=True, kw_only=True)
class RefineSettings:
    """Everything about a refinement but its models.

    Args:
        tokens_per_step (`int`, *optional*, defaults to `10`): k (section "Experimental Setup").
        max_steps (`int`, *optional*, defaults to `25`): n (section "Experimental Setup").
        unit (`str`, *optional*, defaults to `"tokens"`):
            The unit of a step: `"tokens"`: k tokens; `"sentence"` or `"paragraph"`: one of these (section
            "Implementation Details"; `tokens_per_step` is not read). Then the task model writes up to
            `final_max_tokens` whenever the prompt has changed, and the critic is shown the beginning.
        history (`bool` or `str`, *optional*, defaults to `False`): Which roles see their own earlier steps for the
            query: `True`: critic and optimizer; `"task"`: the task model, as in the released code; `"all"`: all three,
            the full chat history of the paper, which found no consistent gain in it. The final answer is a fresh one.
        final_max_tokens (`int`, *optional*, defaults to `512`): For the final and the first answer.
        prompts ([`RolePrompts`], *optional*): The messages of the roles.
        max_failures (`int`, *optional*, defaults to `3`): After so many failed calls no more refining is done for the
            query: it ends with the best answer there is and `error` set. A fatal failure ends it at once.
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
    sampling: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self):
        for name in ("tokens_per_step", "max_steps", "final_max_tokens", "max_failures"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.history not in _REMEMBERING:
            raise ValueError(
                f"history must be one of True, False, 'task', 'all', got {self.history!r}"
            )
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit must be one of {', '.join(get_args(Unit))}, got {self.unit!r}")
        if unknown := set(self.sampling or ()) - set(GREEDY):
            raise ValueError(
                f"sampling is given by role ({', '.join(GREEDY)}); unknown: {', '.join(sorted(unknown))}"
            )
        if "max_tokens" in (self.sampling or {}).get("task", {}):
            raise ValueError(
                "the task model's max_tokens follow from tokens_per_step and final_max_tokens"
            )

    def sampling_of(self, role: str) -> dict[str, Any]:
        """The sampling options of a role's calls. A `None` of the user removes a default, for models that refuse it."""
        merged = {**GREEDY[role], **(self.sampling or {}).get(role, {})}
        return {name: value for name, value in merged.items() if value is not None}


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
        `ValueError`: If the prompt or the question is empty.
    """
    check_prompt(prompt)
    query = read_query(query)
    models = {"task": task, "feedback": feedback, "optimizer": optimizer, "verifier": verifier}
    with spans.workflow("refinement") as own:
        result = await _refined(query, prompt, models, settings)
        own.set(
            {
                f"{spans.OWN}.stop_reason": result.stop_reason,
                f"{spans.OWN}.steps": len(result.steps),
            }
        )
        if result.error is not None:
            own.fail(result.error.kind)
    return result


async def _refined(
    query: Query, prompt: str, models: Mapping[str, Any], settings: RefineSettings
) -> RefinementResult:
    started = time.perf_counter()
    result = RefinementResult(query.id, query.text, "", prompt, prompt, "max_steps")
    roles = _Roles(models, query, settings, result)

    if models["verifier"] is not None:
        await roles.verify()
    for i in range(1, settings.max_steps + 1):
        if (
            roles.ended
        ):  # the first answer is right, the last output complete, or too much has failed
            break
        with roles.step(i) as step:
            step.output, step.complete, step.tokens = await roles.task(step.prompt, i)
            step.feedback = await roles.feedback(step.output, step.complete)
            step.new_prompt, step.problem = await roles.optimizer(step.prompt, step.feedback)
    result.stop_reason = roles.ended or "max_steps"
    if result.stop_reason != "verified":
        await roles.answer()
    result.seconds = time.perf_counter() - started
    return result


class _NoReply(Exception):
    """A call failed, and the failure is recorded. The text is the role."""


class _Roles:
    """The models in their roles for one query: sends the messages of each role and records the replies in `result`."""

    def __init__(
        self,
        models: Mapping[str, Any],
        query: Query,
        settings: RefineSettings,
        result: RefinementResult,
    ):
        self.models, self.query, self.settings, self.result = models, query, settings, result
        self.session = query.digest(result.initial_prompt)[:32]
        self.number = 0  # of the step, as in `Failure`
        self.known: dict[
            str, tuple[int, Reply]
        ] = {}  # per prompt the task model's longest output and its limit
        self.past: dict[str, list[Message]] = {role: [] for role in _REMEMBERING[settings.history]}
        self.rank = -1  # of the answer: see `keep`

    async def verify(self) -> None:
        """Have the first answer, under the initial prompt, judged."""
        self.result.verdict = "none"
        with suppress(_NoReply):
            first = await self._write(self.result.prompt, self.settings.final_max_tokens)
            self.keep(1, first.text, first.finish_reason)
            self.result.initial_answer = first.text
            self.result.verdict = await self.judge(first.text)

    @contextmanager
    def step(self, number: int) -> Iterator[RefinementStep]:
        """One pass of the loop; a call in it that fails keeps the prompt."""
        result, began = self.result, time.perf_counter()
        step = RefinementStep(result.prompt, result.prompt)
        self.number, result.steps = number, (*result.steps, step)
        try:
            with spans.workflow("refinement step", number=number):
                yield step
        except _NoReply as failed:
            step.problem = f"{failed} failed"
        result.prompt, step.seconds = step.new_prompt, time.perf_counter() - began

    @property
    def ended(self) -> StopReason | None:
        """The reason why no further step is made; `None` if there is one."""
        steps = self.result.steps
        if self.result.verdict == "right":
            return "verified"
        return "failed" if self.given_up else "finished" if steps and steps[-1].complete else None

    @property
    def given_up(self) -> bool:
        failures = self.result.failures
        return len(failures) >= self.settings.max_failures or bool(failures and failures[-1].fatal)

    def keep(self, rank: int, text: str, finish_reason: str) -> None:
        """Remember the best answer so far: final (3), complete under a refined prompt (2), first (1), cut off (0)."""
        if rank >= self.rank:
            self.rank, self.result.answer, self.result.finish_reason = rank, text, finish_reason

    async def task(self, prompt: str, i: int) -> tuple[str, bool, int]:
        """o_i: at most i·k tokens (or i sentences); whether it ends where the model ended it; its tokens."""
        settings = self.settings
        limit = (
            i * settings.tokens_per_step if settings.unit == "tokens" else settings.final_max_tokens
        )
        reply = await self._write(prompt, limit)
        output = first_units(reply.text, i, settings.unit)
        complete = _ended(reply) and len(output) == len(reply.text)
        self.keep(2 if complete else 0, output, reply.finish_reason if complete else "")
        return output, complete, reply.usage.completion_tokens

    async def feedback(self, output: str, complete: bool) -> str:
        """f_i: the critic's remarks on the output so far, without its thought."""
        state = self.settings.prompts.complete if complete else self.settings.prompts.cut_off
        reply = await self._ask("feedback", query=self.query.shown, output=output, state=state)
        remarks = strip_thoughts(reply)
        if not remarks and reply.strip():
            self._failed(
                Failure(
                    "feedback",
                    self.number,
                    BadReply.__name__,
                    "the reply ended inside of its thought",
                )
            )
            raise _NoReply("feedback")
        return remarks

    async def optimizer(self, prompt: str, feedback: str) -> tuple[str, str | None]:
        """The next p*, and the reason if the reply has no new prompt."""
        improved, problem = read_improved_prompt(
            await self._ask("optimizer", prompt=prompt, feedback=feedback)
        )
        return prompt if improved is None or improved == prompt.strip() else improved, problem

    async def judge(self, answer: str) -> Verdict:
        """The verdict on a whole answer. A failure of the verifier is counted and gives no verdict."""
        verifier = self.models["verifier"]
        try:
            if isinstance(verifier, ChatModel):
                verdict = read_verdict(
                    await self._ask("verifier", query=self.query.shown, output=answer)
                )
            else:
                verdict = await _judged(verifier, self.query, answer)
        except _NoReply:
            return "none"
        except Exception as error:  # the verifier is the user's code
            raised = error.original if isinstance(error, Escaped) else error
            self._failed(
                Failure("verifier", self.number, type(raised).__name__, text_of(raised, 300))
            )
            return "none"
        return "none" if verdict is None else "right" if verdict else "wrong"

    async def answer(self) -> None:
        """The final answer, a fresh one under the last prompt."""
        result, self.number = self.result, -1
        try:
            if result.stop_reason == "failed":
                result.error = result.failures[-1]
                if result.error.role == "task":
                    return
            final = await self._write(result.prompt, self.settings.final_max_tokens)
            self.keep(3, final.text, final.finish_reason)
        except _NoReply:
            result.stop_reason, result.error = "failed", result.failures[-1]

    async def _write(self, prompt: str, max_tokens: int) -> Reply:
        """The task model's output under a prompt, of at most `max_tokens`.

        Not asked again for what greedy decoding would only repeat: the prompt is the same and so is the limit, or the
        output had come to its end below the limit there was.
        """
        past = self.past.get("task", []) if self.number > 0 else []
        limit, known = self.known.get(prompt, (0, Reply()))
        greedy = self.settings.sampling_of("task").get("temperature") == 0
        if (
            greedy
            and not past
            and (limit == max_tokens or (0 < limit < max_tokens and _ended(known)))
        ):
            return known
        question: Message = {
            "role": "user",
            "content": fill(self.settings.prompts.task, query=self.query.text),
        }
        messages: list[Message] = [
            {"role": "system", "content": prompt},
            *self.query.context,
            *past,
            question,
        ]
        reply = await self._call("task", messages, max_tokens=max_tokens)
        if max_tokens > limit and not past:
            self.known[prompt] = (max_tokens, reply)
        return reply

    async def _ask(self, role: Role, **values: str) -> str:
        """The reply of a role other than the task model to its filled-in template."""
        prompts, past = self.settings.prompts, self.past.get(role, [])
        request: Message = {"role": "user", "content": fill(getattr(prompts, role), **values)}
        system: Message = {"role": "system", "content": prompts.role(role)}
        return (await self._call(role, [system, *past, request])).text

    async def _call(self, role: Role, messages: Sequence[Message], **limit: int) -> Reply:
        """Raises `_NoReply` if the call failed."""
        sampling, session = {**self.settings.sampling_of(role), **limit}, f"{self.session}:{role}"
        reply = await as_chat(self.models[role])(
            messages, repeat=self.query.repeat, session=session, **sampling
        )
        usage = self.result.usage
        usage[role] = usage.get(role, RoleUsage()) + RoleUsage.of(reply)
        if (error := reply.error) is not None:
            what = str(LLMError(error.message, "", error.attempts, error.status))
            self._failed(Failure(role, self.number, error.kind, what, error.fatal, error.where))
            raise _NoReply(role)
        if role in self.past and self.number > 0:
            self.past[role] += [messages[-1], {"role": "assistant", "content": reply.text}]
        return reply

    def _failed(self, failure: Failure) -> None:
        self.result.failures = (*self.result.failures, failure)


def _ended(reply: Reply) -> bool:
    """Whether the model reached its end of sequence and not the limit."""
    return reply.finish_reason != "length"


async def _judged(judge: Judge, query: Query, answer: str) -> bool | None:
    """The verdict of a callable. Raises its exceptions, and `TypeError` for a text, which would count as true."""
    verdict = await call_guarded_on(_judges(os.getpid()), judge, query, answer)
    if isinstance(verdict, str) or verdict not in (True, False, None):
        raise TypeError(f"a verifier returns True, False or None, not {verdict!r:.100}")
    return None if verdict is None else bool(verdict)


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
            raise ValueError(
                f"score must be a function of an answer and the accepted answers, got {score!r}"
            )
        self.score, self.threshold = score, threshold

    def __call__(self, query: Query, answer: str) -> bool:
        return self.score(answer, query.answers) >= self.threshold

    def __repr__(self) -> str:
        return f"LabelVerifier({getattr(self.score, '__name__', repr(self.score))}, threshold={self.threshold})"
