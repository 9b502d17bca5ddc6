"""Chat completions with `store: true`: what is kept of them, when, and who may see and change it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import StoreUnavailable
from dragoman.http.app import App
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.store import Record, StoreLimits
from dragoman.store.sqlite import SqliteStore
from tests.http.conftest import Serve
from tests.support.http import HELLO, delete, get, get_json, post, refusal, send, stream
from tests.support.parrot import parrot

PATH = "/v1/chat/completions"
ROOT = Path(__file__).parent.parent.parent
KEPT: dict[str, Any] = {**HELLO, "store": True}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
THOUGHT = "<think>\nHm.\n</think>\n\nHello, wörld!"
CALL = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with background(ScriptedEngine(say("Hello")), Settings(port=0, store="memory")) as address:
        yield address


@pytest.fixture(scope="module", params=[THOUGHT, CALL], ids=["reasoning", "call"])
def speaker(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server whose model does more than talk."""
    chosen = Settings(port=0, store="memory", dialect="hermes")
    with background(ScriptedEngine(say(request.param)), chosen) as address:
        yield address


def kept(url: str, **fields: object) -> str:
    """The path of a new stored completion."""
    reply = post(url, PATH, {**KEPT, **fields})
    assert reply.status_code == 200, reply.text
    return f"{PATH}/{reply.json()['id']}"


def test_the_stored_object_is_the_reply_and_what_was_asked(url: str) -> None:
    asked = {"temperature": 0.5, "seed": 7, "user": "ann", "metadata": {"topic": "tea"}}
    reply = post(url, PATH, {**KEPT, **asked})
    assert get_json(url, f"{PATH}/{reply.json()['id']}") == {
        **reply.json(),
        "request_id": reply.headers["x-request-id"],
        "metadata": {"topic": "tea"},
        "input_user": "ann",
        "seed": 7,
        "temperature": 0.5,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "tools": None,
        "tool_choice": None,
        "response_format": None,
    }


def test_tools_and_formats_are_shown_as_they_were_sent(url: str) -> None:
    asked = {"tools": TOOLS, "tool_choice": "auto", "response_format": {"type": "text"}}
    shown = get_json(url, kept(url, **asked))
    assert {name: shown[name] for name in asked} == asked


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"tools": TOOLS},
        {"logprobs": True, "top_logprobs": 1},
        {"return_token_ids": True},
        {"max_tokens": 12},
        {"response_prefix": "So: ", "echo": True},
        {"include_reasoning": False},
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
def test_a_stream_is_stored_as_the_whole_answer(speaker: str, fields: dict[str, Any]) -> None:
    """There is one path to an answer, so the two differ in nothing but their names."""
    whole, streamed = post(speaker, PATH, {**KEPT, **fields}), stream(speaker, PATH, {**KEPT, **fields})
    first, second = (get_json(speaker, f"{PATH}/{one['id']}") for one in (whole.json(), streamed[0]))
    for own in (first, second):
        for name in ("id", "created", "request_id"):
            del own[name]
        for choice in own["choices"]:
            for call in choice["message"].get("tool_calls", []):
                del call["id"]
    assert first == second


@pytest.mark.parametrize("choices", [1, 2])
def test_a_stored_stream_says_the_same_as_any_other(url: str, choices: int) -> None:
    def told(**fields: object) -> list[tuple[Any, ...]]:
        asked = {**HELLO, "n": choices, "stream_options": {"include_usage": True}, **fields}
        parts = [chunk["choices"] or [{"index": choices, **chunk}] for chunk in stream(url, PATH, asked)]
        own = [(one["index"], one.get("delta"), one.get("finish_reason")) for (one,) in parts]
        return sorted(own, key=lambda one: one[0])

    assert told(store=True) == told()


@pytest.mark.parametrize("fields", [{}, {"store": False}, {"store": None}])
@pytest.mark.parametrize("streamed", [True, False])
def test_nothing_is_stored_unasked(url: str, fields: dict[str, Any], streamed: bool) -> None:
    asked = {**HELLO, **fields, "stream": streamed, "metadata": {"kept": "not"}}
    assert post(url, PATH, asked).status_code == 200
    assert get_json(url, PATH, **{"metadata[kept]": "not"})["data"] == []


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_that_failed_is_not_stored(serve: Serve, streamed: bool) -> None:
    url = serve(ScriptedEngine(say("hello", fault="exception", fault_at=2)), store="memory")
    assert "engine_failed" in post(url, PATH, {**KEPT, "stream": streamed}).text
    assert get_json(url, PATH)["data"] == []


