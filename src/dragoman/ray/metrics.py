"""Metrics of the ingress: the combined load of all replicas of each model, under the names that servers use.

A load balancer in front of several ingresses, such as the endpoint picker of Gateway API's inference
extension, reads the same metrics from an ingress as from a server: queue, KV cache, adapters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dragoman.http.metrics import GAUGES, OURS, VLLM, describe_adapters
from dragoman.ray.fleet import Fleet, ReplicaHeartbeat

(RUNNING, _), (WAITING, _), (KV_USAGE, _) = GAUGES
LOOKS: Mapping[str, Callable[[Sequence[ReplicaHeartbeat]], float | None]] = {
    RUNNING.name: lambda beats: sum(beat.running for beat in beats),
    WAITING.name: lambda beats: sum(beat.waiting for beat in beats),
    KV_USAGE.name: lambda beats: _mean([beat.kv for beat in beats if beat.kv is not None]),
}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


class FleetMetricsCollector(Collector):
    """Prometheus collector of the ingress; `write()` returns the body of /metrics."""

    def __init__(self, fleet: Fleet, *, vllm: bool) -> None:
        self._fleet = fleet
        self._namings = (OURS, VLLM) if vllm else (OURS,)
        self.told_breaks = 0
        """Streams whose replica died, and whose clients got an error event."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def write(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        models = {model: self._fleet.beats(model) for model in self._fleet.routers}
        there = GaugeMetricFamily("dragoman_replicas", "Replicas known to the ingress", labels=["model"])
        for model, beats in models.items():
            there.add_metric([model], len(beats))
        yield there
        broken = CounterMetricFamily("dragoman_broken_streams", "Streams whose replica died")
        broken.add_metric([], self.told_breaks)
        yield broken
        for naming in self._namings:
            for figure, _ in GAUGES:
                seen = {model: LOOKS[figure.name](beats) for model, beats in models.items()}
                for name in naming.names(figure) if any(each is not None for each in seen.values()) else ():
                    gauge = GaugeMetricFamily(name, figure.text, labels=[naming.model])
                    for model, value in seen.items():
                        if value is not None:
                            gauge.add_metric([model], value)
                    yield gauge
        if VLLM in self._namings:
            heartbeats = [beat for beats in models.values() for beat in beats]
            used = {name for beat in heartbeats for name in beat.adapters}
            yield from describe_adapters(max((beat.most_adapters for beat in heartbeats), default=0), used)
