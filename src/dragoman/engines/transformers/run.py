"""A job on its way through the engine: one request of the library for each of its continuations."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeAlias

from dragoman.engines.choosing.arrays import Logits
from dragoman.engines.choosing.continuation import Continuation
from dragoman.errors import DragomanError, EngineFailed
from dragoman.types import FinishReason, Sampling, Sink, Step, TokenLogprob

_log = logging.getLogger("dragoman.engine")


class Run:
    """One continuation. The engine's thread advances it; the event loop's thread may cancel it."""

    __slots__ = ("_answer", "_plain", "_takes_largest", "id", "loop", "over", "sink")

    def __init__(self, id: str, answer: Continuation, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self.id = id
        self.sink = sink
        self.loop = loop
        self.over = False
        self._answer = answer
        self._plain = answer.plain
        self._takes_largest = answer.takes_largest

    def __deepcopy__(self, memo: object) -> "Run":
        """The library copies what it was given when it starts a request again; the answer goes on."""
        return self

    @property
    def index(self) -> int:
        return self._answer.index

    @property
    def sampling(self) -> Sampling:
        return self._answer.sampling

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next draw."""
        return self._answer.uniform()

    def in_company(self, drawing: bool) -> bool:
        """Whether its row may be chosen from together with others, where it is; `drawing` if not only the
        largest can be taken there. What has been cancelled takes anything.
        """
        return self.over or (self._plain if drawing else self._takes_largest)

    def take(self, token: int, logprob: TokenLogprob | None) -> Step | None:
        """The step for an id that was chosen elsewhere, as `advance`."""
        return self._step(lambda: self._answer.take(token, logprob))

    def advance(self, row: Logits) -> Step | None:
        """The next step; None for a run that was cancelled while the step was computed."""
        return self._step(lambda: self._answer.advance(row))

    def _step(self, choose: Callable[[], Step]) -> Step | None:
        if self.over:
            return None
        try:
            step = choose()
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
