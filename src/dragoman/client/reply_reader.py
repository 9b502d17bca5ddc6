"""Turns the bytes of one reply into events, and tracks the position for errors. Independent of sockets: both
clients use it.
"""

import time
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman.client.chunks import CallAlreadyComplete
from dragoman.client.config import ClientConfig
from dragoman.client.errors import (
    MOST_SAID,
    BrokenStreamError,
    ClientError,
    ClientTimeout,
    ErrorContext,
    ErrorEventReceived,
    Reply,
    StatusError,
    StreamError,
    problem_with,
    show_value,
)
from dragoman.client.events import AnswerFold, StreamEvent
from dragoman.client.raw import Question, RawReader
from dragoman.client.request import Request
from dragoman.client.wire import ErrorBody, problem_in

# Server-sent events: bytes in, however they are split, complete events out.


DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"
LONGEST = 64 * 1024 * 1024
"""Maximum bytes of one event: a server that never ends a line must not fill the memory."""


class EventTooLong(ValueError):
    """An event that exceeds the size limit."""


class SseEvent(Struct):
    data: bytes
    name: bytes = b""
    """The value of its `event:` line."""


class SseReader:
    """Parses server-sent events. Lines may end in LF, CR LF or CR; comments and ids are skipped.

    >>> reader = SseReader()
    >>> reader.feed(b"data: a"), reader.feed(b"b\\n\\n: ping\\n\\n")
    ([], [SseEvent(data=b'ab', name=b'')])
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._line: list[bytes] = []
        """Fragments of an incomplete line."""
        self._size = 0
        self._data: list[bytes] = []
        self._name = b""
        self._first = True
        self._after_cr = False

    def feed(self, data: bytes) -> list[SseEvent]:
        if (
            not self._size
            and data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2 < self._longest
            and b"\r" not in data
        ):
            # The usual case: one complete event and nothing else.
            self._first = self._after_cr = False
            return [SseEvent(data[6:-2])]
        # Only these line ends: `splitlines` would also split at U+2028, which JSON may contain.
        head, *rest = self._plain(data).split(b"\n")
        self._line.append(head)
        self._size += len(data)
        if not rest:
            self._check()
            return []
        lines = [b"".join(self._line), *rest[:-1]]
        self._line = [rest[-1]]
        if self._first:
            self._first, lines[0] = False, lines[0].removeprefix(_BOM)
        events = self._events(lines)
        if events:
            self._size = len(rest[-1])
        self._check()
        return events

    def end(self) -> list[SseEvent]:
        """End the stream: a last event without a blank line counts, because some servers omit it."""
        return self.feed(b"\n\n")

    def _check(self) -> None:
        if self._size > self._longest:
            raise EventTooLong(f"An event has more than {self._longest} bytes.")

    def _plain(self, data: bytes) -> bytes:
        """Convert line ends to LF, even if a CR LF is split between chunks."""
        if not data:
            return data
        after, self._after_cr = self._after_cr, data.endswith(b"\r")
        if after and data.startswith(b"\n"):
            data = data[1:]
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data

    def _events(self, lines: list[bytes]) -> list[SseEvent]:
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(_value(line[5:]))
            elif line.startswith(b"event:"):
                self._name = _value(line[6:])
            elif not line:
                if self._data:
                    events.append(SseEvent(b"\n".join(self._data), self._name))
                self._data, self._name = [], b""
        return events


def _value(text: bytes) -> bytes:
    return text[1:] if text.startswith(b" ") else text


# Replies.


class ReplyReader:
    """One request and its reply so far."""

    def __init__(self, setup: ClientConfig, request: Request) -> None:
        self.request = request
        self.where = ErrorContext(f"POST {setup.url}{request.path}")
        self.reply: Reply | None = None
        self.fold = AnswerFold()
        self.done = False
        """Whether [DONE] has arrived; anything after it is ignored."""
        self.beginning = bytearray()
        """The first bytes of the reply, up to `MOST_SAID`."""
        self._setup = setup
        self._reader = request.reader()
        self._sse = SseReader()
        self._streams = True
        self._whole: list[bytes] = []
        self._chunks = 0
        self._heard = time.monotonic()
        self._deadline: float | None = None

    def questions(self) -> Generator[Question, Any, None]:
        """Yield the requests to send first, see `RawReader`."""
        if isinstance(self._reader, RawReader):
            yield from self._reader.questions()

    @property
    def left(self) -> float | None:
        """Seconds left of the total timeout, which starts with the first call."""
        total, now = self._setup.timeouts.total, time.monotonic()
        if total is None:
            return None
        self._deadline = self._deadline or now + total
        return max(self._deadline - now, 0.0)

    def make_timeout(self) -> ClientTimeout:
        message = f"The answer took more than {self._setup.timeouts.total:g} seconds."
        return ClientTimeout(message, self._at(b""))

    def began(self, response: httpx.Response) -> None:
        """Take the headers of the reply."""
        self.reply = Reply.of(response)
        self._streams = self.reply.streams
        self.where = replace(self.where, status=self.reply.status, request_id=self.reply.request_id)

    def make_refusal(self, body: bytes) -> StatusError:
        assert self.reply is not None
        self.beginning = bytearray(body[:MOST_SAID])
        problem = problem_in(body)
        where = self.where if problem else self._at(body)
        return StatusError(where, problem, self.reply)

    def again(self) -> None:
        """Prepare a retry, and restart the clock."""
        self._heard = time.monotonic()
        self.where, self.reply = ErrorContext(self.where.request), None

    def feed(self, data: bytes) -> Iterator[StreamEvent]:
        room = MOST_SAID - len(self.beginning)
        if room > 0:
            self.beginning += data[:room]
        if not self._streams:
            # Apparently not a stream: it is parsed once it is complete.
            self._whole.append(data)
        try:
            events = self._sse.feed(data)
        except EventTooLong as error:
            raise BrokenStreamError(str(error), self._at(self.beginning)) from error
        yield from self._read(events)
        self._check_time(bool(events))

    def end(self) -> Iterator[StreamEvent]:
        """Finish after the server has closed the reply."""
        if self.done:
            return
        if self.left == 0 and not self._reader.is_done:
            raise self.make_timeout()
        if not self._chunks and self._whole:
            yield from self._read([SseEvent(b"".join(self._whole))])
        else:
            yield from self._read(self._sse.end())
        if not (self.done or self._reader.is_done):
            raise BrokenStreamError(
                "The stream ended before the answer was complete.", self._at(self.beginning)
            )

    def make_error(self, error: httpx.HTTPError) -> ClientError:
        if self.left == 0:
            return self.make_timeout()
        return problem_with(error, self._setup.url, self._at(self.beginning))

    def _read(self, events: list[SseEvent]) -> Iterator[StreamEvent]:
        for event in events:
            if self.done:
                return
            if event.data.strip() == DONE:
                self.done = True
                return
            self._chunks += 1
            if event.name == b"error":
                raise self._said_failed(problem_in(event.data), event.data)
            for item in self._read_data(event.data):
                self.fold.add(item)
                yield item

    def _read_data(self, data: bytes) -> Iterator[StreamEvent]:
        try:
            yield from self._reader.read(data)
        except ErrorEventReceived as failed:
            raise self._said_failed(failed.problem, data) from None
        except (msgspec.DecodeError, UnicodeDecodeError, CallAlreadyComplete) as error:
            known = isinstance(error, CallAlreadyComplete | msgspec.ValidationError)
            why = str(error) if known else "it is not JSON"
            raise BrokenStreamError(f"An event cannot be read: {why}.", self._at(data)) from error

    def _said_failed(self, problem: ErrorBody | None, data: bytes) -> StreamError:
        text = problem.message if problem else "The server gave no reason."
        return StreamError(text, self._at(b"" if problem else data), problem)

    def _check_time(self, heard: bool) -> None:
        if self.left == 0 and not self.done:
            raise self.make_timeout()
        now, limit = time.monotonic(), self._setup.timeouts.chunk
        if heard:
            self._heard = now
        elif limit is not None and now - self._heard > limit:
            message = f"The server sends keep-alives, but no event for {limit:g} seconds."
            raise ClientTimeout(message, self._at(b""))

    def _at(self, data: bytes | bytearray) -> ErrorContext:
        beginning = self._setup.redact(show_value(data))
        return replace(self.where, chunk=self._chunks or None, beginning=beginning)
