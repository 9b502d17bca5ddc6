"""A collector of OpenTelemetry: it takes OTLP over HTTP, and tells what came."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from msgspec import Struct, field
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

STATUS = {0: "unset", 1: "ok", 2: "error"}
KINDS = {1: "internal", 2: "server", 3: "client"}


class SeenSpan(Struct):
    name: str
    trace: str
    id: str
    parent: str
    kind: str
    start: int
    end: int
    status: str
    message: str
    attributes: dict[str, Any]


class Collector(Struct):
    url: str = ""
    spans: list[SeenSpan] = field(default_factory=list)
    metrics: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By name, the attributes of what was measured."""
    resources: list[dict[str, Any]] = field(default_factory=list)

    def one(self, name: str) -> SeenSpan:
        [seen_span] = [span for span in self.spans if span.name == name]
        return seen_span

    def under(self, parent: SeenSpan) -> list[str]:
        """The names of the spans that stand under one, in their order."""
        return [
            span.name for span in sorted(self.spans, key=lambda span: span.start) if span.parent == parent.id
        ]

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for traced in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(_attributes(traced.resource.attributes))
                self.spans += [_span(span) for scope in traced.scope_spans for span in scope.spans]
        else:
            for measured in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in measured.scope_metrics:
                    for metric in scope.metrics:
                        points = getattr(metric, metric.WhichOneof("data") or "").data_points
                        rows = [_attributes(point.attributes) for point in points]
                        self.metrics.setdefault(metric.name, []).extend(rows)


def _span(span: Any) -> SeenSpan:
    return SeenSpan(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=KINDS[span.kind],
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        status=STATUS[span.status.code],
        message=span.status.message,
        attributes=_attributes(span.attributes),
    )


def _attributes(given: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(given)
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind or "string_value")


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
