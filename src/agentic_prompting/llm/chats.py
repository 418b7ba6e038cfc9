"""Chat messages, the call of a chat model ([`complete`]), and chat models without HTTP.

These are a function ([`as_chat`], [`FunctionChat`]), a script ([`ScriptedChat`]), and a router over
several models ([`RoutedChat`], Prompt-R1's ρ(m | q)).
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

from .budget import Budget, charge
from .guard import call_guarded, call_guarded_now, describe, failure_of, text_of
from .loop import run
from .spans import traced_chat
from .types import BadReply, ChatModel, LLMError, Message, Misconfigured, Reply, ServerFailed, Usage

Script = (
    Callable[[Sequence[Message]], "str | Reply"]
    | Sequence["str | Reply | LLMError"]
    | Mapping[str, str]
)
Rule = Callable[..., str] | Mapping[str, float]

_PACKAGE = __name__.partition(".")[0] + "."
_MAX_SESSIONS = 100_000


def complete(model: object, messages: Sequence[Message] | str, **options: Any) -> Reply:
    """Send one conversation, wait, and return the reply.

    May be called from any thread, also in a notebook.

    Args:
        model ([`ChatModel`] or `Callable`): The model; see [`as_chat`].
        messages (`Sequence[Message]` or `str`): The conversation; a plain string is one user
            message.
        **options: Further arguments of [`ChatModel`].
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return run(as_chat(model)(messages, **options))


def fill(template: str, **values: object) -> str:
    """Put values into a template, all at once.

    Braces in the values, and other braces in the template, stay.
    """
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda match: str(values[match[1]]), template)


def with_system(
    system_prompt: str | None, messages: Sequence[Message], join: bool = False
) -> list[Message]:
    """Return the conversation with `system_prompt` as its first message.

    If the conversation already begins with a system message, the prompt is not added; with `join`
    both are joined in one message, the prompt first.
    """
    if not system_prompt:
        return list(messages)
    has_system_message = bool(messages) and messages[0]["role"] == "system"
    if has_system_message and not join:
        return list(messages)
    if has_system_message:
        system_prompt = f"{system_prompt}\n\n{messages[0]['content']}"
        messages = messages[1:]
    return [{"role": "system", "content": system_prompt}, *messages]


def as_chat(model: object) -> ChatModel:
    """Return `model` as a [`ChatModel`].

    It may be a chat model, or a function (or an object with a `__call__`) of the messages that
    returns a text or a [`Reply`]. A plain function runs in a thread, an `async` one on the event
    loop. `repeat`, `session` and sampling arguments are passed if its signature has parameters for
    them. An exception that it raises becomes the reply's error.

    Raises:
        `TypeError`: It cannot be called, or takes no argument.
    """
    # The models of this package never raise.
    if isinstance(model, _AdaptedModel) or type(model).__module__.startswith(_PACKAGE):
        return cast(ChatModel, model)
    if not callable(model):
        raise TypeError(f"not a chat model, and not a function of the messages: {model!r}")
    return _AdaptedModel(model)


class _AdaptedModel:
    """A user's model as a [`ChatModel`] that never raises. Its other attributes are the model's."""

    def __init__(self, model: Callable[..., Any]):
        self._model = model
        self._model_name = getattr(model, "__name__", type(model).__name__)
        # The names of the keyword arguments that the model takes; `None`: any.
        self._parameter_names: set[str] | None = set()
        try:
            parameters = list(inspect.signature(model).parameters.values())
        except (TypeError, ValueError):  # a built-in function
            return

        # The messages are passed by position.
        if not parameters or parameters[0].kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise TypeError(
                f"{self._model_name} takes no messages: a chat model is a function of the messages"
            )
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            self._parameter_names = None
        else:
            self._parameter_names = {parameter.name for parameter in parameters[1:]}

    @traced_chat
    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        start = time.perf_counter()
        keywords = {"repeat": repeat, "session": session, **sampling}
        # Pass only what the model's signature takes.
        if self._parameter_names is not None:
            keywords = {
                name: value for name, value in keywords.items() if name in self._parameter_names
            }
        error: LLMError
        try:
            result = await call_guarded(self._model, messages, **keywords)
            # A reply without an error must have a text.
            if isinstance(result, Reply):
                if result.error is not None or result.text.strip():
                    return result
                error = BadReply(f"the model {self._model_name} returned an empty text")
                return replace(result, text="", error=error)
            if isinstance(result, str) and result.strip():
                return Reply(text=result, seconds=time.perf_counter() - start)
            error = BadReply(
                f"the model {self._model_name} returned neither a text nor a Reply, but "
                f"{text_of(result, 80, repr)}"
            )
        except LLMError as llm_error:
            error = llm_error.with_traceback(None)
        except Exception as exception:  # a bug in the model fails this call, like a broken server
            error = failure_of(ServerFailed, f"the model {self._model_name}", exception)
        return Reply(error=error, seconds=time.perf_counter() - start)

    def __getattr__(self, name: str) -> Any:
        # `_model` is missing while a copy is being made.
        if name.startswith("__") or "_model" not in vars(self):
            raise AttributeError(name)
        return getattr(self._model, name)


