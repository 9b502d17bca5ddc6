"""A turn over HTTP, streamed or whole. On every way out the turn's scope aborts the engine's work."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from dragoman.api.sse import KEEP_ALIVE
from dragoman.errors import DragomanError
from dragoman.http.exchange import ClientGone, Exchange
from dragoman.http.stream import Pump, TurnStream
from dragoman.turns.turn import Turn
from dragoman.types import Answer, Event, Usage


class Writer(Protocol):
    """Events to bytes, and the bytes after the last event."""

    def write(self, events: list[Event]) -> bytes: ...

    def end(self) -> bytes: ...


@asynccontextmanager
async def watched(exchange: Exchange, turn: Turn) -> AsyncIterator[None]:
    """Inside, the turn runs; it is closed when the client leaves, and on every way out."""
    async with turn:
        watcher = asyncio.create_task(_close_when_gone(exchange, turn))
        try:
            yield
        finally:
            watcher.cancel()
            note(exchange.facts, turn)


async def _close_when_gone(exchange: Exchange, turn: Turn) -> None:
    await exchange.gone()
    exchange.facts["finish"] = "disconnect"
    turn.close()


async def whole(exchange: Exchange, turn: Turn) -> list[Answer]:
    async with watched(exchange, turn):
        answers = await turn.answers()
        if exchange.facts.get("finish") == "disconnect":
            raise ClientGone
        return answers


async def stream(
    exchange: Exchange,
    turn: Turn,
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


@asynccontextmanager
async def ended_when_gone(exchange: Exchange) -> AsyncIterator[None]:
    """Inside is work that is not yet a turn: it is cancelled when the client leaves."""

    async def watch() -> None:
        await exchange.gone()
        exchange.visit.end(ClientGone())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


def count(facts: dict[str, Any], usage: Usage) -> None:
    facts.update(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def note(facts: dict[str, Any], turn: Turn) -> None:
    """What the access log and the metrics say of a turn; of several, how the last one ended."""
    usage = turn.usage
    now = asyncio.get_running_loop().time()
    count(facts, usage)
    if turn.finishes and facts.get("finish") != "disconnect":
        reasons = {event.finish or "" for event in turn.finishes.values()}
        facts["finish"] = ",".join(sorted(reasons))
    for event in turn.finishes.values():
        if event.error is not None:
            # The text of a foreign exception may hold anything, so only our own words are logged.
            known = isinstance(event.error, DragomanError)
            facts["error"] = str(event.error) if known else "the engine failed"
    if turn.first_token_at is not None:
        facts.setdefault("ttft_ms", round((turn.first_token_at - turn.started_at) * 1000, 1))
        writing = now - turn.first_token_at
        if usage.completion_tokens > 1 and writing > 0:
            facts["tokens_per_s"] = round((usage.completion_tokens - 1) / writing, 1)
