"""Errors between client and server. Each says what happened, in which request and where."""

from collections.abc import Mapping
from pathlib import Path

import httpx
from msgspec import Struct, field

from dragoman.client.wire import ErrorBody
from dragoman.errors import DragomanError, SettingsError

# What the headers of a reply contain: status, request id, rate limits.


_IDS = ("x-request-id", "request-id", "x-amzn-requestid", "cf-ray")
_ADVICE = {"true": True, "false": False}
_LIMITS = ("x-ratelimit-", "ratelimit-", "anthropic-ratelimit-")


class Reply(Struct, frozen=True, kw_only=True):
    status: int
    request_id: str | None = None
    """The server's id of the request, for finding it in the server's log."""
    rate_limits: Mapping[str, str] = field(default_factory=dict)
    """All rate-limit headers, by name."""
    retry_after: float | None = None
    """Seconds after which the server allows a retry."""
    should_retry: bool | None = None
    """Whether the server says that a retry may help; None if it does not say."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, response: httpx.Response) -> "Reply":
        return cls.told(response.status_code, dict(response.headers))

    @classmethod
    def told(cls, status: int, headers: Mapping[str, str]) -> "Reply":
        """Build a reply from headers with lower-case names."""
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
    """Parse `retry-after`. Dates are ignored, because they need synchronized clocks."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.isascii() and text.replace(".", "", 1).isdigit():
            return float(text) * unit
    return None


# Errors.


_SHOWN = 200
MOST_SAID = 64 * 1024
"""Bytes of a reply that are kept for error messages."""


class AddressError(SettingsError):
    """A URL or key that cannot be used."""


class FileFormatError(SettingsError):
    """A file that is not a saved request, or not an image or audio file."""


class ErrorEventReceived(Exception):
    """An event reports that the server has failed."""

    def __init__(self, problem: ErrorBody | None) -> None:
        super().__init__()
        self.problem = problem or ErrorBody("The server gave no reason.")


class ErrorContext(Struct):
    """Where an error happened: request, reply and event."""

    request: str
    """Method and URL."""
    status: int | None = None
    request_id: str | None = None
    chunk: int | None = None
    """The number of the event in the stream, from 1."""
    beginning: str = ""
    """The first characters of the reply, or of the event that could not be read."""

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
    """Base of the client's errors. `context` locates it, `saved_path` is the file for `dragoman replay`."""

    retryable = False
    """Whether a retry may succeed, and no part of an answer has arrived."""

    def __init__(self, message: str, where: ErrorContext, problem: ErrorBody | None = None) -> None:
        body = problem or ErrorBody("")
        super().__init__(message, param=body.param, code=body.code)
        self.context = where
        self.server_message = body.message
        """The server's own message."""
        self.kind = body.type
        self.saved_path: Path | None = None

    def __str__(self) -> str:
        return f"{self.message} ({self.context})"


class ConnectionFailed(ClientError):
    retryable = True


class ClientTimeout(ClientError):
    """The server was silent for too long, or sent only keep-alives."""


class StatusError(ClientError):
    """The server replied with an error instead of an answer."""

    def __init__(self, where: ErrorContext, problem: ErrorBody | None, reply: Reply) -> None:
        reason = problem.message if problem else "no reason was given."
        super().__init__(f"The server answered {where.status}: {reason}", where, problem)
        self.reply = reply
        may_pass = where.status in (408, 429, 500, 502, 503, 504)
        self.retryable = may_pass if reply.should_retry is None else reply.should_retry


class StreamError(ClientError):
    """The server reported a failure after the answer had begun."""


class BrokenStreamError(ClientError):
    """The stream ended too early, or contains an invalid event."""


class ClosedWithoutReply(BrokenStreamError):
    """The connection was closed before any byte arrived."""

    retryable = True


def show_value(data: bytes | bytearray) -> str:
    """Decode the first bytes of a reply for a message."""
    return data[:_SHOWN].decode("utf-8", "replace") + ("…" if len(data) > _SHOWN else "")


def problem_with(error: httpx.HTTPError, root: str, where: ErrorContext) -> ClientError:
    """Translate an httpx error into a client error."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ConnectionFailed(
            f"No server answers at {root}; check the URL and whether the server runs.", where
        )
    if isinstance(error, httpx.TimeoutException):
        return ClientTimeout(f"The server at {root} was silent for too long.", where)
    if where.status is None:
        return ClosedWithoutReply(f"The server at {root} closed the connection without a reply.", where)
    return BrokenStreamError(f"The server at {root} closed the connection in the middle of an answer.", where)
