"""A turn over HTTP: planned, then streamed or whole. On every way out its scope aborts the engine's work.

What it takes to stream one without a task switch per token comes first. An engine step wakes the event loop
once, and the sinks of all its jobs run. They mark their streams, which are flushed in the next turn of the
loop: what all choices of a stream say leaves in one send, and so do several steps where the event loop was
behind the engine. Each step keeps an event of its own, so clients may count events. Only a client that reads
too slowly, or what is too much for one write, costs a task: meanwhile events wait in the turn, where
neighbours are joined, until the socket takes more. A turn gives few of them at a time, so that others come
between.

A write costs more than all else that is done for a token, here and at the client. With the setting
`write_interval` several steps of a stream leave in one send. The first and the last events never wait.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from starlette.types import Message, Send

from dragoman.engines.steps import begin
from dragoman.http.connection.uvicorn_parts import short_cut
from dragoman.http.exchange import SSE, Exchange, send_in_pieces, unless_gone
from dragoman.turns.checked import note_fault
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import ClientGone, HiddenCalls, Quiet, Speaker, Written, wait_patiently
from dragoman.turns.turn import MOST_PENDING, Turn, note_terms, note_turn
from dragoman.types import Answer, Event, Fold

if TYPE_CHECKING:
    from dragoman.http.host import ModelHost


# The last yards to the socket.


R = TypeVar("R")
MUCH = 1024 * 1024
"""Bytes that are not written in one go."""
OPENING_S = 0.1
"""So long at most the head of a stream waits for its first words, with which it leaves in one go; and before
it is made, for others who come."""


class Pump:
    """Collects the streams that have something to say, and flushes them together."""

    def __init__(self, write_interval: float = 0.0) -> None:
        """`write_interval`: seconds between two writes of a stream; 0 writes each step at once."""
        self.write_interval = write_interval
        self._marked: list[TurnStream] = []
        self._waiting: list[TurnStream] = []
        self._written_at = 0.0
        """When the streams that wait were written last."""
        self._later: list[Callable[[], None]] = []
        self._put_off: list[asyncio.Future[None]] = []
        self._until = 0.0
        self._comes = False

    async def lull(self) -> None:
        """Returns when nobody else has come for a turn of the event loop.

        Who has come at the same time is given to the engine before anything is said of this one.
        """
        loop = asyncio.get_running_loop()
        self._comes = True
        if not self._put_off:
            self._until = loop.time() + OPENING_S
            loop.call_soon(self._look, loop)
        lull = loop.create_future()
        self._put_off.append(lull)
        await lull

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._comes and loop.time() < self._until:
            self._comes = False
            loop.call_soon(self._look, loop)
            return
        put_off, self._put_off = self._put_off, []
        for lull in put_off:
            if not lull.done():
                lull.set_result(None)

    def call_later(self, call: Callable[[], None]) -> None:
        """What has begun a stream need not be sent alone where the first words come soon."""
        if not self._later:
            asyncio.get_running_loop().call_later(OPENING_S, self._call_all)
        self._later.append(call)

    def _call_all(self) -> None:
        calls, self._later = self._later, []
        for call in calls:
            call()

    def mark(self, stream: "TurnStream") -> None:
        if not self._marked:
            asyncio.get_running_loop().call_soon(self._flush)
        self._marked.append(stream)

    def _flush(self) -> None:
        streams, self._marked = self._marked, []
        for stream in streams:
            stream.flush()

    def wait(self, stream: "TurnStream") -> None:
        """The stream is flushed with all others that wait, `write_interval` after the last time."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            loop.call_at(self._written_at + self.write_interval, self._flush_waiting, loop)
        self._waiting.append(stream)

    def _flush_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        streams, self._waiting = self._waiting, []
        self._written_at = loop.time()
        for stream in streams:
            stream.flush()


