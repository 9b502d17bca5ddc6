"""What the server says of itself to people who look after it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.limits import Limits
from tests.http.conftest import Serve
from tests.support.http import HELLO, get, post
from tests.support.wait import becomes

CHAT = "/v1/chat/completions"


@contextmanager
def answering(url: str, key: str = "") -> Iterator[None]:
    """Inside, an answer is under way."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {**HELLO, "stream": True}
    with httpx.stream("POST", url + CHAT, json=body, headers=headers, timeout=60) as reply:
        pieces = reply.iter_bytes()
        next(pieces)
        yield


def slow() -> ScriptedEngine:
    return ScriptedEngine(say("x" * 4000), interval=0.005)


def test_tokens_and_answers_are_counted(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hello")))
    used = post(url, CHAT, HELLO).json()["usage"]
    body = get(url, "/operations").json()
    assert body["tokens"]["completion_tokens"] == used["completion_tokens"]
    assert body["tokens"]["prompt_tokens"] == used["prompt_tokens"]
    [model] = body["models"]
    assert (model["name"], model["running"], model["waiting"]) == ("scripted", 0, 0)
    assert model["answers"]["stop"] == 1
    assert model["mean_ms"]["first_token"] is not None
    assert body["memory"]["resident_bytes"] > 2**20
    assert body["keys"] == body["answers"] == []


def test_an_answer_under_way_is_seen(serve: Serve) -> None:
    url = serve(slow())
    with answering(url):
        assert becomes(lambda: get(url, "/operations").json()["tokens"]["completion_tokens"] > 3)
        body = get(url, "/operations").json()
        [answer] = body["answers"]
        assert (answer["state"], answer["model"]) == ("running", "scripted")
        assert answer["completion_tokens"] > 0
        assert body["models"][0]["running"] == 1
        assert body["requests_in_flight"] == 2
    assert becomes(lambda: not get(url, "/operations").json()["answers"])


def test_what_waits_is_seen(serve: Serve) -> None:
    url = serve(slow(), limits=Limits(in_flight=1))
    with answering(url):
        other = threading.Thread(target=post, args=(url, CHAT, {**HELLO, "max_tokens": 1}))
        other.start()
        assert becomes(lambda: get(url, "/operations").json()["models"][0]["waiting"] == 1)
        states = [answer["state"] for answer in get(url, "/operations").json()["answers"]]
        assert states == ["running", "waiting"]
    other.join()


def test_a_request_is_found_by_its_id(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hello")))
    id_ = post(url, CHAT, HELLO).headers["x-request-id"]
    get(url, "/v1/models")
    [result] = get(url, f"/operations?request_id={id_}").json()["requests"]
    assert (result["path"], result["status"], result["finish"]) == (CHAT, 200, "stop")
    assert result["duration_ms"] >= result["ttft_ms"] >= result["queue_ms"] >= 0


def test_a_key_sees_its_own_and_an_admin_all(serve: Serve) -> None:
    url = serve(slow(), api_key=["one", "two"], admin_key=["boss"])
    with answering(url, "one"):
        mine = get(url, "/operations", authorization="Bearer one").json()
        other = get(url, "/operations", authorization="Bearer two").json()
        every = get(url, "/operations", authorization="Bearer boss").json()
    assert [len(result["answers"]) for result in (mine, other, every)] == [1, 0, 1]
    assert [key["you"] for key in mine["keys"]] == [True]
    assert mine["keys"][0]["running"] == 1
    assert [key["you"] for key in other["keys"]] == [True]
    assert {key["running"] for key in every["keys"]} == {0, 1}
    assert other["models"][0]["running"] == 1
    assert not [each for each in other["requests"] if each["path"] == CHAT]


def test_it_takes_a_key_as_metrics_do(serve: Serve) -> None:
    assert get(serve(slow(), api_key=["k"]), "/operations").status_code == 401
    assert get(serve(slow(), metrics="off"), "/operations").status_code == 404
    body = get(serve(slow(), api_key=["k"], metrics="open"), "/operations").json()
    assert body["models"] and body["requests"] == body["keys"] == []
