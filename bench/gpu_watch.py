"""Engines on a GPU with a clock on every step."""

import threading
import time
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from bench.errors import BenchError
from dragoman.cli.engine import isolate
from dragoman.engines.isolated import IsolatedEngine, wire
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.engine import LocalHandle
from dragoman.engines.local.sequence import SequenceGroup
from dragoman.engines.protocol import JobHandle
from dragoman.engines.transformers import TransformersEngine, TransformersOptions
from dragoman.engines.transformers.engine import ContinuationStep
from dragoman.settings import Settings
from dragoman.types import Job, Sink, Step

KV_BYTES = 16 << 30
"""For keys and values of the engine that is in this process: another one has the rest of the card."""


class Beat(Struct, frozen=True):
    """The moment at which a step has been computed."""

    rows: int
    tokens: int
    moment: float
    loop_s: float
    """Processor time until then of the event loop beside the engine, which has the engine's interpreter."""
    server_s: float
    """The same of the server's loop, where that is in another process."""


class Pace(Struct, frozen=True, kw_only=True):
    """Steps in which every stream got a token, or several that had been guessed."""

    streams: int
    steps: int
    tokens: int
    step_ms: float
    loop_ms: float
    server_ms: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.steps / self.step_ms * 1000

    @property
    def loop_share(self) -> float:
        return self.loop_ms / self.step_ms


class Watch:
    """Reads the clocks of the loops at each step, and keeps the jobs."""

    def __init__(self, pid: int | None = None) -> None:
        """`pid`: of the process in which the engine is, where it has one of its own."""
        self.jobs: list[Job] = []
        self.beats: list[Beat] = []
        self._mine = 0
        # The first thread of a process is its loop's.
        self._apart = None if pid is None else Path(f"/proc/{pid}/task/{pid}/schedstat")

    def clear(self) -> None:
        """Forget what was seen so far."""
        self.jobs, self.beats = [], []

    def asked(self, job: Job) -> None:
        # Jobs come on the event loop's thread.
        self._mine = time.pthread_getcpuclockid(threading.get_ident())
        self.jobs.append(job)

    def stepped(self, rows: int, tokens: int) -> None:
        mine = time.clock_gettime(self._mine)
        apart = None if self._apart is None else int(self._apart.read_text().split()[0]) / 1e9
        loop_s, server_s = (mine, 0.0) if apart is None else (apart, mine)
        self.beats.append(Beat(rows, tokens, time.perf_counter(), loop_s, server_s))

    def pace(self, streams: int) -> Pace:
        """Raises BenchError if the streams were never all under way."""
        full = [beat for beat in self.beats if beat.rows == streams]
        # What the first of them says comes with the prompts' last pieces; the loop still reads requests.
        full = full[len(full) // 8 :]
        if len(full) < 8:
            raise BenchError(f"{streams} streams were together for {len(full)} steps only.")
        first, last, steps = full[0], full[-1], len(full) - 1
        return Pace(
            streams=streams,
            steps=steps,
            tokens=sum(beat.tokens for beat in full[1:]),
            step_ms=(last.moment - first.moment) / steps * 1000,
            loop_ms=(last.loop_s - first.loop_s) / steps * 1000,
            server_ms=(last.server_s - first.server_s) / steps * 1000,
        )


class WatchedTransformers(TransformersEngine):
    watch: Watch

    def submit(self, job: Job, sink: Sink) -> JobHandle:
        self.watch.asked(job)
        return super().submit(job, sink)

    def said(self, steps: list[ContinuationStep]) -> None:
        self.watch.stepped(len(steps), len(steps))
        super().said(steps)


class WatchedLocal(LocalEngine):
    watch: Watch

    def submit(self, job: Job, sink: Sink) -> LocalHandle:
        self.watch.asked(job)
        return super().submit(job, sink)

    def follow(self) -> None:
        """Count the steps of the scheduler."""
        scheduler = self._worker._scheduler
        take = scheduler.take

        def counted() -> list[tuple[SequenceGroup, Step]]:
            out = take()
            if out:
                self.watch.stepped(len(out), sum(len(step.ids) for _, step in out))
            return out

        scheduler.take = counted  # type: ignore[method-assign]


class WatchedApart:
    """An engine in a process of its own; its steps are counted where they are heard of."""

    def __init__(self, engine: IsolatedEngine) -> None:
        self.watch = Watch(engine.pid)
        self.engine = engine
        submit, take = engine.submit, engine._take

        def submitted(job: Job, sink: Sink) -> JobHandle:
            self.watch.asked(job)
            return submit(job, sink)

        def taken(item: wire.Report) -> None:
            if isinstance(item, wire.StepReport):
                self.watch.stepped(len(item.steps), sum(len(step.ids) for _, step in item.steps))
            take(item)

        engine.submit, engine._take = submitted, taken  # type: ignore[method-assign, assignment]


WatchedEngine: TypeAlias = WatchedTransformers | WatchedLocal


def open_transformers(folder: str, streams: int, device: str) -> WatchedEngine:
    transformers = WatchedTransformers.open(
        folder, TransformersOptions(slots=streams, context=1024, device=device)
    )
    transformers.watch = Watch()
    return transformers


def open_torch(settings: Settings) -> WatchedEngine:
    """In this process."""
    options = LocalOptions(
        runner="torch",
        slots=settings.slots,
        context=settings.context,
        weights=settings.weights,
        guesses=settings.guesses or 0,
        deterministic=settings.deterministic,
        kv_memory=KV_BYTES,
    )
    local = WatchedLocal.open(settings.model or "", options)
    assert isinstance(local, WatchedLocal)
    local.watch = Watch()
    local.follow()
    return local


def open_apart(settings: Settings) -> WatchedApart:
    """As `dragoman serve` has it on a GPU."""
    return WatchedApart(isolate(settings))
