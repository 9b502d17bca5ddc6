"""Embeddings, worked off piece by piece between the steps of the scheduler."""

import asyncio
from collections.abc import Sequence

from dragoman.engines.local.runner import Runner
from dragoman.errors import DragomanError


class Embedding:
    """One request for vectors, and the future that waits for them. `owner` is whose it is, as with a job."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        runner: Runner,
        loop: asyncio.AbstractEventLoop,
        owner: str = "",
    ) -> None:
        self.owner = owner
        self.future: asyncio.Future[list[list[float]]] = loop.create_future()
        self._loop = loop
        self._work = runner.embed(prompts)
        self._found: list[list[float]] = []

    def advance(self) -> bool:
        """Do one piece of the work; whether there is more."""
        if self.future.cancelled():
            return False
        try:
            vector = next(self._work)
        except StopIteration:
            self._resolve(None)
            return False
        if vector is not None:
            self._found.append(vector)
        return True

    def fail(self, error: DragomanError) -> None:
        self._resolve(error)

    def _resolve(self, error: DragomanError | None) -> None:
        def settle() -> None:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(self._found)
            else:
                self.future.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            return
