"""How a client is set up: where the server is, its key, what to wait for and how often to try."""

import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from msgspec import Struct

from dragoman.client.problems import BadAddress, ClientError, Refused

UNIX = "unix:"
_LONGEST_PAUSE_S = 30.0
_FIRST_PAUSE_S = 0.25


class Timeouts(Struct, frozen=True, kw_only=True):
    """Seconds; None waits for ever."""

    connect: float | None = 5.0
    read: float | None = 600.0
    """Silence, before the reply and in the middle of it. A keep-alive is a sign of life."""
    chunk: float | None = None
    """From one event to the next, and from the request to the first; keep-alives do not count."""
    total: float | None = None
    """For all of it, from the first try to the last event."""

    @property
    def silence(self) -> float | None:
        given = [seconds for seconds in (self.read, self.chunk, self.total) if seconds is not None]
        return min(given, default=None)


class Setup(Struct, frozen=True, kw_only=True):
    url: str
    key: str | None
    timeouts: Timeouts
    retries: int
    failures: Path | None
    """The folder in which failed requests are kept."""

    def options(self, transport: type[Any] = httpx.HTTPTransport) -> dict[str, Any]:
        """The arguments of an httpx client; `transport` is what it has unix sockets by."""
        path = self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else None
        return {
            "base_url": self.url if path is None else "http://localhost",
            **({} if path is None else {"transport": transport(uds=path, verify=False)}),
            "headers": headers_of(self.key),
            "timeout": self.patience(None),
            # Where nothing is encrypted there is nothing to verify, and to load certificates takes long.
            "verify": self.url.startswith("https:"),
            # How many requests run at a time is for the caller and the server to say.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=64),
        }

    def patience(self, left: float | None) -> httpx.Timeout:
        """How long each wait may be, with so many seconds left for all of them."""
        most = [] if left is None else [max(left, 0.001)]
        silence, connect = (
            min([*most, *([] if seconds is None else [seconds])], default=None)
            for seconds in (self.timeouts.silence, self.timeouts.connect)
        )
        return httpx.Timeout(silence, connect=connect)

    def hidden(self, text: str) -> str:
        """The same without the key, which a server may have repeated."""
        return text.replace(self.key, "[key]") if self.key else text

    def pause(self, problem: ClientError, tried: int, left: float | None = None) -> float | None:
        """Seconds to wait before another try, or None where there must not be one.

        `left` are those that remain for all of it.
        """
        if tried > self.retries or not problem.again:
            return None
        most = _LONGEST_PAUSE_S if left is None else min(_LONGEST_PAUSE_S, left)
        pause = problem.reply.retry_after if isinstance(problem, Refused) else None
        if pause is None:
            # Spread out, so that clients that failed together do not come back together.
            longest = min(_FIRST_PAUSE_S * 2.0 ** (tried - 1), _LONGEST_PAUSE_S)
            pause = longest * random.uniform(0.5, 1.0)
        return pause if pause <= most else None


def setup_of(
    url: str, key: str | None, timeouts: Timeouts | None, retries: int, failures: str | Path | None
) -> Setup:
    return Setup(
        url=root_of(url),
        key=key,
        timeouts=timeouts or Timeouts(),
        retries=retries,
        failures=None if failures is None else Path(failures).expanduser(),
    )


def root_of(url: str) -> str:
    """`root_of("localhost:8000/v1/")` is `http://localhost:8000`; a unix socket is `unix:/its/path`."""
    if url.startswith(UNIX) and len(url) > len(UNIX):
        return UNIX + url.removeprefix(UNIX).removeprefix("//")
    root = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(root)
        # Reading the port is what checks it.
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise BadAddress(f"{url} is not a URL; it looks like http://127.0.0.1:8000.")
    return root


def headers_of(key: str | None) -> dict[str, str]:
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise BadAddress("The key has characters that no HTTP header can hold.")
    return {"Authorization": f"Bearer {key}"}
