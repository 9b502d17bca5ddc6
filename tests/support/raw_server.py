"""A server that says bytes as they are told to it, whatever HTTP thinks of them."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

from msgspec import Struct, field

SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
    b"x-request-id: req_raw\r\nx-ratelimit-remaining-requests: 7\r\n\r\n"
)
HANG = None
"""In a script: say nothing more until the client has hung up."""

Script: TypeAlias = Sequence[bytes | None]


class RawServer(Struct):
    """`scripts` are what to say to one connection after the other; the last one stays."""

    url: str = ""
    heard: list[bytes] = field(default_factory=list)
    """Head and body of every request."""
    left: threading.Event = field(default_factory=threading.Event)
    """A client has hung up before the server had said all."""


def reply(status: int, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@contextmanager
def raw_server(*scripts: Script) -> Iterator[RawServer]:
    server, listener = RawServer(), socket.create_server(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=_serve, args=(listener, server, scripts))
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _serve(listener: socket.socket, server: RawServer, scripts: Sequence[Script]) -> None:
    number = 0
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                _answer(connection, server, scripts[min(number, len(scripts) - 1)])
            number += 1


def _answer(connection: socket.socket, server: RawServer, script: Script) -> None:
    try:
        server.heard.append(_request(connection))
        for part in script:
            if part is HANG:
                _more(connection.recv)
            else:
                connection.sendall(part)
    except ConnectionError:
        server.left.set()


def _request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(connection.recv)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(l.split(b":")[1]) for l in head.lower().split(b"\r\n") if l.startswith(b"content-length")), 0
    )
    while len(body) < length:
        body += _more(connection.recv)
    return head + b"\r\n\r\n" + body


def _more(receive: Callable[[int], bytes]) -> bytes:
    data = receive(65536)
    if not data:
        raise ConnectionError
    return data
