"""A chat model whose calls are counted and recorded, and a system that looks for its own mistakes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentic_prompting.evaluation import Answer, PromptedSystem, System
from agentic_prompting.evaluation.systems import Row, answer_of_replies
from agentic_prompting.llm import (
    BudgetExceeded,
    ChatModel,
    LLMError,
    Message,
    ReplayCache,
    Reply,
    as_chat,
    with_system,
)
from agentic_prompting.rewards import AccuracyJudge

from .templates import REFLECT, REVISE


class SelfReflection(PromptedSystem):
    """A model that answers, looks for its own mistakes and answers again: three calls a question."""

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        messages = with_system(self.prompt, [{"role": "user", "content": row["question"]}])
        replies: list[Reply] = []
        for message in (REFLECT, REVISE, None):
            replies.append(await self.call(messages, seed))
            messages = [*messages, {"role": "assistant", "content": replies[-1].text}]
            if message is None or replies[-1].error is not None:
                break
            messages.append({"role": "user", "content": message})
        return answer_of_replies(replies, time.perf_counter() - started, messages[-5:])


class JudgedSystem(System):
    """A system whose answers a judge compares with the accepted ones, as they come: the metric
    `judged`.

    Args:
        system ([`System`]): The system that answers.
        judge ([`AccuracyJudge`]): The judge of the answers; a question without a verdict stays
            ungraded.
    """

    def __init__(self, system: System, judge: AccuracyJudge):
        self.system = system
        self.judge = judge
        self.fit_calls = system.fit_calls
        self.max_in_flight = system.max_in_flight

    @property
    def settings(self) -> Mapping[str, Any]:
        chat = self.judge.chat
        judge = str(getattr(chat, "model", type(chat).__name__))
        return {**self.system.settings, "judge": judge}

    @property
    def version(self) -> str | None:
        return self.system.version

    def row_version(self, row: Row) -> str | None:
        return self.system.row_version(row)

    async def answer(self, row: Row, seed: int) -> Answer:
        answer = await self.system.answer(row, seed)
        if answer.whole is None:
            return answer
        verdict = await self.judge(row["question"], answer.whole, row["answers"])
        return replace(answer, judged=verdict)


class CallCount:
    """A counter of calls with a limit.

    Models can share one, because an optimiser's budget is for all its calls.

    Args:
        most (`int`, *optional*): The number of calls that may be made; any number by default.

    Attributes:
        end ([`LLMError`], *optional*): A fatal failure, such as a spent budget or a rejected key:
            no further call is made.
    """

    def __init__(self, most: int | None = None):
        self.most = most
        self.calls = 0
        self.end: LLMError | None = None
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Count one more call and return whether it may be made."""
        with self._lock:
            if self.most is not None and self.calls >= self.most:
                return False
            self.calls += 1
            return True

    def affords(self, calls: int) -> bool:
        """Whether `calls` more may be made."""
        if self.end is not None:
            return False
        return self.most is None or self.calls + calls <= self.most


class MeteredChat:
    """A [`ChatModel`] around another one.

    Args:
        chat ([`ChatModel`]): The model that is asked.
        cache ([`ReplayCache`], *optional*): Replies are recorded in it as they come, so that an
            evaluation that was killed asks nothing twice. For models that have no cache of their
            own.
        count ([`CallCount`], *optional*): Counts calls, replayed ones too, or a resumed run would
            get more of them than one that was not interrupted. When it is used up every further
            call fails with [`BudgetExceeded`].
    """

    def __init__(
        self, chat: ChatModel, cache: ReplayCache | None = None, count: CallCount | None = None
    ):
        self.chat = chat
        self.cache = cache
        self.count = count or CallCount()
        self.model = getattr(chat, "model", type(chat).__name__)

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`]."""
        if self.count.end is not None:
            return Reply(error=self.count.end)
        if not self.count.take():
            return Reply(error=BudgetExceeded(f"all {self.count.most} calls are used", attempts=0))
        reply = await self._ask(messages, repeat, session, sampling)
        if reply.error is not None and reply.error.fatal:
            self.count.end = self.count.end or reply.error
        return reply

    async def _ask(
        self,
        messages: Sequence[Message],
        repeat: int | None,
        session: str | None,
        sampling: Mapping[str, Any],
    ) -> Reply:
        """The recorded reply, or else that of the model."""
        if self.cache is None:
            return await as_chat(self.chat)(messages, repeat=repeat, session=session, **sampling)
        key = self.cache.key(str(self.model), messages, sampling, repeat)
        reply = self.cache.get(key)
        if reply is None:
            reply = await as_chat(self.chat)(messages, repeat=repeat, session=session, **sampling)
            self.cache.put(key, reply)
        return reply
