"""Who looks at the server all the time: is it healthy, and does it hold more than before?"""

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
"""Until what was left is done with."""
SETTLE_S = 0.5
"""In which connections are closed whose clients have left."""
LEAST_RESTS = 5
"""Of a life of the server that is looked at."""
MOST_MIB, MOST_DESCRIPTORS, MOST_THREADS = 160, 8, 8
"""By which a server may have grown from the second third of its life to the last: a second model that is
loaded or not is the most of it."""


class Probes:
    def __init__(self, server: Server, client: Client) -> None:
        self._server = server
        self._client = client
        self._ledger = client.ledger
        self._failing: set[str] = set()
        """Paths whose last probe failed: what lasts is told once."""
        self._rests: list[Resources] = []
        """Of this life of the server, after each phase."""

    def forget(self) -> None:
        """The server has been restarted."""
        self._rests.clear()

    async def watch(self) -> None:
        """Health, readiness, and whether the process is there, for ever."""
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
        """Lines of level error that are new."""
        for line in self._server.read_errors():
            self._ledger.fail(NAME, Fault("log", line))

    async def rest(self) -> None:
        """Returns when nothing is computed any more; a `growth` fault is in the ledger where it is."""
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
        """What the server holds in the last third of its life with what it held in the one before."""
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
    """Of each resource by itself."""
    names = Resources.__struct_fields__
    return Resources(*(int(statistics.median(getattr(rest, name) for rest in rests)) for name in names))


def _has_grown(warm: Resources, last: Resources) -> bool:
    return (
        last.resident - warm.resident > MOST_MIB << 20
        or last.descriptors - warm.descriptors > MOST_DESCRIPTORS
        or last.threads - warm.threads > MOST_THREADS
    )
