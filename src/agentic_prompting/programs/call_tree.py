"""The calls of one rollout as a tree: which reply a call continues, and the token sequences.

A program sends its whole conversation with each call. The call continues an earlier reply of the
policy if everything before that reply is unchanged, and the reply has the same text or calls the
same tools with the same arguments. Clients copy replies in many ways, so thoughts, white space, ids
of tool calls and the formatting of arguments are ignored. Handles and ids only decide between
replies that are otherwise equal.

Pure data and functions: no event loop, no policy, no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ..llm import Reply
from ..rollout import Sample, TokenSequence, remove_closed_thoughts
from .dialects.shared_fields import is_json
from .protocol import ChatMessage, CompletionRequest, ToolCall

# The search for words in a text gives up after this many places where they are parts of longer
# words. Each place takes time, and an agent can write a text with many.
_MAX_PARTIAL_MATCHES = 100


@dataclass(eq=False)
class Call:
    """A program's call of the policy: one node of a [`CallTree`].

    A call holds only the ids that it adds to the context of its parent. If each call held its whole
    context, the memory of a rollout would be quadratic in the number of calls.

    Args:
        request ([`CompletionRequest`]): `model`, `messages` (the whole conversation), `tools`, ...
        number (`int`): Its number in the rollout, in the order in which requests arrive.
        new_messages (`tuple[ChatMessage, ...]`, *optional*): The messages after the reply
            that it continues; the whole conversation if it continues none.
        new_ids (`list[int]`, *optional*): The token ids of `new_messages`.
        parent ([`Call`], *optional*): The call whose reply it continues.
        key (`bytes`, *optional*): The key of its conversation; see [`conversation_key`].

    Attributes:
        context (`list[int]`): The ids that the policy reads.
        context_length (`int`): Number of these ids.
        max_tokens (`int`): Maximum number of tokens of the reply.
        conversation_id (`int`): The `conversation` of a [`SampleRequest`].
        context_hash (`int`): A hash of the context.
        repeat_index (`int`): Distinguishes calls with the same context.
        children (`list[Call]`): The calls that continue its reply, in the order of their arrival.
        sample ([`Sample`]): The sampled tokens, up to the stop text if there is one.
        text (`str`): Their text.
        llm_replies (`tuple[Reply, ...]`): Replies of large LLMs since the previous call.
        reply ([`ChatMessage`]): The text parsed into thought, text and tool calls.
        reply_key (`bytes`): The key of the conversation with the reply; empty before that.
        role (`str`): `agent`, or `auxiliary` for a call beside the agent's work, such as a title.
        in_loss (`bool`): Whether its sampled tokens are in the loss.
    """

    request: CompletionRequest
    number: int
    new_messages: tuple[ChatMessage, ...] = ()
    new_ids: list[int] = field(default_factory=list, repr=False)
    parent: Call | None = field(default=None, repr=False)
    key: bytes = b""

    # Set at once: the parent's reply is complete, so this length never changes.
    context_length: int = field(init=False)

    # Set by the session when it accepts the call.
    max_tokens: int = 1
    conversation_id: int = 0

    # Set by the tree when the call and its continuations are added.
    context_hash: int = 0
    repeat_index: int = 0
    children: list[Call] = field(default_factory=list, repr=False)
    _pending_children: int = 0  # continuations that are not added yet

    # Set by the session when the policy has sampled. The tree sets `reply` and its key.
    sample: Sample = field(default_factory=lambda: Sample([]), repr=False)
    text: str = ""
    llm_replies: tuple[Reply, ...] = ()
    reply: ChatMessage = ChatMessage("assistant")
    reply_key: bytes = b""

    # Set by `CallTree.assign_roles` at the end of the rollout.
    role: str = "agent"
    in_loss: bool = True

    def __post_init__(self) -> None:
        self.context_length = len(self.new_ids)
        if self.parent is not None:
            self.context_length += self.parent.context_length + len(self.parent.sample.ids)

    @property
    def context(self) -> list[int]:
        # From the root down: the ids that a call has added, then those of its reply.
        ids: list[int] = []
        for call in reversed(self._ancestors()):
            ids += call.new_ids
            ids += call.sample.ids
        ids += self.new_ids
        return ids

    @property
    def root(self) -> Call:
        """The first call of its conversation: the call itself if it continues no reply."""
        ancestors = self._ancestors()
        return ancestors[-1] if ancestors else self

    @property
    def is_continuation(self) -> bool:
        """Whether the call continues an earlier reply."""
        return self.parent is not None

    @property
    def has_reply(self) -> bool:
        return bool(self.reply_key)

    @property
    def is_continued(self) -> bool:
        """Whether a client has sent its reply back, so it must have received it."""
        return bool(self.children) or self._pending_children > 0

    @contextmanager
    def preparing_continuation(self) -> Iterator[None]:
        """Count this call as continued while a continuation of it is rendered."""
        self._pending_children += 1
        try:
            yield
        finally:
            self._pending_children -= 1

    def _ancestors(self) -> list[Call]:
        """Return its parent, the parent's parent, and so on up to the root."""
        ancestors = []
        call = self.parent
        while call is not None:
            ancestors.append(call)
            call = call.parent
        return ancestors


