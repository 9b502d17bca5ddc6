"""Law 4 beyond one process: turns that were stored are put together to the ids that they were."""

from hypothesis import given
from hypothesis import strategies as st

from dragoman.responses.context import pack_turns, restore_turns
from dragoman.turns.plan import TurnCache
from dragoman.types import TurnRecord

ids = st.lists(st.integers(0, 2**20), min_size=1, max_size=8).map(tuple)
talks = st.lists(st.tuples(st.booleans(), ids, ids), min_size=1, max_size=6)
"""For each turn: whether its prompt goes on, what is new in it, and what was sampled."""


def made(talk: list[tuple[bool, tuple[int, ...], tuple[int, ...]]]) -> list[TurnRecord]:
    turns: list[TurnRecord] = []
    for number, (goes_on, new, sampled) in enumerate(talk):
        kept = turns[-1].all_ids if turns and goes_on else ()
        prompt, key = (*kept, *new), b"key %d" % number
        turns.append(
            TurnRecord(
                prompt=prompt, ids=sampled, prompt_key=key, source=f"resp_{number}", reused_ids=len(kept)
            )
        )
    return turns


@given(talk=talks)
def test_what_was_stored_is_the_turn_that_it_was(
    talk: list[tuple[bool, tuple[int, ...], tuple[int, ...]]],
) -> None:
    turns, trails = made(talk), TurnCache()
    restore_turns(trails, [pack_turns([turn]) for turn in turns])
    (record,) = trails.find(turns[-1].prompt_key)
    assert (record.prompt, record.ids, record.source) == (turns[-1].prompt, turns[-1].ids, turns[-1].source)


def test_the_turns_of_one_answer_are_stored_together() -> None:
    turns, trails = made([(True, (1,), (2,)), (True, (3,), (4,)), (True, (5,), (6,))]), TurnCache()
    restore_turns(trails, [pack_turns(turns[:2]), pack_turns(turns[2:])])
    (record,) = trails.find(turns[-1].prompt_key)
    assert record.all_ids == (1, 2, 3, 4, 5, 6)


def test_an_id_is_stored_once() -> None:
    short, long = (made([(True, (7,) * size, (8,)), (True, (9,), (10,))])[-1] for size in (1, 1000))
    assert len(pack_turns([long])) == len(pack_turns([short]))


def test_what_goes_on_from_something_that_is_gone_is_not_guessed_at() -> None:
    first, second = made([(True, (1,), (2,)), (True, (3,), (4,))])
    trails = TurnCache()
    restore_turns(trails, [pack_turns([second])])
    assert len(trails) == 0
    restore_turns(trails, [pack_turns([first]), pack_turns([second])])
    assert len(trails) == 2


def test_what_is_remembered_is_not_made_again() -> None:
    first, second = made([(True, (1,), (2,)), (True, (3,), (4,))])
    trails = TurnCache()
    trails.add(second)
    restore_turns(trails, [pack_turns([first]), pack_turns([second])])
    assert list(trails.find(second.prompt_key)) == [second]


def test_what_nothing_goes_on_from_is_not_stored() -> None:
    assert pack_turns([TurnRecord(prompt=(1,), ids=(2,))]) == b""
