"""The session of one rollout: answers the calls of its program until the rollout ends.

A call of the policy takes three steps. `accept` checks the limits and finds the reply that the
call continues (see `call_tree.py`). `sample_reply` samples the policy's turn. Then the gateway
sends it to the client. If that fails, `mark_undelivered` takes the reply back: it is not in the
loss, and no later call continues it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from ..llm import ChatModel, Message, Reply, as_chat
from ..rollout import (
    ChatFormat,
    Limits,
    Policy,
    Rollout,
    Sample,
    SampleRequest,
    Status,
    rollout_seed,
    sample_turn,
)
from .call_tree import Call, CallTree, MalformedArguments, conversation_keys, share_messages
from .protocol import ChatMessage, Completion, CompletionRequest, Refusal
from .rendering import Renderer, read_turn
from .request_threads import run_in_request_thread
from .session_end import ReachedLimit, SessionEnd

logger = logging.getLogger(__name__)
T = TypeVar("T")

# End the rollout after this many calls in a row whose context left no room for a reply. Calls
# before that get an error upon which clients shorten their conversation.
MAX_CONTEXT_ERRORS = 3

# Conversations with more characters than this are rendered in a thread. Each message counts as some
# more characters, because templates take time for each.
LONG_CONVERSATION = 20_000
CHARACTERS_OF_MESSAGE = 100

MAX_PARALLEL_LARGE_REQUESTS = 2  # of one rollout, while they are read and rendered


class Session:
    """Answers the calls of one rollout. Lives on the background event loop.

    Args:
        rollout ([`Rollout`]): The rollout.
        policy ([`Policy`]): Samples the replies.
        renderer ([`Renderer`]): Turns conversations into token ids.
        limits ([`Limits`]): `max_turn_tokens` of a reply; `max_tokens` and `max_context` of a token
            sequence.
        llms (`dict[str, ChatModel]`, *optional*): Large LLMs by their names as models.
        max_calls (`int`, *optional*, defaults to `64`): Maximum number of calls of the policy,
            including refused ones.
        max_llm_calls (`int`, *optional*, defaults to `64`): Maximum number of calls of large LLMs.
        max_sequences (`int`, *optional*, defaults to `16`): Maximum number of token sequences.
        system_prompt (`str`, *optional*): Prepended to each conversation.
        model (`str`, *optional*, defaults to `"agent"`): The policy's name as a model.
        conversation_ids (`Iterator[int]`, *optional*): Values of [`SampleRequest.conversation`].
        grace_period (`float`, *optional*): Seconds between the first call that is refused for good
            and the end of the session. By default the session waits for the program.

    Attributes:
        tree ([`CallTree`]): The calls of the policy.
        llm_replies (`list[Reply]`): Replies of large LLMs since the last call of the policy.
        llm_call_count (`int`): Calls of large LLMs.
        llm_seconds (`float`): Seconds that these took.
        ignored_settings (`dict`): Settings in requests that have no effect here.
        limit_reached ([`ReachedLimit`], *optional*): The first limit that the rollout exceeded.
        end ([`SessionEnd`]): Whether calls are answered, and why not.
        large_request_slots (`asyncio.Semaphore`): One is held while a large request is read and
            rendered.
    """

    def __init__(
        self,
        rollout: Rollout,
        policy: Policy,
        renderer: Renderer,
        limits: Limits,
        llms: Mapping[str, ChatModel] | None = None,
        max_calls: int = 64,
        max_llm_calls: int = 64,
        max_sequences: int = 16,
        system_prompt: str | None = None,
        model: str = "agent",
        conversation_ids: Iterator[int] | None = None,
        grace_period: float | None = None,
    ):
        self.rollout = rollout
        self.policy = policy
        self.renderer = renderer
        self.limits = limits
        self.llms = dict(llms or {})

        self.system_prompt = system_prompt
        self.model = model
        self.grace_period = grace_period

        # The limits of the rollout.
        self.max_calls = max_calls
        self.max_llm_calls = max_llm_calls
        self.max_sequences = max_sequences

        # Requests of all kinds, including token counts and requests that are refused unread.
        self.max_requests = 64 + 4 * max_calls
        if self.llms:
            self.max_requests += 4 * max_llm_calls

        # State that the gateway and the program read.
        self.tree = CallTree()
        self.llm_replies: list[Reply] = []
        self.llm_call_count = 0
        self.llm_seconds = 0.0
        self.ignored_settings: dict[str, Any] = {}
        self.limit_reached: ReachedLimit | None = None
        self.end = SessionEnd()
        self.large_request_slots = asyncio.Semaphore(MAX_PARALLEL_LARGE_REQUESTS)

        # By default far from the numbers that `rollout.play` gives to its conversations.
        self._conversation_ids = conversation_ids or iter(range(2**40, 2**62))
        self._malformed_arguments = MalformedArguments()
        self._running: set[asyncio.Future[Any]] = set()  # calls in progress, for `close` to cancel
        self._request_count = 0
        self._last_activity = time.monotonic()  # a request, or the end of a call
        self._call_count = 0
        self._context_errors = 0  # since the last call that continued a conversation
        # Attempts whose reply was undelivered and is removed already, by conversation, until the
        # client repeats them.
        self._expected_retries: Counter[bytes] = Counter()
        self._llm_request_counts: Counter[int] = Counter()  # by hash of the request

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request or reply; 0 while a call is in progress."""
        if self._running:
            return 0.0
        return time.monotonic() - self._last_activity

    @property
    def has_requests(self) -> bool:
        """Whether any request has reached the session, of whatever kind."""
        return self._request_count > 0

    # ---- before the body of a request is read ----

    def count_request(self) -> None:
        """Count a request of any kind.

        Raises:
            [`Refusal`]: The session has ended, or the rollout has sent too many requests.
        """
        self.end.refuse_if_over()
        self._last_activity = time.monotonic()
        self._request_count += 1
        if self._request_count > self.max_requests:
            self._refuse_over_limit("requests", self.max_requests)

    def check_calls_left(self) -> None:
        """Check that a call can still be made, of the policy or a large LLM.

        Raises:
            [`Refusal`]: The rollout has made all its calls.
        """
        # Which model a request is for is unknown before its body is read. Without large LLMs only
        # the policy's calls count.
        can_call_policy = self._call_count < self.max_calls
        can_call_llm = bool(self.llms) and self.llm_call_count < self.max_llm_calls
        if not can_call_policy and not can_call_llm:
            self._refuse_over_limit("calls", self.max_calls)

    def count_unreadable_request(self) -> None:
        """Count a request that cannot be read: it uses up one of the policy's calls."""
        self._call_count += 1

    # ---- calls of the policy ----

    async def accept(self, request: CompletionRequest, is_retry: bool = False) -> Call:
        """Accept a call of the policy, or refuse it before anything is sent to the client.

        Args:
            request ([`CompletionRequest`]): The request.
            is_retry (`bool`, *optional*, defaults to `False`): Whether the client says that it
                repeats a request.

        Returns:
            [`Call`]: The call. The caller must then call `sample_reply` or `mark_undelivered`.

        Raises:
            [`Refusal`]: The session has ended, a limit is reached, or the template cannot render
                the conversation.
        """
        self.end.refuse_if_over()
        # Count the call even if it is refused later: a client that repeats it must come to an end.
        if self._call_count >= self.max_calls:
            self._refuse_over_limit("calls", self.max_calls)
        self._call_count += 1
        self._check_template(request)
        self.ignored_settings |= request.other_settings

        # Find the place of the call in the tree, which renders its messages.
        call = await self._build_call(request, is_retry)
        self.end.refuse_if_over()  # the session may have ended while the conversation was rendered
        adds_sequence = self.tree.would_add_sequence(call)
        if adds_sequence and self.tree.sequence_count >= self.max_sequences:
            self._refuse_over_limit("sequences", self.max_sequences)
        call.max_tokens = self._room_for_reply(call)

        # Only a continuation resets the count. A new conversation does not, because opencode would
        # write summaries that fit, and exceed the context after each of them, forever.
        if call.is_continuation:
            self._context_errors = 0

        # The calls of a sequence share a conversation: the policy may keep its keys and values.
        if call.parent is None or adds_sequence:
            call.conversation_id = next(self._conversation_ids)
        else:
            call.conversation_id = call.parent.conversation_id

        # Add the call now, so that parallel calls get other seeds and respect the limits together.
        self.tree.add(call)
        return call

    async def count_tokens(self, request: CompletionRequest) -> int:
        """Count the tokens of a request without sampling a reply.

        Raises:
            [`Refusal`]: The session has ended, or the template cannot render the conversation.
        """
        self.end.refuse_if_over()
        messages = self._restore_conversation(request)
        return len(await self._render_whole(messages, request))

    async def sample_reply(self, call: Call) -> Completion:
        """Sample the policy's reply to a call.

        Raises:
            [`Refusal`]: The session has ended.
        """
        self.end.refuse_if_over()  # it may have ended while the stream was opened

        # The seed depends on the context, and on how many calls have had it before.
        sample_request = SampleRequest(
            context=call.context,
            max_new_tokens=call.max_tokens,
            seed=self.compute_seed(call),
            conversation=call.conversation_id,
        )
        # Turns are numbered from 0, calls from 1.
        turn_number = call.number - 1
        turn = sample_turn(self.policy, sample_request, turn_number, self.renderer.chat_format)
        try:
            sample = await self._run_cancellable(turn)
        except Exception as error:
            # An error of the policy fails the rollout, and the client gets a refusal.
            self.mark_undelivered(call)
            self.end.fail_and_refuse(error)
        except BaseException:
            # A cancellation: the client has hung up, or the session has ended.
            self.mark_undelivered(call)
            self.end.refuse_if_over()
            raise

        # If the session ended while the policy sampled, the client gets no reply.
        if self.end.is_over:
            self.mark_undelivered(call)
        self.end.refuse_if_over()
        return self._record_reply(call, sample)

    def compute_seed(self, call: Call) -> int:
        """Compute the seed of a call from its context and its number among the calls with it.

        Its number in the rollout is not used, because parallel calls arrive in any order.
        """
        return rollout_seed(self.rollout.seed, call.context_hash, call.repeat_index)

    def mark_undelivered(self, call: Call) -> None:
        """Take back a reply that its client did not get, unless another call continues it."""
        if not call.is_continued and self.tree.remove(call):
            # The client's retry must not take back another reply.
            self._expected_retries[call.key] += 1

    # ---- calls of large LLMs ----

    async def call_llm(self, request: CompletionRequest) -> Completion:
        """Get a large LLM's reply. If it fails, the rollout fails, even if the program recovers.

        Raises:
            [`Refusal`]: The session has ended, the limit is reached, or the request has tools.
        """
        self.end.refuse_if_over()
        # Count the call even if it is refused for its tools.
        if self.llm_call_count >= self.max_llm_calls:
            self._refuse_over_limit("calls of large LLMs", self.max_llm_calls)
        self.llm_call_count += 1
        if request.tools:
            message = f"{request.model} has no tools at this address."
            raise Refusal(400, message, "unsupported_value", "tools")

        # A large LLM has no tools here, so results of tools are sent as the user's messages.
        messages: list[Message] = []
        for chat_message in request.messages:
            role = "user" if chat_message.role == "tool" else chat_message.role
            messages.append({"role": role, "content": chat_message.text})

        # All calls of a rollout are one session, which a router sends to one model.
        pending_reply = as_chat(self.llms[request.model])(
            messages,
            repeat=self._next_llm_seed(request.model, messages),
            session=str(self.rollout.seed),
            **self._llm_sampling(request),
        )

        # Ask the model. Its time counts even if the call is cancelled.
        start = time.monotonic()
        try:
            reply = await self._run_cancellable(pending_reply)
        except BaseException:
            # The client hung up, or the session ended.
            self.end.refuse_if_over()
            raise
        finally:
            self.llm_seconds += time.monotonic() - start

        # Keep the reply for the next call of the policy. A failed one ends the session.
        self.llm_replies.append(reply)
        if reply.error is not None:
            self.end.fail_and_refuse(reply.error)
        return Completion(
            model=request.model,
            text=reply.text,
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.usage.prompt_tokens,
            completion_tokens=reply.usage.completion_tokens,
        )

    def _llm_sampling(self, request: CompletionRequest) -> dict[str, Any]:
        """Return the sampling parameters of a request that a large LLM gets."""
        sampling: dict[str, Any] = {}
        # The policy samples as it is trained. A large LLM samples as the request says.
        for name in ("temperature", "top_p"):
            if name in request.other_settings:
                sampling[name] = request.other_settings[name]
        if request.stops:
            sampling["stop"] = list(request.stops)

        # A request can lower the model's own token limit, and not raise it.
        defaults = getattr(self.llms[request.model], "sampling", None)
        default_limit = defaults.get("max_tokens") if isinstance(defaults, Mapping) else None
        limits = [limit for limit in (request.max_tokens, default_limit) if limit]
        if limits:
            sampling["max_tokens"] = min(limits)
        return sampling

    def _next_llm_seed(self, model: str, messages: Sequence[Message]) -> int:
        """Return the seed of a request to a large LLM, and count the request.

        The seed finds a recorded reply again. The first request with these messages has the
        rollout's seed, as in [`LLMEnvironment`]. Each repetition of it has another seed, so that it
        gets another sample.
        """
        request_hash = zlib.crc32(json.dumps([model, messages], sort_keys=True).encode())
        self._llm_request_counts[request_hash] += 1
        count = self._llm_request_counts[request_hash]
        if count == 1:
            return self.rollout.seed
        return rollout_seed(self.rollout.seed, count)

    # ---- the end ----

    def close(self, reason: str) -> None:
        """Answer no further call, and cancel the calls in progress. The first end counts."""
        self.end.finish(reason)

        # Cancel the calls in progress, and take them out of the tree at once.
        for task in self._running:
            task.cancel()
        unanswered_calls = [call for call in self.tree.calls if not call.has_reply]
        for call in unanswered_calls:
            self.tree.remove(call)

    async def _run_cancellable(self, call: Awaitable[T]) -> T:
        """Await a call in such a way that `close` can cancel it."""
        # In a task of its own: if `close` cancels it, the handler can still send a refusal.
        task = asyncio.ensure_future(call)
        self._running.add(task)
        try:
            return await task
        except BaseException:
            task.cancel()
            raise
        finally:
            self._running.discard(task)
            self._last_activity = time.monotonic()

    def _refuse_for_good(self, message: str) -> NoReturn:
        """Refuse a call whose program should end now. After a grace period the session ends."""
        if self.grace_period is not None:
            self.end.start_timer(self.grace_period, partial(self.close, "the program has ended"))
        raise Refusal(400, message, "rollout_ended")

    # ---- limits ----

    def _check_template(self, request: CompletionRequest) -> None:
        """Refuse a request if the chat template would drop a part of its conversation.

        If it drops a part of every conversation of this run, the rollout fails.
        """
        # The parts of every conversation: user messages, replies, and any system prompt of the run.
        has_system_prompt = bool(self.system_prompt)
        problem = self.renderer.find_problem(with_tools=False, with_system=has_system_prompt)
        if problem is not None:
            self.end.fail_and_refuse(problem)

        # Further parts of this request: system messages, tools, their results.
        has_system = has_system_prompt or any(
            message.role == "system" for message in request.messages
        )
        has_results = any(
            message.tool_calls or message.role == "tool" for message in request.messages
        )
        problem = self.renderer.find_problem(bool(request.tools) or has_results, has_system)
        if problem is not None:
            self.renderer.warn_of(problem)
            message = f"This request cannot be answered: {problem}"
            raise Refusal(400, message, "unsupported_value", "messages")

    def _room_for_reply(self, call: Call) -> int:
        """Return the maximum number of tokens of a reply, or refuse a call that leaves none."""
        # Tokens in the sequence so far, without the prompt of the conversation's first call. A call
        # that adds a sequence is counted in the same way: by content it may still come first among
        # the continuations of its parent, and then it stays in the parent's sequence.
        sequence_length = call.context_length - call.root.context_length
        remaining = self.limits.max_tokens - sequence_length
        if self.limits.max_context is not None:
            remaining = min(remaining, self.limits.max_context - call.context_length)
        if remaining < 1:
            self._refuse_context(call.context_length, call.context_length + remaining)

        # The reply ends at the tightest limit: of the sequence, of a turn, or of the request.
        max_turn_tokens = self.limits.max_turn_tokens
        requested = call.request.max_tokens or max_turn_tokens
        return min(remaining, max_turn_tokens, requested)

    def reach_limit(self, status: Status, name: str = "", size: int = 0) -> None:
        """Record a limit that the rollout has exceeded; see [`ReachedLimit`]. The first counts."""
        if self.limit_reached is None:
            if name:
                logger.info("a rollout has reached its limit of %d %s", size, name)
            self.limit_reached = ReachedLimit(status, name, size)

    def _refuse_over_limit(self, limit_name: str, limit: int) -> NoReturn:
        """Refuse a call that exceeds a limit of the rollout.

        Args:
            limit_name (`str`): What there are no more of: `calls`, `requests`, ...
            limit (`int`): How many of them a rollout may have.
        """
        self.reach_limit("out_of_turns", limit_name, limit)
        # Without the number: opencode retries for half a minute if it reads 429, 500 or 502.
        # Without the words "limit" and "token", by which clients know a full context.
        self._refuse_for_good(f"This rollout is over: it has used up its {limit_name}.")

    def _refuse_context(self, length: int, max_length: int) -> NoReturn:
        """Refuse a call whose context leaves no room for a reply."""
        self.reach_limit("truncated")
        self._context_errors += 1
        # Most clients shorten their conversation now. One that does not would go on forever.
        if self._context_errors >= MAX_CONTEXT_ERRORS:
            self._refuse_for_good("This rollout is over: it has no room left.")
        message = context_exceeded_message(length, max_length)
        raise Refusal(400, message, "context_length_exceeded", "messages")

    # ---- from a request to a call ----

    def _restore_conversation(self, request: CompletionRequest) -> tuple[ChatMessage, ...]:
        """Return the conversation as the policy has it.

        It has the system prompt, and tool arguments as the policy wrote them.
        """
        messages = map(self._malformed_arguments.restore, request.messages)
        if self.system_prompt:
            return (ChatMessage("system", self.system_prompt), *messages)
        return tuple(messages)

    async def _build_call(self, request: CompletionRequest, is_retry: bool) -> Call:
        """Find the reply that a request continues, and render the messages after it."""
        number = self._call_count  # now, because other calls may arrive during rendering
        messages = self._restore_conversation(request)
        keys = list(conversation_keys(request.tools, messages))
        if is_retry:
            self._take_back_first_attempt(keys[-1])

        # Continue the latest reply in the conversation, if the template can append to it. The
        # client has received it, so it must not be taken back during rendering.
        parent, new_messages = self.tree.find_parent(messages, keys)
        if parent is not None:
            with parent.preparing_continuation():
                new_ids = await self._render_after(parent, new_messages, messages, request)
            if new_ids is not None:
                return Call(
                    request=share_messages(request, parent.request),
                    number=number,
                    new_messages=tuple(new_messages),
                    new_ids=new_ids,
                    parent=parent,
                    key=keys[-1],
                )

        # Otherwise start a token sequence.
        whole_ids = await self._render_whole(messages, request)
        return Call(request, number, new_messages=messages, new_ids=whole_ids, key=keys[-1])

    async def _render_whole(
        self, messages: Sequence[ChatMessage], request: CompletionRequest
    ) -> list[int]:
        """Return the ids of a whole conversation."""
        render = partial(self.renderer.whole_ids, messages, request.tools)
        return await _render(render, messages)

    async def _render_after(
        self,
        parent: Call,
        new_messages: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        request: CompletionRequest,
    ) -> list[int] | None:
        """Return the ids of the messages after a reply.

        `None` if the template cannot append them.
        """
        render = partial(
            self.renderer.ids_after,
            parent.sample.ids,
            parent.reply,
            new_messages,
            messages,
            request.tools,
        )
        return await _render(render, new_messages)

    def _take_back_first_attempt(self, key: bytes) -> None:
        """Take back the reply to the first attempt of a request that a client repeats.

        If an attempt is known to be undelivered, it was that one, and its reply is gone already.
        Otherwise it was the latest call with this conversation whose reply no call continues.
        """
        if self._expected_retries[key]:
            self._expected_retries[key] -= 1
            return
        first_attempt = self.tree.find_uncontinued(key)
        if first_attempt is not None:
            self.tree.remove(first_attempt)

    # ---- from a sample to a reply ----

    def _record_reply(self, call: Call, sample: Sample) -> Completion:
        """Turn a sample into the reply of its call and the completion for the client."""
        # Parse the text in front of the stop.
        request = call.request
        cut_reply = cut_at_stop(sample, request.stops, self.renderer.chat_format)
        call.sample = cut_reply.sample
        # The template has written the prefix: the policy has not sampled it.
        call.text = self.renderer.turn_prefix + cut_reply.text
        # With `tool_choice: none` the whole turn is text.
        callable_tools = request.tools if request.allows_tool_calls else ()
        turn = read_turn(call.text, callable_tools, request.custom_tools)
        # Clients of some dialects send the handle back, which tells equal replies apart.
        reply = replace(turn, handle=secrets.token_hex(12))

        # Later requests are compared with the reply, and get its malformed arguments back.
        self.tree.set_reply(call, reply)
        self._malformed_arguments.record(reply)

        # Replies of large LLMs belong to the next call of the policy.
        call.llm_replies = tuple(self.llm_replies)
        self.llm_replies.clear()

        # Write the completion.
        if not call.sample.finished:
            finish_reason = "length"
        elif reply.tool_calls:
            finish_reason = "tool_calls"
        else:
            finish_reason = "stop"
        return Completion(
            model=request.model,
            text=reply.text,
            thought=reply.thought,
            tool_calls=reply.tool_calls,
            finish_reason=finish_reason,
            stop_text=cut_reply.stop_text,
            prompt_tokens=call.context_length,
            completion_tokens=len(call.sample.ids),
            logprobs=self._token_logprobs(call.sample) if request.logprobs else None,
            id=reply.handle,
        )

    def _token_logprobs(self, sample: Sample) -> list[tuple[str, float]] | None:
        """Return the text and log-probability of each token; `None` if the policy returns none."""
        if sample.logprobs is None:
            return None
        decode = self.renderer.chat_format.tokenizer.decode
        tokens = [decode([token_id]) for token_id in sample.ids]
        return list(zip(tokens, sample.logprobs, strict=True))


