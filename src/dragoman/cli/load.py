"""A load generator for any OpenAI-compatible server. It shares its cores with the server, so it is lean:
one protocol object per stream on a bare socket.
"""

import asyncio
import math
import random
import ssl
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from dragoman.cli.problems import CommandError
from dragoman.cli.stream import Stream, Tally
from dragoman.client.setup import headers_of, root_of

Api: TypeAlias = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Short words of everyday English are one token each in nearly every vocabulary.
WORDS = ("time", "year", "way", "day", "man", "life", "child", "world", "school", "state", "hand", "place")


class Ask(Struct, frozen=True, kw_only=True):
    """What every stream of a run asks for."""

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
        said = (
            {"messages": [{"role": "user", "content": prompt}]} if self.api == "chat" else {"prompt": prompt}
        )
        fields = {
            "model": self.model,
            "max_tokens": self.tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(said | fields | dict(self.extra))


class Result(Struct, frozen=True, kw_only=True):
    streams: int
    requests: int
    tokens: int
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
    """`words` words, of which the first `shared` do not depend on the seed."""
    same, own = random.Random(0), random.Random(f"dragoman {seed}")
    shared = min(shared, words)
    return " ".join([*same.choices(WORDS, k=shared), *own.choices(WORDS, k=words - shared)])


def _request(ask: Ask, seed: int) -> bytes:
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


async def send(ask: Ask, seed: int, tally: Tally) -> Stream:
    """One request, from connecting to its last event; a failure is told in `error`."""
    parts = urlsplit(root_of(ask.url))
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    stream = Stream(_request(ask, seed), tally)
    loop, port = asyncio.get_running_loop(), parts.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(ask.limit_s):
            await loop.create_connection(lambda: stream, parts.hostname or "", port, ssl=secure)
            await stream.done
    except TimeoutError:
        stream.give_up("no end within the time limit")
    except OSError:
        stream.error = "nobody answers"
        tally.finished += 1
    return stream


async def fit(ask: Ask) -> Ask:
    """Ask for answers of full length where the server knows `ignore_eos`; also warms the server up."""
    full = msgspec.structs.replace(ask, extra={"ignore_eos": True, **ask.extra})
    for wish in (full, ask):
        small = msgspec.structs.replace(wish, tokens=2)
        error = (await send(small, -1, Tally())).error
        if error is None:
            return wish
        if not error.startswith(("HTTP 400", "HTTP 422")):
            break
    raise CommandError(
        f"A first request to {ask.url} failed: {error}.", "`dragoman models --url URL` lists names."
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
) -> Result:
    """One level of load on a server that is asked once before, to warm it up."""
    ask = Ask(
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


async def run(ask: Ask, streams: int, *, rounds: int = 1, tally: Tally | None = None) -> Result:
    """`streams` streams at the same time, each with `rounds` requests one after the other."""
    tally = Tally() if tally is None else tally

    async def one(lane: int) -> list[Stream]:
        return [await send(ask, lane * rounds + turn, tally) for turn in range(rounds)]

    start = time.perf_counter()
    lanes = await asyncio.gather(*(one(lane) for lane in range(streams)))
    return _sum_up([stream for lane in lanes for stream in lane], streams, time.perf_counter() - start)


def _sum_up(done: list[Stream], streams: int, seconds: float) -> Result:
    errors = [stream.error for stream in done if stream.error is not None]
    firsts = [stream.first * 1000 for stream in done if stream.first is not None]
    tokens = sum(stream.tokens for stream in done)
    return Result(
        streams=streams,
        requests=len(done),
        tokens=tokens,
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
    """The nearest rank: `quantile([1, 2, 3, 4], 0.5)` is 2; of nothing it is 0."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]
