"""Forms with files that are made to be misread, to fill memory or the disk, or never to end."""

import json
from collections.abc import Iterator

import pytest

from dragoman.http.routes.table import FORMS
from tests.attacks.frame import AttackedServer, Frame, Reply, attacked, check, healthy
from tests.attacks.raw_messages import BODY, HOST
from tests.attacks.raw_socket import Raw

MB = 1024 * 1024
FILE = b'Content-Disposition: form-data; name="file"; filename="a"'
PURPOSE = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
GOOD = PURPOSE + b"--B\r\n" + FILE + b"\r\n\r\nhi\r\n--B--\r\n"


def field(head: bytes, value: bytes = b"hi") -> bytes:
    return b"--B\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


def sent(server: AttackedServer, body: bytes, media: str = "multipart/form-data; boundary=B") -> Reply:
    response = server.client.post("/v1/files", content=body, headers={"content-type": media})
    reply = Reply(response.status_code, response.content)
    check(reply)
    return reply


def test_the_good_form_is_good(frame: Frame) -> None:
    assert sent(frame.server, GOOD).status == 200


WRONG = {
    "no end": GOOD[:-6],
    "nothing": b"",
    "only the end": b"--B--\r\n",
    "something before it": b"x\r\n" + GOOD,
    "something after it": GOOD + b"x",
    "a second form after it": GOOD + GOOD,
    "another boundary": GOOD.replace(b"--B", b"--C"),
    "a boundary that goes on": GOOD.replace(b"--B\r\n", b"--BB\r\n"),
    "a boundary with a space": GOOD.replace(b"--B\r\n", b"--B \r\n"),
    "bare line feeds": GOOD.replace(b"\r\n", b"\n"),
    "no head": PURPOSE + b"--B\r\n\r\nhi\r\n--B--\r\n",
    "a head that is none": PURPOSE + field(FILE + b"\r\nnothing") + b"--B--",
    "a folded header": PURPOSE + field(FILE + b"\r\n and more: a") + b"--B--",
    "a control character": PURPOSE + field(FILE.replace(b'"a"', b'"a\x00"')) + b"--B--",
    "a header twice": PURPOSE + field(FILE + b"\r\n" + FILE) + b"--B--",
    "a name twice": PURPOSE + field(FILE + b'; name="purpose"') + b"--B--",
    "a file name twice": PURPOSE + field(FILE + b'; filename="b"') + b"--B--",
    "no name": PURPOSE + field(b'Content-Disposition: form-data; filename="a"') + b"--B--",
    "an attachment": PURPOSE + field(FILE.replace(b"form-data", b"attachment")) + b"--B--",
    "quotes that do not end": PURPOSE + field(FILE[:-1]) + b"--B--",
    "another coding of the name": PURPOSE + field(FILE + b"; filename*=utf-7''a") + b"--B--",
    "a name that is not UTF-8": PURPOSE + field(FILE.replace(b'"a"', b'"\xff"')) + b"--B--",
    "base64": PURPOSE + field(FILE + b"\r\nContent-Transfer-Encoding: base64") + b"--B--",
    "two files": PURPOSE + field(FILE) + field(FILE) + b"--B--",
    "two purposes": PURPOSE + PURPOSE + field(FILE) + b"--B--",
    "a file where none belongs": field(FILE.replace(b"file", b"purpose")) + field(FILE) + b"--B--",
    "a value that is not UTF-8": PURPOSE.replace(b"user_data", b"\xff") + field(FILE) + b"--B--",
    "an endless head": PURPOSE + b"--B\r\n" + FILE + b"\r\nX: " + b"a" * MB,
    "headers without end": PURPOSE + b"--B\r\n" + FILE + b"\r\nX: a" * 100_000,
    "a thousand fields": b"".join(field(b"Content-Disposition: form-data; name=%d" % n) for n in range(999)),
    "a purpose of a megabyte": PURPOSE.replace(b"user_data", b"a" * MB) + field(FILE) + b"--B--",
}  # fmt: skip


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_a_form_that_two_readers_could_read_in_two_ways_is_refused(frame: Frame, body: bytes) -> None:
    assert sent(frame.server, body).status in (400, 413)


