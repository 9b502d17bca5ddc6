"""What is noted down of all work: a line in the access log, and figures for Prometheus."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dragoman.errors import DragomanError
from dragoman.http.metrics import Metrics

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
