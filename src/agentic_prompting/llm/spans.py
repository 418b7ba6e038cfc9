"""Spans: a run as OpenTelemetry traces, with its conventions for generative AI (`gen_ai.*`).

Without [`start_traces`] every function here returns at once and opentelemetry is not imported. The
current span is a context variable: tasks, [`call_guarded`]'s threads and coroutines that [`start`]
sends to the background loop inherit it. Other processes receive it as `TRACEPARENT` in their
environment, other services as the header `traceparent`.

Texts (prompts, replies, arguments, error messages) are in a trace only with `trace_content`, with
secrets masked. Without it a trace contains names, numbers and the class of an error.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

from .masking import mask_secrets
from .surrogates import replace_surrogates
from .types import Message, Reply

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import TracerProvider as AnyTracerProvider

C = TypeVar("C", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

OWN = "agentic_prompting"
"""The name of the tracer, and the prefix of attributes for which the conventions have no name."""

Attributes: TypeAlias = Mapping[str, object]
"""Attributes of a span by name; those that are `None` are left out."""

_EXIT_SECONDS = 5.0  # for sending the last spans, if a back end does not answer
# The ends of the names of environment variables with secrets.
_SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "HEADERS")


class _NoSpan:
    """Stands in for a span if traces are off."""

    traceparent = ""

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set(self, attributes: Attributes) -> None:
        pass

    def fail(self, error_type: str) -> None:
        pass


_NO_SPAN = _NoSpan()


class _Traces:
    """Creates spans through OpenTelemetry's interface, which is imported when traces begin."""

    def __init__(self, provider: AnyTracerProvider, content: bool):
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.trace_api = trace
        self.context_api = context
        self.content = content
        self.tracer = provider.get_tracer(OWN)
        self.propagator = TraceContextTextMapPropagator()
        # The span under which another process has started this one.
        self.process_parent = self.propagator.extract(
            {name.lower(): os.environ.get(name, "") for name in ("TRACEPARENT", "TRACESTATE")}
        )
        # Variables with headers have the form `name=value,...`.
        self.secrets: list[str] = []
        for name, value in os.environ.items():
            if name.endswith(_SECRET_NAMES):
                self.secrets += re.split(r"[=,\s]", value)

    def find_parent(self, traceparent: str) -> Context | None:
        """Return the context of a new span.

        It is the given span's, else the current span's (`None`), else the process's own parent.
        """
        if traceparent:
            return self.propagator.extract({"traceparent": traceparent})
        current_span = self.trace_api.get_current_span()
        return None if current_span.get_span_context().is_valid else self.process_parent

    def mask(self, value: object, key: str | None = None) -> str:
        """Return a text without secrets and halves of surrogate pairs, which cannot be sent."""
        return replace_surrogates(mask_secrets(str(value), key, *self.secrets))


_traces: _Traces | None = None


class Span:
    """A span, current within its `with` block.

    An exception that leaves the block is its `error.type`.
    """

    def __init__(self, traces: _Traces, name: str, attributes: Attributes, parent: str, kind: str):
        self._traces = traces
        self._span = traces.tracer.start_span(
            name,
            traces.find_parent(parent),
            traces.trace_api.SpanKind[kind],
            _without_none(attributes),
        )

    @property
    def traceparent(self) -> str:
        """The span's identifier for other processes, in the format of W3C's header."""
        headers: dict[str, str] = {}
        context = self._traces.trace_api.set_span_in_context(self._span)
        self._traces.propagator.inject(headers, context)
        return headers.get("traceparent", "")

    def set(self, attributes: Attributes) -> None:
        """Set attributes; those that are `None` are left out."""
        self._span.set_attributes(_without_none(attributes))

    def fail(self, error_type: str) -> None:
        """Mark the span as failed, with the class of the error."""
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(self._traces.trace_api.StatusCode.ERROR)

    def __enter__(self) -> Span:
        context = self._traces.trace_api.set_span_in_context(self._span)
        self._token = self._traces.context_api.attach(context)
        return self

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # The exception of user code, not our wrapper around it.
            original = getattr(error, "original", error)
            self.fail(type(original).__name__.lstrip("_"))
        # A coroutine is garbage-collected in another context.
        if error_class is not GeneratorExit:
            self._traces.context_api.detach(self._token)
        self._span.end()


