"""One streamed request as a bare protocol object: bytes in, figures out, no task switch per token.

For measuring only: `dragoman.client` is the way to ask, and its readers are what reads here.
"""

import asyncio
import time
from typing import cast

import httptools
import msgspec
from msgspec import Struct

from dragoman.client.sse import DONE, SseReader
from dragoman.client.wire import Choice, Problem, problem_in, problem_of, read_chunk


class Tally(Struct):
    """What has come so far; a progress line may look at it while a run goes on."""

    tokens: int = 0
    finished: int = 0


class Stream(asyncio.Protocol):
    """One request and its answer. httptools calls the `on_` methods."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self._heard = 0
        self.gaps: list[float] = []
        self.first: float | None = None
        self.error: str | None = None
        self._request, self._tally = request, tally
        self._parser = httptools.HttpResponseParser(self)
        self._events = SseReader()
        self._plain = b""
        self._ended = False
        self._last = self._start = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._start = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        before = self._heard
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._finish("the answer is not HTTP")
        self._time(self._heard - before)

    def _time(self, new: int) -> None:
        """Tokens that arrive together share the wait for them."""
        if new <= 0:
            return
        now = time.perf_counter()
        if self.first is None:
            self.first = now - self._start
            self.gaps.extend([0.0] * (new - 1))
        else:
            self.gaps.extend([(now - self._last) / new] * new)
        self._last = now
        self._tally.tokens += new

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._plain += body
            return
        for event in self._events.feed(body):
            if event.data == DONE:
                self._ended = True
            else:
                self._read(event.data)

    def _read(self, event: bytes) -> None:
        try:
            chunk = read_chunk(event)
        except msgspec.DecodeError:
            self.error = "an event is not a chunk"
            return
        if chunk.error is not None:
            self.error = _said(problem_of(chunk.error))
        self._heard += sum(map(_speaks, chunk.choices))
        self.tokens = max(self.tokens, self._heard)
        if chunk.usage is not None:
            usage = chunk.usage.usage()
            self.prompt_tokens, self.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            # Servers may join tokens into one event, and some tokens have no text: usage knows better.
            self.tokens = max(self._heard, usage.completion_tokens)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._finish(f"HTTP {self._parser.get_status_code()}: {_said(problem_in(self._plain))}")
        else:
            self._finish(None if self._ended else "the stream ended without [DONE]")

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish("the server hung up")

    def _finish(self, error: str | None) -> None:
        if self.done.done():
            return
        self.error = self.error or error
        self._tally.finished += 1
        self.done.set_result(None)
        self._transport.close()

    def give_up(self, error: str) -> None:
        self._finish(error)


def _speaks(choice: Choice) -> bool:
    return bool(choice.said.content or choice.said.thought)


def _said(problem: Problem | None) -> str:
    return problem.message if problem else "no reason given"
