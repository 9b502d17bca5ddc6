"""What is noted down of all work: a line in the access log, and figures for Prometheus."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dragoman.errors import DragomanError

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
        requests = Counter(
            "dragoman_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        finishes = Counter("dragoman_finishes", "Answers by how they ended", ["reason"], registry=registry)
        # The labels are few, and looking for their figures each time takes longer than adding to them.
        self._requests, self._finishes = cache(requests.labels), cache(finishes.labels)
        self._tokens = {
            "prompt_tokens": Counter("dragoman_prompt_tokens", "Prompt tokens", registry=registry),
            "cached_tokens": Counter(
                "dragoman_cached_tokens", "Prompt tokens not computed again", registry=registry
            ),
            "completion_tokens": Counter("dragoman_generation_tokens", "Generated tokens", registry=registry),
        }
        self._first = _histogram("dragoman_time_to_first_token_seconds", "Time to first token", registry)
        self._between = _histogram("dragoman_inter_token_seconds", "Mean time between tokens", registry)
        self._whole = _histogram("dragoman_request_seconds", "Whole request", registry)

    def observe(self, route: str, status: int, facts: dict[str, Any], seconds: float) -> None:
        self._requests(route, str(status)).inc()
        self._whole.observe(seconds)
        for name, counter in self._tokens.items():
            if count := facts.get(name):
                counter.inc(count)
        for reason in facts.get("finish", "").split(","):
            if reason in _FINISHES:
                self._finishes(reason).inc()
        if "ttft_ms" in facts:
            self._first.observe(facts["ttft_ms"] / 1000)
        if facts.get("tokens_per_s"):
            self._between.observe(1 / facts["tokens_per_s"])

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, buckets=_SECONDS, registry=registry)


access = logging.getLogger("dragoman.access")


class Journal:
    def __init__(self) -> None:
        self.metrics = Metrics()

    def record(self, route: str, facts: dict[str, Any], seconds: float) -> None:
        """`facts` have a method, a path and a status; `route` is one of a fixed set of names."""
        self.metrics.observe(route, facts["status"], facts, seconds)
        if not access.isEnabledFor(logging.INFO):
            return
        line = {**facts, "duration_ms": round(seconds * 1000, 1)}
        access.info("%s %s %d", facts["method"], facts["path"], facts["status"], extra={"request": line})

    @contextmanager
    def work(self, method: str, path: str) -> Iterator[dict[str, Any]]:
        """For what is no HTTP request of its own. The block adds the facts."""
        began = time.monotonic()
        facts: dict[str, Any] = {"method": method, "path": path, "status": 200}
        self.metrics.in_flight.inc()
        try:
            yield facts
        except DragomanError as error:
            facts |= {"status": error.status, "error": error.message}
            raise
        finally:
            self.metrics.in_flight.dec()
            self.record(f"{method} {path}", facts, time.monotonic() - began)
