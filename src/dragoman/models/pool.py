"""The models of a server, loaded and not: who has which, what they may take together, and which one goes.

A request holds the model that it is for, from when it is known to the end of its answer. What nobody holds
may be unloaded: when it was idle for long enough, or when another one needs the room. What somebody holds is
let come to its end first, and whoever asks for it meanwhile waits until it is loaded again. So nothing that
runs is ever cut off for want of room; only who asks to unload a model may set a time after which what still
runs is ended, with an error.

    unloaded -> loading -> loaded -> sleeping
       ^          |          |          |        a request for one that is not loaded loads it
       |        failed       |          |
       +---------------------+----------+

Everything here is for the event loop; engines are opened and closed in threads.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from dragoman.engines.asked import close_engine, open_engine, report_progress
from dragoman.engines.protocol import Engine, ModelCard
from dragoman.engines.sound import as_engine
from dragoman.errors import MODEL, Conflict, DragomanError, ModelFileError, ModelNotFound, Unavailable
from dragoman.logs import describe
from dragoman.models.loaded import LoadedModel
from dragoman.models.pooled import ModelState, PooledModel
from dragoman.settings import Settings
from dragoman.turns.queue import EngineQueue, Workers

if TYPE_CHECKING:
    from dragoman.hub.cache import CachedModel

logger = logging.getLogger("dragoman.models")

STOP_TIMEOUT_S = 30.0
TRY_AGAIN_S = 10.0
"""For so long a model that could not be loaded is not tried again."""
SHARE = 0.9
"""Of the memory that is free, where no limit is set."""
LONGEST_LIST = 20


class QueueMaker(Protocol):
    """Who counts what all models have at work."""

    def open_queue(self, card: ModelCard) -> EngineQueue: ...

    def close_queue(self, queue: EngineQueue) -> None: ...


class ModelPool:
    def __init__(self, settings: Settings, models: Sequence[PooledModel]) -> None:
        """The first is the one for requests that name none."""
        self.settings = settings
        self.models = {model.name: model for model in models}
        self.find_more: Callable[[str], PooledModel | None] | None = None
        """Looks for a model that nobody has named yet, where the server's owner allows that. In a thread."""
        self.describe: Callable[[CachedModel], PooledModel] | None = None
        """A model that was fetched while the server runs."""
        self.first: PooledModel | None = None
        """The one that is loaded when the server starts; nothing is answered before."""
        self.fatal: Exception | None = None
        """Why that one could not be loaded, if there is no other."""
        self.after_unload: Callable[[], object] = gc.collect
        """What it held is native memory, of which Python's collector knows nothing."""
        self.on_change: Callable[[], None] = lambda: None
        self.changed = asyncio.Event()
        """Set, and replaced by another, whenever something has changed that a list would tell."""
        self._workers: Workers
        self._queues: QueueMaker
        self._started = asyncio.Event()
        self._room = asyncio.Lock()
        self._most = 0
        """Bytes for all models, where no limit is set."""
        self._loads: set[asyncio.Task[None]] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._given: dict[PooledModel, Engine] = {}

    @classmethod
    def of(cls, engines: "Engine | Mapping[str, Engine] | ModelPool", settings: Settings) -> "ModelPool":
        """Of engines that are there already: one by its own name, or several by those that they are given."""
        if isinstance(engines, ModelPool):
            return engines
        given: dict[str, Engine] = {"": engines} if not isinstance(engines, Mapping) else dict(engines)
        if not given:
            raise ModelFileError("There is no engine to serve.")
        pool = cls(settings, [])
        for name, engine in given.items():
            engine = as_engine(engine)
            own = settings if not name else _named(settings, name)
            model = PooledModel(name or engine.card.name, own)
            pool.models[model.name] = model
            pool.give(model, engine)
        return pool

    def give(self, model: PooledModel, engine: Engine) -> None:
        """An engine that is there already."""
        self._given[model] = engine

    def attach(self, workers: Workers, queues: QueueMaker, template: str | None) -> None:
        """To the server that they are for. What was given is made ready at once."""
        self._workers, self._queues = workers, queues
        while self._given:
            model, engine = self._given.popitem()
            queue = queues.open_queue(engine.card)
            model.loaded = LoadedModel(engine, model.settings, workers, queue, template)
            model.state = "loaded"
            self._rename(model, model.loaded.card.name)

    # Which there are

    @property
    def default(self) -> PooledModel:
        return next(iter(self.models.values()))

    @property
    def served(self) -> list[PooledModel]:
        """Those that are loaded."""
        return [model for model in self.models.values() if model.loaded is not None]

    @property
    def several(self) -> bool:
        return len(self.models) > 1 or self.find_more is not None

    @property
    def comes_and_goes(self) -> bool:
        """Whether clients may say how long a model stays: where there is one, for ever, they may not."""
        return self.several or self.settings.sleep_idle_seconds is not None

    def find(self, name: str | None) -> PooledModel | None:
        """The model that a request means by a name."""
        if name is None or len(self.models) == 1:
            # Whether the name is its own, it says itself: it may not be known yet.
            return self.default
        if (found := self.models.get(name)) is not None:
            return found
        for model in self.models.values():
            if name in model.names:
                return model
        unnamed = (model for model in self.models.values() if not model.named and model.loaded is None)
        return next(unnamed, self.default if self.settings.any_model else None)

    def get(self, name: str | None) -> PooledModel:
        """The same; raises ModelNotFound."""
        found = self.find(name)
        if found is None:
            raise self.unknown(name)
        return found

    async def look_for(self, name: str | None) -> PooledModel:
        """The same, also among those that are on this machine and nobody has asked for yet."""
        found = self.find(name)
        known = found is not None and (name is None or self.find_more is None or name in found.names)
        if found is None or not known:
            more = await asyncio.to_thread(self.find_more, name or "") if self.find_more else None
            if more is not None:
                found = self.models.setdefault(more.name, more)
                self.tell()
        if found is None:
            raise self.unknown(name)
        return found

    def unknown(self, name: str | None) -> ModelNotFound:
        known = [each for model in self.models.values() for each in model.names]
        more = ", …" if len(known) > LONGEST_LIST else ""
        there = ", ".join(known[:LONGEST_LIST]) + more
        return ModelNotFound(f"The model '{name}' does not exist here; there is: {there}.", param=MODEL)

    def check(self, name: str) -> None:
        """Raises if there is no model of this name, as far as that is known without loading one."""
        model = self.get(name)
        if model.loaded is not None:
            model.loaded.model.planner.adapter(name)
        elif model.named and name not in model.names and not self.settings.any_model:
            raise self.unknown(name)

    def tell(self) -> None:
        """Whoever watches the list is to look again."""
        self.on_change()
        self.changed.set()
        self.changed = asyncio.Event()

    # The life of the server

    async def start(self) -> None:
        for model in self.served:
            assert model.loaded is not None
            await model.loaded.start()
        if self.first is None:
            self._started.set()
            return
        self._begin(self._loads, self._start_first(self.first))

    async def _start_first(self, model: PooledModel) -> None:
        try:
            await self.load(model)
        except Exception as error:
            if not self.several:
                self.fatal = error
        finally:
            self.first = None
            self._started.set()

    async def ready(self) -> None:
        """Returns when the first model is there. Raises why it is not, if there is no other."""
        await self._started.wait()
        if self.fatal is not None:
            raise self.fatal

    def check_started(self) -> None:
        if self.first is not None:
            raise self.first.loading_error()

    async def stop(self) -> None:
        self._stopping = True
        for task in self._loads:
            task.cancel()
        if tasks := self._loads | self._unloads:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        served = [model.loaded for model in self.served if model.loaded is not None]
        closing = (close_engine(each.engine, stuck=False, seconds=STOP_TIMEOUT_S) for each in served)
        await asyncio.gather(*closing)

    def _begin(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In a task of its own, which goes on whoever waits. What goes wrong is told elsewhere, too."""
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    # Who has one

    def take(self, model: PooledModel) -> LoadedModel | None:
        """Held from now on, if it is loaded; `release` must follow."""
        if model.state != "loaded" or model.leaving:
            return None
        model.users += 1
        model.idle.clear()
        if model.timer is not None:
            model.timer.cancel()
            model.timer = model.keep_until = None
        return model.loaded

    def release(self, model: PooledModel) -> None:
        model.users -= 1
        model.used = time.monotonic()
        if model.users == 0:
            model.idle.set()
            self._rest(model)

    async def hold(self, model: PooledModel) -> LoadedModel:
        """`take`, and loaded first if it is not. Raises why that cannot be done."""
        if (loaded := self.take(model)) is not None:
            return loaded
        waiter: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
        self._begin_load(model)
        model.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(model)
            raise

    def keep(self, model: PooledModel, seconds: float | None) -> None:
        """For so long after its last request; None is for ever."""
        model.keep_alive = seconds
        self._rest(model)

    def _rest(self, model: PooledModel) -> None:
        if model.timer is not None:
            model.timer.cancel()
            model.timer = model.keep_until = None
        if model.keep_alive is None or model.users or not model.ready or not model.can_unload:
            return
        model.keep_until = time.time() + model.keep_alive
        model.timer = asyncio.get_running_loop().call_later(model.keep_alive, self._put_to_sleep, model)

    def _put_to_sleep(self, model: PooledModel) -> None:
        if not model.users and model.ready and not self._stopping:
            logger.info(
                "The model %s sleeps: nobody has asked for it for %.0f s", model.name, model.keep_alive
            )
            self._begin(self._unloads, self.unload(model, state="sleeping"))

    # Loading

    async def load(self, model: PooledModel) -> None:
        """Returns when it is loaded; who waits may go, it is loaded all the same."""
        if not model.ready:
            await asyncio.shield(self._begin_load(model))

    def _begin_load(self, model: PooledModel) -> asyncio.Task[None]:
        """One that is loaded already, or was tried in vain a moment ago, is not loaded again."""
        if self._stopping:
            raise Unavailable("The server is stopping; try again.", code="stopping")
        if model.state == "failed" and time.monotonic() - model.failed_at < TRY_AGAIN_S:
            raise self._failure(model)
        if model.task is None:
            model.task = self._begin(self._loads, self._load(model))
        return model.task

    def _failure(self, model: PooledModel) -> Unavailable:
        return Unavailable(
            f"The model '{model.name}' could not be loaded: {model.error}", code="model_not_loaded"
        )

    async def _load(self, model: PooledModel) -> None:
        began = time.monotonic()
        try:
            while model.leaving:
                # It goes first; what it took is counted as free only then.
                await self.changed.wait()
            model.state, model.progress, model.error = "loading", 0.0, ""
            self.tell()
            await self._make_room(model)
            began = time.monotonic()
            await self._open(model)
            model.state, model.used = "loaded", time.monotonic()
            model.load_seconds = model.used - began
            logger.info("The model %s is loaded, in %.1f s", model.name, model.load_seconds)
            self._answer(model, self._failure(model))
            self._rest(model)
        except asyncio.CancelledError:
            model.state = "unloaded"
            self._answer(model, Unavailable("The server is stopping; try again.", code="stopping"))
            raise
        except Exception as error:
            model.state, model.failed_at = "failed", time.monotonic()
            model.error = _safe_reason(model, error)
            log = logger.error if isinstance(error, DragomanError) else logger.exception
            log("The model %s could not be loaded: %s", model.name, describe(error))
            self._answer(model, failure := self._failure(model))
            if model is self.first:
                raise
            raise failure from error
        finally:
            model.task, model.opening = None, False
            self.tell()

    def _answer(self, model: PooledModel, error: Exception) -> None:
        """Those who wait for it: they hold it from now on, or hear why they cannot."""
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                loaded = self.take(model)
                waiter.set_exception(error) if loaded is None else waiter.set_result(loaded)

    async def _open(self, model: PooledModel) -> None:
        assert model.open is not None
        engine = await open_engine(partial(_open_with_progress, model, model.open))
        queue = None
        try:
            queue = self._queues.open_queue(engine.card)
            rest = engine, model.settings, self._workers, queue
            made = await asyncio.to_thread(LoadedModel, *rest)
            await made.start()
        except BaseException:
            if queue is not None:
                self._queues.close_queue(queue)
            await close_engine(engine, stuck=False)
            raise
        model.loaded = made
        if not model.named:
            self._rename(model, made.card.name)
        model.note_size()

    def _rename(self, model: PooledModel, name: str) -> None:
        """It has said its own name."""
        model.named = True
        if name == model.name or name in self.models:
            return
        self.models = {name if each is model else key: each for key, each in self.models.items()}
        model.name = name

    # Room

    async def _make_room(self, model: PooledModel) -> None:
        """One after the other, so that what was made free is not counted twice."""
        async with self._room:
            while (lack := self._lacks(model)) is not None:
                others = self._others(model)
                leaving = [other for other in others if other.can_unload and other.ready]
                if not leaving and any(other.opening or other.leaving for other in others):
                    await self.changed.wait()
                elif not leaving:
                    if lack:
                        raise ModelFileError(lack)
                    break
                else:
                    # The one that was used least lately; one that is idle before any that is not.
                    least = min(leaving, key=lambda other: (other.users > 0, other.used))
                    logger.info("The model %s makes room for %s", least.name, model.name)
                    await self.unload(least)
            model.opening = True

    def _others(self, model: PooledModel) -> list[PooledModel]:
        """That have their room."""
        has_room = (each for each in self.models.values() if each.loaded is not None or each.opening)
        return [each for each in has_room if each is not model]

    def _lacks(self, model: PooledModel) -> str | None:
        """What is wrong where there is no room for it; empty where it may be tried all the same."""
        others, most = self._others(model), self.settings.models_max
        if most is not None and len(others) >= most:
            return f"{most} models may be loaded at a time, and none of them can be unloaded."
        limit = self.settings.memory_limit
        self._most = self._most or int(SHARE * _free_memory())
        room = (limit << 20 if limit else self._most) - sum(other.take_bytes(0) for other in others)
        if not limit:
            room = min(room, int(SHARE * _free_memory()))
        needed = model.take_bytes(room)
        if needed <= room:
            return None
        if not limit:
            return ""
        return f"it takes about {needed >> 20} MiB, and `memory_limit` leaves {max(0, room) >> 20}."

    # Unloading

    async def unload(
        self, model: PooledModel, *, grace: float | None = None, state: ModelState = "unloaded"
    ) -> None:
        """When nobody holds it any more, or after so many seconds: then answers end with an error."""
        if not model.can_unload:
            message = (
                f"The model '{model.name}' was given to this server as an engine; it cannot be unloaded."
            )
            raise Conflict(message, code="not_unloadable")
        while model.leaving or model.task is not None:
            await self.changed.wait()
        if not model.ready:
            model.state = "unloaded"
            self.tell()
            return
        model.leaving = True
        if model.timer is not None:
            model.timer.cancel()
            model.timer = model.keep_until = None
        self.tell()
        await asyncio.shield(self._begin(self._unloads, self._unload(model, grace, state)))

    async def _unload(self, model: PooledModel, grace: float | None, state: ModelState) -> None:
        try:
            await asyncio.wait_for(model.idle.wait(), grace if model.users else None)
        except TimeoutError:
            logger.warning("The model %s is unloaded while %d requests use it", model.name, model.users)
        try:
            loaded, model.loaded = model.loaded, None
            assert loaded is not None
            model.state = state
            await close_engine(loaded.engine, stuck=False, seconds=STOP_TIMEOUT_S)
            self._queues.close_queue(loaded.queue)
            del loaded
            await asyncio.to_thread(self.after_unload)
        finally:
            model.leaving = False
            logger.info("The model %s is %s", model.name, state)
            self.tell()


def _named(settings: Settings, name: str) -> Settings:
    return replace(settings, model_name=name, model_alias=[], lora=[])


def _open_with_progress(model: PooledModel, open: Callable[[], Engine]) -> Engine:
    def report(done: float) -> None:
        model.progress = min(1.0, max(model.progress, done))

    report_progress.set(report)
    return open()


def _safe_reason(model: PooledModel, error: Exception) -> str:
    """What clients may know: never a foreign text, nor where the model lies."""
    if not isinstance(error, DragomanError):
        return "the server's log says why."
    said = model.settings.model or ""
    folder = said.rpartition("/")[0]
    return error.message.replace(f"{folder}/", "") if folder else error.message


def _free_memory() -> int:
    from dragoman.engines.local.machine import free_memory

    return free_memory()
