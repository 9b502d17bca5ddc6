"""The models of a server, loaded and unloaded: which requests hold them, their memory together, and which is
unloaded.

A request holds its model from when the model is known to the end of the answer. A model without holders may
be unloaded: when it was idle for long enough, or when another model needs the memory. A model with holders is
unloaded after their answers end; new requests for it wait until it is loaded again. No running answer is ever
ended for lack of memory; only a client that unloads a model may set a time after which running answers end
with an error.

    unloaded -> loading -> loaded -> sleeping
       ^          |          |          |        a request for one that is not loaded loads it
       |        failed       |          |
       +---------------------+----------+

Everything here runs on the event loop; engines are opened and closed in threads.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from dragoman.engines.contract import as_engine
from dragoman.engines.lifecycle import close_engine, open_engine, report_progress
from dragoman.engines.protocol import Engine, ModelCard
from dragoman.errors import MODEL, Conflict, DragomanError, ModelFileError, ModelNotFound, Unavailable
from dragoman.logs import safe_message
from dragoman.models.loaded import LoadedModel
from dragoman.models.pooled import ModelState, PooledModel
from dragoman.settings import Settings
from dragoman.turns.queue import EngineQueue, WorkerPool

if TYPE_CHECKING:
    from dragoman.hub.cache import CachedModel

logger = logging.getLogger("dragoman.models")

STOP_TIMEOUT_S = 30.0
TRY_AGAIN_S = 10.0
"""Seconds after a failed load during which the model is not loaded again."""
SHARE = 0.9
"""Fraction of free memory for models, if no limit is set."""
LONGEST_LIST = 20


class QueueFactory(Protocol):
    """Makes the queues of all models, and counts their work together."""

    def open_queue(self, card: ModelCard) -> EngineQueue: ...

    def close_queue(self, queue: EngineQueue) -> None: ...


class ModelPool:
    def __init__(self, settings: Settings, models: Sequence[PooledModel]) -> None:
        """The first model serves requests that name none."""
        self.settings = settings
        self.models = {model.name: model for model in models}
        self.find_more: Callable[[str], PooledModel | None] | None = None
        """Function that finds a model not yet in the pool by name, if the operator allows it. Runs in a
        thread.
        """
        self.describe: Callable[[CachedModel], PooledModel] | None = None
        """Function that describes a model downloaded while the server runs."""
        self.startup_model: PooledModel | None = None
        """Model that is loaded when the server starts; until then nothing is answered."""
        self.fatal: Exception | None = None
        """Why the startup model could not be loaded, if there is no other."""
        self.after_unload: Callable[[], object] = gc.collect
        """Models hold native memory, which Python's garbage collector does not see."""
        self.on_change: Callable[[], None] = lambda: None
        self.changed = asyncio.Event()
        """Set, and replaced by a new event, when the list of models or a state changes."""
        self._workers: WorkerPool
        self._queues: QueueFactory
        self._started = asyncio.Event()
        self._room = asyncio.Lock()
        self._most = 0
        """Bytes for all models, if no limit is set."""
        self._loads: set[asyncio.Task[None]] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._given: dict[PooledModel, Engine] = {}

    @classmethod
    def of(cls, engines: "Engine | Mapping[str, Engine] | ModelPool", settings: Settings) -> "ModelPool":
        """Build a pool of existing engines: one with its own name, or several by name."""
        if isinstance(engines, ModelPool):
            return engines
        engine_map: dict[str, Engine] = {"": engines} if not isinstance(engines, Mapping) else dict(engines)
        if not engine_map:
            raise ModelFileError("No engine to serve; pass at least one.")
        pool = cls(settings, [])
        for name, engine in engine_map.items():
            engine = as_engine(engine)
            own = settings if not name else _named(settings, name)
            model = PooledModel(name or engine.card.name, own)
            pool.models[model.name] = model
            pool.add_engine(model, engine)
        return pool

    def add_engine(self, model: PooledModel, engine: Engine) -> None:
        """Add an existing engine."""
        self._given[model] = engine

    def attach(self, workers: WorkerPool, queues: QueueFactory, template: str | None) -> None:
        """Attach the pool to its server. Existing engines become ready at once."""
        self._workers, self._queues = workers, queues
        while self._given:
            model, engine = self._given.popitem()
            queue = queues.open_queue(engine.card)
            model.loaded = LoadedModel(engine, model.settings, workers, queue, template)
            model.state = "loaded"
            self._rename(model, model.loaded.card.name)

    # Finding models

    @property
    def default(self) -> PooledModel:
        return next(iter(self.models.values()))

    @property
    def served(self) -> list[PooledModel]:
        """The loaded models."""
        return [model for model in self.models.values() if model.loaded is not None]

    @property
    def several(self) -> bool:
        return len(self.models) > 1 or self.find_more is not None

    @property
    def is_dynamic(self) -> bool:
        """Whether clients may set how long a model stays loaded; not if the only model always stays."""
        return self.several or self.settings.sleep_idle_seconds is not None

    def find(self, name: str | None) -> PooledModel | None:
        """Return the model that a request means by a name."""
        if name is None or len(self.models) == 1:
            # The only model checks the name itself: it may not be known yet.
            return self.default
        if (pooled_model := self.models.get(name)) is not None:
            return pooled_model
        for model in self.models.values():
            if name in model.names:
                return model
        unnamed = (model for model in self.models.values() if not model.named and model.loaded is None)
        return next(unnamed, self.default if self.settings.any_model else None)

    def get(self, name: str | None) -> PooledModel:
        """Return the model of a name; raise ModelNotFound."""
        model = self.find(name)
        if model is None:
            raise self.unknown(name)
        return model

    async def find_or_discover(self, name: str | None) -> PooledModel:
        """Return the model of a name, also one on this machine that is not in the pool yet; raise
        ModelNotFound.
        """
        model = self.find(name)
        known = model is not None and (name is None or self.find_more is None or name in model.names)
        if model is None or not known:
            more = await asyncio.to_thread(self.find_more, name or "") if self.find_more else None
            if more is not None:
                model = self.models.setdefault(more.name, more)
                self.notify_change()
        if model is None:
            raise self.unknown(name)
        return model

    def unknown(self, name: str | None) -> ModelNotFound:
        known = [alias for model in self.models.values() for alias in model.names]
        more = ", …" if len(known) > LONGEST_LIST else ""
        available = ", ".join(known[:LONGEST_LIST]) + more
        return ModelNotFound(f"The model '{name}' does not exist; available: {available}.", param=MODEL)

    def check(self, name: str) -> None:
        """Raise if there is no model of this name, as far as that is known without loading one."""
        model = self.get(name)
        if model.loaded is not None:
            model.loaded.model.planner.resolve_adapter(name)
        elif model.named and name not in model.names and not self.settings.any_model:
            raise self.unknown(name)

    def notify_change(self) -> None:
        """Notify watchers of the list of models."""
        self.on_change()
        self.changed.set()
        self.changed = asyncio.Event()

    # Life cycle of the server

    async def start(self) -> None:
        for model in self.served:
            assert model.loaded is not None
            await model.loaded.start()
        if self.startup_model is None:
            self._started.set()
            return
        self._begin(self._loads, self._start_first(self.startup_model))

    async def _start_first(self, model: PooledModel) -> None:
        try:
            await self.load(model)
        except Exception as error:
            if not self.several:
                self.fatal = error
        finally:
            self.startup_model = None
            self._started.set()

    async def ready(self) -> None:
        """Wait until the startup model is loaded. Raise its error if there is no other model."""
        await self._started.wait()
        if self.fatal is not None:
            raise self.fatal

    def check_started(self) -> None:
        if self.startup_model is not None:
            raise self.startup_model.loading_error()

    async def stop(self) -> None:
        self._stopping = True
        for task in self._loads:
            task.cancel()
        if tasks := self._loads | self._unloads:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        served = [model.loaded for model in self.served if model.loaded is not None]
        closing = (close_engine(loaded.engine, stuck=False, seconds=STOP_TIMEOUT_S) for loaded in served)
        await asyncio.gather(*closing)

    def _begin(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in a task that continues when waiters leave. Errors are also reported elsewhere."""
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    # Holders of a model

    def try_acquire(self, model: PooledModel) -> LoadedModel | None:
        """Hold a loaded model; return None if it is not loaded. `release` must follow."""
        if model.state != "loaded" or model.is_unloading:
            return None
        model.holders += 1
        model.idle.clear()
        if model.timer is not None:
            model.timer.cancel()
            model.timer = model.keep_until = None
        return model.loaded

    def release(self, model: PooledModel) -> None:
        model.holders -= 1
        model.last_used_at = time.monotonic()
        if model.holders == 0:
            model.idle.set()
            self._rest(model)

    async def acquire(self, model: PooledModel) -> LoadedModel:
        """Hold a model, loading it first if necessary. Raises why that is not possible."""
        if (loaded := self.try_acquire(model)) is not None:
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

    def set_keep_alive(self, model: PooledModel, seconds: float | None) -> None:
        """Set how long the model stays loaded after its last request; None means always."""
        model.keep_alive = seconds
        self._rest(model)

    def _rest(self, model: PooledModel) -> None:
        if model.timer is not None:
            model.timer.cancel()
            model.timer = model.keep_until = None
        if model.keep_alive is None or model.holders or not model.ready or not model.can_unload:
            return
        model.keep_until = time.time() + model.keep_alive
        model.timer = asyncio.get_running_loop().call_later(model.keep_alive, self._put_to_sleep, model)

    def _put_to_sleep(self, model: PooledModel) -> None:
        if not model.holders and model.ready and not self._stopping:
            logger.info("Model %s unloaded: idle for %.0f s", model.name, model.keep_alive)
            self._begin(self._unloads, self.unload(model, state="sleeping"))

    # Loading

    async def load(self, model: PooledModel) -> None:
        """Wait until the model is loaded; loading continues if the waiter leaves."""
        if not model.ready:
            await asyncio.shield(self._begin_load(model))

    def _begin_load(self, model: PooledModel) -> asyncio.Task[None]:
        """Start loading. A model that is loaded, or failed a moment ago, is not loaded again."""
        if self._stopping:
            raise Unavailable("The server is stopping; retry later.", code="stopping")
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
            while model.is_unloading:
                # Unloading ends first; its memory counts as free only then.
                await self.changed.wait()
            model.state, model.progress, model.error = "loading", 0.0, ""
            self.notify_change()
            await self._make_room(model)
            began = time.monotonic()
            await self._open(model)
            model.state, model.last_used_at = "loaded", time.monotonic()
            model.load_seconds = model.last_used_at - began
            logger.info("Model %s loaded in %.1f s", model.name, model.load_seconds)
            self._answer(model, self._failure(model))
            self._rest(model)
        except asyncio.CancelledError:
            model.state = "unloaded"
            self._answer(model, Unavailable("The server is stopping; retry later.", code="stopping"))
            raise
        except Exception as error:
            model.state, model.failed_at = "failed", time.monotonic()
            model.error = _safe_reason(model, error)
            log = logger.error if isinstance(error, DragomanError) else logger.exception
            log("Model %s could not be loaded: %s", model.name, safe_message(error))
            self._answer(model, failure := self._failure(model))
            if model is self.startup_model:
                raise
            raise failure from error
        finally:
            model.task, model.opening = None, False
            self.notify_change()

    def _answer(self, model: PooledModel, error: Exception) -> None:
        """Answer the waiters: they now hold the model, or get the error."""
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                loaded = self.try_acquire(model)
                waiter.set_exception(error) if loaded is None else waiter.set_result(loaded)

    async def _open(self, model: PooledModel) -> None:
        assert model.open is not None
        engine = await open_engine(partial(_open_with_progress, model, model.open))
        queue = None
        try:
            queue = self._queues.open_queue(engine.card)
            rest = engine, model.settings, self._workers, queue
            loaded = await asyncio.to_thread(LoadedModel, *rest)
            await loaded.start()
        except BaseException:
            if queue is not None:
                self._queues.close_queue(queue)
            await close_engine(engine, stuck=False)
            raise
        model.loaded = loaded
        if not model.named:
            self._rename(model, loaded.card.name)
        model.note_size()

    def _rename(self, model: PooledModel, name: str) -> None:
        """Rename the model to the name that its engine reports."""
        model.named = True
        if name == model.name or name in self.models:
            return
        self.models = {name if other is model else key: other for key, other in self.models.items()}
        model.name = name

    # Memory

    async def _make_room(self, model: PooledModel) -> None:
        """Free memory for a model, one model at a time, so that freed memory is not counted twice."""
        async with self._room:
            while (lack := self._lacks(model)) is not None:
                others = self._others(model)
                leaving = [other for other in others if other.can_unload and other.ready]
                if not leaving and any(other.opening or other.is_unloading for other in others):
                    await self.changed.wait()
                elif not leaving:
                    if lack:
                        raise ModelFileError(lack)
                    break
                else:
                    # Unload the least recently used model; idle ones first.
                    least = min(leaving, key=lambda other: (other.holders > 0, other.last_used_at))
                    logger.info("Model %s unloaded to make room for %s", least.name, model.name)
                    await self.unload(least)
            model.opening = True

    def _others(self, model: PooledModel) -> list[PooledModel]:
        """Return the other models that occupy memory."""
        has_room = (other for other in self.models.values() if other.loaded is not None or other.opening)
        return [other for other in has_room if other is not model]

    def _lacks(self, model: PooledModel) -> str | None:
        """Return why the model does not fit; None if it does, "" if loading may be tried anyway."""
        others, most = self._others(model), self.settings.models_max
        if most is not None and len(others) >= most:
            return f"`models_max` allows {most} loaded models, and none of them can be unloaded; raise it."
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
        return (
            f"it takes about {needed >> 20} MiB, and `memory_limit` leaves {max(0, room) >> 20} MiB; "
            "raise the limit."
        )

    # Unloading

    async def unload(
        self, model: PooledModel, *, grace: float | None = None, state: ModelState = "unloaded"
    ) -> None:
        """Unload the model when it has no holders, or after `grace` seconds: then their answers end with an
        error.
        """
        if not model.can_unload:
            message = f"The model '{model.name}' is an engine passed to this server; it cannot be unloaded."
            raise Conflict(message, code="not_unloadable")
        while model.is_unloading or model.task is not None:
            await self.changed.wait()
        if not model.ready:
            model.state = "unloaded"
            self.notify_change()
            return
        model.is_unloading = True
        if model.timer is not None:
            model.timer.cancel()
            model.timer = model.keep_until = None
        self.notify_change()
        await asyncio.shield(self._begin(self._unloads, self._unload(model, grace, state)))

    async def _unload(self, model: PooledModel, grace: float | None, state: ModelState) -> None:
        try:
            await asyncio.wait_for(model.idle.wait(), grace if model.holders else None)
        except TimeoutError:
            logger.warning("Model %s unloaded while in use by %d requests", model.name, model.holders)
        try:
            loaded, model.loaded = model.loaded, None
            assert loaded is not None
            model.state = state
            await close_engine(loaded.engine, stuck=False, seconds=STOP_TIMEOUT_S)
            self._queues.close_queue(loaded.queue)
            del loaded
            await asyncio.to_thread(self.after_unload)
        finally:
            model.is_unloading = False
            logger.info("Model %s: %s", model.name, state)
            self.notify_change()


def _named(settings: Settings, name: str) -> Settings:
    return replace(settings, model_name=name, model_alias=[], lora=[])


def _open_with_progress(model: PooledModel, open: Callable[[], Engine]) -> Engine:
    def report(done: float) -> None:
        model.progress = min(1.0, max(model.progress, done))

    report_progress.set(report)
    return open()


def _safe_reason(model: PooledModel, error: Exception) -> str:
    """Return the error for clients: never foreign text, and no path of the model."""
    if not isinstance(error, DragomanError):
        return "see the server log."
    path = model.settings.model or ""
    folder = path.rpartition("/")[0]
    return error.message.replace(f"{folder}/", "") if folder else error.message


def _free_memory() -> int:
    from dragoman.engines.local.hardware import free_memory

    return free_memory()