class Outflow(ABC):
    """Writes pieces of a reply from callbacks, one send at a time. `done` is over at its end, or fails.

    `flush` writes what there is; it is called again when a client that reads slowly has taken the last piece.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._short_cut = short_cut(send)
        self._sending: asyncio.Task[None] | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()

    @abstractmethod
    def flush(self) -> None: ...

    def _push(self, data: bytes | list[bytes]) -> None:
        if isinstance(data, bytes) and len(data) <= MUCH:
            if self._short_cut is not None and self._short_cut(data):
                return
            sending: Any = self._send({"type": "http.response.body", "body": data, "more_body": True})
        else:
            sending = send_in_pieces(self._send, [data] if isinstance(data, bytes) else data)
        self._sending = begin(sending)
        if self._sending is not None:
            self._sending.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending = None
        if task.cancelled() or self.done.done():
            return
        if error := task.exception():
            self.done.set_exception(error)
        else:
            self.flush()


class TurnStream(Outflow):
    """Writes a turn's events as they come. `done` is over when all is written, and fails as writing fails.

    `idle` gives what is sent when nothing else was for a while. With `holds_last`, the last events are not
    sent but are in `last`, for whoever has something to add to them.
    """

    def __init__(
        self,
        turn: Turn,
        write: Callable[[list[Event]], bytes | list[bytes]],
        idle: Callable[[], bytes | list[bytes]],
        send: Callable[[Message], Any],
        pump: Pump,
        keep_alive: float,
        *,
        holds_last: bool = False,
    ) -> None:
        super().__init__(send)
        self.last: bytes = b""
        self._holds_last = holds_last
        self._turn = turn
        self._write = write
        self._idle = idle
        self._pump = pump
        self._loop = asyncio.get_running_loop()
        self._marked = False
        self._waits = False
        self._begun = False
        """Whether anything was written."""
        self._spoken = False
        self._period = keep_alive
        self._timer = self._loop.call_later(keep_alive, self._tick)
        self._most = max(MOST_PENDING // 2, turn.choices)
        """Events that are written at once: of more than MOST_PENDING the turn joins neighbours."""
        turn.on_ready = self._ready
        self._mark()

    def close(self) -> None:
        self._timer.cancel()
        self._turn.on_ready = None
        super().close()

    def _ready(self) -> None:
        if self._turn.pending >= self._most:
            self.flush()
        elif self._pump.write_interval and self._begun and not self._turn.all_said:
            if not self._waits:
                self._waits = True
                self._pump.wait(self)
        else:
            self._mark()

    def _mark(self) -> None:
        if not self._marked:
            self._marked = True
            self._pump.mark(self)

    def flush(self) -> None:
        self._marked = self._waits = False
        if self._sending is not None or self.done.done():
            return
        try:
            events = self._turn.take()
            if events and (data := self._write(events)):
                if self._holds_last and self._turn.over and isinstance(data, bytes):
                    self.last = data
                else:
                    self._begun = self._spoken = True
                    self._push(data)
            if self._sending is not None:
                return
            if self._turn.over:
                self.done.set_result(None)
            elif self._turn.ready:
                self._mark()
        except Exception as error:
            # The pump serves other streams too: this one's failure is for its own request to report.
            self.done.set_exception(error)

    def _tick(self) -> None:
        """One timer per period, not one per token."""
        if not self._spoken and self._sending is None and not self.done.done():
            self._push(self._idle())
        self._spoken = False
        self._timer = self._loop.call_later(self._period, self._tick)


class Sse:
    """An outlet: the first bytes that are written begin the stream.

    With an `opening`, these are its bytes, and the stream begins when the first turn has.
    """

    def __init__(
        self,
        exchange: Exchange,
        pump: Pump,
        keep_alive: float,
        opening: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self._exchange = exchange
        self._pump = pump
        self._keep_alive = keep_alive
        self._opening = opening
        self._started = False

    async def write(self, data: Written) -> None:
        if self._started:
            await self._exchange.write(*([data] if isinstance(data, bytes) else data))
        else:
            self._started = True
            first = data if isinstance(data, bytes) else b"".join(data)
            await self._exchange.start_stream(first, later=self._pump.call_later)

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        async with turn:
            if self._opening is not None and not self._started:
                # While it waits in the queue, what goes wrong can still be told by the status.
                await turn.begun(most=self._keep_alive)
                await self.write(await self._opening())
            written = TurnStream(
                turn, speaker.write, speaker.idle, self._exchange.send, self._pump, self._keep_alive
            )
            try:
                await written.done
            finally:
                written.close()

    async def wait(self, work: Awaitable[R], speaker: Speaker) -> R:
        return await wait_patiently(work, self._keep_alive, lambda: self.write(speaker.idle()))


# Whole turns.


AnyTurn: TypeAlias = Turn | HiddenCalls
"""An answer of one turn, or of several with calls between them that the client does not see."""


class Writer(Protocol):
    """Events to bytes, and the bytes after the last event."""

    @property
    def idle(self) -> bytes:
        """What is said when there has been nothing to say for a while."""

    def write(self, events: list[Event]) -> bytes: ...

    def end(self) -> bytes: ...


Beginning: TypeAlias = Callable[[], tuple[Writer, Callable[[], bytes]]]
"""Who writes a stream, and what gives its first bytes: made when the engine has the turn, not before."""


async def plan(host: "ModelHost", exchange: Exchange, spec: TurnSpec, body_bytes: int, id_: str = "") -> Turn:
    """A client that leaves while it is planned is not planned for any longer, where that takes its time."""
    planning = host.model.turn(spec, exchange.owner, body_bytes, id_)
    takes_time = spec.constrained or host.workers.needed(body_bytes)
    turn = await (unless_gone(exchange, planning) if takes_time else planning)
    note_terms(exchange.facts, turn)
    return turn


@asynccontextmanager
async def watch_client(exchange: Exchange, turn: Turn) -> AsyncIterator[None]:
    """Inside, the turn runs; it is closed when the client leaves, and on every way out."""
    async with turn:
        forget = exchange.when_gone(partial(_close_left, exchange, turn))
        try:
            yield
        finally:
            forget()
            note_turn(exchange.facts, turn)


def _close_left(exchange: Exchange, turn: Turn) -> None:
    exchange.facts["finish"] = "disconnect"
    turn.close()


async def whole(exchange: Exchange, turn: AnyTurn) -> list[Answer]:
    fold = Fold(turn.choices)
    await hear(exchange, turn, fold.add)
    return fold.done()


async def hear(exchange: Exchange, turn: AnyTurn, take: Callable[[Sequence[Event]], object]) -> None:
    """Has all events of an answer taken, to its end. Raises what made it fail."""
    if isinstance(turn, HiddenCalls):
        finish = await unless_gone(exchange, turn.run(Quiet(), _Hearing(take)))
        if finish.error is not None:
            raise finish.error
        return
    async with watch_client(exchange, turn):
        while not turn.over:
            events = await turn.next()
            for event in events:
                if event.error is not None:
                    raise event.error
            take(events)
        if turn.unenforced:
            await note_fault(exchange.facts, turn)
        if exchange.facts.get("finish") == "disconnect":
            raise ClientGone


async def stream(
    exchange: Exchange,
    turn: AnyTurn,
    begin: Beginning,
    pump: Pump,
    keep_alive: float,
    before_end: Callable[[], Awaitable[None]] | None = None,
    opening_bytes: int = 0,
    media: bytes = SSE,
) -> None:
    """`before_end` is awaited when all is told and nothing failed; only then the stream ends.

    `opening_bytes`: how long the opening is, about, if it may be long.
    """
    if isinstance(turn, HiddenCalls):
        writer, opening = begin()
        outlet = Sse(exchange, pump, keep_alive, partial(exchange.made, opening_bytes, opening))
        await _stream_rounds(exchange, turn, writer, outlet, before_end)
        return
    async with watch_client(exchange, turn):
        # While it waits in the queue, what goes wrong can still be told by the status.
        await turn.begun(most=keep_alive)
        await pump.lull()
        writer, opening = begin()
        first = await exchange.made(opening_bytes, opening)
        await exchange.start_stream(first, media, pump.call_later)
        written = TurnStream(
            turn, writer.write, lambda: writer.idle, exchange.send, pump, keep_alive, holds_last=True
        )
        try:
            await written.done
        finally:
            written.close()
        if exchange.facts.get("finish") == "disconnect":
            raise ClientGone
        if turn.unenforced:
            await note_fault(exchange.facts, turn)
        last = written.last
        if not any(event.error for event in turn.finishes.values()):
            if before_end is not None:
                await exchange.write(last)
                await before_end()
                last = b""
            last += writer.end()
        await exchange.end_stream(last)
        # Others who end now have their last words before anything is noted of this one.
        await asyncio.sleep(0)


async def _stream_rounds(
    exchange: Exchange,
    turns: HiddenCalls,
    writer: Writer,
    outlet: Sse,
    before_end: Callable[[], Awaitable[None]] | None,
) -> None:
    finish = await unless_gone(exchange, turns.run(outlet, _Writing(writer)))
    if finish.error is None and before_end is not None:
        await before_end()
    await exchange.end_stream(b"" if finish.error else writer.end())


class _Hearing:
    """A speaker who says nothing: what was said is wanted as a whole."""

    def __init__(self, take: Callable[[Sequence[Event]], object]) -> None:
        self._take = take

    def write(self, events: Sequence[Event]) -> bytes:
        self._take(events)
        return b""

    def idle(self) -> bytes:
        return b""


class _Writing:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write(self, events: Sequence[Event]) -> bytes:
        return self._writer.write(list(events))

    def idle(self) -> bytes:
        return self._writer.idle
