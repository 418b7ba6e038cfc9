"""[`RefinedChat`]: a refiner as a chat model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from ..llm import BadReply, BadRequest, Budget, Message, Reply, Usage
from .refiner import ProRefiner
from .templates import DEFAULT_PROMPT
from .types import Query, RefinementResult, RoleUsage, check_prompt


class RefinedChat:
    """A [`ChatModel`] that refines its system message for each question before it answers.

    So a refiner can be an environment, a judge, or be served. The system message of a conversation
    is the prompt and its last user message the question; the messages in between go to the task
    model as they are.

    Args:
        refiner ([`ProRefiner`]): The refiner. Its verifier must not need accepted answers, because
            a conversation has none.
        prompt (`str`, *optional*): The prompt for conversations without a system message.

    Raises:
        `ValueError`: The prompt is empty, or the verifier needs accepted answers.
    """

    def __init__(self, refiner: ProRefiner, prompt: str = DEFAULT_PROMPT):
        check_prompt(prompt)
        if getattr(refiner.verifier, "needs_answers", False):
            raise ValueError(
                f"{refiner.verifier!r} compares with accepted answers, which a conversation does "
                "not have"
            )
        self.refiner = refiner
        self.prompt = prompt

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`].

        `max_tokens` limits the answer; other sampling arguments go to the task model.
        """
        # The caller's limit is for the answer, not for the other roles.
        max_tokens = sampling.pop("max_tokens", None)
        if max_tokens is None:
            max_tokens = self.refiner.final_max_tokens
        try:
            prompt = self._read_prompt(messages)
            query = self._read_query(messages, repeat or 0)
            # The caller's sampling arguments override the task model's.
            role_sampling = dict(self.refiner.sampling or {})
            role_sampling["task"] = {**role_sampling.get("task", {}), **sampling}
            refiner = replace(self.refiner, final_max_tokens=max_tokens, sampling=role_sampling)
        except (ValueError, KeyError, TypeError) as error:
            message = f"not a conversation to refine: {error}"
            return Reply(error=BadRequest(message, "refiner", attempts=0))
        return to_reply(await refiner.arefine(prompt, query))

    def check(self) -> None:
        """Raise the [`LLMError`] that a first call would meet, for models that can be checked."""
        self.refiner.check()

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book the spending of each role under `account/role`."""
        self.refiner.charge_to(budget, account)

    def _read_prompt(self, messages: Sequence[Message]) -> str:
        # Several system messages are one prompt.
        system_texts = [message["content"] for message in messages if message["role"] == "system"]
        prompt = "\n\n".join(system_texts)
        return prompt if prompt.strip() else self.prompt

    def _read_query(self, messages: Sequence[Message], repeat: int) -> Query:
        # The last message is the question, those before it its context.
        turns = [message for message in messages if message["role"] != "system"]
        if not turns or turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
            raise ValueError("it must end with a user message that is not empty")
        return Query(turns[-1]["content"], context=tuple(turns[:-1]), repeat=repeat)


def to_reply(result: RefinementResult) -> Reply:
    """Convert a result to a reply: its answer or its error, and the usage of all roles.

    If something failed on the way but there is an answer, the reply is the answer. After a fatal
    failure it is the error: with a role's key wrong or its budget spent, no later question would be
    refined.
    """
    # Sum the usage over the roles. A reply has no place for their numbers of calls.
    total = sum(result.usage.values(), RoleUsage())
    usage = Usage(**{item.name: getattr(total, item.name) for item in fields(Usage)})
    # The reply is a recorded one if all of its calls were.
    is_cached = 0 < total.calls == total.cached
    reply = Reply(
        usage=usage,
        saved=Usage(cost_usd=total.worth_usd - usage.cost_usd),
        cached=is_cached,
        attempts=0 if is_cached else 1,
        seconds=result.seconds,
    )
    # Decide between answer and error.
    error = result.error
    if error is not None and (error.fatal or not result.finish_reason):
        return replace(reply, error=error.to_error())
    if not result.answer.strip():
        return replace(reply, error=BadReply("the refined answer is empty", "refiner"))
    return replace(reply, text=result.answer, finish_reason=result.finish_reason)
