"""Traces of requests, as OpenTelemetry has them. Where nobody wants them, nothing is imported or paid.

A request has a `RequestTrace`: a span for all of it, under which others stand. Whoever works for it finds
it in `current`, which goes along with tasks; without traces it is None, and that is all there is to pay. What
happens again and again (tokens) leaves no span. What a span is about is known at its end, so most spans are
made then, out of times that were noted: `RequestTrace.add`.

Where spans go, how many are kept and what the service is called is said by the environment variables that
OpenTelemetry has for it (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME and so on).
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
"""The variable by which what was said becomes part of spans; the conventions have it so."""
CLOSE_S = 5.0
"""What a collector gets for the last spans before the process goes."""
MISSING = "`otel` needs packages that are not installed: pip install 'dragoman[otel]'."
HEADERS = ("traceparent", "tracestate", "baggage")
SESSION = HINT_HEADER.encode()


class RequestTrace:
    """One request, or other work of its own. Spans that it adds stand under its own."""

    def __init__(self, tracing: "Tracing", span: "Span") -> None:
        self.tracing = tracing
        self.span = span
        self.plans: dict[int, tuple[int, int]] = {}
        """When prompts were made, by the ids of their plans."""
        self.conversation = ""
        """The id of the conversation that the request is a part of, where there is one."""
        self._cut: list[tuple[Span, int]] = []
        """Spans of work that was cut short, and when; why, is known at the end of the request."""
        self._over = False

    @property
    def ids(self) -> dict[str, str]:
        """As log lines have them."""
        context = self.span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    @property
    def response(self) -> bytes:
        """The header `traceresponse`, by which clients find the trace."""
        ids, flags = self.ids, self.span.get_span_context().trace_flags
        return f"00-{ids['trace_id']}-{ids['span_id']}-{flags:02x}".encode()

    def begin(
        self, name: str, role: SpanRole = "INTERNAL", start: int | None = None, **attributes: Any
    ) -> "Span":
        """A span under that of the request; who begins it ends it."""
        return self.tracing.start(name, role, attributes, self.span, start)

    def add(
        self, name: str, start: int, end: int, parent: "Span | None" = None, error: Exception | None = None
    ) -> None:
        """A span of something that is over; times are in nanoseconds, as `time.time_ns()` has them."""
        if not self.span.is_recording():
            # Nobody will see it: most samplers keep few requests.
            return
        span = self.tracing.start(name, "INTERNAL", {}, parent or self.span, start)
        if error is not None:
            mark_error(span, error)
        span.end(end)

    def timing(self, plan: Callable[[], T]) -> Callable[[], T]:
        """`plan`, with a note of when it was made."""

        def planned() -> T:
            start = time.time_ns()
            try:
                made = plan()
            except Exception as error:
                self.add("prompt", start, time.time_ns(), error=error)
                raise
            self.plans[id(made)] = (start, time.time_ns())
            return made

        return planned

    def cut_short(self, span: "Span", at: int) -> None:
        """It ends without an end of its own: what ended the request ended it as well."""
        if self._over:
            span.end(at)
        else:
            self._cut.append((span, at))

    def end(self, facts: Attributes, attributes: Attributes) -> None:
        """`facts` are what the access log says of it."""
        span, code = self.span, facts.get("code") or str(facts["status"])
        reason = str(facts.get("finish", ""))
        # Who sent nonsense is told so: that is no error of the server. Nor is it one that a client has left.
        left = reason in ("disconnect", "cancelled")
        failed = not left and (facts["status"] >= 500 or ("error" in facts and facts["status"] < 400))
        self._over = True
        for cut, at in self._cut:
            if "error" in facts and not left:
                mark_failed(cut, code, facts["error"])
            elif reason:
                cut.set_attribute("gen_ai.response.finish_reasons", (reason,))
            cut.end(at)
        span.set_attributes(dict(attributes))
        if failed:
            mark_failed(span, code, facts.get("error", ""))
        elif facts["status"] >= 400:
            span.set_attribute("error.type", code)
        elif left:
            span.set_attribute("dragoman.ended", reason)
        span.end()
        self.plans.clear()
        self._cut.clear()


current: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
"""That of the request which is being served."""
session: ContextVar[str] = ContextVar("session", default="")
"""What the client calls the session that its request belongs to, in the header SESSION."""
outgoing: ContextVar[Mapping[str, str] | None] = ContextVar("outgoing", default=None)
"""The headers by which somebody else's spans stand under ours, while somebody else is asked."""


def mark_failed(span: "Span", code: str, message: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, message or None))


def mark_error(span: "Span", error: BaseException) -> None:
    """The text of a foreign exception stays out: it may hold what a client sent."""
    code = error.code if isinstance(error, DragomanError) else None
    mark_failed(span, code or type(error).__name__, logs.describe(error))


