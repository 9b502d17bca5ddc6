"""A model that is loaded: its engine, what is made from it once to run turns on it, and whether it moves."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dragoman._version import __version__
from dragoman.api.shared_fields import read_presets
from dragoman.engines.asked import Brake, ask_engine
from dragoman.engines.protocol import Engine, LivingEngine, ModelCard
from dragoman.errors import DragomanError, EngineFailed, Unavailable
from dragoman.settings import Settings
from dragoman.turns.adapters import AdapterChanges
from dragoman.turns.queue import EngineQueue, Workers
from dragoman.turns.served import ServedModel

CHECK_TIMEOUT_S = 5.0
ALIVE_TIMEOUT_S = 0.5
"""A dead engine says so at once; one that is busy is alive."""
PLACES_PER_SLOT = 2
"""Answers that the engine is given for each that it computes: it never waits, and the rest has an order."""

PLACES = 1024
"""Where an engine does not say how much it computes at the same time."""

R = TypeVar("R")


def make_queue(card: ModelCard, in_flight: int | None, *, several: bool) -> EngineQueue:
    """Of who is computed next by an engine; `several`: more than one key may ask."""
    places = in_flight or (PLACES_PER_SLOT * card.slots if card.slots else PLACES)
    # What the operator says is kept to; else there may be more, so that every key has its share.
    return EngineQueue(
        places,
        in_flight or 2 * places,
        several=several,
        # What nobody waits for is given to an engine as far as it computes it at once, lest others wait.
        spare=None if card.makes_way else card.slots,
    )


class LoadedModel:
    """Made in a thread where that takes its time; `start` is for the event loop."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        workers: Workers,
        queue: EngineQueue,
        template: str | None = None,
    ) -> None:
        self.engine = engine
        self.queue = queue
        self.model = ServedModel(engine, settings, workers, queue, read_presets(settings), template)
        self.card = self.model.card
        self.brake = Brake(engine)
        planner = self.model.planner
        self.adapters = AdapterChanges(engine, planner.adapters, settings, planner.names)
        self.fingerprint = "-".join(filter(None, ("dragoman", __version__, self.card.numerics)))
        """Of the model as it was loaded; adapters may have come since."""
        places = PLACES_PER_SLOT * (self.card.embeds_at_once or 0)
        self._vectors = EngineQueue(places, 2 * places) if places else queue
        self.view: Any = None
        """What the routes of a server see of it; it goes with the model."""
        self._checking: asyncio.Future[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name, others for it, and its adapters."""
        return (*self.model.planner.names, *self.card.adapters)

    @property
    def held_bytes(self) -> int:
        """Of weights, and of keys and values, as far as the engine says."""
        said = (
            self.card.details.get(name, "") for name in ("bytes", "kv_bytes", "draft_bytes", "mmproj_bytes")
        )
        return sum(int(each) for each in said if each.isdecimal())

    async def start(self) -> None:
        if isinstance(self.engine, LivingEngine):
            await ask_engine(self.engine, "start")
        if self.card.constrains:
            # Now, because it would hold up the answers of others later.
            await asyncio.to_thread(self.model.planner.warm_up)

    async def computed(self, owner: str, work: Callable[[], Awaitable[R]]) -> R:
        """What the engine makes of something that is no turn; it waits for its place like one."""
        async with self._vectors.place(owner):
            return await work()

    async def check(self, most: float = CHECK_TIMEOUT_S) -> None:
        """Whether the engine moves; raises Unavailable when there is no answer within the time."""
        if not isinstance(self.engine, LivingEngine):
            return
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(ask_engine(self.engine, "check"))
        checking = self._checking
        await asyncio.wait({checking}, timeout=most)
        if not checking.done():
            # One that does not even end when it is cancelled is waited for by all who ask after it.
            checking.cancel()
        try:
            if not checking.done() or checking.cancelled():
                raise Unavailable(f"The engine has not moved for {most:.0f} seconds.")
            checking.result()
        except EngineFailed as error:
            # The question was answered well: the answer is no, which probes know as 503.
            raise Unavailable(error.message, code=error.code) from error

    async def cause(self, error: EngineFailed) -> DragomanError:
        """Why an answer failed that had not begun: a dead engine fails all of them, which is a 503."""
        try:
            await self.check_alive()
        except Unavailable as dead:
            return dead
        return error

    async def check_alive(self) -> None:
        """Raises when nothing but another process will help: the engine is dead, and will stay so."""
        try:
            await self.check(ALIVE_TIMEOUT_S)
        except Unavailable as error:
            if error.code == EngineFailed.code:
                raise
