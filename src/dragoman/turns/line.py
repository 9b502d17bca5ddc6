"""Who is computed next: what the engine has no place for yet waits here.

A place is for one answer, so a request for several needs several: it begins as many as there are places for,
and the rest when their time comes. Places are shared out equally between the keys that have work, one by one:

- A place goes to the key with the fewest answers at work. What answers take is thereby counted too: a key
  with long ones holds its places for longer, and gets no others meanwhile.
- A key with less than its equal share is let in though all places are taken, as far as `most` allows: it does
  not wait until the long answers of another are done.
- Of one key, lower priorities go first, and among equals the first to come. Between keys they mean nothing.

Engines have an order of their own, by the priority of a job. Where several keys ask, they are given one that
is fair (`Ticket.order`): the virtual time at which an answer would be done if every key were served an equal
number of them. It grows with every answer that begins, so nothing waits for ever behind what comes later.
"""

import asyncio
import heapq
import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

logger = logging.getLogger("dragoman.turns")

SMOOTHING = 0.2
"""How much the latest interval counts in the pace."""


class Ticket:
    """`weight` places that are asked for; `begin` is told how many of them there are now, until it has all.

    Given back one by one with `Line.give_back`, or all at once with `Line.leave`, be it their time or not.
    """

    __slots__ = ("begin", "held", "left", "order", "owner", "place", "wanted")

    def __init__(
        self, begin: Callable[[int], None], owner: str = "", priority: int = 0, weight: int = 1
    ) -> None:
        self.begin = begin
        self.owner = owner
        self.wanted = weight
        """Places that it still waits for."""
        self.held = 0
        self.order: int | None = None
        """What an engine may go by when several keys ask; None while nothing has begun."""
        self.place = (priority, 0)
        self.left = False

    @property
    def begun(self) -> bool:
        return self.order is not None


class Line:
    """`places` answers are at work at the same time, or up to `most` where a key has less than its share.

    `several`: more than one key may ask, so that what one says of its own priority is not for the engine.
    """

    def __init__(self, places: int, most: int | None = None, *, several: bool = True) -> None:
        self.places = places
        self._most = most or places
        self._several = several
        self.running = 0
        self.waiting = 0
        """Tickets that wait for a place, or for more."""
        self.pace = 0.0
        """Seconds from one place that came free to the next, while others waited for it."""
        self._running_of: Counter[str] = Counter()
        # By key, that which was served least lately first; of each in the order of `Ticket.place`.
        self._waiting: dict[str, list[Ticket]] = {}
        self._arrivals = count()
        self._serving = False
        self._served_at: float | None = None
        self._now = 0
        """The virtual time: that of the latest answer which the engine has begun to say."""
        self._latest: dict[str, int] = {}
        """The virtual time of each key's latest answer."""

    def ask(self, ticket: Ticket) -> Ticket:
        """`begin` is called at once if there is a place, and may raise then; else later, from the loop."""
        ticket.place = (ticket.place[0], next(self._arrivals))
        if not self.waiting and self.running + ticket.wanted <= self.places:
            # As it mostly is: nobody waits, and there is room for all of it.
            mine = ticket.wanted
            self._grant(ticket, mine)
        else:
            insort(self._waiting.setdefault(ticket.owner, []), ticket, key=_place)
            self.waiting += 1
            granted = self._granted()
            mine = granted.pop(ticket, 0)
            self._begin(granted)
        if mine:
            try:
                ticket.begin(mine)
            except BaseException:
                self.leave(ticket)
                raise
        return ticket

    def priority(self, ticket: Ticket) -> int:
        """By which an engine may order what it was given."""
        return (ticket.order or 0) if self._several else ticket.place[0]

    def served(self, ticket: Ticket) -> None:
        """The engine has begun to say an answer; those that come later are reckoned from there."""
        self._now = max(self._now, ticket.order or 0)

    def give_back(self, ticket: Ticket, places: int = 1) -> None:
        """What it was for is done."""
        places = min(places, ticket.held)
        ticket.held -= places
        self.running -= places
        self._running_of[ticket.owner] -= places
        if not self._running_of[ticket.owner]:
            self._running_of.pop(ticket.owner)
            self._forget(ticket.owner)
        self._serve_soon()

    def leave(self, ticket: Ticket) -> None:
        """Idempotent."""
        if ticket.left:
            return
        ticket.left = True
        if ticket.wanted:
            self._take_out(ticket)
        self.give_back(ticket, ticket.held)

    @asynccontextmanager
    async def place(self, owner: str = "") -> AsyncIterator[None]:
        """Inside, a place is held; who has none yet waits to get in."""
        begun = asyncio.get_running_loop().create_future()

        def begin(_: int) -> None:
            # Who has left in the meantime is about to give the place back.
            if not begun.done():
                begun.set_result(None)

        ticket = self.ask(Ticket(begin, owner))
        try:
            await begun
            self.served(ticket)
            yield
        finally:
            self.leave(ticket)

    def _serve_soon(self) -> None:
        # Not at once: a place comes free in the midst of a step, where an engine does not expect new jobs.
        if self.waiting and not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = False
        self._begin(self._granted())
        if not self.waiting:
            self._served_at = None

    def _begin(self, granted: dict[Ticket, int]) -> None:
        for ticket, places in granted.items():
            self._keep_pace()
            try:
                ticket.begin(places)
            except Exception:
                # The others wait for their places all the same.
                logger.exception("What had waited could not begin")
                self.leave(ticket)

    def _granted(self) -> dict[Ticket, int]:
        """Whose turn it is, and how many places each has now: one after the other, to who has the fewest."""
        granted: Counter[Ticket] = Counter()
        share = max(1, self.places // len(self._waiting.keys() | self._running_of.keys() or {""}))
        turns = count()
        fewest = [(self._running_of.get(owner, 0), next(turns), owner) for owner in self._waiting]
        heapq.heapify(fewest)
        while fewest and self._has_room(fewest[0][0] < share):
            at_work, _, owner = fewest[0]
            ticket = self._waiting[owner][0]
            self._grant(ticket, 1)
            granted[ticket] += 1
            if not ticket.wanted:
                self._take_out(ticket)
            if owner in self._waiting:
                heapq.heapreplace(fewest, (at_work + 1, next(turns), owner))
                self._waiting[owner] = self._waiting.pop(owner)
            else:
                heapq.heappop(fewest)
        return granted

    def _has_room(self, below_its_share: bool) -> bool:
        return self.running < (self._most if below_its_share else self.places)

    def _grant(self, ticket: Ticket, places: int) -> None:
        owner = ticket.owner
        ticket.wanted -= places
        ticket.held += places
        self.running += places
        self._running_of[owner] += places
        ticket.order = self._latest[owner] = max(self._now, self._latest.get(owner, 0)) + places

    def _take_out(self, ticket: Ticket) -> None:
        self.waiting -= 1
        mine = self._waiting[ticket.owner]
        del mine[bisect_left(mine, ticket.place, key=_place)]
        if not mine:
            del self._waiting[ticket.owner]
            self._forget(ticket.owner)

    def _forget(self, owner: str) -> None:
        if owner not in self._waiting and owner not in self._running_of:
            self._latest.pop(owner, None)

    def _keep_pace(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._served_at is not None:
            interval = now - self._served_at
            self.pace = self.pace + SMOOTHING * (interval - self.pace) if self.pace else interval
        self._served_at = now


def _place(ticket: Ticket) -> tuple[int, int]:
    return ticket.place
