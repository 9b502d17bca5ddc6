"""Files that a request names by their addresses: fetched where the operator has allowed the host, else not.

A server that fetches for strangers can be made to ask machines that strangers cannot reach. So:

- the host is on the operator's list (`HOST`, `HOST:PORT`, `HOST:*`, `*`), and each that it sends one to;
- https, unless the entry says `http://`;
- a name stands for public addresses alone, all of them, and the one that was looked at is the one that is
  connected to; an address of a private network is asked where the operator has written that very address;
- nothing of the client goes along: no key, no header, no cookie;
- bytes, seconds and how many are fetched at the same time have bounds, and what came is known by its content.

What went wrong is told in words of ours. Nothing is kept: what is fetched twice is asked for twice.
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
    NotPublic,
    is_allowed,
    is_public,
    public_address,
    written_as_number,
)

FETCH_S = 20.0
HOPS = 3
"""How often one may be sent on."""
AT_ONCE = 16
"""That are fetched at the same time; of these each key has half."""
MOVED = frozenset({301, 302, 303, 307, 308})
_SCHEME = re.compile(r"(?:(https?)://)?(.+)", re.IGNORECASE)


class NotFetched(Exception):
    """Why not, in words for the one who asked."""


class Target(Struct, frozen=True):
    """An address that may be asked."""

    url: str
    scheme: str
    host: str
    port: int
    named: bool
    """Whether its operator has written this very number."""


def check_media_hosts(allow: Sequence[str]) -> None:
    """An entry that could never match would be a slip in silence."""
    for entry in allow:
        if (found := _SCHEME.fullmatch(entry)) is None or ALLOWED.fullmatch(found[2]) is None:
            raise SettingsError(
                f"`allow_media_host`: {entry} must be a host, HOST:PORT, HOST:* or *, with http:// before it "
                "where it may be asked without TLS."
            )


class MediaFetcher:
    """`await fetcher.fetch(owner, url, most_bytes, place)`: the bytes, or a BadRequest about that field."""

    def __init__(self, allow: Sequence[str] = ()) -> None:
        check_media_hosts(allow)
        self._secure: list[str] = []
        self._plain: list[str] = []
        for entry in allow:
            found = _SCHEME.fullmatch(entry)
            assert found is not None
            self._secure.append(found[2])
            if (found[1] or "").lower() == "http":
                self._plain.append(found[2])
        self._places = asyncio.Semaphore(AT_ONCE)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def fetch(self, owner: str, url: str, most: int, place: str) -> bytes:
        share = self._shares.setdefault(owner, asyncio.Semaphore(AT_ONCE // 2))
        target = self._check(url, place)
        try:
            async with share, self._places, asyncio.timeout(FETCH_S):
                return await self._follow(target, most, place)
        except TimeoutError:
            why = f"it takes longer than {FETCH_S:.0f} seconds"
        except NotFetched as error:
            why = str(error)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, NotPublic, OSError):
            # One answer for all of them: what is behind this server is not for clients to find out.
            why = "the host cannot be reached"
        message = f"'{place}': the file at {target.host} cannot be fetched: {why}; send it as data instead."
        raise BadRequest(message, param=place, code="media_not_fetched")

    def _check(self, url: str, place: str) -> Target:
        if not self._secure:
            message = (
                f"'{place}': this server fetches nothing; send the file itself, as base64, or upload it."
            )
            raise BadRequest(message, param=place, code="media_host_not_allowed")
        found = ADDRESS.fullmatch(url)
        if found is None:
            message = f"'{place}' must be an address as https://HOST/PATH, in ASCII and without a password."
            raise BadRequest(message, param=place, code="invalid_value")
        scheme, host = found["scheme"].lower(), found["host"].lower()
        port = found["port"] or DEFAULT_PORTS[scheme]
        allow = self._secure if scheme == "https" else self._plain
        named = is_allowed(host, port, [entry for entry in allow if entry != "*"])
        number = written_as_number(host)
        if not named and ("*" not in allow or (number is not None and not is_public(number))):
            message = (
                f"'{place}': this server may not fetch from {scheme}://{host}; upload the file, or send it "
                "as base64. Its operator can allow the host with the setting `allow_media_host`."
            )
            raise BadRequest(message, param=place, code="media_host_not_allowed")
        return Target(url, scheme, host, int(port), named and number is not None)

    async def _follow(self, target: Target, most: int, place: str) -> bytes:
        for _ in range(HOPS + 1):
            async with _asked(target) as response:
                if response.status_code not in MOVED:
                    return await _body(response, most)
                location = response.headers.get("location", "")
            try:
                target = self._check(urljoin(target.url, location), place)
            except (BadRequest, ValueError):
                raise NotFetched("it sends one on to where this server may not go") from None
        raise NotFetched(f"it sends one on more than {HOPS} times")


@asynccontextmanager
async def _asked(target: Target) -> AsyncIterator[httpx.Response]:
    """Its answer, from the address that was looked at; the name is what its certificate is checked for."""
    host = target.host.strip("[]")
    address = str(written_as_number(host)) if target.named else await public_address(host, target.port)
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
    # A connection of its own: one that is kept for an address was checked for the name that it was opened by.
    async with httpx.AsyncHTTPTransport(verify=_trusted(), retries=0) as transport:
        response = await transport.handle_async_request(aimed)
        try:
            yield response
        finally:
            await response.aclose()


async def _body(response: httpx.Response, most: int) -> bytes:
    if response.status_code != 200:
        raise NotFetched(f"it answers with status {response.status_code}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        # A small answer may be huge when unpacked.
        raise NotFetched("it answers with what is compressed")
    too_much = NotFetched(f"it is larger than {most} bytes")
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
