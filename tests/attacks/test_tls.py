"""Clients that take their time with a handshake, come in crowds, or do not speak TLS at all."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.attacks.doors import KEY
from tests.attacks.frame import AttackedServer, attacked, healthy
from tests.support.certificate import make_certificate
from tests.support.wait import becomes

MOST = 24
SOON_S = 0.5
HALF_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    cert, key = make_certificate(tmp_path_factory.mktemp("tls"))
    limits = {"connections": MOST}
    with attacked(KEY, tls_cert=cert, tls_key=key, header_timeout=SOON_S, limits=limits) as server:
        yield server


def place(server: AttackedServer) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("https://").partition(":")
    return host, int(port)


def came(server: AttackedServer) -> socket.socket:
    return socket.create_connection(place(server), timeout=60)


def over(raw: socket.socket) -> bool:
    """Reads to the end, which must come."""
    try:
        while raw.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("first", [b"", b"\x16", HALF_HELLO, b"GET / HTTP/1.1\r\n"], ids=repr)
def test_a_crowd_that_never_ends_its_handshake_keeps_nobody_out(sealed: AttackedServer, first: bytes) -> None:
    with ExitStack() as crowd, healthy(sealed) as answered:
        for _ in range(4 * MOST):
            raw = crowd.enter_context(came(sealed))
            raw.send(first)
        assert sealed.state().descriptors < 4 * MOST
        assert sealed.client.get("/v1/models").status_code == 200
        assert becomes(lambda: answered() > 2)


@pytest.mark.parametrize("first", [b"", HALF_HELLO], ids=["silent", "half"])
def test_a_handshake_has_a_time(sealed: AttackedServer, first: bytes) -> None:
    with came(sealed) as raw:
        raw.send(first)
        assert over(raw)


def test_a_handshake_byte_by_byte_has_the_same_time(sealed: AttackedServer) -> None:
    with came(sealed) as raw:
        raw.settimeout(0.05)
        for byte in HALF_HELLO + b"\x00" * 500:
            try:
                raw.send(bytes([byte]))
                if not raw.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return
        pytest.fail("It went on for ever.")


@pytest.mark.parametrize(
    "noise", [b"\x16\x03\x01\xff\xff" + b"\xff" * 2000, b"\x16" * 70_000, b"\x80" * 70_000, b"\x00"], ids=len
)
def test_noise_is_the_end_of_a_connection(sealed: AttackedServer, noise: bytes) -> None:
    with came(sealed) as raw:
        try:
            raw.sendall(noise)
        except OSError:
            return
        assert over(raw)


def test_a_client_that_does_not_read_the_hint_is_cut_off(sealed: AttackedServer) -> None:
    with came(sealed) as raw:
        raw.settimeout(1)
        with pytest.raises(OSError):
            for _ in range(10_000):
                raw.sendall(b"GET /health HTTP/1.1\r\n" * 1000)


def test_tls_1_2_is_spoken_too(sealed: AttackedServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with context.wrap_socket(came(sealed)) as talk:
        assert talk.version() == "TLSv1.2"
        talk.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert talk.recv(4096).startswith(b"HTTP/1.1 200")


def test_many_who_leave_in_a_handshake_leave_nothing(sealed: AttackedServer) -> None:
    assert sealed.client.get("/v1/models").status_code == 200
    before = sealed.state()
    for number in range(200):
        with came(sealed) as raw:
            raw.send(HALF_HELLO if number % 2 else b"")
    assert becomes(lambda: sealed.state().descriptors <= before.descriptors + 2)
    assert becomes(lambda: sealed.state().tasks <= before.tasks + 1)
