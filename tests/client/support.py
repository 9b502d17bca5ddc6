"""Reading without a socket."""

import itertools
from collections.abc import Iterable

import httpx

from dragoman.client.config import Timeouts, make_config
from dragoman.client.events import StreamEvent
from dragoman.client.reply_reader import ReplyReader
from dragoman.client.request import Request

HELLO = [{"role": "user", "content": "hi"}]
KEY = "sk-very-secret"


def reading_of(path: str, media: str = "text/event-stream") -> ReplyReader:
    reading = ReplyReader(make_config("http://h", KEY, Timeouts(), 0, None), Request(path, {}))
    reading.began(httpx.Response(200, headers={"content-type": media, "x-request-id": "req_1"}))
    return reading


def read(reading: ReplyReader, parts: Iterable[bytes]) -> list[StreamEvent]:
    events = [event for part in parts for event in reading.feed(part)]
    return [*events, *reading.end()]


def cut(data: bytes, indices: Iterable[int]) -> list[bytes]:
    bounds = [0, *sorted(indices), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]
