"""The default model with a projector beside it: pictures over real sockets, from real clients.

The projector's weights are random, so it sees nothing that one could name. But what the model says of two
pictures differs, and of one it is always the same: by that is known which of them was shown.
"""

import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from anthropic import Anthropic
from anthropic import BadRequestError as MessageRefused
from msgspec import Struct
from openai import OpenAI
from PIL import Image
from websockets.sync.client import connect

from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.conformance.conftest import MODEL
from tests.http.test_attachments import pdf
from tests.media.samples import picture, png_that_says, saved, sound
from tests.support.own_server import served
from tests.support.responses import ENDS
from tests.support.tiny_projectors import write_projector
from tests.support.wait import becomes

WIDTH = 576
ROWS = 16
"""Of the model, and of each picture."""
RED, BLUE = (picture("png", 64, 48, colour) for colour in ("red", "blue"))
ASK = "What is this?"
TOKENS = 8


class SeenAnswer(Struct, frozen=True):
    text: str
    prompt_tokens: int


class SeeingServer(Struct):
    """A server whose model sees, and who asks it."""

    engine: LocalEngine
    url: str
    openai: OpenAI
    anthropic: Anthropic
    ollama: ollama.Client

    @property
    def encoded(self) -> int:
        assert self.engine._pictures is not None
        return self.engine._pictures.encoded

    @property
    def busy(self) -> bool:
        return self.engine._worker._scheduler.busy

    def chat(self, *content: Any, **more: Any) -> Any:
        messages = [{"role": "user", "content": [*content, text(ASK)]}]
        asked = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, **more}
        return self.openai.chat.completions.create(model=MODEL, **asked)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeeingServer]:
    projector = write_projector(tmp_path_factory.mktemp("seeing") / "mmproj.gguf", "plain", width=WIDTH)
    # What is said of a picture must not depend on what else is computed, since it tells which one it was.
    options = LocalOptions(
        runner="llamacpp",
        name=MODEL,
        context=1024,
        slots=4,
        threads=1,
        deterministic=True,
        mmproj=str(projector),
    )
    engine = LocalEngine.open(default_model(), options)
    with (
        background(engine, Settings(port=0, store="memory")) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as chats,
        Anthropic(base_url=url, api_key="none", max_retries=0) as messages,
    ):
        yield SeeingServer(engine, url, chats, messages, ollama.Client(host=url))


def in_base64(data: bytes) -> str:
    return b64encode(data).decode()


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def image_url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_base64(data)}"}}


def input_image(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "detail": "auto", "image_url": image_url(data)["image_url"]["url"]}


def block(data: bytes, kind: str = "image", media: str = "image/png") -> dict[str, Any]:
    return {"type": kind, "source": {"type": "base64", "media_type": media, "data": in_base64(data)}}


# One question about a picture, in every way in which it can be asked.


def by_chat(on: SeeingServer, data: bytes) -> SeenAnswer:
    result = on.chat(image_url(data))
    return SeenAnswer(result.choices[0].message.content, result.usage.prompt_tokens)


def by_stream(on: SeeingServer, data: bytes) -> SeenAnswer:
    chunks = [*on.chat(image_url(data), stream=True, stream_options={"include_usage": True})]
    words = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return SeenAnswer(words, chunks[-1].usage.prompt_tokens)


