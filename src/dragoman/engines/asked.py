"""Asking an engine for something that is no job: whatever it raises, what comes out is one of our errors."""

import asyncio
import logging
import signal
import threading
from typing import Any

from dragoman.engines.protocol import Engine
from dragoman.errors import DragomanError, EngineFailed

logger = logging.getLogger("dragoman.engine")


async def asked(engine: Engine, method: str, *args: Any) -> Any:
    """`await engine.method(*args)`."""
    try:
        return await getattr(engine, method)(*args)
    except DragomanError:
        raise
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        logger.error("The engine %s: %s raised CancelledError", type(engine).__name__, method)
    except BaseException as error:
        if is_interrupt(error):
            raise
        logger.error("The engine %s failed in %s", type(engine).__name__, method, exc_info=error)
    raise EngineFailed("The engine failed at what it was asked; the server's log says why.")


def is_cancelled() -> bool:
    """Whether somebody has cancelled the task that runs: an engine can raise the same of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_interrupt(error: BaseException) -> bool:
    """Whether it may be a person's Ctrl-C, which is not for an engine to swallow."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
