"""What goes wrong at an upstream, as our clients are told."""

from dragoman.client import CannotConnect, ClientError, Refused, StreamFailed, TimedOut
from dragoman.errors import (
    BadRequest,
    ContextOverflow,
    DragomanError,
    EngineFailed,
    Overloaded,
    Part,
    Unavailable,
)

_CLIENTS_FAULT = frozenset({400, 413, 415, 422})
_CLIENTS_KINDS = frozenset({BadRequest.type, "BadRequestError"})
"""What OpenAI and vLLM call it inside of a stream, where there is no status."""
_BUSY = frozenset({502, 503, 504})


def error_of(error: ClientError) -> DragomanError:
    """The upstream's words where they are about the request; what is about its insides stays in the log."""
    said = error.said or "The upstream refused the request and gave no reason."
    status = error.where.status if isinstance(error, Refused) else None
    if error.code == ContextOverflow.code:
        return ContextOverflow(said, param=_part(error))
    if status in _CLIENTS_FAULT or (isinstance(error, StreamFailed) and error.kind in _CLIENTS_KINDS):
        # vLLM repeats the status as the code.
        code = None if error.code is None or error.code.isdigit() else error.code
        return BadRequest(said, param=_part(error), code=code)
    if status == 429 or error.kind == Overloaded.type:
        return Overloaded(error.said or "The upstream is busy; try again soon.")
    if isinstance(error, CannotConnect | TimedOut) or status in _BUSY or error.code == Unavailable.code:
        return Unavailable("The upstream does not answer; try again soon.")
    if status in (401, 403):
        return EngineFailed("The upstream does not take the key that this server has for it.")
    return EngineFailed("The upstream failed; the server's log says more.")


def _part(error: ClientError) -> Part | None:
    """An upstream is asked for completions, whose fields have the names that we use ourselves."""
    return None if error.param is None else Part(error.param)
