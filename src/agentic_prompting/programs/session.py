"""One rollout's calls, and the token sequences that they make.

A call whose conversation goes on from an earlier reply of ours continues the ids of that reply; any other begins a
sequence. A reply is recognised by its place in the conversation: everything before it is the same, and it has the same
words, or calls the same tools with the same values, however a client's framework has copied it. Thoughts and white
space do not count, and ids of calls only decide between replies that are the same otherwise.

A reply that was not delivered to its client leaves the loss, and nothing goes on from it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import zlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from ..llm import ChatModel, Message, Reply, as_chat
from ..rollout import Limits, Policy, Rollout, Sample, SampleRequest, Status, TokenSequence, rollout_seed, sample_turn
from .fields import is_json
from .matching import contains_words, key_of, keys_of, plain
from .protocol import Asked, Completion, Entry, Refusal
from .rendering import Renderer, read_turn

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LONG = 20_000  # characters and a hundred times the messages, from which on a conversation is rendered on a thread
_PATIENCE = 3  # prompts that do not fit, without a call that goes on in between, before the rollout is over


@dataclass(eq=False)
class Call:
    """A call of the policy by a program.

    Args:
        asked ([`Asked`]): The request: `model`, `entries` (the whole conversation), `tools`, ...
        number (`int`): Its number in the rollout, in the order in which requests came.
        new (`tuple[Entry, ...]`): The messages since the reply that it goes on from; all of them if there is none.

    Attributes:
        context (`list[int]`): The ids that the policy read.
        reply ([`Entry`]): The policy's turn, read.
        role (`str`): `agent`, or `auxiliary` for a call beside the agent's work, such as a title.
        trains (`bool`): Whether its tokens are in the loss.
    """

    asked: Asked
    number: int
    new: tuple[Entry, ...] = ()
    reply: Entry = Entry("assistant")
    role: str = "agent"
    trains: bool = True
    text: str = ""
    sample: Sample = field(default_factory=lambda: Sample([]), repr=False)
    replies: tuple[Reply, ...] = ()  # of large LLMs, asked since the call before
    _max_tokens: int = 1
    _parent: Call | None = None
    _root: Call | None = None
    _children: list[Call] = field(default_factory=list, repr=False)
    _continuations: int = 0  # calls that go on from it and are rendered at the moment
    # The ids behind the parent's reply. A whole context for each call would make the memory of a rollout quadratic.
    _ids: list[int] = field(default_factory=list, repr=False)
    _length: int = 0  # of the context
    _key: bytes = b""  # of the conversation
    _end: bytes = b""  # of the conversation with the reply
    _conversation: int = 0
    _place: int = 0  # a hash of the context
    _repeat: int = 0  # tells calls with the same context apart

    @property
    def goes_on(self) -> bool:
        """Whether it goes on from an earlier reply, instead of beginning a token sequence."""
        return self._parent is not None

    @property
    def context(self) -> list[int]:
        parts, call = [self._ids], self
        while call._parent is not None:
            call = call._parent
            parts += [call.sample.ids, call._ids]
        ids: list[int] = []
        for part in reversed(parts):
            ids += part
        return ids


class Session:
    """The calls of one rollout. Lives on the background loop.

    Args:
        rollout ([`Rollout`]): Whose calls these are.
        policy ([`Policy`]): Samples the replies.
        renderer ([`Renderer`]): Conversations to tokens.
        limits ([`Limits`]): `max_turn_tokens` for a reply, `max_tokens` and `max_context` for a sequence.
        llms (`dict[str, ChatModel]`, *optional*): Large LLMs, by the name that a request has as its model.
        max_calls (`int`, *optional*, defaults to `64`): Calls of the policy, refused ones among them.
        max_llm_calls (`int`, *optional*, defaults to `64`): Calls of large LLMs.
        max_sequences (`int`, *optional*, defaults to `16`): Token sequences.
        system (`str`, *optional*): Stands in front of each conversation.
        model (`str`, *optional*, defaults to `"agent"`): The policy's name.
        conversations (`Iterator[int]`, *optional*): Gives numbers for [`SampleRequest.conversation`].

    Attributes:
        calls (`list[Call]`): Those whose replies were delivered, in the order in which they were sampled.
        stopped (`str`): Which limit the program ran into: `truncated`, `out_of_turns` or empty.
        broken (`Future`): Gets the exception that ends the rollout: the policy's own, or a large LLM's error.
    """

    def __init__(
        self,
        rollout: Rollout,
        policy: Policy,
        renderer: Renderer,
        limits: Limits,
        llms: Mapping[str, ChatModel] | None = None,
        max_calls: int = 64,
        max_sequences: int = 16,
        system: str | None = None,
        model: str = "agent",
        conversations: Iterator[int] | None = None,
        max_llm_calls: int = 64,
    ):
        self.rollout, self.policy, self.renderer, self.limits = rollout, policy, renderer, limits
        self.llms, self.max_calls, self.max_sequences = dict(llms or {}), max_calls, max_sequences
        self.system, self.model, self.max_llm_calls = system, model, max_llm_calls
        # Of any kind: also those that are refused, count tokens or list models.
        self.max_requests = 64 + 4 * (max_calls + (max_llm_calls if llms else 0))
        self.calls: list[Call] = []
        self.replies: list[Reply] = []  # of large LLMs, since the last call of the policy
        self.stopped: Status | None = None
        self.spent = asyncio.Event()  # a call was refused for good
        self.over = ""  # why no call is answered any more
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.undelivered = 0  # tokens of replies that reached no client
        self.ignored: dict[str, Any] = {}
        # The seed of a call, by what is asked and not by when: parallel calls arrive in any order.
        self.seed_of: Callable[[Call, int], int] = lambda call, times: rollout_seed(rollout.seed, call._place, times)
        self._conversations = conversations or iter(range(2**40, 2**62))
        self._ends: dict[bytes, list[Call]] = {}
        self._by_handle: dict[str, Entry] = {}
        self._broken: dict[str, str] = {}  # by the id of a call: its arguments, if they are no JSON
        self._repeats: dict[int, set[int]] = {}  # of calls, by their place
        self._asked_large: Counter[int] = Counter()
        self._lost: Counter[bytes] = Counter()  # attempts by conversation that were not asked again yet
        self._working: set[asyncio.Future[Any]] = set()
        self._number = self._too_long = self._begun = 0  # calls asked, without room of late, beginning a sequence
        self._requests = self._llm_calls = 0
        self.large_requests = asyncio.Semaphore(2)

    # --- a call ------------------------------------------------------------------------------------------------------

    def count_request(self) -> None:
        """Count a request of any kind, before its body is read.

        Raises:
            [`Refusal`]: The rollout is over, or has sent too many requests.
        """
        self._refuse_if_over()
        self._requests += 1
        if self._requests > self.max_requests:
            raise self._spent(f"it may send {self.max_requests} requests")

    def check_calls_left(self) -> None:
        """Refuse a request before its body is read, where all calls are made.

        Raises:
            [`Refusal`]: The rollout has made all its calls.
        """
        if self._number >= self.max_calls and (not self.llms or self._llm_calls >= self.max_llm_calls):
            raise self._spent(f"it may make {self.max_calls} calls")

    def count_unreadable(self) -> None:
        """Count a request that could not be read as a call of the policy."""
        self._number += 1

    async def ask(self, asked: Asked, is_retry: bool = False) -> Call:
        """Take a request. A request that is refused is refused here, before anything is sent to the client.

        Args:
            asked ([`Asked`]): The request, of the policy.
            is_retry (`bool`, *optional*, defaults to `False`): The client says that it sends the same request again.

        Returns:
            [`Call`]: Has to be given to `reply`, or to `lost`.

        Raises:
            [`Refusal`]: In its place.
        """
        self._refuse_if_over()
        if self._number >= self.max_calls:
            raise self._spent(f"it may make {self.max_calls} calls")
        self._number += 1
        self._check_template(asked)
        self.ignored |= asked.ignored
        entries = self._conversation_of(asked)
        call = Call(asked, self._number, entries)
        keys = [*keys_of(asked.tools, entries)]
        call._key = keys[-1]
        if is_retry:
            self._forget_first_attempt(call._key)
        await self._find_parent(call, entries, keys)
        if call._parent is None:
            call._ids = await _rendered(entries, self.renderer.whole_ids, entries, asked.tools)
            call._length = len(call._ids)
        self._refuse_if_over()
        self._check_room(call)
        self._add(call)
        return call

    async def count(self, asked: Asked) -> int:
        """How many tokens a request has, without an answer by the policy.

        Raises:
            [`Refusal`]: The rollout is over, or the template cannot render it.
        """
        self._refuse_if_over()
        entries = self._conversation_of(asked)
        return len(await _rendered(entries, self.renderer.whole_ids, entries, asked.tools))

    async def reply(self, call: Call) -> Completion:
        """The policy's reply.

        Raises:
            [`Refusal`]: The rollout has ended meanwhile.
        """
        self._refuse_if_over()  # since `ask`: the client had to be told that a stream begins
        seed = self.seed_of(call, call._repeat)
        request = SampleRequest(call.context, call._max_tokens, seed, call._conversation)
        work = asyncio.ensure_future(sample_turn(self.policy, request, call.number - 1, self.renderer.form))
        self._working.add(work)
        try:
            sample = await work
            self._refuse_if_over()
        except BaseException as error:
            work.cancel()
            self.lost(call)
            self._refuse_if_over()
            if isinstance(error, Exception) and not isinstance(error, Refusal):
                self.fail(error)
                self._refuse_if_over()
            raise
        finally:
            self._working.discard(work)
        return self._read(call, sample)

    def lost(self, call: Call) -> None:
        """The client did not get the reply."""
        if not call._children and not call._continuations:  # a client that goes on from it has got it
            self._forget(call)
            self._lost[call._key] += 1

    def fail(self, error: BaseException) -> None:
        """End the rollout with this error."""
        self.over = self.over or "failed"
        if not self.broken.done():
            self.broken.set_exception(error)

    def close(self, why: str) -> None:
        """Answer no call any more, and end those in progress."""
        self.over = self.over or why
        for work in self._working:
            work.cancel()
        for call in [call for call in self.calls if not call._end]:
            self._forget(call)
        if self.broken.done():
            self.broken.exception()  # so that asyncio does not report it
        else:
            self.broken.cancel()

    # --- the parts of a call ---------------------------------------------------------------------------------------

    def _refuse_if_over(self) -> None:
        # 400, because clients try other statuses again; and no word that smells of a context that could be shortened.
        if self.over:
            raise Refusal(400, f"This rollout is over ({self.over}): no call is answered any more.", "rollout_ended")

    def _check_template(self, asked: Asked) -> None:
        """Refuse a request that the chat template would lose a part of. Where it loses parts of every conversation of
        this run, the run's own system prompt included, the rollout fails."""
        problem = self.renderer.problem(with_tools=False, with_system=bool(self.system))
        if problem is not None:
            self.fail(problem)
            self._refuse_if_over()
        has_system = bool(self.system) or any(entry.role == "system" for entry in asked.entries)
        has_tools = bool(asked.tools) or any(entry.calls or entry.role == "tool" for entry in asked.entries)
        problem = self.renderer.problem(has_tools, has_system)
        if problem is not None:
            self.renderer.warn_of(problem)
            raise Refusal(400, f"This request cannot be answered: {problem}", "unsupported_value", "messages")

    def _spent(self, why: str) -> Refusal:
        if self.stopped is None:
            logger.info("a rollout has reached a limit: %s", why)
        self.stopped = self.stopped or "out_of_turns"
        self.spent.set()
        # Without the number: opencode asks again for half a minute where a text holds 429, 500 or 502.
        return Refusal(400, "This rollout is over: it has made all its calls.", "rollout_ended")

    def _conversation_of(self, asked: Asked) -> tuple[Entry, ...]:
        entries = tuple(map(self._as_issued, asked.entries)) if self._broken else asked.entries
        return (Entry("system", self.system), *entries) if self.system else entries

    def _as_issued(self, entry: Entry) -> Entry:
        """With those arguments of ours that are no JSON: some clients send them back as a value of their own. They are
        known by the handle of the reply, also where a client drops the ids of calls, or by those ids."""
        ours = self._by_handle.get(entry.handle, Entry("assistant")).calls
        is_same = [one.name for one in ours] == [one.name for one in entry.calls]
        if is_same and any(one.id in self._broken for one in ours):
            return replace(entry, calls=ours)
        if not any(call.id in self._broken for call in entry.calls):
            return entry
        return replace(
            entry, calls=tuple(replace(c, arguments=self._broken.get(c.id, c.arguments)) for c in entry.calls)
        )

    async def _find_parent(self, call: Call, entries: Sequence[Entry], keys: Sequence[bytes]) -> None:
        """Find the latest reply in the conversation that the call goes on from."""
        for i in reversed(range(len(entries) - 1)):
            found = self._ends.get(keys[i])
            if not found:
                continue
            parent, new = _likeliest(found, entries[i]), entries[i + 1 :]
            seam = parent.sample.ids, parent.reply, new, entries, call.asked.tools
            parent._continuations += 1
            try:
                between = await _rendered(new, self.renderer.ids_after, *seam)
            finally:
                parent._continuations -= 1
            if between is not None:
                call._parent, call._root, call.new = parent, parent._root or parent, tuple(new)
                call._ids, call._length = between, parent._length + len(parent.sample.ids) + len(between)
                call.asked = _sharing(call.asked, parent.asked)
            return

    def _check_room(self, call: Call) -> None:
        if (call._parent is None or call._parent._children) and self._begun >= self.max_sequences:
            raise self._spent(f"its calls may make {self.max_sequences} token sequences")
        limits, length = self.limits, call._length
        used = length - call._root._length if call._root else 0
        room = [limits.max_tokens - used]
        if limits.max_context is not None:
            room.append(limits.max_context - length)
        if min(room) < 1:
            self._too_long += 1
            self.stopped = self.stopped or "truncated"
            if self._too_long >= _PATIENCE:
                self.spent.set()
                raise Refusal(400, "This rollout is over: it has no room left.", "rollout_ended")
            most = length + min(room)  # in the words of all vendors, by which their clients know this error
            what = f"This model's maximum context length is {most} tokens. Your messages have {length}: "
            what += f"prompt is too long: {length} tokens > {most} maximum; it exceeds the maximum number of tokens."
            raise Refusal(400, what, "context_length_exceeded", "messages")
        if call._parent is not None:  # summaries fit, and may lead to the same for ever (opencode)
            self._too_long = 0
        call._max_tokens = min(*room, limits.max_turn_tokens, call.asked.max_tokens or limits.max_turn_tokens)

    def _add(self, call: Call) -> None:
        """Give a call its place in the tree, before it is sampled: calls at the same moment have other seeds, and the
        limit for sequences holds for them together."""
        parent = call._parent
        new, before = ([*parent.sample.ids, *call._ids], parent._place) if parent else (call._ids, 0)
        call._place = zlib.crc32(array("q", new).tobytes(), before)  # what is new costs, not the history
        repeats = self._repeats.setdefault(call._place, set())
        call._repeat = len(repeats)
        if call._repeat in repeats:  # one of them was taken back
            call._repeat = next(number for number in range(len(repeats)) if number not in repeats)
        repeats.add(call._repeat)
        goes_on = parent is not None and not parent._children
        self._begun += not goes_on
        call._conversation = parent._conversation if parent and goes_on else next(self._conversations)
        if parent is not None:
            parent._children.append(call)
        self.calls.append(call)

    def _forget_first_attempt(self, key: bytes) -> None:
        """A client asks the same again. If no attempt is known to have been lost, the last reply was, unless something
        went on from it."""
        if self._lost[key]:
            self._lost[key] -= 1
            return
        for earlier in reversed(self.calls):
            if earlier._key == key and earlier._end and not earlier._children and not earlier._continuations:
                self._forget(earlier)
                return

    def _forget(self, call: Call) -> None:
        """Take a call back: no client has read its reply."""
        if call in self.calls:
            self.calls.remove(call)
            self._repeats[call._place].discard(call._repeat)
            self._begun -= call._parent is None or len(call._parent._children) > 1
            self.undelivered += len(call.sample.ids)
        if call._parent is not None and call in call._parent._children:
            call._parent._children.remove(call)
        if call in self._ends.get(call._end, ()):
            self._ends[call._end].remove(call)

    def _read(self, call: Call, sample: Sample) -> Completion:
        asked, form = call.asked, self.renderer.form
        call.sample, text = _cut(sample, asked.stops, form)
        call.text = self.renderer.turn_prefix + text
        turn = read_turn(call.text, asked.tools if asked.may_call else (), asked.custom)
        call.reply = reply = replace(turn, handle=secrets.token_hex(12))
        self._broken |= {one.id: one.arguments for one in reply.calls if not is_json(one.arguments)}
        call._end = key_of(call._key, reply)
        self._ends.setdefault(call._end, []).append(call)
        call.replies = tuple(self.replies)
        self.replies.clear()
        finish = "length" if not call.sample.finished else "tool_calls" if reply.calls else "stop"
        logprobs = None
        if asked.logprobs and call.sample.logprobs is not None:
            pairs = zip(call.sample.ids, call.sample.logprobs, strict=True)
            logprobs = [(form.tokenizer.decode([token]), value) for token, value in pairs]
        self._by_handle[reply.handle] = reply
        return Completion(
            asked.model, reply.text, reply.thought, reply.calls, finish, call._length, len(call.sample.ids),
            logprobs, id=reply.handle,
        )  # fmt: skip

    async def ask_large(self, asked: Asked) -> Completion:
        """A large LLM's reply. Its failure ends the rollout, whatever the program would have made of it.

        Raises:
            [`Refusal`]: The rollout is over, or has made all its calls of large LLMs; or the request has tools.
        """
        self._refuse_if_over()
        if self._llm_calls >= self.max_llm_calls:
            raise self._spent(f"it may make {self.max_llm_calls} calls of large LLMs")
        self._llm_calls += 1
        if asked.tools:
            raise Refusal(400, f"{asked.model} has no tools at this address.", "unsupported_value", "tools")
        sampling = {name: asked.ignored[name] for name in ("temperature", "top_p") if name in asked.ignored}
        defaults = getattr(self.llms[asked.model], "sampling", None)
        limits = [asked.max_tokens, defaults.get("max_tokens") if isinstance(defaults, Mapping) else None]
        if limits := [limit for limit in limits if limit]:  # a request may lower the model's own limit, not raise it
            sampling["max_tokens"] = min(limits)
        sampling |= {"stop": list(asked.stops)} if asked.stops else {}
        messages = [Message(role="user" if e.role == "tool" else e.role, content=e.text) for e in asked.entries]
        # As in [`LLMEnvironment`] the seed finds a recorded reply again; asked once more, it is another sample.
        request = zlib.crc32(json.dumps([asked.model, messages], sort_keys=True).encode())
        self._asked_large[request] += 1
        times, seed = self._asked_large[request], self.rollout.seed
        repeat = seed if times == 1 else rollout_seed(seed, times)
        work = asyncio.ensure_future(
            as_chat(self.llms[asked.model])(messages, repeat=repeat, session=str(seed), **sampling)
        )
        self._working.add(work)
        try:
            reply = await work
        except BaseException:
            work.cancel()
            self._refuse_if_over()
            raise
        finally:
            self._working.discard(work)
        self.replies.append(reply)
        if reply.error is not None:
            self.fail(reply.error)
            self._refuse_if_over()
        counts = (reply.usage.prompt_tokens, reply.usage.completion_tokens)
        return Completion(asked.model, reply.text, "", (), reply.finish_reason, *counts)

    # --- the end -----------------------------------------------------------------------------------------------------

    def assign_roles(self, trains: Callable[[Call], bool] | None = None) -> None:
        """Decide which calls are the agent's, and which of them are in the loss.

        A call is auxiliary if it has another model's name than the policy's, in a rollout that uses that name; or if it
        has no tools, in a rollout that has calls with tools, and its reply is in no later request and is not the last.
        """
        named = any(call.asked.model == self.model for call in self.calls)
        with_tools = any(call.asked.tools for call in self.calls)
        texts = [[plain(entry.text) for entry in call.new] for call in self.calls] if with_tools else []
        for i, call in enumerate(self.calls):
            last = i + 1 == len(self.calls)
            beside = with_tools and not call.asked.tools and not last and not self._is_used(call, texts[i + 1 :])
            other = named and call.asked.model != self.model
            call.role = "auxiliary" if beside or other else "agent"
            call.trains = call.role == "agent" if trains is None else bool(trains(call))

    @staticmethod
    def _is_used(call: Call, later: Sequence[Sequence[str]]) -> bool:
        said = plain(call.reply.text)
        return bool(call._children) or any(contains_words(text, said) for texts in later for text in texts)

    def sequences(self) -> list[tuple[TokenSequence, list[Call]]]:
        """The token sequences of the calls, each with its calls, in an order that does not depend on timing.

        Each sampled token is in one sequence, once. Of several calls that go on from one reply the first stays in its
        sequence; the contexts of the others are their prompts.
        """
        found: list[tuple[TokenSequence, list[Call]]] = []
        begins = [call for call in self.calls if call._parent is None]
        while begins:
            call = begins.pop()
            sequence, calls = TokenSequence(call.context), list[Call]()
            while True:
                if calls:
                    sequence.add_observed(call._ids)
                sequence.add_sampled(call.sample, in_loss=call.trains)
                calls.append(call)
                if not call._children:
                    break
                call, *others = sorted(call._children, key=_by_content)
                begins += others
            sequence.role = "agent" if any(one.role == "agent" for one in calls) else "auxiliary"
            found.append((sequence, calls))
        return sorted(found, key=lambda pair: (pair[0].role, pair[0].prompt_ids, pair[0].ids))


