"""A trained agent, or any [`ChatModel`], as a language model and as a module of DSPy (the extra `dspy`).

dspy.configure(lm=dspy.LM("agent", engine=Engine(PromptAgent.from_pretrained("runs/hotpot", environment))))
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

try:
    import dspy
    from dspy import lm15
except ImportError as error:
    raise ImportError("interop.dspy needs the extra dspy: pip install 'agentic-prompting[dspy]'") from error

from ..llm import LLMError, Message, RateLimited, TimedOut, Unreachable, Usage, complete, with_system

_ERRORS = {RateLimited: lm15.RateLimitError, TimedOut: lm15.TimeoutError, Unreachable: lm15.TransportError}


class Engine:
    """An engine for `dspy.LM(name, engine=...)`. A failed call raises DSPy's own error for it, so DSPy retries it.

    Args:
        model ([`PromptAgent`] or [`ChatModel`]): An agent gets the text of the whole request as one question. A chat
            model (such as [`OpenAIChat`] or [`RefinedChat`]) gets the messages.
    """

    def __init__(self, model: Any):
        self.model, self._seeds = model, itertools.count()

    def complete(self, request: lm15.Request) -> lm15.Response:
        messages = _messages(request)
        if hasattr(self.model, "answer"):
            question = "\n\n".join(str(message["content"]) for message in messages)
            rollout = self.model.answer(question, seed=next(self._seeds))
            text, error, replies = rollout.answer or "", rollout.error, rollout.replies
            usage = sum((reply.usage for reply in replies), Usage())
        else:
            config = request.config
            sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
            reply = complete(
                self.model, messages, **{name: value for name, value in sampling.items() if value is not None}
            )
            text, error, usage = reply.text, reply.error, reply.usage
        if error is not None:
            raise _ERRORS.get(type(error), lm15.ServerError)(str(error)) from error
        read, written = usage.prompt_tokens, usage.completion_tokens
        return lm15.Response(
            id=None,
            model=request.model,
            message=lm15.Message.assistant([lm15.TextPart(text)]),
            finish_reason="stop",
            usage=lm15.Usage(input_tokens=read, output_tokens=written, total_tokens=read + written),
        )

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        return lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Part of DSPy's protocol; the model stays open, because it belongs to the caller."""


class AgentModule(dspy.Module):
    """An agent as a module: gets `question`, returns a `dspy.Prediction` with `answer` and the whole `rollout`.

    Args:
        agent ([`PromptAgent`]): The agent that answers.

    Raises:
        [`LLMError`]: From a call whose environment failed; an outage is not an answer.
    """

    def __init__(self, agent: Any):
        super().__init__()
        self.agent, self._seeds = agent, itertools.count()

    def forward(self, question: str) -> dspy.Prediction:
        rollout = self.agent.answer(question, seed=next(self._seeds))
        if isinstance(rollout.error, LLMError):
            raise rollout.error
        return dspy.Prediction(answer=rollout.answer or "", rollout=rollout)


def _messages(request: lm15.Request) -> list[Message]:
    system = request.system
    if system is not None and not isinstance(system, str):
        system = "".join(part.text for part in system)
    messages = [Message(role=message.role, content=message.text or "") for message in request.messages]
    return with_system(system or None, messages)