class CallTree:
    """The calls of one rollout.

    Attributes:
        calls (`list[Call]`): All calls but the removed ones, in the order in which they were added.
        sequence_count (`int`): Number of token sequences of these calls.
        undelivered_tokens (`int`): Sampled tokens of the removed calls.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.sequence_count = 0
        self.undelivered_tokens = 0
        self._calls_by_reply_key: dict[bytes, list[Call]] = {}
        self._repeats: dict[int, set[int]] = {}  # of the calls with a context, by its hash

    def find_parent(
        self, messages: Sequence[ChatMessage], keys: Sequence[bytes]
    ) -> tuple[Call | None, Sequence[ChatMessage]]:
        """Find the latest reply in a conversation.

        Args:
            messages (`Sequence[ChatMessage]`): The conversation.
            keys (`Sequence[bytes]`): Its key up to each message; see [`conversation_keys`].

        Returns:
            `tuple`: The call with that reply and the messages after it; `None` and all messages if
            the conversation contains no reply of this rollout.
        """
        # The last message is the one to reply to. It cannot be the reply itself.
        for position in reversed(range(len(messages) - 1)):
            # Several calls can have given the same reply to the same conversation.
            candidates = self._calls_by_reply_key.get(keys[position])
            if candidates:
                return _best_match(candidates, messages[position]), messages[position + 1 :]
        return None, messages

    def find_uncontinued(self, key: bytes) -> Call | None:
        """Find the latest call with a conversation whose reply no other call continues."""
        for call in reversed(self.calls):
            if call.key == key and call.has_reply and not call.is_continued:
                return call
        return None

    def would_add_sequence(self, call: Call) -> bool:
        """Return whether the tree has one more token sequence after this call is added.

        It has, unless the call is the first to continue its parent's reply. Which continuation
        stays in the sequence of the reply is decided at the end, by content: see `sequences`.
        """
        return call.parent is None or bool(call.parent.children)

    def add(self, call: Call) -> None:
        """Add a call below its parent, before its reply is sampled."""
        self.sequence_count += self.would_add_sequence(call)
        self.calls.append(call)

        # The hash of the context is what the seed of the reply is computed from.
        if call.parent is None:
            call.context_hash = _hash_ids(call.new_ids, 0)
        else:
            call.parent.children.append(call)
            # Hash only the ids after the parent's context. Hashing whole contexts would be
            # quadratic.
            added_ids = [*call.parent.sample.ids, *call.new_ids]
            call.context_hash = _hash_ids(added_ids, call.parent.context_hash)

        # Take a number that no other call with this context has. One in the middle is free after a
        # removal.
        repeats = self._repeats.setdefault(call.context_hash, set())
        call.repeat_index = len(repeats)
        if call.repeat_index in repeats:
            call.repeat_index = min(set(range(len(repeats))) - repeats)
        repeats.add(call.repeat_index)

    def set_reply(self, call: Call, reply: ChatMessage) -> None:
        """Set the reply of a call, so that later calls can continue it."""
        call.reply = reply
        call.reply_key = conversation_key(call.key, reply)
        self._calls_by_reply_key.setdefault(call.reply_key, []).append(call)

    def remove(self, call: Call) -> bool:
        """Remove a call whose reply no client has read, and return whether it was still there."""
        if call not in self.calls:
            return False
        self.calls.remove(call)
        self.undelivered_tokens += len(call.sample.ids)

        # A retry gets the number, and with it the seed, of the removed call.
        self._repeats[call.context_hash].discard(call.repeat_index)
        if call.has_reply:
            self._calls_by_reply_key[call.reply_key].remove(call)

        # Removing a root, or one of several continuations, removes a sequence. Removing the only
        # continuation of a reply does not: the sequence then ends with that reply.
        if call.parent is None or len(call.parent.children) > 1:
            self.sequence_count -= 1
        if call.parent is not None:
            call.parent.children.remove(call)
        return True

    def assign_roles(
        self, policy_name: str, is_trained: Callable[[Call], bool] | None = None
    ) -> None:
        """Decide which calls are the agent's, and which are in the loss.

        A call is auxiliary in two cases. Its request names another model than the policy, while
        others name the policy. Or its request has no tools while others do, it is not the last
        call, and no later request contains its reply.

        Args:
            policy_name (`str`): The policy's name as a model.
            is_trained (`Callable[[Call], bool]`, *optional*): Whether a call is in the loss. By
                default the agent's calls are.
        """
        # Both signs tell calls apart only if some calls have them and others do not.
        some_name_policy = any(call.request.model == policy_name for call in self.calls)
        some_have_tools = any(call.request.tools for call in self.calls)

        # Normalize each text once: every reply is searched in the texts of all later calls.
        new_texts = []
        if some_have_tools:
            new_texts = [_normalize_new_texts(call) for call in self.calls]
        for index, call in enumerate(self.calls):
            names_other_model = some_name_policy and call.request.model != policy_name

            # A title is used by no later call, but a summary is. The last call may be the answer.
            lacks_tools = some_have_tools and not call.request.tools
            is_last = index == len(self.calls) - 1
            is_aside = lacks_tools and not is_last and not _is_used(call, new_texts[index + 1 :])

            call.role = "auxiliary" if names_other_model or is_aside else "agent"
            # `trains=` of the program can overrule the role.
            if is_trained is None:
                call.in_loss = call.role == "agent"
            else:
                call.in_loss = bool(is_trained(call))

    def sequences(self) -> list[tuple[TokenSequence, list[Call]]]:
        """Return the token sequences, each with its calls. Their order does not depend on timing.

        Each sampled token is in exactly one sequence. If several calls continue one reply, the
        first by content stays in the sequence of that reply. Each other one begins a sequence, and
        its whole context becomes the prompt.
        """
        sequences: list[tuple[TokenSequence, list[Call]]] = []
        starts = [call for call in self.calls if call.parent is None]
        while starts:
            # Follow the first child of each call. The other children start sequences of their own.
            path = [starts.pop()]
            while path[-1].children:
                first_child, *other_children = sorted(path[-1].children, key=_content_sort_key)
                path.append(first_child)
                starts += other_children
            sequences.append((_build_sequence(path), path))

        # Sort by content, with the agent's sequences first.
        return sorted(sequences, key=lambda pair: (pair[0].role, pair[0].prompt_ids, pair[0].ids))


class MalformedArguments:
    """Restores tool arguments that are not JSON in the conversations that clients send back.

    Some clients replace such arguments by a JSON object of their own, which would look like
    another reply. The original is found by the handle of the reply, even if the client drops the
    ids of tool calls, or else by these ids.
    """

    def __init__(self) -> None:
        self._arguments: dict[str, str] = {}  # malformed arguments by the id of the tool call
        self._tool_calls: dict[str, tuple[ToolCall, ...]] = {}  # by the handle of the reply

    def record(self, reply: ChatMessage) -> None:
        """Remember a reply if it has malformed arguments."""
        malformed = [call for call in reply.tool_calls if not is_json(call.arguments)]
        if malformed:
            self._arguments |= {call.id: call.arguments for call in malformed}
            self._tool_calls[reply.handle] = reply.tool_calls

    def restore(self, message: ChatMessage) -> ChatMessage:
        """Return the message with the arguments that the policy wrote, or the message itself."""
        # By handle: take all tool calls of the reply, if they call the same tools.
        tool_calls = self._tool_calls.get(message.handle, ())
        tool_names = [call.name for call in tool_calls]
        if tool_calls and tool_names == [call.name for call in message.tool_calls]:
            return replace(message, tool_calls=tool_calls)

        # By the ids of the tool calls.
        if not any(call.id in self._arguments for call in message.tool_calls):
            return message
        restored_calls = []
        for call in message.tool_calls:
            arguments = self._arguments.get(call.id, call.arguments)
            restored_calls.append(replace(call, arguments=arguments))
        return replace(message, tool_calls=tuple(restored_calls))


# ---- keys of conversations: equal ones for the copies that clients may make ----


def conversation_keys(
    tools: Sequence[Mapping[str, Any]], messages: Sequence[ChatMessage]
) -> Iterator[bytes]:
    """Yield the key of a conversation up to each of its messages."""
    key = tools_key(tools)
    for message in messages:
        key = conversation_key(key, message)
        yield key


def conversation_key(previous_key: bytes, message: ChatMessage) -> bytes:
    """Return the key of a conversation, from its last message and the key of those before it."""
    # The program's own messages come back as they were, but for space around them.
    if message.role != "assistant":
        content = f"{message.role}\0{message.text.strip()}"
    elif message.tool_calls:
        # Without the text: some clients drop it if there are tool calls.
        tool_calls = [
            [call.name, normalize_arguments(call.arguments)] for call in message.tool_calls
        ]
        content = json.dumps(tool_calls)
    else:
        # Without thoughts and spacing, which clients do not keep.
        content = normalize_text(message.text)
    return _digest(previous_key + message.role.encode() + content.encode("utf-8", "replace"))


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the key of a request's tools, with which that of its conversation begins."""
    return _digest(json.dumps(tools, sort_keys=True).encode())


