"""[`RefinedChat`]: a refiner that looks like a large LLM, so that it can be an environment, a judge, or be served."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ..llm import BadReply, BadRequest, Budget, Message, Reply, Usage
from ..llm.futures import then
from .driver import play
from .loop import refinement
from .query import Query, check_prompt
from .refiner import ProRefiner
from .result import RefinementResult
from .settings import RefineSettings
from .templates import DEFAULT_PROMPT


class RefinedChat:
    """A [`ChatModel`] that refines its system message for each question before it answers.

    The system message of a conversation is the prompt, its last user message the question; what was said in between is
    shown to the task model as it is. Nothing waits: replies arrive on the models' own threads, and there the refinement
    goes on, so a verifier that is a plain function must be quick and not bound to a thread.

    Args:
        refiner ([`ProRefiner`]): Without a verifier that needs accepted answers: a conversation has none.
        prompt (`str`, *optional*): For conversations without a system message.

    Raises:
        `ValueError`: If the prompt is empty or the verifier needs accepted answers.
    """

    def __init__(self, refiner: ProRefiner, prompt: str = DEFAULT_PROMPT):
        check_prompt(prompt)
        if getattr(refiner.verifier, "needs_answers", False):
            raise ValueError(f"{refiner.verifier!r} compares with accepted answers, which a conversation does not have")
        self.refiner, self.prompt = refiner, prompt

    def submit(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Future[Reply]:
        """See [`ChatModel`]. `max_tokens` limits the answer; other sampling arguments go to the task model."""
        try:
            prompt, query = self._read(messages, repeat or 0)
            settings = self._settings(sampling)
        except (ValueError, KeyError, TypeError) as error:
            failed: Future[Reply] = Future()
            failed.set_result(Reply(error=BadRequest(f"not a conversation to refine: {error}", "refiner", attempts=0)))
            return failed
        work = refinement(settings, prompt, query, self.refiner.verifier)
        return then(play(work, self.refiner.submit_call), as_reply)

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
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        return system if system.strip() else self.prompt, Query(
            said[-1]["content"], context=tuple(said[:-1]), repeat=repeat
        )

    def _settings(self, sampling: dict[str, Any]) -> RefineSettings:
        settings = self.refiner.settings
        limit = sampling.pop("max_tokens", None)
        task = {**settings.sampling.get("task", {}), **sampling}
        return replace(
            settings,
            final_max_tokens=settings.final_max_tokens if limit is None else limit,
            sampling={**settings.sampling, "task": task},
        )


def as_reply(result: RefinementResult) -> Reply:
    """A result as a large LLM's reply: its answer, or its error where there is none; the usage of all roles.

    An answer that is there is given although something failed on the way: the agent gets the best there is. Not where
    the failure is for good: with a role's key wrong or its budget spent, no question would be refined any more.
    """
    usage = Usage()
    for role in result.usage.values():
        usage += Usage(role.prompt_tokens, role.completion_tokens, role.cost_usd)
    calls = sum(role.calls for role in result.usage.values())
    cached = calls > 0 and calls == sum(role.cached for role in result.usage.values())
    reply = Reply(usage=usage, cached=cached, attempts=0 if cached else 1, seconds=result.seconds)
    if result.error is not None and (result.error.fatal or not result.finish_reason):
        return replace(reply, error=result.error.as_error())
    if not result.answer.strip():
        return replace(reply, error=BadReply("the refined answer is empty", "refiner"))
    return replace(reply, text=result.answer, finish_reason=result.finish_reason)
