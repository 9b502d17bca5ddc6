"""A server of the standard library that speaks just enough of the API, and remembers what it was asked."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.default_weights import default_model
from tests.test_logs import restored

__all__ = ["restored"]

WORDS = ["A ", "dragoman ", "interprets\u2028", "."]


class Fake:
    """What the server says next, and what it heard."""

    def __init__(self) -> None:
        self.words = WORDS
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.refuses: set[str] = set()
        self.breaks_after: int | None = None
        self.fails_with: str | None = None
        self.is_dragoman = True
        self.tells_usage = True
        self.joined = 1
        """Tokens of an event."""
        self.url = ""

    def error(self, body: dict[str, Any]) -> str | None:
        field = next((name for name in body if name in self.refuses), None)
        return f"Unknown field {field}." if field else None

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        chat = "messages" in body
        words = self.words[: body.get("max_tokens", 99)]
        for offset in range(0, len(words), self.joined):
            word = "".join(words[offset : offset + self.joined])
            if self.breaks_after == offset:
                yield {"error": {"message": self.fails_with}} if self.fails_with else {}
                return
            yield {"choices": [{"index": 0, **({"delta": {"content": word}} if chat else {"text": word})}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        count = min(len(self.words), body.get("max_tokens", 99))
        cached = {"cached_tokens": 3}
        if not self.tells_usage:
            return
        yield {
            "choices": [],
            "usage": {"prompt_tokens": 7, "completion_tokens": count, "prompt_tokens_details": cached},
        }


def handler_of(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def reply(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                owner = "dragoman" if fake.is_dragoman else "somebody"
                self.reply(200, {"data": [{"id": "fake-1", "max_model_len": 512, "owned_by": owner}]})
            else:
                self.reply(404, {"error": {"message": "no such route"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.asked.append(body)
            fake.keys.append(self.headers.get("Authorization"))
            if error := fake.error(body):
                self.reply(400, {"error": {"message": error}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in fake.events(body):
                if not event:
                    self.close_connection = True
                    return
                self.chunk(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
            self.chunk(b": bye\n\ndata: [DONE]\n\n")
            self.chunk(b"")

        def chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    return Handler


@pytest.fixture
def fake() -> Iterator[Fake]:
    state = Fake()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(state))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, keys or colours of the person who runs the tests; nobody on the usual port."""
    monkeypatch.chdir(tmp_path)
    for name in ("DRAGOMAN_API_KEY", "OPENAI_API_KEY", "DRAGOMAN_CONFIG", "DRAGOMAN_LOG_LEVEL", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def weights() -> Path:
    return default_model()