def normalize_text(text: str) -> str:
    """Return the text without thoughts, its words separated by single spaces."""
    return " ".join(remove_closed_thoughts(text).split())


def normalize_arguments(arguments: str) -> str:
    """Return tool arguments by value, whatever their formatting; other text stripped."""
    try:
        value = json.loads(arguments or "{}", parse_float=_parse_number)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError, OverflowError):
        return arguments.strip()


def _parse_number(text: str) -> float | int:
    """Return a JSON number. 1.0 becomes 1, because JavaScript has a single type of number."""
    number = float(text)
    is_safe_integer = number.is_integer() and abs(number) < 2**53
    return int(number) if is_safe_integer else number


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _hash_ids(ids: Sequence[int], previous_hash: int) -> int:
    return zlib.crc32(array("q", ids), previous_hash)


# ---- parents and roles ----


def share_messages(request: CompletionRequest, earlier: CompletionRequest) -> CompletionRequest:
    """Return the request with the earlier one's objects in place of equal ones.

    Each request of a conversation repeats all messages. Without sharing, a rollout would hold each
    message once per call.
    """
    # The conversations may have different lengths, and differ in any message.
    shared = []
    for old, new in zip(earlier.messages, request.messages, strict=False):
        shared.append(old if old == new else new)
    remaining = request.messages[len(shared) :]
    return replace(request, messages=(*shared, *remaining), tools=earlier.tools)


