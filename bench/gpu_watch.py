"""The engine over `transformers` with a clock on every step."""

import threading
import time

from msgspec import Struct

from bench.errors import BenchError
from dragoman.engines.protocol import Handle
from dragoman.engines.transformers import TransformersEngine
from dragoman.engines.transformers.engine import Said
from dragoman.types import Job, Sink


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


class WatchedEngine(TransformersEngine):
    """Reads the clocks of both threads at each step, and keeps the jobs."""

    jobs: list[Job]
    beats: list[Beat]
    _loop_clock: int

    def watch(self) -> None:
        """Forget what was seen so far."""
        self.jobs, self.beats = [], []

    def submit(self, job: Job, sink: Sink) -> Handle:
        # Jobs come on the event loop's thread.
        self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        self.jobs.append(job)
        return super().submit(job, sink)

    def said(self, steps: list[Said]) -> None:
        loop_s = time.clock_gettime(self._loop_clock)
        self.beats.append(Beat(len(steps), time.perf_counter(), time.thread_time(), loop_s))
        super().said(steps)

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
