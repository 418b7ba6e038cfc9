"""Spans: a run as OpenTelemetry traces, with the names of its conventions for generative AI (`gen_ai.*`).

Without [`start_traces`] every function here returns at once and opentelemetry is not imported. The current span is a
context variable: tasks, [`call_guarded`]'s threads and coroutines that [`start`] sends to the background loop inherit
it. Other processes get it as `TRACEPARENT` in their environment, other services as the header `traceparent`.

Texts (prompts, replies, arguments, error messages) are in a trace only with `trace_content`, secrets masked. Without it
there are names, numbers and the class of an error.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ParamSpec, TypeVar, cast
from urllib.parse import urlsplit

from .masking import mask_secrets
from .types import Message, Reply

C = TypeVar("C", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

OWN = "agentic_prompting"
"""The name of the tracer, and the beginning of attributes for which the conventions have no name."""

_EXIT_SECONDS = 5.0  # for sending the last spans, if a back end does not answer
_SECRET_NAMES = (
    "KEY",
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "HEADERS",
)  # the ends of environment variables' names


class _Off:
    """Stands in for a span if traces are off."""

    traceparent = ""

    def __enter__(self) -> _Off:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set(self, attributes: Mapping[str, Any]) -> None:
        pass

    def fail(self, kind: str) -> None:
        pass


_OFF = _Off()


class _Traces:
    """Makes spans: OpenTelemetry's interface, imported when traces begin."""

    def __init__(self, provider: Any, content: bool):
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.api, self.context, self.content = trace, context, content
        self.tracer, self.form = provider.get_tracer(OWN), TraceContextTextMapPropagator()
        self.outer = self.form.extract(
            {name.lower(): os.environ.get(name, "") for name in ("TRACEPARENT", "TRACESTATE")}
        )
        secret = (value for name, value in os.environ.items() if name.endswith(_SECRET_NAMES))
        self.secrets = [
            part for value in secret for part in re.split(r"[=,\s]", value)
        ]  # headers: `name=value,...`

    def parent(self, traceparent: str) -> Any:
        """The context of a new span: below the given span, else the current one, else the process's own parent."""
        if traceparent:
            return self.form.extract({"traceparent": traceparent})
        return None if self.api.get_current_span().get_span_context().is_valid else self.outer

    def masked(self, value: Any, key: str | None = None) -> str:
        """A text without secrets, and without halves of surrogate pairs, which cannot be sent."""
        return mask_secrets(str(value), key, *self.secrets).encode("utf-8", "replace").decode()


_traces: _Traces | None = None


