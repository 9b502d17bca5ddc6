import asyncio

import pytest
from msgspec.structs import replace

from dragoman.dialects.scan import IDS_AT_ONCE
from dragoman.engines.scripted import END_ID, Script, ScriptedEngine, say
from dragoman.errors import EngineFailed
from dragoman.turns.turn import GIVEN_IDS, MOST_PENDING
from dragoman.types import Event, IdsPrompt, Sampling
from tests.support.flat import flat
from tests.support.turns import answers_of, events_of, spec, turn_of


def test_answer_is_the_text_without_the_end_token() -> None:
    [answer] = answers_of(ScriptedEngine(say("hello")), spec())
    assert (answer.text, answer.finish, answer.stop) == ("hello", "stop", None)


def test_one_event_per_token() -> None:
    events = events_of(ScriptedEngine(say("abc")), spec())
    assert [event.text for event in events if event.kind == "text"] == ["a", "b", "c"]


def test_a_burst_still_gives_one_event_per_token() -> None:
    events = events_of(ScriptedEngine(say("abcd", burst=4)), spec())
    assert [event.text for event in events if event.kind == "text"] == ["a", "b", "c", "d"]


def test_ids_of_the_events_are_the_ids_of_the_engine() -> None:
    events = events_of(ScriptedEngine(say("aé€")), spec())
    assert flat(event.ids for event in events) == [*"aé€".encode(), END_ID]


def test_stop_string_stops_the_engine() -> None:
    engine = ScriptedEngine(say("one STOP two"))
    [answer] = answers_of(engine, spec(stop=("STOP",)))
    assert (answer.text, answer.finish, answer.stop) == ("one ", "stop", "STOP")
    assert engine.live == 0


def test_stop_string_is_not_looked_for_before_min_tokens() -> None:
    sampling = Sampling(max_tokens=100, min_tokens=4)
    [answer] = answers_of(ScriptedEngine(say("xx yy x z")), spec(stop=("x",), sampling=sampling))
    assert answer.text == "xx yy "


def test_length_is_the_engines_own_reason() -> None:
    [answer] = answers_of(ScriptedEngine(say("hello")), spec(sampling=Sampling(max_tokens=3)))
    assert (answer.text, answer.finish) == ("hel", "length")


def test_choices_stay_apart() -> None:
    answers = answers_of(ScriptedEngine(say("hi")), spec(n=3))
    assert [(answer.choice, answer.text) for answer in answers] == [(0, "hi"), (1, "hi"), (2, "hi")]


def test_engine_error_is_raised_by_the_fold() -> None:
    with pytest.raises(EngineFailed):
        answers_of(ScriptedEngine(say("hello", fault="exception", fault_at=2)), spec())


def test_what_came_before_an_error_is_not_lost() -> None:
    events = events_of(ScriptedEngine(say("hello", fault="exception", fault_at=2)), spec())
    assert [event.text for event in events] == ["h", "e", ""]
    assert isinstance(events[-1].error, EngineFailed)


def test_leaving_the_scope_aborts_the_job() -> None:
    engine = ScriptedEngine(say("hello", fault="hang", fault_at=1))

    async def leave() -> None:
        async with turn_of(engine, spec()) as turn:
            await turn.next()

    asyncio.run(leave())
    assert engine.live == 0


def test_an_error_inside_the_scope_aborts_the_job() -> None:
    engine = ScriptedEngine(say("hello", fault="hang", fault_at=1))

    async def fail() -> None:
        async with turn_of(engine, spec()):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        asyncio.run(fail())
    assert engine.live == 0


def test_closing_wakes_whoever_waits() -> None:
    async def run() -> bool:
        async with turn_of(ScriptedEngine(say("x", fault="hang")), spec()) as turn:
            asyncio.get_running_loop().call_later(0.01, turn.close)
            return await turn.next() == [] and turn.is_over

    assert asyncio.run(run())


def test_a_slow_reader_gets_joined_events_and_loses_nothing() -> None:
    text = "x" * (MOST_PENDING * 3)

    async def run() -> list[str]:
        async with turn_of(ScriptedEngine(Script([*text.encode()])), spec()) as turn:
            while turn._left:
                await asyncio.sleep(0)
            return [event.text for event in await turn.next()]

    texts = asyncio.run(run())
    assert "".join(texts) == text
    assert len(texts) <= MOST_PENDING + 2


def test_what_has_piled_up_is_taken_a_little_at_a_time() -> None:
    text = "x" * 900

    async def run() -> list[list[Event]]:
        async with turn_of(ScriptedEngine(Script([*text.encode()])), spec()) as turn:
            while turn._left:
                await asyncio.sleep(0)
            return [await turn.next() for _ in iter(lambda: turn.is_over, True)]

    taken = asyncio.run(run())
    assert "".join(event.text for events in taken for event in events) == text
    assert max(sum(len(event.ids) for event in events) for events in taken) < IDS_AT_ONCE + MOST_PENDING + 2


def test_logprobs_come_with_their_ids() -> None:
    sampling = Sampling(max_tokens=100, logprobs=2)
    events = events_of(ScriptedEngine(say("aé")), spec(sampling=sampling))
    assert all([entry.id for entry in event.logprobs or []] == event.ids for event in events)


def test_many_long_prompts_are_given_to_the_engine_some_at_a_time() -> None:
    engine = ScriptedEngine(say("hi"))
    long = tuple(IdsPrompt((1,) * (GIVEN_IDS // 2)) for _ in range(5))

    async def given() -> tuple[int, list[str]]:
        async with turn_of(engine, replace(spec(), prompts=long)) as turn:
            at_once = len(engine.jobs)
            return at_once, [answer.text for answer in await turn.answers()]

    assert asyncio.run(given()) == (2, ["hi"] * 5)


def test_a_turn_that_is_closed_gives_the_engine_no_more_prompts() -> None:
    engine = ScriptedEngine(say("hi"))
    long = tuple(IdsPrompt((1,) * (GIVEN_IDS // 2)) for _ in range(5))

    async def leave() -> None:
        async with turn_of(engine, replace(spec(), prompts=long)):
            pass
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert (len(engine.jobs), engine.live) == (2, 0)
