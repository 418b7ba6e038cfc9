"""The episode: agent and environment take turns until it is over.

`play` is a coroutine, so any number of episodes run side by side and none waits for another. The policy decides which
requests share a batch (`engine.py`). The tokens of an episode do not depend on its batch: each turn has its own seed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from ..llm import LLMError, Message, ServerFailed, spans
from ..llm.guard import failure_of, place_of
from ..llm.waiting import wait_for
from .chat_format import TextFormat
from .environment import RESET_ERROR, Environment, Environments, call_environment
from .types import Limits, Observation, Policy, Rollout, Sample, SampleRequest, turn_seed

T = TypeVar("T")

# An engine keeps what it computed for one turn for the next turn of the same conversation.
_conversations = itertools.count()
_ABOUT = {
    name: {"gen_ai.operation.name": name, "gen_ai.provider.name": spans.OWN, **more}
    for name, more in {
        "invoke_agent": {"gen_ai.agent.name": "agent"},
        "chat": {"gen_ai.request.model": "agent"},
        "execute_tool": {"gen_ai.tool.type": "function"},
    }.items()
}
"""The first attributes of an episode's spans, by operation."""


async def play(
    rollout: Rollout,
    policy: Policy,
    environment: Environment | None,
    chat_format: TextFormat,
    limits: Limits = Limits(),
) -> Rollout:
    """Play one rollout to its end, in place.

    Args:
        rollout ([`Rollout`]): A fresh one, its prompt rendered.
        policy ([`Policy`]): The agent's weights.
        environment ([`Environment`], *optional*): Answers the agent's requests. Without one a request ends the
            episode as `out_of_turns`.
        chat_format ([`TextFormat`]): Renders observations and parses turns; for conversations a [`ChatFormat`].
        limits ([`Limits`], *optional*): Turn and token limits.

    Returns:
        [`Rollout`]: The same one, `done`.

    Raises:
        `Exception`: Any error of the policy. An error of the environment fails this rollout only.
    """
    if not spans.is_on():
        return await _play(rollout, policy, environment, chat_format, limits)
    with spans.span("invoke_agent agent", _ABOUT["invoke_agent"]) as episode:
        rollout.traceparent = episode.traceparent
        await _play(rollout, policy, environment, chat_format, limits)
        episode.set(_about_rollout(rollout))
        if rollout.error is not None:
            episode.fail(rollout.error.kind)
    return rollout


async def _play(
    rollout: Rollout,
    policy: Policy,
    environment: Environment | None,
    chat_format: TextFormat,
    limits: Limits,
) -> Rollout:
    if (error := rollout.row.get(RESET_ERROR)) is not None:
        return rollout.fail(Observation(error=error))
    if environment is not None and environment.play_episode is not None:
        return await environment.play_episode(rollout, policy, chat_format, limits)
    chat_format, limits = chat_format.of(rollout.row), limits.of(rollout.row)
    conversation = next(_conversations)
    while (remaining := limits.remaining_tokens(rollout)) > 0:
        seed = turn_seed(rollout.seed, len(rollout.turns))
        request = SampleRequest(rollout.context, remaining, seed, conversation)
        sample = await sample_turn(policy, request, len(rollout.turns), chat_format)
        turn = chat_format.parse(sample.ids)
        rollout.add_turn(sample, turn)
        if turn.kind == "answer":
            # An answer that the token limit has cut off is incomplete, unless its closing tag came before that.
            is_closed = any(stop in turn.text for stop in chat_format.grammar.stops)
            return rollout.finish("answered" if sample.finished or is_closed else "truncated")
        if turn.kind == "malformed":
            # A turn that was cut off before it could close its tags is too long, not malformed.
            return rollout.finish("malformed" if sample.finished else "truncated")
        if len(rollout.turns) >= limits.max_turns:
            return rollout.finish(
                "out_of_turns"
            )  # without a further turn a reply would be paid for in vain
        observation = await observe(environment, rollout, limits.step_timeout)
        if observation is None:
            return rollout.finish("out_of_turns")
        if observation.error is not None:
            return rollout.fail(observation)
        ids = chat_format.observation_ids(observation.text, after=rollout.ids)
        if limits.remaining_tokens(rollout, extra=len(ids)) < 1:
            # A rollout never ends on an observation: there is nothing after it to learn from.
            rollout.observations.append(observation)
            return rollout.finish("truncated")
        rollout.add_observation(observation, ids)
    return rollout.finish("truncated")  # prompt and turns fill the context


