"""A trained agent, or any [`ChatModel`], as a language model and as a module of DSPy.

dspy.configure(lm=language_model(PromptAgent.from_pretrained("runs/hotpot", environment)))

Needs the extra `dspy`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeAlias, runtime_checkable

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
    ChatModel,
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

# Our errors and DSPy's; subclasses come before their base class. DSPy retries RateLimitError,
# TimeoutError, TransportError and ServerError only: an error that would occur again must be none of
# these.
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

# The phrases of servers for a request that does not fit: OpenAI and vLLM, Anthropic, Google,
# llama.cpp, Ollama.
_CONTEXT_EXCEEDED_PHRASES = (
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

# Finish reasons of replies and statuses of rollouts; all others are `stop`.
_FINISH_REASONS: dict[str, lm15.FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
    "tool_calls": "tool_call",
    "error": "error",
    "truncated": "length",
    "out_of_turns": "length",
}

# The fields of a request that a chat model gets under the same names.
_SAMPLING_FIELDS = (
    "temperature",
    "max_tokens",
    "top_p",
    "top_k",
    "seed",
    "frequency_penalty",
    "presence_penalty",
)


@runtime_checkable
class AnsweringAgent(Protocol):
    """An agent that answers questions, such as [`PromptAgent`]."""

    def answer(self, question: str, seed: int = 0) -> Rollout: ...


Model: TypeAlias = AnsweringAgent | ChatModel


class DSPyEngine:
    """An engine for `dspy.LM(name, engine=...)`. [`language_model`] creates the whole `dspy.LM`.

    A failed call raises DSPy's own error for it, so that DSPy retries what may succeed, and `ReAct`
    shortens a trajectory that has filled the context. Only text is read and written: a request with
    an image or with tools is an `UnsupportedFeatureError`. Settings that a model does not follow
    are in the response's `adaptations`.

    Args:
        model ([`PromptAgent`] or [`ChatModel`]): An agent gets the text of the whole request as one
            question, and samples as it was trained. A chat model (such as [`OpenAIChat`] or
            [`RefinedChat`]) gets the messages and the sampling arguments.
    """

    def __init__(self, model: Model):
        self.model = model
        self._seeds = itertools.count()

    def complete(self, request: lm15.Request) -> lm15.Response:
        messages = read_messages(request)
        # An agent gets one question, a chat model the whole conversation.
        if isinstance(self.model, AnsweringAgent):
            question = _read_question(request, messages)
            rollout = self.model.answer(question, seed=_read_seed(request, self._seeds))
            return response_of_rollout(request, rollout)
        reply = run(_ask(self.model, messages, request))
        return response_of_reply(request, reply)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        return lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Part of DSPy's protocol. The model stays open, because it belongs to the caller."""


