"""A job on its way through the engine: one request of the library for each of its continuations."""

import asyncio
import logging
from typing import TypeAlias

from dragoman.engines.choosing.arrays import Logits
from dragoman.engines.choosing.continuation import Continuation
from dragoman.errors import DragomanError, EngineFailed
from dragoman.types import FinishReason, Sink, Step

_log = logging.getLogger("dragoman.engine")


class Run:
    """One continuation. The engine's thread advances it; the event loop's thread may cancel it."""

    __slots__ = ("_answer", "id", "loop", "over", "sink")

    def __init__(self, id: str, answer: Continuation, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self.id = id
        self.sink = sink
        self.loop = loop
        self.over = False
        self._answer = answer

    def __deepcopy__(self, memo: object) -> "Run":
        """The library copies what it was given when it starts a request again; the answer goes on."""
        return self

    @property
    def index(self) -> int:
        return self._answer.index

    @property
    def takes_largest(self) -> bool:
        """Whether the row need not be looked at. What has been cancelled takes anything."""
        return self.over or self._answer.takes_largest

    def advance(self, row: Logits | None, largest: int) -> Step | None:
        """The next step; None for a run that was cancelled while the step was computed."""
        if self.over:
            return None
        try:
            step = self._answer.take(largest) if row is None else self._answer.advance(row)
        except Exception:
            _log.exception("choosing an id failed")
            return self.end("error", EngineFailed("The engine failed while it was choosing a token."))
        self.over = step.finish is not None
        return step

    def end(self, finish: FinishReason, error: DragomanError | None = None) -> Step | None:
        if self.over:
            return None
        self.over = True
        return Step([], self.index, finish=finish, error=error)


Said: TypeAlias = tuple[Run, Step]
