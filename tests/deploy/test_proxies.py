"""A real proxy in front of a real server, with the files of deploy/: tokens pass at once, and so do ends."""

import datetime
import json
import re
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from msgspec import Struct

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.limits import Limits
from dragoman.settings import Settings
from tests.deploy.support import DEPLOY, program
from tests.support.http import HELLO, get
from tests.support.secure_socket import first_answers
from tests.support.wait import becomes

NAME = "llm.example.com"
CHAT = "/v1/chat/completions"
TEXT = "x" * 100
TRUSTING = ssl._create_unverified_context()


class ProxiedServer(Struct):
    server: str
    port: int

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"host": NAME}, verify=TRUSTING, timeout=60)

    def running(self) -> float:
        text = get(self.server, "/metrics").text
        return float(re.findall(r"^dragoman_answers_running\{.*\} (\S+)", text, re.MULTILINE)[0])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def certify(folder: Path) -> tuple[Path, Path]:
    """A certificate that nobody has signed, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return folder / "cert.pem", folder / "key.pem"


def nginx(folder: Path, port: int, server: str) -> list[str]:
    value = program("nginx", "nginx-light")
    cert, key = certify(folder)
    text = (DEPLOY / "nginx.conf").read_text()
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}").replace("127.0.0.1:8000", server)
    text = re.sub(r"ssl_certificate .*;", f"ssl_certificate {cert};", text)
    text = re.sub(r"ssl_certificate_key .*;", f"ssl_certificate_key {key};", text)
    param = "".join(
        f"{each}_temp_path {folder}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"user root; daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;"
        f"events {{}} http {{ access_log off; {param} {text} }}"
    )
    command = [value, "-p", str(folder), "-e", f"{folder}/errors", "-c", str(folder / "nginx.conf")]
    tried = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr
    return command


def caddy(folder: Path, port: int, server: str) -> list[str]:
    value = program("caddy", "caddy")
    cert, key = certify(folder)
    text = (DEPLOY / "Caddyfile").read_text()
    text = text.replace(f"{NAME} {{", f"https://:{port} {{\n\tbind 127.0.0.1\n\ttls {cert} {key}", 1)
    text = text.replace("127.0.0.1:8000", server)
    # No port for its administration, and none for redirects.
    (folder / "Caddyfile").write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text)
    return [value, "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@contextmanager
def proxied(proxy: Callable[[Path, int, str], list[str]]) -> Iterator[ProxiedServer]:
    settings = Settings(port=0, store="memory", allow_host=[NAME], limits=Limits(body_bytes=20_000))
    engine = ScriptedEngine(say(TEXT), interval=0.01)
    with background(engine, settings) as url, tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        command = proxy(folder, port, url.removeprefix("http://"))
        env = {
            "HOME": name,
            "XDG_DATA_HOME": name,
            "XDG_CONFIG_HOME": name,
            "PATH": "/usr/sbin:/usr/bin:/bin",
        }
        with subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                assert becomes(lambda: answers(port))
                yield ProxiedServer(url, port)
            finally:
                process.terminate()


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module", params=[nginx, caddy], ids=["nginx", "caddy"])
def proxy(request: pytest.FixtureRequest) -> Iterator[ProxiedServer]:
    with proxied(request.param) as running:
        yield running


def test_tokens_pass_while_the_answer_is_written(proxy: ProxiedServer) -> None:
    with (
        proxy.client() as client,
        client.stream("POST", CHAT, json={**HELLO, "stream": True}) as reply,
    ):
        events = (line for line in reply.iter_lines() if line.startswith("data: "))
        while "x" not in (json.loads(next(events)[6:])["choices"][0]["delta"].get("content") or ""):
            pass
        assert proxy.running() == 1
        assert [*events][-1] == "data: [DONE]"
    # One id from the proxy's log to the server's.
    assert not reply.headers["x-request-id"].startswith("req_")


def test_a_client_that_leaves_the_proxy_leaves_the_server(proxy: ProxiedServer) -> None:
    with (
        proxy.client() as client,
        client.stream("POST", CHAT, json={**HELLO, "stream": True}) as reply,
    ):
        pieces = reply.iter_raw()
        next(pieces)
        assert proxy.running() == 1
    assert becomes(lambda: proxy.running() == 0)


def test_a_websocket_passes(proxy: ProxiedServer) -> None:
    param = f"wss://{NAME}:{proxy.port}/v1/responses"
    text = json.dumps({"type": "response.create", "input": "hi"})
    texts = first_answers(param, text, 3, TRUSTING, host="127.0.0.1", port=proxy.port)
    assert json.loads(texts[0])["type"] == "response.created"


def test_what_is_too_large_is_told_by_the_server(proxy: ProxiedServer) -> None:
    with proxy.client() as client:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 50_000}]})
        reply = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_figures_stay_in_the_house(proxy: ProxiedServer) -> None:
    with proxy.client() as client:
        assert client.get("/metrics").status_code == 404
        assert client.get("/health").json() == {"status": "ok"}
