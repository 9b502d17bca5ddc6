"""/metrics: the metrics of admission in Prometheus' format, under our names and, if wanted, vLLM's.

Everything is computed when it is scraped, from numbers that exist anyway, so a second name costs nothing
otherwise. The inference extension of Kubernetes' Gateway API reads vLLM's names too.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dragoman._version import __version__
from dragoman.engines.protocol import faults_of, kv_usage_of
from dragoman.http.admission import FINISHES, Histogram, LiveModel, Metrics, ModelMetrics

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


class MetricDefinition(Struct, frozen=True):
    """A metric with its names: ours, and vLLM's for it."""

    name: str
    text: str
    vllm: tuple[str, ...] = ()


HISTOGRAMS: Mapping[str, MetricDefinition] = {
    "queue": MetricDefinition(
        "dragoman_queue_seconds", "Time an answer waited in the queue", ("request_queue_time_seconds",)
    ),
    "first": MetricDefinition(
        "dragoman_time_to_first_token_seconds", "Time to first token", ("time_to_first_token_seconds",)
    ),
    "prefill": MetricDefinition(
        "dragoman_prefill_seconds",
        "Time from the start in the engine to the first token",
        ("request_prefill_time_seconds",),
    ),
    "decode": MetricDefinition(
        "dragoman_decode_seconds",
        "Time from the first to the last token",
        ("request_decode_time_seconds",),
    ),
    "between": MetricDefinition(
        "dragoman_inter_token_seconds",
        "Mean time between tokens of an answer",
        ("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    ),
    "whole": MetricDefinition(
        "dragoman_answer_seconds",
        "Duration of requests answered by a model",
        ("e2e_request_latency_seconds",),
    ),
    "prompt": MetricDefinition(
        "dragoman_request_prompt_tokens", "Prompt tokens of a request", ("request_prompt_tokens",)
    ),
    "answer": MetricDefinition(
        "dragoman_request_generation_tokens", "Generated tokens of a request", ("request_generation_tokens",)
    ),
}
COUNTERS: Mapping[str, MetricDefinition] = {
    "prompt_tokens": MetricDefinition(
        "dragoman_prompt_tokens", "Prompt tokens", ("prompt_tokens", "prefix_cache_queries")
    ),
    "cached_tokens": MetricDefinition(
        "dragoman_cached_tokens", "Prompt tokens found in the prefix cache", ("prefix_cache_hits",)
    ),
    "restored_tokens": MetricDefinition(
        "dragoman_restored_reasoning_tokens", "Prompt tokens of restored reasoning"
    ),
    "completion_tokens": MetricDefinition(
        "dragoman_generation_tokens", "Generated tokens", ("generation_tokens",)
    ),
}
GAUGES: tuple[tuple[MetricDefinition, Callable[[LiveModel], float | None]], ...] = (
    (
        MetricDefinition(
            "dragoman_answers_running", "Answers running in the engine", ("num_requests_running",)
        ),
        lambda live: live.queue.running,
    ),
    (
        MetricDefinition(
            "dragoman_answers_waiting", "Answers waiting in the queue", ("num_requests_waiting",)
        ),
        lambda live: live.queue.waiting,
    ),
    (
        MetricDefinition(
            "dragoman_kv_usage_ratio",
            "Share of the KV cache in use",
            ("kv_cache_usage_perc",),
        ),
        lambda live: kv_usage_of(live.engine),
    ),
)
FAULTS: Mapping[str, MetricDefinition] = {
    "failed_steps": MetricDefinition("dragoman_engine_failed_steps", "Failed engine steps"),
    "rebuilds": MetricDefinition("dragoman_engine_rebuilds", "Rebuilds of the engine's runner"),
    "restarts": MetricDefinition("dragoman_engine_restarts", "Restarts of a failed engine"),
}
FINISHED = MetricDefinition("dragoman_finishes", "Answers by finish reason", ("request_success",))
VLLM_REASONS = {"disconnect": "abort"}


class MetricNaming(Struct, frozen=True):
    """A naming scheme: ours or vLLM's."""

    names: Callable[[MetricDefinition], Sequence[str]]
    model: str
    reason: str
    reasons: Mapping[str, str]


OURS = MetricNaming(lambda figure: (figure.name,), "model", "reason", {})
VLLM = MetricNaming(
    lambda figure: tuple(f"vllm:{name}" for name in figure.vllm),
    "model_name",
    "finished_reason",
    VLLM_REASONS,
)


class ModelMetricsCollector(Collector):
    """Collects the metrics of models when they are scraped."""

    def __init__(self, metrics: Metrics, *, vllm: bool) -> None:
        self._metrics = metrics
        self._namings = (OURS, VLLM) if vllm else (OURS,)

    def collect(self) -> Iterator[Metric]:
        yield _histogram("dragoman_request_seconds", "Duration of requests", {(): self._metrics.whole}, ())
        build = GaugeMetricFamily("dragoman_build_info", "Version of the server", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        live, counted = self._metrics.live_models, self._metrics.models
        # Models that have not answered yet have metrics too, all of them 0.
        models = {**{name: ModelMetrics() for name in live}, **counted}
        yield from _describe_faults(live)
        for naming in self._namings:
            yield from _describe_live(naming, live)
            yield from _describe_models(naming, models)
        if VLLM in self._namings:
            shelves = [model.adapters for model in live.values()]
            used = {name for shelf in shelves for name in shelf.used}
            yield from describe_adapters(sum(len(shelf.all) for shelf in shelves), used)


def _describe_live(naming: MetricNaming, live: Mapping[str, LiveModel]) -> Iterator[Metric]:
    for figure, look in GAUGES:
        seen = {name: number for name, model in live.items() if (number := look(model)) is not None}
        for name in naming.names(figure) if seen else ():
            gauge = GaugeMetricFamily(name, figure.text, labels=[naming.model])
            for model, value in seen.items():
                gauge.add_metric([model], value)
            yield gauge


def _describe_faults(live: Mapping[str, LiveModel]) -> Iterator[Metric]:
    faults = {
        name: engine_faults
        for name, model in live.items()
        if (engine_faults := faults_of(model.engine)) is not None
    }
    for field, figure in FAULTS.items() if faults else ():
        counter = CounterMetricFamily(figure.name, figure.text, labels=[OURS.model])
        for name, counters in faults.items():
            counter.add_metric([name], getattr(counters, field))
        yield counter


def _describe_models(naming: MetricNaming, models: Mapping[str, ModelMetrics]) -> Iterator[Metric]:
    for key, figure in COUNTERS.items():
        for name in naming.names(figure):
            counter = CounterMetricFamily(name, figure.text, labels=[naming.model])
            for model, figures in models.items():
                counter.add_metric([model], figures.tokens[key])
            yield counter
    for name in naming.names(FINISHED):
        finished = CounterMetricFamily(name, FINISHED.text, labels=[naming.model, naming.reason])
        for model, figures in models.items():
            for reason in FINISHES:
                finished.add_metric([model, naming.reasons.get(reason, reason)], figures.finishes[reason])
        yield finished
    for key, figure in HISTOGRAMS.items():
        for name in naming.names(figure):
            spreads: dict[tuple[str, ...], Histogram] = {
                (model,): getattr(figures, key) for model, figures in models.items()
            }
            yield _histogram(name, figure.text, spreads, (naming.model,))


def describe_adapters(most: int, used: Iterable[str]) -> Iterator[Metric]:
    """Describe adapters for the inference extension, in labels; the value is the time."""
    if most:
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use", labels=labels)
        info.add_metric([str(most), ",".join(sorted(used)), ""], time.time())
        yield info


def _histogram(
    name: str, text: str, spreads: Mapping[tuple[str, ...], Histogram], labels: Iterable[str]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    for values, spread in spreads.items():
        seen, buckets = 0, []
        for bound, count in zip((*map(str, map(float, spread.bounds)), "+Inf"), spread.counts, strict=True):
            seen += count
            buckets.append((bound, float(seen)))
        family.add_metric(list(values), buckets, spread.total)
    return family


class Exposition:
    """The body of /metrics, returned by `write()`."""

    def __init__(self, metrics: Metrics, meter: "Meter | None" = None, *, vllm: bool) -> None:
        self._registry: CollectorRegistry = metrics.registry
        self._registry.register(ModelMetricsCollector(metrics, vllm=vllm))
        # CPU time, memory and open files of this process, from /proc.
        ProcessCollector(registry=self._registry)
        if meter is not None:
            OtelMetrics(meter, metrics)

    def write(self) -> bytes:
        return generate_latest(self._registry)


# The same metrics for OpenTelemetry, by its conventions for generative AI.


TEXT_COMPLETIONS = frozenset({"/v1/completions", "/api/generate", "/infill", "/completion"})
VECTORS = frozenset({"/v1/embeddings", "/api/embed", "/api/embeddings"})


class OtelMetrics:
    """A listener of `Metrics` that exports each request."""

    def __init__(self, meter: "Meter", metrics: Metrics) -> None:
        histogram = meter.create_histogram
        self._request = histogram("http.server.request.duration", "s")
        self._whole = histogram("gen_ai.server.request.duration", "s")
        self._first = histogram("gen_ai.server.time_to_first_token", "s")
        self._between = histogram("gen_ai.server.time_per_output_token", "s")
        self._tokens = histogram("gen_ai.client.token.usage", "{token}")
        for figure, look in GAUGES:
            name = figure.name.replace("_", ".", 1)
            meter.create_observable_gauge(name, [_watch(metrics, look)], description=figure.text)
        metrics.listeners.append(self.hear)

    def hear(self, route: str, log_fields: Mapping[str, Any], seconds: float) -> None:
        failed = (
            {"error.type": log_fields.get("code") or str(log_fields["status"])}
            if log_fields["status"] >= 500
            else {}
        )
        fields = {"http.request.method": log_fields["method"], "http.route": route, **failed}
        self._request.record(seconds, {**fields, "http.response.status_code": log_fields["status"]})
        if "prompt_tokens" not in log_fields:
            return
        operation = "text_completion" if route in TEXT_COMPLETIONS else "chat"
        named = {
            "gen_ai.operation.name": "embeddings" if route in VECTORS else operation,
            "gen_ai.provider.name": "dragoman",
            "gen_ai.request.model": log_fields.get("model", ""),
            "gen_ai.response.model": log_fields.get("model", ""),
        }
        self._whole.record(seconds, {**named, **failed})
        if "ttft_ms" in log_fields:
            self._first.record(log_fields["ttft_ms"] / 1000, named)
        if rate := log_fields.get("tokens_per_s"):
            self._between.record(1 / rate, named)
        for kind, name in (("input", "prompt_tokens"), ("output", "completion_tokens")):
            if count := log_fields.get(name):
                self._tokens.record(count, {**named, "gen_ai.token.type": kind})


def _watch(metrics: Metrics, look: Callable[[LiveModel], float | None]) -> Callable[..., list["Observation"]]:
    def watch(options: object) -> list["Observation"]:
        from opentelemetry.metrics import Observation

        seen = {name: look(model) for name, model in metrics.live_models.items()}
        return [Observation(value, {"model": name}) for name, value in seen.items() if value is not None]

    return watch