async def _rendered(entries: Sequence[Entry], render: Callable[..., T], *given: Any) -> T:
    """A rendering. Where the messages are long it is done on a thread: of a megabyte it takes a second."""
    sizes = [len(entry.text) + len(entry.thought) for entry in entries]
    sizes += [len(call.arguments) for entry in entries for call in entry.calls]
    if 100 * len(entries) + sum(sizes) <= _LONG:
        return render(*given)
    return await asyncio.get_running_loop().run_in_executor(request_threads(os.getpid()), lambda: render(*given))


@cache
def request_threads(pid: int) -> ThreadPoolExecutor:
    """Threads on which long requests of all rollouts are read and rendered. Few, as they share one interpreter."""
    return ThreadPoolExecutor(4, "agentic-prompting-requests")


def _by_content(call: Call) -> tuple[list[int], list[int]]:
    return call._ids, call.sample.ids


def _sharing(asked: Asked, before: Asked) -> Asked:
    """A request that goes on from an earlier one, with its objects in place of equal ones: each brings all again."""
    same = tuple(old if old == new else new for old, new in zip(before.entries, asked.entries, strict=False))
    return replace(asked, entries=same + asked.entries[len(same) :], tools=before.tools)


def _cut(sample: Sample, stops: Sequence[str], form: Any) -> tuple[Sample, str]:
    """The sample up to a stop text, and its text without that."""
    decode, ids = form.tokenizer.decode, sample.ids
    end = next((i for i, token in enumerate(ids) if token in form.end_of_turn_ids), len(ids))
    text = decode(ids[:end], skip_special_tokens=False)
    place = min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
    if place < 0:
        return sample, text

    def has_stop(count: int) -> bool:
        prefix = decode(ids[:count])
        return any(stop in prefix for stop in stops)

    most = bisect_left(range(end + 1), True, lo=1, key=has_stop)
    logprobs = None if sample.logprobs is None else sample.logprobs[:most]
    cut = replace(sample, ids=ids[:most], logprobs=logprobs, finished=True, updates=sample.updates[:most])
    return cut, text[:place]


def _likeliest(found: Sequence[Call], entry: Entry) -> Call:
    """Which of several equal replies a conversation holds: the one whose handle or ids came back, else one that nothing
    goes on from yet, else the first."""
    ids = {entry.handle, *(call.id for call in entry.calls)}

    def rank(call: Call) -> tuple[bool, bool]:
        same = ids & {call.reply.handle, *(one.id for one in call.reply.calls)}
        return not same, bool(call._children)

    return min(found, key=rank)
