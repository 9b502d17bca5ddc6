"""What keys may have, over several doors and replicas: how far off the counts can be. No sockets in it."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.ray.fleet import Fleet, KeyRequestCounts, ReplicaHeartbeat
from dragoman.turns.queue import EngineQueue, Ticket

REPLICAS = ("a", "b", "c")
MOST = 5
ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from(REPLICAS)), max_size=120)


class Simulation:
    """Doors that let requests of one key in at replicas, which tell all doors now and then."""

    def __init__(self, doors: int) -> None:
        self.doors = [KeyRequestCounts() for _ in range(doors)]
        self.inside = [Counter[str]() for _ in range(doors)]
        self.unheard = [[Counter[str]() for _ in range(doors)] for _ in range(doors)]
        """What each door has let in that another has not heard of, by replica."""

    @property
    def total(self) -> int:
        return sum(each.total() for each in self.inside)

    def act(self, what: int, door: int, replica: str) -> None:
        if what == 0:
            for one in self.doors:
                one.hear(replica, {"key": sum(each[replica] for each in self.inside)})
            for pair in self.unheard:
                for counts in pair:
                    del counts[replica]
        elif what == 1:
            if self.inside[door][replica]:
                self.inside[door][replica] -= 1
                self.doors[door].leave(replica, "key")
        elif self.doors[door].of("key") < MOST:
            self.inside[door][replica] += 1
            self.doors[door].enter(replica, "key")
            for other in self.unheard:
                other[door][replica] += 1

    def unknown_to(self, door: int) -> int:
        return sum(each.total() for number, each in enumerate(self.unheard[door]) if number != door)


@given(ACTIONS)
def test_one_door_lets_in_no_more_than_a_key_may_have(actions: list[tuple[int, int, str]]) -> None:
    fleet = Simulation(1)
    for what, _, replica in actions:
        fleet.act(what, 0, replica)
        assert fleet.total <= MOST
        assert fleet.doors[0].of("key") == fleet.total


@given(ACTIONS)
def test_several_doors_miss_what_others_let_in_since_the_last_beat(
    actions: list[tuple[int, int, str]],
) -> None:
    fleet = Simulation(3)
    for what, door, replica in actions:
        before = fleet.total
        fleet.act(what, door, replica)
        if fleet.total > before:
            assert fleet.total <= MOST + fleet.unknown_to(door)
    for replica in REPLICAS:
        # Once all replicas have told it, every door knows all.
        fleet.act(0, 0, replica)
    assert {door.of("key") for door in fleet.doors} == {fleet.total}


def test_what_a_lost_replica_had_is_over() -> None:
    counts = KeyRequestCounts()
    counts.enter("a", "key")
    counts.lose("a")
    assert counts.of("key") == 0
    counts.leave("a", "key")
    assert counts.of("key") == 0


def test_replicas_are_told_what_the_others_of_their_model_have_at_work() -> None:
    fleet = Fleet(["one", "two"])
    for id_, model in (("a", "one"), ("b", "one"), ("c", "two")):
        news = fleet.update(ReplicaHeartbeat(id_, model, "127.0.0.1", 1, at_work={"key": 2}))
        assert news.at_work == ({"key": 2} if id_ == "b" else {})


class QueuedReplicas:
    """Queues of the same model in which all keys wait without end, and what each is told of the others."""

    def __init__(self, indices: list[int], keys: int) -> None:
        self.queues = [EngineQueue(each) for each in indices]
        self.keys = [f"key-{number}" for number in range(keys)]
        self.begun: list[list[Ticket]] = [[] for _ in indices]
        self.changes = 0
        """Since all were told."""
        for number, queue in enumerate(self.queues):
            for _ in range(queue.capacity + 1):
                for key in self.keys:
                    self.ask(number, key)

    def ask(self, number: int, key: str) -> None:
        begun = self.begun[number]
        ticket = Ticket(lambda _: begun.append(ticket), key)
        self.queues[number].submit(ticket)

    def tell(self) -> None:
        self.changes = 0
        for queue in self.queues:
            others = [other.running_by_key for other in self.queues if other is not queue]
            queue.elsewhere = sum(others, Counter[str]())

    def all_of(self, key: str) -> int:
        return sum(queue.running_by_key[key] for queue in self.queues)

    async def end_one(self, number: int, which: int) -> str:
        """Whose place it was is free, and is somebody's again: who that is."""
        begun, queue = self.begun[number], self.queues[number]
        ticket = begun.pop(which % len(begun))
        key, before = ticket.owner, len(begun)
        queue.remove(ticket)
        self.ask(number, key)
        await asyncio.sleep(0)
        assert len(begun) == before + 1
        self.changes += 2
        return begun[-1].owner


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=60),
)
def test_a_place_goes_to_the_key_with_the_fewest_at_all_replicas(
    places: list[int], keys: int, ends: list[tuple[int, int, bool]]
) -> None:
    async def run() -> None:
        replicas = QueuedReplicas(places, keys)
        replicas.tell()
        for number, which, tells in ends:
            if tells:
                replicas.tell()
            missed = replicas.changes
            chosen = await replicas.end_one(number % len(places), which)
            least = min(replicas.all_of(key) for key in replicas.keys)
            # Its own place is counted by now; what changed elsewhere since the last beat nobody knew.
            assert replicas.all_of(chosen) - 1 <= least + missed

    asyncio.run(run())


@pytest.mark.parametrize("told", [True, False])
def test_who_has_much_elsewhere_waits(told: bool) -> None:
    async def run() -> list[str]:
        queue, begun = EngineQueue(1), list[str]()
        first = queue.submit(Ticket(lambda _: None, "c"))
        for key in ("a", "b"):
            queue.submit(Ticket(lambda _, key=key: begun.append(key), key))  # type: ignore[misc]
        queue.elsewhere = {"a": 3} if told else {}
        queue.remove(first)
        await asyncio.sleep(0)
        return begun

    assert asyncio.run(run()) == (["b"] if told else ["a"])
