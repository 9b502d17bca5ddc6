"""HTTPS: what is spoken, certificates that change, and who does not speak it."""

import asyncio
import logging
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.client import Client
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import SettingsError
from dragoman.http.connection import tls
from dragoman.http.connection.tls import Certificate
from dragoman.http.server import aserve, background
from dragoman.settings import Settings
from tests.support.certificate import make_certificate, trusting
from tests.support.http import HELLO, chunks
from tests.support.secure_socket import first_answers
from tests.support.wait import becomes

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def url(pair: tuple[str, str]) -> Iterator[str]:
    settings = Settings(port=0, store="memory", tls_cert=pair[0], tls_key=pair[1])
    with background(ScriptedEngine(say("hello")), settings) as text:
        yield text


def place(url: str) -> tuple[str, int]:
    host, _, port = url.partition("://")[2].partition(":")
    return host, int(port)


def test_answers_come_whole_and_as_streams(url: str, pair: tuple[str, str]) -> None:
    assert url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=url, verify=trusting(pair[0])) as client:
        whole = client.post(CHAT, json=HELLO).json()
        assert whole["choices"][0]["message"]["content"] == "hello"
        rows = chunks(client.post(CHAT, json={**HELLO, "stream": True}))
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in rows) == "hello"


def test_a_large_body_and_a_large_reply_pass(url: str, pair: tuple[str, str]) -> None:
    with httpx.Client(base_url=url, verify=trusting(pair[0])) as client:
        reply = client.post("/tokenize", json={"prompt": "x" * 300_000})
        assert reply.json()["count"] == 300_000


def test_a_websocket_over_tls(url: str, pair: tuple[str, str]) -> None:
    address = url.replace("https", "wss") + "/v1/responses"
    text = '{"type": "response.create", "input": "hi"}'
    (first,) = first_answers(address, text, 1, trusting(pair[0]))
    assert "response.created" in first


def test_our_own_client_speaks_it(url: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", pair[0])
    with Client(url) as client:
        assert [model["id"] for model in client.models()] == ["scripted"]


def test_plain_http_is_told_what_to_do(url: str) -> None:
    reply = httpx.post(url.replace("https", "http") + CHAT, json=HELLO)
    assert reply.status_code == 400
    assert "https://" in reply.text


@pytest.mark.parametrize("offered", [[], ["http/1.1"], ["h2", "http/1.1"]])
def test_http_1_1_is_agreed_on(url: str, pair: tuple[str, str], offered: list[str]) -> None:
    context = trusting(pair[0])
    if offered:
        context.set_alpn_protocols(offered)
    with (
        socket.create_connection(place(url)) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as s,
    ):
        assert s.selected_alpn_protocol() == ("http/1.1" if offered else None)
        assert s.version() in ("TLSv1.2", "TLSv1.3")


@pytest.mark.filterwarnings("ignore:ssl")
def test_what_is_older_than_tls_1_2_is_refused(pair: tuple[str, str]) -> None:
    context = Certificate(*pair).context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION


def test_another_certificate_is_taken_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "POLL_INTERVAL_S", 0.0)
    cert, key = make_certificate(tmp_path)
    new_cert, new_key = make_certificate(tmp_path, "new")
    old, new = trusting(cert), trusting(new_cert)
    settings = Settings(port=0, store="memory", tls_cert=cert, tls_key=key)
    with background(ScriptedEngine(say("hello")), settings) as url, httpx.Client(verify=old) as client:
        assert client.get(f"{url}/health").status_code == 200
        with caplog.at_level(logging.ERROR, "dragoman"):
            os.replace(new_cert, cert)
            # Its key is not there yet: the old pair is still what there is.
            assert httpx.get(f"{url}/health", verify=old).status_code == 200
            assert "Certificate not reloaded" in caplog.text
        os.replace(new_key, key)
        assert httpx.get(f"{url}/health", verify=new).status_code == 200
        # A connection that was there goes on.
        assert client.get(f"{url}/health").status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", verify=old)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tls_cert": "/nowhere.pem"}, "Cannot read"),
        ({"tls_key": "/nowhere.key"}, "Cannot read"),
        ({"tls_key": None}, "PEM"),
    ],
)
def test_what_cannot_be_used_is_said_at_the_start(
    pair: tuple[str, str], change: dict[str, Any], said: str
) -> None:
    fields = {"tls_cert": pair[0], "tls_key": pair[1], **change}
    with pytest.raises(SettingsError, match=said), background(ScriptedEngine(say("hi")), port=0, **fields):
        pass


def test_the_key_of_another_certificate_is_said(tmp_path: Path, pair: tuple[str, str]) -> None:
    other = make_certificate(tmp_path, "other")[1]
    with pytest.raises(SettingsError, match="does not match"):
        Certificate(pair[0], other)


def test_a_key_with_a_password_does_not_ask_for_it(tmp_path: Path, pair: tuple[str, str]) -> None:
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", pair[1], "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(SettingsError, match="without a password"):
        Certificate(pair[0], str(locked))


def test_a_program_with_a_loop_of_its_own_may_serve_it_too(pair: tuple[str, str]) -> None:
    """That of asyncio, whose TLS is another one."""
    items: list[httpx.Response] = []

    async def serve_once() -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            aserve(
                ScriptedEngine(say("hello")),
                Settings(port=0, store="memory", tls_cert=pair[0], tls_key=pair[1]),
                on_ready=ready.set_result,
            )
        )
        url = await ready
        async with httpx.AsyncClient(verify=trusting(pair[0])) as client:
            items.append(await client.post(url + CHAT, json=HELLO))
            items.append(await client.get(url.replace("https", "http") + "/health"))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve_once()))
    thread.start()
    thread.join(60)
    assert [reply.status_code for reply in items] == [200, 400]


PIECES = (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00", b"\x16" * 400, b"GET / HT", b"\x80\x2e\x01")


def test_nothing_is_left_of_clients_that_leave_in_the_middle(pair: tuple[str, str]) -> None:
    settings = Settings(port=0, store="memory", tls_cert=pair[0], tls_key=pair[1], header_timeout=0.1)
    with background(ScriptedEngine(say("hello")), settings) as url:
        assert httpx.get(f"{url}/health", verify=trusting(pair[0])).status_code == 200
        for leaves in (True, False, True):
            # The first round is for what is opened once.
            there = len(os.listdir("/proc/self/fd"))
            for first in PIECES:
                with socket.create_connection(place(url)) as raw:
                    raw.sendall(first)
                    raw.settimeout(30)
                    while not leaves and raw.recv(4096):
                        pass
        assert becomes(lambda: len(os.listdir("/proc/self/fd")) <= there)
        assert httpx.get(f"{url}/health", verify=trusting(pair[0])).status_code == 200
