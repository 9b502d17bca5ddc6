"""Laws 1 and 2: cuts change nothing, and the whole answer is the fold of the stream."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.dialects.registry import get_dialect
from dragoman.engines.scripted import Script, ScriptedEngine
from dragoman.turns.spec import ParseOptions
from dragoman.types import Answer, EventFold, Sampling, coalesce, fold
from tests.support.turns import answers_of, events_of, spec

any_bytes = st.binary(min_size=1, max_size=40)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CALL = '{"name": "f", "arguments": {"a": "b"}}'
LOGPROBS = Sampling(max_tokens=1000, logprobs=0)
any_stops = st.lists(st.text(min_size=1, max_size=4), max_size=2)


def answer(ids: bytes, stops: list[str], burst: int) -> Answer:
    engine = ScriptedEngine(Script(list(ids), burst=burst))
    [folded] = answers_of(engine, spec(stop=tuple(stops), sampling=Sampling(max_tokens=100, logprobs=0)))
    return folded


@given(any_bytes, any_stops, st.integers(1, 40))
def test_bursts_change_nothing(ids: bytes, stops: list[str], burst: int) -> None:
    assert answer(ids, stops, burst) == answer(ids, stops, 1)


@given(any_bytes, st.integers(1, 8))
def test_joined_events_fold_to_the_same_answer(ids: bytes, burst: int) -> None:
    script = Script(list(ids), burst=burst)
    plain, joined = EventFold(2), EventFold(2)
    plain.add(events_of(ScriptedEngine(script), spec(n=2)))
    joined.add(coalesce(events_of(ScriptedEngine(script), spec(n=2))))
    assert plain.done() == joined.done()


@given(any_bytes, st.integers(1, 8))
def test_ids_survive_whole(ids: bytes, burst: int) -> None:
    [folded] = answers_of(ScriptedEngine(Script(list(ids), burst=burst)), spec())
    assert folded.ids == list(ids)


pieces = st.sampled_from((*MARKERS, "\n", " ", "hm", "é", "{", "}", '"', CALL, CALL[:12], "<", "STOP"))
marked_up = st.lists(pieces, max_size=12).map(lambda parts: "".join(parts).encode())


def read(ids: bytes, burst: int, most_calls: int | None) -> Answer:
    """The answer in a dialect, without the made-up ids of its calls."""
    engine = ScriptedEngine(Script(list(ids), burst=burst))
    asked = spec(parsing=ParseOptions(most_calls=most_calls), stop=("STOP",), sampling=LOGPROBS)
    [folded] = answers_of(engine, asked, get_dialect("hermes"))
    folded.calls = [replace(call, id=None) for call in folded.calls]
    return folded


@given(marked_up.filter(bool), st.integers(1, 60), st.sampled_from([None, 1]))
def test_bursts_change_nothing_in_a_dialect(ids: bytes, burst: int, most_calls: int | None) -> None:
    assert read(ids, burst, most_calls) == read(ids, 1, most_calls)


@given(marked_up.filter(bool), st.integers(1, 60))
def test_ids_survive_a_dialect_whole(ids: bytes, burst: int) -> None:
    answer = read(ids, burst, None)
    assert answer.ids == list(ids)[: len(answer.ids)]
    assert answer.ids == [entry.id for entry in answer.logprobs]
    assert answer.stop == "STOP" or answer.ids == list(ids)


@given(marked_up.filter(bool))
def test_joined_events_of_a_dialect_fold_to_the_same_answer(ids: bytes) -> None:
    engine = ScriptedEngine(Script(list(ids)))
    events = events_of(engine, spec(parsing=ParseOptions(), sampling=LOGPROBS), get_dialect("hermes"))
    assert fold(events) == fold(coalesce(events))