def _best_match(candidates: Sequence[Call], message: ChatMessage) -> Call:
    """Decide which of several equal replies a client has sent back.

    It is the one with the same handle or tool call ids, else one that no call continues, else the
    first.
    """
    message_ids = {message.handle, *(call.id for call in message.tool_calls)}

    def rank(candidate: Call) -> tuple[bool, bool]:
        reply_ids = {candidate.reply.handle, *(call.id for call in candidate.reply.tool_calls)}
        # `False` sorts first: an id in common, then a reply that no call continues.
        return message_ids.isdisjoint(reply_ids), candidate.is_continued

    return min(candidates, key=rank)


def _normalize_new_texts(call: Call) -> list[str]:
    return [normalize_text(message.text) for message in call.new_messages]


def _is_used(call: Call, later_texts: Sequence[Sequence[str]]) -> bool:
    """Return whether a later call continues the reply or has its text in a new message."""
    reply_text = normalize_text(call.reply.text)
    return bool(call.children) or any(
        _any_contains_words(texts, reply_text) for texts in later_texts
    )


def _any_contains_words(texts: Sequence[str], words: str) -> bool:
    return any(contains_words(text, words) for text in texts)


def contains_words(text: str, words: str) -> bool:
    """Return whether a text contains other words, not just as a part of longer words.

    An empty text has none.
    """
    # Go from one occurrence to the next, until one stands between word boundaries.
    position = text.find(words) if words else -1
    for _ in range(_MAX_PARTIAL_MATCHES):
        if position < 0:
            return False
        end = position + len(words)
        # At a boundary no letter or digit touches another one. No space is needed.
        is_word_start = position == 0 or not (text[position - 1].isalnum() and words[0].isalnum())
        is_word_end = end == len(text) or not (text[end].isalnum() and words[-1].isalnum())
        if is_word_start and is_word_end:
            return True
        position = text.find(words, position + 1)
    return False


# ---- sequences ----


def _build_sequence(path: Sequence[Call]) -> TokenSequence:
    """Build a token sequence from calls that each continue the reply of the previous one."""
    start, *continuations = path
    sequence = TokenSequence(start.context)
    sequence.add_sampled(start.sample, in_loss=start.in_loss)
    # Messages between two replies are in the context, and not in the loss.
    for call in continuations:
        sequence.add_observed(call.new_ids)
        sequence.add_sampled(call.sample, in_loss=call.in_loss)

    # A single call of the agent makes the whole sequence the agent's.
    sequence.role = "agent" if any(call.role == "agent" for call in path) else "auxiliary"
    return sequence


def _content_sort_key(call: Call) -> tuple[list[int], list[int]]:
    return call.new_ids, call.sample.ids