@pytest.mark.parametrize(
    "media",
    [
        *("multipart/form-data", "multipart/form-data; boundary=", 'multipart/form-data; boundary=""'),
        *(f"multipart/form-data; boundary={'B' * 71}", "multipart/form-data; boundary=B; boundary=C"),
        *('multipart/form-data; boundary="B', "multipart/form-data; boundary=B\tC"),
    ],
)
def test_a_boundary_that_is_none_is_refused(frame: Frame, media: str) -> None:
    assert sent(frame.server, GOOD, media).status == 400


@pytest.mark.parametrize("route", sorted(FORMS))
@pytest.mark.parametrize("media", ["application/json", "multipart/mixed; boundary=B", "text/plain", ""])
def test_what_is_no_form_is_no_file(frame: Frame, route: str, media: str) -> None:
    headers = {"content-type": media}
    reply = frame.server.client.post(frame.server.path(route), content=BODY, headers=headers)
    assert reply.status_code == 415


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..\\x", "%2e%2e%2fx", "con", "a" * 3000])
def test_a_file_name_reaches_no_path(frame: Frame, name: str) -> None:
    """An id is all that the folder knows of it."""
    form = PURPOSE + field(FILE.replace(b'"a"', b'"%s"' % name.encode())) + b"--B--\r\n"
    reply = sent(frame.server, form)
    assert reply.status == 200 and b"/" not in reply.body.split(b'"filename":')[1].split(b",")[0]


@pytest.fixture(scope="module")
def hasty() -> Iterator[AttackedServer]:
    limits = {"file_bytes": 4 * MB, "files_bytes": 6 * MB, "uploads": 2}
    with attacked(body_timeout=0.5, write_timeout=0.5, limits=limits) as server:
        yield server


def begun(length: int) -> bytes:
    head = b"POST /v1/files HTTP/1.1\r\n" + HOST + b"Content-Type: multipart/form-data; boundary=B\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % length + PURPOSE + b"--B\r\n" + FILE + b"\r\n\r\n"


def test_a_file_that_comes_in_drops_is_given_up_and_nothing_is_left(hasty: AttackedServer) -> None:
    with healthy(hasty), Raw(hasty.url) as raw:
        raw.send(begun(MB) + b"a few bytes")
        (reply,) = raw.replies()
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")
    assert hasty.client.get("/v1/files").json()["data"] == []


def test_uploads_that_wait_keep_nobody_else_out(hasty: AttackedServer) -> None:
    with Raw(hasty.url) as one, Raw(hasty.url) as two:
        one.send(begun(MB))
        two.send(begun(MB))
        # Those that only look, and those that ask, have other places.
        assert hasty.client.post("/tokenize", json={"prompt": "hi"}).status_code == 200
        # When they are told, their places are free for whoever comes next.
        assert [raw.replies()[0].status for raw in (one, two)] == [408, 408]


def test_a_file_that_is_too_large_is_refused_before_it_is_sent(hasty: AttackedServer) -> None:
    with Raw(hasty.url) as raw:
        raw.send(begun(5 * MB))
        (reply,) = raw.replies(1)
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def test_a_large_file_is_in_memory_at_no_time(hasty: AttackedServer) -> None:
    before = hasty.memory()
    form = PURPOSE + field(FILE, b"\r\n--A" * (4 * MB // 5)) + b"--B--\r\n"
    for _ in range(3):
        reply = sent(hasty, form)
        assert reply.status == 200, reply
        path = f"/v1/files/{json.loads(reply.body)['id']}"
        assert len(hasty.client.get(f"{path}/content").content) == 4 * MB // 5 * 5
        hasty.client.delete(path)
    assert hasty.memory() - before < 8 * MB


def test_a_disk_is_not_filled_by_one_key(hasty: AttackedServer) -> None:
    form = PURPOSE + field(FILE, b"x" * 2 * MB) + b"--B--\r\n"
    statuses = [sent(hasty, form).status for _ in range(5)]
    assert statuses == [200, 200, 200, 413, 413]
