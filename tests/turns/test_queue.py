"""Who is computed next."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.protocol import BACKGROUND_PRIORITY
from dragoman.turns.queue import EngineQueue, Ticket, background_cancel


def in_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def moved_on() -> None:
    """Those whose place came free have begun."""
    await asyncio.sleep(0)


def nothing(permits: int) -> None:
    """What begins without a trace."""


class Waiters:
    """One place, which is taken; whoever asks after that waits."""

    def __init__(self) -> None:
        self.queue = EngineQueue(1)
        self.began: list[str] = []
        self.now = self.queue.submit(Ticket(nothing))

    def ask(self, name: str, owner: str = "", priority: int = 0, weight: int = 1) -> Ticket:
        def begin(permits: int) -> None:
            self.began.append(name)
            self.now = ticket

        ticket = Ticket(begin, owner, priority, weight)
        return self.queue.submit(ticket)

    async def let_through(self) -> list[str]:
        """All of them, one after the other."""
        while self.queue.running or self.queue.waiting:
            self.queue.remove(self.now)
            await moved_on()
        return self.began


def test_what_has_a_place_begins_at_once() -> None:
    began: list[int] = []
    line = EngineQueue(2)
    for number in range(3):
        line.submit(Ticket(lambda _, number=number: began.append(number)))  # type: ignore[misc]
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


def test_no_priority_is_before_another_key() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        for number in range(4):
            waiters.ask(f"flood {number}", owner="flood", priority=-(2**31))
        waiters.ask("drop", owner="drop")
        assert (await waiters.let_through()).index("drop") == 1

    in_loop(scenario)


def test_the_key_with_the_fewest_answers_at_work_goes_first() -> None:
    async def scenario() -> None:
        line, began = EngineQueue(3), list[str]()
        first = [line.submit(Ticket(nothing, owner)) for owner in ("busy", "busy", "other")]
        for owner in ("busy", "idle"):
            line.submit(Ticket(lambda _, owner=owner: began.append(owner), owner))  # type: ignore[misc]
        line.remove(first[2])
        await moved_on()
        assert began == ["idle"]

    in_loop(scenario)


def test_a_key_below_its_share_is_let_in_though_all_places_are_taken() -> None:
    line, began = EngineQueue(4, most=8), list[int]()
    line.submit(Ticket(nothing, "flood", weight=100))
    line.submit(Ticket(began.append, "drop", weight=3))
    assert (began, line.running, line.waiting) == ([2], 6, 2)


def test_an_engine_is_told_an_order_in_which_no_key_waits_behind_the_flood_of_another() -> None:
    line = EngineQueue(100)
    flood = [line.submit(Ticket(nothing, "flood", priority=-9)) for _ in range(9)]
    drop = line.submit(Ticket(nothing, "drop"))
    line.mark_started(flood[0])
    late = line.submit(Ticket(nothing, "late"))
    orders = [line.priority(ticket) for ticket in (*flood, drop, late)]
    assert orders == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]


def test_where_one_key_asks_an_engine_goes_by_its_priorities() -> None:
    line = EngineQueue(2, several=False)
    assert [line.priority(line.submit(Ticket(nothing, priority=-n))) for n in range(3)] == [0, -1, -2]


def test_who_leaves_the_line_is_never_begun() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        left, _ = waiters.ask("left"), waiters.ask("stayed")
        waiters.queue.remove(left)
        waiters.queue.remove(left)
        assert (await waiters.let_through(), waiters.queue.waiting) == (["stayed"], 0)

    in_loop(scenario)


def test_a_wide_one_begins_as_far_as_there_are_places_and_goes_on_as_they_come_free() -> None:
    async def scenario() -> None:
        line, began = EngineQueue(3), list[int]()
        other = line.submit(Ticket(nothing))
        wide = line.submit(Ticket(began.append, weight=5))
        assert (began, line.running, line.waiting) == ([2], 3, 1)
        line.remove(other)
        line.release(wide)
        await moved_on()
        assert (began, line.running, line.waiting) == ([2, 2], 3, 1)
        line.remove(wide)
        assert (line.running, line.waiting) == (0, 0)

    in_loop(scenario)


def test_one_that_cannot_begin_holds_up_nobody() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        waiters.queue.submit(Ticket(lambda _: 1 / 0))  # type: ignore[arg-type]
        waiters.ask("next")
        assert await waiters.let_through() == ["next"]

    in_loop(scenario)


def test_one_that_cannot_begin_at_once_is_told_and_leaves_its_place() -> None:
    async def scenario() -> None:
        line = EngineQueue(1)
        with pytest.raises(ZeroDivisionError):
            line.submit(Ticket(lambda _: 1 / 0))  # type: ignore[arg-type]
        assert line.running == 0

    in_loop(scenario)


def test_a_place_that_is_given_up_while_waiting_was_never_held() -> None:
    async def scenario() -> None:
        line = EngineQueue(1)
        held = line.submit(Ticket(nothing))

        async def work() -> None:
            async with line.acquire():
                raise AssertionError("It never came to this.")

        waiting = asyncio.create_task(work())
        await moved_on()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        line.remove(held)
        assert (line.running, line.waiting) == (0, 0)

    in_loop(scenario)


WISHES = st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 5), st.booleans())


@given(st.integers(1, 4), st.integers(0, 4), st.lists(WISHES, max_size=30), st.randoms(use_true_random=False))
def test_everybody_who_stays_is_begun_as_a_whole_and_places_are_kept_to(
    places: int, more: int, wishes: list[tuple[str, int, int, bool]], chance: Any
) -> None:
    async def scenario() -> None:
        line = EngineQueue(places, places + more)
        began: Counter[int] = Counter()
        order: list[int] = []
        tickets: dict[int, Ticket] = {}

        def begin(number: int, count: int) -> None:
            began[number] += count
            order.append(number)

        for number, (owner, priority, weight, _) in enumerate(wishes):
            tickets[number] = line.submit(Ticket(partial(begin, number), owner, priority, weight))
        for number, (*_, stays) in enumerate(wishes):
            if not stays:
                line.remove(tickets[number])
        while line.running or line.waiting:
            await moved_on()
            at_work = [ticket for ticket in tickets.values() if ticket.granted]
            assert line.running == sum(ticket.granted for ticket in at_work) <= places + more
            line.release(chance.choice(at_work))
        for number, (owner, priority, weight, stays) in enumerate(wishes):
            assert not stays or began[number] == weight
            # Of one key and priority, the first to come is the first to go.
            alike = [n for n, wish in enumerate(wishes) if wish[:2] == (owner, priority) and wish[3]]
            assert not stays or alike == list(dict.fromkeys(n for n in order if n in alike))

    in_loop(scenario)


FLOOD = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(1, 300)), min_size=1, max_size=20)


@given(st.integers(1, 8), FLOOD, FLOOD, st.randoms(use_true_random=False))
def test_whatever_one_key_asks_another_has_its_equal_share(
    places: int, before: list[tuple[int, int]], after: list[tuple[int, int]], chance: Any
) -> None:
    """Whichever answers end: once as many have as the flood has above its share, the other begins."""

    async def scenario() -> None:
        line = EngineQueue(places)
        flood = [line.submit(Ticket(nothing, "flood", priority, n)) for priority, n in before]
        drop = line.submit(Ticket(nothing, "drop", weight=places))
        flood += [line.submit(Ticket(nothing, "flood", priority, n)) for priority, n in after]
        share = places // 2
        for _ in range(share):
            if at_work := [ticket for ticket in flood if ticket.granted]:
                line.release(chance.choice(at_work))
                await moved_on()
        assert drop.granted >= share

    in_loop(scenario)


# What nobody waits for.


def ask_behind(
    queue: EngineQueue, begin: Callable[[int], None], step_back: Callable[[], None], owner: str = ""
) -> Ticket:
    token = background_cancel.set(step_back)
    try:
        return queue.submit(Ticket(begin, owner))
    finally:
        background_cancel.reset(token)


def test_what_nobody_waits_for_begins_only_where_nobody_else_waits() -> None:
    async def scenario() -> None:
        queue, began = EngineQueue(1), list[str]()
        first = queue.submit(Ticket(nothing))
        ask_behind(queue, lambda _: began.append("line"), lambda: None)
        second = queue.submit(Ticket(lambda _: began.append("chat")))
        queue.remove(first)
        await moved_on()
        assert began == ["chat"]
        queue.remove(second)
        await moved_on()
        assert began == ["chat", "line"]

    in_loop(scenario)


def test_the_last_that_nobody_waits_for_makes_way_at_once() -> None:
    async def scenario() -> None:
        queue, pressed, began = EngineQueue(3), list[int](), list[int]()
        lines: list[Ticket] = []

        def step_back(number: int) -> None:
            pressed.append(number)
            queue.remove(lines[number])

        lines += [ask_behind(queue, nothing, partial(step_back, number)) for number in range(5)]
        assert (queue.running, queue.waiting) == (3, 2)
        queue.submit(Ticket(began.append, weight=2))
        await moved_on()
        assert (pressed, began) == ([2, 1], [2])
        # Those that wait do not begin instead.
        assert (queue.running, queue.waiting) == (3, 2)

    in_loop(scenario)


def test_an_engine_computes_what_nobody_waits_for_after_all_else() -> None:
    queue = EngineQueue(9)
    line, chat = ask_behind(queue, nothing, lambda: None), queue.submit(Ticket(nothing, priority=99))
    assert queue.priority(line) >= BACKGROUND_PRIORITY > queue.priority(chat)


def test_an_engine_that_makes_no_way_is_given_no_more_of_it_than_it_computes_at_once() -> None:
    queue = EngineQueue(8, spare=4)
    for _ in range(8):
        ask_behind(queue, nothing, lambda: None)
    assert (queue.running, queue.waiting) == (4, 4)
    queue.submit(Ticket(nothing))
    assert queue.running == 5


def test_who_was_told_to_step_back_is_counted_on() -> None:
    """Two that come at once need two places, though those who make way have not left yet."""
    queue, pressed = EngineQueue(4), list[int]()
    for number in range(4):
        ask_behind(queue, nothing, partial(pressed.append, number))
    for _ in range(2):
        queue.submit(Ticket(nothing))
    assert pressed == [3, 2]


def test_what_waited_begins_in_the_context_of_who_asked() -> None:
    """Not in that of who made room for it: log lines and traces of the one would be the other's."""
    who = ContextVar("who", default="")
    began: list[str] = []

    async def ask(queue: EngineQueue, name: str) -> Ticket:
        who.set(name)
        return queue.submit(Ticket(lambda permits: began.append(who.get())))

    async def work() -> None:
        queue = EngineQueue(1)
        first = await asyncio.create_task(ask(queue, "first"))
        await asyncio.create_task(ask(queue, "second"))
        who.set("another")
        queue.remove(first)
        await moved_on()

    in_loop(work)
    assert began == ["first", "second"]
