"""Around an engine: watches it, ends its jobs when it fails, and opens it again."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from dragoman.engines.asked import asked
from dragoman.engines.drive import start
from dragoman.engines.protocol import Engine, LivingEngine, PulsingEngine, weights_of
from dragoman.engines.steps import iterate
from dragoman.engines.supervised.backoff import FREE, Backoff
from dragoman.engines.supervised.jobs import Jobs, Live
from dragoman.engines.supervised.opening import closed, opened
from dragoman.engines.supervised.tokenizer import SteadyTokenizer
from dragoman.engines.supervised.watch import INTERVAL_S, Watch
from dragoman.errors import EngineFailed, Unavailable
from dragoman.logs import describe
from dragoman.types import Job, Sink, Step

_log = logging.getLogger("dragoman.engine")
_OPTIONAL = ("embed", "embed_for", "score", "pause", "resume")
STUCK_S = 30.0
"""Seconds without a sign after which an engine with a pulse is stuck."""
_RESTARTING = "The engine has failed and is being restarted; try again soon."


class _Stuck(Exception):
    """There was no sign of life for too long."""


class Supervised:
    """`Supervised(lambda: MyEngine())`: an engine like the one that `open` makes, but it comes back.

    `open` is called at once, and again in a thread when the engine has died, which its check tells, or is
    stuck: no sign of life for `timeout` seconds. By default an engine without a pulse is never taken for
    stuck, since nobody can tell a long step from the last one.
    """

    checked = True
    """Steps have passed the border when they come from the engine within; once is enough."""

    def __init__(self, open: Callable[[], Engine], *, timeout: float | None = None) -> None:
        self._open = open
        self._timeout = timeout
        self._engine: Engine | None = open()
        """The present one; None while there is none."""
        self.card = self._engine.card
        self.tokenizer = SteadyTokenizer(self._engine.tokenizer)
        self._watch: Watch | None = None
        self._jobs = Jobs(self._look_now)
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._failed_openings = 0
        self._paused = False
        self._stopped = False
        # What an engine can do is seen by the methods it has; so there are those of the inner one.
        for name in _OPTIONAL:
            if hasattr(self._engine, name):
                setattr(self, name, self._asking(name))

    @property
    def weight_version(self) -> str | None:
        """An engine that was opened again has the weights that it was opened with."""
        return weights_of(self._engine) if self._engine is not None else None

    def submit(self, job: Job, sink: Sink) -> Live:
        """Start a job. What it says ends with an error if the engine fails on the way."""
        engine = self._present().engine
        live = self._jobs.add(job, sink)
        try:
            live.handle = start(engine, job, live.take)
        except BaseException as error:
            live.cancel()
            if isinstance(error, EngineFailed):
                self._look_now()
                raise Unavailable(_RESTARTING) from error
            raise
        return live

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Steps until every continuation has finished. Closing the iterator cancels the job."""
        return iterate(self, job)

    async def start(self) -> None:
        if isinstance(self._engine, LivingEngine):
            await self._engine.start()
        self._present()

    async def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._watch is not None:
            self._watch.close()
        if isinstance(self._engine, LivingEngine):
            await self._engine.stop()

    async def check(self) -> None:
        """Whether requests can be served; EngineFailed says that a restart would not help any more."""
        if self._failed_openings >= FREE:
            raise EngineFailed("The engine cannot be opened again; the log says why.")
        watch = self._present()
        await watch.answered.wait()
        if watch.over.done():
            raise Unavailable(_RESTARTING)
        if watch.silence >= watch.quiet_s:
            raise Unavailable(f"The engine has not moved for {watch.silence:.0f} seconds.")
        if watch.trouble is not None:
            raise watch.trouble.with_traceback(None)

    def _present(self) -> Watch:
        """The life of the engine that is there. It is watched from the first call on."""
        if self._stopped:
            raise Unavailable("The engine has been stopped.")
        if self._task is None and self._engine is not None:
            loop = asyncio.get_running_loop()
            self._watch = Watch(self._engine)
            self._backoff.opened(loop.time())
            self._task = loop.create_task(self._tend(self._watch))
        if self._watch is None:
            raise Unavailable(_RESTARTING)
        return self._watch

    def _look_now(self) -> None:
        self._now.set()

    async def _tend(self, watch: Watch) -> None:
        """Watch, bury, open again."""
        while True:
            stuck = False
            try:
                await self._watched(watch)
            except _Stuck:
                stuck = True
                _log.error("The engine is stuck: no sign of life for %.0f seconds.", watch.silence)
            except Exception as error:
                _log.error("The engine has failed: %s", describe(error))
            self._engine = self._watch = None
            watch.close()
            self._jobs.fail()
            await closed(watch.engine, stuck=stuck)
            del watch
            watch = self._watch = Watch(await self._opened_again())
            self._engine = watch.engine

    async def _watched(self, watch: Watch) -> None:
        """Never returns; raises when the engine is dead or stuck."""
        most = self._timeout or (STUCK_S if isinstance(watch.engine, PulsingEngine) else None)
        held = 0
        while True:
            self._now.clear()
            if not watch.asking:
                # A check says nothing about what happens after it was sent.
                held = self._jobs.held
            if await watch.look():
                self._jobs.release(held)
                with suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._now.wait()
            elif self._paused:
                watch.silence = 0.0
            elif most is not None and watch.silence >= most:
                raise _Stuck

    async def _opened_again(self) -> Engine:
        loop = asyncio.get_running_loop()
        while True:
            wait = self._backoff.failed(loop.time())
            _log.info("The engine is opened again %s.", f"in {wait:.0f} seconds" if wait else "now")
            await asyncio.sleep(wait)
            try:
                engine = await self._opened()
            except Exception as error:
                self._failed_openings += 1
                _log.error("The engine cannot be opened: %s", describe(error))
                continue
            self._failed_openings = 0
            self._paused = False
            self._backoff.opened(loop.time())
            self.tokenizer.latest = engine.tokenizer
            _log.info("The engine is back.")
            return engine

    async def _opened(self) -> Engine:
        engine = await opened(self._open)
        try:
            if isinstance(engine, LivingEngine):
                await engine.start()
        except BaseException:
            await closed(engine, stuck=False)
            raise
        return engine

    def _asking(self, name: str) -> Callable[..., Any]:
        """A method of the engine, which ends when the engine does."""

        async def ask(*args: Any) -> Any:
            watch = self._present()
            if name in ("pause", "resume"):
                self._paused = name == "pause"
            asking = asyncio.ensure_future(asked(watch.engine, name, *args))
            try:
                await asyncio.wait({asking, watch.over}, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    raise EngineFailed("The engine failed at what it was asked; it is being restarted.")
                return asking.result()
            finally:
                asking.cancel()

        return ask
