"""Who is computed next: what the engine has no place for yet waits here.

Lower priorities go first; among equals the key with the fewest answers at work, so that none waits behind the
flood of another; and of one key the first to come.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

logger = logging.getLogger("dragoman.turns")

SMOOTHING = 0.2
"""How much the latest interval counts in the pace."""


class Ticket:
    """A place that was asked for. Given back by `Line.leave`, whether or not its time had come."""

    __slots__ = ("begin", "begun", "left", "owner", "priority", "weight")

    def __init__(self, begin: Callable[[], None], owner: str, priority: int, weight: int) -> None:
        self.begin = begin
        self.owner = owner
        self.priority = priority
        self.weight = weight
        self.begun = False
        self.left = False


Waiting: TypeAlias = OrderedDict[Ticket, None]


class Line:
    """Lets in while there are less than `places` answers at work; the last one let in may be several."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.running = 0
        self.waiting = 0
        self.pace = 0.0
        """Seconds from one place that came free to the next, while others waited for it."""
        self._running_of: Counter[str] = Counter()
        self._waiting: dict[int, dict[str, Waiting]] = {}
        self._serving = False
        self._served_at: float | None = None

    def ask(self, begin: Callable[[], None], owner: str = "", priority: int = 0, weight: int = 1) -> Ticket:
        """`begin` is called at once if there is a place, and may raise then; else later, from the loop."""
        ticket = Ticket(begin, owner, priority, weight)
        if self.running < self.places and not self.waiting:
            self._let_in(ticket)
            try:
                begin()
            except BaseException:
                self.leave(ticket)
                raise
        else:
            self._waiting.setdefault(priority, {}).setdefault(owner, OrderedDict())[ticket] = None
            self.waiting += 1
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Idempotent."""
        if ticket.left:
            return
        ticket.left = True
        if not ticket.begun:
            self._take_out(ticket)
            return
        self.running -= ticket.weight
        self._running_of[ticket.owner] -= ticket.weight
        if not self._running_of[ticket.owner]:
            del self._running_of[ticket.owner]
        self._serve_soon()

    @asynccontextmanager
    async def place(self, owner: str = "", priority: int = 0, weight: int = 1) -> AsyncIterator[None]:
        """Inside, a place is held; what has none yet waits to get in."""
        begun = asyncio.get_running_loop().create_future()
        ticket = self.ask(lambda: begun.set_result(None), owner, priority, weight)
        try:
            await begun
            yield
        finally:
            self.leave(ticket)

    def _let_in(self, ticket: Ticket) -> None:
        ticket.begun = True
        self.running += ticket.weight
        self._running_of[ticket.owner] += ticket.weight

    def _serve_soon(self) -> None:
        # Not at once: a place comes free in the midst of a step, where an engine does not expect new jobs.
        if self.waiting and not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = False
        while self.waiting and self.running < self.places:
            ticket = self._next()
            self._keep_pace()
            self._let_in(ticket)
            try:
                ticket.begin()
            except Exception:
                # The others wait for their places all the same.
                logger.exception("What had waited could not begin")
                self.leave(ticket)
        if not self.waiting:
            self._served_at = None

    def _next(self) -> Ticket:
        keys = self._waiting[min(self._waiting)]
        # Of several with as few, the one that was served least lately: it stands first.
        owner = min(keys, key=self._running_of.__getitem__)
        ticket = next(iter(keys[owner]))
        self._take_out(ticket)
        if owner in keys:
            keys[owner] = keys.pop(owner)
        return ticket

    def _take_out(self, ticket: Ticket) -> None:
        self.waiting -= 1
        keys = self._waiting[ticket.priority]
        del keys[ticket.owner][ticket]
        if not keys[ticket.owner]:
            del keys[ticket.owner]
        if not keys:
            del self._waiting[ticket.priority]

    def _keep_pace(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._served_at is not None:
            interval = now - self._served_at
            self.pace = self.pace + SMOOTHING * (interval - self.pace) if self.pace else interval
        self._served_at = now
