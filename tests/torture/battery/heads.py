"""What comes before a body: paths, queries and headers, as long and as many as a head may have."""

import socket
from collections.abc import Callable, Iterator

from tests.attacks.frame import AttackedServer
from tests.torture.battery.case import LIMITS, Case, Shot, ask, changed

ROOM = LIMITS.header_bytes - 512


def cases() -> Iterator[Case]:
    for name, path in (
        ("a path of 60 KB", "/" + "a" * (ROOM - 512)),
        ("a path of 30,000 steps", "/a" * 30_000),
        ("a path of escapes", "/%41" * 15_000),
        ("an id of 60 KB", "/v1/responses/" + "a" * (ROOM - 512)),
        (
            "a query of 128 fields",
            "/v1/chat/completions?" + "&".join(f"metadata[{'a' * 400}{n}]=b" for n in range(128)),
        ),
        ("a query of 15,000 fields", "/v1/chat/completions?" + "&".join(["a=b"] * 15_000)),
        ("a query of escapes", "/v1/chat/completions?after=" + "%41" * 20_000),
        ("digits", "/v1/chat/completions?limit=" + "1" * 60_000),
    ):
        yield Case("GET any", name, _asked(path, {}))
    for name, headers in (
        ("a header of 60 KB", {"x-a": "a" * (ROOM - 1024)}),
        ("5,000 headers", {f"x-{n}": "a" for n in range(5_000)}),
        ("a request id of 60 KB", {"x-request-id": "a" * (ROOM - 1024)}),
        ("a key of 60 KB", {"authorization": "Bearer " + "a" * (ROOM - 1024)}),
        ("an origin of 60 KB", {"origin": "http://" + "a." * (ROOM // 2 - 1024)}),
        ("a host of 60 KB", {"host": "a." * (ROOM // 2 - 1024)}),
    ):
        yield Case("GET any", name, _asked("/v1/models", headers))
    for path in ("/dialects", "/v1/model", "/v1/model/list"):
        yield Case(f"GET {path}", "as it is", _asked(path, {}))
    for route in ("/models/load", "/models/unload", "/v1/model/load", "/v1/model/unload"):
        yield changed(route, "a name of 1 MB", lambda: {"model": "a" * 1_000_000})
    yield Case("GET any", "1,000 requests at once on one connection", _pipelined)
    yield Case("POST any", "a body in 30,000 chunks", _chunked)


def _asked(path: str, headers: dict[str, str]) -> Callable[[AttackedServer], Shot]:
    return lambda server: lambda: ask(server, "GET", path, None, headers)


def _pipelined(server: AttackedServer) -> Shot:
    return lambda: _raw(server, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)


def _chunked(server: AttackedServer) -> Shot:
    body = b'{"prompt": "hi", "x": "' + b"a" * 30_000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return lambda: _raw(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)


def _raw(server: AttackedServer, sent: bytes) -> int:
    """The status of the first answer, when nothing more comes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=1.0) as connection:
        data = b""
        try:
            connection.sendall(sent)
            while piece := connection.recv(1 << 16):
                data = data or piece
        except (TimeoutError, ConnectionError):
            pass
    return int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/1.1 ") else 0
