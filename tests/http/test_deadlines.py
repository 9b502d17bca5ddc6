"""`timeout`: an answer is done in time, or it is ended and says so."""

import json
from typing import Any

import httpx
import openai
import pytest
from websockets.sync.client import connect

from dragoman.limits import Limits
from tests.attacks.bodies import GENERATING, SOCKET, VECTORS, good
from tests.http.conftest import Serve
from tests.support.http import HELLO, post
from tests.support.responses import get, payloads
from tests.support.stuck import Stuck
from tests.support.wait import becomes

CHAT, RESPONSES, COMPACT = "/v1/chat/completions", "/v1/responses", "/v1/responses/compact"
SOON = 0.1


def asked(path: str, **fields: Any) -> dict[str, Any]:
    return {**good(path), "model": "parrot", "timeout": SOON, **fields}


@pytest.mark.parametrize("path", [*(path for path in GENERATING if path != SOCKET), COMPACT, *VECTORS])
def test_a_whole_answer_that_is_late_is_a_408(serve: Serve, path: str) -> None:
    engine = Stuck()
    reply = post(serve(engine, store="memory"), path, asked(path))
    assert (reply.status_code, reply.json()["error"]["code"]) == (408, "timeout")
    assert "0.1 seconds" in reply.json()["error"]["message"]
    assert becomes(lambda: engine.busy == 0)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_stream_that_is_late_ends_with_an_error(serve: Serve, path: str) -> None:
    engine = Stuck()
    reply = post(serve(engine), path, asked(path, stream=True))
    *_, last = reply.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert becomes(lambda: engine.live == 0)


def test_a_streamed_response_that_is_late_has_failed_and_is_kept_so(serve: Serve) -> None:
    url = serve(Stuck(), store="memory")
    *_, last = payloads(post(url, RESPONSES, asked(RESPONSES, stream=True)).content)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "timeout" in last["response"]["error"]["message"]
    assert get(url, last["response"]["id"]).json() == last["response"]


def test_a_response_in_the_background_that_is_late_has_failed(serve: Serve) -> None:
    engine = Stuck()
    url = serve(engine, store="memory")
    id_ = post(url, RESPONSES, asked(RESPONSES, background=True)).json()["id"]
    assert becomes(lambda: get(url, id_).json()["status"] == "failed")
    assert "timeout" in get(url, id_).json()["error"]["message"]
    assert engine.live == 0


def test_a_response_on_a_socket_that_is_late_has_failed_and_the_next_is_answered(serve: Serve) -> None:
    url = serve(Stuck(), store="memory")
    with connect(url.replace("http", "ws", 1) + RESPONSES) as socket:
        for _ in range(2):
            socket.send(json.dumps({"type": "response.create", **asked(RESPONSES)}))
            while (event := json.loads(socket.recv(timeout=120)))["type"] != "response.failed":
                assert event["type"] != "error"
            assert "timeout" in event["response"]["error"]["message"]


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {}), (CHAT, {"stream": True}), ("/v1/embeddings", {})])
def test_time_in_line_counts(serve: Serve, path: str, fields: dict[str, Any]) -> None:
    engine = Stuck()
    url = serve(engine, limits=Limits(in_flight=1), shutdown_grace=0)
    with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}):
        assert becomes(lambda: engine.live == 1)
        reply = post(url, path, asked(path, **fields))
        assert (reply.status_code, len(engine.jobs), engine.busy) == (408, 1, 1)


def test_the_setting_is_for_requests_without_a_timeout(serve: Serve) -> None:
    url = serve(Stuck(), request_timeout=SOON)
    assert post(url, CHAT, HELLO).status_code == 408
    assert "0.2 seconds" in post(url, CHAT, {**HELLO, "timeout": 0.2}).text


def test_an_answer_in_time_is_whole(greeter: str) -> None:
    reply = post(greeter, CHAT, {**HELLO, "timeout": 60})
    assert reply.json()["choices"][0]["message"]["content"] == "Hello, wörld!"


@pytest.mark.parametrize("wrong", [0, -1, 1e9, "soon", True])
def test_a_timeout_is_some_seconds(greeter: str, wrong: object) -> None:
    reply = post(greeter, CHAT, {**HELLO, "timeout": wrong})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "timeout")


def test_the_sdk_does_not_try_again(serve: Serve) -> None:
    engine = Stuck()
    client = openai.OpenAI(base_url=f"{serve(engine)}/v1", api_key="-", max_retries=2)
    with pytest.raises(openai.APIStatusError, match="timeout"):
        client.chat.completions.create(
            model="parrot", messages=[{"role": "user", "content": "hi"}], extra_body={"timeout": SOON}
        )
    assert len(engine.jobs) == 1
