"""Servers that cut, stall, hang up and lie, over real sockets."""

import asyncio
import json
import threading

import pytest

import dragoman
from dragoman.client import (
    AnswerTree,
    BrokenStreamError,
    ClientError,
    ClientTimeout,
    ConnectionFailed,
    StatusError,
    TextDelta,
    Timeouts,
)
from dragoman.client.config import make_config
from tests.client.recorded import OPENAI_CALLS, chat, sse
from tests.client.support import HELLO, KEY
from tests.support.raw_server import HANG, SSE_HEAD, RawServer, raw_server, reply

HI = sse(*chat({"delta": {"content": "Grüße"}}, {"delta": {}, "finish_reason": "stop"}))
BUSY = reply(503, b'{"error": {"message": "busy"}}', "Retry-After: 0")
SOON = Timeouts(connect=5, read=0.2)


def ask(server: RawServer, kind: str, retries: int = 0, timeouts: Timeouts | None = None) -> AnswerTree:
    """One chat, through either client."""
    if kind == "sync":
        with dragoman.Client(server.url, KEY, retries=retries, timeouts=timeouts) as client:
            return client.chat(HELLO).answer()

    async def run() -> AnswerTree:
        async with dragoman.AsyncClient(server.url, KEY, retries=retries, timeouts=timeouts) as client:
            return await client.chat(HELLO).answer()

    return asyncio.run(run())


both = pytest.mark.parametrize("kind", ["sync", "async"])


@both
def test_single_bytes(kind: str) -> None:
    with raw_server([SSE_HEAD, *(HI[at : at + 1] for at in range(len(HI)))]) as server:
        assert ask(server, kind).text == "Grüße"


@both
@pytest.mark.parametrize("after", [SSE_HEAD, SSE_HEAD + HI[:40], b"", b"HTTP/1.1 200 OK\r\nContent-Ty"])
def test_hanging_up_is_told(kind: str, after: bytes) -> None:
    with raw_server([after]) as server, pytest.raises(BrokenStreamError):
        ask(server, kind)


@both
def test_a_promised_length_that_does_not_come(kind: str) -> None:
    head = SSE_HEAD.replace(b"Connection: close", b"Content-Length: 100000")
    with (
        raw_server([head + HI[:100]]) as server,
        pytest.raises(BrokenStreamError, match="in the middle") as caught,
    ):
        ask(server, kind)
    assert caught.value.context.request_id == "req_raw"
    assert caught.value.context.beginning.startswith("data: {")


@both
@pytest.mark.parametrize("said", [b"", SSE_HEAD, SSE_HEAD + HI[:150]])
def test_silence_ends_after_a_time(kind: str, said: bytes) -> None:
    with raw_server([said, HANG]) as server, pytest.raises(ClientTimeout, match="silent for too long"):
        ask(server, kind, timeouts=SOON)
    assert server.left.is_set() or server.left.wait(30)


@both
def test_signs_of_life_are_no_events(kind: str) -> None:
    keep_alives = [b": keep-alive\n\n"] * 100_000
    with raw_server([SSE_HEAD, *keep_alives, HANG]) as server, pytest.raises(ClientTimeout):
        ask(server, kind, timeouts=Timeouts(chunk=0.05))


@both
@pytest.mark.parametrize("said", [[], [SSE_HEAD], [SSE_HEAD + HI[:150]], [SSE_HEAD, *([HI[:150]] * 100_000)]])
def test_there_is_a_time_for_all_of_it(kind: str, said: list[bytes]) -> None:
    with raw_server([*said, HANG]) as server, pytest.raises(ClientTimeout, match=r"more than 0\.2 seconds"):
        ask(server, kind, timeouts=Timeouts(total=0.2))
    assert server.left.is_set() or server.left.wait(30)


@both
def test_no_try_is_begun_that_has_no_time(kind: str) -> None:
    later = reply(503, b'{"error": {"message": "busy"}}', "Retry-After: 20")
    with raw_server([later], [later], [later]) as server, pytest.raises(StatusError, match="busy"):
        ask(server, kind, retries=2, timeouts=Timeouts(total=10))
    assert len(server.heard) == 1


@both
def test_the_end_mark_is_the_end_though_the_connection_stays(kind: str) -> None:
    with raw_server([SSE_HEAD, HI, HANG]) as server:
        assert ask(server, kind).text == "Grüße"


@both
def test_nobody_answers(kind: str) -> None:
    with pytest.raises(ConnectionFailed, match=r"No server answers at http://127\.0\.0\.1:1"):
        ask(RawServer(url="http://127.0.0.1:1"), kind)


@both
def test_a_refusal_says_what_and_where(kind: str) -> None:
    body = b'{"error": {"message": "Too long.", "type": "bad", "param": "messages", "code": "x"}}'
    with (
        raw_server([reply(400, body, "x-request-id: req_9")]) as server,
        pytest.raises(StatusError) as caught,
    ):
        ask(server, kind, retries=5)
    error = caught.value
    assert error.message == "The server answered 400: Too long."
    assert (error.kind, error.param, error.code) == ("bad", "messages", "x")
    assert (error.context.status, error.context.request_id) == (400, "req_9")
    assert len(server.heard) == 1


@both
def test_a_page_instead_of_an_answer_is_shown(kind: str) -> None:
    page = b"<html>" + KEY.encode() + b"<p>" * 1000
    with raw_server([reply(502, page)]) as server, pytest.raises(StatusError) as caught:
        ask(server, kind)
    assert caught.value.context.beginning.startswith("<html>[key]<p>")
    assert len(str(caught.value)) < 500


