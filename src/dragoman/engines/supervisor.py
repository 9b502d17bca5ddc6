"""Supervision: an engine that is reopened when it has died or is stuck.

Parts: the backoff between reopenings, a tokenizer and jobs that outlive the engine, the watchdog, and the
engine itself.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any

from dragoman.engines.lifecycle import call_engine, close_engine, open_engine
from dragoman.engines.protocol import (
    Engine,
    EngineFaults,
    HeartbeatEngine,
    JobHandle,
    LifecycleEngine,
    MediaEngine,
    RunnerFailed,
    Tokenizer,
    faults_of,
    kv_usage_of,
    weights_of,
)
from dragoman.engines.steps import iterate
from dragoman.engines.validate import start_job
from dragoman.errors import DragomanError, EngineFailed, Unavailable
from dragoman.logs import safe_message
from dragoman.media import Media
from dragoman.types import Job, Sink, Step

__all__ = ["SupervisedEngine"]


# Backoff before a failed engine is reopened.


WINDOW_S = 60.0
FREE = 5
MOST_S = 60.0


class Backoff:
    """Delay before each reopening: none for five failures in a row, then twice as long each time, up to a
    minute.

    The count starts again once an engine has run for a minute.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0.0

    def opened(self, now: float) -> None:
        self._opened = now

    def failed(self, now: float) -> float:
        """Record a failure; return the seconds to wait."""
        if now - self._opened >= WINDOW_S:
            self._failures = 0
        self._failures += 1
        # Also if a reopening failed: the time since the last successful one does not count as running.
        self._opened = now
        beyond = self._failures - FREE
        return min(MOST_S, 2.0 ** (beyond - 1)) if beyond > 0 else 0.0


# A tokenizer that outlives the engine it came from.


class StableTokenizer:
    """The tokenizer of a supervised engine.

    Fixed attributes come from the first engine's tokenizer; `encode` delegates to the latest, so that the
    first can be freed.
    """

    def __init__(self, first: Tokenizer) -> None:
        self.pieces = first.pieces
        self.special_ids = first.special_ids
        self.bos_id = first.bos_id
        self.eos_id = first.eos_id
        self.end_ids = first.end_ids
        self.add_bos = first.add_bos
        self.infill = first.infill
        self.latest = first

    def encode(self, text: str) -> list[int]:
        return self.latest.encode(text)

    def encode_continuation(self, text: str) -> list[int]:
        """Encode text that does not begin a prompt, for which some tokenizers give other ids."""
        encode: Callable[[str], list[int]] = getattr(self.latest, "encode_continuation", self.latest.encode)
        return encode(text)


# The jobs of an engine that may die; each gets exactly one end.


_log = logging.getLogger("dragoman.engine")
BEGUN = "The engine failed during this answer; it is being restarted."
WAITING = "The engine failed before this answer began; it is being restarted, retry soon."


class SupervisedJob:
    """One job of a supervised engine: the handle for the caller, and with `take` the sink for the engine."""

    __slots__ = ("_begun", "_jobs", "_open", "_sink", "handle")

    def __init__(self, jobs: "SupervisedJobs", job: Job, sink: Sink) -> None:
        self._jobs = jobs
        self._open = set(range(job.n))
        self._sink = sink
        self._begun = False
        self.handle: JobHandle | None = None

    def take(self, step: Step) -> None:
        if step.finish is None:
            if step.index in self._open:
                self._begun = True
                self._sink(step)
        elif type(step.error) is EngineFailed:
            # The watchdog finds out whether only this job failed, or the whole engine.
            self._jobs.hold_failure(self, step)
        else:
            self.end(step)

    def end(self, step: Step) -> None:
        """Send the last step of a continuation, unless it has ended."""
        if step.index in self._open:
            self._leave(step.index)
            self._sink(step)

    def fail(self) -> None:
        error: DragomanError = EngineFailed(BEGUN) if self._begun else Unavailable(WAITING)
        for index in sorted(self._open):
            try:
                self.end(Step([], index, finish="error", error=error))
            except Exception:
                _log.exception("A sink raised at the end of its job")

    def cancel(self, index: int | None = None) -> None:
        handle = self.handle
        self._leave(index)
        if handle is not None:
            handle.cancel(index)

    def _leave(self, index: int | None) -> None:
        self._open = set() if index is None else self._open - {index}
        if not self._open:
            self._jobs.live.discard(self)
            # Break the reference cycle with the engine's side of the job.
            self.handle = None


