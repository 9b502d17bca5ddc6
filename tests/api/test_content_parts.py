"""Pictures and sounds in parts of messages, in all the forms in which clients send them."""

import json
from base64 import b64encode
from hashlib import sha256
from typing import Any

import pytest

from dragoman.api import ollama
from dragoman.api.chat import request as chat
from dragoman.api.chat.body_cache import BodyCache
from dragoman.api.messages import request as messages
from dragoman.api.request_decoder import IgnoredFields
from dragoman.api.responses.items import normalise
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.types import Conversation
from tests.media.samples import picture, sound

RED, BLUE, TONE = picture("png"), picture("png", colour="blue"), sound("wav")
RED64, BLUE64, TONE64 = (b64encode(data).decode() for data in (RED, BLUE, TONE))
URL = f"data:image/png;base64,{RED64}"
LIMITS = Limits()


def conversation(*parts: Any, role: str = "user", **fields: Any) -> Conversation:
    body = {"messages": [{"role": role, "content": [*parts], **fields}]}
    return chat.conversation(chat.read(json.dumps(body).encode(), LIMITS, IgnoredFields("warn")))


PICTURES: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": {"url": URL, "detail": "original"}},
    {"type": "image_url", "image_url": URL},
    {"type": "input_image", "image_url": URL, "detail": "low"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED64}},
    {"type": "image", "source_type": "base64", "data": RED64, "mime_type": "image/png"},
    {"type": "image", "base64": RED64, "mime_type": "image/png"},
    {"type": "image", "url": URL},
    {"type": "image", "image": URL},
    {"type": "text", "text": "", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": {"url": URL.replace("png", "jpeg")}},
    {"type": "image", "base64": "\n".join(RED64[at : at + 76] for at in range(0, len(RED64), 76))},
]


@pytest.mark.parametrize("part", PICTURES)
def test_a_picture_is_one_however_it_is_sent(part: dict[str, Any]) -> None:
    result = conversation({"type": "text", "text": "What is this?"}, part)
    [(key, media)] = result.media.items()
    content = result.messages[0].content
    assert isinstance(content, list)
    fields, shown = content
    assert (fields, shown) == ({"type": "text", "text": "What is this?"}, {"type": "image", "media": key})
    assert (media.kind, media.format, media.data, media.key) == ("image", "png", RED, key)
    assert (media.digest, result.media_params) == (sha256(RED).hexdigest(), {key: "messages[0].content[1]"})


SOUNDS: list[dict[str, Any]] = [
    {"type": "input_audio", "input_audio": {"data": TONE64, "format": "wav"}},
    {"type": "input_audio", "input_audio": {"data": f"data:;base64,{TONE64}"}},
    {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{TONE64}"}},
    {"type": "audio", "base64": TONE64, "mime_type": "audio/wav"},
]


@pytest.mark.parametrize("part", SOUNDS)
def test_a_sound_is_one_however_it_is_sent(part: dict[str, Any]) -> None:
    [media] = conversation(part).media.values()
    assert (media.kind, media.format, media.data) == ("audio", "wav", TONE)


def test_details_are_told() -> None:
    [media] = conversation(PICTURES[1]).media.values()
    assert media.detail == "original"


def test_pictures_beside_a_text_come_before_it() -> None:
    body = {"messages": [{"role": "user", "content": "Which?", "images": [RED64, BLUE64]}]}
    result = chat.conversation(chat.read(json.dumps(body).encode(), LIMITS))
    kinds = [part["type"] for part in result.messages[0].content or () if isinstance(part, dict)]
    assert kinds == ["image", "image", "text"]
    assert [*result.media_params.values()] == ["messages[0].images[0]", "messages[0].images[1]"]


def test_results_of_tools_may_have_pictures() -> None:
    assert len(conversation(PICTURES[0], role="tool", tool_call_id="c").media) == 1


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "image_url"}, "", "invalid_value"),
    ({"type": "image_url", "image_url": {}}, ".image_url", "invalid_value"),
    (
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        ".image_url.url",
        "unsupported_content",
    ),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, ".image_url.url", "invalid_value"),
    ({"type": "image_url", "image_url": {"url": "data:image/png"}}, ".image_url.url", "invalid_value"),
    ({"type": "image_url", "image_url": "not base64!"}, ".image_url", "invalid_value"),
    (
        {"type": "image_url", "image_url": {"url": URL, "detail": "most"}},
        ".image_url.detail",
        "invalid_value",
    ),
    ({"type": "image_url", "image_url": {"url": URL[:42]}}, "", "invalid_value"),
    ({"type": "input_image", "file_id": "file-1"}, ".file_id", "unsupported_content"),
    (
        {"type": "input_audio", "input_audio": {"data": TONE64, "format": "mp3"}},
        ".input_audio.format",
        "invalid_value",
    ),
    ({"type": "input_audio", "input_audio": {"data": RED64}}, "", "unsupported_content"),
]


@pytest.mark.parametrize(("part", "place", "code"), WRONG)
def test_what_is_wrong_with_a_picture_is_told_of_its_field(
    part: dict[str, Any], place: str, code: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        conversation({"type": "text", "text": "x"}, part)
    assert (caught.value.param, caught.value.code) == (f"messages[0].content[1]{place}", code)


def test_there_may_be_so_many() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x", "images": [RED64, BLUE64]}]}).encode()
    with pytest.raises(BadRequest, match="images") as caught:
        chat.read(body, Limits(media_files=1))
    assert caught.value.code == "limit_exceeded"


def test_a_body_that_goes_on_from_another_shows_what_that_one_showed() -> None:
    known = BodyCache()
    first = {"role": "user", "content": [PICTURES[0]]}
    then = [
        first,
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "?", "images": [BLUE64]},
    ]
    for value in ([first], then):
        body = json.dumps({"messages": value}).encode()
        request, before = known.read(body, "", LIMITS, IgnoredFields("warn"))
    result = chat.conversation(request, before)
    assert result == chat.conversation(chat.read(body, LIMITS, IgnoredFields("warn")))
    assert [media.data for media in result.media.values()] == [RED, BLUE]


def test_messages_have_blocks_of_pictures_in_results_and_documents() -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED64}}
    other = {**block, "source": {**block["source"], "data": BLUE64}}  # type: ignore[dict-item]
    parts = {"type": "content", "content": [{"type": "text", "text": "page"}, other]}
    rows = [
        {"role": "user", "content": [block, {"type": "document", "title": "T", "source": parts}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]},
    ]
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": rows}).encode()
    result = messages.conversation(messages.read(body, LIMITS, lambda _: None))
    kinds = [
        [part["type"] for part in each.content or () if isinstance(part, dict)] for each in result.messages
    ]
    assert kinds == [["image", "text", "text", "image"], [], ["image"]]
    assert [*result.media_params.values()] == [
        "messages[0].content[0]",
        "messages[0].content[1].source.content[1]",
    ]


def test_ollama_asks_about_pictures() -> None:
    request = ollama.read_prompt(json.dumps({"prompt": "What?", "images": [RED64]}).encode(), LIMITS)
    [prompt] = ollama.spec(request).prompts
    assert isinstance(prompt, Conversation)
    assert [*prompt.media_params.values()] == ["images[0]"]


def test_items_keep_what_was_sent() -> None:
    picture = {"type": "input_image", "image_url": URL, "detail": "high"}
    fields = {"type": "function_call_output", "call_id": "c", "output": [picture]}
    [item] = normalise([fields], lambda prefix: prefix + "1", limits=LIMITS)
    assert item["output"] == [picture]
