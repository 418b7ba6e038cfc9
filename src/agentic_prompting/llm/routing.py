"""Several large LLMs behind one: Prompt-R1's ρ(m | q), the choice of the model for a question.

A choice holds for a whole session, so that one conversation is never split between two models.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .budget import Budget, charge
from .errors import Misconfigured
from .types import ChatModel, Message, Reply, as_chat

Rule = Callable[[str, list[str]], str] | Mapping[str, float]

_SESSIONS_KEPT = 100_000


class RoutedChat:
    """A [`ChatModel`] that passes each session on to one of several.

    Args:
        models (`Mapping[str, ChatModel]`): The models to choose from, by name, or functions: [`as_chat`].
        rule (`Callable[[str, list[str]], str]` or `Mapping[str, float]`):
            A function of the question (the first user message of the session) and the names that returns a name; or a
            weight for each name, at least one above 0, drawn from with a generator seeded by `seed` and the session, so
            that a replayed run draws the same.
        seed (`int`, *optional*, defaults to `0`): For the weighted draw.

    A call without a session is its own session, told apart by its question. The 100,000 sessions used last are
    remembered; a weighted draw comes out the same for a forgotten one.

    Raises:
        `ValueError`: No models, a weight for an unknown name, a negative weight, or no weight above 0.
    """

    def __init__(self, models: Mapping[str, ChatModel], rule: Rule, seed: int = 0):
        if not models:
            raise ValueError("RoutedChat needs at least one model")
        self.models, self.rule, self.seed = dict(models), rule, seed
        if isinstance(rule, Mapping):
            unknown = [name for name in rule if name not in self.models]
            if unknown:
                raise ValueError(f"weights for unknown models {unknown}: there are {list(self.models)}")
            if any(weight < 0 for weight in rule.values()) or not sum(rule.values()) > 0:
                raise ValueError(f"weights must not be negative and at least one must be above 0: {dict(rule)}")
        self._chosen: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Reply:
        """See [`ChatModel`]. A rule that fails or names an unknown model gives a [`Misconfigured`] reply."""
        try:
            model = as_chat(self.models[self.choose(messages, session)])
        except Misconfigured as error:
            return Reply(error=error.with_traceback(None), attempts=0)
        return await model(messages, repeat=repeat, session=session, **sampling)

    def choose(self, messages: Sequence[Message], session: str | None = None) -> str:
        """The name of the model that answers `messages` in `session`.

        Raises:
            [`Misconfigured`]: The rule failed or named a model that does not exist.
        """
        question = next((message["content"] for message in messages if message["role"] == "user"), "")
        if session is None:
            return self._draw(question, question)
        with self._lock:
            if session in self._chosen:
                self._chosen.move_to_end(session)
                return self._chosen[session]
        name = self._draw(question, session)
        with self._lock:
            name = self._chosen.setdefault(session, name)  # another thread may have been first
            if len(self._chosen) > _SESSIONS_KEPT:
                self._chosen.popitem(last=False)
        return name

    def check(self) -> None:
        """Check every model that can be checked.

        Raises:
            [`LLMError`]: Of the first model that fails.
        """
        for model in self.models.values():
            check = getattr(model, "check", None)
            if check is not None:
                check()

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book what each model spends under `account/name`, where a model can."""
        charge(budget, **{f"{account}/{name}": model for name, model in self.models.items()})

    def close(self) -> None:
        """Close every model that can be closed."""
        for model in self.models.values():
            close = getattr(model, "close", None)
            if close is not None:
                close()

    def __getstate__(self) -> dict[str, Any]:
        return {"models": self.models, "rule": self.rule, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # locks are not pickled

    def _draw(self, question: str, session: str) -> str:
        if isinstance(self.rule, Mapping):
            generator = random.Random(f"{self.seed}:{session}")
            return generator.choices(list(self.rule), weights=list(self.rule.values()))[0]
        try:
            name = self.rule(question, list(self.models))
        except Exception as error:  # the rule is the user's code
            raise Misconfigured(f"the routing rule raised {error!r}", "router", attempts=0) from None
        if not isinstance(name, str) or name not in self.models:
            what = f"the routing rule chose {name!r}, which is not one of {list(self.models)}"
            raise Misconfigured(what, "router", attempts=0)
        return name
