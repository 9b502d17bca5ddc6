"""Runs a turn over HTTP: planned, then streamed or returned in full. On every exit its scope aborts the
engine job.

The first part streams a turn without a task switch per token. An engine step wakes the event loop once, and
the sinks of all its jobs run. They mark their streams, which are flushed in the next turn of the loop: the
output of all choices of a stream leaves in one send, and so do several steps if the event loop was behind the
engine. Each step still has its own event, so clients may count events. Only a client that reads too slowly,
or output too large for one write, costs a task: meanwhile events wait in the turn, which joins adjacent ones,
until the socket accepts more. A turn returns a limited number of events at a time, so that other turns run in
between.

A write costs more than everything else done for a token, on the server and on the client. With the setting
`write_interval`, several steps of a stream leave in one send. The first and the last events never wait.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from starlette.types import Message, Send

from dragoman.engines.steps import run_eagerly
from dragoman.http.connection.uvicorn_internals import short_cut
from dragoman.http.exchange import SSE, Exchange, cancel_on_disconnect, send_in_pieces
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import (
    ClientGone,
    EventEncoder,
    MultiTurnAnswer,
    NullOutput,
    OutputBytes,
    wait_with_keepalive,
)
from dragoman.turns.turn import MOST_PENDING, Turn, log_terms, note_turn
from dragoman.turns.validation import log_fault
from dragoman.types import Answer, Event, EventFold

if TYPE_CHECKING:
    from dragoman.http.app_state import ModelServing


# Streaming to the socket.


R = TypeVar("R")
MUCH = 1024 * 1024
"""Bytes above which output is not written in one call."""
OPENING_S = 0.1
"""Maximum seconds that the head of a stream waits for its first text, to leave with it in one send; also the
maximum wait for other requests before the head is built."""


class FlushScheduler:
    """Collects the streams with new output, and flushes them together."""

    def __init__(self, write_interval: float = 0.0) -> None:
        """Create a pump; `write_interval` is the seconds between writes of a stream, 0 writes each step at
        once."""
        self.write_interval = write_interval
        self._marked: list[TurnStream] = []
        self._waiting: list[TurnStream] = []
        self._written_at = 0.0
        """Time of the last write of the delayed streams."""
        self._later: list[Callable[[], None]] = []
        self._put_off: list[asyncio.Future[None]] = []
        self._until = 0.0
        self._comes = False

    async def wait_quiet(self) -> None:
        """Wait until no other request has arrived for a turn of the event loop.

        Requests that arrive together all reach the engine before the start of any reply is written.
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
        """Call `call` soon; the start of a stream then leaves together with its first text."""
        if not self._later:
            asyncio.get_running_loop().call_later(OPENING_S, self._call_all)
        self._later.append(call)

    def _call_all(self) -> None:
        calls, self._later = self._later, []
        for call in calls:
            call()

    def schedule(self, stream: "TurnStream") -> None:
        if not self._marked:
            asyncio.get_running_loop().call_soon(self._flush)
        self._marked.append(stream)

    def _flush(self) -> None:
        streams, self._marked = self._marked, []
        for stream in streams:
            stream.flush()

    def schedule_batched(self, stream: "TurnStream") -> None:
        """Flush the stream with all other delayed ones, `write_interval` after the last time."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            loop.call_at(self._written_at + self.write_interval, self._flush_waiting, loop)
        self._waiting.append(stream)

    def _flush_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        streams, self._waiting = self._waiting, []
        self._written_at = loop.time()
        for stream in streams:
            stream.flush()


class CallbackSender(ABC):
    """Writes a reply from callbacks, one send at a time; the future `done` ends with it, or fails.

    `flush` writes what is available, and is called again when a slow client has taken the last chunk.
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
        self._sending = run_eagerly(sending)
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