def with_a_store_that_fails(body: dict[str, Any]) -> httpx.Response:
    async def fail(record: Record) -> None:
        raise StoreUnavailable("The disk is full.")

    async def run() -> httpx.Response:
        app = App(ScriptedEngine(say("Hello")), Settings(store="memory"))
        app.host.responses.store.save = fail  # type: ignore[method-assign,assignment]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(PATH, json=body)

    return asyncio.run(run())


@pytest.mark.parametrize("choices", [1, 2])
def test_a_stream_does_not_end_well_before_it_is_stored(choices: int) -> None:
    reply = with_a_store_that_fails({**KEPT, "n": choices, "stream": True})
    assert reply.text.count('"content":"o"') == choices
    assert '"finish_reason":"stop"' not in reply.text
    assert "[DONE]" not in reply.text
    assert "store_unavailable" in reply.text.split("\n\n")[-2]


def test_an_answer_that_cannot_be_stored_is_a_503() -> None:
    reply = with_a_store_that_fails(KEPT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")


@pytest.mark.parametrize("streamed", [True, False])
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, streamed: bool) -> None:
    command = [sys.executable, "-m", "tests.support.scripted_server", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with httpx.stream("POST", url + PATH, json={**KEPT, "stream": streamed}, timeout=30) as reply:
            next(line for line in reply.iter_lines() if '"finish_reason":"stop"' in line)
            server.kill()
    [record] = asyncio.run(records_in(tmp_path))
    assert json.loads(record.body)["choices"][0]["message"]["content"] == "Hello"


async def records_in(folder: Path) -> list[Record]:
    store = SqliteStore(folder, StoreLimits())
    await store.open()
    records = (await store.records("chat", "")).data
    await store.close()
    return records


def test_a_list_has_all_of_them_the_oldest_first(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), store="memory")
    paths = [kept(url) for _ in range(3)]
    listed = get_json(url, PATH)
    assert [f"{PATH}/{one['id']}" for one in listed["data"]] == paths
    assert listed["data"][0] == get_json(url, paths[0])
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][-1]["id"])
    assert get_json(url, PATH, order="desc")["data"] == listed["data"][::-1]


def test_pages_make_up_the_list(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), store="memory")
    paths = [kept(url) for _ in range(5)]
    first = get_json(url, PATH, limit=3)
    second = get_json(url, PATH, limit=3, after=first["last_id"])
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert [f"{PATH}/{one['id']}" for one in first["data"] + second["data"]] == paths


def test_a_list_can_be_narrowed_by_metadata_and_model(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), store="memory", model_alias=["other"])
    kept(url, metadata={"topic": "tea", "by": "ann"})
    kept(url, metadata={"topic": "tea"}, model="other")
    kept(url)

    def count(**query: str) -> int:
        return len(get_json(url, PATH, **query)["data"])

    assert (count(), count(**{"metadata[topic]": "tea"}), count(model="other")) == (3, 2, 1)
    assert count(**{"metadata[topic]": "tea", "metadata[by]": "ann"}) == 1
    assert count(**{"metadata[topic]": "coffee"}) == 0


def test_only_the_metadata_changes(url: str) -> None:
    path = kept(url, metadata={"a": "1", "b": "2"}, logprobs=True)
    before = get(url, path)
    changed = post(url, path, {"metadata": {"b": "3"}})
    assert changed.content == before.content.replace(b'{"a":"1","b":"2"}', b'{"b":"3"}')
    assert get(url, path).content == changed.content
    assert get_json(url, PATH, **{"metadata[a]": "1"})["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {}, "model": "x"}, "model"),
    ],
)
def test_what_cannot_be_changed_is_a_400(url: str, body: dict[str, Any], param: str) -> None:
    assert refusal(post(url, kept(url), body)) == (400, param)


