"""The engine thread: computes step after step, and runs posted tasks in between.

Native resources are closed in one order, however the stop begins: no new tasks, the running step interrupted,
all jobs ended, the threads of masks ended, and then the runner closed, on the thread that computed with it.
`stop` returns only when that thread is gone for the operating system, too: libraries clean up after a thread
when Python has already forgotten it, and must not do so while the process unloads them.
"""

import asyncio
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from dragoman.engines.local.os_memory import use_large_pages
from dragoman.engines.local.runner import HeartbeatRunner, Runner, StepInterrupted
from dragoman.engines.local.scheduler import Scheduler
from dragoman.engines.local.sequence import SequenceGroup
from dragoman.engines.steps import deliver_steps
from dragoman.errors import Conflict, DragomanError, EngineFailed, Unavailable
from dragoman.types import Step

if TYPE_CHECKING:
    from dragoman.engines.local.encoder_cache import EncoderCache

# Embeddings, computed chunk by chunk between the scheduler's steps.


class EmbeddingTask:
    """One request for embeddings, and its future. `owner` means the same as `Job.owner`."""

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
        self._begin = partial(runner.embed, prompts)
        self._work = self._begin()
        self._found: list[list[float]] = []
        self.retried = False

    def advance(self) -> bool:
        """Compute one chunk; return whether there is more."""
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

    def retry(self) -> None:
        """Begin again, after a step of it has failed."""
        self.retried = True
        self._work, self._found = self._begin(), []

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
            # The loop is closed, so the result is not needed.
            return


# The thread.


_log = logging.getLogger("dragoman.engine")
EngineTask: TypeAlias = Callable[[], None]
STOP_S = 10.0
"""Seconds to wait for a step that cannot be interrupted; after that the thread counts as stuck."""
AGAIN_S = 0.1
QUIET_S = 0.05
"""Idle seconds after which background work of the engine begins."""


