"""Pictures, sounds and files that parts of messages name: what stands in their place once a body is read."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.api.attachments import BodyAttachments, InlineMedia
from dragoman.errors import BadRequest
from dragoman.http.app_state import AppState
from dragoman.http.attachments import AttachmentResolver
from dragoman.limits import Limits
from dragoman.media import MediaKind
from dragoman.media.fetch import MediaFetcher
from dragoman.media.headers import read_media
from dragoman.settings import Settings
from dragoman.store.files import FileStore, IncomingFile, Quota
from tests.http.conftest import Serve
from tests.http.test_attachments import CHAT, RESPONSES, asked, data, pdf, said
from tests.media.samples import picture, sound
from tests.media.test_fetch import FileServer, file_server, plain
from tests.support.http import post
from tests.support.laws import examples
from tests.support.parrot import parrot

R = TypeVar("R")
OWNER = "somebody"
PNG = picture("png")
INLINE = InlineMedia("image", "png", "image/png", "QUJD")


@pytest.fixture
def files() -> Iterator[FileServer]:
    with file_server() as server:
        server.answers["/a.png"] = lambda handler: plain(handler, PNG, content_type="text/html")
        server.answers["/a.pdf"] = lambda handler: plain(handler, pdf("A potter"))
        server.answers["/a.txt"] = lambda handler: plain(handler, b"words of another")
        yield server


async def aside(_: int, work: Callable[[], R]) -> R:
    return work()


def filled(body: dict[str, Any], folder: Path, *kept: bytes, sees: bool = True, **limits: int) -> Any:
    """The body with what is in its files; `kept` are those that were uploaded, as `FILE0` and so on."""

    async def fill() -> bytes:
        shelf = FileStore(folder, Quota(files=10, bytes=10**8, file_bytes=10**8))
        await shelf.start()
        text = json.dumps(body)
        for number, content in enumerate(kept):
            async with IncomingFile(shelf, OWNER, 10**8) as upload:
                await upload.write(content)
                file = await upload.commit(f"{number}.bin", "user_data", None)
            text = text.replace(f"FILE{number}", file.id)

        async def told(_: str, __: str | None) -> bool:
            return sees

        documents = AttachmentResolver(shelf, Limits(**limits), MediaFetcher(["http://127.0.0.1:*"]), told)
        try:
            return await documents.fill(OWNER, text.encode(), aside)
        finally:
            await documents.close()
            await shelf.close()

    return json.loads(asyncio.run(fill()))


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}


def bytes_in(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def test_a_picture_that_may_be_fetched_stands_in_its_place(files: FileServer, tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": files.url("/a.png"), "detail": "low"}}
    (result,) = filled(chat(part), tmp_path)["messages"][0]["content"]
    assert result["image_url"]["detail"] == "low"
    assert result["image_url"]["url"].startswith("data:image/png;base64,")
    assert bytes_in(result["image_url"]["url"]) == PNG


def test_pictures_of_every_api_stand_in_their_place(files: FileServer, tmp_path: Path) -> None:
    url = files.url("/a.png")
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]},
            {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "FILE0"}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "image", "source": {"type": "url", "url": url}}],
                    }
                ],
            },
        ],
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "high"}]},
            {"role": "user", "content": [{"type": "input_image", "file_id": "FILE0"}]},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "file_id": "FILE0"}],
            },
        ],
    }
    result = filled(body, tmp_path, PNG)
    blocks = [message["content"][0] for message in result["messages"]]
    blocks[2] = blocks[2]["content"][0]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    assert blocks == [{"type": "image", "source": source}] * 3
    parts = [*(item["content"][0] for item in result["input"][:2]), result["input"][2]["output"][0]]
    assert [bytes_in(part["image_url"]) for part in parts] == [PNG] * 3
    assert parts[0]["detail"] == "high" and all("file_id" not in part for part in parts)


def test_a_file_that_is_a_picture_or_a_sound_is_one(tmp_path: Path) -> None:
    parts = [{"type": "file", "file": {"file_id": name}} for name in ("FILE0", "FILE1")]
    image, audio = filled(chat(*parts), tmp_path, PNG, sound("flac"))["messages"][0]["content"]
    assert image["type"] == "image_url" and bytes_in(image["image_url"]["url"]) == PNG
    assert audio["type"] == "input_audio" and audio["input_audio"]["format"] == "flac"


def test_what_is_no_picture_is_refused_where_one_is_named(files: FileServer, tmp_path: Path) -> None:
    for how in ({"image_url": files.url("/a.txt")}, {"file_id": "FILE0"}):
        body = {"input": [{"role": "user", "content": [{"type": "input_image", **how}]}]}
        with pytest.raises(BadRequest, match="PNG, JPEG, WebP or GIF") as caught:
            filled(body, tmp_path, b"words")
        assert str(caught.value.param).startswith("input[0].content[0]")


def test_a_model_that_sees_gets_the_pages_of_a_pdf(tmp_path: Path) -> None:
    part = {"type": "file", "file": {"file_data": data(pdf("A potter", 2)), "filename": "a.pdf"}}
    result = filled(chat(part), tmp_path)["messages"][0]["content"]
    assert [one["type"] for one in result] == ["text", "image_url"] * 2
    assert result[0]["text"] == 'File "a.pdf":\n\nPage 1:\n\nA potter' and result[2]["text"].startswith(
        "Page 2:"
    )
    page = read_media(bytes_in(result[1]["image_url"]["url"]), "image", Limits(), "x")
    assert (page.format, max(page.width, page.height)) == ("jpeg", 1536)


def test_one_that_does_not_see_gets_its_text(tmp_path: Path) -> None:
    part = {"type": "file", "file": {"file_data": data(pdf("A potter", 2)), "filename": "a.pdf"}}
    (result,) = filled(chat(part), tmp_path, sees=False)["messages"][0]["content"]
    assert result == {"type": "text", "text": 'File "a.pdf":\n\nA potter\n\nA potter'}


def test_a_pdf_of_many_pages_is_text_alone(tmp_path: Path) -> None:
    part = {"type": "file", "file": {"file_data": data(pdf("A potter", 3))}}
    (result,) = filled(chat(part), tmp_path, media_files=2)["messages"][0]["content"]
    assert result["type"] == "text"


def test_a_document_keeps_its_title_and_has_its_pages(tmp_path: Path) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": data(pdf("A", 2)).partition(",")[2]}
    part = {"type": "document", "title": "T", "source": source}
    result = filled(chat(part), tmp_path)["messages"][0]["content"]
    assert [one["type"] for one in result] == ["document", "image", "text", "image"]
    assert result[0]["title"] == "T" and result[0]["source"]["type"] == "text"


def test_only_so_many_are_fetched_for_a_request(files: FileServer, tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": files.url("/a.png")}}
    with pytest.raises(BadRequest, match="At most 2 files to fetch"):
        filled(chat(*[part] * 3), tmp_path, media_fetches=2)
    assert not files.heard


def test_files_that_are_fetched_have_the_limit_of_all_files(files: FileServer, tmp_path: Path) -> None:
    part = {"type": "file", "file": {"file_url": files.url("/a.pdf")}}
    with pytest.raises(BadRequest, match="larger than 100 bytes"):
        filled(chat(part), tmp_path, document_bytes=100)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_server_fetches_from_where_it_is_allowed_to(serve: Serve, files: FileServer, path: str) -> None:
    url = serve(parrot(), store="memory", allow_media_host=[f"http://127.0.0.1:{files.port}"])
    reply = post(url, path, asked(path, {"file_url": files.url("/a.txt")}), authorization="Bearer a-key")
    assert reply.status_code == 200, reply.text
    assert "words of another" in said(path, reply.json())
    assert "a-key" not in json.dumps(files.heard)


@pytest.mark.parametrize("modalities", [frozenset(), frozenset({"image"}), frozenset({"audio"})])
def test_whether_a_model_sees_is_on_its_card(modalities: frozenset[MediaKind]) -> None:
    async def seen() -> bool:
        engine = parrot()
        engine.card = msgspec.structs.replace(engine.card, modalities=modalities)
        host = AppState(engine, Settings(store="memory"))
        await host.start()
        try:
            return await host.sees("", None)
        finally:
            await host.stop()

    assert asyncio.run(seen()) == ("image" in modalities)


WORDS = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMED = {"type": "image_url", "image_url": {"url": "https://a.example/b"}}


@examples(40)
@given(st.lists(st.lists(WORDS | st.just(NAMED), max_size=4), max_size=3), WORDS)
def test_all_else_stays_as_it_was(contents: list[list[Any]], more: Any) -> None:
    body = {"messages": [{"role": "user", "content": parts} for parts in contents], "more": more}
    attachments = BodyAttachments(json.dumps(body).encode())
    count = sum(part == NAMED for parts in contents for part in parts)
    assert len(attachments.parts) == count
    if count:
        written = json.dumps(body).replace("https://a.example/b", INLINE.url)
        assert json.loads(attachments.filled([[INLINE]] * count)) == json.loads(written)
