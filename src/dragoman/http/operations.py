"""The state of the server for operators: `GET /operations`, which the web UI shows.

The metrics are those of /metrics. Added to these is the current state: running and queued answers, their API
keys, and recent requests. Only administrators see the data of other keys; if no key is required, all clients
do.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from resource import getpagesize
from typing import Any

from dragoman._version import __version__
from dragoman.engines.protocol import is_background, kv_usage_of
from dragoman.errors import Unauthorized
from dragoman.http.admission import FINISHES, TOKENS, Histogram, LiveModel, ModelMetrics
from dragoman.http.app_state import AppState
from dragoman.turns.turn import Turn

LATELY = 512
"""Number of recent requests that are kept, of all keys together."""
MOST_TOLD = 50
MOST_ANSWERS = 200
QUIET = frozenset({"/operations", "/metrics", "/health", "/healthz", "/ping", "/ready", "/"})
"""Paths that are polled, and would hide all other requests."""
FACTS = (
    *("method", "path", "status", "request_id", "model", "finish", "code"),
    *("queue_ms", "ttft_ms", "tokens_per_s", "prompt_tokens", "cached_tokens", "completion_tokens"),
)
"""The fields of a recent request that are shown: those of the access log without text from clients."""


class OperationsReport:
    def __init__(self, host: AppState) -> None:
        self._host = host
        self._began = time.time()
        self.lately: deque[tuple[str, Mapping[str, Any], float]] = deque(maxlen=LATELY)
        """Recent requests: owner, access log facts and duration."""

    def tell(self, headers: Mapping[bytes, bytes], request_id: str | None = None) -> dict[str, Any]:
        host, metrics = self._host, self._host.recorder.metrics
        reader = _Viewer(host, headers)
        answers = [one for name, live in metrics.live_models.items() for one in _answers(name, live)]
        tokens = {name: sum(each.tokens[name] for each in metrics.models.values()) for name in TOKENS}
        # Tokens of running answers are included, otherwise those of a long one would appear all at once.
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            tokens[name] += sum(fields[name] for _, fields in answers if fields["completion_tokens"])
        return {
            "object": "operations",
            "version": __version__,
            "uptime_s": round(time.time() - self._began, 1),
            "draining": host.admission.draining,
            "requests_in_flight": metrics.in_flight,
            "tokens": tokens,
            "models": [
                _describe_model(name, live, metrics.models) for name, live in metrics.live_models.items()
            ],
            "memory": {
                "resident_bytes": _resident_bytes(),
                "bodies_bytes": host.bodies.used_bytes,
                "replies_bytes": host.replies.used_bytes,
            },
            "keys": [*reader.shares(host)],
            "answers": [reader.with_key_name(*one) for one in answers if reader.sees(one[0])][:MOST_ANSWERS],
            "requests": [*islice(self._requests(reader, request_id), MOST_TOLD)],
        }

    def _requests(self, reader: "_Viewer", request_id: str | None) -> Iterator[dict[str, Any]]:
        """Yield recent requests, latest first."""
        for owner, facts, seconds in reversed(self.lately):
            if not reader.sees(owner) or request_id not in (None, facts["request_id"]):
                continue
            fields = {name: facts[name] for name in FACTS if name in facts}
            yield reader.with_key_name(owner, {**fields, "duration_ms": round(seconds * 1000, 1)})


class _Viewer:
    """The client of the request, and what it may see."""

    def __init__(self, host: AppState, headers: Mapping[bytes, bytes]) -> None:
        self._keys = host.keys
        # The route may be open without a key: such clients see only metrics, as on /metrics.
        key = host.keys.authenticate(headers) if host.keys.accepts(headers) else None
        self._owner = key.sha256 if key else None
        self._all = key is not None and (key.admin or not host.keys.key_required)

    def sees(self, owner: str) -> bool:
        return self._all or (self._owner is not None and owner.lstrip("\0") == self._owner)

    def with_key_name(self, owner: str, what: dict[str, Any]) -> dict[str, Any]:
        return {**what, "key": self.name(owner)} if self._keys.key_required else what

    def name(self, owner: str) -> str:
        """Return the name of the key, or the first characters of its hash."""
        owner = owner.lstrip("\0")
        try:
            return self._keys.require(owner).name or owner[:8]
        except Unauthorized:
            return owner[:8]

    def shares(self, host: AppState) -> Iterator[dict[str, Any]]:
        """Yield for each key its number of active requests, and of answers in the engine."""
        if not self._keys.key_required:
            return
        inside = {kind: room.active_by_key for kind, room in host.admission.limiters.items()}
        queues = [live.queue for live in host.recorder.metrics.live_models.values()]
        tickets = [ticket for queue in queues for ticket in queue.tickets]
        owners = {owner for counts in inside.values() for owner in counts} | {one.owner for one in tickets}
        every = sum(len(room.active) for room in host.admission.limiters.values())
        for owner in sorted({owner.lstrip("\0") for owner in owners} | {self._owner or ""} - {""}):
            if not owner or not self.sees(owner):
                continue
            mine = sum(counts.get(owner, 0) for counts in inside.values())
            own = [ticket for ticket in tickets if ticket.owner.lstrip("\0") == owner]
            yield {
                "name": self.name(owner),
                "you": owner == self._owner,
                "inside": mine,
                "share": round(mine / every, 3) if every else 0.0,
                "running": sum(ticket.granted for ticket in own),
                "waiting": sum(ticket.pending for ticket in own),
            }


def _answers(name: str, live: LiveModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield running and queued answers, each with its owner."""
    now = asyncio.get_running_loop().time()
    for ticket in live.queue.tickets:
        turn = ticket.turn
        if not isinstance(turn, Turn):
            continue
        used, first = turn.usage, turn.first_token_at
        rate = (used.completion_tokens - 1) / (now - first) if first and now > first else None
        yield (
            ticket.owner,
            {
                "model": name,
                "state": "running" if ticket.granted else "waiting",
                "batch": is_background(ticket.owner),
                "seconds": round(now - turn.started_at, 3),
                "prompt_tokens": used.prompt_tokens,
                "cached_tokens": used.cached_tokens,
                "completion_tokens": used.completion_tokens,
                "tokens_per_s": round(rate, 1) if rate else None,
            },
        )


def _describe_model(name: str, live: LiveModel, counted: Mapping[str, ModelMetrics]) -> dict[str, Any]:
    figures = counted.get(name) or ModelMetrics()
    return {
        "name": name,
        "running": live.queue.running,
        "waiting": live.queue.waiting,
        "places": live.queue.capacity,
        "kv_usage": kv_usage_of(live.engine),
        "tokens": {each: figures.tokens[each] for each in TOKENS},
        "answers": {reason: figures.finishes[reason] for reason in FINISHES},
        "mean_ms": {
            "queue": _mean_ms(figures.queue),
            "first_token": _mean_ms(figures.first),
            "between_tokens": _mean_ms(figures.between),
            "whole": _mean_ms(figures.whole),
        },
    }


def _mean_ms(spread: Histogram) -> float | None:
    count = sum(spread.counts)
    return round(1000 * spread.total / count, 2) if count else None


def _resident_bytes() -> int:
    """Return the resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
