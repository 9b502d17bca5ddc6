"""Texts that others have taken for SQL, for paths, for events or for names of their own."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest

from tests.attacks.bodies import GENERATING, good
from tests.attacks.frame import AttackedServer, Frame, Reply, check

IDS = (
    "' OR '1'='1",
    "'; DROP TABLE records; --",
    '"',
    "%",
    "_",
    "\\",
    "../../etc/passwd",
    "%00",
    "a" * 4000,
    "é",
)
STORED = (
    "/v1/responses/{id}",
    "/v1/responses/{id}/input_items",
    "/v1/chat/completions/{id}",
    "/v1/chat/completions/{id}/messages",
    "/v1/conversations/{id}",
    "/v1/conversations/{id}/items",
    "/v1/conversations/{id}/items/{id}",
    "/v1/trajectories/{id}",
    "/v1/models/{id}",
)
LINES = (
    "a\rb",
    "a\nb",
    "a\r\n\r\nb",
    "data: [DONE]\n\n",
    "\u2028\u2029",
    "\x00\x01\x1f\x7f",
    "\x85",
    "a\ufeffb",
)


@pytest.mark.parametrize("route", STORED)
def test_an_id_is_a_name_and_nothing_else(server: AttackedServer, route: str) -> None:
    for id_ in IDS:
        path = route.replace("{id}", quote(id_, safe=""))
        for method in ("GET", "DELETE"):
            reply = server.client.request(method, path)
            check(Reply(reply.status_code, reply.content))
            assert reply.status_code in (400, 404, 405), (path, reply.text)


def test_pages_and_filters_take_such_names_too(server: AttackedServer) -> None:
    for id_ in IDS:
        query: dict[str, Any] = {"after": id_, "model": id_, f"metadata[{id_[:60]}]": id_[:500]}
        for name, value in query.items():
            reply = server.client.get("/v1/chat/completions", params={name: value})
            check(Reply(reply.status_code, reply.content))


@pytest.mark.parametrize("route", GENERATING)
def test_such_names_as_fields(frame: Frame, route: str) -> None:
    for id_ in IDS:
        for name in ("model", "user", "cache_salt", "request_id", "rid"):
            frame.sent(route, {**good(route), name: id_[:512]})


@pytest.mark.parametrize("text", LINES)
def test_no_text_can_end_an_event_or_begin_one(frame: Frame, text: str) -> None:
    """What the model says comes out of the stream as it went in."""
    body = {"messages": [{"role": "user", "content": f"<{text}>"}], "stream": True}
    reply = frame.sent("/v1/chat/completions", body)
    events = reply.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2]]
    assert "".join(c["delta"].get("content") or "" for each in choices for c in each) == f"<{text}>"


def test_clients_may_give_their_requests_the_same_id(server: AttackedServer) -> None:
    def ask(number: int) -> str:
        body = {
            "messages": [{"role": "user", "content": f"word {number}"}],
            "request_id": "same",
            "rid": "same",
        }
        reply = server.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "same"})
        return str(reply.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(ask, range(32))) == [f"word {number}" for number in range(32)]
