"""The page for people: files of the package, the same for everybody, and so without a key."""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib import resources

from dragoman.errors import NotFound
from dragoman.http.exchange import Exchange
from dragoman.http.host import Host

FOLDER = "/page"
"""Below this path are all files but the first, which is what browsers ask for."""
FIRST = "index.html"
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# What a model, a tool or a stranger wrote is text on this page. Were it ever taken for more, it could still
# run nothing, load nothing, send nothing elsewhere and be shown inside of no other page.
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
    """The names that can be asked for: a name that is none of them never becomes a path."""
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


async def show_first(host: Host, exchange: Exchange) -> None:
    await _show(exchange, FIRST)


async def show_file(host: Host, exchange: Exchange) -> None:
    name = exchange.path_params["name"]
    if name not in find_files():
        raise NotFound("The page has no such file.", code="unknown_path")
    await _show(exchange, name)


async def _show(exchange: Exchange, name: str) -> None:
    data, etag = _load(name)
    # It may be kept though there are keys, but is asked for again: the next version has other files.
    exchange.head[b"cache-control"] = b"no-cache"
    known = etag in exchange.headers.get(b"if-none-match", b"")
    await exchange.reply(
        b"" if known else data, find_files()[name], 304 if known else 200, {**HEAD, b"etag": etag}
    )


OPEN = frozenset({"/", "/docs", *(f"{FOLDER}/{name}" for name in find_files())})
"""GET of these needs no key."""
GET = {f"{FOLDER}/{{name}}": show_file, "/docs": show_first, "/": show_first}
