"""Configuration of a client: URL, key, timeouts and retries."""

import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from msgspec import Struct

from dragoman.client.errors import AddressError, ClientError, StatusError

UNIX = "unix:"
_LONGEST_PAUSE_S = 30.0
_FIRST_PAUSE_S = 0.25


class Timeouts(Struct, frozen=True, kw_only=True):
    """Timeouts in seconds; None waits forever."""

    connect: float | None = 5.0
    read: float | None = 600.0
    """Silence before the reply and between its bytes. A keep-alive ends the silence."""
    chunk: float | None = None
    """Time from one event to the next, and from the request to the first; keep-alives do not count."""
    total: float | None = None
    """Total time from the first attempt to the last event."""

    @property
    def silence(self) -> float | None:
        values = [seconds for seconds in (self.read, self.chunk, self.total) if seconds is not None]
        return min(values, default=None)


class ClientConfig(Struct, frozen=True, kw_only=True):
    url: str
    key: str | None
    timeouts: Timeouts
    retries: int
    failures: Path | None
    """The folder in which failed requests are saved."""

    def options(self, transport: type[Any] = httpx.HTTPTransport) -> dict[str, Any]:
        """Return the arguments of an httpx client; `transport` is its class for unix sockets."""
        path = self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else None
        return {
            "base_url": self.url if path is None else "http://localhost",
            **({} if path is None else {"transport": transport(uds=path, verify=False)}),
            "headers": headers_of(self.key),
            "timeout": self.timeout_for(None),
            # Plain HTTP verifies nothing, and loading certificates is slow.
            "verify": self.url.startswith("https:"),
            # The caller and the server limit concurrent requests.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=64),
        }

    def timeout_for(self, left: float | None) -> httpx.Timeout:
        """Return the timeout of each wait, with `left` seconds for all of them."""
        most = [] if left is None else [max(left, 0.001)]
        silence, connect = (
            min([*most, *([] if seconds is None else [seconds])], default=None)
            for seconds in (self.timeouts.silence, self.timeouts.connect)
        )
        return httpx.Timeout(silence, connect=connect)

    def redact(self, text: str) -> str:
        """Remove the key from a text that a server may have repeated."""
        return text.replace(self.key, "[key]") if self.key else text

    def retry_delay(self, problem: ClientError, tried: int, left: float | None = None) -> float | None:
        """Return the seconds to wait before a retry, or None if there must not be one.

        `left` is what remains of the total timeout.
        """
        if tried > self.retries or not problem.retryable:
            return None
        most = _LONGEST_PAUSE_S if left is None else min(_LONGEST_PAUSE_S, left)
        pause = problem.reply.retry_after if isinstance(problem, StatusError) else None
        if pause is None:
            # Jitter, so that clients that failed together do not retry together.
            longest = min(_FIRST_PAUSE_S * 2.0 ** (tried - 1), _LONGEST_PAUSE_S)
            pause = longest * random.uniform(0.5, 1.0)
        return pause if pause <= most else None


def make_config(
    url: str, key: str | None, timeouts: Timeouts | None, retries: int, failures: str | Path | None
) -> ClientConfig:
    return ClientConfig(
        url=root_of(url),
        key=key,
        timeouts=timeouts or Timeouts(),
        retries=retries,
        failures=None if failures is None else Path(failures).expanduser(),
    )


def root_of(url: str) -> str:
    """Normalize a URL: `root_of("localhost:8000/v1/")` is `http://localhost:8000`; `unix:/path` is a unix
    socket.
    """
    if url.startswith(UNIX) and len(url) > len(UNIX):
        return UNIX + url.removeprefix(UNIX).removeprefix("//")
    root = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(root)
        # Reading the port validates it.
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise AddressError(f"{url} is not a valid URL, such as http://127.0.0.1:8000.")
    return root


def headers_of(key: str | None) -> dict[str, str]:
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise AddressError("The key has characters that are not allowed in an HTTP header.")
    return {"Authorization": f"Bearer {key}"}
