"""A trained agent, or any [`ChatModel`], as a language model and as a module of DSPy (the extra `dspy`).

dspy.configure(lm=language_model(PromptAgent.from_pretrained("runs/hotpot", environment)))
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from typing import Any

try:
    import dspy
    from dspy import lm15
except ImportError as error:
    raise ImportError(
        "interop.dspy needs the extra dspy: pip install 'agentic-prompting[dspy]'"
    ) from error

from ..llm import (
    BadReply,
    BadRequest,
    BudgetExceeded,
    BudgetUnavailable,
    Closed,
    LLMError,
    Message,
    Misconfigured,
    RateLimited,
    Reply,
    ServerFailed,
    TimedOut,
    Unreachable,
    Usage,
    as_chat,
    start,
    with_system,
)
from ..llm.loop import run
from ..rollout import Rollout

# The most special class first. DSPy tries RateLimitError, TimeoutError, TransportError and ServerError again, and
# nothing else: an error that another attempt cannot escape must be none of these.
_ERRORS: tuple[tuple[type[LLMError], type[lm15.LM15Error]], ...] = (
    (BudgetExceeded, lm15.BillingError),
    (BudgetUnavailable, lm15.ConfigurationError),
    (Misconfigured, lm15.ConfigurationError),
    (Closed, lm15.ConfigurationError),
    (BadRequest, lm15.InvalidRequestError),
    (RateLimited, lm15.RateLimitError),
    (TimedOut, lm15.TimeoutError),
    (Unreachable, lm15.TransportError),
    (ServerFailed, lm15.ServerError),
    (BadReply, lm15.ServerError),
)

# How servers say that a request does not fit: OpenAI and vLLM, Anthropic, Google, llama.cpp, Ollama.
_CONTEXT_EXCEEDED = (
    "context_length_exceeded",
    "maximum context length",
    "context window",
    "context size",
    "context length",
    "maximum model length",
    "prompt is too long",
    "input is too long",
    "exceeds the maximum number of tokens",
)

_FINISH_REASONS: dict[str, lm15.FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
    "tool_calls": "tool_call",
    "error": "error",
    "truncated": "length",
    "out_of_turns": "length",
}
"""Finish reasons of replies and statuses of rollouts; all others mean `stop`."""

_SAMPLING = (
    "temperature",
    "max_tokens",
    "top_p",
    "top_k",
    "seed",
    "frequency_penalty",
    "presence_penalty",
)
"""Fields of a request that a chat model gets under the same names; `stop` and `response_format` besides."""


class Engine:
    """An engine for `dspy.LM(name, engine=...)`; [`language_model`] makes the whole `dspy.LM`.

    A failed call raises DSPy's own error for it, so that DSPy tries again what may pass, and `ReAct` shortens a
    trajectory that has filled the context. Only text is read and written: a request with an image or with tools is an
    `UnsupportedFeatureError`. The settings that a model does not follow are in the response's `adaptations`.

    Args:
        model ([`PromptAgent`] or [`ChatModel`]): An agent gets the text of the whole request as one question, and
            samples as it was trained. A chat model (such as [`OpenAIChat`] or [`RefinedChat`]) gets the messages and
            the sampling arguments.
    """

    def __init__(self, model: Any):
        self.model = model
        self._seeds = itertools.count()

    def complete(self, request: lm15.Request) -> lm15.Response:
        messages = read_messages(request)
        if _is_agent(self.model):
            question = _as_question(request, messages)
            return response_of_rollout(
                request, self.model.answer(question, seed=_seed_of(request, self._seeds))
            )
        return response_of_reply(request, run(_ask(self.model, messages, request)))

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        return lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Part of DSPy's protocol; the model stays open, because it belongs to the caller."""


