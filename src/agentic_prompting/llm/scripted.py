"""The fake large LLM we ship: replies from a function, a list or a dict, at once, at no cost.

For tests, notebooks and dry runs. It records what it was asked and can fail or be slow on demand.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import LLMError, ServerFailed
from .types import Message, Reply, Usage

Script = Callable[[Sequence[Message]], "str | Reply"] | Sequence["str | Reply | LLMError"] | Mapping[str, str]


class ScriptedChat:
    """A [`ChatModel`] that follows a script. Without a latency its replies come in the order of the calls.

    Args:
        script (`Callable`, `Sequence` or `Mapping`):
            A function of the messages that returns a text or a [`Reply`], and is quick (one that has to wait is a chat
            model by itself, see [`as_chat`]); or a list of texts, replies and errors,
            given out in the order of the calls (the last one repeats); or a dict from a piece of the last message to
            the reply (the first piece that occurs wins; without one the call fails).
        latency (`float` or `Callable[[], float]`, *optional*, defaults to `0.0`): Seconds until the reply arrives.
        fail_on (`Callable[[int], bool]`, *optional*): Called with the number of the call (from 0); `True` makes it
            fail with [`ServerFailed`].

    Attributes:
        calls (`list[list[Message]]`): Every conversation it was asked, in order.
        sampling (`list[dict]`): The sampling arguments of each call.
    """

    def __init__(
        self,
        script: Script,
        latency: float | Callable[[], float] = 0.0,
        fail_on: Callable[[int], bool] | None = None,
    ):
        self.script, self.latency, self.fail_on = script, latency, fail_on
        self.calls: list[list[Message]] = []
        self.sampling: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Reply:
        """See [`ChatModel`]. `repeat` and `session` make no difference here."""
        with self._lock:
            number = len(self.calls)
            self.calls.append(list(messages))
            self.sampling.append(sampling)
        started = time.perf_counter()
        seconds = self.latency() if callable(self.latency) else self.latency
        if seconds > 0:
            await asyncio.sleep(seconds)
        return self._reply(number, messages, time.perf_counter() - started if seconds > 0 else 0.0)

    def _reply(self, number: int, messages: Sequence[Message], seconds: float) -> Reply:
        if self.fail_on is not None and self.fail_on(number):
            return Reply(error=ServerFailed("scripted failure", "script", status=500), seconds=seconds)
        try:
            said = self._look_up(number, messages)
        except Exception as error:  # a script with a bug is a failed call, as a broken server would be
            return Reply(error=ServerFailed(f"the script raised {error!r}", "script"), seconds=seconds)
        if isinstance(said, LLMError):
            return Reply(error=said, seconds=seconds)
        if isinstance(said, Reply):
            return said
        words_read = sum(len(message["content"].split()) for message in messages)
        return Reply(text=said, usage=Usage(words_read, len(said.split())), seconds=seconds)

    def _look_up(self, number: int, messages: Sequence[Message]) -> str | Reply | LLMError:
        if callable(self.script):
            return self.script(messages)
        if isinstance(self.script, Mapping):
            last = messages[-1]["content"]
            for piece, said in self.script.items():
                if piece in last:
                    return said
            raise KeyError(f"no entry of the script occurs in {last!r}")
        return self.script[min(number, len(self.script) - 1)]
