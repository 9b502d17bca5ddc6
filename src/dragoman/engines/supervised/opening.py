"""Opening an engine in a thread, and being rid of one, without waiting for what may never end."""

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from dragoman.engines.protocol import Engine, LivingEngine, PulsingEngine

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
            failure = error
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, engine, failure)

    threading.Thread(target=run, name="dragoman-open", daemon=True).start()
    return await future


async def closed(engine: Engine, *, stuck: bool) -> None:
    """Free what a failed engine holds, as far as that can be done."""
    if stuck and isinstance(engine, PulsingEngine):
        engine.abandon()
    elif isinstance(engine, LivingEngine):
        stopping = asyncio.ensure_future(engine.stop())
        await asyncio.wait({stopping}, timeout=_STOP_S)
        if not stopping.done():
            stopping.cancel()
            _log.warning("the failed engine did not stop within %.0f seconds; it is left behind", _STOP_S)
        elif stopping.exception() is not None:
            _log.warning("the failed engine could not be stopped", exc_info=stopping.exception())
