"""Warnings about programs whose rollouts train, but not as their author expects; each is logged once.

A program that uses the address for its first call only, that sends its history back changed, or that raises whenever
the policy writes little, raises no error anywhere. Its rollouts show it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any

from .matching import key_of, key_of_tools, plain
from .protocol import Entry
from .session import Call

logger = logging.getLogger(__name__)

_ROLLOUTS = 128  # the latest ones that are compared
_ENOUGH = 32  # of them, before most can be spoken of
_OF_EACH = 8  # failed and other ones, before their lengths are compared
_DEVIATIONS = 3.0  # from what chance would give


class Advice:
    """Looks at the rollouts of a program as they end."""

    def __init__(self) -> None:
        self._calls: deque[int] = deque(maxlen=_ROLLOUTS)
        self._written: deque[tuple[int, bool]] = deque(maxlen=_ROLLOUTS)  # tokens, and whether the program raised
        self._said: set[str] = set()

    def look_at(self, calls: Sequence[Call], ignored: Mapping[str, Any], raised: bool) -> None:
        """Take in a rollout, and warn of what it shows.

        Args:
            calls (`Sequence[Call]`): Its calls, in the order in which they were sampled.
            ignored (`dict`): Wishes of its requests that make no difference.
            raised (`bool`): Whether it failed because the program raised, or its exit code was not 0.
        """
        new = {name: f"{name}={value!r}"[:80] for name, value in ignored.items() if name not in self._said}
        self._said |= new.keys()
        if new:
            logger.warning(
                "the program asked for %s, which makes no difference here: the policy samples as it is trained to, and "
                "no vendor runs tools", ", ".join(sorted(new.values())),
            )  # fmt: skip
        self._calls.append(sum(call.role == "agent" for call in calls))
        self._written.append((sum(len(call.sample.ids) for call in calls), raised))
        single = sum(number == 1 for number in self._calls)
        if len(self._calls) >= _ENOUGH and 2 * single > len(self._calls):
            self.warn_once(
                "single",
                f"{single} of the last {len(self._calls)} rollouts made a single call. If the agent has several turns, "
                "it uses the base_url that it got for the first alone, or gives up at the first reply",
            )
        if "changed" not in self._said and (changed := changed_message(calls)):
            self.warn_once("changed", f"a history came back changed, so its call begins a token sequence: {changed}")
        if raised and "short" not in self._said:
            self._compare_lengths()

    def _compare_lengths(self) -> None:
        """By Mann and Whitney's test: whether rollouts in which the program raised are shorter than the others."""
        failed, others = ([size for size, raised in self._written if raised == which] for which in (True, False))
        if min(len(failed), len(others)) < _OF_EACH:
            return
        pairs = len(failed) * len(others)
        shorter = sum((a < b) + (a == b) / 2 for a, b in product(failed, others)) / pairs
        if shorter - 0.5 > _DEVIATIONS * ((len(failed) + len(others) + 1) / (12 * pairs)) ** 0.5:
            self.warn_once(
                "short",
                f"the program raised in {len(failed)} of the last {len(self._written)} rollouts, in which the policy "
                f"wrote less ({median(failed):g} tokens, {median(others):g} in the others). If it raises because of "
                "what the policy writes, name the exception (or the exit code) in mistakes=: these rollouts have no "
                "reward now, so the policy does not learn to avoid them",
            )

    def warn_once(self, kind: str, text: str) -> None:
        """Log a warning, the first of its kind."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s", text)


def changed_message(calls: Sequence[Call]) -> str:
    """The first message that differs in a conversation that repeats most of an earlier one and its reply, in words;
    empty if there is no such conversation.

    A sub-agent repeats nothing, and a summary is shorter than what it sums up. Neither is reported.
    """
    ours = {plain(call.reply.text) for call in calls if not call.reply.calls}
    keys: list[list[bytes]] = []  # of each message of each call, and of its reply: each is read once
    for i, call in enumerate(calls):
        keys.append([key_of(b"", entry) for entry in (*call.asked.entries, call.reply)])
        if call.goes_on:
            continue
        for j in reversed(range(i)):
            earlier = calls[j]
            expected, sent = (*earlier.asked.entries, earlier.reply), call.asked.entries
            if len(sent) <= len(expected):
                continue
            differs = [at for at, (one, other) in enumerate(zip(keys[j], keys[i], strict=False)) if one != other]
            if not differs and key_of_tools(earlier.asked.tools) != key_of_tools(call.asked.tools):
                return "the tools are not those of the call before"
            if not differs or 2 * len(differs) > len(expected):
                continue
            one, other = expected[differs[0]], sent[differs[0]]
            if other.role != "assistant" or plain(other.text) not in ours:
                return f"message {differs[0] + 1} was {_shown(one)} and is {_shown(other)}"
    return ""


def _shown(entry: Entry) -> str:
    calls = "".join(f" {call.name}({call.arguments})" for call in entry.calls)
    return f"{entry.role}: {(entry.text + calls).strip()!r:.160}"
