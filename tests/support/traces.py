"""Traces for tests: spans kept in memory, and a collector that takes OTLP over HTTP."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from pathlib import Path

from agentic_prompting.llm import spans, start_traces

TESTS = Path(__file__).parents[1]


@cache
def _memory():
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


class Spans:
    """The spans that ended while traces were on."""

    def __init__(self, exporter):
        self._exporter = exporter

    @property
    def all(self):
        return sorted(self._exporter.get_finished_spans(), key=attrgetter("start_time"))

    def named(self, name):
        return [span for span in self.all if span.name == name]

    def below(self, parent):
        """The names of a span's children, each with its own children: `[(name, [...]), ...]`."""
        key = None if parent is None else parent.context.span_id
        children = [span for span in self.all if (span.parent and span.parent.span_id) == key]
        return [(child.name, self.below(child)) for child in children]

    @property
    def text(self):
        """Everything that would be sent."""
        return "\n".join(span.to_json() for span in self.all)


@contextmanager
def traced(content=False):
    """Traces into memory within the block."""
    exporter = _memory()
    exporter.clear()
    start_traces(content)
    try:
        yield Spans(exporter)
    finally:
        spans._traces = None


def spans_in(request):
    """The spans of an OTLP export request."""
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            yield from scope.spans


class Collector:
    """A real OTLP collector over HTTP; a context manager.

    Attributes:
        spans (`list`): As they came, OTLP's own messages.
        headers (`list[dict]`): Of the requests.
        resources (`list[dict]`): The attributes of what sent them.
    """

    def __init__(self):
        self.spans = []
        self.headers = []
        self.resources = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
                    ExportTraceServiceRequest,
                )

                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    attributes = resource.resource.attributes
                    collector.resources.append(
                        {attribute.key: attribute.value.string_value for attribute in attributes}
                    )
                collector.spans.extend(spans_in(request))
                collector.headers.append(dict(self.headers))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def collected_over_grpc():
    """A real OTLP collector over gRPC: its address, and the names of the spans that came, at once
    and later.
    """
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    names = []

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            names.extend(span.name for span in spans_in(request))
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", names
    finally:
        server.stop(0)


def in_process(code, *arguments, **variables):
    """Run Python in a process of its own, with OpenTelemetry's variables; what it printed on both
    streams.
    """
    traces = ("OTEL_", "TRACE")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(traces)}
    paths = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**plain, "PYTHONPATH": paths, **variables},
    )
