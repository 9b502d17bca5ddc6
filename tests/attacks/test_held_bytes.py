"""What is held for clients: bodies that do not end, and replies that nobody reads, within one budget each."""

import json
import select
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.attacks.frame import AttackedServer, attacked, healthy
from tests.attacks.raw_messages import HOST, JSON, chunked, get
from tests.attacks.raw_socket import Raw
from tests.support.wait import becomes

MB = 1024 * 1024
KEYS = ("sk-one", "sk-two")
LIMITS = {"body_bytes": 2 * MB, "bodies_bytes": 8 * MB, "replies_bytes": 8 * MB}
TOO_MANY = 12
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[AttackedServer]:
    with attacked(limits=LIMITS) as attacked_server:
        yield attacked_server


@pytest.fixture(scope="module")
def shared() -> Iterator[AttackedServer]:
    """A server that has two keys."""
    with attacked(api_key=list(KEYS), limits=LIMITS) as attacked_server:
        yield attacked_server


def unfinished(url: str, key: str = KEYS[0]) -> Raw:
    """A body without its last byte."""
    raw = Raw(url)
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n".encode()
    raw.send(head + JSON + b"Content-Length: %d\r\n\r\n" % (2 * MB) + b" " * (2 * MB - 1))
    return raw


def large(url: str, key: str = KEYS[0]) -> httpx.Response:
    body = json.dumps({"prompt": "hi"}).encode() + b" " * MB
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return httpx.post(f"{url}/tokenize", content=body, headers=headers, timeout=60)


def refused(raws: list[Raw]) -> int:
    """How many were told something; the others are waited for."""
    readable, _, _ = select.select([raw.socket for raw in raws], [], [], 0)
    return len(readable)


def test_unfinished_bodies_have_one_budget(server: AttackedServer) -> None:
    before = server.memory()
    with ExitStack() as stack, healthy(server):
        raws = [stack.enter_context(unfinished(server.url)) for _ in range(TOO_MANY)]
        assert becomes(lambda: refused(raws) >= TOO_MANY - 4)
        assert server.memory() - before < 3 * LIMITS["bodies_bytes"]
        late = large(server.url)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "unavailable")
        assert late.headers["retry-after"] == "1"
        assert server.client.post("/tokenize", json={"prompt": "small"}).status_code == 200
    assert becomes(lambda: large(server.url).status_code == 200)


def test_the_bodies_of_one_key_leave_room_for_another(shared: AttackedServer) -> None:
    with ExitStack() as stack:
        raws = [stack.enter_context(unfinished(shared.url)) for _ in range(TOO_MANY)]
        assert becomes(lambda: refused(raws) >= TOO_MANY - 2)
        assert large(shared.url).status_code == 429
        assert large(shared.url, KEYS[1]).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"1\r\n \r\n" * 100_000, b"1;" + b"a" * MB, b"0\r\n" + b"X: a\r\n" * 100_000],
    ids=["chunks of a byte", "an extension without end", "trailers without end"],
)
def test_chunks_that_cost_more_than_they_bring_are_refused(server: AttackedServer, body: bytes) -> None:
    with Raw(server.url) as raw:
        raw.send(chunked(body))
        (reply,) = raw.replies()
    assert reply.status in (413, 431)


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"DELETE"])
def test_a_body_that_no_route_reads_is_not_kept(server: AttackedServer, method: bytes) -> None:
    """The answer comes without it, and with the answer the end."""
    before = server.memory()
    with Raw(server.url) as raw:
        head = method + b" /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % (2 * MB)
        raw.send(head + b" " * (2 * MB))
        assert raw.rest().startswith(b"HTTP/1.1 40")
    assert server.memory() - before < 16 * MB


def test_a_body_that_is_asked_for_is_sent_once(server: AttackedServer) -> None:
    """`Expect: 100-continue` of a body that is too large is answered by a refusal, not by go on."""
    with Raw(server.url) as raw:
        raw.send(
            b"POST /tokenize HTTP/1.1\r\n" + HOST + JSON + b"Expect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % (64 * MB)
        )
        (reply,) = raw.replies()
    assert reply.status == 413


def kept(server: AttackedServer) -> list[str]:
    """Where something large can be read: as a page, and for itself."""
    text = "word " * 200_000
    item = {"type": "message", "role": "user", "content": text}
    conversation = server.client.post("/v1/conversations", json={"items": [item]}).json()["id"]
    items = f"/v1/conversations/{conversation}/items"
    (one,) = server.client.get(items).json()["data"]
    return [items, f"{items}/{one['id']}", f"{items}?limit=1"]


def test_replies_that_nobody_reads_have_one_budget(server: AttackedServer) -> None:
    paths = kept(server)
    before = server.memory()
    with ExitStack() as stack, healthy(server):
        for number in range(4 * TOO_MANY):
            raw = stack.enter_context(Raw(server.url, receive_bytes=4096))
            raw.send(get(f"GET {paths[number % len(paths)]} HTTP/1.1\r\n".encode()))
        assert becomes(lambda: server.client.get(paths[0]).status_code == 503)
        assert server.memory() - before < 4 * LIMITS["replies_bytes"]
        assert server.client.get("/v1/models").status_code == 200
    assert becomes(lambda: server.client.get(paths[0]).status_code == 200)
