"""Batches of messages, as Anthropic's clients ask for them."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.http.server import background
from dragoman.limits import Limits
from dragoman.settings import Settings
from tests.http.conftest import Serve
from tests.support.http import delete, get, get_json, post
from tests.support.parrot import parrot

PATH = "/v1/messages/batches"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with background(parrot(), Settings(port=0, store="memory")) as text:
        yield text


def line(custom_id: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": custom_id,
        "params": {"model": "parrot", "max_tokens": 50, "messages": messages, **more},
    }


def begun(url: str, *lines: dict[str, Any]) -> dict[str, Any]:
    reply = post(url, PATH, {"requests": list(lines)})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def ended(url: str, id_: str) -> dict[str, Any]:
    for _ in range(3000):
        batch = get_json(url, f"{PATH}/{id_}")
        if batch["processing_status"] == "ended":
            return batch
        time.sleep(0.01)
    raise AssertionError("The batch does not end.")


def results(url: str, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    reply = get(url, batch["results_url"])
    assert reply.headers["content-type"] == "application/x-jsonl"
    return {one["custom_id"]: one["result"] for one in map(json.loads, reply.text.splitlines())}


def test_each_conversation_is_answered_as_it_is_by_itself(url: str) -> None:
    fields = begun(url, line("good", "Hello"), line("bad", temperature=9), line("unnamed", model="nobody"))
    assert (fields["type"], fields["request_counts"]["processing"], fields["results_url"]) == (
        "message_batch",
        3,
        None,
    )
    over = ended(url, fields["id"])
    counts = {"processing": 0, "succeeded": 1, "errored": 2, "canceled": 0, "expired": 0}
    assert over["request_counts"] == counts and over["ended_at"]
    came = results(url, over)
    message = came["good"]["message"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "Hello")
    alone = post(url, "/v1/messages", line("a", temperature=9)["params"]).json()
    error = came["bad"]["error"]
    assert (came["bad"]["type"], error["type"], error["error"]) == ("errored", "error", alone["error"])
    assert came["unnamed"]["error"]["error"]["type"] == "not_found_error"


def test_they_are_listed_both_ways_and_deleted_when_they_have_ended(url: str) -> None:
    ids = [begun(url, line("a"))["id"] for _ in range(4)]
    for id_ in ids:
        ended(url, id_)
    page = get_json(url, PATH, after_id=ids[3], limit=2)
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    page = get_json(url, PATH, before_id=ids[0], limit=2)
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    gone = delete(url, f"{PATH}/{ids[0]}").json()
    assert gone == {"id": ids[0], "type": "message_batch_deleted"}
    reply = get(url, f"{PATH}/{ids[0]}")
    assert (reply.status_code, reply.json()["type"]) == (404, "error")


def test_one_at_work_is_cancelled_and_only_then_deleted(serve: Serve) -> None:
    url = serve(parrot(interval=0.01), store="memory", limits=Limits(in_flight=1))
    fields = begun(url, *(line(str(number), "words " * 8) for number in range(50)))
    path = f"{PATH}/{fields['id']}"
    assert delete(url, path).status_code == 409
    assert get(url, f"{path}/results").status_code == 409
    body = post(url, f"{path}/cancel", {}).json()
    assert body["processing_status"] == "canceling" and body["cancel_initiated_at"]
    over = ended(url, fields["id"])
    counts = over["request_counts"]
    assert counts["canceled"] and sum(counts.values()) == 50
    came = results(url, over)
    assert sum(one["type"] == "canceled" for one in came.values()) == counts["canceled"]
    assert delete(url, path).status_code == 200


@pytest.mark.parametrize(
    ("requests", "place"),
    [
        ([], "requests"),
        ([line("a"), line("a")], "requests[1].custom_id"),
        ([line("a", stream=True)], "requests[0].params.stream"),
        ([line("a b")], "requests[0].custom_id"),
        ([{"custom_id": "a"}], "requests[0].params"),
    ],
)
def test_what_is_no_batch_is_refused(url: str, requests: list[dict[str, Any]], place: str) -> None:
    reply = post(url, PATH, {"requests": requests})
    assert (reply.status_code, reply.json()["type"]) == (400, "error")
    assert f"'{place}'" in reply.json()["error"]["message"]


def test_a_batch_of_one_api_is_not_there_for_another(url: str) -> None:
    fields = begun(url, line("a"))
    assert get(url, f"/v1/batches/{fields['id']}").status_code == 404
    assert fields["id"] not in get(url, "/v1/batches").text
