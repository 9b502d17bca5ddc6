"""Traces of requests with OpenTelemetry. Where they are off, nothing is imported and nothing is slower.

A request has a `RequestTrace`: one span for all of it, with other spans under it. Code that works for the
request finds it in `current`, a context variable that tasks inherit; it is None without tracing. Events that
repeat (tokens) get no span. The attributes of a span are known only at its end, so most spans are created
then, from noted times: `RequestTrace.add`.

OpenTelemetry's own environment variables say where spans go, how many are sampled and what the service is
called (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and so on).
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from dragoman import logs
from dragoman._version import __version__
from dragoman.errors import DragomanError, SettingsError
from dragoman.routing.key import HINT_HEADER
from dragoman.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

T = TypeVar("T")
Attributes: TypeAlias = Mapping[str, Any]
SpanRole: TypeAlias = Literal["SERVER", "CLIENT", "INTERNAL"]
CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The variable that adds prompts and answers to spans, as the GenAI conventions define it."""
CLOSE_S = 5.0
"""The seconds a collector gets for the last spans before the process exits."""
MISSING = "`otel` needs packages that are not installed: pip install 'dragoman[otel]'."
HEADERS = ("traceparent", "tracestate", "baggage")
SESSION = HINT_HEADER.encode()


class RequestTrace:
    """The trace of one request or background task; the spans it adds are children of its own span."""

    def __init__(self, tracing: "Telemetry", span: "Span") -> None:
        self.tracing = tracing
        self.span = span
        self.plans: dict[int, tuple[int, int]] = {}
        """Start and end of prompt rendering, by the ids of the resulting plans."""
        self.conversation = ""
        """The id of the request's conversation, if it has one."""
        self._cut: list[tuple[Span, int]] = []
        """Spans of interrupted work with their end times; the reason is known only when the request ends."""
        self._over = False

    @property
    def ids(self) -> dict[str, str]:
        """The ids of trace and span, as log lines have them."""
        context = self.span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    @property
    def response(self) -> bytes:
        """The header `traceresponse`, which lets clients find the trace."""
        ids, flags = self.ids, self.span.get_span_context().trace_flags
        return f"00-{ids['trace_id']}-{ids['span_id']}-{flags:02x}".encode()

    def begin(
        self, name: str, role: SpanRole = "INTERNAL", start: int | None = None, **attributes: Any
    ) -> "Span":
        """Start a span under that of the request; the caller ends it."""
        return self.tracing.start(name, role, attributes, self.span, start)

    def add(
        self, name: str, start: int, end: int, parent: "Span | None" = None, error: Exception | None = None
    ) -> None:
        """Add a span of work that is complete; times are in nanoseconds, as `time.time_ns()` returns them."""
        if not self.span.is_recording():
            # The span is not recorded: most samplers keep few requests.
            return
        span = self.tracing.start(name, "INTERNAL", {}, parent or self.span, start)
        if error is not None:
            mark_error(span, error)
        span.end(end)

    def timing(self, plan: Callable[[], T]) -> Callable[[], T]:
        """Wrap `plan` so that the time it takes is recorded."""

        def planned() -> T:
            start = time.time_ns()
            try:
                type_var_type = plan()
            except Exception as error:
                self.add("prompt", start, time.time_ns(), error=error)
                raise
            self.plans[id(type_var_type)] = (start, time.time_ns())
            return type_var_type

        return planned

    def cut_short(self, span: "Span", at: int) -> None:
        """End a span whose work was interrupted; it gets the reason for which the request ends."""
        if self._over:
            span.end(at)
        else:
            self._cut.append((span, at))

    def end(self, log_fields: Attributes, attributes: Attributes) -> None:
        """End the request's span; `facts` are the fields of its access log line."""
        span, code = self.span, log_fields.get("code") or str(log_fields["status"])
        reason = str(log_fields.get("finish", ""))
        # A client error (4xx) is not an error of the server, and neither is a client that disconnects.
        left = reason in ("disconnect", "cancelled")
        failed = not left and (
            log_fields["status"] >= 500 or ("error" in log_fields and log_fields["status"] < 400)
        )
        self._over = True
        for cut, at in self._cut:
            if "error" in log_fields and not left:
                mark_failed(cut, code, log_fields["error"])
            elif reason:
                cut.set_attribute("gen_ai.response.finish_reasons", (reason,))
            cut.end(at)
        span.set_attributes(dict(attributes))
        if failed:
            mark_failed(span, code, log_fields.get("error", ""))
        elif log_fields["status"] >= 400:
            span.set_attribute("error.type", code)
        elif left:
            span.set_attribute("dragoman.ended", reason)
        span.end()
        self.plans.clear()
        self._cut.clear()


current: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
"""The trace of the request being served."""
session: ContextVar[str] = ContextVar("session", default="")
"""The client's name of the session that its request belongs to, from the header SESSION."""
outgoing: ContextVar[Mapping[str, str] | None] = ContextVar("outgoing", default=None)
"""Trace headers for outgoing requests, while the server calls another one."""


def mark_failed(span: "Span", code: str, message: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, message or None))


def mark_error(span: "Span", error: BaseException) -> None:
    """Mark a span as failed. The text of a foreign exception is left out: it may quote what a client sent."""
    code = error.code if isinstance(error, DragomanError) else None
    mark_failed(span, code or type(error).__name__, logs.safe_message(error))


