"""Files are fetched where the operator allows it, from the address that was looked at, within bounds."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from dragoman import outbound
from dragoman.errors import BadRequest, SettingsError
from dragoman.media import fetch
from dragoman.media.fetch import MediaFetcher
from tests.attacks.canary import canary
from tests.support.certificate import make_certificate, trusting

Answer = Callable[[BaseHTTPRequestHandler], None]
OWNER = "somebody"


class FileServer:
    """Answers each path as it is told to, and remembers what it was asked."""

    def __init__(self, host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        self.heard: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.heard.append({name.lower(): value for name, value in self.headers.items()})
                outer.answers.get(self.path, a_file)(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer((host, 0), Handler)
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.host, self.port = host, int(self.server.server_address[1])

    def url(self, path: str = "/a", host: str | None = None, scheme: str = "http") -> str:
        return f"{scheme}://{host or self.host}:{self.port}{path}"


@contextmanager
def file_server(host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> Iterator[FileServer]:
    server = FileServer(host, context)
    thread = threading.Thread(target=server.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.server.shutdown()
        server.server.server_close()
        thread.join()


@pytest.fixture
def files() -> Iterator[FileServer]:
    with file_server() as server:
        yield server


def plain(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"content_length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def a_file(handler: BaseHTTPRequestHandler) -> None:
    plain(handler, b"a file")


def sent_on(where: str) -> Answer:
    return lambda handler: plain(handler, b"", 302, location=where)


def fetched(url: str, *allow: str, most: int = 1000) -> bytes:
    return asyncio.run(MediaFetcher(allow).fetch(OWNER, url, most, "messages[0].content[0].image_url.url"))


def refused(url: str, *allow: str, most: int = 1000) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        fetched(url, *allow, most=most)
    assert caught.value.param == "messages[0].content[0].image_url.url"
    return caught.value


def looked_up(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Each question about a name gets the next of these answers, the last again and again."""
    asked: list[str] = []

    def getaddrinfo(host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:
        asked.append(host)
        number = answers[min(len(asked), len(answers)) - 1]
        family = socket.AF_INET6 if ":" in number else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (number, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def call_public(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    """There is no public address on this machine: this one stands for one."""
    real = outbound.is_public
    monkeypatch.setattr(outbound, "is_public", lambda one: one == ip_address(number) or real(one))


def test_what_the_operator_named_is_fetched(files: FileServer) -> None:
    assert fetched(files.url(), f"http://127.0.0.1:{files.port}") == b"a file"


def test_nothing_is_fetched_where_nobody_is_allowed(files: FileServer) -> None:
    error = refused(files.url())
    assert error.code == "media_host_not_allowed" and "does not fetch files" in error.message
    assert not files.heard


@pytest.mark.parametrize("allow", ["127.0.0.1:*", "http://127.0.0.1", "http://localhost:*", "http://*"])
def test_what_is_allowed_is_this_very_host_port_and_scheme(files: FileServer, allow: str) -> None:
    assert refused(files.url(), allow).code == "media_host_not_allowed"
    assert not files.heard


@pytest.mark.parametrize(
    "url",
    [
        "https://allowed.example@127.0.0.1/a",
        "https://allowed.example\\@127.0.0.1/a",
        "https://127.0.0.1#@allowed.example/a",
        "https://allowed.example:99999999/a",
        "https://allowed.exämple/a",
        "https://allowed.example/a b",
        "ftp://allowed.example/a",
    ],
)
def test_an_address_that_could_be_read_in_two_ways_is_none(url: str) -> None:
    assert refused(url, "allowed.example").code == "invalid_value"


@pytest.mark.parametrize(
    "number",
    ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1", "fe80::1", "64:ff9b::7f00:1"],
)
def test_a_name_for_a_private_address_is_not_asked(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    with canary() as bird:
        looked_up(monkeypatch, number)
        error = refused(bird.url("allowed.example"), f"http://allowed.example:{bird.port}")
        assert error.code == "media_not_fetched" and "cannot be reached" in error.message
        assert not bird.sings


def test_a_name_that_stands_for_another_address_later_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with file_server("127.0.0.2") as files:
        asked = looked_up(monkeypatch, "127.0.0.2", "127.0.0.1")
        call_public(monkeypatch, "127.0.0.2")
        assert fetched(files.url(host="allowed.example"), "http://allowed.example:*") == b"a file"
        assert asked == ["allowed.example"]
        assert files.heard[0]["host"] == f"allowed.example:{files.port}"


def test_nothing_of_the_client_goes_along(files: FileServer) -> None:
    fetched(files.url(), "http://127.0.0.1:*")
    assert set(files.heard[0]) == {"host", "user-agent", "accept", "accept-encoding", "connection"}


@pytest.mark.parametrize(
    "where",
    ["http://localhost:{port}/x", "http://169.254.169.254/latest", "http://[::1]:{port}/x", "file:///x"],
)
def test_one_is_not_sent_on_to_where_one_may_not_go(files: FileServer, where: str) -> None:
    with canary() as bird:
        files.answers["/a"] = sent_on(where.format(port=bird.port))
        error = refused(files.url(), f"http://127.0.0.1:{files.port}", "*")
        assert error.code == "media_not_fetched" and "not allowed" in error.message
        assert not bird.sings


def test_one_is_sent_on_to_where_one_may_go(files: FileServer) -> None:
    files.answers["/a"] = sent_on("/b")
    assert fetched(files.url(), "http://127.0.0.1:*") == b"a file"


def test_one_is_not_sent_on_for_ever(files: FileServer) -> None:
    files.answers["/a"] = sent_on("/a")
    assert "more than 3 times" in refused(files.url(), "http://127.0.0.1:*").message
    assert len(files.heard) == 4


def test_a_file_that_is_too_large_is_cut_off(files: FileServer) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(bytes(65536))
        except OSError:
            pass

    files.answers["/endless"] = endless
    files.answers["/long"] = lambda handler: plain(handler, b"x", content_length="1001")
    for path in ("/endless", "/long"):
        assert "larger than 1000 bytes" in refused(files.url(path), "http://127.0.0.1:*").message


def test_a_file_that_comes_too_slowly_is_given_up(files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not over.wait(0.02):
            try:
                handler.wfile.write(b".")
            except OSError:
                return

    files.answers["/a"] = slow
    monkeypatch.setattr(fetch, "FETCH_S", 0.3)
    try:
        assert "takes longer" in refused(files.url(), "http://127.0.0.1:*", most=10**9).message
    finally:
        over.set()


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [(404, {}, "status 404"), (500, {}, "status 500"), (200, {"content_encoding": "gzip"}, "compressed")],
)
def test_another_answer_is_told_by_its_number(
    files: FileServer, status: int, headers: dict[str, str], words: str
) -> None:
    files.answers["/a"] = lambda handler: plain(handler, b"secret of the host", status, **headers)
    message = refused(files.url(), "http://127.0.0.1:*").message
    assert words in message and "secret" not in message


def test_a_host_that_is_not_there_cannot_be_reached() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert "cannot be reached" in refused(f"http://127.0.0.1:{port}/a", "http://127.0.0.1:*").message


def test_the_certificate_is_that_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    monkeypatch.setattr(fetch, "_trusted", lambda: trusting(cert))
    with file_server("127.0.0.2", context) as files:
        looked_up(monkeypatch, "127.0.0.2")
        call_public(monkeypatch, "127.0.0.2")
        assert fetched(files.url(host="localhost", scheme="https"), "localhost:*") == b"a file"
        url = files.url(host="other.example", scheme="https")
        assert "cannot be reached" in refused(url, "other.example:*").message


@pytest.mark.parametrize("entry", ["", "https://", "a b", "ftp://a", "a:b", "http://a/path", "*.example"])
def test_an_entry_that_could_never_match_is_a_slip(entry: str) -> None:
    with pytest.raises(SettingsError, match="allow_media_host"):
        MediaFetcher([entry])


def test_few_are_fetched_at_the_same_time(files: FileServer) -> None:
    """Of each key half of all; the others wait until one is done."""
    arrived, go_on = threading.Semaphore(0), threading.Event()

    def waits(handler: BaseHTTPRequestHandler) -> None:
        arrived.release()
        go_on.wait(30)
        plain(handler, b"done")

    files.answers["/a"] = waits

    async def many() -> list[bytes]:
        fetcher = MediaFetcher(["http://127.0.0.1:*"])
        asking = [asyncio.create_task(fetcher.fetch(OWNER, files.url(), 100, "x")) for _ in range(12)]
        for _ in range(fetch.AT_ONCE // 2):
            await asyncio.to_thread(arrived.acquire)
        assert len(files.heard) == fetch.AT_ONCE // 2
        other = asyncio.create_task(fetcher.fetch("another", files.url("/b"), 100, "x"))
        assert await other == b"a file"
        go_on.set()
        return await asyncio.gather(*asking)

    assert asyncio.run(many()) == [b"done"] * 12