def _without_none(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def is_on() -> bool:
    """Return whether spans are created."""
    return _traces is not None


def span(
    name: str, attributes: Mapping[str, object] = {}, parent: str = "", kind: str = "INTERNAL"
) -> Span | _NoSpan:
    """Create a span, to be entered with `with`.

    Args:
        name (`str`): Its name, one of a few. It must not contain text of a user or a model.
        attributes (`Mapping`, *optional*): Attributes that are known at its start.
        parent (`str`, *optional*): Another span's `traceparent`. Defaults to the current span.
        kind (`str`, *optional*, defaults to `"INTERNAL"`): `CLIENT` for a call that leaves the
            process.
    """
    if _traces is None:
        return _NO_SPAN
    return Span(_traces, name, attributes, parent, kind)


def workflow(name: str, **numbers: float) -> Span | _NoSpan:
    """Create a span of several calls that belong together: a refinement, an operator of E-SPL."""
    if _traces is None:
        return _NO_SPAN
    attributes: dict[str, object] = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": name,
    }
    attributes |= {f"{OWN}.{key}": value for key, value in numbers.items()}
    return span(f"invoke_workflow {name}", attributes)


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
        _traces.trace_api.get_current_span().set_attributes(attributes)


def carrier() -> dict[str, str]:
    """Return the current span as headers for a request to another service, if there is one."""
    headers: dict[str, str] = {}
    if _traces is not None:
        _traces.propagator.inject(headers)
    return headers


class _RemoteParent:
    """Makes a span of another process the current one within a `with` block."""

    def __init__(self, traces: _Traces, context: Context):
        self._context_api = traces.context_api
        self._context = context

    def __enter__(self) -> None:
        self._token = self._context_api.attach(self._context)

    def __exit__(self, *_: object) -> None:
        self._context_api.detach(self._token)


def under(headers: Mapping[str, str], request_span: str = "") -> _RemoteParent | _NoSpan:
    """A context in which new spans become children of the span that a request's headers name.

    Args:
        headers (`Mapping`): With `traceparent` and `tracestate`, if the client traces.
        request_span (`str`, *optional*): The `traceparent` of the span that the request belongs to;
            it replaces a header that is missing or belongs to another trace.
    """
    if _traces is None:
        return _NO_SPAN
    # The client's span, unless it belongs to another trace than the request.
    header_context = _traces.propagator.extract(headers)
    header_span = _traces.trace_api.get_current_span(header_context).get_span_context()
    if request_span:
        request_context = _traces.propagator.extract({"traceparent": request_span})
        span_context = _traces.trace_api.get_current_span(request_context).get_span_context()
        if header_span.trace_id != span_context.trace_id:
            return _RemoteParent(_traces, request_context)
    if not header_span.is_valid:
        return _NO_SPAN
    return _RemoteParent(_traces, header_context)


# ---- contents ----


def content(name: str, value: object) -> dict[str, str]:
    """Return a text as an attribute; empty without `trace_content`."""
    if _traces is None or not _traces.content:
        return {}
    return {name: _traces.mask(value)}


def messages(
    name: str, conversation: Iterable[Message], key: str | None = None, **fields: str
) -> dict[str, str]:
    """Return messages as an attribute, in the conventions' JSON; empty without `trace_content`.

    Args:
        name (`str`): The name of the attribute.
        conversation (`Iterable[Message]`): The messages.
        key (`str`, *optional*): The endpoint's key, which is masked.
        **fields: Further fields of each message, such as `finish_reason`.
    """
    if _traces is None or not _traces.content:
        return {}
    traced_messages = [
        {
            "role": message["role"],
            "parts": [{"type": "text", "content": _traces.mask(message["content"], key)}],
            **fields,
        }
        for message in conversation
    ]
    return {name: json.dumps(traced_messages, ensure_ascii=False)}


# ---- calls of large LLMs ----


def traced_chat(call: C) -> C:
    """Decorate the `__call__` of a [`ChatModel`]: each call is a span `chat MODEL`."""

    @functools.wraps(call)
    async def traced_call(self: object, messages: Sequence[Message], **options: Any) -> Reply:
        if _traces is None:
            return await call(self, messages, **options)
        # The span lasts as long as the call, waits and retries included.
        name = model_name(self)
        attributes = {"gen_ai.request.model": name, **_chat_attributes(self)}
        with span(f"chat {name}", attributes, kind="CLIENT") as chat_span:
            reply = await call(self, messages, **options)
            chat_span.set(_reply_attributes(reply, messages, self))
            if reply.error is not None:
                chat_span.fail(reply.error.kind)
            return reply

    return cast(C, traced_call)


def model_name(model: object) -> str:
    """Return the name of a chat model.

    It is its name at the endpoint, the path of a local model, the name of a function, or that of
    its class.
    """
    # Not `getattr`: a user's model behind ours may have properties that raise.
    attributes = vars(model)
    local_path = getattr(getattr(attributes.get("model"), "config", None), "name_or_path", None)
    for name in (attributes.get("model"), local_path, attributes.get("_model_name")):
        if isinstance(name, str) and name:
            return name
    return type(model).__name__


