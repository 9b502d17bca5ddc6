"""The ledger: what was done, which answers are known, and what failed."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from tests.soak.answer import Answer
from tests.soak.fault import Fault

MOST_FAULTS = 10
"""So many faults of one kind end the soak."""
SHOWN_FAULTS = 3
"""So many faults of one kind are written out in full."""
MOST_KNOWN = 20_000
"""Answers that are kept to be compared with."""
LOG_LINES = 30
SHOWN = 50_000
"""Characters of a request or a reply that are written out."""


class Failure(Struct):
    after_s: float
    person: str
    fault: Fault
    path: str
    body: Any
    log: list[str]

    def __str__(self) -> str:
        reply = self.fault.reply.decode(errors="replace")
        return "\n".join(
            [
                f"=== {self.fault.kind} after {self.after_s:.1f} s: {self.person}: {self.fault.text}",
                f"request: {self.path} {_cut(json.dumps(self.body))}",
                f"reply: {_cut(reply) or '(nothing)'}",
                f"the last {len(self.log)} lines of the log:",
                *self.log,
            ]
        )


class Ledger:
    def __init__(self, read_log: Callable[[int], list[str]], most_requests: int = 1_000_000) -> None:
        self._began = time.monotonic()
        self._read_log = read_log
        self._known: dict[bytes, Answer] = {}
        self.kinds: Counter[str] = Counter()
        """How often each kind of action came to its end."""
        self.faults: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.requests = self.broken_off = self.announced = 0
        self._most_requests = most_requests
        self.over = asyncio.Event()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def count_request(self) -> None:
        self.requests += 1
        if self.requests >= self._most_requests:
            self.over.set()

    def fail(self, person: str, fault: Fault, path: str = "", body: Any = None) -> None:
        self.faults[fault.kind] += 1
        if self.faults[fault.kind] <= SHOWN_FAULTS:
            log = self._read_log(LOG_LINES)
            self.failures.append(Failure(self.elapsed_s, person, fault, path, body, log))
        if self.faults[fault.kind] >= MOST_FAULTS:
            self.over.set()

    def compare(self, path: str, body: dict[str, Any], answer: Answer) -> None:
        """Raises a `Fault` if the first answer to the same body, streamed or not, was another one."""
        asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        digest = hashlib.sha256(f"{path} {json.dumps(asked, sort_keys=True)}".encode()).digest()
        if digest not in self._known:
            if len(self._known) < MOST_KNOWN:
                self._known[digest] = answer
            return
        self.kinds["answer compared"] += 1
        first = self._known[digest]
        if not answer.is_same(first):
            text = f"an answer that is not the first one to the same:\n  first {first}\n  now   {answer}"
            raise Fault("differs", text)

    def describe(self, resident: float = 0.0) -> str:
        """One line, as it is printed every ten seconds, with the bytes that the server has."""
        count = self.faults
        line = (
            f"{self.elapsed_s:5.0f} s  {self.requests:6,} requests  {self.broken_off:5,} broken off  "
            f"{count['5xx'] + count['error in a stream']} 5xx  {count['differs']} differing  "
            f"{sum(count.values())} faults  {self.announced} announced"
        )
        return f"{line}  RSS {resident / 2**20:,.0f} MiB" if resident else line

    def summarize(self, required: Sequence[str]) -> list[str]:
        """How often each kind of action was done; required kinds that never were come last."""
        lines = [f"{count:7,}  {kind}" for kind, count in sorted(self.kinds.items())]
        return lines + [f"  NEVER  {kind}" for kind in self.find_missing(required)]

    def find_missing(self, required: Sequence[str]) -> list[str]:
        return [kind for kind in required if not self.kinds[kind]]


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
