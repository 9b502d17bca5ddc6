"""The jobs at work in an engine that may die: each of them is told of its end, once."""

import logging
from collections.abc import Callable

from dragoman.engines.protocol import Handle
from dragoman.errors import DragomanError, EngineFailed, Unavailable
from dragoman.types import Job, Sink, Step

_log = logging.getLogger("dragoman.engine")
BEGUN = "The engine failed while it was writing this answer; it is being restarted."
WAITING = "The engine failed before this answer began; it is being restarted, so try again soon."


class Live:
    """One job, between the engine and whoever asked. A handle, and `take` is the engine's sink."""

    __slots__ = ("_begun", "_jobs", "_open", "_sink", "handle")

    def __init__(self, jobs: "Jobs", job: Job, sink: Sink) -> None:
        self._jobs = jobs
        self._open = set(range(job.n))
        self._sink = sink
        self._begun = False
        self.handle: Handle | None = None

    def take(self, step: Step) -> None:
        if step.finish is None:
            if step.index in self._open:
                self._begun = True
                self._sink(step)
        elif type(step.error) is EngineFailed:
            # Whether this job failed or the whole engine is for the watch to say.
            self._jobs.hold(self, step)
        else:
            self.end(step)

    def end(self, step: Step) -> None:
        """The last step of a continuation, if it has had none."""
        if step.index in self._open:
            self._leave(step.index)
            self._sink(step)

    def fail(self) -> None:
        error: DragomanError = EngineFailed(BEGUN) if self._begun else Unavailable(WAITING)
        for index in sorted(self._open):
            try:
                self.end(Step([], index, finish="error", error=error))
            except Exception:
                _log.exception("a sink raised at the end of its job")

    def cancel(self, index: int | None = None) -> None:
        handle = self.handle
        self._leave(index)
        if handle is not None:
            handle.cancel(index)

    def _leave(self, index: int | None) -> None:
        self._open = set() if index is None else self._open - {index}
        if not self._open:
            self._jobs.live.discard(self)
            # The engine's side of the job knows this one: a circle that would keep both.
            self.handle = None


class Jobs:
    def __init__(self, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called when a job says that the engine failed."""
        self.live: set[Live] = set()
        self._held: list[tuple[Live, Step]] = []
        self._on_failure = on_failure

    def add(self, job: Job, sink: Sink) -> Live:
        live = Live(self, job, sink)
        self.live.add(live)
        return live

    def hold(self, live: Live, step: Step) -> None:
        self._held.append((live, step))
        self._on_failure()

    @property
    def held(self) -> int:
        """Steps that wait for what the watch has to say."""
        return len(self._held)

    def release(self, count: int) -> None:
        """The engine has lived after the first `count` of them: what failed were single jobs."""
        held, self._held = self._held[:count], self._held[count:]
        for live, step in held:
            live.end(step)

    def fail(self) -> None:
        """The engine is gone, and with it all jobs."""
        self._held = []
        for live in list(self.live):
            live.fail()
