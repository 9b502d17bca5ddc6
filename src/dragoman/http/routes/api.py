"""What makes an API of some routes: they begin alike, and say alike what goes wrong."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from dragoman.api.error_spelling import ErrorSpelling
from dragoman.api.openapi import Operation
from dragoman.http.exchange import Exchange
from dragoman.http.host import Host

Handler: TypeAlias = Callable[[Host, Exchange], Awaitable[None]]


class Api(Struct, frozen=True):
    """Who answers which path, by method."""

    path: str
    """All below this is the API's own, so that it says in its way too that something is not there."""
    errors: ErrorSpelling
    computed: Mapping[str, Handler] = {}
    """POST that takes the engine's time, and counts in its queue."""
    post: Mapping[str, Handler] = {}
    """Others that have a body, which are counted apart."""
    uncounted: Mapping[str, Handler] = {}
    """POST that helps a full server, or one that stops: it is let in always."""
    get: Mapping[str, Handler] = {}
    delete: Mapping[str, Handler] = {}
    operations: Sequence[Operation] = ()
    """What is said of them, where `OPERATIONS` does not say it."""

    def has(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")