class AsyncDSPyEngine:
    """[`DSPyEngine`] for `dspy.LM(..., async_engine=...)`: calls that are awaited together run
    together.

    Args:
        model ([`PromptAgent`] or [`ChatModel`]): As for [`DSPyEngine`].
    """

    def __init__(self, model: Model):
        self.model = model
        self._seeds = itertools.count()

    async def complete(self, request: lm15.Request) -> lm15.Response:
        messages = read_messages(request)
        if isinstance(self.model, AnsweringAgent):
            question = _read_question(request, messages)
            rollout = await _answer(self.model, question, _read_seed(request, self._seeds))
            return response_of_rollout(request, rollout)
        # The model runs on the background loop, DSPy on a loop of its own.
        reply = await asyncio.wrap_future(start(_ask(self.model, messages, request)))
        return response_of_reply(request, reply)

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        for event in lm15.response_to_events(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        """Part of DSPy's protocol. The model stays open."""


def language_model(model: Model, name: str = "agent", **settings: Any) -> dspy.LM:
    """Return an agent or a chat model as a `dspy.LM`, for synchronous and `async` calls.

    DSPy's cache is off. It identifies a model by its name alone, and outlives the process: a second
    agent of the same name, or the same one after more training, would get the answers of the first.

    Args:
        model ([`PromptAgent`] or [`ChatModel`]): As for [`DSPyEngine`].
        name (`str`, *optional*, defaults to `"agent"`): The model's name in DSPy's history.
        **settings: Further arguments of `dspy.LM`. With `cache=True`, give each model, and each
            state of its weights, its own name.
    """
    settings = {"cache": False, **settings}
    return dspy.LM(name, engine=DSPyEngine(model), async_engine=AsyncDSPyEngine(model), **settings)


class AgentModule(dspy.Module):
    """An agent as a module: gets `question`, returns a `dspy.Prediction` with `answer` and the
    whole `rollout`.

    Args:
        agent ([`PromptAgent`]): The agent that answers.

    Raises:
        [`LLMError`]: From a call whose environment failed; an outage is not an answer.
    """

    def __init__(self, agent: AnsweringAgent):
        super().__init__()
        self.agent = agent
        self._seeds = itertools.count()

    def forward(self, question: str) -> dspy.Prediction:
        return self._to_prediction(self.agent.answer(question, seed=next(self._seeds)))

    async def aforward(self, question: str) -> dspy.Prediction:
        return self._to_prediction(await _answer(self.agent, question, next(self._seeds)))

    @staticmethod
    def _to_prediction(rollout: Rollout) -> dspy.Prediction:
        if rollout.error is not None:
            raise rollout.error
        return dspy.Prediction(answer=rollout.answer or "", rollout=rollout)


async def _answer(agent: AnsweringAgent, question: str, seed: int) -> Rollout:
    # An agent that cannot be awaited answers in a thread.
    if hasattr(agent, "aanswer"):
        return await agent.aanswer(question, seed=seed)
    return await asyncio.to_thread(agent.answer, question, seed=seed)


async def _ask(model: ChatModel, messages: Sequence[Message], request: lm15.Request) -> Reply:
    return await as_chat(model)(messages, **read_sampling(request.config))


# ---- DSPy's requests ----


def read_messages(request: lm15.Request) -> list[Message]:
    """Return the conversation of a request.

    Raises:
        `dspy.lm15.UnsupportedFeatureError`: It has something that is not text: an image, a tool.
    """
    # Refuse requests for anything but text.
    if request.tools:
        raise lm15.UnsupportedFeatureError(
            "tools cannot be called: describe them in the prompt", feature="tools"
        )
    for name in ("logprobs", "probabilities"):
        if getattr(request.config, name) not in (None, "off", "if_available"):
            raise lm15.UnsupportedFeatureError(f"{name} are not returned", feature=f"config.{name}")

    # The system prompt may consist of parts, too.
    system = request.system
    if system is not None and not isinstance(system, str):
        system = "".join(
            _read_text(part, f"system[{number}]") for number, part in enumerate(system)
        )
    messages: list[Message] = []
    for number, message in enumerate(request.messages):
        # The text parts of a message become one text.
        texts = []
        for part_number, part in enumerate(message.parts):
            text = _read_text(part, f"messages[{number}].parts[{part_number}]")
            if text:
                texts.append(text)
        # A developer's message is a system message for our models.
        role: Any = "system" if message.role == "developer" else message.role
        messages.append(Message(role=role, content="\n".join(texts)))
    return with_system(system or None, messages, join=True)


def _read_text(part: Any, feature: str) -> str:
    """Return the text of a part of a message. A thought, which no model reads again, has none."""
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


def _read_question(request: lm15.Request, messages: Sequence[Message]) -> str:
    """Return the text of the whole request, for an agent."""
    if request.config.response_format is not None:
        raise lm15.UnsupportedFeatureError(
            "an agent answers in text", feature="config.response_format"
        )
    return "\n\n".join(message["content"] for message in messages)


def _read_seed(request: lm15.Request, seeds: Iterator[int]) -> int:
    """Return the seed of a request, or the next one."""
    if request.config.seed is not None:
        return request.config.seed
    return next(seeds)


def read_sampling(config: lm15.Config) -> dict[str, Any]:
    """Return the sampling arguments for a [`ChatModel`]."""
    # Fields that are not set keep the model's own defaults.
    sampling: dict[str, Any] = {}
    for name in _SAMPLING_FIELDS:
        value = getattr(config, name)
        if value is not None:
            sampling[name] = value
    if config.stop:
        sampling["stop"] = list(config.stop)
    if config.response_format is not None:
        sampling["response_format"] = _to_openai_format(config.response_format)
    # The extensions of a request override the common arguments.
    return {**sampling, **(config.extensions or {})}


def _to_openai_format(response_format: dict[str, Any]) -> dict[str, Any]:
    """Convert a response format to OpenAI's form, which nests the schema."""
    if response_format["type"] != "json_schema":
        return response_format
    schema = {name: value for name, value in response_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}


# ---- DSPy's responses ----


def response_of_reply(request: lm15.Request, reply: Reply) -> lm15.Response:
    """Convert a chat model's reply. Raises DSPy's error for a failed one."""
    if reply.error is not None:
        raise error_for_dspy(reply.error) from reply.error
    # A chat model follows these settings; all others are reported.
    followed_settings = {*_SAMPLING_FIELDS, "stop", "response_format", "extensions"}
    return _create_response(
        request, reply.text, reply.finish_reason, reply.usage, followed_settings
    )


def response_of_rollout(request: lm15.Request, rollout: Rollout) -> lm15.Response:
    """Convert an agent's episode.

    Raises DSPy's error for a failed one, and for a question that leaves no space for a turn.
    """
    if rollout.error is not None:
        raise error_for_dspy(rollout.error) from rollout.error
    # `ReAct` shortens its trajectory after this error.
    if rollout.status == "truncated" and not rollout.turns:
        raise lm15.ContextLengthError(
            f"the question's {len(rollout.prompt_ids)} tokens fill the agent's context"
        )
    # The usage of the environment's models, without the agent's own tokens.
    usage = sum((reply.usage for reply in rollout.replies), Usage())
    return _create_response(
        request, rollout.answer or "", rollout.status, usage, followed_settings={"seed"}
    )


def _create_response(
    request: lm15.Request,
    text: str,
    finish_reason: str,
    usage: Usage,
    followed_settings: set[str],
) -> lm15.Response:
    # A model that is not a server may continue after a stop text.
    reason = _FINISH_REASONS.get(finish_reason, "stop")
    stop_positions = [text.find(stop) for stop in request.config.stop if stop in text]
    if stop_positions:
        text = text[: min(stop_positions)]
        reason = "stop"

    # Report the settings that the model did not follow.
    adaptations = []
    for setting in fields(request.config):
        value = getattr(request.config, setting.name)
        if setting.name in followed_settings or value in (None, ()):
            continue
        # A stop text is applied to the finished answer; other settings are dropped.
        action = "dropped"
        reason_text = "the model has no such setting"
        if setting.name == "stop":
            action = "client_side"
            reason_text = "the answer is cut at the text that ends it"
        adaptations.append(
            lm15.Adaptation(
                f"config.{setting.name}", action, reason_text, asked=_to_json_value(value)
            )
        )

    return lm15.Response(
        id=None,
        model=request.model,
        message=lm15.Message.assistant([lm15.TextPart(text)]),
        finish_reason=reason,
        usage=lm15.Usage(usage.prompt_tokens, usage.completion_tokens, usage.tokens),
        adaptations=tuple(adaptations),
    )


def _to_json_value(value: object) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else str(value)


def error_for_dspy(error: LLMError) -> lm15.LM15Error:
    """Convert an error to DSPy's: one that DSPy retries only if another attempt may succeed."""
    # The first class that fits is the most specific one.
    error_class: type[lm15.LM15Error] = lm15.ProviderError
    for llm_error_class, dspy_error_class in _ERRORS:
        if isinstance(error, llm_error_class):
            error_class = dspy_error_class
            break

    # The server's text and status tell some errors apart.
    message = str(error)
    if error_class is lm15.InvalidRequestError:
        lower_message = message.lower()
        if any(phrase in lower_message for phrase in _CONTEXT_EXCEEDED_PHRASES):
            error_class = lm15.ContextLengthError
    if isinstance(error, Misconfigured):
        if error.status in (401, 403):
            error_class = lm15.AuthError
        elif error.status == 404:
            error_class = lm15.UnsupportedModelError
    return error_class(message, status=error.status)
