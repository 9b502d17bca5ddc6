"""Announced windows: times in which clients may notice a restart, or the load of a model."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from tests.soak.fault import Fault

REST_S = 1.0
"""A window lasts so much longer, until the last client has seen its connection break."""


class Window(Struct):
    model: str
    """The model that is loaded or unloaded; empty: the server is restarted."""
    until: float = float("inf")


class Windows:
    def __init__(self) -> None:
        self._windows: list[Window] = []
        self._server = asyncio.Event()
        self._server.set()

    @contextmanager
    def announce_restart(self) -> Iterator[None]:
        self._server.clear()
        try:
            with self._announce(""):
                yield
        finally:
            self._server.set()

    @contextmanager
    def announce_change(self, model: str) -> Iterator[None]:
        with self._announce(model):
            yield

    @contextmanager
    def _announce(self, model: str) -> Iterator[None]:
        window = Window(model)
        self._windows.append(window)
        try:
            yield
        finally:
            window.until = time.monotonic() + REST_S

    async def wait_for_server(self) -> None:
        await self._server.wait()

    @property
    def is_server_there(self) -> bool:
        return self._server.is_set()

    def covers_restart(self, began: float) -> bool:
        """Whether a restart was announced at any time since then."""
        return any(not window.model and window.until >= began for window in self._windows)

    def excuses(self, fault: Fault, began: float, model: str = "") -> bool:
        """Only a restart excuses a broken connection, and a 503 needs Retry-After."""
        if self.covers_restart(began):
            return fault.is_retryable or fault.kind in ("broken", "unfinished", "error in a stream")
        changed = any(window.model == model and window.until >= began for window in self._windows)
        return bool(model) and changed and (fault.is_retryable or fault.kind == "error in a stream")
