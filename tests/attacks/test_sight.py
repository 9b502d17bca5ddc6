"""Files that were made to harm, in every field that takes one: nothing comes of them, and nothing is left."""

from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.attacks.frame import AttackedServer, Frame, attacked, healthy
from tests.attacks.hostile_files import DOCUMENTS, GIFTS, SOUNDS
from tests.media.samples import picture, sound
from tests.support.parrot import NAME

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
RED = picture("png")
LEFT_MB = 64
"""What a server may have more of after all this: libraries that were loaded, arenas of the C library."""
Body = Callable[[str], tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def server() -> Iterator[AttackedServer]:
    """Its model sees and hears: all that comes is decoded, by the real libraries."""
    with attacked(sees=True, context=1_000_000, allow_media_host=["*"]) as attacked_server:
        for name, data in (("chat image", RED), ("chat audio", sound("wav"))):
            route, body = FIELDS[name](b64encode(data).decode())
            assert attacked_server.send(route, body).status == 200
        before = attacked_server.state()
        with healthy(attacked_server):
            yield attacked_server
        after = attacked_server.state()
        assert after.memory - before.memory < LEFT_MB << 20
        assert after.live == 0


def chat(part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "hi"}]}]}


def response(part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"input": [{"role": "user", "content": [part]}], "store": False}


def message(kind: str, media: str, data: str) -> tuple[str, dict[str, Any]]:
    block = {"type": kind, "source": {"type": "base64", "media_type": media, "data": data}}
    return MESSAGES, {"model": NAME, "max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}


def url(data: str, media: str = "image/png") -> str:
    return f"data:{media};base64,{data}"


FIELDS: dict[str, Body] = {
    "chat image": lambda data: chat({"type": "image_url", "image_url": {"url": url(data)}}),
    "response image": lambda data: response({"type": "input_image", "image_url": url(data)}),
    "message image": lambda data: message("image", "image/png", data),
    "ollama image": lambda data: (
        "/api/chat",
        {"model": NAME, "stream": False, "messages": [{"role": "user", "content": "?", "images": [data]}]},
    ),
    "chat audio": lambda data: chat({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}),
    "chat file": lambda data: chat({"type": "file", "file": {"file_data": url(data, "application/pdf")}}),
    "response file": lambda data: response(
        {"type": "input_file", "filename": "a.pdf", "file_data": url(data, "application/pdf")}
    ),
    "document": lambda data: message("document", "application/pdf", data),
}
IMAGES = [name for name in FIELDS if name.endswith("image")]
FILES = [name for name in FIELDS if not name.endswith(("image", "audio"))]


def sent(frame: Frame, field: str, data: bytes) -> int:
    route, body = FIELDS[field](b64encode(data).decode())
    return frame.sent(route, body).status


@pytest.mark.parametrize("field", IMAGES)
def test_no_picture_does_harm(frame: Frame, field: str) -> None:
    for name, data in GIFTS.items():
        assert sent(frame, field, data) in (200, 400), name


@pytest.mark.parametrize(
    "name", [name for name in GIFTS if "huge" in name or "too many" in name or "cut off" in name]
)
def test_what_is_more_or_less_than_it_says_is_refused(frame: Frame, name: str) -> None:
    assert sent(frame, "chat image", GIFTS[name]) == 400


@pytest.mark.parametrize("name", [name for name in GIFTS if "pictures" in name])
def test_of_moving_pictures_only_the_first_is_decoded(frame: Frame, name: str) -> None:
    assert sent(frame, "chat image", GIFTS[name]) == 200


def test_no_sound_does_harm(frame: Frame) -> None:
    for name, data in SOUNDS.items():
        assert sent(frame, "chat audio", data) in (200, 400), name


@pytest.mark.parametrize("field", FILES)
def test_no_document_does_harm(frame: Frame, field: str) -> None:
    for name, data in DOCUMENTS.items():
        assert sent(frame, field, data) in (200, 400), name


@pytest.mark.parametrize("field", FIELDS)
def test_data_that_is_no_base64_is_refused_whatever_its_length(frame: Frame, field: str) -> None:
    for data in (
        "@" * 12_000_000,
        "A" * 11_999_999,
        "%41" * 100_000,
        "data:image/png;base64," * 100_000,
        "é",
    ):
        route, body = FIELDS[field](data)
        assert frame.sent(route, body).status == 400


@pytest.mark.parametrize("field", IMAGES)
def test_more_files_than_a_request_may_have_are_refused(frame: Frame, field: str) -> None:
    """However small they are; what is shown again and again counts once."""
    same, others = [RED] * 2000, [picture("png", 1, 1, f"#{number:06x}") for number in range(257)]
    assert frame.sent(*_of(field, same)).status == 200
    assert "At most 256 images" in frame.refused(*_of(field, others))["message"]


def _of(field: str, files: list[bytes]) -> tuple[str, dict[str, Any]]:
    """As many as these in the place of one."""
    bodies = [FIELDS[field](b64encode(data).decode()) for data in files]
    parts = [_held(body)[0] for _, body in bodies]
    route, whole = bodies[0]
    _held(whole)[:1] = parts
    return route, whole


def _held(body: dict[str, Any]) -> list[Any]:
    (message,) = body.get("messages") or body["input"]
    held: list[Any] = message["images"] if "images" in message else message["content"]
    return held


PRIVATE = ["127.0.0.1", "[::1]", "169.254.169.254", "10.0.0.1", "2130706433", "0x7f.1", "[::ffff:10.0.0.1]"]


@pytest.mark.parametrize("host", PRIVATE)
def test_no_private_address_is_asked_though_all_hosts_are_allowed(frame: Frame, host: str) -> None:
    at = f"https://{host}/a.png"
    source = {"type": "image", "source": {"type": "url", "url": at}}
    asked = [
        chat({"type": "image_url", "image_url": {"url": at}}),
        response({"type": "input_image", "image_url": at}),
        response({"type": "input_file", "file_url": at}),
        (MESSAGES, {"model": NAME, "max_tokens": 9, "messages": [{"role": "user", "content": [source]}]}),
    ]
    for route, body in asked:
        assert frame.refused(route, body)["code"] in ("media_host_not_allowed", "invalid_value")
