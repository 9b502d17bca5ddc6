"""Files as parts of messages: text as it is, PDF as its text, and all else a clear refusal."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.http.server import background
from dragoman.limits import Limits
from dragoman.settings import Settings
from tests.http.conftest import Serve
from tests.http.test_batches import begun, connected, ended, lines_in
from tests.http.test_files import kept
from tests.support.http import post
from tests.support.parrot import parrot

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def pdf(text: str, pages: int = 1) -> bytes:
    """A PDF by hand: each page says the same."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{3 + 2 * page} 0 R" for page in range(pages))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {pages} >>")
    drawn = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET"
    font = "<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    for page in range(pages):
        box = f"/MediaBox [0 0 200 200] /Resources {font}"
        objects.append(f"<< /Type /Page /Parent 2 0 R {box} /Contents {4 + 2 * page} 0 R >>")
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    raw, indices = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        indices.append(len(raw))
        raw += f"{number} 0 obj\n{one}\nendobj\n".encode()
    table = "".join(f"{offset:010d} 00000 n \n" for offset in indices)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    end += f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(raw)}\n%%EOF\n"
    return raw + end.encode()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with background(parrot(), Settings(port=0, store="memory")) as text:
        yield text


def asked(path: str, part: dict[str, Any]) -> dict[str, Any]:
    """A request with this file after a word."""
    if path == CHAT:
        content = [{"type": "text", "text": "Read: "}, {"type": "file", "file": part}]
        return {"messages": [{"role": "user", "content": content}]}
    if path == RESPONSES:
        content = [{"type": "input_text", "text": "Read: "}, {"type": "input_file", **part}]
        return {"input": [{"role": "user", "content": content}]}
    source: dict[str, Any] = {"type": "file", "file_id": part.get("file_id")}
    if "file_data" in part:
        source = {"type": "base64", "media_type": "application/pdf", "data": part["file_data"].split(",")[-1]}
    content = [{"type": "text", "text": "Read: "}, {"type": "document", "source": source}]
    return {"model": "parrot", "max_tokens": 500, "messages": [{"role": "user", "content": content}]}


def said(path: str, body: dict[str, Any]) -> str:
    """What the model answered, which is what it was asked."""
    if path == CHAT:
        return str(body["choices"][0]["message"]["content"])
    return str(body["output"][0]["content"][0]["text"] if path == RESPONSES else body["content"][0]["text"])


def data(content: bytes, media: str = "text/plain") -> str:
    return f"data:{media};base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_file_that_was_uploaded_is_read(url: str, path: str) -> None:
    fields = kept(url, "Ein Töpfer.".encode(), "a.txt")
    reply = post(url, path, asked(path, {"file_id": fields["id"]}))
    assert reply.status_code == 200, reply.text
    assert "Read: " in said(path, reply.json()) and "Ein Töpfer." in said(path, reply.json())


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_the_text_of_a_pdf_is_read(url: str, path: str) -> None:
    part = {"file_data": data(pdf("A potter"), "application/pdf"), "filename": "b.pdf"}
    reply = post(url, path, asked(path, part))
    assert reply.status_code == 200, reply.text
    assert "A potter" in said(path, reply.json())


def test_a_model_sees_how_a_file_is_called(url: str) -> None:
    reply = post(url, CHAT, asked(CHAT, {"file_data": data(b"potter"), "filename": "c.txt"}))
    assert said(CHAT, reply.json()) == 'Read: \nFile "c.txt":\n\npotter'


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"file_id": "file-nobody"}, "file.file_id", "file_not_found"),
    ({"file_id": "../../etc/passwd"}, "file.file_id", "file_not_found"),
    ({"file_data": "data:text/plain;base64,!!!"}, "file.file_data", "invalid_value"),
    ({"file_data": data(b"\x89PNG\r\n")}, "file", "unsupported_content"),
    ({"file_data": data(b"\xff\xfe\x00")}, "file", "unsupported_content"),
    ({"file_data": data(b"a\x00b")}, "file", "unsupported_content"),
    ({"file_data": data(b"%PDF-1.4 nothing")}, "file", "unsupported_content"),
    ({"file_data": data(pdf("x", pages=1001))}, "file", "unsupported_content"),
    ({"file_url": "http://localhost/x", "file_id": "x"}, "file", "invalid_value"),
    ({"file_url": "http://localhost/x"}, "file.file_url", "media_host_not_allowed"),
    ({"file_id": "x", "file_data": data(b"x")}, "file", "invalid_value"),
    ({"file_data": 5}, "file", "invalid_value"),
]


@pytest.mark.parametrize(("part", "place", "code"), WRONG)
def test_what_cannot_be_read_is_refused_by_name(
    url: str, part: dict[str, Any], place: str, code: str
) -> None:
    reply = post(url, CHAT, asked(CHAT, part))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (
        400,
        f"messages[0].content[1].{place}",
        code,
    )
    assert "pypdf" not in error["message"] and "Traceback" not in error["message"]


def test_the_file_of_another_key_or_for_another_purpose_is_not_read(serve: Serve) -> None:
    url = serve(parrot(), store="memory", api_key=["one", "two"])
    mine, batch = kept(url, key="one"), kept(url, b"{}\n", purpose="batch", key="one")
    for key, file, code in (("two", mine, "file_not_found"), ("one", batch, "invalid_value")):
        reply = post(url, CHAT, asked(CHAT, {"file_id": file["id"]}), authorization=f"Bearer {key}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)


def test_the_files_of_a_request_have_a_limit_together(serve: Serve) -> None:
    url = serve(parrot(), store="memory", limits=Limits(document_bytes=100))
    file = kept(url, b"x" * 60)
    body = asked(CHAT, {"file_id": file["id"]})
    assert post(url, CHAT, body).status_code == 200
    body["messages"] *= 2
    reply = post(url, CHAT, body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "limit_exceeded")


def test_all_else_of_the_request_is_as_it_was_sent(url: str) -> None:
    body = asked(CHAT, {"file_data": data(b"x")}) | {"temperature": 9}
    reply = post(url, CHAT, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "temperature")
    body = asked(CHAT, {"file_data": data(b"x")})
    body["messages"].append({"role": "user", "content": 'Say "file_id": "file-1".'})
    assert said(CHAT, post(url, CHAT, body).json()) == 'Say "file_id": "file-1".'


def test_a_line_of_a_batch_may_have_files_too(url: str) -> None:
    client = connected(url)
    file = kept(url, b"potter")
    body = {"model": "parrot", **asked(CHAT, {"file_id": file["id"]})}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    fields = lines_in(client, ended(client, begun(client, [line]).id).output_file_id)
    assert "potter" in json.dumps(fields["a"]["response"]["body"])


def test_a_pdf_with_more_text_than_a_request_may_have_is_given_up(serve: Serve) -> None:
    url = serve(parrot(), store="memory", limits=Limits(content_chars=500))
    for pages, status in ((1, 200), (20, 400)):
        part = {"file_data": data(pdf("many words " * 10, pages))}
        reply = post(url, CHAT, asked(CHAT, part))
        assert reply.status_code == status, reply.text
    assert "more text" in reply.json()["error"]["message"]
