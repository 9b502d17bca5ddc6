"""Laws 1 and 2: cuts change nothing, and the whole answer is the fold of the stream."""

from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.scripted import Script, ScriptedEngine
from dragoman.fold import Fold, coalesce
from dragoman.types import Answer, Sampling
from tests.support.turns import answers_of, events_of, spec

any_bytes = st.binary(min_size=1, max_size=40)
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
    plain, joined = Fold(2), Fold(2)
    plain.add(events_of(ScriptedEngine(script), spec(n=2)))
    joined.add(coalesce(events_of(ScriptedEngine(script), spec(n=2))))
    assert plain.done() == joined.done()


@given(any_bytes, st.integers(1, 8))
def test_ids_survive_whole(ids: bytes, burst: int) -> None:
    [folded] = answers_of(ScriptedEngine(Script(list(ids), burst=burst)), spec())
    assert folded.ids == list(ids)
