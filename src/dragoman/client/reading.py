"""The bytes of one reply to events, with an account of the place. No socket: both clients use this."""

import time
from collections.abc import Iterator

import httpx
import msgspec
from msgspec.structs import replace

from dragoman.client.answer import AnswerFold
from dragoman.client.calls import CallGoesOn
from dragoman.client.events import StreamEvent
from dragoman.client.problems import (
    MOST_SAID,
    BrokenStream,
    ClientError,
    FailedInside,
    Refused,
    StreamFailed,
    TimedOut,
    Where,
    problem_with,
    shown,
)
from dragoman.client.reply import Reply
from dragoman.client.request import Request
from dragoman.client.setup import Setup
from dragoman.client.sse import DONE, EventTooLong, SseEvent, SseReader
from dragoman.client.wire import Problem, problem_in


class Reading:
    """One request and what has come for it so far."""

    def __init__(self, setup: Setup, request: Request) -> None:
        self.request = request
        self.where = Where(f"POST {setup.url}{request.path}")
        self.reply: Reply | None = None
        self.fold = AnswerFold()
        self.done = False
        """The end mark has come: what may follow is of no interest."""
        self.beginning = bytearray()
        """Of the reply's bytes, as many as are worth keeping."""
        self._setup = setup
        self._reader = request.reader()
        self._sse = SseReader()
        self._streams = True
        self._whole: list[bytes] = []
        self._chunks = 0
        self._heard = time.monotonic()

    def began(self, response: httpx.Response) -> None:
        """The head of the reply is here."""
        self.reply = Reply.of(response)
        self._streams = self.reply.streams
        self.where = replace(self.where, status=self.reply.status, request_id=self.reply.request_id)

    def refused(self, body: bytes) -> Refused:
        assert self.reply is not None
        self.beginning = bytearray(body[:MOST_SAID])
        problem = problem_in(body)
        where = self.where if problem else self._at(body)
        return Refused(where, problem, self.reply)

    def again(self) -> None:
        """Another try: the clock starts anew."""
        self._heard = time.monotonic()
        self.where, self.reply = Where(self.where.request), None

    def feed(self, data: bytes) -> Iterator[StreamEvent]:
        room = MOST_SAID - len(self.beginning)
        if room > 0:
            self.beginning += data[:room]
        if not self._streams:
            # Not a stream, as it seems: its end shows what it is.
            self._whole.append(data)
        try:
            events = self._sse.feed(data)
        except EventTooLong as error:
            raise BrokenStream(str(error), self._at(self.beginning)) from error
        yield from self._read(events)
        self._check_time(bool(events))

    def end(self) -> Iterator[StreamEvent]:
        """The server has nothing more to say."""
        if self.done:
            return
        if not self._chunks and self._whole:
            yield from self._read([SseEvent(b"".join(self._whole))])
        else:
            yield from self._read(self._sse.end())
        if not (self.done or self._reader.over):
            raise BrokenStream("The stream ended before the answer did.", self._at(self.beginning))

    def failed(self, error: httpx.HTTPError) -> ClientError:
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
            for told in self._told(event.data):
                self.fold.add(told)
                yield told

    def _told(self, data: bytes) -> Iterator[StreamEvent]:
        try:
            yield from self._reader.read(data)
        except FailedInside as failed:
            raise self._said_failed(failed.problem, data) from None
        except (msgspec.DecodeError, UnicodeDecodeError, CallGoesOn) as error:
            known = isinstance(error, CallGoesOn | msgspec.ValidationError)
            why = str(error) if known else "it is not JSON"
            raise BrokenStream(f"An event cannot be read: {why}.", self._at(data)) from error

    def _said_failed(self, problem: Problem | None, data: bytes) -> StreamFailed:
        said = problem.message if problem else "The server did not say what is wrong."
        return StreamFailed(said, self._at(b"" if problem else data), problem)

    def _check_time(self, heard: bool) -> None:
        now, limit = time.monotonic(), self._setup.timeouts.chunk
        if heard:
            self._heard = now
        elif limit is not None and now - self._heard > limit:
            message = f"The server sends signs of life, but no event in {limit:g} seconds."
            raise TimedOut(message, self._at(b""))

    def _at(self, data: bytes | bytearray) -> Where:
        beginning = self._setup.hidden(shown(data))
        return replace(self.where, chunk=self._chunks or None, beginning=beginning)
