"""Responses that continue others: by id, by reference, and within what the model can read."""

from typing import Any

import httpx
import pytest

from tests.http.conftest import RunningServer, Serve
from tests.support.parrot import BREAK, messages_of, parrot
from tests.support.responses import PATH, create, created, error_of, get, streamed, user


def told(served: RunningServer) -> list[str]:
    """What was said in the last prompt."""
    return [text for _, text in messages_of(served.engine.jobs[-1])]


def test_a_chain_has_all_that_was_said_in_order(parrot: RunningServer) -> None:
    first = created(parrot.url, "one")
    second = created(parrot.url, "two", previous_response_id=first["id"])
    third = created(parrot.url, "three", previous_response_id=second["id"])
    assert told(parrot) == ["one", "one", "two", "two", "three"]
    assert third["previous_response_id"] == second["id"]


def test_instructions_are_not_carried_over(parrot: RunningServer) -> None:
    first = created(parrot.url, "one", instructions="Be brief.")
    created(parrot.url, "two", previous_response_id=first["id"], instructions="Be long.")
    assert told(parrot) == ["Be long.", "one", "one", "two"]


def test_two_may_continue_the_same(parrot: RunningServer) -> None:
    first = created(parrot.url, "one")
    created(parrot.url, "two", previous_response_id=first["id"])
    created(parrot.url, "other", previous_response_id=first["id"])
    assert told(parrot) == ["one", "one", "other"]


def test_an_incomplete_response_can_be_continued(parrot: RunningServer) -> None:
    first = created(parrot.url, "one", max_output_tokens=2)
    created(parrot.url, "two", previous_response_id=first["id"])
    assert told(parrot) == ["one", "on", "two"]


def test_an_unknown_response_cannot_be_continued(parrot: RunningServer) -> None:
    reply = create(parrot.url, previous_response_id="resp_nothing")
    error = error_of(reply)
    assert (reply.status_code, error["param"]) == (400, "previous_response_id")
    assert error["code"] == "previous_response_not_found"


def test_a_deleted_response_cannot_be_continued(parrot: RunningServer) -> None:
    first = created(parrot.url, "one")
    second = created(parrot.url, "two", previous_response_id=first["id"])
    httpx.delete(f"{parrot.url}{PATH}/{first['id']}")
    reply = create(parrot.url, previous_response_id=second["id"])
    assert error_of(reply)["code"] == "previous_response_not_found"


def test_a_failed_response_cannot_be_continued(parrot: RunningServer) -> None:
    failed = streamed(parrot.url, BREAK)[-1]["response"]
    reply = create(parrot.url, previous_response_id=failed["id"])
    assert (reply.status_code, error_of(reply)["param"]) == (400, "previous_response_id")


def test_what_belongs_to_another_key_is_not_there(serve: Serve) -> None:
    url = serve(parrot(), store="memory", api_key=["ann", "bob"])
    first = created(url, "one", key="ann")
    id_, item = first["id"], first["output"][0]["id"]
    assert error_of(create(url, previous_response_id=id_, key="bob"))["code"] == "previous_response_not_found"
    assert error_of(create(url, [{"id": item}], key="bob"))["code"] == "item_not_found"
    as_bob = {"authorization": "Bearer bob"}
    assert get(url, id_, key="bob").status_code == 404
    assert get(url, id_, "/input_items", key="bob").status_code == 404
    assert httpx.post(f"{url}{PATH}/{id_}/cancel", headers=as_bob).status_code == 404
    assert httpx.delete(f"{url}{PATH}/{id_}", headers=as_bob).status_code == 404
    assert get(url, id_, key="ann").json() == first


def test_a_reference_stands_for_an_item(parrot: RunningServer) -> None:
    first = created(parrot.url, "one")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    created(parrot.url, [user("before"), reference, user("two")])
    assert told(parrot) == ["before", "one", "two"]


def test_a_reference_to_nothing_is_refused(parrot: RunningServer) -> None:
    reply = create(parrot.url, [user("one"), {"id": "msg_nothing"}])
    assert (reply.status_code, error_of(reply)["param"]) == (400, "input[1].id")


LONG = "x" * 150


def long_talk(url: str) -> dict[str, Any]:
    """A response after three exchanges of 300 tokens each, in a context of 1000."""
    fields = created(url, LONG, instructions="Be brief.")
    for _ in range(2):
        fields = created(url, LONG, previous_response_id=fields["id"])
    return fields


def test_what_does_not_fit_is_refused(serve: Serve) -> None:
    engine = parrot(context=1000)
    url = serve(engine, store="memory")
    before = long_talk(url)
    reply = create(url, LONG, previous_response_id=before["id"])
    assert (reply.status_code, error_of(reply)["code"]) == (400, "context_length_exceeded")
    assert len(engine.jobs) == 3


def test_a_stream_that_does_not_fit_fails_with_the_code(serve: Serve) -> None:
    engine = parrot(context=1000)
    url = serve(engine, store="memory")
    events = streamed(url, "x" * 1000)
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert not engine.jobs


def test_the_oldest_exchanges_are_left_out_where_that_is_wanted(serve: Serve) -> None:
    engine = parrot(context=1000)
    url = serve(engine, store="memory")
    before = long_talk(url)
    created(url, LONG, previous_response_id=before["id"], truncation="auto", instructions="Be brief.")
    assert [role for role, _ in messages_of(engine.jobs[-1])] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]


def test_a_call_is_not_cut_from_its_output(serve: Serve) -> None:
    engine = parrot(context=1000)
    url = serve(engine, store="memory")
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "21"}
    early = [user(LONG), {"role": "assistant", "content": LONG * 5}]
    created(url, [*early, user(LONG), call, user("wait"), output], truncation="auto")
    assert [role for role, _ in messages_of(engine.jobs[-1])] == ["user", "assistant", "user", "tool"]


def test_what_is_too_long_alone_is_refused_all_the_same(serve: Serve) -> None:
    url = serve(parrot(context=1000), store="memory")
    reply = create(url, "x" * 1000, truncation="auto")
    assert (reply.status_code, error_of(reply)["code"]) == (400, "context_length_exceeded")


def items(url: str, id_: str, query: str = "") -> dict[str, Any]:
    page: dict[str, Any] = get(url, id_, "/input_items" + query).json()
    return page


def said(page: dict[str, Any]) -> list[str]:
    return [item["content"][0]["text"] for item in page["data"]]


def test_input_items_are_those_of_the_request(parrot: RunningServer) -> None:
    first = created(parrot.url, "one")
    second = created(parrot.url, "two", previous_response_id=first["id"])
    page = items(parrot.url, second["id"])
    assert said(page) == ["two"]
    assert (page["object"], page["has_more"]) == ("list", False)
    assert page["first_id"] == page["last_id"] == page["data"][0]["id"]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_make_up_the_list(parrot: RunningServer, order: str) -> None:
    texts = ["a", "b", "c", "d", "e"]
    id_ = created(parrot.url, [user(text) for text in texts])["id"]
    seen: list[str] = []
    query = f"?order={order}&limit=2"
    while True:
        page = items(parrot.url, id_, query)
        seen += said(page)
        if not page["has_more"]:
            break
        query = f"?order={order}&limit=2&after={page['last_id']}"
    assert seen == (texts if order == "asc" else texts[::-1])


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_no", "include=x"]
)
def test_a_bad_query_of_a_list_is_refused(parrot: RunningServer, query: str) -> None:
    reply = get(parrot.url, created(parrot.url)["id"], f"/input_items?{query}")
    assert reply.status_code == 400
    assert (error_of(reply)["param"] or "").startswith(query.partition("=")[0])
