"""Spans of an episode, its turns and its environment's steps.

Each function is the traced version of a function that [`traced`] decorates, and runs only while
traces are on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from ..llm import Message, spans
from .chat_format import TextFormat
from .environment import Environment, Environments
from .recording import question_text
from .types import Observation, Policy, Rollout, Sample, SampleRequest

T = TypeVar("T")


async def trace_episode(
    play: Callable[..., Awaitable[Rollout]], rollout: Rollout, *args: Any, **kwargs: Any
) -> Rollout:
    """Play an episode in a span `invoke_agent agent`, whose name the rollout keeps."""
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": spans.OWN,
        "gen_ai.agent.name": "agent",
    }
    # The spans of the turns and of the steps lie in this one.
    with spans.span("invoke_agent agent", attributes) as span:
        rollout.traceparent = span.traceparent
        await play(rollout, *args, **kwargs)
        span.set(_describe_rollout(rollout))
        # The span of a failed episode names the kind of its error.
        if rollout.error is not None:
            span.fail(rollout.error.kind)
    return rollout


async def trace_turn(
    sample_turn: Callable[..., Awaitable[Sample]],
    policy: Policy,
    request: SampleRequest,
    turn_number: int,
    chat_format: TextFormat,
) -> Sample:
    """Sample a turn in a span `chat agent`."""
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": spans.OWN,
        "gen_ai.request.model": "agent",
        f"{spans.OWN}.turn": turn_number,
    }
    with spans.span("chat agent", attributes) as span:
        sample = await sample_turn(policy, request, turn_number, chat_format)

        def read_turn() -> Iterator[Message]:
            """Decode the turn lazily: its text is needed only if spans have contents."""
            yield Message(role="assistant", content=chat_format.parse(sample.ids).text)

        output = spans.messages(
            "gen_ai.output.messages",
            read_turn(),
            finish_reason="stop" if sample.finished else "length",
        )
        # The usage: the tokens of the whole context, and those that were sampled.
        span.set(
            {
                "gen_ai.usage.input_tokens": len(request.context),
                "gen_ai.usage.output_tokens": len(sample.ids),
                **output,
            }
        )
    return sample


async def trace_step(
    observe: Callable[..., Awaitable[Observation | None]],
    environment: Environment | None,
    rollout: Rollout,
    *args: Any,
    **kwargs: Any,
) -> Observation | None:
    """Observe in a span `execute_tool NAME`, with the name of the environment's class or function.

    An environment that only forwards the step to another one has a private name, and no span.
    """
    # The span is named after the environment that answers.
    if isinstance(environment, Environments):
        environment = environment.for_row(rollout.row)

    # Nothing is observed without an environment, and a private one has no span.
    described_by = getattr(environment, "described_by", None)
    name = getattr(described_by, "__name__", "_")
    observation = observe(environment, rollout, *args, **kwargs)
    if name.startswith("_"):
        return await observation
    # The agent's request is the argument of the tool.
    request = rollout.turns[-1].request if rollout.turns else None
    return await _trace_tool_call(name, request or "", observation)


async def trace_tool(
    run_tool: Callable[..., Awaitable[T]], name: str, arguments: str, call: Awaitable[T]
) -> T:
    """Run a tool in a span `execute_tool NAME`."""
    return await _trace_tool_call(name, arguments, run_tool(name, arguments, call))


async def _trace_tool_call(name: str, arguments: str, call: Awaitable[T]) -> T:
    # The attributes of the OpenTelemetry conventions for a call of a tool.
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.provider.name": spans.OWN,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.name": name,
    }
    with spans.span(f"execute_tool {name}", attributes) as span:
        result = await call
        span.set(spans.content("gen_ai.tool.call.arguments", arguments))

        # An environment returns `None` if the episode is over.
        if isinstance(result, Observation):
            span.set(spans.content("gen_ai.tool.call.result", result.text))
            if result.error is not None:
                span.fail(result.error.kind)
    return result


def _describe_rollout(rollout: Rollout) -> dict[str, Any]:
    """Return the attributes of a finished episode's span."""
    # Without `trace_content` the question and the answer are left out.
    question = Message(role="user", content=question_text(rollout.row))
    answer = Message(role="assistant", content=rollout.answer or "")
    return {
        "gen_ai.usage.output_tokens": sum(sum(sequence.mask) for sequence in rollout.sequences),
        f"{spans.OWN}.status": rollout.status,
        f"{spans.OWN}.turns": len(rollout.turns),
        f"{spans.OWN}.group": rollout.group,
        f"{spans.OWN}.cost_usd": sum(reply.usage.cost_usd for reply in rollout.replies),
        **spans.messages("gen_ai.input.messages", [question]),
        **spans.messages("gen_ai.output.messages", [answer], finish_reason=rollout.status),
    }
