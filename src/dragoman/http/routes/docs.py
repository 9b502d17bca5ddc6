"""The description of the API: for programs at /openapi.json, for people at /docs."""

from functools import cache
from importlib.resources import files

import msgspec

from dragoman._version import __version__
from dragoman.api.openapi import document
from dragoman.http.exchange import Exchange
from dragoman.http.host import Host

# Everything the page needs is in the page; nothing is fetched from elsewhere.
_GUARDED = {
    b"content-security-policy": b"default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
}


@cache
def _openapi() -> bytes:
    # Not before it is asked for: the table has this route as well.
    from dragoman.http.routes.table import operations

    return msgspec.json.encode(document(__version__, operations()))


@cache
def _asset(name: str) -> bytes:
    return files("dragoman.http").joinpath("static", name).read_bytes()


async def openapi(host: Host, exchange: Exchange) -> None:
    await exchange.reply(_openapi(), b"application/json")


async def page(host: Host, exchange: Exchange) -> None:
    await exchange.reply(_asset("docs.html"), b"text/html; charset=utf-8", extra=_GUARDED)


async def script(host: Host, exchange: Exchange) -> None:
    await exchange.reply(_asset("docs.js"), b"text/javascript; charset=utf-8")


async def root(host: Host, exchange: Exchange) -> None:
    await exchange.reply(b"", b"text/plain", 307, {b"location": b"/docs"})
