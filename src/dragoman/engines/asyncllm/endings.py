"""How requests end: the finish reasons of the contract, and the errors that take their place."""

import logging
from collections.abc import Mapping
from typing import Any

from dragoman.errors import BadRequest, DragomanError, EngineFailed, Overloaded, Unavailable
from dragoman.types import FinishReason

logger = logging.getLogger("dragoman.engines")

MOST_MESSAGE = 500
_REFUSED = "The engine refused this request; the server's log says why."
_FAILED = "The engine failed while it was writing the answer."


def ending(reason: Any) -> tuple[FinishReason | None, DragomanError | None]:
    """Of a `finish_reason`: an object with a type, or its type alone. What is not known is an error."""
    if reason is None:
        return None, None
    told = reason.to_json() if hasattr(reason, "to_json") else reason
    if not isinstance(told, Mapping):
        told = {"type": told}
    match told.get("type"):
        case "stop":
            return "stop", None
        case "length":
            return "length", None
        case "abort" if told.get("status_code") is None:
            if told.get("message"):
                # Nobody's fault: why it was given up is for the log.
                logger.warning("The engine aborted a request: %s", told["message"])
            return "abort", None
        case "abort" | "error":
            return "error", _error(told.get("status_code") or 500, told.get("message"))
        case other:
            return "error", EngineFailed(
                f"The engine ended the answer for a reason that is not known: {other}."
            )


def refused(error: Exception, *, begun: bool) -> bool:
    """Whether an exception is about the request: it has a status, or came before anything was computed."""
    return _status(error) is not None or (isinstance(error, ValueError) and not begun)


def error_of(error: Exception) -> DragomanError:
    return _error(_status(error) or 400, None)


def _status(error: Exception) -> int | None:
    status = getattr(error, "status_code", None)
    return int(status) if isinstance(status, int) and 400 <= status < 600 else None


def _error(status: int, message: Any) -> DragomanError:
    """The engine's words reach the client where the client is at fault, and the log where the engine is."""
    if status >= 500:
        logger.error("The engine gave up a request with status %s: %s", int(status), message)
        return (
            Unavailable("The engine cannot take this request now; try again.")
            if status == 503
            else EngineFailed(_FAILED)
        )
    said = message[:MOST_MESSAGE] if isinstance(message, str) and message else _REFUSED
    return Overloaded(said) if status == 429 else BadRequest(said)
