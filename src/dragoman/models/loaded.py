"""A loaded model: its engine, the objects for running turns on it, and its health."""

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
"""Timeout to detect a dead engine, which responds at once; a busy one counts as alive."""
PLACES_PER_SLOT = 2
"""Answers submitted to the engine per slot, so that it never waits for work; the others wait in the queue."""

PLACES = 1024
"""Concurrency for engines that do not state theirs."""

R = TypeVar("R")


def make_queue(card: ModelCard, in_flight: int | None, *, several: bool) -> EngineQueue:
    """Make the queue of an engine; `several` means that more than one key may send requests."""
    places = in_flight or (PLACES_PER_SLOT * card.slots if card.slots else PLACES)
    # A limit set by the operator is strict; otherwise it may be exceeded, so that each key gets its share.
    return EngineQueue(
        places,
        in_flight or 2 * places,
        several=several,
        # Background work is submitted only as far as the engine computes it at once, so that others do not
        # wait.
        spare=None if card.makes_way else card.slots,
    )


class LoadedModel:
    """A loaded model. The constructor may run in a thread; `start` runs on the event loop."""

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
        """Fingerprint of the model as loaded; adapters may have been added since."""
        places = PLACES_PER_SLOT * (self.card.embeds_at_once or 0)
        self._vectors = EngineQueue(places, 2 * places) if places else queue
        self.view: Any = None
        """View of the model for the server's routes; it is discarded with the model."""
        self._checking: asyncio.Future[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, its aliases, and its adapters."""
        return (*self.model.planner.names, *self.card.adapters)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and KV cache, as far as the engine reports them."""
        reported = (
            self.card.details.get(name, "") for name in ("bytes", "kv_bytes", "draft_bytes", "mmproj_bytes")
        )
        return sum(int(size) for size in reported if size.isdecimal())

    async def start(self) -> None:
        if isinstance(self.engine, LivingEngine):
            await ask_engine(self.engine, "start")
        if self.card.constrains:
            # Now, because later it would delay other clients' answers.
            await asyncio.to_thread(self.model.planner.warm_up)

    async def computed(self, owner: str, work: Callable[[], Awaitable[R]]) -> R:
        """Run engine work that is not a turn; it waits in the queue like a turn."""
        async with self._vectors.place(owner):
            return await work()

    async def check(self, most: float = CHECK_TIMEOUT_S) -> None:
        """Check that the engine responds; raise Unavailable if it does not in time."""
        if not isinstance(self.engine, LivingEngine):
            return
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(ask_engine(self.engine, "check"))
        checking = self._checking
        await asyncio.wait({checking}, timeout=most)
        if not checking.done():
            # All callers wait for a check that does not end even when cancelled.
            checking.cancel()
        try:
            if not checking.done() or checking.cancelled():
                raise Unavailable(f"The engine has not responded for {most:.0f} seconds.")
            checking.result()
        except EngineFailed as error:
            # The check itself worked: the engine is unhealthy, which probes expect as 503.
            raise Unavailable(error.message, code=error.code) from error

    async def cause(self, error: EngineFailed) -> DragomanError:
        """Return why an answer failed before it began: a dead engine fails all answers, which is a 503."""
        try:
            await self.check_alive()
        except Unavailable as dead:
            return dead
        return error

    async def check_alive(self) -> None:
        """Raise if the engine is dead and only a new process would help."""
        try:
            await self.check(ALIVE_TIMEOUT_S)
        except Unavailable as error:
            if error.code == EngineFailed.code:
                raise