async def _render(render: Callable[[], T], messages: Sequence[ChatMessage]) -> T:
    """Render messages, in a thread if they are long: a megabyte takes a second."""
    length = CHARACTERS_OF_MESSAGE * len(messages)
    for message in messages:
        length += len(message.text) + len(message.thought)
        length += sum(len(call.arguments) for call in message.tool_calls)
    if length > LONG_CONVERSATION:
        return await run_in_request_thread(render)
    return render()


def context_exceeded_message(length: int, max_length: int) -> str:
    """Return the message of a refusal.

    It contains the phrases of OpenAI, Anthropic and Google, because their clients match on them.
    """
    return (
        f"This model's maximum context length is {max_length} tokens. Your messages have {length}: "
        f"prompt is too long: {length} tokens > {max_length} maximum; "
        "it exceeds the maximum number of tokens."
    )


@dataclass(frozen=True)
class CutReply:
    """A sample up to its first stop text.

    Args:
        sample ([`Sample`]): Up to the token that completes the stop text; unchanged if it has none.
        text (`str`): The text before the stop text.
        stop_text (`str`, *optional*): The stop text.
    """

    sample: Sample
    text: str
    stop_text: str | None = None


def cut_at_stop(sample: Sample, stops: Sequence[str], chat_format: ChatFormat) -> CutReply:
    """Cut a sample after the first stop text."""
    # Decode without the tokens that end the turn.
    length = 0
    while length < len(sample.ids) and sample.ids[length] not in chat_format.end_of_turn_ids:
        length += 1
    decode = chat_format.tokenizer.decode
    text = decode(sample.ids[:length], skip_special_tokens=False)

    # Find the stop texts. If two begin at the same place, the first in the request wins.
    stop_positions = {text.find(stop): stop for stop in reversed(stops) if stop in text}
    if not stop_positions:
        return CutReply(sample, text)

    def contains_stop(token_count: int) -> bool:
        prefix = decode(sample.ids[:token_count])
        return any(stop in prefix for stop in stops)

    # Bisect the number of tokens to keep: decoding the text once per token would be quadratic.
    cut_length = bisect_left(range(length + 1), True, lo=1, key=contains_stop)
    # A reply that ends at a stop text is finished, as if the policy had ended its turn.
    cut_sample = replace(
        sample,
        ids=sample.ids[:cut_length],
        logprobs=None if sample.logprobs is None else sample.logprobs[:cut_length],
        finished=True,
        updates=sample.updates[:cut_length],
    )
    # The text ends in front of the stop text, though the sample contains its tokens.
    position = min(stop_positions)
    return CutReply(cut_sample, text[:position], stop_positions[position])
