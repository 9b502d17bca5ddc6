"""Downloads files that a request refers to by URL, from hosts that the operator allows.

A server that fetches for clients can be made to contact machines that clients cannot reach. Therefore:

- the host is on the operator's list (`HOST`, `HOST:PORT`, `HOST:*`, `*`), and so is each host that it
  redirects to;
- https, unless the entry says `http://`;
- a name must resolve to public addresses only, and the checked address is the one that is connected to; a
  private address is contacted only if the operator listed that exact address;
- nothing of the client is forwarded: no key, no header, no cookie;
- bytes, seconds and concurrent downloads are limited, and a file is identified by its content.

Errors have our own texts. Nothing is cached: a file that is needed twice is fetched twice.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from urllib.parse import urljoin
from weakref import WeakValueDictionary

import httpx
from msgspec import Struct

from dragoman._version import __version__
from dragoman.errors import BadRequest, SettingsError
from dragoman.outbound import (
    ADDRESS,
    ALLOWED,
    DEFAULT_PORTS,
    NonPublicAddress,
    is_allowed,
    is_public,
    literal_address,
    public_address,
)

FETCH_S = 20.0
HOPS = 3
"""Maximum number of redirects."""
AT_ONCE = 16
"""Maximum number of concurrent downloads; each key may use half of them."""
MOVED = frozenset({301, 302, 303, 307, 308})
_SCHEME = re.compile(r"(?:(https?)://)?(.+)", re.IGNORECASE)


class FetchError(Exception):
    """Reason, for the client, why a file was not downloaded."""


class FetchTarget(Struct, frozen=True):
    """A URL that may be fetched."""

    url: str
    scheme: str
    host: str
    port: int
    named: bool
    """Whether the operator listed this exact IP address."""


def check_media_hosts(allow: Sequence[str]) -> None:
    """Check the setting: an entry that can never match is an error, not silently ignored."""
    for entry in allow:
        if (match := _SCHEME.fullmatch(entry)) is None or ALLOWED.fullmatch(match[2]) is None:
            raise SettingsError(
                f"`allow_media_host`: {entry} must be a host, HOST:PORT, HOST:* or *, with the prefix "
                "http:// to allow it without TLS."
            )


class MediaFetcher:
    """Downloads media: `await fetcher.fetch(owner, url, most_bytes, place)` returns bytes, or raises
    BadRequest.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        check_media_hosts(allow)
        self._secure: list[str] = []
        self._plain: list[str] = []
        for entry in allow:
            match = _SCHEME.fullmatch(entry)
            assert match is not None
            self._secure.append(match[2])
            if (match[1] or "").lower() == "http":
                self._plain.append(match[2])
        self._places = asyncio.Semaphore(AT_ONCE)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def fetch(self, owner: str, url: str, most: int, param: str) -> bytes:
        share = self._shares.setdefault(owner, asyncio.Semaphore(AT_ONCE // 2))
        target = self._check(url, param)
        try:
            async with share, self._places, asyncio.timeout(FETCH_S):
                return await self._follow(target, most, param)
        except TimeoutError:
            why = f"it takes longer than {FETCH_S:.0f} seconds"
        except FetchError as error:
            why = str(error)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, NonPublicAddress, OSError):
            # One answer for all failures, because clients must not learn about the server's network.
            why = "the host cannot be reached"
        message = f"'{param}': the file at {target.host} cannot be fetched: {why}; send it as data instead."
        raise BadRequest(message, param=param, code="media_not_fetched")

    def _check(self, url: str, param: str) -> FetchTarget:
        if not self._secure:
            message = f"'{param}': this server does not fetch files; send the file as base64, or upload it."
            raise BadRequest(message, param=param, code="media_host_not_allowed")
        match = ADDRESS.fullmatch(url)
        if match is None:
            message = f"'{param}' must be a URL such as https://HOST/PATH, in ASCII and without a password."
            raise BadRequest(message, param=param, code="invalid_value")
        scheme, host = match["scheme"].lower(), match["host"].lower()
        port = match["port"] or DEFAULT_PORTS[scheme]
        allow = self._secure if scheme == "https" else self._plain
        named = is_allowed(host, port, [entry for entry in allow if entry != "*"])
        number = literal_address(host)
        if not named and ("*" not in allow or (number is not None and not is_public(number))):
            message = (
                f"'{param}': this server may not fetch from {scheme}://{host}; upload the file, or send it "
                "as base64. Its operator can allow the host with the setting `allow_media_host`."
            )
            raise BadRequest(message, param=param, code="media_host_not_allowed")
        return FetchTarget(url, scheme, host, int(port), named and number is not None)

    async def _follow(self, target: FetchTarget, most: int, param: str) -> bytes:
        for _ in range(HOPS + 1):
            async with _asked(target) as response:
                if response.status_code not in MOVED:
                    return await _body(response, most)
                location = response.headers.get("location", "")
            try:
                target = self._check(urljoin(target.url, location), param)
            except (BadRequest, ValueError):
                raise FetchError("it redirects to a host that is not allowed") from None
        raise FetchError(f"it redirects more than {HOPS} times")


@asynccontextmanager
async def _asked(target: FetchTarget) -> AsyncIterator[httpx.Response]:
    """Request the target from the checked address; its certificate is checked for the name."""
    host = target.host.strip("[]")
    address = str(literal_address(host)) if target.named else await public_address(host, target.port)
    url = httpx.URL(target.url)
    headers = {
        "host": url.netloc.decode("ascii"),
        "user-agent": f"dragoman/{__version__}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "connection": "close",
    }
    aimed = httpx.Request(
        "GET",
        url.copy_with(host=address),
        headers=headers,
        extensions={
            "sni_hostname": target.host.strip("[]"),
            "timeout": {"connect": FETCH_S, "read": FETCH_S},
        },
    )
    # A new connection each time: a pooled one was checked for the name that it was opened with.
    async with httpx.AsyncHTTPTransport(verify=_trusted(), retries=0) as transport:
        response = await transport.handle_async_request(aimed)
        try:
            yield response
        finally:
            await response.aclose()


async def _body(response: httpx.Response, most: int) -> bytes:
    if response.status_code != 200:
        raise FetchError(f"it answers with status {response.status_code}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        # A small body may decompress to a huge one.
        raise FetchError("its response is compressed")
    too_much = FetchError(f"it is larger than {most} bytes")
    length = response.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_much
    taken = bytearray()
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:
        taken += chunk
        if len(taken) > most:
            raise too_much
    return bytes(taken)


@cache
def _trusted() -> ssl.SSLContext:
    return httpx.create_ssl_context()