def test_a_deleted_one_is_gone(url: str) -> None:
    path = kept(url)
    assert delete(url, path).json() == {
        "id": path.removeprefix(PATH + "/"),
        "object": "chat.completion.deleted",
        "deleted": True,
    }
    assert get(url, path).status_code == 404
    assert get(url, path + "/messages").status_code == 404
    assert delete(url, path).status_code == 404
    assert post(url, path, {"metadata": {}}).status_code == 404


def test_messages_are_those_of_the_request(url: str) -> None:
    parts = [{"type": "text", "text": "in parts"}]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    asked: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]
    path = kept(url, messages=asked)
    id_ = path.removeprefix(PATH + "/")
    listed = get_json(url, path + "/messages")["data"]
    shown = [
        {"name": None, "content_parts": None, **message, "id": f"{id_}-{number}"}
        for number, message in enumerate(asked)
    ]
    shown[1] |= {"content": None, "content_parts": parts}
    assert listed == shown


def test_messages_come_in_pages(url: str) -> None:
    path = kept(url, messages=[{"role": "user", "content": text} for text in "abcde"]) + "/messages"
    first = get_json(url, path, limit=2, order="desc")
    second = get_json(url, path, limit=9, order="desc", after=first["last_id"])
    assert [one["content"] for one in first["data"] + second["data"]] == list("edcba")
    assert (first["has_more"], second["has_more"]) == (True, False)


def test_what_belongs_to_another_key_is_not_there(serve: Serve) -> None:
    url = serve(ScriptedEngine(say("hi")), store="memory", api_key=["mine", "yours"])
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    path = f"{PATH}/{post(url, PATH, KEPT, **mine).json()['id']}"
    for method, below in [("GET", ""), ("DELETE", ""), ("GET", "/messages")]:
        assert send(method, url, path + below, headers=yours).status_code == 404
    assert post(url, path, {"metadata": {}}, **yours).status_code == 404
    assert get(url, PATH, **yours).json()["data"] == []
    assert get(url, path, **mine).status_code == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=chatcmpl-x", "after")],
)
@pytest.mark.parametrize("below", ["", "/messages"])
def test_a_bad_query_is_a_400_that_names_it(url: str, below: str, query: str, param: str) -> None:
    path = kept(url) + below if below else PATH
    assert refusal(get(url, f"{path}?{query}")) == (400, param)


@pytest.mark.parametrize(
    "id_", ["x", "x" * 5000, "%F0%9F%92%A9", "%00", "%FF", "a%2Fb", "..%2F..", "'%20OR%201=1--", "render"]
)
@pytest.mark.parametrize("below", ["", "/messages"])
def test_an_odd_id_is_just_not_there(url: str, id_: str, below: str) -> None:
    assert get(url, f"{PATH}/{id_}{below}").status_code == 404


@pytest.mark.parametrize("streamed", [True, False])
def test_without_a_store_nothing_can_be_stored(serve: Serve, streamed: bool) -> None:
    engine = ScriptedEngine(say("hi"))
    url = serve(engine, store="none")
    assert refusal(post(url, PATH, {**KEPT, "stream": streamed})) == (400, "store")
    assert engine.jobs == []
    assert get(url, PATH).status_code == 400
    assert post(url, PATH, {**HELLO, "store": False}).status_code == 200


THINKS = "<think>\nIt may rain.\n</think>\n" + CALL


@pytest.mark.parametrize(("stored", "given"), [(True, True), (False, False)])
def test_thoughts_of_stored_calls_outlive_the_server(
    tmp_path: Path, serve: Serve, stored: bool, given: bool
) -> None:
    settings = {"store": "sqlite", "data_dir": str(tmp_path), "dialect": "hermes"}
    chosen = Settings(port=0, **settings)  # type: ignore[arg-type]
    asked = {**HELLO, "tools": TOOLS, "store": stored}
    with background(ScriptedEngine(say(THINKS)), chosen) as url:
        message = post(url, PATH, asked).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    back = {"role": "assistant", "content": message["content"], "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "wet"}
    engine = parrot()
    url = serve(engine, **settings)
    body = {**asked, "messages": [*HELLO["messages"], back, result], "store": True}
    usage = post(url, PATH, body).json()["usage"]
    assert bool(usage["prompt_tokens_details"].get("restored_reasoning_tokens")) == given
