"""The web UI: static files of the package, the same for all clients, and therefore without a key."""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib import resources

from dragoman.errors import NotFound
from dragoman.http.app_state import AppState
from dragoman.http.exchange import Exchange

FOLDER = "/page"
"""The path of all files but the first, which browsers request at the root."""
FIRST = "index.html"
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# Everything that a model, tool or client wrote is text in the web UI. Should any of it be treated as markup,
# the policy still prevents it from running, loading or sending anything, and other pages from framing the UI.
HEAD: Mapping[bytes, bytes] = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; "
    b"connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=()",
}


@cache
def find_files() -> dict[str, bytes]:
    """Return the file names and types; other names never become a path."""
    folder = resources.files("dragoman.http").joinpath("static")
    return {
        one.name: TYPES[ending]
        for one in folder.iterdir()
        if (ending := f".{one.name.rpartition('.')[2]}") in TYPES
    }


@cache
def _load(name: str) -> tuple[bytes, bytes]:
    data = resources.files("dragoman.http").joinpath("static", name).read_bytes()
    return data, b'"%s"' % sha256(data).hexdigest()[:24].encode()


async def show_first(host: AppState, exchange: Exchange) -> None:
    await _show(exchange, FIRST)


async def show_file(host: AppState, exchange: Exchange) -> None:
    name = exchange.path_params["name"]
    if name not in find_files():
        raise NotFound("The web UI has no such file.", code="unknown_path")
    await _show(exchange, name)


async def _show(exchange: Exchange, name: str) -> None:
    data, etag = _load(name)
    # Cacheable even if there are keys, but revalidated: the next version has other files.
    exchange.head[b"cache-control"] = b"no-cache"
    known = etag in exchange.headers.get(b"if-none-match", b"")
    await exchange.reply(
        b"" if known else data, find_files()[name], 304 if known else 200, {**HEAD, b"etag": etag}
    )


OPEN = frozenset({"/", "/docs", *(f"{FOLDER}/{name}" for name in find_files())})
"""Paths whose GET needs no key."""
GET = {f"{FOLDER}/{{name}}": show_file, "/docs": show_first, "/": show_first}