class SupervisedJobs:
    def __init__(self, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called when a job ends with EngineFailed."""
        self.live: set[SupervisedJob] = set()
        self._held: list[tuple[SupervisedJob, Step]] = []
        self._on_failure = on_failure

    def add(self, job: Job, sink: Sink) -> SupervisedJob:
        live = SupervisedJob(self, job, sink)
        self.live.add(live)
        return live

    def hold_failure(self, live: SupervisedJob, step: Step) -> None:
        self._held.append((live, step))
        self._on_failure()

    @property
    def held(self) -> int:
        """Steps with EngineFailed that wait until the watchdog knows whether the engine is alive."""
        return len(self._held)

    def release(self, count: int) -> None:
        """Deliver the first `count` held steps: the engine was alive after them, so only single jobs
        failed.
        """
        held, self._held = self._held[:count], self._held[count:]
        for live, step in held:
            live.end(step)

    def fail(self) -> None:
        """End all jobs: the engine is gone."""
        self._held = []
        for live in list(self.live):
            live.fail()


# The watchdog of one engine, from its start to its end.


INTERVAL_S = 0.25
PULSING_QUIET_S = 1.25
"""Silence that is unusual for an engine with a pulse, which reports progress within a step."""
QUIET_S = 5.0


class EngineWatchdog:
    """Watchdog of an engine. A sign of life is an answered check or a changed pulse.

    `silence` counts the seconds without one. Only time in which this process ran counts: a machine that
    slept, or an event loop that was blocked, tells nothing about the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._pulse: Callable[[], int] = lambda: 0
        self.quiet_s = QUIET_S
        if isinstance(engine, HeartbeatEngine):
            self._pulse = lambda: engine.heartbeat
            self.quiet_s = PULSING_QUIET_S
        self._seen = self._pulse()
        self._asked: asyncio.Future[None] | None = None
        self.silence = 0.0
        self.answered = asyncio.Event()
        """Set once the engine has answered a check."""
        self.unavailable_error: Unavailable | None = None
        """Error of the last check, if the engine is alive but cannot serve."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine is gone."""

    @property
    def is_polling(self) -> bool:
        """Whether a check is under way."""
        return self._asked is not None

    async def poll(self) -> bool:
        """Poll the engine for one interval; return whether it has answered its check. Raises what the
        check raised.
        """
        loop = asyncio.get_running_loop()
        if self._asked is None:
            self._asked = asyncio.ensure_future(_check(self.engine))
        began = loop.time()
        await asyncio.wait({self._asked}, timeout=INTERVAL_S)
        if not self._asked.done():
            self._count(min(loop.time() - began, 2 * INTERVAL_S))
            return False
        check, self._asked = self._asked, None
        self.silence, self.unavailable_error = 0.0, None
        try:
            check.result()
        except Unavailable as error:
            self.unavailable_error = error
        finally:
            # An error refers to its frames; a local variable in one of them would make a cycle.
            del check
        self.answered.set()
        return True

    def close(self) -> None:
        self.over.set_result(None)
        self.answered.set()
        if self._asked is not None and not self._asked.cancel():
            # Retrieve the exception, or asyncio logs it.
            self._asked.exception()

    def _count(self, passed: float) -> None:
        seen = self._pulse()
        self.silence = self.silence + passed if seen == self._seen else 0.0
        self._seen = seen


async def _check(engine: Engine) -> None:
    if isinstance(engine, LifecycleEngine):
        await call_engine(engine, "check")


# The engine around an engine: watches it, ends its jobs when it fails, and reopens it.

_OPTIONAL = (
    *("embed", "embed_for", "score", "pause", "resume", "update_weights"),
    *("load_adapter", "unload_adapter"),
)
STUCK_S = 30.0
"""Seconds without a sign of life after which an engine with a pulse counts as stuck."""
_RESTARTING = "The engine has failed and is being restarted; retry soon."


class _EngineStuck(Exception):
    """The engine gave no sign of life for too long."""


class SupervisedEngine:
    """`SupervisedEngine(lambda: MyEngine())`: an engine that is reopened when it dies or is stuck.

    `open` is called at once, and again in a thread when the engine's check raises, or when the engine gives
    no sign of life for `timeout` seconds. By default an engine without a pulse never counts as stuck, because
    a long step cannot be told from a stuck one.
    """

    is_validated = True
    """Tells `start_job` that steps are validated already, as they come from the inner engine."""

    def __init__(self, open: Callable[[], Engine], *, timeout: float | None = None) -> None:
        self._open = open
        self._timeout = timeout
        self._engine: Engine | None = open()
        """The current engine; None while it is being reopened."""
        self.card = self._engine.card
        self.tokenizer = StableTokenizer(self._engine.tokenizer)
        self._watch: EngineWatchdog | None = None
        self._jobs = SupervisedJobs(self._look_now)
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._failed_openings = 0
        self._faults = EngineFaults()
        self._runner_failed = False
        self._reason = ""
        """Why the last engine failed."""
        self._paused = False
        self._stopped = False
        self._loaded: dict[str, str] = {}
        """Paths of adapters loaded while serving; a reopened engine loads them again."""
        # Optional methods show what an engine supports; so only those of the inner one are added.
        for name in _OPTIONAL:
            if hasattr(self._engine, name):
                setattr(self, name, self._asking(name))
        if isinstance(self._engine, MediaEngine):
            self.media_token_ids = self._place

    @property
    def weight_version(self) -> str | None:
        """Version of the weights; a reopened engine has those it opens with."""
        return weights_of(self._engine) if self._engine is not None else None

    @property
    def faults(self) -> EngineFaults:
        """Counters summed over all engines opened so far."""
        faults = self._faults
        if self._engine is not None and (own := faults_of(self._engine)) is not None:
            failed, rebuilds = faults.failed_steps + own.failed_steps, faults.rebuilds + own.rebuilds
            return EngineFaults(failed, rebuilds, faults.restarts)
        return faults

    @property
    def kv_usage(self) -> float | None:
        return kv_usage_of(self._engine) if self._engine is not None else None

    def submit(self, job: Job, sink: Sink) -> SupervisedJob:
        """Start a job. Its steps end with an error if the engine fails."""
        engine = self._present().engine
        live = self._jobs.add(job, sink)
        try:
            live.handle = start_job(engine, job, live.take)
        except BaseException as error:
            live.cancel()
            if isinstance(error, EngineFailed):
                self._look_now()
                raise Unavailable(_RESTARTING) from error
            raise
        return live

    def _place(self, media: Media) -> Sequence[int]:
        engine = self._engine
        if not isinstance(engine, MediaEngine):
            raise Unavailable(_RESTARTING)
        return engine.media_token_ids(media)

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Yield steps until every continuation has finished. Closing the iterator cancels the job."""
        return iterate(self, job)

    async def start(self) -> None:
        if isinstance(self._engine, LifecycleEngine):
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
        if isinstance(self._engine, LifecycleEngine):
            await self._engine.stop()

    async def check(self) -> None:
        """Return when requests can be served. EngineFailed means that a restart no longer helps."""
        if self._failed_openings >= FREE:
            raise EngineFailed("The engine cannot be reopened; see the server log.")
        if self._engine is None and not self._stopped:
            # Health probes see a failure until the next engine is open.
            raise self._restarting()
        watch = self._present()
        await watch.answered.wait()
        if watch.over.done():
            raise self._restarting()
        if watch.silence >= watch.quiet_s:
            raise Unavailable(f"The engine has made no progress for {watch.silence:.0f} seconds.")
        if watch.unavailable_error is not None:
            raise watch.unavailable_error.with_traceback(None)

    def _restarting(self) -> Unavailable:
        """Readiness is lost until the next engine is open; liveness only if the runner kept failing."""
        message = f"{self._reason} {_RESTARTING}".strip()
        return Unavailable(message, code=EngineFailed.code if self._runner_failed else Unavailable.code)

    def _present(self) -> EngineWatchdog:
        """Return the watchdog of the current engine; the first call starts it."""
        if self._stopped:
            raise Unavailable("The engine has been stopped.")
        if self._task is None and self._engine is not None:
            loop = asyncio.get_running_loop()
            self._watch = EngineWatchdog(self._engine)
            self._backoff.opened(loop.time())
            self._task = loop.create_task(self._supervise(self._watch))
        if self._watch is None:
            raise Unavailable(_RESTARTING)
        return self._watch

    def _look_now(self) -> None:
        self._now.set()

    async def _supervise(self, watch: EngineWatchdog) -> None:
        """Watch the engine, close it when it fails, reopen it."""
        while True:
            stuck = False
            try:
                await self._watch_over(watch)
            except _EngineStuck:
                stuck = True
                self._runner_failed = False
                self._reason = f"The engine gave no sign of life for {watch.silence:.0f} seconds."
                _log.error("Engine stuck: no sign of life for %.0f seconds", watch.silence)
            except Exception as error:
                self._runner_failed = isinstance(error, RunnerFailed)
                self._reason = error.message if isinstance(error, DragomanError) else "The engine failed."
                _log.error("Engine failed: %s", safe_message(error))
            self._faults = self.faults
            self._faults.restarts += 1
            self._engine = self._watch = None
            watch.close()
            self._jobs.fail()
            await close_engine(watch.engine, stuck=stuck)
            del watch
            watch = self._watch = EngineWatchdog(await self._opened_again())
            self._engine = watch.engine

    async def _watch_over(self, watch: EngineWatchdog) -> None:
        """Poll the engine for ever; raise when it is dead or stuck."""
        most = self._timeout or (STUCK_S if isinstance(watch.engine, HeartbeatEngine) else None)
        held = 0
        while True:
            self._now.clear()
            if not watch.is_polling:
                # A check tells nothing about failures after it was sent.
                held = self._jobs.held
            if await watch.poll():
                self._jobs.release(held)
                with suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._now.wait()
            elif self._paused:
                watch.silence = 0.0
            elif most is not None and watch.silence >= most:
                raise _EngineStuck

    async def _opened_again(self) -> Engine:
        loop = asyncio.get_running_loop()
        while True:
            wait = self._backoff.failed(loop.time())
            _log.info("Reopening the engine %s", f"in {wait:.0f} seconds" if wait else "now")
            await asyncio.sleep(wait)
            try:
                engine = await self._opened()
            except Exception as error:
                self._failed_openings += 1
                _log.error("Cannot open the engine: %s", safe_message(error))
                continue
            self._failed_openings = 0
            self._paused = False
            self._backoff.opened(loop.time())
            self.tokenizer.latest = engine.tokenizer
            _log.info("The engine is open again")
            return engine

    async def _opened(self) -> Engine:
        engine = await open_engine(self._open)
        try:
            if isinstance(engine, LifecycleEngine):
                await engine.start()
            for name, path in self._loaded.items():
                await self._load_again(engine, name, path)
        except BaseException:
            await close_engine(engine, stuck=False)
            raise
        return engine

    async def _load_again(self, engine: Engine, name: str, path: str) -> None:
        try:
            await call_engine(engine, "load_adapter", name, path)
        except DragomanError as error:
            # Requests that name the adapter get an error; the others can be served.
            _log.error("Cannot load adapter %s again: %s", name, safe_message(error))

    def _asking(self, name: str) -> Callable[..., Any]:
        """Return a method that calls the engine's method of this name, and ends when the engine does."""

        async def ask(*args: Any) -> Any:
            watch = self._present()
            if name in ("pause", "resume"):
                self._paused = name == "pause"
            asking = asyncio.ensure_future(call_engine(watch.engine, name, *args))
            try:
                await asyncio.wait({asking, watch.over}, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    raise EngineFailed("The engine failed during this call; it is being restarted.")
                result = asking.result()
            finally:
                asking.cancel()
            if name == "load_adapter":
                self._loaded[args[0]] = args[1]
            elif name == "unload_adapter":
                self._loaded.pop(args[0], None)
            return result

        return ask
