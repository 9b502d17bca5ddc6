"""The frame of every attack: it is refused, the server goes on as before, and nothing leaks.

    def test_an_attack(frame: Frame) -> None:
        error = frame.refused("/v1/chat/completions", changed("/v1/chat/completions", "n", 10**9))
        assert error["param"] == "n"

The fixture asks for the next good answer when the test is over; health and memory are looked at for all
attacks of a file together, where they are stable.
"""

import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from websockets.sync.client import connect

from tests.attacks.bodies import SOCKET, good
from tests.attacks.server import State, resident, told
from tests.support.responses import ENDS

ROOT = Path(__file__).parent.parent.parent
REFUSED = range(400, 500)
LEAK = re.compile(rb"Traceback|0x[0-9a-fA-F]{8}|/site-packages|/home/|/usr/|\.py\b|line \d+, in ")
"""What no client may read: where the server's code lies, and where in memory its objects do."""
MEMORY_MB = 16
"""What a file of attacks may leave behind."""
HEALTH_PAUSE_S = 0.02
_TIMEOUT_S = 120.0
PAUSE, RESUME = "/v1/engine/pause", "/v1/engine/resume"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Reply(msgspec.Struct):
    status: int
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """Ours, with all four keys; anything else fails. For Ollama's clients they stand apart, and
        Anthropic's have a code of errors in a place of their own."""
        result = json.loads(self.body)
        fields: dict[str, Any] = result["error"]
        if isinstance(fields, str):
            fields = {"message": result.pop("error"), **result}
        assert fields.pop("details", None) in (None, {"error_code": fields.get("code")})
        assert set(fields) == {"message", "type", "param", "code"}
        return fields


class AttackedServer:
    """A server of its own process. `key` is sent with every request."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, key: str | None) -> None:
        self.process = process
        self.url = url
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S, verify=False)
        self._headers = headers
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_TIMEOUT_S)
        self._ids: dict[str, str] = {}

    def state(self) -> State:
        """How it says it is doing."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return told(self.process.stdout)

    def memory(self) -> int:
        return resident(self.process.pid)

    def path(self, route: str) -> str:
        """A route with the id of a record that is there."""
        return route.replace("{id}", self._id(route)) if "{id}" in route else route

    def send(self, route: str, body: dict[str, Any] | bytes) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        if route == SOCKET:
            return self._over_socket(raw)
        if route == RESUME:
            self.client.post(PAUSE)
        if route == UNLOAD:
            self.client.post(LOAD, json=good(LOAD))
        reply = self._posted(self.path(route), raw)
        if route in (PAUSE, RESUME):
            # Whatever became of it, the next good request is not to wait for ever.
            self.client.post(RESUME)
        return reply

    def _posted(self, path: str, raw: bytes) -> Reply:
        """By the standard library's client: attacks are many, and httpx takes more time than the server."""
        headers = {"content-type": "application/json", **self._headers}
        try:
            self._connection.request("POST", path, raw, headers)
            http_response = self._connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # The server has closed it after the last reply, as it may.
            self._connection.close()
            self._connection.request("POST", path, raw, headers)
            http_response = self._connection.getresponse()
        return Reply(http_response.status, http_response.read())

    def _over_socket(self, raw: bytes) -> Reply:
        """The last event of the answer; that of an error has its status."""
        message = raw.replace(b"{", b'{"type": "response.create", ', 1) if raw[:1] == b"{" else raw
        url = self.url.replace("http", "ws", 1) + "/v1/responses"
        with connect(url, additional_headers=self._headers, max_size=None) as socket:
            # As bytes, which need not be UTF-8: what a message is, the server says.
            socket.send(message)
            while True:
                last = socket.recv(timeout=_TIMEOUT_S)
                event = json.loads(last)
                if event["type"] in (*ENDS, "error"):
                    text = last.encode() if isinstance(last, str) else last
                    return Reply(event.get("status", 200), text)

    def _id(self, route: str) -> str:
        kind = route.split("/")[2]
        if kind not in self._ids:
            self._ids[kind] = self._made(kind)
        return self._ids[kind]

    def _made(self, kind: str) -> str:
        """A new record of a kind; a trajectory has the id of its answer."""
        route, more = {
            "responses": ("/v1/responses", {"store": True}),
            "conversations": ("/v1/conversations", {}),
            "uploads": ("/v1/uploads", {}),
            "batches": ("/v1/batches", {}),
            "messages": ("/v1/messages/batches", {}),
            "chat": ("/v1/chat/completions", {"store": True}),
            "trajectories": ("/v1/chat/completions", {"store": True, "return_token_ids": True}),
        }[kind]
        reply = self.send(route, {**good(route), **more})
        assert reply.status == 200, reply.body
        return str(json.loads(reply.body)["id"])


class Frame:
    """One test's attacks on a server."""

    def __init__(self, server: AttackedServer) -> None:
        self.server = server

    def refused(
        self, route: str, body: dict[str, Any] | bytes, status: Container[int] = REFUSED
    ) -> dict[str, Any]:
        """Sends what must be refused, and gives the error."""
        reply = self.sent(route, body)
        assert reply.status in status, (reply.status, reply.body[:2000])
        return reply.error

    def sent(self, route: str, body: dict[str, Any] | bytes) -> Reply:
        """Sends what may be answered or refused; a failure of the server is neither."""
        reply = self.server.send(route, body)
        check(reply)
        return reply

    def over(self) -> None:
        """The server answers the next one as if nothing had been."""
        reply = self.server.send("/v1/chat/completions", good("/v1/chat/completions"))
        assert reply.status == 200, reply.body
        assert json.loads(reply.body)["choices"][0]["message"]["content"] == "hi"


def check(reply: Reply) -> None:
    """What holds for every reply to whatever was sent."""
    assert reply.status < 500, (reply.status, reply.body[:2000])
    if reply.status >= 400:
        leak = LEAK.search(reply.body)
        assert leak is None, reply.body[:2000]
        assert reply.error["message"]


@contextmanager
def attacked(key: str | None = None, **settings: Any) -> Iterator[AttackedServer]:
    """A server with these settings while the block runs; `interval` is the pace of its model.

    A request that is not refused is answered with what the last message says.
    """
    log_level = settings.pop("log_level", "error")
    fields = {"log_level": log_level, **settings, **({"api_key": [key]} if key else {})}
    command = [sys.executable, "-m", "tests.attacks.server", json.dumps(fields)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "The server did not start."
            server = AttackedServer(process, url, key)
            with server.client:
                yield server
        finally:
            process.terminate()


@contextmanager
def healthy(server: AttackedServer) -> Iterator[Callable[[], int]]:
    """Asks for `/health` all the while, and fails if it is refused even once. Gives how often it answered."""
    over, answered = threading.Event(), [0]
    wrong: list[str] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=_TIMEOUT_S, verify=False) as client:
            while not over.wait(HEALTH_PAUSE_S) and not wrong:
                try:
                    reply = client.get("/health")
                except httpx.HTTPError as error:
                    wrong.append(repr(error))
                else:
                    wrong.extend([] if reply.status_code == 200 else [reply.text])
                    answered[0] += 1

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield lambda: answered[0]
    finally:
        over.set()
        thread.join()
    assert not wrong, wrong
