"""The replicas and the connections to them, which carry requests and replies.

Data of a replica is written to the client in the callback that reads it: a task switch per token would be
most of the cost.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import cast

import httptools
from msgspec import Struct
from starlette.types import Send

from dragoman.http.run_turn import CallbackSender
from dragoman.http.token_budgets import Taken
from dragoman.routing import Router

SILENCE_S = 30.0
"""Seconds without a report after which a replica gets no requests."""
CONNECT_S = 5.0
IDLE_S = 30.0
"""Seconds after which an idle connection is not reused: the replica may be closing it."""
HIGH_WATER = 256 * 1024
"""Bytes of a reply that wait for a slow client; above, reading from the replica pauses."""
MOST_MADE = 64 * 1024
"""Responses whose replica is remembered."""


class ReplicaHeartbeat(Struct, frozen=True):
    """The periodic report of a replica."""

    id: str
    model: str
    host: str
    port: int
    running: int = 0
    waiting: int = 0
    taken: Taken = (0, {})
    """A day, and the tokens used on it, by hashes of keys that have a budget."""
    inside: dict[str, int] = {}
    """Admitted requests for answers, by hashes of keys."""
    at_work: dict[str, int] = {}
    """Answers that the engine computes, by hashes of keys."""
    making: list[str] = []
    """Responses that it runs and that clients may ask for."""
    kv: float | None = None
    """Usage of the KV cache from 0 to 1, if known."""
    adapters: list[str] = []
    """Adapters in use; the next field has the number of loaded ones."""
    most_adapters: int = 0
    leaving: bool = False


class FleetUpdate(Struct, frozen=True):
    """What an ingress tells a replica about the other replicas."""

    taken: dict[str, Taken] = {}
    """Tokens that keys have used at other replicas, including lost ones."""
    at_work: dict[str, int] = {}
    """Answers per key that other replicas of the model compute."""


class KeyRequestCounts:
    """How many requests for answers each key has at all replicas together.

    The counts combine the last reports of the replicas with what this ingress has passed on since. A single
    ingress is exact, except for requests that are passed on and not yet admitted. With several ingresses, the
    counts lack what the others have passed on since a replica's last report, so a key may exceed its limit by
    that much.
    """

    def __init__(self) -> None:
        self._known: dict[str, Counter[str]] = {}
        self._own: dict[str, Counter[str]] = {}
        """The requests of this ingress."""

    def of(self, owner: str) -> int:
        return sum(counts[owner] for counts in self._known.values())

    def enter(self, replica: str, owner: str) -> None:
        for counts in (self._known, self._own):
            counts.setdefault(replica, Counter())[owner] += 1

    def leave(self, replica: str, owner: str) -> None:
        for counts in (self._known, self._own):
            mine = counts.get(replica, Counter[str]())
            mine[owner] -= 1
            if mine[owner] <= 0:
                del mine[owner]
            if not mine:
                counts.pop(replica, None)

    def hear(self, replica: str, inside: Mapping[str, int]) -> None:
        """Take a replica's report; requests that are passed on and not yet admitted still count."""
        self._known[replica] = Counter(inside) | self._own.get(replica, Counter())

    def lose(self, replica: str) -> None:
        """Drop the counts of a lost replica."""
        self._known.pop(replica, None)


class Fleet:
    """The replicas of each model, and which of them is next."""

    def __init__(self, models: Sequence[str], *, alone: bool = True) -> None:
        """`alone`: no other ingress uses the replicas, so this one's counts are complete."""
        self._alone = alone
        self.routers = {model: Router() for model in models}
        self._heard: dict[str, tuple[ReplicaHeartbeat, float]] = {}
        self._idle: dict[str, list[ReplicaConnection]] = {}
        self._taken: dict[str, Taken] = {}
        self._makers: OrderedDict[str, str] = OrderedDict()
        self.counts = KeyRequestCounts()

    def update(self, beat: ReplicaHeartbeat) -> FleetUpdate:
        """Take a report; returns news about the other replicas."""
        self._taken[beat.id] = beat.taken
        router = self.routers.get(beat.model)
        if router is None:
            return FleetUpdate()
        if beat.leaving:
            self.drop(beat.id)
        else:
            self._heard[beat.id] = beat, time.monotonic()
            router.add(beat.id)
            self.counts.hear(beat.id, beat.inside)
            for response in beat.making:
                self.set_producer(response, beat.id)
            if not self._alone:
                router.set_load(beat.id, beat.running + beat.waiting)
        for other, at in [*self._heard.values()]:
            if at < time.monotonic() - SILENCE_S:
                self.drop(other.id)
        today = max(day for day, _ in self._taken.values())
        # Tokens used today at lost replicas still count.
        self._taken = {
            id_: taken for id_, taken in self._taken.items() if id_ in self._heard or taken[0] == today > 0
        }
        return FleetUpdate(
            {id_: taken for id_, taken in self._taken.items() if id_ != beat.id}, self._at_work_beside(beat)
        )

    def _at_work_beside(self, beat: ReplicaHeartbeat) -> dict[str, int]:
        counts = Counter[str]()
        for other in self.beats(beat.model):
            if other.id != beat.id:
                counts.update(other.at_work)
        return dict(counts)

    def set_producer(self, response: str, id_: str) -> None:
        """Remember the replica that runs or ran a response: requests for it go there."""
        self._makers[response] = id_
        self._makers.move_to_end(response)
        if len(self._makers) > MOST_MADE:
            self._makers.popitem(last=False)

    def producer(self, response: str) -> ReplicaHeartbeat | None:
        return self.replica(self._makers.get(response, ""))

    def drop(self, id_: str) -> None:
        """Send nothing more to a replica until it reports again."""
        known = self._heard.pop(id_, None)
        if known is not None:
            self.routers[known[0].model].remove(id_)
            self.counts.lose(id_)
            for passage in self._idle.pop(id_, []):
                passage.close()

    def beats(self, model: str) -> list[ReplicaHeartbeat]:
        return [beat for beat, _ in self._heard.values() if beat.model == model]

    def replica(self, id_: str) -> ReplicaHeartbeat | None:
        known = self._heard.get(id_)
        return None if known is None else known[0]

    async def open(self, beat: ReplicaHeartbeat) -> "ReplicaConnection":
        """Return a connection to a replica. Raises OSError if there is none."""
        idle = self._idle.get(beat.id, [])
        while idle:
            passage = idle.pop()
            if passage.is_open and passage.rested_at > time.monotonic() - IDLE_S:
                return passage
            passage.close()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(ReplicaConnection, beat.host, beat.port)
        return connection

    def return_connection(self, id_: str, passage: "ReplicaConnection") -> None:
        """Keep a connection for reuse."""
        if id_ in self._heard and passage.reusable:
            passage.rested_at = time.monotonic()
            self._idle.setdefault(id_, []).append(passage)
        else:
            passage.close()


