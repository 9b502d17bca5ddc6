"""Every API names the fields that its clients know, and has a body of its own, wherever an error arises."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from dragoman.api.openapi import Operation, document
from dragoman.api.reply import format_error, to_dragoman_error
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import CONVERSATION, DragomanError
from dragoman.http.app_state import AppState
from dragoman.http.exchange import Exchange
from dragoman.http.routes import table
from dragoman.http.routes.table import Api
from dragoman.limits import Limits
from tests.http.conftest import RunningServer, Serve
from tests.support.http import post, refusal

LONG = "x" * 5000
HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/chat/completions", {"messages": [HI], "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("/v1/completions", {"prompt": "x", "logprobs": 99}, "logprobs"),
    ],
)
def test_an_error_names_the_clients_own_field(
    parrot: RunningServer, path: str, body: dict[str, Any], field: str
) -> None:
    assert refusal(post(parrot.url, path, body)) == (400, field)


class Upside:
    """Another envelope, and another word for the conversation."""

    def status(self, error: DragomanError) -> int:
        return error.status

    def body(self, error: DragomanError) -> dict[str, Any]:
        message, field = format_error(error, {CONVERSATION: "turns"})
        return {"type": "error", "error": {"type": error.type, "message": message, "at": field}}

    def event(self, error: Exception) -> bytes:
        return b"event: error\ndata: " + json.dumps(self.body(to_dragoman_error(error))).encode() + b"\n\n"


async def answer(host: AppState, exchange: Exchange) -> None:
    result, size = await exchange.read(json.loads)
    await exchange.answer(size, lambda: result)


async def broken(host: AppState, exchange: Exchange) -> None:
    await exchange.start_stream(b"data: {}\n\n")
    raise ValueError("of somebody else")


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> Iterator[str]:
    """A server with one more API, and keys."""
    api = Api(
        "/v1/upside",
        Upside(),
        computed={"/v1/upside": answer, "/v1/upside/broken": broken},
        operations=(Operation("post", "/v1/upside", "Nothing", error={"type": "string"}),),
    )
    monkeypatch.setattr(table, "APIS", (api, *table.APIS))
    yield serve(ScriptedEngine(say("hi")), api_key=["k"], limits=Limits(body_bytes=100))


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", "/v1/upside", {"authorization": "no"}, b"{}", 401),
        ("GET", "/v1/upside", {}, b"", 405),
        ("GET", "/v1/upside/nothing", {}, b"", 404),
        ("POST", "/v1/upside", {}, b" " * 101, 413),
        ("POST", "/v1/upside", {"content-type": "text/plain"}, b"x", 415),
        ("POST", "/v1/upside", {"host": "elsewhere"}, b"{}", 403),
        ("POST", "/v1/upside", {}, b"{", 500),
    ],
)
def test_another_apis_envelope_is_there_before_its_handler(
    other: str, method: str, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    fields = {"authorization": "Bearer k", "content-type": "application/json", **headers}
    reply = httpx.request(method, other + path, headers=fields, content=body)
    assert (reply.status_code, reply.json()["type"]) == (status, "error")


def test_another_apis_envelope_ends_its_stream(other: str) -> None:
    reply = httpx.post(f"{other}/v1/upside/broken", headers={"authorization": "Bearer k"}, json={})
    assert reply.text.startswith('data: {}\n\nevent: error\ndata: {"type": "error", "error"')


def test_another_apis_envelope_refuses_bytes_that_are_no_request(other: str) -> None:
    address = urlsplit(other)
    with socket.create_connection((address.hostname or "", address.port or 0)) as link:
        link.sendall(b"GET /v1/upside?x HTTP/1.1\r\nhost: localhost\r\na b: c\r\n\r\n")
        data = link.makefile("rb").read()
    assert b'{"type":"error"' in data


def test_another_apis_envelope_refuses_a_socket(other: str) -> None:
    with pytest.raises(InvalidStatus) as caught, connect(f"{other.replace('http', 'ws', 1)}/v1/upside"):
        pass
    assert json.loads(caught.value.response.body or b"")["type"] == "error"


def test_another_apis_routes_are_described(other: str) -> None:
    paths = document("1", table.operations())["paths"]
    result = paths["/v1/upside"]["post"]["responses"]["default"]["content"]["application/json"]
    assert result["schema"] == {"type": "string"}
    assert "/v1/chat/completions" in paths


@pytest.mark.parametrize("path", ["/v1/upsidedown", "/v1/nothing", "/v1/responses/none"])
def test_other_paths_keep_theirs(other: str, path: str) -> None:
    reply = httpx.get(other + path, headers={"authorization": "Bearer k"})
    assert (reply.status_code, set(reply.json()["error"])) == (404, {"message", "type", "param", "code"})
