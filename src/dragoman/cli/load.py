"""A load generator for any OpenAI-compatible server.

It shares the CPU with the server, so it is lean: one protocol object per stream on a bare socket, and no task
switch per token. It is for measuring only; use `dragoman.client` for anything else, whose readers parse the
replies here, too.
"""

import asyncio
import math
import random
import ssl
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec import Struct, field

from dragoman.cli.exits import CommandError
from dragoman.client.config import headers_of, root_of
from dragoman.client.reply_reader import DONE, SseReader
from dragoman.client.wire import ChunkChoice, ErrorBody, problem_in, problem_of, read_chunk

# One streamed request.


class LoadProgress(Struct):
    """Counts so far, which a progress line may read during a run."""

    tokens: int = 0
    finished: int = 0


class LoadStream(asyncio.Protocol):
    """One request and its answer. httptools calls the `on_` methods."""

    def __init__(self, request: bytes, tally: LoadProgress) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self._heard = 0
        """Events with text, counted as tokens only if the server reports no usage."""
        self.counted = False
        """Whether the server has reported the number of tokens."""
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
        """Record the time between tokens; tokens that arrive together share it."""
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
            self.error = _reason_of(problem_of(chunk.error))
        self._heard += sum(map(_speaks, chunk.choices))
        if not self.counted:
            self.tokens = self._heard
        if chunk.usage is not None:
            usage = chunk.usage.usage()
            self.prompt_tokens, self.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            # Servers may join tokens into one event, and some tokens have no text, so usage is more exact.
            self.tokens, self.counted = usage.completion_tokens, True

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._finish(f"HTTP {self._parser.get_status_code()}: {_reason_of(problem_in(self._plain))}")
        else:
            self._finish(None if self._ended else "the stream ended without [DONE]")

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish("the server closed the connection")

    def _finish(self, error: str | None) -> None:
        if self.done.done():
            return
        self.error = self.error or error
        self._tally.finished += 1
        self.done.set_result(None)
        self._transport.close()

    def give_up(self, error: str) -> None:
        self._finish(error)


def _speaks(choice: ChunkChoice) -> bool:
    return bool(choice.said.content or choice.said.thought)


def _reason_of(problem: ErrorBody | None) -> str:
    return problem.message if problem else "no reason given"


# Many streams.


Api: TypeAlias = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Short everyday English words are one token each in nearly every vocabulary.
WORDS = ("time", "year", "way", "day", "man", "life", "child", "world", "school", "state", "hand", "place")


