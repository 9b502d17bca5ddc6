"""Responses over a WebSocket."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from dragoman.http.routes.responses_socket import MOST_WAITING
from dragoman.http.server import background
from dragoman.limits import Limits
from dragoman.settings import Settings
from tests.attacks.raw_frames import PING, PONG, RawSocket, frame
from tests.clients.cases import COLOUR, NAME_A_COLOUR
from tests.clients.model import model
from tests.http.conftest import RunningServer, Serve
from tests.support.parrot import BREAK, HANG, messages_of, parrot
from tests.support.responses import ENDS, PATH, fold, get, kinds, numbers, texts
from tests.support.wait import becomes

TYPE = "response.create"


def opened(url: str, path: str = PATH, key: str | None = None) -> Connection:
    headers = {"authorization": f"Bearer {key}"} if key else None
    return connect(url.replace("http", "ws", 1) + path, additional_headers=headers, max_size=None)


@pytest.fixture
def socket(parrot: RunningServer) -> Iterator[Connection]:
    with opened(parrot.url) as connection:
        yield connection


def send(socket: Connection, input: Any = "hi", **fields: Any) -> None:
    socket.send(json.dumps({"type": TYPE, "input": input, **fields}))


def received(socket: Connection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(socket.recv(timeout=30))
    return event


def answer(socket: Connection) -> list[dict[str, Any]]:
    """The events of one answer, to its end."""
    events = [received(socket)]
    while events[-1]["type"] not in (*ENDS, "error"):
        events.append(received(socket))
    return events


def response(socket: Connection, input: Any = "hi", **fields: Any) -> dict[str, Any]:
    send(socket, input, **fields)
    last: dict[str, Any] = answer(socket)[-1]
    assert last["type"] == "response.completed", last
    mapping: dict[str, Any] = last["response"]
    return mapping


def error(socket: Connection) -> dict[str, Any]:
    [event] = answer(socket)
    assert event["type"] == "error"
    return event


def told(served: RunningServer) -> list[str]:
    return [text for _, text in messages_of(served.engine.jobs[-1])]


def test_what_is_in_a_file_takes_its_place(socket: Connection) -> None:
    part = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,cG90dGVy"}
    fields = response(socket, [{"role": "user", "content": [part]}])
    assert "potter" in fields["output"][0]["content"][0]["text"]


def test_the_events_are_those_of_a_stream(parrot: RunningServer, socket: Connection) -> None:
    send(socket, "Hello")
    events = answer(socket)
    assert kinds(events)[:2] == ["created", "in_progress"]
    assert numbers(events) == list(range(len(events)))
    assert fold(events) == events[-1]["response"]["output"]
    assert texts(events[-1]["response"]) == "Hello"
    assert get(parrot.url, events[-1]["response"]["id"]).json() == events[-1]["response"]


def test_requests_are_answered_in_order(socket: Connection) -> None:
    for word in ("one", "two", "three"):
        send(socket, word)
    assert [texts(answer(socket)[-1]["response"]) for _ in range(3)] == ["one", "two", "three"]


def test_what_says_how_to_answer_has_no_meaning_here(socket: Connection) -> None:
    fields = response(socket, "Hello", stream=False, background=True, stream_options={}, stream_id="a")
    assert (texts(fields), fields["background"]) == ("Hello", False)


def test_events_and_errors_carry_the_lane_of_their_request(socket: Connection) -> None:
    for fields in ({"stream_id": 'a"'}, {"temperature": 9, "stream_id": "b"}, {}):
        send(socket, "Hello", **fields)
    lanes = [{event.get("stream_id") for event in answer(socket)} for _ in range(3)]
    assert lanes == [{'a"'}, {"b"}, {None}]


def headers(events: list[dict[str, Any]]) -> list[dict[str, str] | None]:
    return [event.get("headers") for event in events]


def test_the_first_event_has_the_headers_of_a_reply(parrot: RunningServer, socket: Connection) -> None:
    send(socket, "Hello", colour="red", stream_id="a")
    events = answer(socket)
    assert headers(events) == [{"x-dragoman-ignored": "colour"}, *(None for _ in events[1:])]
    assert {event["stream_id"] for event in events} == {"a"}
    # They are about this answer, and no part of the response.
    assert get(parrot.url, events[-1]["response"]["id"]).json() == events[-1]["response"]
    send(socket, "Hello")
    assert set(headers(answer(socket))) == {None}


def test_what_was_not_enforced_is_among_them() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    with (
        background(model(constrains=False), Settings(port=0)) as url,
        opened(url) as socket,
    ):
        send(socket, NAME_A_COLOUR, tools=[tool])
        assert answer(socket)[0]["headers"] == {"x-dragoman-unenforced": "tools[0].strict"}


def test_a_lane_is_a_string(socket: Connection) -> None:
    send(socket, "Hello", stream_id=1)
    assert error(socket)["error"]["param"] == "stream_id"


def test_a_chain_that_is_not_stored(parrot: RunningServer, socket: Connection) -> None:
    first = response(socket, "one", store=False)
    second = response(socket, "two", store=False, previous_response_id=first["id"])
    response(socket, "three", store=False, previous_response_id=second["id"])
    assert told(parrot) == ["one", "one", "two", "two", "three"]


def test_only_the_last_that_is_not_stored_can_be_continued(socket: Connection) -> None:
    first = response(socket, "one", store=False)
    response(socket, "two", store=False)
    send(socket, "three", previous_response_id=first["id"])
    assert error(socket)["error"]["code"] == "previous_response_not_found"


def test_another_socket_does_not_know_it(parrot: RunningServer, socket: Connection) -> None:
    first = response(socket, "one", store=False)
    with opened(parrot.url) as other:
        send(other, "two", previous_response_id=first["id"])
        assert error(other)["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("fault", [{"input": BREAK}, {"input": "x", "temperature": 9}], ids=["5xx", "4xx"])
def test_after_a_failed_continuation_the_chain_is_over(socket: Connection, fault: dict[str, Any]) -> None:
    first = response(socket, "one", store=False)
    send(socket, previous_response_id=first["id"], store=False, **fault)
    assert answer(socket)[-1]["type"] in ("response.failed", "error")
    send(socket, "two", previous_response_id=first["id"])
    refused = error(socket)
    assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")


def test_a_failure_that_continues_nothing_leaves_the_chain(parrot: RunningServer, socket: Connection) -> None:
    first = response(socket, "one", store=False)
    send(socket, BREAK)
    assert answer(socket)[-1]["type"] == "response.failed"
    response(socket, "two", store=False, previous_response_id=first["id"])
    assert told(parrot) == ["one", "one", "two"]


def test_a_rehearsal_asks_nothing_of_the_model(parrot: RunningServer, socket: Connection) -> None:
    before = len(parrot.engine.jobs)
    warm = response(socket, "one", generate=False, store=False)
    assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 0)
    assert len(parrot.engine.jobs) == before
    response(socket, "two", previous_response_id=warm["id"], store=False)
    assert told(parrot) == ["one", "two"]


def test_a_rehearsal_needs_no_message_that_the_template_asks_for() -> None:
    with background(model(), Settings(port=0, store="memory")) as url, opened(url) as socket:
        warm = response(socket, [], instructions="Be brief.", generate=False, store=False)
        fields = response(socket, NAME_A_COLOUR, previous_response_id=warm["id"], store=False)
        assert texts(fields) == COLOUR
        send(socket, [], instructions="Be brief.", store=False)
        assert error(socket)["error"]["code"] == "template_error"


BAD: list[tuple[str | bytes, str | None]] = [
    ("{", None),
    ("[]", None),
    ("", None),
    (b"\xff\xfe", None),
    ('{"type": "response.steer"}', "type"),
    ('{"input": "hi"}', "type"),
    ('{"type": ["response.create"]}', "type"),
    ('{"type": "response.create", "input": 5}', "input"),
    ('{"type": "response.create", "input": "hi", "model": "another"}', "model"),
    ("[" * 100_000, None),
]


@pytest.mark.parametrize(("message", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_message_is_an_error_and_the_socket_stays_open(
    socket: Connection, message: str | bytes, param: str | None
) -> None:
    socket.send(message)
    refused = error(socket)
    assert 400 <= refused["status"] < 500
    assert refused["error"]["param"] == refused["param"] == param
    assert texts(response(socket, "Hello")) == "Hello"


def test_bytes_are_read_like_text(socket: Connection) -> None:
    socket.send(json.dumps({"type": TYPE, "input": "Hello"}).encode())
    assert texts(answer(socket)[-1]["response"]) == "Hello"


def test_news_of_the_client_want_no_answer(socket: Connection) -> None:
    socket.send('{"type": "response.processed", "response_id": "resp_1"}')
    assert texts(response(socket, "Hello")) == "Hello"


def test_a_failure_on_the_way_is_an_event(socket: Connection) -> None:
    send(socket, f"Hello{BREAK}")
    events = answer(socket)
    assert events[-1]["type"] == "response.failed"
    assert fold(events) == events[-1]["response"]["output"]
    assert texts(response(socket, "on")) == "on"


def test_too_many_waiting_requests_are_refused(parrot: RunningServer) -> None:
    with opened(parrot.url) as socket:
        send(socket, f"Hello{HANG}")
        while received(socket)["type"] != "response.output_text.delta":
            pass
        for _ in range(MOST_WAITING + 1):
            send(socket)
        event = received(socket)
        while event["type"] != "error":
            event = received(socket)
    assert (event["status"], event["error"]["code"]) == (429, "overloaded")


def test_silence_is_broken_by_events_with_numbers(serve: Serve) -> None:
    url = serve(parrot(), store="memory", keep_alive=0.02)
    with opened(url) as socket:
        send(socket, HANG)
        events = [received(socket) for _ in range(5)]
    assert kinds(events) == ["created", *["in_progress"] * 4]
    assert numbers(events) == list(range(5))


def test_a_client_that_leaves_ends_the_work(parrot: RunningServer) -> None:
    with opened(parrot.url) as socket:
        send(socket, f"Hello{HANG}")
        id_ = received(socket)["response"]["id"]
        assert becomes(lambda: parrot.engine.live == 1)
    assert becomes(lambda: parrot.engine.live == 0)
    assert becomes(lambda: get(parrot.url, id_).status_code == 200)
    assert get(parrot.url, id_).json()["status"] == "cancelled"


def test_a_client_that_vanishes_ends_the_work(serve: Serve) -> None:
    """Without a word, while the server is in the middle of sending."""
    engine = parrot(interval=0.001)
    url = serve(engine, store="memory")
    socket = opened(url)
    send(socket, "x" * 3000)
    id_ = received(socket)["response"]["id"]
    assert becomes(lambda: engine.live == 1)
    socket.socket.close()
    assert becomes(lambda: engine.live == 0)
    assert becomes(lambda: get(url, id_).status_code == 200)
    assert get(url, id_).json()["status"] == "cancelled"


def test_a_message_that_is_too_large_is_refused(serve: Serve) -> None:
    engine = parrot()
    with opened(serve(engine, store="memory", limits=Limits(body_bytes=1000))) as socket:
        send(socket, "x" * 2000)
        with pytest.raises(ConnectionClosed) as closed:
            received(socket)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009
    assert not engine.jobs


def test_a_socket_does_not_live_for_ever(parrot: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.http.routes.responses_socket.LONGEST_S", 0.01)
    with opened(parrot.url) as socket:
        assert error(socket)["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            received(socket)


def test_a_client_that_is_silent_is_asked_and_then_given_up(
    parrot: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.http.connection.websocket.PING_S", 0.05)
    with RawSocket(parrot.url) as silent:
        assert silent.frame() == (PING, b"")
        assert silent.rest() == b""


def test_a_client_that_answers_pings_may_be_silent(
    parrot: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.http.connection.websocket.PING_S", 0.05)
    with RawSocket(parrot.url) as patient:
        for _ in range(4):
            assert patient.frame() == (PING, b"")
            patient.send(frame(PONG))


def test_the_handshake_needs_a_key(serve: Serve) -> None:
    url = serve(parrot(), store="memory", api_key=["secret"])
    for key in (None, "wrong"):
        with pytest.raises(InvalidStatus) as refused:
            opened(url, key=key)
        reply = refused.value.response
        assert reply.status_code == 401
        assert json.loads(reply.body)["error"]["code"] == "invalid_api_key"
    with opened(url, key="secret") as socket:
        assert texts(response(socket, "Hello")) == "Hello"


def test_there_is_no_socket_elsewhere(parrot: RunningServer) -> None:
    with pytest.raises(InvalidStatus) as refused:
        opened(parrot.url, "/v1/chat/completions")
    assert refused.value.response.status_code == 404


def test_an_answer_has_a_line_in_the_access_log(socket: Connection, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "dragoman.access"):
        fields = response(socket, "Hello")
        send(socket, temperature=9)
        error(socket)
        assert becomes(lambda: len(lines(caplog)) == 2)
    one, other = lines(caplog)
    assert (one["method"], one["request_id"], one["status"]) == ("WEBSOCKET", fields["id"], 200)
    assert one["completion_tokens"] == len("Hello") + 1
    assert other["status"] == 400


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.request for record in caplog.records if hasattr(record, "request")]
