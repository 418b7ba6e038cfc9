"""Warns once about common problems of programs whose rollouts train, but not as their author
expects.

A program that uses the address only for its first call, that sends its history back changed, or
that raises whenever the policy writes little causes no error anywhere. Neither do replies that are
cut off at their limit. The rollouts show it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .call_tree import Call, conversation_key, normalize_text, tools_key
from .dialects.shared_fields import quote
from .protocol import ChatMessage

logger = logging.getLogger(__name__)

_KEPT_ROLLOUTS = 128  # the latest rollouts, which are compared
_MIN_ROLLOUTS = 32  # for a warning about most of them
_MIN_CUT_ROLLOUTS = 8  # for a warning about cut replies: a group of the first step has as many
_MIN_ROLLOUTS_OF_KIND = 8  # failed and other rollouts, for a comparison of their lengths
_SHORT = 0.5  # of the median length of the other rollouts
_LONGEST_QUOTE = 160  # characters


@dataclass
class _RolloutFacts:
    """The facts about a rollout that the warnings need."""

    agent_calls: int
    calls: int
    cut_replies: int
    sampled_tokens: int
    has_raised: bool


class Advice:
    """Looks at the finished rollouts of a program, and logs each warning once."""

    def __init__(self) -> None:
        self._rollouts: deque[_RolloutFacts] = deque(maxlen=_KEPT_ROLLOUTS)
        self._warned: set[str] = set()

    @property
    def wants_changed_message(self) -> bool:
        """Whether `look_at` still needs the result of [`find_changed_message`]."""
        return "changed" not in self._warned

    def look_at(
        self,
        calls: Sequence[Call],
        ignored_settings: Mapping[str, Any],
        changed_message: str,
        has_raised: bool,
    ) -> None:
        """Look at a finished rollout.

        Args:
            calls (`Sequence[Call]`): Its calls, in the order in which they were sampled.
            ignored_settings (`dict`): Settings in its requests that have no effect.
            changed_message (`str`): The result of [`find_changed_message`].
            has_raised (`bool`): Whether the program raised, or its exit code was not 0.
        """
        facts = _RolloutFacts(
            agent_calls=sum(call.role == "agent" for call in calls),
            calls=len(calls),
            cut_replies=sum(not call.sample.finished for call in calls),
            sampled_tokens=sum(len(call.sample.ids) for call in calls),
            has_raised=has_raised,
        )
        # Compare it with the latest rollouts, each time for another problem.
        self._rollouts.append(facts)
        self._warn_of_ignored_settings(ignored_settings)
        self._warn_of_single_calls()
        self._warn_of_cut_replies()
        if changed_message:
            self.warn_once(
                "changed",
                "a history came back changed, so its call begins a new token sequence: "
                f"{changed_message}",
            )
        if has_raised:
            self._warn_of_short_failures()

    def warn_of_model_names(
        self, calls: Sequence[Call], policy_name: str, llm_names: Collection[str]
    ) -> None:
        """Warn if the policy has answered calls of several models: one may be a large LLM.

        Args:
            calls (`Sequence[Call]`): The calls of the policy in a finished rollout.
            policy_name (`str`): The policy's name as a model.
            llm_names (`Collection[str]`): The names of the large LLMs.
        """
        model_names = sorted({call.request.model for call in calls})
        if len(model_names) < 2:
            return
        text = (
            f"the program calls the models {', '.join(model_names)}, and the policy answers all of "
            f"them: llms= has {', '.join(llm_names) or 'no model'}. If one is a large LLM, give it "
            "there under the same name"
        )
        if policy_name in model_names:
            text += f"; calls that do not name {policy_name} are not trained by default"
        self.warn_once("model names", text)

    def warn_of_idle_program(self, seconds: float, timeout: float) -> None:
        """Warn of a program that neither calls a model nor returns."""
        self.warn_once(
            "idle",
            f"a program has neither called a model nor returned for {seconds:.0f} s; its rollout "
            f"fails after {timeout:g} s (timeout=). If it hangs, set a time limit on what it waits "
            "for",
        )

    def warn_of_unused_address(self) -> None:
        """Warn of a program that raised before it sent a request: its calls may go elsewhere."""
        self.warn_once(
            "address",
            "a program raised before any request reached its address. If it calls another one, "
            "give its client the base_url and api_key that it gets (a command: OPENAI_BASE_URL and "
            "OPENAI_API_KEY)",
        )

    def warn_of_shared_key(self, variable: str) -> None:
        """Warn of a key in the environment of this process: concurrent rollouts replace it."""
        self.warn_once(
            "shared key",
            f"a program has put the key of its rollout into {variable} of this process, which all "
            "rollouts share: a call can reach another rollout, and train with its reward. Give "
            "each client the base_url and api_key that the function gets, or run the agent as a "
            "command, whose environment is its own (CommandProgram)",
        )

    def warn_of_used_up_limit(self, limit_name: str, limit: int) -> None:
        """Warn of a rollout whose program made more calls than it may."""
        options = {
            "calls": "max_calls",
            "calls of large LLMs": "max_llm_calls",
            "sequences": "max_sequences",
        }
        text = f"a rollout has used up its {limit} {limit_name}, so its next call was refused"
        if limit_name in options:
            text += f". If the agent needs more, raise {options[limit_name]}= of its program"
        self.warn_once("limit", text)

    def warn_once(self, topic: str, text: str) -> None:
        """Log a warning, if it is the first on its topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning("%s", text)

    def _warn_of_ignored_settings(self, ignored_settings: Mapping[str, Any]) -> None:
        new_names = sorted(name for name in ignored_settings if name not in self._warned)
        if not new_names:
            return
        self._warned.update(new_names)
        settings = ", ".join(f"{name}={quote(ignored_settings[name])}" for name in new_names)
        reasons = []
        if new_names != ["tools"]:
            reasons.append("the policy samples as the trainer says")
        if "tools" in new_names:
            reasons.append("tools that a vendor would run are left out")
        logger.warning(
            "the program asked for %s, which has no effect: %s", settings, " and ".join(reasons)
        )

    def _warn_of_single_calls(self) -> None:
        # A rollout with a single call can be right. Most of them are suspicious.
        count = len(self._rollouts)
        single_calls = sum(rollout.agent_calls == 1 for rollout in self._rollouts)
        if count >= _MIN_ROLLOUTS and 2 * single_calls > count:
            self.warn_once(
                "single",
                f"{single_calls} of the last {count} rollouts made a single call. If the agent has "
                "several turns, it uses its base_url only for the first one, gives up at the first "
                "reply, or the model did not ask for a tool (`agentic-prompting report` shows what "
                "it wrote)",
            )

    def _warn_of_cut_replies(self) -> None:
        # The limit is too low if it ends most of the replies.
        calls = sum(rollout.calls for rollout in self._rollouts)
        cut_replies = sum(rollout.cut_replies for rollout in self._rollouts)
        if len(self._rollouts) >= _MIN_CUT_ROLLOUTS and 2 * cut_replies > calls:
            self.warn_once(
                "cut",
                f"{cut_replies} of the {calls} replies in the last {len(self._rollouts)} rollouts "
                "were cut off at their limit. Raise max_turn_tokens (or max_completion_length), or "
                "the max_tokens of the program's requests",
            )

    def _warn_of_short_failures(self) -> None:
        # Tokens of the rollouts in which the program raised, and of the others.
        failed_lengths = [
            rollout.sampled_tokens for rollout in self._rollouts if rollout.has_raised
        ]
        other_lengths = [
            rollout.sampled_tokens for rollout in self._rollouts if not rollout.has_raised
        ]
        if min(len(failed_lengths), len(other_lengths)) < _MIN_ROLLOUTS_OF_KIND:
            return
        failed_median = median(failed_lengths)
        other_median = median(other_lengths)
        if failed_median < _SHORT * other_median:
            self.warn_once(
                "short",
                f"the program raised in {len(failed_lengths)} of the last {len(self._rollouts)} "
                f"rollouts, in which the policy wrote less (a median of {failed_median:g} tokens, "
                f"{other_median:g} in the others). If it raises because of what the policy writes, "
                "list the exception (or the exit code) in mistakes=: these rollouts have no reward "
                "now, so the policy does not learn to avoid them",
            )


