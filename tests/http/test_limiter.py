"""Connections and who gives way: counts stay right whatever comes, and nobody at work is closed."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import Overloaded
from dragoman.http.connection.limiter import ConnectionLimiter, CountedConnection

MOST = 8
ACTIONS = st.sampled_from(["enter", "show a", "show b", "works", "rests", "socket", "leave"])


class Connection:
    """What a connection is to others: it can be closed, and must not be while it works."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self.closed = self.works = self.known = False
        self.counted: CountedConnection | None = limiter.enter(self.close)

    def close(self) -> None:
        assert not (self.known and self.works), "closed at work"
        self.closed = True


def act(action: str, one: Connection) -> None:
    counted = one.counted
    if counted is None or one.closed:
        return
    if action.startswith("show"):
        counted.set_owner(action[-1])
        one.known = one.works = True
    elif action == "works":
        counted.mark_busy()
        one.works = True
    elif action == "rests":
        counted.mark_idle()
        one.works = False
    elif action == "socket" and one.known:
        counted.mark_busy()
        one.works = True
        counted.open_socket()
    elif action == "leave":
        counted.leave()
        one.closed = True


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 30)), max_size=120))
def test_counts_are_right_whatever_comes(actions: list[tuple[str, int]]) -> None:
    limiter = ConnectionLimiter(MOST, keys=2)
    connections: list[Connection] = []
    for action, number in actions:
        if action == "enter":
            connections.append(Connection(limiter))
        elif connections:
            with suppress(Overloaded):
                act(action, connections[number % len(connections)])
        there = [one for one in connections if one.counted is not None and not one.closed]
        assert len(limiter.strangers) + limiter.of_key.total() == len(there) <= MOST
        assert len(limiter.strangers) <= limiter.most_strangers
        assert all(count <= limiter.most_of_key for count in limiter.of_key.values())
    for one in connections:
        act("leave", one)
    assert not (limiter.strangers or limiter.of_key or limiter.sockets or limiter.resting)


def shown(limiter: ConnectionLimiter, owner: str) -> Connection:
    connection = Connection(limiter)
    act(f"show {owner}", connection)
    return connection


def test_the_stranger_that_came_first_is_closed_first() -> None:
    limiter = ConnectionLimiter(MOST, keys=1)
    strangers = [Connection(limiter) for _ in range(MOST // 2 + 1)]
    assert [one.closed for one in strangers] == [True, *[False] * (MOST // 2)]


def test_that_which_rested_longest_of_the_key_that_has_most_gives_way() -> None:
    limiter = ConnectionLimiter(MOST, keys=1)
    theirs = [shown(limiter, "b") for _ in range(3)]
    mine = [shown(limiter, "a") for _ in range(5)]
    for one in (*theirs, mine[2], mine[1]):
        act("rests", one)
    assert Connection(limiter).counted is not None
    assert [one.closed for one in (*theirs, *mine)] == [False] * 5 + [True] + [False] * 2


def test_where_all_are_at_work_nobody_gives_way() -> None:
    limiter = ConnectionLimiter(MOST, keys=1)
    for _ in range(MOST):
        shown(limiter, "a")
    assert Connection(limiter).counted is None


def test_a_key_that_has_its_share_at_work_is_told_so() -> None:
    limiter = ConnectionLimiter(MOST, keys=2)
    for _ in range(MOST // 2):
        shown(limiter, "a")
    with pytest.raises(Overloaded):
        shown(limiter, "a")
    assert not shown(limiter, "b").closed


def test_who_watches_a_connection_hears_of_its_end_once() -> None:
    heard: list[str] = []

    async def run() -> None:
        counted = ConnectionLimiter(MOST, keys=1).enter(lambda: None)
        assert counted is not None
        counted.watch(lambda: heard.append("first"))
        forget = counted.watch(lambda: heard.append("forgotten"))
        forget()
        counted.leave()
        counted.leave()
        assert not heard
        await asyncio.sleep(0)
        counted.watch(lambda: heard.append("late"))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert heard == ["first", "late"]