class Span:
    """A span, current within its `with` block. An exception that leaves the block is its `error.type`."""

    def __init__(
        self, traces: _Traces, name: str, attributes: Mapping[str, Any], parent: str, kind: str
    ):
        self._traces = traces
        kinds, given = (
            traces.api.SpanKind,
            {name: value for name, value in attributes.items() if value is not None},
        )
        self._span = traces.tracer.start_span(name, traces.parent(parent), kinds[kind], given)

    @property
    def traceparent(self) -> str:
        """The span's name for other processes, in the form of W3C's header."""
        carrier: dict[str, str] = {}
        self._traces.form.inject(carrier, self._traces.api.set_span_in_context(self._span))
        return carrier.get("traceparent", "")

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes; those that are `None` are left out."""
        self._span.set_attributes(
            {name: value for name, value in attributes.items() if value is not None}
        )

    def fail(self, kind: str) -> None:
        """Mark the span as failed, with the class of the error."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._traces.api.StatusCode.ERROR)

    def __enter__(self) -> Span:
        self._token = self._traces.context.attach(self._traces.api.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self.fail(type(getattr(error, "original", error)).__name__.lstrip("_"))
        if kind is not GeneratorExit:  # a coroutine is collected in another context
            self._traces.context.detach(self._token)
        self._span.end()


def is_on() -> bool:
    """Whether spans are made."""
    return _traces is not None


def span(
    name: str, attributes: Mapping[str, Any] = {}, parent: str = "", kind: str = "INTERNAL"
) -> Span | _Off:
    """A span, to be entered with `with`.

    Args:
        name (`str`): Its name, one of a few. It must not contain text of a user or a model.
        attributes (`Mapping`, *optional*): Attributes that are known at its start.
        parent (`str`, *optional*): Another span's `traceparent`. Defaults to the current span.
        kind (`str`, *optional*, defaults to `"INTERNAL"`): `CLIENT` for a call that leaves the process.
    """
    return _OFF if _traces is None else Span(_traces, name, attributes, parent, kind)


def workflow(name: str, **numbers: Any) -> Span | _Off:
    """A span of several calls that belong together: a refinement, an operator of E-SPL."""
    if _traces is None:
        return _OFF
    about = {f"{OWN}.{key}": value for key, value in numbers.items()}
    given = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": name, **about}
    return span(f"invoke_workflow {name}", given)


def traced(
    traced_call: Callable[..., Coroutine[Any, Any, T]],
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Decorate an `async` function with its traced version, which runs only while traces are on.

    Args:
        traced_call (`Callable`): Gets the undecorated function and the arguments of the call.
    """

    def decorate(
        function: Callable[P, Coroutine[Any, Any, T]],
    ) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if _traces is None:
                return await function(*args, **kwargs)
            return await traced_call(function, *args, **kwargs)

        return call

    return decorate


def note(attributes: Mapping[str, Any]) -> None:
    """Set attributes of the current span."""
    if _traces is not None:
        _traces.api.get_current_span().set_attributes(attributes)


def carrier() -> dict[str, str]:
    """The current span as headers, for a request to another service; empty if there is none."""
    headers: dict[str, str] = {}
    if _traces is not None:
        _traces.form.inject(headers)
    return headers


class _Under:
    """The context of a span of another process, within a `with` block."""

    def __init__(self, traces: _Traces, context: Any):
        self._attach, self._detach, self._inner = (
            traces.context.attach,
            traces.context.detach,
            context,
        )

    def __enter__(self) -> None:
        self._token = self._attach(self._inner)

    def __exit__(self, *_: object) -> None:
        self._detach(self._token)


def under(headers: Any, own: str = "") -> _Under | _Off:
    """Within its `with` block spans are below the one that a request's headers name.

    Args:
        headers (`Mapping`): With `traceparent` and `tracestate`, if the client traces.
        own (`str`, *optional*): The `traceparent` of the span that the request belongs to; it replaces a header that is
            missing or belongs to another trace.
    """
    if _traces is None:
        return _OFF
    context = _traces.form.extract(headers)
    found = _traces.api.get_current_span(context).get_span_context()
    if own:
        ours = _traces.form.extract({"traceparent": own})
        if found.trace_id != _traces.api.get_current_span(ours).get_span_context().trace_id:
            return _Under(_traces, ours)
    return _Under(_traces, context) if found.is_valid else _OFF


# --- contents ---------------------------------------------------------------------------------------------------------


def content(name: str, value: Any) -> dict[str, str]:
    """A text as an attribute; nothing unless contents were asked for."""
    return {name: _traces.masked(value)} if _traces is not None and _traces.content else {}


def messages(
    name: str, conversation: Iterable[Message], key: str | None = None, **more: str
) -> dict[str, str]:
    """Messages as an attribute, in the conventions' JSON, without the endpoint's `key`; nothing unless contents were
    asked for."""
    if _traces is None or not _traces.content:
        return {}
    shown = [
        {
            "role": one["role"],
            "parts": [{"type": "text", "content": _traces.masked(one["content"], key)}],
            **more,
        }
        for one in conversation
    ]
    return {name: json.dumps(shown, ensure_ascii=False)}


# --- calls of large LLMs ----------------------------------------------------------------------------------------------


def traced_chat(call: C) -> C:
    """Decorates the `__call__` of a [`ChatModel`]: each call is a span `chat MODEL`."""

    @functools.wraps(call)
    async def traced(self: Any, messages: Sequence[Message], **options: Any) -> Reply:
        if _traces is None:
            return await call(self, messages, **options)
        name = model_name(self)
        with span(
            f"chat {name}", {"gen_ai.request.model": name, **_about_chat(self)}, kind="CLIENT"
        ) as own:
            reply = await call(self, messages, **options)
            own.set(_about_reply(reply, messages, self))
            if reply.error is not None:
                own.fail(reply.error.kind)
            return reply

    return cast(C, traced)


def model_name(model: Any) -> str:
    """The name of a chat model: its endpoint's, the path of a local model, the function's, or that of its class."""
    own = vars(model)  # a user's model behind ours may have properties that raise
    path = getattr(getattr(own.get("model"), "config", None), "name_or_path", None)
    found = (own.get("model"), path, own.get("_called"))
    return next((one for one in found if isinstance(one, str) and one), type(model).__name__)


def _about_chat(model: Any) -> dict[str, Any]:
    url = urlsplit(vars(model).get("base_url", ""))
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai"
        if url.hostname
        else OWN,  # the protocol; the address says whose server it is
        "server.address": url.hostname,
        "server.port": (url.port or {"https": 443}.get(url.scheme, 80)) if url.hostname else None,
        f"{OWN}.account": vars(model).get("_account"),
    }


def _about_reply(reply: Reply, asked: Sequence[Message], model: Any) -> dict[str, Any]:
    said = [Message(role="assistant", content=reply.text)] if reply.error is None else []
    key = model.find_key() if _traces and _traces.content and "base_url" in vars(model) else None
    return {
        "gen_ai.usage.input_tokens": reply.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": reply.usage.completion_tokens,
        "gen_ai.response.finish_reasons": [reply.finish_reason] if reply.error is None else None,
        f"{OWN}.cost_usd": reply.usage.cost_usd,
        f"{OWN}.cached": reply.cached,
        f"{OWN}.attempts": reply.attempts,
        **messages("gen_ai.input.messages", asked, key),
        **messages("gen_ai.output.messages", said, key, finish_reason=reply.finish_reason),
    }


# --- export -----------------------------------------------------------------------------------------------------------


def start_traces(trace_content: bool = False) -> None:
    """Make spans from now on, in this process.

    OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`,
    `OTEL_TRACES_SAMPLER`, ...) set their destination, by default `http://localhost:4318`. If the program has set a
    tracer provider of its own, it receives them.

    Args:
        trace_content (`bool`, *optional*, defaults to `False`): Whether spans contain prompts, replies and arguments.

    Raises:
        `ImportError`: The extra `otel` is not installed.
        `ValueError`: The variables name an exporter that is not installed.
    """
    global _traces
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError as error:
        raise ImportError(
            "traces need the extra otel: pip install 'agentic-prompting[otel]'"
        ) from error
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # no provider is set
        provider = _own_provider(TracerProvider)
        trace.set_tracer_provider(provider)
    _traces = _Traces(provider, trace_content)


def _own_provider(kind: Any) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporters = list(_exporters())
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "agentic-prompting"}))
    provider = kind(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
        logging.getLogger(name).addHandler(_ONCE)
        logging.getLogger(name).propagate = False
    atexit.register(_shut_down, provider)
    return provider


def _exporters() -> Iterator[Any]:
    """The exporters that the environment's variables name, from the entry points of OpenTelemetry's packages."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    full = {"otlp": "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"}
    names = (name.strip() for name in (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","))
    for name in [full.get(name, name) for name in names if name != "none"]:
        found = [*entry_points(group="opentelemetry_traces_exporter", name=name)]
        if not found:
            package = f"opentelemetry-exporter-{name.replace('_', '-')}"
            raise ValueError(
                f"the environment asks for the trace exporter {name}: pip install {package}"
            )
        yield found[0].load()()


class _Once(logging.Handler):
    """Logs the first warning of OpenTelemetry's exporters and no others: a back end that is down must not fill the
    log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.has_logged = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.has_logged:
            self.has_logged = True
            why = record.getMessage() if _traces is None else _traces.masked(record.getMessage())
            logger.warning(
                "traces do not arrive, and the run goes on without them; said once: %s", why
            )


_ONCE = _Once()


def _shut_down(provider: Any) -> None:
    """At exit: send the last spans, but do not wait for a back end that is down."""
    last = threading.Thread(target=provider.shutdown, daemon=True)
    last.start()
    last.join(_EXIT_SECONDS)