class FunctionChat(_AdaptedModel):
    """A function as a chat model with a limit on concurrent calls.

    Args:
        function (`Callable`): A function of the messages, plain or `async`, that returns a text or
            a [`Reply`], as in [`as_chat`].
        max_concurrency (`int`, *optional*): At most this many calls in flight. Defaults to no
            limit.

    Raises:
        `TypeError`: `function` is not a function.
        `ValueError`: `max_concurrency` is below 1.
    """

    def __init__(self, function: Callable[..., Any], max_concurrency: int | None = None):
        if not callable(function):
            raise TypeError(f"not a function of the messages: {function!r}")
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
        super().__init__(function)
        self.max_concurrency = max_concurrency
        # A semaphore belongs to the event loop that first waits on it.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Reply:
        if self.max_concurrency is None:
            return await super().__call__(messages, **options)
        slots = self._slots.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrency)
        )
        async with slots:
            return await super().__call__(messages, **options)


class ScriptedChat:
    """A scripted large LLM for tests, notebooks and dry runs.

    Its replies cost nothing and come in the order of the calls.

    Args:
        script (`Callable`, `Sequence` or `Mapping`): A function of the messages that returns a text
            or a [`Reply`] and does not block (use [`as_chat`] for one that does); or a list of
            texts, replies and errors, returned in the order of the calls (the last one repeats); or
            a dict from a part of the last message to the reply (the first part that occurs wins; if
            none occurs, the call fails).
        latency (`float` or `Callable[[], float]`, *optional*, defaults to `0.0`): Seconds until the
            reply arrives.
        fail_on (`Callable[[int], bool]`, *optional*): Called with the number of the call (from 0);
            if it returns `True`, the call fails with [`ServerFailed`].

    Attributes:
        calls (`list[list[Message]]`): Every conversation that was sent, in order.
        sampling (`list[dict]`): The sampling arguments of each call.
    """

    def __init__(
        self,
        script: Script,
        latency: float | Callable[[], float] = 0.0,
        fail_on: Callable[[int], bool] | None = None,
    ):
        self.script = script
        self.latency = latency
        self.fail_on = fail_on
        self.calls: list[list[Message]] = []
        self.sampling: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    @traced_chat
    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`]. `repeat` and `session` are ignored."""
        with self._lock:
            # Calls may come from several threads: number them one by one.
            number = len(self.calls)
            self.calls.append(list(messages))
            self.sampling.append(sampling)

        # Wait as long as the endpoint would take.
        start = time.perf_counter()
        seconds = self.latency() if callable(self.latency) else self.latency
        if seconds > 0:
            await asyncio.sleep(seconds)
            seconds = time.perf_counter() - start
        if self.fail_on is not None and self.fail_on(number):
            error = ServerFailed("scripted failure", "script", status=500)
            return Reply(error=error, seconds=seconds)

        try:
            scripted = call_guarded_now(self._look_up, number, messages)
        except Exception as exception:  # a bug in the script fails this call, like a broken server
            scripted = ServerFailed(f"the script raised {describe(exception)}", "script")
        if isinstance(scripted, LLMError):
            return Reply(error=scripted, seconds=seconds)
        if isinstance(scripted, Reply):
            return scripted
        # A word counts as a token.
        prompt_words = sum(len(message["content"].split()) for message in messages)
        usage = Usage(prompt_words, len(scripted.split()))
        return Reply(text=scripted, usage=usage, seconds=seconds)

    def _look_up(self, number: int, messages: Sequence[Message]) -> str | Reply | LLMError:
        if callable(self.script):
            return self.script(messages)
        if isinstance(self.script, Mapping):
            last_message = messages[-1]["content"]
            for part, reply in self.script.items():
                if part in last_message:
                    return reply
            raise KeyError(f"no entry of the script occurs in {last_message!r}")
        # The last reply of a list repeats.
        return self.script[min(number, len(self.script) - 1)]


class RoutedChat:
    """A [`ChatModel`] that sends each session to one of several models.

    So no conversation is split between two models. A call without a session is a session of its
    own, identified by its question. The router remembers the 100,000 most recent sessions; a
    weighted draw returns the same model again for a session that it has forgotten.

    Args:
        models (`Mapping[str, ChatModel]`): The models to choose from, by name, or functions:
            [`as_chat`].
        rule (`Callable` or `Mapping[str, float]`): A function of the question and the names that
            returns a name; if it has an argument `request`, it also receives the agent's first
            request. Or a weight for each name, at least one above 0; a name is then drawn with a
            generator seeded by `seed` and the session, so that a replayed run draws the same. The
            question is the row's if the call comes from [`LLMEnvironment`], else the first user
            message.
        seed (`int`, *optional*, defaults to `0`): For the weighted draw.

    Raises:
        `ValueError`: No models, a weight for an unknown name, a negative weight, or no weight above
            0.
    """

    def __init__(self, models: Mapping[str, ChatModel], rule: Rule, seed: int = 0):
        if not models:
            raise ValueError("RoutedChat needs at least one model")
        self.models = dict(models)
        self.rule = rule
        self.seed = seed
        # Weights are checked here; a function can only fail when it is called.
        if isinstance(rule, Mapping):
            unknown_names = [name for name in rule if name not in self.models]
            if unknown_names:
                raise ValueError(
                    f"weights for unknown models {unknown_names}: there are {list(self.models)}"
                )
            if any(weight < 0 for weight in rule.values()) or not sum(rule.values()) > 0:
                raise ValueError(
                    f"weights must not be negative and at least one must be above 0: {dict(rule)}"
                )
        self._needs_request = callable(rule) and "request" in inspect.signature(rule).parameters
        self._model_names: OrderedDict[str, str] = OrderedDict()  # by session
        self._lock = threading.Lock()

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`].

        If the rule fails or names an unknown model, the reply is [`Misconfigured`].
        """
        try:
            model = as_chat(self.models[self.choose(messages, session)])
        except Misconfigured as error:
            return Reply(error=error.with_traceback(None), attempts=0)
        return await model(messages, repeat=repeat, session=session, **sampling)

    def choose(
        self, messages: Sequence[Message], session: str | None = None, question: str | None = None
    ) -> str:
        """Return the name of the model for all calls of `session`.

        Args:
            messages (`Sequence[Message]`): The conversation.
            session (`str`, *optional*): The session's name.
            question (`str`, *optional*): The question of the session (q of ρ(m | q)); defaults to
                the first user message.

        Raises:
            [`Misconfigured`]: The rule failed or named a model that does not exist.
        """
        user_messages = (message["content"] for message in messages if message["role"] == "user")
        request = next(user_messages, "")
        if question is None:
            question = request

        # Without a session the question identifies the call, so a weighted draw repeats.
        if session is None:
            return self._draw(question, request, question)

        # A session keeps its model.
        with self._lock:
            if session in self._model_names:
                self._model_names.move_to_end(session)
                return self._model_names[session]
        # The rule is user code, which may be slow: it runs without the lock.
        name = self._draw(question, request, session)
        with self._lock:
            name = self._model_names.setdefault(session, name)  # another thread may have been first
            if len(self._model_names) > _MAX_SESSIONS:
                self._model_names.popitem(last=False)
        return name

    def check(self) -> None:
        """Check every model that has a `check`; raises the [`LLMError`] of the first that fails."""
        for model in self.models.values():
            if hasattr(model, "check"):
                model.check()

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book the spending of each model under `account/name`, if it has a `charge_to`."""
        charge(budget, **{f"{account}/{name}": model for name, model in self.models.items()})

    def close(self) -> None:
        """Close every model that has a `close`."""
        for model in self.models.values():
            if hasattr(model, "close"):
                model.close()

    def __reduce__(self) -> tuple[type[RoutedChat], tuple[Mapping[str, ChatModel], Rule, int]]:
        return type(self), (self.models, self.rule, self.seed)  # locks are not pickled

    def _draw(self, question: str, request: str, session: str) -> str:
        """Return the name that the rule chooses for a session."""
        if isinstance(self.rule, Mapping):
            # The draw depends on the seed and the session alone, so that a replayed run repeats it.
            generator = random.Random(f"{self.seed}:{session}")
            return generator.choices(list(self.rule), weights=list(self.rule.values()))[0]

        # The rule is user code: it may raise, or name a model that does not exist.
        names = list(self.models)
        try:
            if self._needs_request:
                name = call_guarded_now(self.rule, question, names, request=request)
            else:
                name = call_guarded_now(self.rule, question, names)
        except Exception as error:
            raise Misconfigured(
                f"the routing rule raised {describe(error)}", "router", attempts=0
            ) from None
        if not isinstance(name, str) or name not in self.models:
            raise Misconfigured(
                f"the routing rule chose {name!r}, which is not one of {names}",
                "router",
                attempts=0,
            )
        return name
