"""Opening an engine in a thread, and being rid of one, without waiting for what may never end."""

import asyncio
import atexit
import gc
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from dragoman.engines.asked import asked
from dragoman.engines.protocol import Engine, LivingEngine, PulsingEngine
from dragoman.errors import EngineFailed

_log = logging.getLogger("dragoman.engine")
_STOP_S = 10.0


async def opened(open: Callable[[], Engine]) -> Engine:
    """`open()`, in a thread that the end of the process does not wait for: loading may take minutes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def settle(engine: Engine | None, error: BaseException | None) -> None:
        if not future.cancelled() and error is not None:
            future.set_exception(error)
        elif not future.cancelled() and engine is not None:
            future.set_result(engine)
        elif isinstance(engine, PulsingEngine):
            # Nobody waits for it any more.
            engine.abandon()

    def run() -> None:
        engine, failure = None, None
        try:
            # What the last engine held is native memory, of which Python's collector knows nothing.
            gc.collect()
            engine = open()
        except BaseException as error:
            # What ends a process when it is raised in a task is, here, one more failure.
            failure = error if isinstance(error, Exception) else EngineFailed(type(error).__name__)
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, engine, failure)

    thread = threading.Thread(target=run, name="dragoman-open", daemon=True)
    thread.start()
    # If the interpreter ends meanwhile, it gives native code some time to come back into it.
    atexit.register(thread.join, _STOP_S)
    try:
        return await future
    finally:
        if future.done() and not future.cancelled():
            atexit.unregister(thread.join)


async def closed(engine: Engine, *, stuck: bool, seconds: float = _STOP_S) -> None:
    """Free what an engine holds, as far as that can be done."""
    if stuck and isinstance(engine, PulsingEngine):
        engine.abandon()
    elif isinstance(engine, LivingEngine):
        stopping = asyncio.ensure_future(asked(engine, "stop"))
        await asyncio.wait({stopping}, timeout=seconds)
        if not stopping.done():
            stopping.cancel()
            _log.warning("The engine did not stop within %.0f seconds; it is left behind.", seconds)
        elif stopping.exception() is not None:
            _log.warning("The engine could not be stopped.", exc_info=stopping.exception())
