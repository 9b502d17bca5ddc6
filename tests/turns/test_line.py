"""Who is computed next."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.turns.line import Line, Ticket


def in_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def moved_on() -> None:
    """Those whose place came free have begun."""
    await asyncio.sleep(0)


class Waiters:
    """One place, which is taken; whoever asks after that waits."""

    def __init__(self) -> None:
        self.line = Line(1)
        self.began: list[str] = []
        self.now = self.line.ask(lambda: None)

    def ask(self, name: str, owner: str = "", priority: int = 0, weight: int = 1) -> Ticket:
        def begin() -> None:
            self.began.append(name)
            self.now = ticket

        ticket = self.line.ask(begin, owner, priority, weight)
        return ticket

    async def let_through(self) -> list[str]:
        """All of them, one after the other."""
        while self.line.running:
            self.line.leave(self.now)
            await moved_on()
        return self.began


def test_what_has_a_place_begins_at_once() -> None:
    began: list[int] = []
    line = Line(2)
    for number in range(3):
        line.ask(partial(began.append, number))
    assert (began, line.running, line.waiting) == ([0, 1], 2, 1)


def test_the_first_to_come_is_the_first_to_go() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        for name in "abc":
            waiters.ask(name)
        assert await waiters.let_through() == ["a", "b", "c"]

    in_loop(scenario)


def test_lower_priorities_go_first() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        for name, priority in (("late", 5), ("usual", 0), ("early", -5)):
            waiters.ask(name, priority=priority)
        assert await waiters.let_through() == ["early", "usual", "late"]

    in_loop(scenario)


def test_a_key_does_not_wait_behind_the_flood_of_another() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        for number in range(4):
            waiters.ask(f"flood {number}", owner="flood")
        waiters.ask("drop", owner="drop")
        assert (await waiters.let_through()).index("drop") == 1

    in_loop(scenario)


def test_the_key_with_the_fewest_answers_at_work_goes_first() -> None:
    async def scenario() -> None:
        line, began = Line(3), list[str]()
        first = [line.ask(lambda: None, owner) for owner in ("busy", "busy", "other")]
        for owner in ("busy", "idle"):
            line.ask(partial(began.append, owner), owner)
        line.leave(first[2])
        await moved_on()
        assert began == ["idle"]

    in_loop(scenario)


def test_who_leaves_the_line_is_never_begun() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        left, _ = waiters.ask("left"), waiters.ask("stayed")
        waiters.line.leave(left)
        waiters.line.leave(left)
        assert (await waiters.let_through(), waiters.line.waiting) == (["stayed"], 0)

    in_loop(scenario)


def test_a_heavy_one_needs_no_more_than_one_free_place() -> None:
    async def scenario() -> None:
        line, began = Line(2), list[str]()
        first = [line.ask(lambda: None) for _ in range(2)]
        line.ask(lambda: began.append("heavy"), weight=100)
        line.leave(first[0])
        await moved_on()
        assert (began, line.running) == (["heavy"], 101)

    in_loop(scenario)


def test_one_that_cannot_begin_holds_up_nobody() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        waiters.line.ask(lambda: 1 / 0)  # type: ignore[arg-type]
        waiters.ask("next")
        assert await waiters.let_through() == ["next"]

    in_loop(scenario)


def test_one_that_cannot_begin_at_once_is_told_and_leaves_its_place() -> None:
    async def scenario() -> None:
        line = Line(1)
        with pytest.raises(ZeroDivisionError):
            line.ask(lambda: 1 / 0)  # type: ignore[arg-type]
        assert line.running == 0

    in_loop(scenario)


def test_a_place_that_is_given_up_while_waiting_was_never_held() -> None:
    async def scenario() -> None:
        line = Line(1)
        held = line.ask(lambda: None)

        async def work() -> None:
            async with line.place():
                raise AssertionError("It never came to this.")

        waiting = asyncio.create_task(work())
        await moved_on()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        line.leave(held)
        assert (line.running, line.waiting) == (0, 0)

    in_loop(scenario)


WISHES = st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 5), st.booleans())


@given(st.integers(1, 4), st.lists(WISHES, max_size=30), st.randoms(use_true_random=False))
def test_everybody_who_stays_is_begun_once_and_places_are_kept_to(
    places: int, wishes: list[tuple[str, int, int, bool]], chance: Any
) -> None:
    async def scenario() -> None:
        line = Line(places)
        began: list[int] = []
        tickets: dict[int, Ticket] = {}
        for number, (owner, priority, weight, _) in enumerate(wishes):
            tickets[number] = line.ask(partial(began.append, number), owner, priority, weight)
        for number, (*_, stays) in enumerate(wishes):
            if not stays:
                line.leave(tickets[number])
        while line.running or line.waiting:
            await moved_on()
            at_work = [number for number, ticket in tickets.items() if ticket.begun and not ticket.left]
            heaviest = max(tickets[number].weight for number in at_work)
            assert line.running == sum(tickets[number].weight for number in at_work) < places + heaviest
            line.leave(tickets[chance.choice(at_work)])
        stayed = {number for number, (*_, stays) in enumerate(wishes) if stays}
        assert stayed <= set(began) and len(began) == len(set(began))
        for number in stayed:
            # Of one key and priority, the first to come is the first to go.
            alike = [other for other in stayed if wishes[other][:2] == wishes[number][:2]]
            assert sorted(alike) == [other for other in began if other in alike]

    in_loop(scenario)
