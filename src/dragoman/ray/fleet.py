"""Who the replicas are, and the ways to them: a request goes out, and its reply comes back.

What a replica sends is written on in the very callback that reads it: a task switch a token would be most of
the cost.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import cast

import httptools
from msgspec import Struct
from starlette.types import Send

from dragoman.http.run_turn import Outflow
from dragoman.http.token_budgets import Taken
from dragoman.routing import Router

SILENCE_S = 30.0
"""After so long without a word a replica is not asked any more."""
CONNECT_S = 5.0
IDLE_S = 30.0
"""A connection that nobody used for so long is not used again: the replica may be closing it."""
HIGH_WATER = 256 * 1024
"""Bytes of a reply that wait for their client; above, the replica is not read."""
MOST_MADE = 64 * 1024
"""Responses of which it is known who makes them."""


class ReplicaBeat(Struct, frozen=True):
    """What a replica says of itself, again and again."""

    id: str
    model: str
    host: str
    port: int
    running: int = 0
    waiting: int = 0
    taken: Taken = (0, {})
    """A day, and the tokens of it by the hashes of keys that have a budget."""
    inside: dict[str, int] = {}
    """Requests for answers that it has let in, by the hashes of keys."""
    at_work: dict[str, int] = {}
    """Answers that its engine has, in the same way."""
    making: list[str] = []
    """Responses that it makes and others may ask for."""
    kv: float | None = None
    """The part of its memory for keys and values that is in use, if it says so."""
    adapters: list[str] = []
    """Those in use, and below how many there are."""
    most_adapters: int = 0
    leaving: bool = False


class FleetNews(Struct, frozen=True):
    """What a door tells a replica of the others."""

    taken: dict[str, Taken] = {}
    """What keys have taken there, those included that are gone."""
    at_work: dict[str, int] = {}
    """Answers of keys that other replicas of its model have at work."""


class KeyCounts:
    """How many requests for answers keys have inside, at all replicas together.

    What a replica said last, and what this door has done since: as long as it is the only one that is right
    at every moment, but for what has been passed on and not let in yet. With several doors it misses what the
    others have let in since the last beat of that replica, and no more. So a key has inside at most
    as many as it may, and what other doors let in between two beats.
    """

    def __init__(self) -> None:
        self._known: dict[str, Counter[str]] = {}
        self._own: dict[str, Counter[str]] = {}
        """Those of this door."""

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
        """What is passed on and not let in yet counts all the same."""
        self._known[replica] = Counter(inside) | self._own.get(replica, Counter())

    def lose(self, replica: str) -> None:
        """What it had is over."""
        self._known.pop(replica, None)


class Fleet:
    """The replicas of each model, and who of them is next."""

    def __init__(self, models: Sequence[str], *, alone: bool = True) -> None:
        """`alone`: no other door asks the same replicas, so what this one counts is all there is."""
        self._alone = alone
        self.routers = {model: Router() for model in models}
        self._heard: dict[str, tuple[ReplicaBeat, float]] = {}
        self._idle: dict[str, list[Passage]] = {}
        self._taken: dict[str, Taken] = {}
        self._makers: OrderedDict[str, str] = OrderedDict()
        self.counts = KeyCounts()

    def hear(self, beat: ReplicaBeat) -> FleetNews:
        """And what there is to say of the others."""
        self._taken[beat.id] = beat.taken
        router = self.routers.get(beat.model)
        if router is None:
            return FleetNews()
        if beat.leaving:
            self.lose(beat.id)
        else:
            self._heard[beat.id] = beat, time.monotonic()
            router.add(beat.id)
            self.counts.hear(beat.id, beat.inside)
            for response in beat.making:
                self.note_maker(response, beat.id)
            if not self._alone:
                router.set_load(beat.id, beat.running + beat.waiting)
        for other, at in [*self._heard.values()]:
            if at < time.monotonic() - SILENCE_S:
                self.lose(other.id)
        today = max(day for day, _ in self._taken.values())
        # What those took today who are gone is not forgotten.
        self._taken = {
            id_: taken for id_, taken in self._taken.items() if id_ in self._heard or taken[0] == today > 0
        }
        return FleetNews(
            {id_: taken for id_, taken in self._taken.items() if id_ != beat.id}, self._at_work_beside(beat)
        )

    def _at_work_beside(self, beat: ReplicaBeat) -> dict[str, int]:
        counts = Counter[str]()
        for other in self.beats(beat.model):
            if other.id != beat.id:
                counts.update(other.at_work)
        return dict(counts)

    def note_maker(self, response: str, id_: str) -> None:
        """Who makes a response, or has made it: who is asked for it goes there."""
        self._makers[response] = id_
        self._makers.move_to_end(response)
        if len(self._makers) > MOST_MADE:
            self._makers.popitem(last=False)

    def maker(self, response: str) -> ReplicaBeat | None:
        return self.place(self._makers.get(response, ""))

    def lose(self, id_: str) -> None:
        """It gets nothing more, until it says something."""
        known = self._heard.pop(id_, None)
        if known is not None:
            self.routers[known[0].model].remove(id_)
            self.counts.lose(id_)
            for passage in self._idle.pop(id_, []):
                passage.close()

    def beats(self, model: str) -> list[ReplicaBeat]:
        return [beat for beat, _ in self._heard.values() if beat.model == model]

    def place(self, id_: str) -> ReplicaBeat | None:
        known = self._heard.get(id_)
        return None if known is None else known[0]

    async def open(self, beat: ReplicaBeat) -> "Passage":
        """A way to a replica. Raises OSError where there is none."""
        idle = self._idle.get(beat.id, [])
        while idle:
            passage = idle.pop()
            if passage.is_open and passage.rested_at > time.monotonic() - IDLE_S:
                return passage
            passage.close()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, made = await loop.create_connection(Passage, beat.host, beat.port)
        return made

    def rest(self, id_: str, passage: "Passage") -> None:
        """A way that may be used again."""
        if id_ in self._heard and passage.reusable:
            passage.rested_at = time.monotonic()
            self._idle.setdefault(id_, []).append(passage)
        else:
            passage.close()


class Passage(asyncio.Protocol):
    """A connection to a replica: a request out, and its reply in, as it comes."""

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
        self._writer: StreamedReply | None = None

    # From the connection

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

    # From the parser

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

    # For whoever asks

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
        """Of a body that comes piece by piece; returns when there is room for the next."""
        assert self._transport is not None
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        await self._writable.wait()

    async def answered(self) -> bool:
        """Waits for the head of the reply. False: the replica is gone without one."""
        while not self.status and not self._lost:
            self._grown = asyncio.get_running_loop().create_future()
            await self._grown
        return bool(self.status)

    async def whole(self) -> bytes:
        """The body of a short reply. Raises OSError where it breaks off."""
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

    def write_to(self, writer: "StreamedReply | None") -> None:
        self._writer = writer


class StreamedReply(Outflow):
    """Writes on what a passage brings, from within the callback that reads it. `done` is over at its end.

    Of a stream of events only whole ones are written: what is left of one whose replica died is nothing
    that a client could read.
    """

    def __init__(self, passage: Passage, send: Send, ending: bytes | None) -> None:
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
