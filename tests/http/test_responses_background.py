"""Responses that are made in the background: polled, followed, resumed, cancelled."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from dragoman.limits import Limits
from tests.http.conftest import RunningServer, Serve
from tests.support.parrot import BREAK, HANG, parrot
from tests.support.responses import DONE, PATH, created, error_of, fold, get, numbers, payloads, texts
from tests.support.wait import becomes

ALL = "?stream=true"
HELLO = 5 + len("Hello")
"""The events of a background response until it has said Hello."""


def status(url: str, id_: str) -> str:
    text: str = get(url, id_).json()["status"]
    return text


def cancel(url: str, id_: str) -> httpx.Response:
    return httpx.post(f"{url}{PATH}/{id_}/cancel", timeout=30)


@contextmanager
def following(url: str, id_: str, after: int = -1) -> Iterator[Iterator[bytes]]:
    query = ALL if after < 0 else f"{ALL}&starting_after={after}"
    with httpx.stream("GET", f"{url}{PATH}/{id_}{query}", timeout=30) as reply:
        yield reply.iter_raw()


def first(parts: Iterator[bytes], count: int) -> list[dict[str, Any]]:
    """As many events; the stream may go on after them."""
    seen = b""
    while seen.count(b"\n\n") < count:
        seen += next(parts)
    return payloads(seen)


@pytest.fixture
def hanging(parrot: RunningServer) -> Iterator[str]:
    """A response that has said Hello, and says no more."""
    id_ = created(parrot.url, f"Hello{HANG}", background=True)["id"]
    yield id_
    cancel(parrot.url, id_)


def test_it_is_known_before_it_is_made(parrot: RunningServer) -> None:
    fields = created(parrot.url, "Hello", background=True)
    assert (fields["status"], fields["background"], fields["output"]) == ("queued", True, [])
    assert becomes(lambda: status(parrot.url, fields["id"]) == "completed")
    assert texts(get(parrot.url, fields["id"]).json()) == "Hello"


def test_it_is_in_progress_while_it_is_made(parrot: RunningServer, hanging: str) -> None:
    assert becomes(lambda: status(parrot.url, hanging) == "in_progress")


def test_its_events_have_a_time_of_waiting(parrot: RunningServer) -> None:
    body = {"input": "Hello", "background": True, "stream": True}
    reply = httpx.post(parrot.url + PATH, json=body, timeout=30)
    events = payloads(reply.content)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert fold(events) == events[-1]["response"]["output"]
    assert reply.content.endswith(DONE)


def test_it_goes_on_when_its_client_leaves(serve: Serve) -> None:
    url = serve(parrot(interval=0.002), store="memory")
    body = {"input": "x" * 100, "background": True, "stream": True}
    with httpx.stream("POST", url + PATH, json=body) as reply:
        [event, *_] = first(reply.iter_raw(), 1)
    assert becomes(lambda: status(url, event["response"]["id"]) == "completed")


def test_a_live_stream_is_resumed_after_every_event(parrot: RunningServer, hanging: str) -> None:
    with following(parrot.url, hanging) as parts:
        known = first(parts, HELLO)
    assert numbers(known) == list(range(HELLO))
    for after in range(HELLO - 1):
        with following(parrot.url, hanging, after) as parts:
            assert first(parts, HELLO - after - 1) == known[after + 1 :]


def test_a_stored_stream_is_resumed_after_every_event(parrot: RunningServer, hanging: str) -> None:
    cancel(parrot.url, hanging)
    whole = get(parrot.url, hanging, ALL).content
    events = payloads(whole)
    for after in range(len(events) + 2):
        rest = get(parrot.url, hanging, f"{ALL}&starting_after={after}").content
        assert payloads(rest) == events[after + 1 :]
        assert rest.endswith(DONE)


def test_all_followers_hear_the_end(parrot: RunningServer, hanging: str) -> None:
    def follow(after: int) -> bytes:
        with following(parrot.url, hanging, after) as parts:
            heard = next(parts)
            ready.append(after)
            return heard + b"".join(parts)

    ready: list[int] = []
    with ThreadPoolExecutor() as pool:
        one, other = pool.submit(follow, -1), pool.submit(follow, 3)
        assert becomes(lambda: len(ready) == 2)
        cancel(parrot.url, hanging)
        everything, rest = one.result(), other.result()
    assert everything.endswith(DONE)
    assert payloads(rest) == payloads(everything)[4:]
    assert everything == get(parrot.url, hanging, ALL).content


def test_a_silent_stream_is_kept_alive(serve: Serve) -> None:
    url = serve(parrot(), store="memory", keep_alive=0.02)
    id_ = created(url, HANG, background=True)["id"]
    with following(url, id_) as parts:
        assert any(b": keep-alive\n\n" in part for part in parts)
    cancel(url, id_)


def test_to_cancel_ends_the_work(parrot: RunningServer, hanging: str) -> None:
    with following(parrot.url, hanging) as parts:
        first(parts, HELLO)
    assert parrot.engine.live == 1
    ended = cancel(parrot.url, hanging).json()
    assert parrot.engine.live == 0
    assert (ended["status"], texts(ended)) == ("cancelled", "Hello")
    assert ended["output"][0]["status"] == "incomplete"
    assert get(parrot.url, hanging).json() == ended
    assert fold(payloads(get(parrot.url, hanging, ALL).content)) == ended["output"]


def test_to_cancel_twice_changes_nothing(parrot: RunningServer, hanging: str) -> None:
    assert cancel(parrot.url, hanging).json() == cancel(parrot.url, hanging).json()


def test_to_cancel_what_is_over_changes_nothing(parrot: RunningServer) -> None:
    id_ = created(parrot.url, "Hello", background=True)["id"]
    assert becomes(lambda: status(parrot.url, id_) == "completed")
    before = get(parrot.url, id_).json()
    assert cancel(parrot.url, id_).json() == before


def test_only_background_responses_are_cancelled(parrot: RunningServer) -> None:
    reply = cancel(parrot.url, created(parrot.url)["id"])
    assert (reply.status_code, error_of(reply)["param"]) == (400, "response_id")
    assert cancel(parrot.url, "resp_no").status_code == 404


def test_to_delete_ends_the_work(parrot: RunningServer, hanging: str) -> None:
    assert httpx.delete(f"{parrot.url}{PATH}/{hanging}").json()["deleted"]
    assert parrot.engine.live == 0
    assert get(parrot.url, hanging).status_code == 404


def test_one_that_fails_says_so(parrot: RunningServer) -> None:
    id_ = created(parrot.url, BREAK, background=True)["id"]
    assert becomes(lambda: status(parrot.url, id_) == "failed")
    assert get(parrot.url, id_).json()["error"]["code"] == "server_error"


def test_those_that_run_count_as_requests_in_flight(serve: Serve) -> None:
    url = serve(parrot(), store="memory", limits=Limits(in_flight=1, queue=0))
    running = created(url, HANG, background=True)["id"]
    busy = httpx.post(url + PATH, json={"input": HANG, "background": True})
    assert (busy.status_code, error_of(busy)["code"]) == (429, "overloaded")
    cancel(url, running)
    assert texts(created(url, "Hello")) == "Hello"
