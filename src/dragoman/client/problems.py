"""What can go wrong between a client and a server. Each error says what happened and where."""

from collections.abc import Mapping
from pathlib import Path

import httpx
from msgspec import Struct, field

from dragoman.client.wire import Problem
from dragoman.errors import DragomanError, SettingsError

# What the head of a reply tells: status, request id, limits.


_IDS = ("x-request-id", "request-id", "x-amzn-requestid", "cf-ray")
_ADVICE = {"true": True, "false": False}
_LIMITS = ("x-ratelimit-", "ratelimit-", "anthropic-ratelimit-")


class Reply(Struct, frozen=True, kw_only=True):
    status: int
    request_id: str | None = None
    """The server's name for this request, for its log."""
    rate_limits: Mapping[str, str] = field(default_factory=dict)
    """Every header about limits, by its name."""
    retry_after: float | None = None
    """Seconds after which the server wants to be asked again."""
    should_retry: bool | None = None
    """Whether the server says that asking again may help; None if it does not say."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, response: httpx.Response) -> "Reply":
        return cls.told(response.status_code, dict(response.headers))

    @classmethod
    def told(cls, status: int, headers: Mapping[str, str]) -> "Reply":
        """The names of the headers are in lower case."""
        return cls(
            status=status,
            request_id=next((headers[name] for name in _IDS if name in headers), None),
            rate_limits={name: value for name, value in headers.items() if name.startswith(_LIMITS)},
            retry_after=_seconds(headers),
            should_retry=_ADVICE.get(headers.get("x-should-retry", "")),
            headers=headers,
        )

    @property
    def streams(self) -> bool:
        return "text/event-stream" in self.headers.get("content-type", "")


def _seconds(headers: Mapping[str, str]) -> float | None:
    """A date in `retry-after` is left alone: it takes both clocks to be right."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.isascii() and text.replace(".", "", 1).isdigit():
            return float(text) * unit
    return None


# Errors.


_SHOWN = 200
MOST_SAID = 64 * 1024
"""Bytes of a reply that are kept to tell what was wrong."""


class BadAddress(SettingsError):
    """A URL or a key that cannot be used."""


class BadFile(SettingsError):
    """A file that does not hold a saved request, or is no picture or sound."""


class FailedInside(Exception):
    """An event says that the server has failed."""

    def __init__(self, problem: Problem | None) -> None:
        super().__init__()
        self.problem = problem or Problem("The server did not say what is wrong.")


class Where(Struct):
    """The place in a conversation with a server."""

    request: str
    """Method and URL."""
    status: int | None = None
    request_id: str | None = None
    chunk: int | None = None
    """The number of the event in the stream, from 1."""
    beginning: str = ""
    """What the reply, or the event that could not be read, begins with."""

    def __str__(self) -> str:
        parts = [self.request]
        if self.request_id is not None:
            parts.append(f"request {self.request_id}")
        if self.chunk is not None:
            parts.append(f"chunk {self.chunk}")
        if self.beginning:
            parts.append(f"which begins with {self.beginning!r}")
        return ", ".join(parts)


class ClientError(DragomanError):
    """`where` says at what place, `saved` in which file the request is kept for `dragoman replay`."""

    again = False
    """Whether the same request may succeed if it is sent again, and nothing of an answer was seen."""

    def __init__(self, message: str, where: Where, problem: Problem | None = None) -> None:
        told = problem or Problem("")
        super().__init__(message, param=told.param, code=told.code)
        self.where = where
        self.said = told.message
        """The server's own words."""
        self.kind = told.type
        self.saved: Path | None = None

    def __str__(self) -> str:
        return f"{self.message} ({self.where})"


class CannotConnect(ClientError):
    again = True


class TimedOut(ClientError):
    """The server is silent for too long, or sends nothing but signs of life."""


class Refused(ClientError):
    """The server answered with an error, in the place of an answer."""

    def __init__(self, where: Where, problem: Problem | None, reply: Reply) -> None:
        reason = problem.message if problem else "no reason was given."
        super().__init__(f"The server answered {where.status}: {reason}", where, problem)
        self.reply = reply
        may_pass = where.status in (408, 429, 500, 502, 503, 504)
        self.again = may_pass if reply.should_retry is None else reply.should_retry


class StreamFailed(ClientError):
    """The server failed after it had begun to answer, and said so."""


class BrokenStream(ClientError):
    """The stream ended too early, or holds what is no event of this API."""


class Unreached(BrokenStream):
    """The connection was closed before a byte came."""

    again = True


def show_value(data: bytes | bytearray) -> str:
    """The beginning of what came, fit for a message."""
    return data[:_SHOWN].decode("utf-8", "replace") + ("…" if len(data) > _SHOWN else "")


def problem_with(error: httpx.HTTPError, root: str, where: Where) -> ClientError:
    """What a failure of the connection means to a person."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return CannotConnect(f"Nothing answers at {root}.", where)
    if isinstance(error, httpx.TimeoutException):
        return TimedOut(f"The server at {root} is silent for too long.", where)
    if where.status is None:
        return Unreached(f"The server at {root} hung up without a word.", where)
    return BrokenStream(f"The server at {root} hung up in the middle of an answer.", where)
