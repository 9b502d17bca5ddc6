"""Steps from an engine's thread to the event loops of those who wait for them."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from dragoman.types import Sink, Step

_log = logging.getLogger("dragoman.engine")


class Receiver(Protocol):
    @property
    def sink(self) -> Sink: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...


R = TypeVar("R", bound=Receiver)


def deliver(said: Iterable[tuple[R, Step]], drop: Callable[[R], None]) -> None:
    """Hand all steps over in one go for each loop; nearly always there is only one.

    `drop` is told of a receiver that nobody listens to any more, on either thread.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[R, Step]]] = {}
    for entry in said:
        by_loop.setdefault(entry[0].loop, []).append(entry)
    for loop, entries in by_loop.items():
        try:
            loop.call_soon_threadsafe(_call_sinks, entries, drop)
        except RuntimeError:
            # The loop is closed, so nobody will ever read these.
            for receiver, _ in entries:
                drop(receiver)


def _call_sinks(entries: list[tuple[R, Step]], drop: Callable[[R], None]) -> None:
    """On the event loop's thread: one sink's trouble is not another's."""
    for receiver, step in entries:
        try:
            receiver.sink(step)
        except Exception:
            _log.exception("a sink raised; its job is dropped")
            drop(receiver)