class TurnStream(CallbackSender):
    """Writes a turn's events as they arrive. `done` ends when all is written, or fails with the writing.

    `idle` returns what is sent after a while without output. With `holds_last`, the last events are not sent
    but kept in `last`, for the caller to add to.
    """

    def __init__(
        self,
        turn: Turn,
        write: Callable[[list[Event]], bytes | list[bytes]],
        idle: Callable[[], bytes | list[bytes]],
        send: Callable[[Message], Any],
        pump: FlushScheduler,
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
        """Events written at once: above MOST_PENDING the turn joins adjacent ones."""
        turn.on_ready = self._ready
        self._mark()

    def close(self) -> None:
        self._timer.cancel()
        self._turn.on_ready = None
        super().close()

    def _ready(self) -> None:
        if self._turn.pending >= self._most:
            self.flush()
        elif self._pump.write_interval and self._begun and not self._turn.engine_finished:
            if not self._waits:
                self._waits = True
                self._pump.schedule_batched(self)
        else:
            self._mark()

    def _mark(self) -> None:
        if not self._marked:
            self._marked = True
            self._pump.schedule(self)

    def flush(self) -> None:
        self._marked = self._waits = False
        if self._sending is not None or self.done.done():
            return
        try:
            events = self._turn.take()
            if events and (data := self._write(events)):
                if self._holds_last and self._turn.is_over and isinstance(data, bytes):
                    self.last = data
                else:
                    self._begun = self._spoken = True
                    self._push(data)
            if self._sending is not None:
                return
            if self._turn.is_over:
                self.done.set_result(None)
            elif self._turn.ready:
                self._mark()
        except Exception as error:
            # The pump serves other streams too: the request of this stream reports its error.
            self.done.set_exception(error)

    def _tick(self) -> None:
        """Send `idle` after a period without output; one timer per period, not per token."""
        if not self._spoken and self._sending is None and not self.done.done():
            self._push(self._idle())
        self._spoken = False
        self._timer = self._loop.call_later(self._period, self._tick)


class SseOutput:
    """An outlet whose first bytes begin the stream.

    With `opening`, these are its bytes, and the stream begins when the first turn has begun.
    """

    def __init__(
        self,
        exchange: Exchange,
        pump: FlushScheduler,
        keep_alive: float,
        opening: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self._exchange = exchange
        self._pump = pump
        self._keep_alive = keep_alive
        self._opening = opening
        self._started = False

    async def write(self, data: OutputBytes) -> None:
        if self._started:
            await self._exchange.write(*([data] if isinstance(data, bytes) else data))
        else:
            self._started = True
            first = data if isinstance(data, bytes) else b"".join(data)
            await self._exchange.start_stream(first, later=self._pump.call_later)

    async def run(self, turn: Turn, speaker: EventEncoder) -> None:
        async with turn:
            if self._opening is not None and not self._started:
                # While the turn is queued, an error can still be reported by the status.
                await turn.wait_started(most=self._keep_alive)
                await self.write(await self._opening())
            written = TurnStream(
                turn, speaker.write, speaker.idle, self._exchange.send, self._pump, self._keep_alive
            )
            try:
                await written.done
            finally:
                written.close()

    async def wait(self, work: Awaitable[R], speaker: EventEncoder) -> R:
        return await wait_with_keepalive(work, self._keep_alive, lambda: self.write(speaker.idle()))


# Complete turns.


AnyTurn: TypeAlias = Turn | MultiTurnAnswer
"""An answer of one turn, or of several with calls in between that the client does not see."""


class ReplyWriter(Protocol):
    """Writes events as bytes, and the bytes after the last event."""

    @property
    def idle(self) -> bytes:
        """The bytes sent after a while without output."""

    def write(self, events: list[Event]) -> bytes: ...

    def end(self) -> bytes: ...


Beginning: TypeAlias = Callable[[], tuple[ReplyWriter, Callable[[], bytes]]]
"""Returns the writer of a stream and a function for its first bytes; called once the engine has the turn."""


async def plan_turn(
    host: "ModelServing", exchange: Exchange, spec: TurnSpec, body_bytes: int, id_: str = ""
) -> Turn:
    """Plan a turn; if that may take time, it ends when the client disconnects."""
    planning = host.model.create_turn(spec, exchange.owner, body_bytes, id_)
    takes_time = spec.constrained or host.workers.should_offload(body_bytes)
    turn = await (cancel_on_disconnect(exchange, planning) if takes_time else planning)
    log_terms(exchange.log_fields, turn)
    return turn


@asynccontextmanager
async def watch_client(exchange: Exchange, turn: Turn) -> AsyncIterator[None]:
    """Run the turn inside the block; it is closed when the client disconnects, and on every exit."""
    async with turn:
        forget = exchange.on_disconnect(partial(_close_left, exchange, turn))
        try:
            yield
        finally:
            forget()
            note_turn(exchange.log_fields, turn)


def _close_left(exchange: Exchange, turn: Turn) -> None:
    exchange.log_fields["finish"] = "disconnect"
    turn.close()


async def collect_answers(exchange: Exchange, turn: AnyTurn) -> list[Answer]:
    fold = EventFold(turn.choices)
    await consume_events(exchange, turn, fold.add)
    return fold.done()


async def consume_events(
    exchange: Exchange, turn: AnyTurn, take: Callable[[Sequence[Event]], object]
) -> None:
    """Pass all events of an answer to `take`; raise the error that made it fail."""
    if isinstance(turn, MultiTurnAnswer):
        finish = await cancel_on_disconnect(exchange, turn.run(NullOutput(), _CollectingEncoder(take)))
        if finish.error is not None:
            raise finish.error
        return
    async with watch_client(exchange, turn):
        while not turn.is_over:
            events = await turn.next()
            for event in events:
                if event.error is not None:
                    raise event.error
            take(events)
        if turn.unenforced:
            await log_fault(exchange.log_fields, turn)
        if exchange.log_fields.get("finish") == "disconnect":
            raise ClientGone


async def stream_turn(
    exchange: Exchange,
    turn: AnyTurn,
    begin: Beginning,
    pump: FlushScheduler,
    keep_alive: float,
    before_end: Callable[[], Awaitable[None]] | None = None,
    opening_bytes: int = 0,
    media: bytes = SSE,
) -> None:
    """Stream an answer. `before_end` is awaited after the last text if nothing failed; then the stream ends.

    `opening_bytes` is the approximate size of the opening, if it may be large.
    """
    if isinstance(turn, MultiTurnAnswer):
        writer, opening = begin()
        outlet = SseOutput(
            exchange, pump, keep_alive, partial(exchange.offload_unwatched, opening_bytes, opening)
        )
        await _stream_rounds(exchange, turn, writer, outlet, before_end)
        return
    async with watch_client(exchange, turn):
        # While the turn is queued, an error can still be reported by the status.
        await turn.wait_started(most=keep_alive)
        await pump.wait_quiet()
        writer, opening = begin()
        first = await exchange.offload_unwatched(opening_bytes, opening)
        await exchange.start_stream(first, media, pump.call_later)
        written = TurnStream(
            turn, writer.write, lambda: writer.idle, exchange.send, pump, keep_alive, holds_last=True
        )
        try:
            await written.done
        finally:
            written.close()
        if exchange.log_fields.get("finish") == "disconnect":
            raise ClientGone
        if turn.unenforced:
            await log_fault(exchange.log_fields, turn)
        last = written.last
        if not any(event.error for event in turn.finishes.values()):
            if before_end is not None:
                await exchange.write(last)
                await before_end()
                last = b""
            last += writer.end()
        await exchange.end_stream(last)
        # Other streams that end now write their last output before this request is recorded.
        await asyncio.sleep(0)


async def _stream_rounds(
    exchange: Exchange,
    turns: MultiTurnAnswer,
    writer: ReplyWriter,
    outlet: SseOutput,
    before_end: Callable[[], Awaitable[None]] | None,
) -> None:
    finish = await cancel_on_disconnect(exchange, turns.run(outlet, _WriterAdapter(writer)))
    if finish.error is None and before_end is not None:
        await before_end()
    await exchange.end_stream(b"" if finish.error else writer.end())


class _CollectingEncoder:
    """A writer that only passes the events on: the answer is returned in full."""

    def __init__(self, take: Callable[[Sequence[Event]], object]) -> None:
        self._take = take

    def write(self, events: Sequence[Event]) -> bytes:
        self._take(events)
        return b""

    def idle(self) -> bytes:
        return b""


class _WriterAdapter:
    def __init__(self, writer: ReplyWriter) -> None:
        self._writer = writer

    def write(self, events: Sequence[Event]) -> bytes:
        return self._writer.write(list(events))

    def idle(self) -> bytes:
        return self._writer.idle
