"""Law 1 for the client: however a stream is cut, it tells the same. And what the tree keeps of it."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.client.chunks import JsonEndFinder
from dragoman.client.events import AnswerFold, CallEnd, TextDelta, TextPart
from dragoman.client.request import CHAT
from dragoman.types import ToolCall
from tests.client.recorded import STREAMS, chat, sse
from tests.client.support import cut, read, reading_of

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
NOISE = st.sampled_from([b"", b": keep-alive\n\n", b"\xef\xbb\xbf", b"retry: 3\n"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def places(length: int) -> st.SearchStrategy[list[int]]:
    """Where to cut: anywhere, or into pieces of one size."""
    even = st.builds(lambda size: list(range(size, length, size)), st.integers(1, 40))
    return st.lists(st.integers(0, length), max_size=12) | even


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data(), end=ENDS, noise=NOISE)
def test_cutting_changes_nothing(name: str, data: st.DataObject, end: bytes, noise: bytes) -> None:
    path, stream = STREAMS[name]
    whole = read(reading_of(path), [stream])
    other = (noise + stream).replace(b"\n", end)
    assert read(reading_of(path), cut(other, data.draw(places(len(other))))) == whole


@given(pieces=st.lists(st.text(max_size=6), max_size=8), step=st.integers(1, 5))
def test_texts_come_through_as_they_are(pieces: list[str], step: int) -> None:
    stream = sse(*chat(*({"delta": {"content": piece}} for piece in pieces)))
    items = read(reading_of(CHAT), [stream[at : at + step] for at in range(0, len(stream), step)])
    assert [event.text for event in items if isinstance(event, TextDelta)] == [
        piece for piece in pieces if piece
    ]


PIECE = st.tuples(
    st.sampled_from(["content", "reasoning_content"]),
    st.text(max_size=3),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)


@given(pieces=st.lists(PIECE, max_size=8))
def test_the_tree_keeps_every_id_in_order(pieces: list[tuple[str, str, list[int]]]) -> None:
    deltas = [{"delta": {kind: text}, "token_ids": ids} for kind, text, ids in pieces]
    fold = AnswerFold()
    for event in read(reading_of(CHAT), [sse(*chat(*deltas, {"delta": {}, "finish_reason": "stop"}))]):
        fold.add(event)
    [answer] = fold.answers
    assert answer.ids == [id_ for _, _, ids in pieces for id_ in ids]
    for part in answer.parts:
        assert isinstance(part, TextPart)
        assert "".join(token.text for token in part.tokens) == part.text


@given(
    value=st.dictionaries(st.text(max_size=4), JSON, max_size=4), ascii=st.booleans(), step=st.integers(1, 4)
)
def test_a_call_is_complete_with_its_last_brace_and_not_before(
    value: dict[str, object], ascii: bool, step: int
) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    end = JsonEndFinder()
    items = [end.feed(text[at : at + step]) for at in range(0, len(text), step)]
    assert items == [False] * (len(items) - 1) + [True]


@given(
    value=st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    places=st.lists(st.integers(0, 40), max_size=4),
)
def test_a_call_is_handed_over_in_its_own_bytes(value: dict[str, object], places: list[int]) -> None:
    text = json.dumps(value, indent=1)
    bounds = [0, *sorted(min(offset, len(text)) for offset in places), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    head = {"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}
    deltas = [head, *({"index": 0, "function": {"arguments": piece}} for piece in pieces)]
    items = read(reading_of(CHAT), [sse(*chat(*({"delta": {"tool_calls": [delta]}} for delta in deltas)))])
    assert items[-1] == CallEnd(value=ToolCall(id="a", name="f", arguments=text), call=0)