def find_changed_message(calls: Sequence[Call]) -> str:
    """Describe the first message that a program has changed in its history; empty if there is none.

    Looks for a conversation that repeats most of an earlier one with its reply. A sub-agent repeats
    nothing, and a summary is shorter than what it summarises: neither is reported.
    """
    # Replies that another branch of the conversation may have instead.
    reply_texts = {normalize_text(call.reply.text) for call in calls if not call.reply.tool_calls}
    histories: list[list[bytes]] = []  # for each call the keys of its messages and its reply
    for index, call in enumerate(calls):
        histories.append([conversation_key(b"", message) for message in _history(call)])
        # The reply that it continues was found in its history, which is therefore unchanged.
        if call.is_continuation:
            continue

        # Look for an earlier conversation that it repeats, from the latest one back.
        for earlier_index in reversed(range(index)):
            expected_keys = histories[earlier_index]
            # A conversation that repeats the earlier one with its reply is longer.
            if len(call.request.messages) <= len(expected_keys):
                continue
            pairs = zip(expected_keys, histories[index], strict=False)
            changed_positions = [
                position
                for position, (expected_key, key) in enumerate(pairs)
                if expected_key != key
            ]
            # If most messages differ, it is another conversation.
            if 2 * len(changed_positions) > len(expected_keys):
                continue
            change = _find_change(calls[earlier_index], call, changed_positions, reply_texts)
            if change:
                return change
    return ""


def _find_change(
    earlier_call: Call, call: Call, changed_positions: Sequence[int], reply_texts: Collection[str]
) -> str:
    """Describe what a call changes in the conversation of an earlier one; empty if nothing."""
    if not changed_positions:
        # The key of a conversation includes its tools.
        if tools_key(earlier_call.request.tools) != tools_key(call.request.tools):
            return "the tools are not those of the previous call"
        return ""

    # A reply of another branch is no change.
    position = changed_positions[0]
    message = call.request.messages[position]
    if message.role == "assistant" and normalize_text(message.text) in reply_texts:
        return ""
    expected_message = _history(earlier_call)[position]
    return f"message {position + 1} was {_describe(expected_message)} and is {_describe(message)}"


def _history(call: Call) -> tuple[ChatMessage, ...]:
    return (*call.request.messages, call.reply)


def _describe(message: ChatMessage) -> str:
    tool_calls = "".join(f" {call.name}({call.arguments})" for call in message.tool_calls)
    return f"{message.role}: {(message.text + tool_calls).strip()!r}"[:_LONGEST_QUOTE]
