"""Prometheus metrics. Labels come from fixed sets only: nothing a client sends makes a new series."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_FINISHES = ("stop", "length", "error", "disconnect")

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


class Metrics:
    """One registry per app, so that two apps in a process do not share their figures."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.in_flight = Gauge("dragoman_requests_in_flight", "Requests being served", registry=registry)
        self.running = Gauge("dragoman_answers_running", "Answers the engine has", registry=registry)
        self.waiting = Gauge("dragoman_answers_waiting", "Turns that wait for the engine", registry=registry)
        self.refused = Counter(
            "dragoman_refused", "Requests refused at the door, by reason", ["reason"], registry=registry
        )
        self._requests = Counter(
            "dragoman_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        self._finishes = Counter(
            "dragoman_finishes", "Answers by how they ended", ["reason"], registry=registry
        )
        self._prompt = Counter("dragoman_prompt_tokens", "Prompt tokens", registry=registry)
        self._cached = Counter(
            "dragoman_cached_tokens", "Prompt tokens not computed again", registry=registry
        )
        self._generated = Counter("dragoman_generation_tokens", "Generated tokens", registry=registry)
        self._first = _histogram("dragoman_time_to_first_token_seconds", "Time to first token", registry)
        self._between = _histogram("dragoman_inter_token_seconds", "Mean time between tokens", registry)
        self._whole = _histogram("dragoman_request_seconds", "Whole request", registry)

    def observe(self, route: str, status: int, facts: dict[str, Any], seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._whole.observe(seconds)
        self._prompt.inc(facts.get("prompt_tokens", 0))
        self._cached.inc(facts.get("cached_tokens", 0))
        self._generated.inc(facts.get("completion_tokens", 0))
        for reason in facts.get("finish", "").split(","):
            if reason in _FINISHES:
                self._finishes.labels(reason).inc()
        if "ttft_ms" in facts:
            self._first.observe(facts["ttft_ms"] / 1000)
        if facts.get("tokens_per_s"):
            self._between.observe(1 / facts["tokens_per_s"])

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, buckets=_SECONDS, registry=registry)
