"""Engines on a GPU with a clock on every step."""

import threading
import time
from typing import TypeAlias

from msgspec import Struct

from bench.errors import BenchError
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.engine import LocalHandle
from dragoman.engines.local.options import WeightKind
from dragoman.engines.local.sequence import Group
from dragoman.engines.protocol import Handle
from dragoman.engines.transformers import TransformersEngine, TransformersOptions
from dragoman.engines.transformers.engine import Said
from dragoman.types import Job, Sink, Step


class Beat(Struct, frozen=True):
    """The moment at which a step has been computed."""

    rows: int
    moment: float
    engine_s: float
    """Processor time of the engine's thread until then."""
    loop_s: float
    """Processor time of the event loop's thread until then."""


class Pace(Struct, frozen=True, kw_only=True):
    """Steps in which every stream got a token."""

    streams: int
    steps: int
    step_ms: float
    engine_ms: float
    """Processor time of the engine's thread for one step."""
    loop_ms: float
    """Processor time of the event loop's thread for one step."""

    @property
    def tokens_per_s(self) -> float:
        return self.streams / self.step_ms * 1000

    @property
    def loop_share(self) -> float:
        return self.loop_ms / self.step_ms


class Watch:
    """Reads the clocks of both threads at each step, and keeps the jobs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.beats: list[Beat] = []
        self._loop_clock = 0

    def clear(self) -> None:
        """Forget what was seen so far."""
        self.jobs, self.beats = [], []

    def asked(self, job: Job) -> None:
        # Jobs come on the event loop's thread.
        self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        self.jobs.append(job)

    def stepped(self, rows: int) -> None:
        loop_s = time.clock_gettime(self._loop_clock)
        self.beats.append(Beat(rows, time.perf_counter(), time.thread_time(), loop_s))

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
            step_ms=(last.moment - first.moment) / steps * 1000,
            engine_ms=(last.engine_s - first.engine_s) / steps * 1000,
            loop_ms=(last.loop_s - first.loop_s) / steps * 1000,
        )


class WatchedTransformers(TransformersEngine):
    watch: Watch

    def submit(self, job: Job, sink: Sink) -> Handle:
        self.watch.asked(job)
        return super().submit(job, sink)

    def said(self, steps: list[Said]) -> None:
        self.watch.stepped(len(steps))
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

        def counted() -> list[tuple[Group, Step]]:
            out = take()
            if out:
                self.watch.stepped(len(out))
            return out

        scheduler.take = counted  # type: ignore[method-assign]


WatchedEngine: TypeAlias = WatchedTransformers | WatchedLocal


def open_transformers(folder: str, streams: int, device: str) -> WatchedEngine:
    made = WatchedTransformers.open(folder, TransformersOptions(slots=streams, context=1024, device=device))
    made.watch = Watch()
    return made


def open_torch(folder: str, streams: int, device: str, weights: WeightKind = "auto") -> WatchedEngine:
    options = LocalOptions(runner="torch", slots=streams, context=1024, weights=weights)
    made = WatchedLocal.open(folder, options)
    assert isinstance(made, WatchedLocal)
    made.watch = Watch()
    made.follow()
    return made