def by_batch(on: SeeingServer, data: bytes) -> SeenAnswer:
    messages = [{"role": "user", "content": [image_url(data), text(ASK)]}]
    body = {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = on.openai.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    begun = on.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert becomes(lambda: on.openai.batches.retrieve(begun.id).status == "completed")
    output = on.openai.batches.retrieve(begun.id).output_file_id
    assert output is not None
    result = json.loads(on.openai.files.content(output).text)["response"]["body"]
    return SeenAnswer(result["choices"][0]["message"]["content"], result["usage"]["prompt_tokens"])


def items(data: bytes) -> list[Any]:
    return [{"role": "user", "content": [input_image(data), text(ASK, "input_text")]}]


def heard(response: Any) -> SeenAnswer:
    assert response.usage is not None
    return SeenAnswer(response.output_text, response.usage.input_tokens)


def respond(on: SeeingServer, input: Any, **more: Any) -> Any:
    asked = {"max_output_tokens": TOKENS, "temperature": 0, **more}
    return on.openai.responses.create(model=MODEL, input=input, **asked)


def by_response(on: SeeingServer, data: bytes) -> SeenAnswer:
    return heard(respond(on, items(data)))


def by_background(on: SeeingServer, data: bytes) -> SeenAnswer:
    begun = respond(on, items(data), background=True).id
    while (response := on.openai.responses.retrieve(begun)).status in ("queued", "in_progress"):
        time.sleep(0.01)
    return heard(response)


def by_conversation(on: SeeingServer, data: bytes) -> SeenAnswer:
    """The picture is in it before anything is asked."""
    shown: Any = [{"type": "message", **each} for each in items(data)]
    kept = on.openai.conversations.create(items=shown)
    return heard(respond(on, [], conversation=kept.id))


def by_socket(on: SeeingServer, data: bytes) -> SeenAnswer:
    asked = {"type": "response.create", "model": MODEL, "input": items(data), "temperature": 0}
    with connect(on.url.replace("http", "ws", 1) + "/v1/responses", max_size=None) as socket:
        socket.send(json.dumps({**asked, "max_output_tokens": TOKENS}))
        while (event := json.loads(socket.recv(timeout=60)))["type"] not in (*ENDS, "error"):
            pass
    result = event["response"]
    return SeenAnswer(result["output"][0]["content"][0]["text"], result["usage"]["input_tokens"])


def message(on: SeeingServer, messages: Any) -> Any:
    """Anthropic's client has no word for a temperature any more."""
    greedy = {"temperature": 0}
    return on.anthropic.messages.create(model=MODEL, max_tokens=TOKENS, messages=messages, extra_body=greedy)


def by_message(on: SeeingServer, data: bytes) -> SeenAnswer:
    messages: Any = [{"role": "user", "content": [block(data), text(ASK)]}]
    result = message(on, messages)
    used = result.usage
    return SeenAnswer(result.content[0].text, used.input_tokens + (used.cache_read_input_tokens or 0))


def by_ollama(on: SeeingServer, data: bytes) -> SeenAnswer:
    """Its pictures stand behind the words of a message, which is another prompt: see below."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "", "images": [data]},
        {"role": "user", "content": ASK},
    ]
    chat_response = on.ollama.chat(MODEL, messages, options={"num_predict": TOKENS, "temperature": 0})
    return SeenAnswer(chat_response.message.content or "", chat_response.prompt_eval_count or 0)


WAYS: dict[str, Callable[[SeeingServer, bytes], SeenAnswer]] = {
    "stream": by_stream,
    "batch": by_batch,
    "response": by_response,
    "background": by_background,
    "conversation": by_conversation,
    "socket": by_socket,
    "message": by_message,
}


@pytest.fixture(scope="module")
def known(seeing: SeeingServer) -> dict[bytes, SeenAnswer]:
    return {data: by_chat(seeing, data) for data in (RED, BLUE)}


def test_what_is_said_tells_which_picture_it_was(known: dict[bytes, SeenAnswer]) -> None:
    assert known[RED].text != known[BLUE].text
    assert known[RED].prompt_tokens == known[BLUE].prompt_tokens > ROWS


@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_shown_the_same_in_every_api(
    seeing: SeeingServer, known: dict[bytes, SeenAnswer], way: str
) -> None:
    assert WAYS[way](seeing, BLUE) == known[BLUE]
    assert WAYS[way](seeing, RED) == known[RED]


def test_ollamas_client_shows_pictures(seeing: SeeingServer) -> None:
    assert by_ollama(seeing, RED).text != by_ollama(seeing, BLUE).text


def test_ollamas_prompts_show_pictures(seeing: SeeingServer) -> None:
    options = {"num_predict": TOKENS, "temperature": 0}
    red, blue = (
        seeing.ollama.generate(MODEL, ASK, images=[data], options=options).response for data in (RED, BLUE)
    )
    assert red != blue


# What a picture costs.


def test_a_second_question_is_read_from_behind_the_picture(seeing: SeeingServer) -> None:
    shown = picture("png", 64, 48, "green")
    seeing.chat(image_url(shown))
    before = seeing.encoded
    again = seeing.chat(image_url(shown), text("How large is it? "))
    assert seeing.encoded == before
    assert again.usage.prompt_tokens_details.cached_tokens > ROWS


def test_another_picture_shares_nothing_behind_its_beginning(seeing: SeeingServer) -> None:
    first = seeing.chat(image_url(picture("png", 64, 48, "yellow")))
    other = seeing.chat(image_url(picture("png", 64, 48, "orange")))
    cached = other.usage.prompt_tokens_details.cached_tokens
    assert cached <= first.usage.prompt_tokens - ROWS - len(ASK.split())


def test_several_answers_are_about_one_encoding(seeing: SeeingServer) -> None:
    before = seeing.encoded
    result = seeing.chat(image_url(picture("png", 64, 48, "pink")), n=2, temperature=1.5, seed=1)
    assert len({choice.message.content for choice in result.choices}) == 2
    assert seeing.encoded == before + 1


def test_who_leaves_is_forgotten(seeing: SeeingServer) -> None:
    shown = image_url(picture("png", 64, 48, "brown"))
    stream = seeing.chat(shown, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    assert seeing.busy
    stream.close()
    assert becomes(lambda: not seeing.busy)


# Pictures elsewhere than in a question.


CALL_ID = "call_1"


def result_in_chat(on: SeeingServer, data: bytes) -> str:
    call = {"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": [image_url(data)]},
    ]
    chat_completion = on.openai.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=TOKENS, temperature=0
    )
    return chat_completion.choices[0].message.content or ""


def result_in_response(on: SeeingServer, data: bytes) -> str:
    call = {"type": "function_call", "call_id": CALL_ID, "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": CALL_ID, "output": [input_image(data)]}
    return heard(respond(on, [{"role": "user", "content": "Look."}, call, output])).text


def result_in_message(on: SeeingServer, data: bytes) -> str:
    call = {"type": "tool_use", "id": CALL_ID, "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": CALL_ID, "content": [block(data)]}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return str(message(on, messages).content[0].text)


@pytest.mark.parametrize("ask", [result_in_chat, result_in_response, result_in_message])
def test_a_result_of_a_tool_is_looked_at(
    seeing: SeeingServer, ask: Callable[[SeeingServer, bytes], str]
) -> None:
    assert ask(seeing, RED) != ask(seeing, BLUE)


def test_a_page_of_a_document_is_read_and_looked_at(seeing: SeeingServer) -> None:
    document = block(pdf("A potter"), "document", "application/pdf")
    before = seeing.encoded
    messages: Any = [{"role": "user", "content": [document, text(ASK)]}]
    result = seeing.anthropic.messages.create(model=MODEL, max_tokens=1, messages=messages)
    assert result.usage.input_tokens + (result.usage.cache_read_input_tokens or 0) > ROWS
    assert seeing.encoded == before + 1


def test_a_response_goes_on_from_a_picture(seeing: SeeingServer) -> None:
    texts = []
    for data in (RED, BLUE):
        first = respond(seeing, [{"role": "user", "content": [input_image(data)]}])
        second = respond(seeing, ASK, previous_response_id=first.id)
        texts.append(second.output_text)
        assert second.usage.input_tokens > first.usage.input_tokens
    assert texts[0] != texts[1]


def test_a_picture_outlives_its_server(tmp_path: Path) -> None:
    """The projector is found beside the model, by the command that everybody begins with."""
    model = tmp_path / "SmolLM2.gguf"
    model.symlink_to(default_model())
    write_projector(tmp_path / "mmproj-SmolLM2.gguf", "plain", width=WIDTH)
    flags = ["--model", str(model), "--runner", "llamacpp", "--data-dir", str(tmp_path / "data")]
    flags += ["--threads", "1", "--context", "1024"]
    body = {"input": items(RED), "max_output_tokens": 1}
    with served(*flags) as first:
        reply = httpx.post(f"{first.url}/v1/responses", json=body, timeout=120).json()
    with served(*flags) as second:
        more = {"input": "And now?", "previous_response_id": reply["id"], "max_output_tokens": 1}
        after = httpx.post(f"{second.url}/v1/responses", json=more, timeout=120).json()
        kept = httpx.get(f"{second.url}/v1/responses/{reply['id']}/input_items").json()["data"]
    assert kept[0]["content"][0] == input_image(RED)
    assert after["usage"]["input_tokens"] > reply["usage"]["input_tokens"] > ROWS


# What is no picture.

CUT = saved(Image.effect_noise((200, 200), 90), "jpeg")[:-2000]
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "cut off": (image_url(CUT), "unsupported_content"),
    "its beginning alone": (image_url(CUT[:20]), "invalid_value"),
    "another format": (image_url(SVG), "unsupported_content"),
    "no base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, "invalid_value"),
    "empty": (image_url(b""), "invalid_value"),
    "a bomb": (image_url(png_that_says(60_000, 60_000)), "limit_exceeded"),
    "less than it says": (image_url(png_that_says(900, 900)), "unsupported_content"),
    "an address": (
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        "media_host_not_allowed",
    ),
    "a sound": (
        {"type": "input_audio", "input_audio": {"data": in_base64(sound("wav")), "format": "wav"}},
        "unsupported_content",
    ),
    "more than fit": ({}, "context_length_exceeded"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_picture_is_refused_by_its_place(seeing: SeeingServer, name: str) -> None:
    part, code = BAD[name]
    content = [part] if part else [image_url(RED)] * 80
    with pytest.raises(openai.BadRequestError) as refused:
        seeing.chat(*content)
    assert refused.value.code == code
    assert str(refused.value.param).startswith("messages")


def test_messages_spell_it_in_their_way(seeing: SeeingServer) -> None:
    messages: Any = [{"role": "user", "content": [block(SVG)]}]
    with pytest.raises(MessageRefused, match=r"messages\[0\]\.content\[0\]': SVG is not supported"):
        seeing.anthropic.messages.create(model=MODEL, max_tokens=1, messages=messages)
