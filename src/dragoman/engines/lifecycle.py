"""Engine calls that are not jobs: open, close, pause, and other methods.

Every exception becomes a DragomanError, and no call waits without a limit for an engine that may never
return.
"""

import asyncio
import atexit
import gc
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from dragoman.engines.contract import raise_on_fault, wrong_placed
from dragoman.engines.protocol import Engine, HeartbeatEngine, LifecycleEngine, MediaEngine, PausableEngine
from dragoman.errors import BadRequest, Conflict, DragomanError, EngineFailed
from dragoman.media import Media

logger = logging.getLogger("dragoman.engine")


async def call_engine(engine: Engine, method: str, *args: Any) -> Any:
    """`await engine.method(*args)`, with any exception turned into a DragomanError."""
    try:
        return await getattr(engine, method)(*args)
    except DragomanError:
        raise
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        logger.error("The engine %s: %s raised CancelledError", type(engine).__name__, method)
    except BaseException as error:
        if is_keyboard_interrupt(error):
            raise
        logger.error("The engine %s failed in %s", type(engine).__name__, method, exc_info=error)
    raise EngineFailed(f"The engine failed in {method}; see the server log.")


def validated_media_ids(engine: Engine, media: Media) -> list[int]:
    """Return the ids that the engine wants for an image or audio. For a worker thread."""
    try:
        placed = engine.media_token_ids(media) if isinstance(engine, MediaEngine) else ()
    except DragomanError:
        raise
    except Exception as error:
        logger.error("The engine %s failed in media_token_ids", type(engine).__name__, exc_info=error)
        raise EngineFailed("The engine failed in place; see the server log.") from None
    raise_on_fault(engine, wrong_placed(placed, len(engine.tokenizer.pieces)))
    return [*placed]


def is_cancelled() -> bool:
    """Whether the running task was cancelled: an engine can raise CancelledError on its own, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_keyboard_interrupt(error: BaseException) -> bool:
    """Whether it may be the user's Ctrl-C, which must not be swallowed."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


# Open an engine in a thread, and close one.


_log = logging.getLogger("dragoman.engine")
_STOP_S = 10.0
report_progress: ContextVar[Callable[[float], None] | None] = ContextVar("report_progress", default=None)
"""Callback for the progress of opening an engine, from 0 to 1; set in the thread that opens it, if
progress is wanted.
"""


async def open_engine(open: Callable[[], Engine]) -> Engine:
    """Call `open()` in a daemon thread, so that the end of the process does not wait for it: loading may
    take minutes.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def settle(engine: Engine | None, error: BaseException | None) -> None:
        if not future.cancelled() and error is not None:
            future.set_exception(error)
        elif not future.cancelled() and engine is not None:
            future.set_result(engine)
        elif isinstance(engine, HeartbeatEngine):
            # The caller has stopped waiting.
            engine.abandon()

    def run() -> None:
        engine, failure = None, None
        try:
            # The last engine held native memory, which Python's collector does not know about.
            gc.collect()
            engine = open()
        except BaseException as error:
            # SystemExit and the like, which would end the process when raised in a task, are failures here.
            failure = error if isinstance(error, Exception) else EngineFailed(type(error).__name__)
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, engine, failure)

    thread = threading.Thread(target=run, name="dragoman-open", daemon=True)
    thread.start()
    # If the interpreter ends meanwhile, it gives native code some time to return to it.
    atexit.register(thread.join, _STOP_S)
    try:
        return await future
    finally:
        if future.done() and not future.cancelled():
            atexit.unregister(thread.join)


async def close_engine(engine: Engine, *, stuck: bool, seconds: float = _STOP_S) -> None:
    """Free what an engine holds, as far as possible."""
    if stuck and isinstance(engine, HeartbeatEngine):
        engine.abandon()
    elif isinstance(engine, LifecycleEngine):
        stopping = asyncio.ensure_future(call_engine(engine, "stop"))
        await asyncio.wait({stopping}, timeout=seconds)
        if not stopping.done():
            stopping.cancel()
            _log.warning("The engine did not stop within %.0f seconds; it is abandoned.", seconds)
        elif stopping.exception() is not None:
            _log.warning("The engine could not be stopped.", exc_info=stopping.exception())


# Pause an engine while its weights are changed.


class PauseControl:
    """Serializes calls of pause and resume."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._paused = False

    async def pause(self) -> None:
        """Pause the engine; no effect if it is paused already."""
        engine = self._require_trained()
        async with self._lock:
            if not self._paused:
                await call_engine(engine, "pause")
                self._paused = True

    async def resume(self, weight_version: str | None) -> None:
        engine = self._require_trained()
        async with self._lock:
            if not self._paused:
                raise Conflict("The engine is not paused; POST to /v1/engine/pause first.")
            await call_engine(engine, "resume", weight_version)
            self._paused = False

    def _require_trained(self) -> PausableEngine:
        if not isinstance(self._engine, PausableEngine):
            raise BadRequest("This engine does not support changing its weights.", code="unsupported_model")
        return self._engine
