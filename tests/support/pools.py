"""A pool of scripted engines that are opened when they are asked for, and count what is open."""

import threading
from collections.abc import Callable

from dragoman.engines.protocol import Engine, JobHandle, ModelCard
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import Unavailable
from dragoman.models import ModelPool, PooledModel
from dragoman.settings import Settings
from dragoman.turns.queue import EngineQueue
from dragoman.types import Job, Sink

MB = 1 << 20


class NamedEngine(ScriptedEngine):
    """Says its own name; `stop` ends what it is saying, and after that it says nothing, as real ones do."""

    def __init__(self, name: str, shop: "Shop", size: int) -> None:
        super().__init__(say(f"I am {name}. " + shop.more), interval=shop.interval)
        self.card.name = name
        self.card.details = {"bytes": str(size)}
        self._shop = shop
        self._stopped = False

    def submit(self, job: Job, sink: Sink) -> JobHandle:
        if self._stopped:
            raise Unavailable("The engine has been stopped.")
        return super().submit(job, sink)

    async def start(self) -> None:
        await super().start()
        self._shop.open.append(self.card.name)

    async def stop(self) -> None:
        await super().stop()
        self._stopped = True
        self._shop.open.remove(self.card.name)


class Shop:
    """Opens engines; `gates` hold an opening until they are set, `broken` cannot be opened."""

    def __init__(self) -> None:
        self.more, self.interval = "", 0.0
        """What else they say, and how slowly."""
        self.open: list[str] = []
        self.times: list[str] = []
        """Every opening."""
        self.gates: dict[str, threading.Event] = {}
        self.broken: dict[str, Exception] = {}
        self.make: Callable[[str, int], Engine] = lambda name, size: NamedEngine(name, self, size)

    def model(self, name: str, settings: Settings, size: int = MB) -> PooledModel:
        def open() -> Engine:
            if (gate := self.gates.get(name)) is not None:
                gate.wait(20)
            if (error := self.broken.get(name)) is not None:
                raise error
            self.times.append(name)
            return self.make(name, size)

        return PooledModel(name, settings, open, lambda: size)

    def pool(self, *names: str, settings: Settings | None = None, size: int = MB) -> ModelPool:
        chosen = settings or Settings(store="none")
        pool = ModelPool(chosen, [self.model(name, chosen, size) for name in names])
        pool.describe = lambda cached: self.model(str(cached.name), chosen)
        return pool


class Queues:
    """What stands in for the door where there is none."""

    def __init__(self) -> None:
        self.open: list[EngineQueue] = []

    def open_queue(self, card: ModelCard) -> EngineQueue:
        self.open.append(EngineQueue(4))
        return self.open[-1]

    def close_queue(self, queue: EngineQueue) -> None:
        self.open.remove(queue)
