"""A turn over HTTP: planned, then streamed or whole. On every way out its scope aborts the engine's work."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeAlias

from dragoman.api.sse import KEEP_ALIVE
from dragoman.folding import Fold
from dragoman.http.exchange import Exchange, unless_gone
from dragoman.http.host import Host
from dragoman.http.stream import Pump, Sse, TurnStream
from dragoman.turns.outlet import ClientGone, Quiet
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import HiddenCalls
from dragoman.turns.turn import Turn, note_turn
from dragoman.types import Answer, Event

AnyTurn: TypeAlias = Turn | HiddenCalls
"""An answer of one turn, or of several with calls between them that the client does not see."""


class Writer(Protocol):
    """Events to bytes, and the bytes after the last event."""

    def write(self, events: list[Event]) -> bytes: ...

    def end(self) -> bytes: ...


async def plan(host: Host, exchange: Exchange, spec: TurnSpec, body_bytes: int, id_: str = "") -> Turn:
    """A client that leaves while it is planned is not planned for any longer, where that takes its time."""
    planning = host.model.turn(spec, exchange.owner, body_bytes, id_)
    takes_time = spec.constrained or host.workers.needed(body_bytes)
    return await (unless_gone(exchange, planning) if takes_time else planning)


@asynccontextmanager
async def watched(exchange: Exchange, turn: Turn) -> AsyncIterator[None]:
    """Inside, the turn runs; it is closed when the client leaves, and on every way out."""
    async with turn:
        watcher = asyncio.create_task(_close_when_gone(exchange, turn))
        try:
            yield
        finally:
            watcher.cancel()
            note_turn(exchange.facts, turn)


async def _close_when_gone(exchange: Exchange, turn: Turn) -> None:
    await exchange.gone()
    exchange.facts["finish"] = "disconnect"
    turn.close()


async def whole(exchange: Exchange, turn: AnyTurn) -> list[Answer]:
    if isinstance(turn, HiddenCalls):
        return await _whole_rounds(exchange, turn)
    async with watched(exchange, turn):
        answers = await turn.answers()
        if exchange.facts.get("finish") == "disconnect":
            raise ClientGone
        return answers


async def stream(
    exchange: Exchange,
    turn: AnyTurn,
    writer: Writer,
    opening: Callable[[], bytes],
    pump: Pump,
    keep_alive: float,
    before_end: Callable[[], Awaitable[None]] | None = None,
    opening_bytes: int = 0,
) -> None:
    """`before_end` is awaited when all is told and nothing failed; only then the stream ends.

    `opening_bytes`: how long the opening is, about, if it may be long.
    """
    if isinstance(turn, HiddenCalls):
        outlet = Sse(exchange, pump, keep_alive, partial(exchange.made, opening_bytes, opening))
        await _stream_rounds(exchange, turn, writer, outlet, before_end)
        return
    async with watched(exchange, turn):
        # While it waits in line, what goes wrong can still be told by the status.
        await turn.begun(most=keep_alive)
        await exchange.start_stream(await exchange.made(opening_bytes, opening))
        written = TurnStream(
            turn, writer.write, lambda: KEEP_ALIVE, exchange.send, pump, keep_alive, holds_last=True
        )
        try:
            await written.done
        finally:
            written.close()
        if exchange.facts.get("finish") == "disconnect":
            raise ClientGone
        last = written.last
        if not any(event.error for event in turn.finishes.values()):
            if before_end is not None:
                await exchange.write(last)
                await before_end()
                last = b""
            last += writer.end()
        await exchange.end_stream(last)


async def _whole_rounds(exchange: Exchange, turns: HiddenCalls) -> list[Answer]:
    folding = _Folding()
    finish = await unless_gone(exchange, turns.run(Quiet(), folding))
    if finish.error is not None:
        raise finish.error
    return folding.fold.done()


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


class _Folding:
    """A speaker who says nothing: what was said is wanted as a whole."""

    def __init__(self) -> None:
        self.fold = Fold()

    def write(self, events: Sequence[Event]) -> bytes:
        self.fold.add(events)
        return b""

    def idle(self) -> bytes:
        return b""


class _Writing:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write(self, events: Sequence[Event]) -> bytes:
        return self._writer.write(list(events))

    def idle(self) -> bytes:
        return KEEP_ALIVE
