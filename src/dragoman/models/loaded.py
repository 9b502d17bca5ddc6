"""A loaded model: its engine, the objects for running turns on it, and its health."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dragoman._version import __version__
from dragoman.api.shared_fields import read_presets
from dragoman.engines.lifecycle import PauseControl, call_engine
from dragoman.engines.protocol import Engine, LifecycleEngine, ModelCard
from dragoman.errors import DragomanError, EngineFailed, Unavailable
from dragoman.settings import Settings
from dragoman.turns.adapters import AdapterManager
from dragoman.turns.queue import EngineQueue, WorkerPool
from dragoman.turns.served_model import ServedModel

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
    permits = in_flight or (PLACES_PER_SLOT * card.slots if card.slots else PLACES)
    # A limit set by the operator is strict; otherwise it may be exceeded, so that each key gets its share.
    return EngineQueue(
        permits,
        in_flight or 2 * permits,
        several=several,
        # Background work is submitted only as far as the engine computes it at once, so that others do not
        # wait.
        spare=None if card.preempts_background else card.slots,
    )


class LoadedModel:
    """A loaded model. The constructor may run in a thread; `start` runs on the event loop."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        workers: WorkerPool,
        queue: EngineQueue,
        template: str | None = None,
    ) -> None:
        self.engine = engine
        self.queue = queue
        self.model = ServedModel(engine, settings, workers, queue, read_presets(settings), template)
        self.card = self.model.card
        self.pause_control = PauseControl(engine)
        planner = self.model.planner
        self.adapters = AdapterManager(engine, planner.adapters, settings, planner.names)
        self.fingerprint = "-".join(filter(None, ("dragoman", __version__, self.card.numerics)))
        """Fingerprint of the model as loaded; adapters may have been added since."""
        permits = PLACES_PER_SLOT * (self.card.max_concurrent_embeds or 0)
        self._vectors = EngineQueue(permits, 2 * permits) if permits else queue
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
        if isinstance(self.engine, LifecycleEngine):
            await call_engine(self.engine, "start")
        if self.card.constrains:
            # Now, because later it would delay other clients' answers.
            await asyncio.to_thread(self.model.planner.warm_up)

    async def run_on_engine(self, owner: str, work: Callable[[], Awaitable[R]]) -> R:
        """Run engine work that is not a turn; it waits in the queue like a turn."""
        async with self._vectors.acquire(owner):
            return await work()

    async def check(self, most: float = CHECK_TIMEOUT_S) -> None:
        """Check that the engine responds; raise Unavailable if it does not in time."""
        if not isinstance(self.engine, LifecycleEngine):
            return
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(call_engine(self.engine, "check"))
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

    async def explain_failure(self, error: EngineFailed) -> DragomanError:
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
