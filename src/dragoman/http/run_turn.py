"""A turn over HTTP, streamed or whole. On every way out the turn's scope aborts the engine's work."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dragoman.api.reply import StreamWriter
from dragoman.api.sse import KEEP_ALIVE
from dragoman.http.exchange import ClientGone, Exchange
from dragoman.turns.fold import Answer
from dragoman.turns.turn import Turn
from dragoman.types import Event


@asynccontextmanager
async def watched(exchange: Exchange, turn: Turn) -> AsyncIterator[None]:
    """Inside, the turn runs; it is closed when the client leaves, and on every way out."""
    async with turn:
        watcher = asyncio.create_task(_close_when_gone(exchange, turn))
        try:
            yield
        finally:
            watcher.cancel()
            _note(exchange, turn)


async def _close_when_gone(exchange: Exchange, turn: Turn) -> None:
    await exchange.gone()
    exchange.facts["finish"] = "disconnect"
    turn.close()


async def whole(exchange: Exchange, turn: Turn) -> list[Answer]:
    async with watched(exchange, turn):
        answers = await turn.answers()
        if exchange.facts.get("finish") == "disconnect":
            raise ClientGone
        exchange.facts["finish"] = ",".join(sorted({answer.finish or "" for answer in answers}))
        return answers


async def stream(
    exchange: Exchange, turn: Turn, writer: StreamWriter, opening: Callable[[], bytes], keep_alive: float
) -> None:
    async with watched(exchange, turn):
        await exchange.start_stream(opening())
        with _KeepAlive(turn, keep_alive) as silence:
            failed = False
            while not turn.over:
                events = await turn.next()
                if events:
                    silence.heard()
                    failed = _note_finishes(exchange, events) or failed
                    await exchange.write(writer.write(events))
                elif not turn.over:
                    await exchange.write(KEEP_ALIVE)
        if exchange.facts.get("finish") == "disconnect":
            raise ClientGone
        if not failed:
            await exchange.write(writer.end())
        await exchange.end_stream()


class _KeepAlive:
    """Wakes a silent turn every so often. One timer per period, not one per token."""

    def __init__(self, turn: Turn, period: float) -> None:
        self._turn = turn
        self._period = period
        self._loop = asyncio.get_running_loop()
        self._spoken = False

    def heard(self) -> None:
        self._spoken = True

    def __enter__(self) -> "_KeepAlive":
        self._timer = self._loop.call_later(self._period, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        if not self._spoken:
            self._turn.wake()
        self._spoken = False
        self._timer = self._loop.call_later(self._period, self._tick)


def _note_finishes(exchange: Exchange, events: list[Event]) -> bool:
    """Keeps how the choices ended for the log; true when one of them failed."""
    failed = False
    for event in events:
        if event.kind == "finish":
            before = exchange.facts.get("finish")
            exchange.facts["finish"] = (
                event.finish if before in (None, event.finish) else f"{before},{event.finish}"
            )
            failed = failed or event.error is not None
    return failed


def _note(exchange: Exchange, turn: Turn) -> None:
    usage = turn.usage
    now = asyncio.get_running_loop().time()
    exchange.facts.update(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
    if turn.first_token_at is not None:
        exchange.facts["ttft_ms"] = round((turn.first_token_at - turn.started_at) * 1000, 1)
        writing = now - turn.first_token_at
        if usage.completion_tokens > 1 and writing > 0:
            exchange.facts["tokens_per_s"] = round((usage.completion_tokens - 1) / writing, 1)