class Telemetry:
    """The tracer and the meter of one server."""

    def __init__(
        self, provider: "TracerProvider", meters: "MeterProvider", owned: Sequence[Any], *, content: bool
    ) -> None:
        self.content = content
        """Whether prompts and answers are added to spans."""
        self.meter: Meter = meters.get_meter("dragoman", __version__)
        self._tracer: Tracer = provider.get_tracer("dragoman", __version__)
        self._owned = owned

    def begin(
        self,
        name: str,
        headers: Mapping[bytes, bytes] | None = None,
        parent: RequestTrace | None = None,
        role: SpanRole = "SERVER",
    ) -> RequestTrace:
        """Begin a trace: a child of the trace in the client's headers, or of another one of ours."""
        from opentelemetry import propagate
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        if parent is not None:
            context = set_span_in_context(parent.span, Context())
        else:
            fields = {each: (headers or {}).get(each.encode(), b"").decode("latin-1") for each in HEADERS}
            context = propagate.extract({each: text for each, text in fields.items() if text}, Context())
        trace = RequestTrace(self, self._tracer.start_span(name, context, _kind(role)))
        trace.conversation = parent.conversation if parent is not None else ""
        return trace

    def remote(self, headers: Mapping[bytes, bytes]) -> RequestTrace | None:
        """Return the trace named in a client's headers, for a client whose requests all belong to it."""
        trace = self.begin("", headers)
        parent = getattr(trace.span, "parent", None)
        if parent is None:
            return None
        from opentelemetry.trace import NonRecordingSpan

        return RequestTrace(self, NonRecordingSpan(parent))

    @contextmanager
    def use_trace(self, trace: RequestTrace) -> Iterator[RequestTrace]:
        """Make `trace` the current one inside the block; log lines get its ids."""
        token = current.set(trace)
        result = logs.log_context.set({**logs.log_context.get(), **trace.ids})
        try:
            yield trace
        finally:
            logs.log_context.reset(result)
            current.reset(token)

    def start(
        self, name: str, role: SpanRole, attributes: Attributes, parent: "Span", start: int | None = None
    ) -> "Span":
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        fields = {key.replace("__", "."): value for key, value in attributes.items() if value is not None}
        context = set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context, _kind(role), fields, start_time=start)

    def close(self) -> None:
        """Send what was not sent yet, for at most `CLOSE_S` seconds."""

        def shut() -> None:
            for each in self._owned:
                each.shutdown()

        thread = threading.Thread(target=shut, name="dragoman-otel", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def _kind(role: SpanRole) -> Any:
    from opentelemetry.trace import SpanKind

    return SpanKind[role]


def headers_of(span: "Span") -> dict[str, str]:
    """Return the trace headers that make the called server's spans children of this one."""
    from opentelemetry import propagate
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    sent: dict[str, str] = {}
    propagate.inject(sent, set_span_in_context(span, Context()))
    return sent


@contextmanager
def propagate_span(span: "Span") -> Iterator[None]:
    """Inside the block, requests to other servers carry the headers of this span."""
    from opentelemetry import context, trace

    sent = outgoing.set(headers_of(span))
    token = context.attach(trace.set_span_in_context(span))
    try:
        yield
    finally:
        context.detach(token)
        outgoing.reset(sent)


@contextmanager
def traced(
    tracing: Telemetry | None, name: str, log_fields: Attributes, parent: RequestTrace | None = None
) -> Iterator[None]:
    """Trace the work inside the block, if tracing is on: as a trace of its own or a child of `parent`.

    `facts` are the fields of the access log line, complete only at the end.
    """
    if tracing is None:
        yield
        return
    trace = tracing.begin(name, parent=parent, role="INTERNAL")
    try:
        with tracing.use_trace(trace):
            yield
    finally:
        trace.end(log_fields, {"dragoman.request_id": log_fields.get("request_id", "")})


# Setup from settings and environment.


def check_tracing(settings: Settings) -> None:
    """Raise if tracing is on and its packages are not installed."""
    if (settings.otel or settings.otel_endpoint is not None) and find_spec("opentelemetry") is None:
        raise SettingsError(MISSING)


def open_tracing(settings: Settings) -> Telemetry | None:
    """Return None where tracing is off. A program that has configured OpenTelemetry itself keeps its
    configuration.
    """
    if not settings.otel and settings.otel_endpoint is None:
        return None
    try:
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(MISSING) from error
    content = os.environ.get(CONTENT, "").strip().lower() in ("true", "1", "span_only", "span_and_event")
    theirs = trace.get_tracer_provider()
    if isinstance(theirs, TracerProvider):
        return Telemetry(theirs, metrics.get_meter_provider(), (), content=content)
    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "dragoman"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in _exporters("traces", settings.otel_endpoint):
        provider.add_span_processor(BatchSpanProcessor(exporter))
    readers = [PeriodicExportingMetricReader(each) for each in _exporters("metrics", settings.otel_endpoint)]
    meters = MeterProvider(readers, resource, shutdown_on_exit=False)
    return Telemetry(provider, meters, (provider, meters), content=content)


def _exporters(signal: Literal["traces", "metrics"], endpoint: str | None) -> Iterator[Any]:
    """Yield the exporters that OTEL_TRACES_EXPORTER and OTEL_METRICS_EXPORTER name; OTLP over HTTP by
    default.
    """
    for name in os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp").split(","):
        name = name.strip()
        if name in ("", "none"):
            continue
        group = f"opentelemetry_{signal}_exporter"
        entry_point = next(iter(entry_points(group=group, name=_entry(name, signal))), None)
        if entry_point is None:
            raise SettingsError(
                f"OTEL_{signal.upper()}_EXPORTER is {name}, which is not installed; install "
                "its package or unset it."
            )
        if endpoint is not None and entry_point.name == "otlp_proto_http":
            yield entry_point.load()(endpoint=f"{endpoint.rstrip('/')}/v1/{signal}")
        else:
            yield entry_point.load()()


def _entry(name: str, signal: str) -> str:
    """Resolve `otlp` to gRPC or HTTP, as the environment says."""
    if name != "otlp":
        return name
    usual = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", usual)
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