def _chat_attributes(model: object) -> dict[str, object]:
    attributes: dict[str, object] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": OWN,
        f"{OWN}.account": getattr(vars(model).get("_account"), "name", None),
    }
    url = urlsplit(vars(model).get("base_url", ""))
    if url.hostname:
        # The provider is the protocol; the address says whose server it is.
        attributes["gen_ai.provider.name"] = "openai"
        attributes["server.address"] = url.hostname
        attributes["server.port"] = url.port or {"https": 443}.get(url.scheme, 80)
    return attributes


def _reply_attributes(
    reply: Reply, conversation: Sequence[Message], model: object
) -> dict[str, object]:
    key = None
    if _traces is not None and _traces.content and "base_url" in vars(model):  # an `OpenAIChat`
        key = cast(Any, model).find_key()

    # The usage of the call; the conversation only with `trace_content`.
    attributes: dict[str, object] = {
        "gen_ai.usage.input_tokens": reply.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": reply.usage.completion_tokens,
        f"{OWN}.cost_usd": reply.usage.cost_usd,
        f"{OWN}.cached": reply.cached,
        f"{OWN}.attempts": reply.attempts,
        **messages("gen_ai.input.messages", conversation, key),
    }

    # A failed call has no output.
    output: list[Message] = []
    if reply.error is None:
        attributes["gen_ai.response.finish_reasons"] = [reply.finish_reason]
        output = [{"role": "assistant", "content": reply.text}]
    attributes |= messages("gen_ai.output.messages", output, key, finish_reason=reply.finish_reason)
    return attributes


# ---- export ----


def start_traces(trace_content: bool = False) -> None:
    """Create spans from now on, in this process.

    OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`,
    `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, ...) set their destination, by default
    `http://localhost:4318`. If the program has set a tracer provider, the spans go there.

    Args:
        trace_content (`bool`, *optional*, defaults to `False`): Whether spans contain prompts,
            replies and arguments.

    Raises:
        `ImportError`: The extra `otel` is not installed.
        `ValueError`: The variables name an exporter that is not installed.
    """
    global _traces
    try:
        import opentelemetry.sdk.trace  # noqa: F401  # is the extra installed?
        from opentelemetry import trace
    except ImportError as error:
        raise ImportError(
            "traces need the extra otel: pip install 'agentic-prompting[otel]'"
        ) from error

    # Keep the provider that the program has set, if there is one.
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # no provider is set
        provider = _create_provider()
        trace.set_tracer_provider(provider)
    _traces = _Traces(provider, trace_content)


def _create_provider() -> TracerProvider:
    """Create the provider that the environment's variables describe."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporters = _create_exporters()
    # Name the service, unless the environment does.
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "agentic-prompting"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))

    # A back end that is down must not fill the log, nor delay the exit.
    for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
        logging.getLogger(name).addHandler(_EXPORT_WARNING)
        logging.getLogger(name).propagate = False
    atexit.register(_shut_down, provider)
    return provider


def _create_exporters() -> list[SpanExporter]:
    """Create the exporters that the environment's variables name.

    They come from the entry points of OpenTelemetry's packages.
    """
    # The variable for traces takes precedence over the one for all signals.
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    protocol = protocol or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    otlp_name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    names = (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")

    # Each name is an entry point of an installed package.
    exporters = []
    for name in map(str.strip, names):
        if name == "none":
            continue
        if name == "otlp":
            name = otlp_name
        matches = list(entry_points(group="opentelemetry_traces_exporter", name=name))
        if not matches:
            # Name the package that would have this entry point.
            package = f"opentelemetry-exporter-{name.replace('_', '-')}"
            raise ValueError(
                f"the environment asks for the trace exporter {name}: pip install {package}"
            )
        exporter_class = matches[0].load()
        exporters.append(exporter_class())
    return exporters


class _ExportWarning(logging.Handler):
    """Logs the first warning of OpenTelemetry's exporters and no others."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.has_logged = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.has_logged:
            return
        self.has_logged = True
        reason = record.getMessage()
        if _traces is not None:
            reason = _traces.mask(reason)
        logger.warning(
            "traces do not arrive, and the run goes on without them; said once: %s", reason
        )


_EXPORT_WARNING = _ExportWarning()


def _shut_down(provider: TracerProvider) -> None:
    """Send the last spans at exit, but do not wait for a back end that is down."""
    thread = threading.Thread(target=provider.shutdown, daemon=True)
    thread.start()
    thread.join(_EXIT_SECONDS)
