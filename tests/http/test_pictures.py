"""Pictures and sounds through every API, to an engine that takes them and to one that does not."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from dragoman.client import Client, FileFormatError, audio, image
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.media.samples import picture, sound
from tests.support.http import get, post

RED, TONE = picture("png", width=64, height=64), sound("wav")
RED64 = b64encode(RED).decode()
URL = f"data:image/png;base64,{RED64}"
PART = {"type": "image_url", "image_url": {"url": URL}}
INPUT = {"type": "input_image", "image_url": URL, "detail": "low"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED64}}
CALL = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
ASKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART]}]},
        "messages[0].content[0]",
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [INPUT]}], "store": False},
        "input[0].content[0]",
    ),
    "output": (
        "/v1/responses",
        {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [INPUT]}]},
        "input[1].output[0]",
    ),
    "input_tokens": (
        "/v1/responses/input_tokens",
        {"input": [{"role": "user", "content": [INPUT]}]},
        "input[0].content[0]",
    ),
    "messages": (
        "/v1/messages",
        {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": [BLOCK]}]},
        "messages[0].content[0]",
    ),
    "count_tokens": (
        "/v1/messages/count_tokens",
        {"model": "scripted", "messages": [{"role": "user", "content": [BLOCK]}]},
        "messages[0].content[0]",
    ),
    "ollama chat": (
        "/api/chat",
        {
            "model": "scripted",
            "stream": False,
            "messages": [{"role": "user", "content": "?", "images": [RED64]}],
        },
        "messages[0].images[0]",
    ),
    "ollama generate": (
        "/api/generate",
        {"model": "scripted", "stream": False, "prompt": "?", "images": [RED64]},
        "images[0]",
    ),
    "tokenize": ("/tokenize", {"messages": [{"role": "user", "content": [PART]}]}, "messages[0].content[0]"),
}
each = pytest.mark.parametrize("name", ASKED)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(say("Red."), modalities=("image", "audio"))


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with background(engine, Settings(port=0, store="memory")) as address:
        yield address


@pytest.fixture(scope="module")
def blind() -> Iterator[str]:
    with background(ScriptedEngine(say("What?")), Settings(port=0, store="memory")) as address:
        yield address


@each
def test_a_model_that_sees_is_shown_the_picture(name: str, url: str, engine: ScriptedEngine) -> None:
    path, body, _ = ASKED[name]
    before = len(engine.jobs)
    reply = post(url, path, body)
    assert reply.status_code == 200, reply.text
    for job in engine.jobs[before:]:
        assert [span.media.data for span in job.media] == [RED]


@each
def test_a_model_of_text_says_so_of_the_field(name: str, blind: str) -> None:
    path, body, param = ASKED[name]
    reply = post(blind, path, body)
    assert reply.status_code == 400
    assert "images are not supported" in reply.text
    if "messages" not in path or "v1/chat" in path:
        assert f'"param":"{param}"' in reply.text


SCREEN = {"type": "computer_screenshot", "image_url": URL}
USED = [
    {"type": "computer_call", "call_id": "s", "action": {"type": "screenshot"}},
    {"type": "computer_call_output", "call_id": "s", "output": SCREEN},
]


@pytest.mark.parametrize("stored", [True, False])
def test_a_screen_is_seen(url: str, engine: ScriptedEngine, stored: bool) -> None:
    first = post(url, "/v1/responses", {"input": USED, "store": True}).json()
    assert [span.media.data for span in engine.jobs[-1].media] == [RED]
    more = {"previous_response_id": first["id"], "input": "?"} if stored else {"input": [*USED, *USED]}
    assert post(url, "/v1/responses", more).status_code == 200
    assert [span.media.data for span in engine.jobs[-1].media] == [RED] * (1 if stored else 2)
    items = get(url, f"/v1/responses/{first['id']}/input_items?order=asc").json()["data"]
    assert items[1]["output"] == SCREEN


def test_a_model_of_text_is_told_of_a_screen(blind: str) -> None:
    counted = post(blind, "/v1/responses/input_tokens", {"input": USED})
    assert (counted.status_code, post(blind, "/v1/responses", {"input": USED}).status_code) == (200, 200)


def test_a_screen_that_is_no_picture_is_told_of(url: str, engine: ScriptedEngine) -> None:
    for address in ("data:image/png;base64,AAAA", "https://example.com/a.png"):
        broken = {**USED[1], "output": {**SCREEN, "image_url": address}}
        assert post(url, "/v1/responses", {"input": [USED[0], broken]}).status_code == 200
        assert not engine.jobs[-1].media


def test_a_picture_may_be_looked_at_in_two_ways(url: str, engine: ScriptedEngine) -> None:
    ways = ["low", "auto", "high", "low"]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": URL, "detail": way}} for way in ways]
    for asked in (content, content[::-1], [*content, {"type": "text", "text": "?"}]):
        post(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": asked}]})
        shown = [(span.media.detail, span.media.data) for span in engine.jobs[-1].media]
        assert shown == [(part["image_url"]["detail"], RED) for part in asked if "image_url" in part]


def test_a_response_goes_on_from_one_with_a_picture(url: str, engine: ScriptedEngine) -> None:
    first = post(url, "/v1/responses", {"input": [{"role": "user", "content": [INPUT]}]}).json()
    items = get(url, f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert items[0]["content"] == [INPUT]
    post(url, "/v1/responses", {"input": "And now?", "previous_response_id": first["id"]})
    assert [span.media.data for span in engine.jobs[-1].media] == [RED]


def test_a_conversation_keeps_a_picture(url: str, engine: ScriptedEngine) -> None:
    fields = {"items": [{"type": "message", "role": "user", "content": [INPUT]}]}
    kept = post(url, "/v1/conversations", fields).json()["id"]
    post(url, "/v1/responses", {"input": "What is it?", "conversation": kept})
    assert [span.media.data for span in engine.jobs[-1].media] == [RED]
    items = get(url, f"/v1/conversations/{kept}/items?order=asc").json()["data"]
    assert items[0]["content"] == [INPUT]


def test_a_stored_completion_gives_the_picture_back(url: str) -> None:
    body = {"messages": [{"role": "user", "content": [PART]}], "store": True}
    id_ = post(url, "/v1/chat/completions", body).json()["id"]
    result = get(url, f"/v1/chat/completions/{id_}/messages").json()["data"]
    assert result[0]["content_parts"] == [PART]


def test_models_say_what_they_take(url: str, blind: str) -> None:
    items = [get(each, "/v1/models").json()["data"][0]["input_modalities"] for each in (url, blind)]
    assert items == [["text", "image", "audio"], ["text"]]
    shown = [post(each, "/api/show", {"model": "scripted"}).json()["capabilities"] for each in (url, blind)]
    assert {"vision", "audio"} <= {*shown[0]}
    assert not {"vision", "audio"} & {*shown[1]}


def test_the_client_of_openai(url: str, engine: ScriptedEngine) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        result = [{"type": "text", "text": "?"}, PART, audio(TONE)]
        messages: Any = [{"role": "user", "content": result}]
        chat_completion = client.chat.completions.create(model="scripted", messages=messages)
        assert chat_completion.choices[0].message.content == "Red."
        assert chat_completion.usage is not None
        assert chat_completion.usage.prompt_tokens == len(engine.jobs[-1].prompt)
        assert [span.media.kind for span in engine.jobs[-1].media] == ["image", "audio"]
        items: Any = [{"role": "user", "content": [INPUT]}]
        assert client.responses.create(model="scripted", input=items).output_text == "Red."


def test_the_client_of_anthropic(url: str, engine: ScriptedEngine) -> None:
    with anthropic.Anthropic(base_url=url, api_key="x") as client:
        messages: Any = [{"role": "user", "content": [BLOCK, {"type": "text", "text": "?"}]}]
        result: Any = client.messages.create(model="scripted", max_tokens=9, messages=messages)
        assert result.content[0].text == "Red."
        counted = client.messages.count_tokens(model="scripted", messages=messages)
        assert counted.input_tokens == len(engine.jobs[-1].prompt)


def test_our_client_sends_files_and_bytes(url: str, tmp_path: Any, engine: ScriptedEngine) -> None:
    file = tmp_path / "named.jpg"
    file.write_bytes(RED)
    with Client(url) as client:
        content = [{"type": "text", "text": "?"}, image(file), audio(TONE)]
        with client.chat([{"role": "user", "content": content}]) as stream:
            for _ in stream:
                pass
    assert [span.media.data for span in engine.jobs[-1].media] == [RED, TONE]
    assert json.dumps(image(RED)).count("image/png") == 1
    for wrong in (b"text", tmp_path / "none.png"):
        with pytest.raises(FileFormatError):
            image(wrong)