async def sample_turn(
    policy: Policy, request: SampleRequest, number: int, chat_format: TextFormat
) -> Sample:
    """The policy's turn, in a span if traces are on."""
    if not spans.is_on():
        return await policy(request)
    with spans.span("chat agent", {**_ABOUT["chat"], f"{spans.OWN}.turn": number}) as turn:
        sample = await policy(request)
        # A generator, because the text is needed only if spans have contents.
        said = (
            Message(role="assistant", content=chat_format.parse(ids).text) for ids in [sample.ids]
        )
        turn.set(
            {
                "gen_ai.usage.input_tokens": len(request.context),
                "gen_ai.usage.output_tokens": len(sample.ids),
                **spans.messages(
                    "gen_ai.output.messages",
                    said,
                    finish_reason="stop" if sample.finished else "length",
                ),
            }
        )
        return sample


async def observe(
    environment: Environment | None,
    rollout: Rollout,
    step_timeout: float | None = None,
    record: Callable[[Observation | None], None] = lambda observation: None,
) -> Observation | None:
    """The environment's observation after the rollout's last turn; `None` if the episode is over. Never raises.

    A plain `def step` runs in a thread, so that it may block. A `str` is an observation of that text.

    Args:
        environment ([`Environment`], *optional*): Answers the turn.
        rollout ([`Rollout`]): The rollout.
        step_timeout (`float`, *optional*): Seconds that the step may take, unless the environment has a limit of its
            own.
        record (`Callable`, *optional*): Called with an observation as soon as the step returns it, in the step's own
            task: a reply that was paid for is then recorded even if this call is cancelled at that moment.
    """
    if environment is None:
        return None
    if isinstance(environment, Environments):
        environment = environment.of(rollout.row)
    # An environment that only forwards the step to another one is private, and has no span.
    name = getattr(getattr(environment, "described_by", None), "__name__", "_")
    work = _observe(environment, rollout, step_timeout, record)
    if name.startswith("_"):
        return await work
    request = rollout.turns[-1].request if rollout.turns else None
    return await _in_span(name, request or "", work)


async def run_tool(name: str, arguments: str, work: Coroutine[Any, Any, T]) -> T:
    """Await a tool's observation, in a span if traces are on. A tool that takes long is named in a warning."""
    return await _in_span(name, arguments, wait_for(work, f"the environment's tool {name}"))


async def _in_span(name: str, arguments: str, work: Awaitable[T]) -> T:
    if not spans.is_on():
        return await work
    with spans.span(
        f"execute_tool {name}", {**_ABOUT["execute_tool"], "gen_ai.tool.name": name}
    ) as tool:
        observation = await work
        tool.set(spans.content("gen_ai.tool.call.arguments", arguments))
        if isinstance(observation, Observation):
            tool.set(spans.content("gen_ai.tool.call.result", observation.text))
            if observation.error is not None:
                tool.fail(observation.error.kind)
        return observation


async def _observe(
    environment: Environment,
    rollout: Rollout,
    step_timeout: float | None,
    record: Callable[[Observation | None], None],
) -> Observation | None:
    started = time.perf_counter()

    def receive(returned: Any) -> Observation | None:
        if not (returned is None or isinstance(returned, str | Observation)):
            wrong = type(returned).__name__
            raise ServerFailed(
                f"{place_of(environment.step)} must return an Observation, a str or None, not {wrong}"
            )
        if isinstance(returned, str):
            returned = Observation(returned, seconds=time.perf_counter() - started)
        record(returned)
        return returned

    try:
        return await call_environment(environment, environment.step, rollout, step_timeout, receive)
    except LLMError as error:
        return Observation(error=error, seconds=time.perf_counter() - started)
    except Exception as error:  # a bug in an environment fails this rollout, not the batch
        failure = failure_of(ServerFailed, "the environment", error)
        return Observation(error=failure, seconds=time.perf_counter() - started)


def _about_rollout(rollout: Rollout) -> dict[str, Any]:
    agents = sum(map(sum, (one.mask for one in rollout.sequences)))
    answer = [Message(role="assistant", content=rollout.answer or "")]
    return {
        "gen_ai.usage.output_tokens": agents,
        f"{spans.OWN}.status": rollout.status,
        f"{spans.OWN}.turns": len(rollout.turns),
        f"{spans.OWN}.group": rollout.group,
        f"{spans.OWN}.cost_usd": sum(reply.usage.cost_usd for reply in rollout.replies),
        **spans.messages(
            "gen_ai.input.messages",
            [Message(role="user", content=str(rollout.row.get("question", "")))],
        ),
        **spans.messages("gen_ai.output.messages", answer, finish_reason=rollout.status),
    }
