"""Files over HTTP: kept, listed, given back and deleted, for the key that they came with."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dragoman.limits import Limits
from tests.http.conftest import RunningServer, Serve
from tests.support.http import delete, get, get_json, post, refusal, send
from tests.support.parrot import parrot as make_parrot

BYTES = bytes(range(256)) * 4096
"""A megabyte, in which everything is."""


def upload(url: str, content: bytes = b"hi", name: str = "a.txt", **fields: str) -> httpx.Response:
    mapping = {"purpose": "user_data", **fields}
    headers = {"authorization": f"Bearer {mapping.pop('key')}"} if "key" in mapping else {}
    return send("POST", url, "/v1/files", data=mapping, files={"file": (name, content)}, headers=headers)


def kept(url: str, content: bytes = b"hi", name: str = "a.txt", **fields: str) -> dict[str, Any]:
    reply = upload(url, content, name, **fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


@pytest.fixture
def client(parrot: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="any", max_retries=0) as open_ai:
        yield open_ai


def test_a_file_is_given_back_byte_for_byte(parrot: RunningServer) -> None:
    fields = kept(parrot.url, BYTES, "all.bin")
    assert (fields["object"], fields["bytes"], fields["filename"], fields["purpose"], fields["status"]) == (
        *("file", len(BYTES), "all.bin", "user_data"),
        "processed",
    )
    reply = get(parrot.url, f"/v1/files/{fields['id']}/content")
    assert reply.content == BYTES
    assert reply.headers["content-disposition"] == "attachment"
    assert get_json(parrot.url, f"/v1/files/{fields['id']}") == fields


def test_openai_s_client_does_all_of_it(client: openai.OpenAI) -> None:
    file_object = client.files.create(
        file=("a.jsonl", b'{"a": 1}\n'),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file_object.expires_at == file_object.created_at + 3600
    assert client.files.retrieve(file_object.id) == file_object
    assert file_object.id in {file.id for file in client.files.list(purpose="batch")}
    assert client.files.content(file_object.id).read() == b'{"a": 1}\n'
    assert client.files.wait_for_processing(file_object.id).status == "processed"
    assert client.files.delete(file_object.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file_object.id)


def test_openai_s_client_sends_a_file_in_parts(client: openai.OpenAI) -> None:
    result = client.uploads.upload_file_chunked(
        file=BYTES,
        filename="all.bin",
        bytes=len(BYTES),
        mime_type="application/octet-stream",
        purpose="user_data",
        part_size=300_000,
        md5=hashlib.md5(BYTES).hexdigest(),
    )
    assert result.status == "completed" and result.file is not None
    assert client.files.content(result.file.id).read() == BYTES


def test_parts_are_joined_in_the_order_that_is_named(client: openai.OpenAI) -> None:
    begun = client.uploads.create(bytes=6, filename="a", mime_type="text/plain", purpose="user_data")
    first, second = (client.uploads.parts.create(begun.id, data=data).id for data in (b"one", b"two"))
    result = client.uploads.complete(begun.id, part_ids=[second, first])
    assert result.file is not None and client.files.content(result.file.id).read() == b"twoone"


@pytest.mark.parametrize(
    ("parts", "more", "param"),
    [
        ([b"on"], {}, "part_ids"),
        ([b"one"], {"md5": "0" * 32}, "md5"),
        ([], {"part_ids": ["part_nobody"]}, "part_ids"),
    ],
    ids=["too few bytes", "another checksum", "no such part"],
)
def test_an_upload_that_is_not_whole_is_no_file(
    parrot: RunningServer, parts: list[bytes], more: dict[str, Any], param: str
) -> None:
    asked = {"bytes": 3, "filename": "a", "mime_type": "text/plain", "purpose": "user_data"}
    id_ = post(parrot.url, "/v1/uploads", asked).json()["id"]
    path = f"/v1/uploads/{id_}"
    sent = [send("POST", parrot.url, f"{path}/parts", files={"data": part}).json()["id"] for part in parts]
    reply = post(parrot.url, f"{path}/complete", {"part_ids": sent, **more})
    assert refusal(reply) == (400, param)


def test_what_is_over_takes_no_more_parts(client: openai.OpenAI) -> None:
    begun = client.uploads.create(bytes=3, filename="a", mime_type="text/plain", purpose="user_data")
    with pytest.raises(openai.APIStatusError) as refused:
        client.uploads.parts.create(begun.id, data=b"four")
    assert refused.value.status_code == 413
    assert client.uploads.cancel(begun.id).status == "cancelled"
    with pytest.raises(openai.ConflictError):
        client.uploads.parts.create(begun.id, data=b"one")


def test_a_list_goes_on_where_it_ended(serve: Serve) -> None:
    url = serve(make_parrot(), store="memory")
    ids = [
        kept(url, name=str(number), purpose=purpose)["id"]
        for number, purpose in enumerate(["vision", "evals"] * 2)
    ]
    newest = get_json(url, "/v1/files", limit=3)
    assert ([file["id"] for file in newest["data"]], newest["has_more"]) == (ids[:0:-1], True)
    rest = get_json(url, "/v1/files", after=newest["last_id"])
    assert ([file["id"] for file in rest["data"]], rest["has_more"]) == (ids[:1], False)
    evals = get_json(url, "/v1/files", purpose="evals", order="asc")
    assert [file["id"] for file in evals["data"]] == ids[1::2]


def test_one_key_never_sees_another_s(serve: Serve) -> None:
    url = serve(make_parrot(), store="memory", api_key=["one", "two"])
    fields = kept(url, key="one")
    other = {"authorization": "Bearer two"}
    path = f"/v1/files/{fields['id']}"
    assert [get(url, p, **other).status_code for p in (path, f"{path}/content")] == [404, 404]
    assert delete(url, path, **other).status_code == 404
    assert get(url, "/v1/files", **other).json()["data"] == []
    assert get(url, path, authorization="Bearer one").status_code == 200


def test_files_outlive_the_server_and_are_shared_by_several(serve: Serve, tmp_path: Path) -> None:
    urls = [serve(make_parrot(), store="memory", files_dir=str(tmp_path)) for _ in range(2)]
    fields = kept(urls[0], b"shared")
    assert get(urls[1], f"/v1/files/{fields['id']}/content").content == b"shared"
    assert delete(urls[1], f"/v1/files/{fields['id']}").json()["deleted"]
    assert get(urls[0], f"/v1/files/{fields['id']}").status_code == 404
    assert os.listdir(tmp_path / "everybody") == []


@pytest.mark.parametrize(
    ("fields", "content", "param"),
    [
        ({"purpose": "anything"}, b"hi", "purpose"),
        ({"purpose": "batch"}, b"", "file"),
        ({"purpose": "batch"}, b"{no json", "file"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            b"hi",
            "expires_after.seconds",
        ),
        ({"expires_after[anchor": "created_at"}, b"hi", "expires_after[anchor"),
        ({"purposes": "batch"}, b"hi", "purposes"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    parrot: RunningServer, fields: dict[str, str], content: bytes, param: str
) -> None:
    assert refusal(upload(parrot.url, content, **fields)) == (400, param)


def test_a_form_without_a_file_is_refused(parrot: RunningServer) -> None:
    form = {"purpose": (None, b"batch")}
    assert refusal(send("POST", parrot.url, "/v1/files", files=form)) == (400, "file")


def test_a_key_has_so_many_files_and_bytes(serve: Serve) -> None:
    limits = Limits(files=2, files_bytes=1000, file_bytes=600)
    url = serve(make_parrot(), store="memory", limits=limits)
    assert refusal(upload(url, b"x" * 601)) == (413, "file")
    kept(url, b"x" * 600)
    over = upload(url, b"x" * 500)
    assert (over.status_code, over.json()["error"]["code"]) == (413, "quota_exceeded")
    kept(url, b"x" * 300)
    third = upload(url, b"")
    assert (third.status_code, third.json()["error"]["code"]) == (400, "quota_exceeded")
    assert len(get_json(url, "/v1/files")["data"]) == 2


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\a\\b.txt", "b.txt"),
        ("a\r\nb", "ab"),
        ("a/", "file"),
        ("é" * 500, "é" * 255),
    ],
)
def test_a_name_is_told_and_is_no_path(parrot: RunningServer, sent: str, told: str) -> None:
    assert kept(parrot.url, name=sent)["filename"] == told
