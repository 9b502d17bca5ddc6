"""Probes: health and readiness all the time, the log, and what the server holds between phases."""

import asyncio
import statistics
import time
from collections.abc import Sequence

import httpx

from tests.soak.client import Client
from tests.soak.fault import Fault
from tests.soak.server import Resources, Server

NAME = "the probes"
EVERY_S = 0.5
PATIENCE_S = 10.0
REST_S = 60.0
"""Seconds in which the engine must be rid of all requests."""
SETTLE_S = 0.5
"""Seconds in which the server closes the connections of clients that have left."""
LEAST_RESTS = 5
"""A life of the server with fewer rests is too short to measure its growth."""
MOST_MIB, MOST_DESCRIPTORS, MOST_THREADS = 160, 8, 8
"""The most that a server may grow from the second third of its life to the last; most of it is a second model
that is loaded in one of them and not in the other."""


class Probes:
    def __init__(self, server: Server, client: Client) -> None:
        self._server = server
        self._client = client
        self._ledger = client.ledger
        self._failing: set[str] = set()
        """Paths whose last probe failed: a fault that lasts is counted once."""
        self._rests: list[Resources] = []
        """What this process of the server held after each phase."""

    def forget(self) -> None:
        """Start anew with a new process."""
        self._rests.clear()

    async def watch(self) -> None:
        """Probe health, readiness and the process until this is cancelled."""
        async with httpx.AsyncClient(base_url=self._server.url, timeout=PATIENCE_S, verify=False) as client:
            while True:
                for path in ("/health", "/ready"):
                    await self._probe(client, path)
                self.read_log()
                await asyncio.sleep(EVERY_S)

    async def _probe(self, client: httpx.AsyncClient, path: str) -> None:
        windows, began = self._client.windows, time.monotonic()
        if not windows.is_server_there:
            return
        try:
            self._server.check()
            reply = await client.get(path)
            if reply.status_code != 200:
                raise Fault("unready", f"status {reply.status_code} of {path}", reply.content)
        except httpx.HTTPError as error:
            self._fail(Fault("unready", f"{error!r} of {path}"), path, began)
        except Fault as fault:
            self._fail(fault, path, began)
        else:
            self._ledger.kinds["probe"] += 1
            self._failing.discard(path)

    def _fail(self, fault: Fault, path: str, began: float) -> None:
        if not self._client.windows.covers_restart(began):
            if path not in self._failing:
                self._ledger.fail(NAME, fault)
            self._failing.add(path)
            if fault.kind == "server":
                self._ledger.over.set()

    def read_log(self) -> None:
        """Count new lines of level error as faults."""
        for line in self._server.read_errors():
            self._ledger.fail(NAME, Fault("log", line))

    async def rest(self) -> None:
        """Wait until the engine has no request, and measure what the server holds."""
        until = time.monotonic() + REST_S
        try:
            while unfinished := await self._server.count_unfinished():
                if time.monotonic() > until:
                    raise Fault("growth", f"{unfinished} answers run or wait, and no client is there")
                await asyncio.sleep(0.1)
        except httpx.HTTPError as error:
            self._ledger.fail(NAME, Fault("broken", f"{error!r} of /metrics"))
        except Fault as fault:
            self._ledger.fail(NAME, fault)
        await asyncio.sleep(SETTLE_S)
        self._rests.append(self._server.measure())

    def compare(self) -> None:
        """Compare what the server held in the last third of its life with the third before."""
        rests = self._rests
        print("MiB at rest:", *(rest.resident >> 20 for rest in rests), flush=True)
        if len(rests) < LEAST_RESTS:
            return
        third = len(rests) // 3
        warm, last = _find_median(rests[third : 2 * third]), _find_median(rests[2 * third :])
        self._ledger.kinds["growth measured"] += 1
        if _has_grown(warm, last):
            self._ledger.fail(NAME, Fault("growth", f"it held {warm} when it was warm, and holds {last}"))


def _find_median(rests: Sequence[Resources]) -> Resources:
    """The median of each resource by itself."""
    names = Resources.__struct_fields__
    return Resources(*(int(statistics.median(getattr(rest, name) for rest in rests)) for name in names))


def _has_grown(warm: Resources, last: Resources) -> bool:
    return (
        last.resident - warm.resident > MOST_MIB << 20
        or last.descriptors - warm.descriptors > MOST_DESCRIPTORS
        or last.threads - warm.threads > MOST_THREADS
    )
