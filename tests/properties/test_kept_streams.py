"""A stream that is kept says what any other says, and its end comes last; what is kept is its fold."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dragoman.api.chat.reply import ChatSerializer
from dragoman.api.chat.stored import RecordingWriter
from dragoman.api.reply import ChunkOptions, LogprobSerializer, ReplyEnvelope, StreamWriter
from dragoman.errors import EngineFailed
from dragoman.turns.choice_reader import TokenTable
from dragoman.types import Event, EventFold, Usage

CHOICES = 3
pieces = st.lists(
    st.tuples(st.sampled_from(["text", "reasoning"]), st.integers(0, CHOICES - 1), st.text(min_size=1)),
    max_size=12,
)
cuts = st.lists(st.integers(0, 20), max_size=8)


def writer() -> StreamWriter:
    head = ReplyEnvelope("chatcmpl-x", 0, "model", "print")
    return StreamWriter(
        head, ChatSerializer(LogprobSerializer(TokenTable([]))), ChunkOptions(), Usage, plain=True
    )


def told(said: list[tuple[str, int, str]], order: list[int]) -> list[Event]:
    """Choices end in that order, each right after the last thing that it says."""
    events = [Event(kind, choice, text) for kind, choice, text in said]  # type: ignore[arg-type]
    for choice in order:
        last = max((n for n, event in enumerate(events) if event.choice == choice), default=-1)
        events.insert(last + 1, Event("finish", choice, finish="stop"))
    return events


def batches(events: list[Event], cuts: list[int]) -> list[list[Event]]:
    bounds = [0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]
    return [events[start:end] for start, end in pairwise(bounds)]


def blocks(data: bytes) -> list[bytes]:
    return data.split(b"\n\n")


@given(pieces, st.permutations(range(CHOICES)), cuts)
def test_nothing_is_lost_and_finishes_come_last(
    said: list[tuple[str, int, str]], order: list[int], cuts: list[int]
) -> None:
    events = told(said, order)
    kept, plain = RecordingWriter(writer(), CHOICES), writer()
    before_end = b"".join(kept.write(batch) for batch in batches(events, cuts))
    whole = plain.write(events) + plain.end()
    assert b'"finish_reason":"stop"' not in before_end
    assert sorted(blocks(before_end + kept.end())) == sorted(blocks(whole))


@given(pieces, st.permutations(range(CHOICES)), cuts)
def test_what_is_kept_is_the_fold(
    said: list[tuple[str, int, str]], order: list[int], cuts: list[int]
) -> None:
    events = told(said, order)
    kept, fold = RecordingWriter(writer(), CHOICES), EventFold(CHOICES)
    for batch in batches(events, cuts):
        kept.write(batch)
    fold.add(events)
    assert kept.answers() == fold.done()


@given(pieces, st.permutations(range(CHOICES)), cuts, st.integers(0, 20))
def test_a_stream_that_fails_holds_nothing_back(
    said: list[tuple[str, int, str]], order: list[int], cuts: list[int], at: int
) -> None:
    events = told(said, order)
    events.insert(at, Event("finish", 0, finish="error", error=EngineFailed("It fell over.")))
    kept = RecordingWriter(writer(), CHOICES)
    data = b"".join(kept.write(batch) for batch in batches(events, cuts))
    assert sorted(blocks(data)) == sorted(blocks(writer().write(events)))