class LoadRequest(Struct, frozen=True, kw_only=True):
    """The request that all streams of a run send."""

    url: str
    model: str
    tokens: int
    prompt_tokens: int = 32
    shared_prefix: int = 0
    """How many of the prompt's words are the same in all requests."""
    api: Api = "chat"
    extra: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    limit_s: float = 600.0

    def body(self, seed: int) -> bytes:
        prompt = prompt_of(self.prompt_tokens, self.shared_prefix, seed)
        value = (
            {"messages": [{"role": "user", "content": prompt}]} if self.api == "chat" else {"prompt": prompt}
        )
        fields = {
            "model": self.model,
            "max_tokens": self.tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(value | fields | dict(self.extra))


class LoadResult(Struct, frozen=True, kw_only=True):
    streams: int
    requests: int
    tokens: int
    counted: bool
    """Whether the server reported the tokens of every answer; otherwise they are events with text."""
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    errors: int
    first_error: str | None


def prompt_of(words: int, shared: int, seed: int) -> str:
    """Return a prompt of `words` words, the first `shared` of which do not depend on the seed."""
    same, own = random.Random(0), random.Random(f"dragoman {seed}")
    shared = min(shared, words)
    return " ".join([*same.choices(WORDS, k=shared), *own.choices(WORDS, k=words - shared)])


def _request(ask: LoadRequest, seed: int) -> bytes:
    parts, body = urlsplit(root_of(ask.url)), ask.body(seed)
    head = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Content-Length": str(len(body)),
        "Connection": "close",
    } | headers_of(ask.key)
    lines = [
        f"POST {parts.path}{PATHS[ask.api]} HTTP/1.1",
        *(f"{name}: {value}" for name, value in head.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def send(ask: LoadRequest, seed: int, tally: LoadProgress) -> LoadStream:
    """Send one request and read it to the end; a failure is in `error`."""
    parts = urlsplit(root_of(ask.url))
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    stream = LoadStream(_request(ask, seed), tally)
    loop, port = asyncio.get_running_loop(), parts.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(ask.limit_s):
            await loop.create_connection(lambda: stream, parts.hostname or "", port, ssl=secure)
            await stream.done
    except TimeoutError:
        stream.give_up("no end within the time limit")
    except OSError:
        stream.error = "no server answers"
        tally.finished += 1
    return stream


async def fit(ask: LoadRequest) -> LoadRequest:
    """Request full-length answers if the server supports `ignore_eos`; this also warms the server up."""
    full = msgspec.structs.replace(ask, extra={"ignore_eos": True, **ask.extra})
    for wish in (full, ask):
        small = msgspec.structs.replace(wish, tokens=2)
        error = (await send(small, -1, LoadProgress())).error
        if error is None:
            return wish
        if not error.startswith(("HTTP 400", "HTTP 422")):
            break
    raise CommandError(
        f"A first request to {ask.url} failed: {error}.", "`dragoman models --url URL` lists model names."
    )


async def load(
    url: str,
    model: str,
    streams: int,
    tokens: int,
    *,
    prompt_tokens: int = 32,
    shared_prefix: int = 0,
    api: Api = "chat",
    extra: Mapping[str, Any] | None = None,
    key: str | None = None,
    rounds: int = 1,
    limit_s: float = 600.0,
) -> LoadResult:
    """Run one level of load, after one request that warms the server up."""
    ask = LoadRequest(
        url=url,
        model=model,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        shared_prefix=shared_prefix,
        api=api,
        extra=extra or {},
        key=key,
        limit_s=limit_s,
    )
    return await run(await fit(ask), streams, rounds=rounds)


async def run(
    ask: LoadRequest, streams: int, *, rounds: int = 1, tally: LoadProgress | None = None
) -> LoadResult:
    """Run `streams` concurrent streams, each with `rounds` requests one after the other."""
    tally = LoadProgress() if tally is None else tally

    async def one(lane: int) -> list[LoadStream]:
        return [await send(ask, lane * rounds + turn, tally) for turn in range(rounds)]

    start = time.perf_counter()
    lanes = await asyncio.gather(*(one(lane) for lane in range(streams)))
    return _sum_up([stream for lane in lanes for stream in lane], streams, time.perf_counter() - start)


def _sum_up(done: list[LoadStream], streams: int, seconds: float) -> LoadResult:
    errors = [stream.error for stream in done if stream.error is not None]
    firsts = [stream.first * 1000 for stream in done if stream.first is not None]
    tokens = sum(stream.tokens for stream in done)
    return LoadResult(
        streams=streams,
        requests=len(done),
        tokens=tokens,
        counted=all(stream.counted for stream in done if stream.error is None),
        prompt_tokens=sum(stream.prompt_tokens for stream in done),
        cached_tokens=sum(stream.cached_tokens for stream in done),
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        ttft_p50_ms=quantile(firsts, 0.5),
        ttft_p99_ms=quantile(firsts, 0.99),
        itl_p50_ms=quantile([gap * 1000 for stream in done for gap in stream.gaps], 0.5),
        errors=len(errors),
        first_error=errors[0] if errors else None,
    )


def quantile(values: list[float], share: float) -> float:
    """Return the nearest rank: `quantile([1, 2, 3, 4], 0.5)` is 2; without values it is 0."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]
