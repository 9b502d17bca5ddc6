"""Bytes that are no good HTTP: refused, the connection closed, and nothing behind them is ever answered."""

import asyncio
from collections.abc import Iterator

import h11
import pytest

from tests.attacks.frame import AttackedServer, Reply, attacked, check
from tests.attacks.raw_messages import BODY, HOST, SMUGGLED, chunked, corpus, get, post
from tests.attacks.raw_socket import Raw, place, replies

AT_ONCE = 64
"""Connections that are open at the same time."""
CORPUS = corpus()
PATIENCE_S = 2.0
KB = 1024


@pytest.fixture(scope="module")
def strict() -> Iterator[AttackedServer]:
    """A server that waits for the rest of a message for a moment only."""
    with attacked(header_timeout=PATIENCE_S, body_timeout=PATIENCE_S, idle_timeout=PATIENCE_S) as server:
        yield server


@pytest.fixture(scope="module")
def answered(strict: AttackedServer) -> dict[str, list[Reply]]:
    """The replies to every message of the corpus, all that came until the server closed the connection."""
    return asyncio.run(answered_by(strict.url))


async def answered_by(url: str) -> dict[str, list[Reply]]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(message: bytes) -> list[Reply]:
        async with room:
            reader, writer = await asyncio.open_connection(*place(url))
            writer.write(message)
            data = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return replies(data)

    every = await asyncio.gather(*(one(message) for message in CORPUS.values()))
    return dict(zip(CORPUS, every, strict=True))


def by_h11(data: bytes) -> int:
    """The requests that another parser finds in the same bytes, up to where it gives up."""
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(data)
    number = 0
    try:
        while True:
            event = parser.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                return number
            if isinstance(event, h11.EndOfMessage):
                number += 1
                parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                parser.send(h11.EndOfMessage())
                parser.start_next_cycle()
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        return number


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 600


@pytest.mark.parametrize("name", CORPUS)
def test_a_bad_message_has_one_answer_at_most(answered: dict[str, list[Reply]], name: str) -> None:
    first, *more = answered[name]
    assert not more
    check(first)
    if first.status < 400:
        # What we take, another parser takes too: nobody on the way can have read it in another way.
        assert by_h11(CORPUS[name]) == 1


def test_nearly_all_of_it_is_refused(answered: dict[str, list[Reply]]) -> None:
    """Some are good messages with something bad behind them."""
    refused = [name for name, (first, *_) in answered.items() if first.status in (400, 408)]
    assert len(refused) > len(CORPUS) - 10


@pytest.mark.parametrize(
    ("good", "count"),
    [
        (get() + get(), 2),
        (b"\r\n" + get(), 1),
        (get(headers=b"host:localhost\r\nX: \tspaces\t \r\nY:\r\n"), 1),
        (post(b"Content-Length: %d\r\n" % len(BODY), BODY), 1),
        (chunked(b"10;a=b\r\n" + BODY + b"\r\n000\r\nX: trailer\r\n\r\n"), 1),
        (chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"), 1),
    ],
    ids=["two requests", "an empty line first", "spaces", "length", "chunk and trailer", "chunks"],
)
def test_a_good_message_is_answered(strict: AttackedServer, good: bytes, count: int) -> None:
    """Otherwise the corpus would show nothing."""
    with Raw(strict.url) as raw:
        raw.send(good)
        assert [reply.status for reply in raw.replies(count)] == [200] * count


@pytest.mark.parametrize("size", [1, 7])
def test_the_pieces_in_which_it_comes_change_nothing(strict: AttackedServer, size: int) -> None:
    good = post(b"Content-Length: %d\r\n" % len(BODY), BODY)
    bad = get(line=b"GET  /health HTTP/1.1\r\n")
    with Raw(strict.url) as raw:
        for message, status in ((good, 200), (bad, 400)):
            for at in range(0, len(message), size):
                raw.send(message[at : at + size])
            assert raw.replies(1)[0].status == status


@pytest.mark.parametrize(
    "trailer", [b"Host: a.example", b"Authorization: Bearer x", b"Content-Encoding: gzip"]
)
def test_a_trailer_does_not_pass_for_a_header(strict: AttackedServer, trailer: bytes) -> None:
    with Raw(strict.url) as raw:
        raw.send(chunked(b"10\r\n" + BODY + b"\r\n0\r\n" + trailer + b"\r\n\r\n"))
        assert raw.replies(1)[0].status == 200


@pytest.mark.parametrize(
    "head",
    [
        get(headers=HOST + b"X: " + b"a" * KB * KB + b"\r\n"),
        get(headers=HOST + b"X: %s\r\n" % (b"a" * KB) * 80),
        get(headers=HOST + b"X:\r\n" * 20_000),
        get(line=b"GET /" + b"a" * 80 * KB + b" HTTP/1.1\r\n"),
        b"GET /" + b"a" * KB * KB,
        chunked(b"10\r\n" + BODY + b"\r\n0\r\nX: " + b"a" * KB * KB),
        chunked(b"10;" + b"a" * KB * KB),
    ],
    ids=["header", "headers", "count", "path", "endless path", "trailer", "chunk extension"],
)
def test_a_giant_head_is_431(strict: AttackedServer, head: bytes) -> None:
    with Raw(strict.url) as raw:
        raw.send(head + SMUGGLED)
        (reply,) = raw.replies()
    assert (reply.status, reply.error["code"]) == (431, "head_too_large")


def test_a_head_within_its_limit_is_read(strict: AttackedServer) -> None:
    with Raw(strict.url) as raw:
        raw.send(get(headers=HOST + b"X: %s\r\n" % (b"a" * KB) * 60))
        assert raw.replies(1)[0].status == 200


def test_a_body_in_very_many_pieces_is_refused(strict: AttackedServer) -> None:
    with Raw(strict.url) as raw:
        raw.send(chunked(b"1\r\n \r\n" * 70_000))
        (reply,) = raw.replies()
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def test_requests_may_not_pile_up_on_a_connection(strict: AttackedServer) -> None:
    with Raw(strict.url) as raw:
        raw.send(get() * 1000)
        result = raw.replies()
    assert 1 <= len(result) < 100
    assert {reply.status for reply in result} == {200}


def test_another_protocol_is_not_spoken(strict: AttackedServer) -> None:
    """The request is answered as it is, and what follows is not read."""
    with Raw(strict.url) as raw:
        raw.send(get(headers=HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n") + SMUGGLED)
        assert [reply.status for reply in raw.replies()] == [200]