class AsyncEngine:
    """[`Engine`] for `dspy.LM(..., async_engine=...)`: calls that are awaited together run together.

    Args:
        model ([`PromptAgent`] or [`ChatModel`]): As for [`Engine`].
    """

    def __init__(self, model: Any):
        self.model = model
        self._seeds = itertools.count()

    async def complete(self, request: lm15.Request) -> lm15.Response:
        messages = read_messages(request)
        if _is_agent(self.model):
            question = _as_question(request, messages)
            return response_of_rollout(
                request, await _answer(self.model, question, _seed_of(request, self._seeds))
            )
        reply = await asyncio.wrap_future(start(_ask(self.model, messages, request)))
        return response_of_reply(request, reply)

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        for event in lm15.response_to_events(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        """Part of DSPy's protocol; the model stays open."""


def language_model(model: Any, name: str = "agent", **settings: Any) -> dspy.LM:
    """An agent or a chat model as a `dspy.LM`, for synchronous and `async` calls.

    DSPy's cache is off. It knows a model by its name alone, and outlives the process: a second agent of the same name,
    or the same one after more training, would get the answers of the first.

    Args:
        model ([`PromptAgent`] or [`ChatModel`]): As for [`Engine`].
        name (`str`, *optional*, defaults to `"agent"`): The model's name in DSPy's history.
        **settings: Further arguments of `dspy.LM`. With `cache=True`, give each model, and each state of its weights, a
            name of its own.
    """
    settings = {"cache": False, **settings}
    return dspy.LM(name, engine=Engine(model), async_engine=AsyncEngine(model), **settings)


class AgentModule(dspy.Module):
    """An agent as a module: gets `question`, returns a `dspy.Prediction` with `answer` and the whole `rollout`.

    Args:
        agent ([`PromptAgent`]): The agent that answers.

    Raises:
        [`LLMError`]: From a call whose environment failed; an outage is not an answer.
    """

    def __init__(self, agent: Any):
        super().__init__()
        self.agent = agent
        self._seeds = itertools.count()

    def forward(self, question: str) -> dspy.Prediction:
        return self._prediction(self.agent.answer(question, seed=next(self._seeds)))

    async def aforward(self, question: str) -> dspy.Prediction:
        return self._prediction(await _answer(self.agent, question, next(self._seeds)))

    @staticmethod
    def _prediction(rollout: Rollout) -> dspy.Prediction:
        if rollout.error is not None:
            raise rollout.error
        return dspy.Prediction(answer=rollout.answer or "", rollout=rollout)


def _is_agent(model: Any) -> bool:
    return hasattr(model, "answer")


async def _answer(agent: Any, question: str, seed: int) -> Rollout:
    if hasattr(agent, "aanswer"):
        return await agent.aanswer(question, seed=seed)
    return await asyncio.to_thread(agent.answer, question, seed=seed)


async def _ask(model: Any, messages: Sequence[Message], request: lm15.Request) -> Reply:
    return await as_chat(model)(messages, **read_sampling(request.config))


def _seed_of(request: lm15.Request, seeds: Iterator[int]) -> int:
    return next(seeds) if request.config.seed is None else request.config.seed


# From DSPy's requests to ours -----------------------------------------------------------------------------------------


def read_messages(request: lm15.Request) -> list[Message]:
    """The conversation of a request.

    Raises:
        `dspy.lm15.UnsupportedFeatureError`: It holds something that no text can stand for: an image, a tool.
    """
    if request.tools:
        raise lm15.UnsupportedFeatureError(
            "tools cannot be called: describe them in the prompt", feature="tools"
        )
    for name in ("logprobs", "probabilities"):
        if getattr(request.config, name) not in (None, "off", "if_available"):
            raise lm15.UnsupportedFeatureError(f"{name} are not returned", feature=f"config.{name}")

    system = request.system
    if system is not None and not isinstance(system, str):
        system = "".join(_text_of(part, f"system[{number}]") for number, part in enumerate(system))
    messages: list[Message] = []
    for number, message in enumerate(request.messages):
        texts = [
            _text_of(part, f"messages[{number}].parts[{place}]")
            for place, part in enumerate(message.parts)
        ]
        role: Any = "system" if message.role == "developer" else message.role
        messages.append(Message(role=role, content="\n".join(text for text in texts if text)))
    return with_system(system or None, messages, join=True)


def _text_of(part: Any, feature: str) -> str:
    """The text of a part of a message; a thought, which no model reads again, is none."""
    if isinstance(part, lm15.TextPart | lm15.RefusalPart):
        return part.text
    if isinstance(part, lm15.CitationPart):
        return part.text or ""
    if isinstance(part, lm15.ThinkingPart):
        return ""
    if isinstance(part, lm15.DataPart):
        return json.dumps(part.value, ensure_ascii=False)
    raise lm15.UnsupportedFeatureError(
        f"only text is read, and this is of the type {part.type}", feature=feature
    )


def _as_question(request: lm15.Request, messages: Sequence[Message]) -> str:
    """The text of the whole request, for an agent."""
    if request.config.response_format is not None:
        raise lm15.UnsupportedFeatureError(
            "an agent answers in text", feature="config.response_format"
        )
    return "\n\n".join(message["content"] for message in messages)


def read_sampling(config: lm15.Config) -> dict[str, Any]:
    """The sampling arguments of a [`ChatModel`]."""
    sampling: dict[str, Any] = {}
    for name in _SAMPLING:
        if (value := getattr(config, name)) is not None:
            sampling[name] = value
    if config.stop:
        sampling["stop"] = list(config.stop)
    if config.response_format is not None:
        sampling["response_format"] = _openai_format(config.response_format)
    return {**sampling, **(config.extensions or {})}


def _openai_format(response_format: dict[str, Any]) -> dict[str, Any]:
    """A response format of DSPy's in OpenAI's form, which nests the schema."""
    if response_format["type"] != "json_schema":
        return response_format
    named = {name: value for name, value in response_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": {"name": "answer", **named}}


# From our replies and rollouts to DSPy's responses --------------------------------------------------------------------


def response_of_reply(request: lm15.Request, reply: Reply) -> lm15.Response:
    """A chat model's reply. Raises DSPy's error for a failed one."""
    if reply.error is not None:
        raise error_for_dspy(reply.error) from reply.error
    followed = {*_SAMPLING, "stop", "response_format", "extensions"}
    return _response(request, reply.text, reply.finish_reason, reply.usage, followed)


def response_of_rollout(request: lm15.Request, rollout: Rollout) -> lm15.Response:
    """An agent's episode. Raises DSPy's error for a failed one, and for a question that leaves no room for a turn."""
    if rollout.error is not None:
        raise error_for_dspy(rollout.error) from rollout.error
    if rollout.status == "truncated" and not rollout.turns:
        raise lm15.ContextLengthError(
            f"the question's {len(rollout.prompt_ids)} tokens fill the agent's context"
        )
    usage = sum((reply.usage for reply in rollout.replies), Usage())
    return _response(request, rollout.answer or "", rollout.status, usage, followed={"seed"})


def _response(
    request: lm15.Request, text: str, finish_reason: str, usage: Usage, followed: set[str]
) -> lm15.Response:
    # A model that is no server may write on after a text that ends its reply.
    ends = [position for stop in request.config.stop if (position := text.find(stop)) >= 0]
    reason = _FINISH_REASONS.get(finish_reason, "stop")
    if ends:
        text, reason = text[: min(ends)], "stop"

    adaptations = []
    for setting in fields(request.config):
        value = getattr(request.config, setting.name)
        if setting.name in followed or value in (None, ()):
            continue
        if setting.name == "stop":
            action, why = "client_side", "the answer is cut at the text that ends it"
        else:
            action, why = "dropped", "the model has no such setting"
        adaptations.append(
            lm15.Adaptation(f"config.{setting.name}", action, why, asked=_as_json(value))
        )

    return lm15.Response(
        id=None,
        model=request.model,
        message=lm15.Message.assistant([lm15.TextPart(text)]),
        finish_reason=reason,
        usage=lm15.Usage(usage.prompt_tokens, usage.completion_tokens, usage.tokens),
        adaptations=tuple(adaptations),
    )


def _as_json(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)


def error_for_dspy(error: LLMError) -> lm15.LM15Error:
    """DSPy's error for one of ours: one that it tries again exactly if another attempt may pass."""
    kind = next((theirs for ours, theirs in _ERRORS if isinstance(error, ours)), lm15.ProviderError)
    text = str(error)
    if kind is lm15.InvalidRequestError and any(
        phrase in text.lower() for phrase in _CONTEXT_EXCEEDED
    ):
        kind = lm15.ContextLengthError
    if isinstance(error, Misconfigured) and error.status in (401, 403):
        kind = lm15.AuthError
    if isinstance(error, Misconfigured) and error.status == 404:
        kind = lm15.UnsupportedModelError
    return kind(text, status=error.status)