class ReplicaConnection(asyncio.Protocol):
    """A connection to a replica, for one request and its streamed reply at a time."""

    def __init__(self) -> None:
        self.rested_at = 0.0
        self._transport: asyncio.Transport | None = None
        self._lost = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.over = False
        self.reusable = False
        self._pieces: list[bytes] = []
        self._size = 0
        self._grown: asyncio.Future[None] | None = None
        self._writer: ProxiedReply | None = None

    # Callbacks of the connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._writable.set()
        self._tell()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _tell(self) -> None:
        if self._writer is not None:
            self._writer.flush()
        elif self._grown is not None and not self._grown.done():
            self._grown.set_result(None)
        if self._size > HIGH_WATER and self._transport is not None and not self._lost:
            self._transport.pause_reading()

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.status, self.headers = 0, []

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        if self.status:
            self.over = True
            self.reusable = bool(self._parser.should_keep_alive())

    # For callers.

    @property
    def is_open(self) -> bool:
        return not self._lost and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def ask(self, head: bytes, body: bytes = b"") -> None:
        self._begin()
        assert self._transport is not None
        self._transport.write(head + body if len(body) < HIGH_WATER else head)
        if len(body) >= HIGH_WATER:
            self._transport.write(body)

    async def send_more(self, piece: bytes, *, chunked: bool) -> None:
        """Send a chunk of a streamed body; returns when there is room for the next."""
        assert self._transport is not None
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        await self._writable.wait()

    async def answered(self) -> bool:
        """Wait for the headers of the reply; returns False if the replica is gone without a reply."""
        while not self.status and not self._lost:
            self._grown = asyncio.get_running_loop().create_future()
            await self._grown
        return bool(self.status)

    async def whole(self) -> bytes:
        """Return the body of a short reply. Raises OSError if it is cut off."""
        while not self.over and not self._lost:
            self._grown = asyncio.get_running_loop().create_future()
            await self._grown
        if not self.over:
            raise ConnectionResetError
        return self.take()

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        if self._size > HIGH_WATER and self._transport is not None and not self._lost:
            self._transport.resume_reading()
        self._size = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def broken(self) -> bool:
        return self._lost and not self.over

    def write_to(self, writer: "ProxiedReply | None") -> None:
        self._writer = writer


class ProxiedReply(CallbackSender):
    """Writes a replica's reply to the client, from the callback that reads it. `done` completes at its end.

    Only complete events of a stream are written: a client could not parse part of an event.
    """

    def __init__(self, passage: ReplicaConnection, send: Send, ending: bytes | None) -> None:
        super().__init__(send)
        self._passage = passage
        self._ending = ending
        self._held = b""
        passage.write_to(self)
        self.flush()

    def close(self) -> None:
        self._passage.write_to(None)
        super().close()

    def flush(self) -> None:
        if self._sending is not None or self.done.done():
            return
        try:
            data = self._whole_events(self._passage.take())
            if data:
                self._push(data)
        except Exception as error:
            self.done.set_exception(error)
            return
        if self._sending is None and (self._passage.over or self._passage.broken):
            self.done.set_result(None)

    def _whole_events(self, data: bytes) -> bytes:
        ending = self._ending
        if ending is None or (not self._held and data.endswith(ending)):
            return data
        data, self._held = self._held + data, b""
        if not self._passage.over:
            end = data.rfind(ending)
            cut = 0 if end < 0 else end + len(ending)
            data, self._held = data[:cut], data[cut:]
        return data
