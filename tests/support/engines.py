"""Engines for tests."""

from collections.abc import AsyncIterator
from importlib.util import find_spec

from dragoman.engines.local import LocalEngine
from dragoman.engines.local.engine import LocalHandle
from dragoman.engines.local.options import RunnerName
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.types import Job, Sink, Step

RUNNER: RunnerName = "openvino" if find_spec("openvino") else "llamacpp"
"""For tests that any will do for: to measure which is faster takes seconds, and may end either way."""


class SharedEngine:
    """An engine that outlives its servers: the same weights can be served in one dialect after the other."""

    def __init__(self, engine: LocalEngine) -> None:
        self.card: ModelCard = engine.card
        self.tokenizer: Tokenizer = engine.tokenizer
        self._engine = engine

    def submit(self, job: Job, sink: Sink) -> LocalHandle:
        return self._engine.submit(job, sink)

    def generate(self, job: Job) -> AsyncIterator[Step]:
        return self._engine.generate(job)