class EngineThread:
    """Owner of the runner and the scheduler. Methods without a leading underscore may be called from any
    thread.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, pictures: "EncoderCache | None" = None) -> None:
        self._runner = runner
        self._scheduler = scheduler
        if pictures is not None:
            pictures.tell = lambda picture: self._mail.put(partial(scheduler.on_media_encoded, picture))
        self._mail: SimpleQueue[EngineTask] = SimpleQueue()
        self._embeddings: deque[EmbeddingTask] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopping = False
        self._paused = False
        self._turns = 0
        self._pages: Iterator[int] | None = use_large_pages()
        """Iterator that collapses memory into large pages; None when it is done."""
        self.failure: DragomanError | None = None
        """Why the engine takes no more work; None while it runs."""

    @property
    def pulse(self) -> int:
        """A counter that changes with every turn of the thread, and within a step if the runner tells."""
        return self._turns + (self._runner.pulse if isinstance(self._runner, HeartbeatRunner) else 0)

    def start(self) -> None:
        with self._lock:
            self.check()
            self._start()

    def check(self) -> None:
        """Raise the reason why the engine takes no more work, if there is one."""
        if self.failure is not None:
            # A new exception each time: one that was raised keeps its frames alive, and with them the
            # weights.
            raise type(self.failure)(self.failure.message)

    def post(self, mail: EngineTask) -> None:
        """Run a task on the engine thread before its next step."""
        with self._lock:
            self.check()
            self._start()
            self._mail.put(mail)

    async def run_task(self, work: EngineTask) -> None:
        """Run a task on the engine thread and wait for it. Raises what it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def mail() -> None:
            raised = None
            try:
                work()
            except Exception as error:
                raised = error
            # Results computed before the task arrive before its own result.
            self._deliver(self._scheduler.take())
            with suppress(RuntimeError):
                # If the loop is closed, the result is not needed.
                loop.call_soon_threadsafe(settle, raised)

        self.post(mail)
        await done

    async def pause(self, paused: bool) -> None:
        """Stop computing from when this returns until it is called with False. Requests wait meanwhile."""

        def hold() -> None:
            self._paused = paused
            self._scheduler.synchronize()

        await self.run_task(hold)

    def submit(self, group: SequenceGroup) -> None:
        self.post(lambda: self._scheduler.add(group))
        self._break_off()

    def embed(self, embedding: EmbeddingTask) -> None:
        self.post(lambda: self._add(embedding))
        self._break_off()

    def cancel(self, group: SequenceGroup, index: int | None) -> None:
        for sequence in [*group.sequences]:
            if index is None or sequence.index == index:
                sequence.cancelled = True
        if self.failure is not None:
            return
        self._mail.put(self._scheduler.drop_cancelled)
        self._break_off()

    def _break_off(self) -> None:
        """Interrupt the running step if it is only of cancelled sequences or idle prefill."""
        in_step = self._scheduler.in_step if self._runner.interruptible else []
        if in_step and all(sequence.cancelled or sequence.group.is_idle_prefill for sequence in in_step):
            self._runner.interrupt()

    def stop(self) -> None:
        """End everything and wait for the thread, which closes the runner. Gives up if the thread is
        stuck.
        """
        self._order_end(Unavailable("The engine has been stopped."))
        if self._thread is None:
            self._close_all()
        elif self._has_ended(self._thread):
            # Tasks left in the queue refer to this worker, and with it to the weights.
            self._read_mail(wait=False)
        else:
            _log.error("The engine thread did not end within %.0f seconds; it is abandoned", STOP_S)

    def _has_ended(self, thread: threading.Thread) -> bool:
        """Whether the thread ends in time. It is interrupted repeatedly, as it may have just begun another
        step.
        """
        until = time.monotonic() + STOP_S
        while not has_ended(thread, AGAIN_S) and time.monotonic() < until:
            self._runner.interrupt()
        return not thread.is_alive()

    def abandon(self) -> None:
        """Abandon a stuck thread. If it continues after all, it ends and closes the runner."""
        self._order_end(EngineFailed("The engine was stuck and has been abandoned."))

    def _order_end(self, reason: DragomanError) -> None:
        self._close(reason)
        self._mail.put(self._order_stop)
        self._runner.interrupt()
        atexit.unregister(self.stop)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dragoman-engine", daemon=True)
            self._thread.start()
            # A thread inside native code must not outlive the interpreter.
            atexit.register(self.stop)

    def _close(self, reason: DragomanError) -> None:
        """Accept no more tasks. Those posted before are in the queue by then, and will still run."""
        with self._lock:
            self.failure = self.failure or reason

    def _order_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            with suppress(StepInterrupted):
                # Interrupted by `stop`. Otherwise, what was not warmed up is prepared when needed.
                self._runner.warm_up()
            while not self._stopping:
                self._turn()
            self._end_all("The engine has been stopped.")
        except Exception as error:
            _log.exception("The engine thread ended by an error")
            message = "The engine failed and takes no more requests."
            if isinstance(error, EngineFailed):
                # A new one: an error that was raised holds its frames, and with them the weights.
                self._close(type(error)(error.message))
            else:
                self._close(EngineFailed(message))
            self._end_all("The engine failed.", failed=True)
        finally:
            self._close_all()

    def _close_all(self) -> None:
        self._scheduler.close()
        self._runner.close()

    def _turn(self) -> None:
        self._turns += 1
        at_work = self._scheduler.busy or bool(self._embeddings)
        if self._paused or at_work or not (self._pages or self._scheduler.rereading):
            self._read_mail(wait=self._paused or not at_work)
        elif self._pages is not None:
            if not self._comes_mail(0.0) and next(self._pages, None) is None:
                self._pages = None
        elif not self._comes_mail(QUIET_S):
            self._scheduler.start_idle_prefill()
        if self._stopping:
            return
        if self._scheduler.busy and not self._paused:
            self._scheduler.step({embedding.owner for embedding in self._embeddings})
        self._deliver(self._scheduler.take())
        if not self._paused and (embedding := self._next_embedding()) is not None:
            self._advance(embedding)

    def check_unused(self, adapter: str) -> None:
        """Raise Conflict if a running or waiting job uses the adapter. For the engine thread."""
        if self._scheduler.uses_adapter(adapter):
            raise Conflict(f"The adapter {adapter!r} is in use.")

    def _add(self, embedding: EmbeddingTask) -> None:
        self._scheduler.account.on_arrival(embedding.owner)
        self._scheduler.cancel_idle_prefill()
        self._embeddings.append(embedding)

    def _next_embedding(self) -> EmbeddingTask | None:
        """Return the first embedding whose owner may have time now."""
        if not self._embeddings:
            return None
        answering, may = self._scheduler.owners, self._scheduler.account.may_embed
        present = answering | {one.owner for one in self._embeddings}
        return next((one for one in self._embeddings if may(one.owner, answering, present)), None)

    def _comes_mail(self, within: float) -> bool:
        """Wait for a task for some seconds; if there is one, run all tasks and return True."""
        try:
            mail = self._mail.get(timeout=within)
        except Empty:
            return False
        mail()
        self._read_mail(wait=False)
        return True

    def _read_mail(self, wait: bool) -> None:
        if wait:
            self._mail.get()()
        # Only this thread takes tasks out.
        while not self._mail.empty():
            self._mail.get_nowait()()

    def _advance(self, embedding: EmbeddingTask) -> None:
        began = time.perf_counter()
        try:
            more = embedding.advance()
        except StepInterrupted:
            # The interrupt was meant for a step that had just ended, or the engine is stopping.
            embedding.fail(Unavailable("The embedding was interrupted; retry."))
            more = False
        except Exception as error:
            more = self._scheduler.recover_embedding(error, again=not embedding.retried)
            if more:
                embedding.retry()
            else:
                embedding.fail(EngineFailed("The model could not compute this embedding."))
        if not more:
            self._embeddings.remove(embedding)
        self._scheduler.account.charge_embedding(embedding.owner, time.perf_counter() - began)

    def _deliver(self, out: list[tuple[SequenceGroup, Step]]) -> None:
        deliver_steps(out, lambda group: self.cancel(group, None))

    def _end_all(self, message: str, failed: bool = False) -> None:
        # Tasks that were posted but not run yet may add jobs, which must be ended, too.
        self._read_mail(wait=False)
        error = EngineFailed(message) if failed else None
        self._scheduler.end_all("error" if failed else "abort", error)
        self._deliver(self._scheduler.take())
        while self._embeddings:
            self._embeddings.popleft().fail(error or Unavailable(message))


def has_ended(thread: threading.Thread, most: float) -> bool:
    """Whether a thread ends within `most` seconds, for the operating system as well."""
    until = time.monotonic() + most
    thread.join(most)
    # Python forgets a thread before the operating system does.
    task = Path(f"/proc/self/task/{thread.native_id}")
    while not thread.is_alive() and task.exists() and time.monotonic() < until:
        time.sleep(0.0005)
    return not thread.is_alive()