class Tracing:
    """Of one server: makes traces, and has the meter of its figures."""

    def __init__(
        self, provider: "TracerProvider", meters: "MeterProvider", owned: Sequence[Any], *, content: bool
    ) -> None:
        self.content = content
        """Whether prompts and answers become part of spans."""
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
        """A trace of its own, under that of whoever has sent such headers, or under another of ours."""
        from opentelemetry import propagate
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        if parent is not None:
            context = set_span_in_context(parent.span, Context())
        else:
            given = {each: (headers or {}).get(each.encode(), b"").decode("latin-1") for each in HEADERS}
            context = propagate.extract({each: text for each, text in given.items() if text}, Context())
        trace = RequestTrace(self, self._tracer.start_span(name, context, _kind(role)))
        trace.conversation = parent.conversation if parent is not None else ""
        return trace

    def remote(self, headers: Mapping[bytes, bytes]) -> RequestTrace | None:
        """The trace of somebody else, of whose requests there will be several."""
        trace = self.begin("", headers)
        parent = getattr(trace.span, "parent", None)
        if parent is None:
            return None
        from opentelemetry.trace import NonRecordingSpan

        return RequestTrace(self, NonRecordingSpan(parent))

    @contextmanager
    def following(self, trace: RequestTrace) -> Iterator[RequestTrace]:
        """Inside, it is the trace that everything belongs to; so do log lines."""
        token = current.set(trace)
        told = logs.about.set({**logs.about.get(), **trace.ids})
        try:
            yield trace
        finally:
            logs.about.reset(told)
            current.reset(token)

    def start(
        self, name: str, role: SpanRole, attributes: Attributes, parent: "Span", start: int | None = None
    ) -> "Span":
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        given = {key.replace("__", "."): value for key, value in attributes.items() if value is not None}
        context = set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context, _kind(role), given, start_time=start)

    def close(self) -> None:
        """What was not sent yet is sent, unless that takes too long."""

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
    """What to send so that the spans of who is asked stand under this one."""
    from opentelemetry import propagate
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    sent: dict[str, str] = {}
    propagate.inject(sent, set_span_in_context(span, Context()))
    return sent


@contextmanager
def asking(span: "Span") -> Iterator[None]:
    """Inside, others are asked on behalf of this span, and told of it."""
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
    tracing: Tracing | None, name: str, facts: Attributes, parent: RequestTrace | None = None
) -> Iterator[None]:
    """Inside, work has a trace, where there are traces: its own, or a part of the parent's.

    `facts` are what the access log says of it, once it is over.
    """
    if tracing is None:
        yield
        return
    trace = tracing.begin(name, parent=parent, role="INTERNAL")
    try:
        with tracing.following(trace):
            yield
    finally:
        trace.end(facts, {"dragoman.request_id": facts.get("request_id", "")})


# From the settings and the environment.


def check_tracing(settings: Settings) -> None:
    """Raises where traces are wanted and cannot be had."""
    if (settings.otel or settings.otel_endpoint is not None) and find_spec("opentelemetry") is None:
        raise SettingsError(MISSING)


def open_tracing(settings: Settings) -> Tracing | None:
    """None where nobody wants traces. A program that has set OpenTelemetry up itself keeps its own ways."""
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
        return Tracing(theirs, metrics.get_meter_provider(), (), content=content)
    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "dragoman"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in _exporters("traces", settings.otel_endpoint):
        provider.add_span_processor(BatchSpanProcessor(exporter))
    readers = [PeriodicExportingMetricReader(each) for each in _exporters("metrics", settings.otel_endpoint)]
    meters = MeterProvider(readers, resource, shutdown_on_exit=False)
    return Tracing(provider, meters, (provider, meters), content=content)


def _exporters(signal: Literal["traces", "metrics"], endpoint: str | None) -> Iterator[Any]:
    """Those that OTEL_TRACES_EXPORTER and OTEL_METRICS_EXPORTER name; by default OTLP over HTTP."""
    for name in os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp").split(","):
        name = name.strip()
        if name in ("", "none"):
            continue
        group = f"opentelemetry_{signal}_exporter"
        found = next(iter(entry_points(group=group, name=_entry(name, signal))), None)
        if found is None:
            raise SettingsError(f"OTEL_{signal.upper()}_EXPORTER has {name}, for which nothing is installed.")
        if endpoint is not None and found.name == "otlp_proto_http":
            yield found.load()(endpoint=f"{endpoint.rstrip('/')}/v1/{signal}")
        else:
            yield found.load()()


def _entry(name: str, signal: str) -> str:
    """`otlp` is one of two, as the environment says."""
    if name != "otlp":
        return name
    usual = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", usual)
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
