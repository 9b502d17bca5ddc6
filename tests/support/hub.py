"""A small hub of models on this machine, which can be as bad as a hub can be."""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from msgspec import Struct, field

COMMIT = "a1" * 20


class SmallHub(Struct):
    files: dict[str, bytes]
    """Of the one repository that there is, by name."""
    repo: str = "org/repo"
    cut: int | None = None
    """Every reply with contents ends after so many bytes."""
    no_ranges: bool = False
    lies: frozenset[str] = frozenset()
    """Files whose contents are not what the list says."""
    token: str | None = None
    """Without it nothing is given."""
    elsewhere: str | None = None
    """The address of another server that contents are to be fetched from."""
    failing: int = 0
    """So many requests are answered with 503 first."""
    slow_s: float = 0.0
    """Seconds between pieces of 64 KiB."""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Paths and headers, as they came."""
    url: str = ""
    sent: list[int] = field(default_factory=list)
    """The sizes of all pieces of contents: each is counted before whoever reads it can go on."""

    @property
    def given(self) -> int:
        """Bytes of contents."""
        return sum(self.sent)

    def describe(self) -> dict[str, Any]:
        return {"id": self.repo, "sha": COMMIT, "siblings": [self._sibling(name) for name in self.files]}

    def _sibling(self, name: str) -> dict[str, Any]:
        body = self.files[name]
        fields = {"rfilename": name, "size": len(body), "blobId": git_id(body)}
        if name.endswith((".gguf", ".safetensors")):
            fields["lfs"] = {"sha256": _sha256(body), "size": len(body), "pointerSize": 130}
        return fields


@lru_cache(16)
def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@lru_cache(16)
def git_id(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


@contextmanager
def running(hub: SmallHub) -> Iterator[SmallHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            hub.asked.append((self.path, dict(self.headers)))
            with suppress(ConnectionError):
                _answer(hub, self)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _answer(hub: SmallHub, asked: BaseHTTPRequestHandler) -> None:
    path = asked.path.partition("?")[0]
    if hub.failing:
        hub.failing -= 1
        _reply(asked, 503, b"")
    elif hub.token and asked.headers.get("Authorization") != f"Bearer {hub.token}":
        _reply(asked, 401, b"")
    elif path.startswith(f"/api/models/{hub.repo}/revision/"):
        _reply(asked, 200, msgspec.json.encode(hub.describe()))
    elif path.startswith(f"/{hub.repo}/resolve/{COMMIT}/") and hub.elsewhere:
        _reply(asked, 302, b"", {"Location": hub.elsewhere + path})
    elif path.startswith(f"/{hub.repo}/resolve/{COMMIT}/"):
        _give(hub, asked, path.split("/", 5)[5])
    else:
        _reply(asked, 404, b"")


def _give(hub: SmallHub, asked: BaseHTTPRequestHandler, name: str) -> None:
    body = hub.files[name]
    if name in hub.lies:
        body = body[::-1]
    begin = 0
    if (text := asked.headers.get("Range")) and not hub.no_ranges:
        begin = int(text.removeprefix("bytes=").removesuffix("-"))
    asked.send_response(206 if begin else 200)
    asked.send_header("Content-Length", str(len(body) - begin))
    asked.end_headers()
    end = len(body) if hub.cut is None else min(len(body), begin + hub.cut)
    step = 1 << 16 if hub.slow_s else max(1, end - begin)
    for at in range(begin, end, step):
        hub.sent.append(min(end, at + step) - at)
        asked.wfile.write(memoryview(body)[at : min(end, at + step)])
        time.sleep(hub.slow_s)
    asked.close_connection = end < len(body)


def _reply(
    asked: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    asked.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        asked.send_header(name, value)
    asked.end_headers()
    asked.wfile.write(body)
