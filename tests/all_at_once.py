"""Whether calls are made together, told without a clock: who makes them one by one waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from agentic_prompting.llm import ChatModel, Reply


class AllAtOnce:
    """A [`ChatModel`] that answers nobody before `n` calls are waiting.

    Args:
        chat ([`ChatModel`]): What it says then.
        n (`int`): How many calls have to wait at the same time.
    """

    def __init__(self, chat: ChatModel, n: int):
        self.chat, self.n = chat, n
        self._waiting: list[tuple[Future[Reply], Any, dict[str, Any]]] = []
        self._lock = threading.Lock()

    def submit(self, messages: Any, **options: Any) -> Future[Reply]:
        future: Future[Reply] = Future()
        with self._lock:
            self._waiting.append((future, messages, options))
            if len(self._waiting) == self.n:
                together, self._waiting = self._waiting, []
                threading.Thread(target=self._answer, args=(together,), daemon=True).start()
        return future

    def _answer(self, together: list[tuple[Future[Reply], Any, dict[str, Any]]]) -> None:
        for future, messages, options in together:
            if future.set_running_or_notify_cancel():
                future.set_result(self.chat.submit(messages, **options).result())
