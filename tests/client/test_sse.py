import pytest

from dragoman.client.reply_reader import EventTooLong, SseEvent, SseReader


def read(*parts: bytes) -> list[tuple[bytes, bytes]]:
    reader = SseReader()
    events = [event for part in parts for event in reader.feed(part)] + reader.end()
    return [(event.name, event.data) for event in events]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_may_end_in_three_ways(end: bytes) -> None:
    lines = [
        b": hello",
        b"event: a",
        b"data: 1",
        b"data: 2",
        b"",
        b"",
        b"data:3",
        b"id: 9",
        b"retry: 5",
        b"",
        b"",
    ]
    assert read(end.join(lines)) == [(b"a", b"1\n2"), (b"", b"3")]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_cut_inside_of_an_end_of_line_is_no_second_end(step: int) -> None:
    data = b"data: 1\r\ndata: 2\r\n\r\ndata: 3\r\n\r\n"
    assert read(*(data[at : at + step] for at in range(0, len(data), step))) == [(b"", b"1\n2"), (b"", b"3")]


def test_only_the_first_space_is_left_out() -> None:
    assert read(b"data:  a \n\n") == [(b"", b" a ")]


def test_a_byte_order_mark_is_left_out_once() -> None:
    assert read(b"\xef", b"\xbb\xbfdata: 1\n\n", b"data: \xef\xbb\xbf\n\n") == [
        (b"", b"1"),
        (b"", b"\xef\xbb\xbf"),
    ]


def test_other_separators_of_unicode_do_not_end_a_line() -> None:
    assert read("data: a\u2028b\x0bc\x85\n\n".encode()) == [(b"", "a\u2028b\x0bc\x85".encode())]


def test_a_name_belongs_to_one_event() -> None:
    assert read(b"event: x\n\ndata: 1\n\n") == [(b"", b"1")]


def test_what_the_last_blank_line_is_missing_of_counts() -> None:
    assert read(b"data: 1\n\ndata: 2") == [(b"", b"1"), (b"", b"2")]


def test_an_event_without_end_is_refused() -> None:
    reader = SseReader(longest=100)
    assert reader.feed(b"data: " + b"x" * 80 + b"\n\n") == [SseEvent(b"x" * 80)]
    with pytest.raises(EventTooLong):
        for _ in range(3):
            reader.feed(b"data: " + b"x" * 40)


def test_many_lines_without_end_are_refused() -> None:
    reader = SseReader(longest=100)
    with pytest.raises(EventTooLong):
        for _ in range(20):
            reader.feed(b"data: xx\n")
