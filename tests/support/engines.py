"""Engines for tests."""

from collections.abc import AsyncIterator

from dragoman.engines.local import LocalEngine
from dragoman.engines.local.engine import LocalHandle
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.types import Job, Sink, Step


class Shared:
    """An engine that outlives its servers: the same weights can be served in one dialect after the other."""

    def __init__(self, engine: LocalEngine) -> None:
        self.card: ModelCard = engine.card
        self.tokenizer: Tokenizer = engine.tokenizer
        self._engine = engine

    def submit(self, job: Job, sink: Sink) -> LocalHandle:
        return self._engine.submit(job, sink)

    def generate(self, job: Job) -> AsyncIterator[Step]:
        return self._engine.generate(job)