@both
def test_a_refusal_without_end_is_not_read_to_it(kind: str) -> None:
    head = b"HTTP/1.1 400 X\r\n\r\n"
    with (
        raw_server([head, *[b"x" * 65536] * 4, HANG]) as server,
        pytest.raises(StatusError, match="no reason"),
    ):
        ask(server, kind)
    assert server.left.wait(30)


@both
@pytest.mark.parametrize("first", [BUSY, b""], ids=["busy", "hung up"])
def test_another_try_before_the_first_byte(kind: str, first: bytes) -> None:
    with raw_server([first], [SSE_HEAD, HI]) as server:
        assert ask(server, kind, retries=1).text == "Grüße"
    assert len(server.heard) == 2


@both
def test_no_other_try_after_the_first_byte(kind: str) -> None:
    with raw_server([SSE_HEAD + HI[:150]], [SSE_HEAD, HI]) as server, pytest.raises(BrokenStreamError):
        ask(server, kind, retries=5)
    assert len(server.heard) == 1


@both
def test_tries_have_an_end(kind: str) -> None:
    with raw_server([BUSY]) as server, pytest.raises(StatusError, match="busy"):
        ask(server, kind, retries=2)
    assert len(server.heard) == 3


def test_a_server_says_that_another_try_will_not_help() -> None:
    refusal = reply(408, b"", "x-should-retry: false")
    with raw_server([refusal]) as server, pytest.raises(StatusError):
        ask(server, "sync", retries=5)
    assert len(server.heard) == 1


def test_a_server_that_wants_to_be_left_alone_for_long_is_not_waited_for() -> None:
    refusal = reply(429, b"", "Retry-After: 3600", "x-ratelimit-limit-tokens: 5")
    with raw_server([refusal]) as server, pytest.raises(StatusError) as caught:
        ask(server, "sync", retries=5)
    assert caught.value.reply.retry_after == 3600
    assert caught.value.reply.rate_limits == {"x-ratelimit-limit-tokens": "5"}
    assert len(server.heard) == 1


def test_pauses_grow_and_are_spread() -> None:
    setup = make_config("http://h", None, None, 3, None)
    problem = ConnectionFailed("x", None)  # type: ignore[arg-type]
    pauses = [[setup.retry_delay(problem, tried) or 0 for _ in range(50)] for tried in (1, 3)]
    assert max(pauses[0]) < min(pauses[1])
    assert len(set(pauses[0])) > 1
    assert setup.retry_delay(problem, 4) is None


@both
def test_a_call_is_there_before_the_stream_ends(kind: str) -> None:
    """The server says no more until the client has gone, and the client goes when it has the call."""
    half = OPENAI_CALLS.index(b'"call_b"')
    with raw_server([SSE_HEAD, OPENAI_CALLS[:half], HANG]) as server:
        assert _first_call(server, kind) == '{"place": "}\\"Ö"}'
        assert server.left.wait(30)


def _first_call(server: RawServer, kind: str) -> str:
    if kind == "sync":
        with dragoman.Client(server.url) as client:
            return next(
                e.value.arguments for e in client.chat(HELLO) if isinstance(e, dragoman.client.CallEnd)
            )

    async def run() -> str:
        async with dragoman.AsyncClient(server.url) as client:
            async for event in client.chat(HELLO):
                if isinstance(event, dragoman.client.CallEnd):
                    return event.value.arguments
        raise AssertionError

    return asyncio.run(run())


def test_headers_are_there_before_the_answer() -> None:
    with raw_server([SSE_HEAD, HANG]) as server, dragoman.Client(server.url) as client:
        with client.chat(HELLO) as stream:
            assert stream.reply is not None
            assert stream.reply.request_id == "req_raw"
            assert stream.reply.rate_limits == {"x-ratelimit-remaining-requests": "7"}
        assert server.left.wait(30)


def test_what_came_before_a_failure_is_kept() -> None:
    with (
        raw_server([SSE_HEAD + HI[: HI.index(b"\n\n") + 9]]) as server,
        dragoman.Client(server.url) as client,
    ):
        stream = client.chat(HELLO)
        with pytest.raises(ClientError):
            stream.answer()
        assert [answer.text for answer in stream.answers] == ["Grüße"]


def test_a_stream_is_read_once() -> None:
    with raw_server([SSE_HEAD, HI]) as server, dragoman.Client(server.url) as client:
        stream = client.chat(HELLO)
        assert [event for event in stream if isinstance(event, TextDelta)]
        with pytest.raises(RuntimeError, match="has already been read"):
            stream.answer()


def test_fields_that_are_none_are_not_sent() -> None:
    with raw_server([SSE_HEAD, HI]) as server, dragoman.Client(server.url, KEY) as client:
        client.chat(HELLO, model="m", temperature=None, stream_options=None).answer()
    head, _, body = server.heard[0].partition(b"\r\n\r\n")
    assert json.loads(body) == {"messages": HELLO, "model": "m", "stream": True}
    assert f"authorization: bearer {KEY}".encode() in head.lower()


def test_threads_may_share_a_client() -> None:
    with raw_server([SSE_HEAD, HI]) as server, dragoman.Client(server.url) as client:
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append(client.chat(HELLO).answer().text)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == ["Grüße"] * 8


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:99999", "http://h:0"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(dragoman.client.AddressError):
        dragoman.Client(url)


def test_a_key_that_no_header_can_hold() -> None:
    with pytest.raises(dragoman.client.AddressError) as caught:
        dragoman.Client(key="sécret\n")
    assert "sécret" not in str(caught.value)
