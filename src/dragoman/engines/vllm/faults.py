"""What vLLM raises, as what a client is told."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from dragoman.errors import (
    MODEL,
    BadRequest,
    DragomanError,
    EngineFailed,
    ModelNotFound,
    Part,
    Unavailable,
)

logger = logging.getLogger("dragoman.engine")
DEAD = "The engine failed and takes no more requests."
FAILED = "The engine failed while it was writing the answer."


@contextmanager
def told() -> Iterator[None]:
    """Around calls of vLLM: what comes out is ours, with the status that it deserves."""
    try:
        yield
    except DragomanError:
        raise
    except Exception as error:
        raise error_of(error) from error


def error_of(error: Exception) -> DragomanError:
    """By the names of classes: the tree of vLLM's errors grows, and its older versions raise ValueError."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "VLLMNotFoundError" in kinds:
        return ModelNotFound("vLLM cannot find the adapter of this model any more.", param=MODEL)
    if kinds & {"VLLMClientError", "ValueError"}:
        # These messages are written for clients: vLLM's own server shows them.
        message = str(error.args[0]) if error.args else "vLLM does not take this request."
        named = getattr(error, "parameter", None)
        return BadRequest(message, param=Part(named) if named else None, code="invalid_value")
    if "GracefulHTTPError" in kinds:
        return Unavailable("The engine takes no more requests for the moment; try again later.")
    if "EngineDeadError" in kinds:
        return EngineFailed(DEAD)
    logger.error("vLLM failed", exc_info=error)
    return EngineFailed("The engine failed at what it was asked.")
