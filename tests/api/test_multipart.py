"""Forms, however they are cut."""

from collections.abc import Iterable

import httpx
from hypothesis import given
from hypothesis import strategies as st

from dragoman.api.multipart import FieldEnd, FieldStart, FormReader, boundary_of

Field = tuple[str, str | None, bytes]


def read(boundary: bytes, pieces: Iterable[bytes]) -> list[Field]:
    """The fields of a form: name, file name, value."""
    reader = FormReader(boundary)
    items: list[Field] = []
    for piece in pieces:
        for event in reader.feed(piece):
            if isinstance(event, FieldStart):
                items.append((event.name, event.filename, b""))
            elif not isinstance(event, FieldEnd):
                name, filename, value = items.pop()
                items.append((name, filename, value + event))
    reader.end()
    return items


@given(
    value=st.lists(st.sampled_from([b"\r\n", b"--", b"B", b"\r", b"\n", b"-", b"x", b"\x00\xff"])).map(
        b"".join
    ),
    cuts=st.lists(st.integers(1, 9), min_size=1),
)
def test_cuts_change_nothing_and_a_value_is_what_was_sent(value: bytes, cuts: list[int]) -> None:
    request = httpx.Request(
        "POST",
        "http://localhost/",
        headers={"content-type": "multipart/form-data; boundary=B--B"},
        data={"purpose": "batch"},
        files={"file": ('ä "b', value.replace(b"B--B", b""))},
    )
    body = request.read()
    pieces: list[bytes] = []
    at = 0
    while at < len(body):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(body[at : at + size])
        at += size
    boundary = boundary_of(request.headers["content-type"].encode())
    expected = [("purpose", None, b"batch"), ("file", 'ä "b', value.replace(b"B--B", b""))]
    assert read(boundary, pieces) == read(boundary, [body]) == expected


def test_an_extended_file_name_counts_more() -> None:
    head = b"Content-Disposition: form-data; name=file; filename=\"a\"; filename*=UTF-8''%c3%a4%20b"
    form = b"--B\r\n" + head + b"\r\n\r\n\r\n--B--"
    assert read(b"B", [form]) == [("file", "ä b", b"")]
