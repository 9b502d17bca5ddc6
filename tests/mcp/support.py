"""Sessions with MCP servers, and an HTTP server that does to a message whatever a test wants."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dragoman.limits import Limits
from dragoman.mcp import McpFailure, McpLimits, McpServers, McpServerSpec, McpSession

T = TypeVar("T")
NEWEST = "2026-07-28"
"""The revision without a handshake."""
LISTED = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""What that revision wants beside a list."""
TOOL = {
    "name": "say",
    "inputSchema": {
        "type": "object",
        "properties": {"who": {"type": "string", "x-mcp-header": "Who"}},
    },
}
SERVERS = Path(__file__).parent / "servers"
# Long, so that a busy machine does not run into it; tests that want a timeout have a short one.
BOUNDS = McpLimits(connect_s=60, call_s=60, limits=Limits(media_bytes=1 << 20))


def process(*arguments: str, env: dict[str, str] | None = None) -> McpServerSpec:
    """`process("raw.py", "silent")` is a server of the folder `servers`."""
    file, *rest = arguments
    return McpServerSpec(
        label="raw", command=sys.executable, args=(str(SERVERS / file), *rest), env=env or {}
    )


def with_session(
    spec: McpServerSpec,
    use: Callable[[McpSession], Awaitable[T]],
    bounds: McpLimits = BOUNDS,
    shared: bool = True,
) -> T:
    """What `use` returns. Whatever happened, no task is left when all is closed."""

    async def run() -> T:
        servers = McpServers({spec.label: spec} if shared else {}, bounds=bounds)
        try:
            async with servers.session(spec) as session:
                return await use(session)
        finally:
            await servers.close()
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(run())


async def failure_of(asked: Awaitable[object]) -> McpFailure:
    with pytest.raises(McpFailure) as caught:
        await asked
    return caught.value


@contextmanager
def sdk_server(kind: str) -> Iterator[str]:
    """A process with the good server; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SERVERS / "tools.py"), kind, str(port)]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not listens(port):
            assert started.poll() is None
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}/{'mcp' if kind == 'http' else 'sse'}"
    finally:
        started.kill()
        started.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class RawServer:
    """Speaks the handshake of an older revision; `on_call` answers calls by the name of the tool."""

    def __init__(self) -> None:
        self.revision = "2025-06-18"
        self.sessions: set[str] = set()
        self.tools: list[dict[str, Any]] = [TOOL]
        self.asked: list[str] = []
        self.params: list[dict[str, Any]] = []
        """Of the calls."""
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        self.on_call: dict[str, Callable[[Any, int], None]] = {}
        self.refuses_all: int | None = None
        self.refusal_headers: dict[str, str] = {}
        self.events = b""
        """What its stream has to say, each time that it is opened."""
        self.url = ""

    def answer(self, handler: "Handler", message: dict[str, Any]) -> None:
        method, number = message["method"], message.get("id")
        self.asked.append(method)
        self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        session = handler.headers.get("mcp-session-id")
        if self.refuses_all is not None:
            handler.reply(self.refuses_all, b"no", "text/plain", self.refusal_headers)
        elif session is not None and session not in self.sessions:
            handler.rpc_error(404, None, -32600, "Session not found")
        elif method == "initialize":
            handler.result(number, self.welcome(), {"mcp-session-id": self.new_session()})
        elif number is None:
            handler.reply(202)
        elif method == "tools/list":
            handler.result(number, {"tools": self.tools, **(LISTED if self.revision == NEWEST else {})})
        elif method == "server/discover" and self.revision == NEWEST:
            handler.result(number, self.introduction())
        elif method == "tools/call":
            name = message["params"]["name"]
            self.params.append(message["params"])
            if name in self.on_call:
                self.on_call[name](handler, number)
            else:
                handler.text(number, f"{name} was called")
        else:
            handler.rpc_error(400, number, -32601, "Method not found")

    def welcome(self) -> dict[str, Any]:
        info = {"name": "raw", "version": "1"}
        return {"protocolVersion": self.revision, "capabilities": {"tools": {}}, "serverInfo": info}

    def introduction(self) -> dict[str, Any]:
        return {"supportedVersions": [NEWEST], "capabilities": {"tools": {}}, **LISTED}

    def new_session(self) -> str:
        name = f"session-{len(self.sessions)}-{id(self)}"
        self.sessions.add(name)
        return name


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    raw: RawServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.raw.answer(self, json.loads(body))

    def do_GET(self) -> None:
        self.raw.asked.append("GET")
        if self.raw.events:
            self.reply(200, self.raw.events, "text/event-stream")
        else:
            self.reply(405)

    def do_DELETE(self) -> None:
        self.raw.asked.append("DELETE")
        self.reply(200)

    def reply(
        self,
        status: int,
        body: bytes = b"",
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        all_headers = {"content-type": kind, "content-length": str(len(body)), **(headers or {})}
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def result(self, number: Any, result: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.reply(
            200, json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode(), headers=headers
        )

    def text(self, number: int, text: str) -> None:
        complete = {"resultType": "complete"} if self.raw.revision == NEWEST else {}
        self.result(number, {"content": [{"type": "text", "text": text}], **complete})

    def rpc_error(self, status: int, number: Any, code: int, message: str) -> None:
        error = {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
        self.reply(status, json.dumps(error).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def raw_server() -> Iterator[RawServer]:
    raw = RawServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"raw": raw}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    raw.url = f"http://127.0.0.1:{server.server_port}/mcp"
    try:
        yield raw
    finally:
        raw.released.set()
        server.shutdown()
        server.server_close()
