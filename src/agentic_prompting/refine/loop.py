"""Algorithm 1 of the ProRefine paper for one query, as straight-line code that never waits.

[`refinement`] is a generator: it yields each call that it wants made and is sent the reply. Who makes the calls, and
how many queries are on their way at once, is not known here (`driver.py`), and neither are threads or futures.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..llm import ChatModel, Message, Reply
from ..rewards import read_verdict
from .parsing import first_units, read_improved_prompt, says_correct
from .query import Query
from .result import Failure, RefinementResult, RefinementStep, Role, RoleUsage, StopReason, Verdict
from .settings import RefineSettings
from .templates import fill
from .verifiers import Verifier, judged


@dataclass(frozen=True)
class Call:
    """A call that a refinement wants made.

    Args:
        role (`str`): Which of the models to ask.
        messages (`list[Message]`): The conversation.
        sampling (`dict`): `max_tokens`, `temperature`, ...
        session (`str`): The same for all calls of one role for one query.
        repeat (`int`): See [`ChatModel`].
    """

    role: Role
    messages: list[Message]
    sampling: dict[str, Any]
    session: str
    repeat: int


T = TypeVar("T")
Calls = Generator[Call, Reply, T]
"""A computation that makes calls on its way to a `T`."""


def refinement(
    settings: RefineSettings, prompt: str, query: Query, verifier: Verifier | None
) -> Calls[RefinementResult]:
    """Refine `prompt` for `query`. Ends with a result whatever happens to the calls.

    Args:
        settings ([`RefineSettings`]): k, n, the roles' words, ...
        prompt (`str`): p, the initial prompt; the task model's system message.
        query ([`Query`]): q.
        verifier ([`ChatModel`] or [`Judge`], *optional*): Judges the first answer.
    """
    return _Refinement(settings, prompt, query, verifier).play()


class _Refinement:
    """The state of one refinement: the prompt so far, what is known, and what went wrong."""

    def __init__(self, settings: RefineSettings, prompt: str, query: Query, verifier: Verifier | None):
        self.settings, self.initial_prompt, self.query, self.verifier = settings, prompt, query, verifier
        self.prompt = prompt  # p*
        self.step = 0
        self.steps: list[RefinementStep] = []
        self.failures: list[Failure] = []
        self.usage: dict[str, RoleUsage] = {}
        self.initial_answer: str | None = None
        self.verdict: Verdict | None = None
        self.times_correct = 0  # how often the critic had nothing to say against the present prompt
        self.known: dict[str, tuple[int, Reply]] = {}  # per prompt the task model's longest output and its limit
        self.best: tuple[int, str, str] = (-1, "", "")  # rank, text, finish reason of what is left if all else fails
        self.past: dict[str, list[Message]] = {"feedback": [], "optimizer": []}
        self.session = query.digest(prompt)[:32]

    def play(self) -> Calls[RefinementResult]:
        started = time.perf_counter()
        if self.verifier is not None:
            yield from self._verify()
        if self.verdict == "right" or (self.verdict == "none" and self._accepts_unjudged):
            reason: StopReason = "verified"
        elif self._given_up:
            reason = "failed"
        else:
            reason = yield from self._refine()
        if reason != "verified":
            reason = yield from self._answer(reason)
        return self._result(reason, time.perf_counter() - started)

    # The parts, in their order -----------------------------------------------------------------------------------

    def _verify(self) -> Calls[None]:
        """The first answer, under the initial prompt, and its verdict."""
        self.verdict = "none"
        reply = yield from self._ask_task(self.settings.final_max_tokens)
        if reply is None:
            return
        self.initial_answer = reply.text
        self._keep(1, reply.text, reply.finish_reason)
        verdict = yield from self._judge(reply.text)
        if verdict is not None:
            self.verdict = "right" if verdict else "wrong"

    def _judge(self, answer: str) -> Calls[bool | None]:
        assert self.verifier is not None
        if isinstance(self.verifier, ChatModel):
            said = yield from self._ask("verifier", query=self.query.shown, output=answer)
            return None if said is None else read_verdict(said)
        try:
            return judged(self.verifier, self.query, answer)
        except Exception as error:  # the verifier is the user's code
            self.failures.append(Failure("verifier", self.step, type(error).__name__, str(error)[:300]))
            return None

    def _refine(self) -> Calls[StopReason]:
        """The loop of Algorithm 1. Returns why it ended."""
        for number in range(1, self.settings.max_steps + 1):
            self.step, started = number, time.perf_counter()
            step = yield from self._one_step()
            self.steps.append(replace(step, seconds=time.perf_counter() - started))
            if step.new_prompt != self.prompt:
                self.prompt, self.times_correct = step.new_prompt, 0
            if self._given_up:
                return "failed"
            if step.complete:
                return "finished"
            if self.times_correct == self.settings.stop_when_correct:
                return "satisfied"
        return "max_steps"

    def _one_step(self) -> Calls[RefinementStep]:
        """o_i, f_i and the next p*. Whatever fails, the prompt is kept."""
        step = RefinementStep(self.prompt, self.prompt)
        reply = yield from self._ask_task(self._step_limit)
        if reply is None:
            return replace(step, problem="task failed")
        output, complete = self._shown(reply)
        self._keep(2 if complete else 0, output, reply.finish_reason if complete else "")
        step = replace(step, output=output, complete=complete, tokens=reply.usage.completion_tokens)

        prompts = self.settings.prompts
        state = prompts.complete if complete else prompts.cut_off
        feedback = yield from self._ask("feedback", query=self.query.shown, output=output, state=state)
        if feedback is None:
            return replace(step, problem="feedback failed")
        step = replace(step, feedback=feedback)
        self.times_correct += says_correct(feedback)
        if self.times_correct == self.settings.stop_when_correct:
            return step

        rewritten = yield from self._ask("optimizer", prompt=self.prompt, feedback=feedback)
        if rewritten is None:
            return replace(step, problem="optimizer failed")
        improved, problem = read_improved_prompt(rewritten)
        if improved is None or improved == self.prompt.strip():
            return replace(step, problem=problem)
        return replace(step, new_prompt=improved)

    def _answer(self, reason: StopReason) -> Calls[StopReason]:
        """The final answer, a fresh one under p*. Returns why the query ended, all told."""
        self.step = -1
        if reason == "failed" and self.failures[-1].role == "task":
            return reason
        reply = yield from self._ask_task(self.settings.final_max_tokens)
        if reply is None:
            return "failed"
        self._keep(3, reply.text, reply.finish_reason)
        return reason

    def _result(self, reason: StopReason, seconds: float) -> RefinementResult:
        _, answer, finish_reason = self.best
        return RefinementResult(
            id=self.query.id,
            query=self.query.text,
            answer=answer,
            initial_prompt=self.initial_prompt,
            prompt=self.prompt,
            stop_reason=reason,
            finish_reason=finish_reason,
            initial_answer=self.initial_answer,
            verdict=self.verdict,
            steps=tuple(self.steps),
            error=self.failures[-1] if reason == "failed" else None,
            failures=tuple(self.failures),
            usage=self.usage,
            seconds=seconds,
        )

    # Calls -------------------------------------------------------------------------------------------------------

    def _ask_task(self, max_tokens: int) -> Calls[Reply | None]:
        """The task model's output under p*, of at most `max_tokens`; `None` if the call failed.

        Not asked again for what greedy decoding would only repeat: the prompt is the same and so is the limit, or the
        output had come to its end below the limit there was.
        """
        if self.prompt in self.known and self.settings.greedy:
            limit, known = self.known[self.prompt]
            if limit == max_tokens or (limit < max_tokens and _ended(known)):
                return known
        question = fill(self.settings.prompts.task, query=self.query.text)
        messages: list[Message] = [{"role": "system", "content": self.prompt}, *self.query.context]
        messages.append({"role": "user", "content": question})
        reply = yield from self._call("task", messages, max_tokens=max_tokens)
        if reply is not None and max_tokens > self.known.get(self.prompt, (0, reply))[0]:
            self.known[self.prompt] = (max_tokens, reply)
        return reply

    def _ask(self, role: Role, **values: str) -> Calls[str | None]:
        """What a role other than the task model says to its filled-in template; `None` if the call failed."""
        prompts, past = self.settings.prompts, self.past.get(role, [])
        request: Message = {"role": "user", "content": fill(getattr(prompts, role), **values)}
        reply = yield from self._call(role, [{"role": "system", "content": prompts.role(role)}, *past, request])
        if reply is None:
            return None
        if self.settings.history:
            past += [request, {"role": "assistant", "content": reply.text}]
        return reply.text

    def _call(self, role: Role, messages: Sequence[Message], **sampling: Any) -> Calls[Reply | None]:
        sampling = {**self.settings.sampling_of(role), **sampling}
        reply = yield Call(role, list(messages), sampling, f"{self.session}:{role}", self.query.repeat)
        self.usage[role] = self.usage.get(role, RoleUsage()).plus(reply)
        if reply.error is None:
            return reply
        error = reply.error
        self.failures.append(Failure(role, self.step, error.kind, str(error), error.fatal))
        return None

    # Small ones --------------------------------------------------------------------------------------------------

    @property
    def _given_up(self) -> bool:
        failures = self.failures
        return len(failures) >= self.settings.max_failures or bool(failures and failures[-1].fatal)

    @property
    def _accepts_unjudged(self) -> bool:
        return self.settings.if_no_verdict == "accept" and self.initial_answer is not None

    @property
    def _step_limit(self) -> int:
        """i·k tokens; for larger units the whole output, of which `_shown` takes the beginning."""
        if self.settings.unit == "tokens":
            return self.step * self.settings.tokens_per_step
        return self.settings.final_max_tokens

    def _shown(self, reply: Reply) -> tuple[str, bool]:
        """o_i as the critic sees it, and whether the end of sequence is in it."""
        text = reply.text
        if self.settings.unit != "tokens":
            text = first_units(text, self.step, self.settings.unit)
        return text, _ended(reply) and len(text) == len(reply.text)

    def _keep(self, rank: int, text: str, finish_reason: str) -> None:
        """Remember the best answer so far: final (3), complete under a refined prompt (2), first (1), cut off (0)."""
        if rank >= self.best[0]:
            self.best = (rank, text, finish_reason)


def _ended(reply: Reply) -> bool:
    """Whether the model came to its end of sequence rather than to the limit."""
    return reply.finish_reason != "length"
