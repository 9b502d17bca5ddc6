"""Servers with the older transport, where the answer to a message comes on another stream."""

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dragoman.mcp import McpServerSpec, McpSession
from dragoman.mcp.transports import message_bytes
from tests.mcp.support import BOUNDS, failure_of, raw_server, with_session

END = None


class Stream:
    """One server: what it sends on its stream, and what its stream begins with."""

    def __init__(self) -> None:
        self.endpoint = "/messages"
        self.events: queue.Queue[dict[str, Any] | str | None] = queue.Queue()
        self.streams = 0

    def answer(self, message: dict[str, Any]) -> int:
        """The status; what is to be said beside it goes on the stream."""
        number, params = message.get("id"), message.get("params") or {}
        match message["method"]:
            case "initialize":
                info = {"name": "sse", "version": "1"}
                self.say(number, {"protocolVersion": "2024-11-05", "capabilities": {}, "serverInfo": info})
            case "tools/call" if params["name"] == "refuse":
                return 503
            case "tools/call" if params["name"] == "end":
                self.events.put(END)
            case "tools/call" if params["name"] == "huge":
                self.events.put("x" * (2 * message_bytes(BOUNDS)))
            case "tools/call":
                self.say(number, {"content": [{"type": "text", "text": "said"}]})
        return 202

    def say(self, number: Any, result: dict[str, Any]) -> None:
        self.events.put({"jsonrpc": "2.0", "id": number, "result": result})


class Handler(BaseHTTPRequestHandler):
    stream: Stream

    def do_GET(self) -> None:
        # Its own, so that a stream that is over does not take what is meant for the next.
        events = self.stream.events = queue.Queue()
        self.stream.streams += 1
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"event: endpoint\ndata: {self.stream.endpoint}\n\n".encode())
        while (event := events.get()) is not END:
            self.wfile.write(f"event: message\ndata: {json.dumps(event)}\n\n".encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.stream.answer(json.loads(body)))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def spec(stream: Stream) -> Iterator[McpServerSpec]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"stream": stream}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield McpServerSpec(label="old", url=f"http://127.0.0.1:{server.server_port}/sse", transport="sse")
    stream.events.put(END)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "kind", "code", "said"),
    [
        ("refuse", "http", 503, "HTTP status 503"),
        ("end", "unreachable", None, "closed the connection"),
        ("huge", "unreachable", None, "closed the connection"),
    ],
)
def test_a_bad_answer_is_a_failure_and_the_next_call_works(
    name: str, kind: str, code: int | None, said: str, stream: Stream, spec: McpServerSpec
) -> None:
    async def use(session: McpSession) -> None:
        failure = await failure_of(session.call(name, {}))
        assert (failure.kind, failure.code) == (kind, code)
        assert said in failure.message
        assert (await session.call("say", {})).text == "said"
        assert stream.streams == 2

    with_session(spec, use)


def test_messages_are_not_sent_to_another_host(stream: Stream, spec: McpServerSpec) -> None:
    with raw_server() as elsewhere:
        stream.endpoint = elsewhere.url
        with_session(spec, lambda session: failure_of(session.list_tools()))
        assert elsewhere.asked == []
