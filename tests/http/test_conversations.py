"""Conversations over HTTP: what is made, changed, listed and deleted, and who may see it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import Serve
from tests.support.http import delete, get, get_json, post, refusal, send
from tests.support.wait import becomes

PATH = "/v1/conversations"
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with background(ScriptedEngine(say("Hello")), Settings(port=0, store="memory")) as address:
        yield address


def made(url: str, *texts: str, **fields: object) -> str:
    """The path of a new conversation in which these texts were said."""
    items = [{"role": "user", "content": text} for text in texts]
    reply = post(url, PATH, {"items": items, **fields})
    assert reply.status_code == 200, reply.text
    return f"{PATH}/{reply.json()['id']}"


def said(listed: dict[str, Any]) -> list[str]:
    return [item["content"][0]["text"] for item in listed["data"]]


def test_a_conversation_is_shown_as_it_was_made(url: str) -> None:
    shown = post(url, PATH, {"metadata": {"topic": "tea"}}).json()
    assert shown == {
        "id": shown["id"],
        "object": "conversation",
        "created_at": shown["created_at"],
        "metadata": {"topic": "tea"},
    }
    assert (shown["id"].startswith("conv_"), type(shown["created_at"])) == (True, int)
    assert get_json(url, f"{PATH}/{shown['id']}") == shown


def test_an_item_is_in_a_conversation_once(url: str) -> None:
    path = made(url, "one")
    [item] = get_json(url, f"{path}/items")["data"]
    again = {"items": [HI, {**item, "content": "two"}]}
    assert refusal(post(url, f"{path}/items", again)) == (400, "items[1].id")
    twice = {"items": [{**HI, "id": "msg_1"}, {**HI, "id": "msg_1"}]}
    assert refusal(post(url, f"{path}/items", twice)) == (400, "items[1].id")
    assert said(get_json(url, f"{path}/items")) == ["one"]
    assert post(url, made(url) + "/items", again).status_code == 200


def test_an_empty_conversation_needs_no_body(url: str) -> None:
    body = send("POST", url, PATH).json()
    assert get_json(url, f"{PATH}/{body['id']}/items") == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_metadata_is_replaced_as_a_whole(url: str) -> None:
    path = made(url, metadata={"a": "1", "b": "2"})
    assert post(url, path, {"metadata": {"b": "3"}}).json()["metadata"] == {"b": "3"}
    assert get_json(url, path)["metadata"] == {"b": "3"}


def test_null_leaves_no_metadata(url: str) -> None:
    path = made(url, metadata={"a": "1"})
    assert post(url, path, {"metadata": None}).json()["metadata"] == {}


def test_items_get_a_type_an_id_and_a_status(url: str) -> None:
    listed = post(url, made(url) + "/items", {"items": [HI]}).json()
    [item] = listed["data"]
    assert item == {
        "id": item["id"],
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert (listed["object"], listed["first_id"], listed["last_id"]) == ("list", item["id"], item["id"])


def test_the_last_item_comes_first_unless_asked_otherwise(url: str) -> None:
    path = made(url, "one", "two") + "/items"
    post(url, path, {"items": [{"role": "user", "content": "three"}]})
    assert said(get_json(url, path)) == ["three", "two", "one"]
    assert said(get_json(url, path, order="asc")) == ["one", "two", "three"]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_make_up_the_list(url: str, order: str) -> None:
    path = made(url, *"abcdefg") + "/items"
    seen: list[str] = []
    query: dict[str, object] = {"order": order, "limit": 3}
    while True:
        page = get_json(url, path, **query)
        seen += said(page)
        query["after"] = page["last_id"]
        if not page["has_more"]:
            break
    assert seen == sorted("abcdefg", reverse=order == "desc")


def test_an_item_is_found_by_its_id(url: str) -> None:
    path = made(url, "one", "two") + "/items"
    for item in get_json(url, path)["data"]:
        assert get_json(url, f"{path}/{item['id']}") == item


def test_a_deleted_item_is_gone_and_the_others_stay(url: str) -> None:
    path = made(url, "one", "two", "three")
    items = get_json(url, path + "/items", order="asc")["data"]
    gone = f"{path}/items/{items[1]['id']}"
    assert delete(url, gone).json() == get_json(url, path)
    assert get(url, gone).status_code == 404
    assert delete(url, gone).status_code == 404
    assert said(get_json(url, path + "/items", order="asc")) == ["one", "three"]


def test_a_deleted_conversation_is_gone_with_its_items(url: str) -> None:
    path = made(url, "one")
    id_ = path.removeprefix(PATH + "/")
    item = get_json(url, path + "/items")["data"][0]["id"]
    assert delete(url, path).json() == {
        "id": id_,
        "object": "conversation.deleted",
        "deleted": True,
    }
    for below in ("", "/items", f"/items/{item}"):
        assert get(url, path + below).status_code == 404
    assert delete(url, path).status_code == 404
    assert post(url, path + "/items", {"items": [HI]}).status_code == 404


def test_a_reference_is_replaced_by_what_it_stands_for(url: str) -> None:
    item = get_json(url, made(url, "to be quoted") + "/items")["data"][0]
    added = post(url, made(url) + "/items", {"items": [{"type": "item_reference", "id": item["id"]}]})
    assert added.json()["data"] == [item]


def test_a_response_reads_a_conversation_and_adds_to_it(url: str) -> None:
    path = made(url, "one")
    id_ = path.removeprefix(PATH + "/")
    reply = post(url, "/v1/responses", {"input": "two", "conversation": id_})
    assert reply.status_code == 200, reply.text
    assert said(get_json(url, path + "/items", order="asc")) == ["one", "two", "Hello"]


def test_items_do_not_change_while_a_response_is_made(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("Hello", fault="hang", fault_at=2)), store="memory")
    path = made(url, "one")
    body = {"input": "two", "conversation": path.removeprefix(PATH + "/"), "stream": True}
    item = get_json(url, path + "/items")["data"][0]["id"]

    def add() -> httpx.Response:
        return post(url, path + "/items", {"items": [HI]})

    with httpx.stream("POST", url + "/v1/responses", json=body, timeout=30) as reply:
        # Kept, because an iterator that is thrown away closes the connection.
        lines = reply.iter_lines()
        next(lines)
        refused = [add(), delete(url, f"{path}/items/{item}")]
    assert [one.status_code for one in refused] == [409, 409]
    assert refused[0].json()["error"]["code"] == "conversation_locked"
    assert becomes(lambda: add().status_code == 200)


def test_what_belongs_to_another_key_is_not_there(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), store="memory", api_key=["mine", "yours"])
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    path = f"{PATH}/{post(url, PATH, {'items': [HI]}, **mine).json()['id']}"
    item = get(url, f"{path}/items", **mine).json()["data"][0]["id"]
    for method, below in [
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/items"),
        ("GET", f"/items/{item}"),
        ("DELETE", f"/items/{item}"),
    ]:
        assert send(method, url, path + below, headers=yours).status_code == 404
    assert post(url, path, {"metadata": {}}, **yours).status_code == 404
    assert post(url, path + "/items", {"items": [HI]}, **yours).status_code == 404
    assert get(url, f"{path}/items/{item}", **mine).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [HI] * 21}, "items"),
        ({"items": "hi"}, "items"),
        ({"items": [HI, {"role": "nobody", "content": ""}]}, "items[1].role"),
        ({"items": [{"type": "telepathy"}]}, "items[0].type"),
        ({"items": [{"type": "compaction_trigger"}]}, "items[0].type"),
        ({"items": [{"type": "item_reference", "id": "msg_nowhere"}]}, "items[0].id"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata[...]"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"title": "x"}, "title"),
    ],
)
def test_a_conversation_that_cannot_be_made_is_a_400_with_the_place(
    url: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(post(url, PATH, body)) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "items"), ({"items": []}, "items"), ({"items": [HI] * 21}, "items"), ({"item": []}, "item")],
)
def test_items_that_cannot_be_added_are_a_400_and_add_nothing(
    url: str, body: dict[str, Any], param: str
) -> None:
    path = made(url)
    assert refusal(post(url, path + "/items", body)) == (400, param)
    assert get_json(url, path + "/items")["data"] == []


@pytest.mark.parametrize(("body", "param"), [({}, "metadata"), ({"metadata": {}, "items": []}, "items")])
def test_nothing_but_metadata_can_be_changed(url: str, body: dict[str, Any], param: str) -> None:
    assert refusal(post(url, made(url), body)) == (400, param)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=msg_nowhere", "after"),
        ("include=everything", "include[0]"),
        ("include[]=reasoning.encrypted_content&include[]=everything", "include[1]"),
    ],
)
def test_a_bad_query_is_a_400_that_names_it(url: str, query: str, param: str) -> None:
    assert refusal(get(url, f"{made(url, 'one')}/items?{query}")) == (400, param)


@pytest.mark.parametrize(
    "id_", ["x", "x" * 5000, "%F0%9F%92%A9", "%00", "%FF", "a%2Fb", "..%2F..", "'%20OR%201=1--", "{id}"]
)
@pytest.mark.parametrize("path", ["/{}", "/{}/items", "/conv_x/items/{}"])
def test_an_odd_id_is_just_not_there(url: str, path: str, id_: str) -> None:
    path = PATH + path.format(id_)
    assert get(url, path).status_code == 404


def test_without_a_store_there_are_no_conversations(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), store="none")
    reply = post(url, PATH, {})
    assert (reply.status_code, "store" in reply.json()["error"]["message"]) == (400, True)
    assert get(url, f"{PATH}/conv_x").status_code == 400
