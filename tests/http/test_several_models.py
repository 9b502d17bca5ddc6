"""Several models in one server, over a socket: who answers, what is said meanwhile, who may change it."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import ModelFileError
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import Serve
from tests.support.http import HELLO, get, post, send, stream
from tests.support.pools import Shop
from tests.support.wait import becomes

CHAT = "/v1/chat/completions"


@pytest.fixture
def shop() -> Shop:
    return Shop()


def ask(url: str, name: str | None, **more: Any) -> httpx.Response:
    return post(url, CHAT, {**HELLO, **({"model": name} if name else {}), **more})


def said(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"]).strip()


def states(url: str) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in get(url, "/v1/models").json()["data"]}


def open_shop(shop: Shop, *names: str, first: str | None = None, **more: object) -> Any:
    settings = Settings(port=0, **{"store": "memory", **more})  # type: ignore[arg-type]
    pool = shop.pool(*names, settings=settings)
    pool.startup_model = pool.models[first] if first else None
    return background(pool, settings)


def test_engines_are_served_by_the_names_they_are_given(serve: Serve) -> None:
    url = serve({"one": ScriptedEngine(say("1")), "two": ScriptedEngine(say("2"))}, store="memory")
    assert states(url) == {"one": "loaded", "two": "loaded"}
    assert [said(ask(url, name)) for name in ("one", "two", None)] == ["1", "2", "1"]
    assert ask(url, "two").json()["model"] == "two"
    refused = ask(url, "three")
    assert refused.status_code == 404
    assert "available: one, two" in refused.json()["error"]["message"]
    assert post(url, "/models/unload", {"model": "one"}).json()["error"]["code"] == "not_unloadable"


def test_one_is_loaded_by_the_request_that_names_it(shop: Shop) -> None:
    with open_shop(shop, "a", "b") as url:
        assert states(url) == {"a": "unloaded", "b": "unloaded"}
        assert said(ask(url, "b")) == "I am b."
        assert states(url) == {"a": "unloaded", "b": "loaded"}
        assert get(url, "/v1/models/a").json()["status"] == {"value": "unloaded"}
    assert not shop.open


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {**HELLO, "max_tokens": 9}),
        ("/api/chat", {**HELLO, "stream": False}),
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/chat/completions/render", HELLO),
        ("/v1/messages/count_tokens", HELLO),
    ],
)
def test_every_api_is_answered_by_the_model_it_names(shop: Shop, path: str, body: dict[str, Any]) -> None:
    with open_shop(shop, "a", "b") as url:
        assert post(url, path, {**body, "model": "b"}).status_code == 200
        assert shop.times == ["b"]
        assert post(url, path, {**body, "model": "c"}).status_code == 404


def test_a_request_may_be_refused_while_its_model_is_loaded(shop: Shop) -> None:
    gate = shop.gates["b"] = threading.Event()
    with open_shop(shop, "a", "b", while_loading="refuse") as url:
        reply = ask(url, "b")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "loading")
        assert int(reply.headers["retry-after"]) >= 1
        gate.set()
        assert becomes(lambda: states(url)["b"] == "loaded")
        assert said(ask(url, "b")) == "I am b."


def test_a_stream_says_what_it_waits_for(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.http.app_state.FIRST_COMMENT_S", 0.02)
    gate = shop.gates["b"] = threading.Event()
    threading.Timer(0.3, gate.set).start()
    with open_shop(shop, "a", "b") as url:
        reply = ask(url, "b", stream=True)
        assert reply.text.startswith(": loading 0%")
        assert reply.text.endswith("data: [DONE]\n\n")
        assert len(stream(url, CHAT, {**HELLO, "model": "b"})) > 3


def test_a_stream_that_has_begun_tells_that_the_model_cannot_be_loaded(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.http.app_state.FIRST_COMMENT_S", 0.02)
    gate = shop.gates["b"] = threading.Event()
    shop.broken["b"] = ModelFileError("It is damaged.")
    threading.Timer(0.3, gate.set).start()
    with open_shop(shop, "a", "b") as url:
        reply = ask(url, "b", stream=True)
        assert reply.status_code == 200 and "model_not_loaded" in reply.text
        again = ask(url, "b")
        assert (again.status_code, again.json()["error"]["code"]) == (503, "model_not_loaded")
        assert get(url, "/v1/models/b").json()["status"] == {"value": "failed", "error": "It is damaged."}
        assert said(ask(url, "a")) == "I am a."


def test_a_load_does_not_hold_up_others(shop: Shop) -> None:
    shop.gates["b"] = threading.Event()
    with open_shop(shop, "a", "b") as url:
        late = threading.Thread(target=ask, args=(url, "b"))
        late.start()
        assert becomes(lambda: states(url)["b"] == "loading")
        assert said(ask(url, "a")) == "I am a."
        shop.gates["b"].set()
        late.join()


def test_the_port_answers_while_the_first_model_is_loaded(shop: Shop) -> None:
    gate = shop.gates["a"] = threading.Event()
    settings = Settings(port=_free_port(), store="memory")
    pool = shop.pool("a", settings=settings)
    pool.startup_model, url = pool.get("a"), f"http://127.0.0.1:{settings.port}"
    asked: list[Any] = []

    def look() -> None:
        assert becomes(lambda: _answers(url))
        asked.append(get(url, "/health"))
        asked.append(ask(url, "a"))
        asked.append(get(url, "/ready"))
        asked.append(get(url, "/"))
        asked.append(states(url))
        gate.set()

    looking = threading.Thread(target=look)
    looking.start()
    with background(pool, settings):
        looking.join()
        health, chat, ready, page, listed = asked
        assert (health.status_code, health.json()["status"]) == (503, "loading model")
        assert health.headers["retry-after"]
        assert (chat.status_code, chat.json()["error"]["code"]) == (503, "loading")
        assert (ready.status_code, page.status_code, listed) == (503, 200, {"a": "loading"})
        assert said(ask(url, "a")) == "I am a." and get(url, "/health").status_code == 200


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        return bool(get(url, "/health").status_code)
    except httpx.TransportError:
        return False


def test_a_server_whose_only_model_cannot_be_loaded_ends(shop: Shop) -> None:
    shop.broken["a"] = ModelFileError("It is damaged.")
    with pytest.raises(ModelFileError, match="It is damaged"), open_shop(shop, "a", first="a"):
        pass


# For administrators.


@pytest.fixture
def guarded(shop: Shop) -> Iterator[str]:
    with open_shop(shop, "a", "b", api_key=["user"], admin_key=["admin"]) as url:
        yield url


ADMIN = {"authorization": "Bearer admin"}
USER = {"authorization": "Bearer user"}
CHANGES = ["/models/load", "/models/unload", "/v1/model/load", "/v1/model/unload", "/api/copy", "/api/create"]


@pytest.mark.parametrize("path", [*CHANGES, "/api/pull"])
def test_changes_are_for_administrators(guarded: str, shop: Shop, path: str) -> None:
    body = {"model": "nobody/nothing", "source": "a", "destination": "c"}
    assert send("POST", guarded, path, json=body, headers=USER).status_code == 403
    assert send("POST", guarded, path, json=body).status_code == 401
    assert not shop.times


def test_without_an_admin_key_it_is_said_how_to_have_one(shop: Shop) -> None:
    with open_shop(shop, "a", api_key=["user"]) as url:
        refused = send("POST", url, "/models/load", json={"model": "a"}, headers=USER)
        assert refused.status_code == 403
        assert "DRAGOMAN_ADMIN_KEY" in refused.json()["error"]["message"]


def test_llama_servers_way(guarded: str, shop: Shop) -> None:
    loaded = send("POST", guarded, "/models/load", json={"model": "a"}, headers=ADMIN)
    assert loaded.json() == {"success": True}
    assert becomes(lambda: shop.open == ["a"])
    streamed = send("POST", guarded, "/models/load", json={"model": "b", "stream": True}, headers=ADMIN)
    assert streamed.text.rstrip().endswith('{"model":"b","status":{"value":"loaded"}}')
    assert send("POST", guarded, "/models/unload", json={"model": "a"}, headers=ADMIN).json()["success"]
    assert shop.open == ["b"]
    assert send("POST", guarded, "/models/load", json={"model": "x"}, headers=ADMIN).status_code == 404


def test_tabbys_way(guarded: str, shop: Shop) -> None:
    loaded = send("POST", guarded, "/v1/model/load", json={"model_name": "b"}, headers=ADMIN)
    assert '"status":"finished"' in loaded.text.split("\n\n")[-2]
    body = send("GET", guarded, "/v1/model/list", headers=USER).json()
    assert [each["id"] for each in body["data"]] == ["a", "b"]
    assert send("GET", guarded, "/v1/model", headers=USER).json()["id"] == "a"
    assert send("POST", guarded, "/v1/model/unload", headers=ADMIN).status_code == 200
    assert not shop.open


def test_ollamas_way(guarded: str, shop: Shop) -> None:
    copied = send("POST", guarded, "/api/copy", json={"source": "b", "destination": "c"}, headers=ADMIN)
    assert copied.status_code == 200
    body = {**HELLO, "model": "c", "stream": False}
    assert send("POST", guarded, "/api/chat", json=body, headers=USER).json()["message"]["content"]
    running = send("GET", guarded, "/api/ps", headers=USER).json()["models"]
    assert [each["name"] for each in running] == ["b:latest", "c:latest"]
    assert len(send("GET", guarded, "/api/tags", headers=USER).json()["models"]) == 3
    again = send("POST", guarded, "/api/copy", json={"source": "b", "destination": "a"}, headers=ADMIN)
    assert again.status_code == 409
    gone = send("DELETE", guarded, "/api/delete", json={"model": "a"}, headers=ADMIN)
    assert (gone.status_code, shop.open) == (403, ["b"])


def test_the_states_are_told_as_they_change(shop: Shop) -> None:
    shop.gates["b"] = threading.Event()
    with open_shop(shop, "a", "b") as url, httpx.stream("GET", url + "/models/sse", timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        assert {next(lines), next(lines)} == {
            'data: {"model":"a","status":{"value":"unloaded"}}',
            'data: {"model":"b","status":{"value":"unloaded"}}',
        }
        assert post(url, "/models/load", {"model": "b"}).status_code == 200
        assert '"loading"' in next(lines)
        shop.gates["b"].set()
        assert next(line for line in lines if '"loaded"' in line)


def test_keep_alive_puts_a_model_to_sleep_and_a_request_wakes_it(shop: Shop) -> None:
    with open_shop(shop, "a", "b") as url:
        assert said(ask(url, "b")) == "I am b."
        body = post(url, "/api/generate", {"model": "b", "keep_alive": 0, "stream": False}).json()
        assert body["done_reason"] == "unload"
        assert becomes(lambda: states(url)["b"] == "sleeping")
        reply = post(url, "/api/chat", {**HELLO, "model": "b", "keep_alive": "5m", "stream": False})
        assert "x-dragoman-ignored" not in reply.headers
        [running] = get(url, "/api/ps").json()["models"]
        assert running["expires_at"] > time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        assert post(url, "/api/chat", {**HELLO, "model": "b", "keep_alive": "soon"}).status_code == 400


def test_requests_load_nothing_where_that_is_not_wanted(shop: Shop) -> None:
    with open_shop(shop, "a", "b", models_autoload=False) as url:
        refused = ask(url, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_loaded")
        assert post(url, "/models/load", {"model": "b", "stream": True}).status_code == 200
        assert said(ask(url, "b")) == "I am b."


def test_an_unloaded_model_ends_its_streams_with_an_error(shop: Shop) -> None:
    shop.more, shop.interval = "x" * 2000, 0.02
    with open_shop(shop, "a", "b", shutdown_grace=0) as url:
        body = {**HELLO, "model": "a", "stream": True}
        with httpx.stream("POST", url + CHAT, json=body, timeout=60) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            assert post(url, "/models/unload", {"model": "a"}).json() == {"success": True}
            assert '"error"' in [*lines][-1]


def test_a_response_in_the_background_keeps_its_model(shop: Shop) -> None:
    shop.more, shop.interval = "x" * 20, 0.01
    with open_shop(shop, "a", "b", models_max=1) as url:
        body = post(url, "/v1/responses", {"input": "hi", "model": "a", "background": True}).json()
        assert said(ask(url, "b")).startswith("I am b.")
        stored = get(url, f"/v1/responses/{body['id']}").json()
        assert (stored["status"], stored["model"]) == ("completed", "a")


def test_a_batch_loads_the_model_it_names(shop: Shop, tmp_path: Any) -> None:
    import json

    with open_shop(shop, "a", "b", files_dir=str(tmp_path), while_loading="refuse") as url:
        lines = [
            {"custom_id": name, "method": "POST", "url": CHAT, "body": {**HELLO, "model": name}}
            for name in ("a", "b")
        ]
        form = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())}
        file = send("POST", url, "/v1/files", files=form, data={"purpose": "batch"}).json()["id"]
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        batch = post(url, "/v1/batches", body).json()["id"]
        assert becomes(lambda: get(url, f"/v1/batches/{batch}").json()["status"] == "completed")
        counts = get(url, f"/v1/batches/{batch}").json()["request_counts"]
        assert (counts["completed"], counts["failed"]) == (2, 0)
        assert sorted(shop.times) == ["a", "b"]


def test_nothing_of_an_unloaded_model_stays(shop: Shop) -> None:
    settings = Settings(port=0, store="memory")
    pool = shop.pool("a", "b", settings=settings)
    with background(pool, settings) as url:
        for path, body in ((CHAT, HELLO), ("/v1/responses", {"input": "hi"}), ("/api/chat", HELLO)):
            assert post(url, path, {**body, "model": "a"}).status_code == 200
            gone = weakref.ref(pool.get("a").loaded)
            assert gone() is not None
            assert post(url, "/models/unload", {"model": "a"}).status_code == 200
            assert becomes(lambda gone=gone: gc.collect() is not None and gone() is None)  # type: ignore[misc]
