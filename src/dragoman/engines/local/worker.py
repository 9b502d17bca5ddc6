"""The engine's thread: it computes step after step, and takes its mail in between.

What is native goes down in one order, whoever says stop: no new mail, the running step broken off,
everybody told, the threads of masks ended, and then the runner closed, on the thread that computed with it.
Only when that thread is gone, for the system too, does `stop` return: libraries tidy up after a thread when
Python has long forgotten it, and must not do so while the process takes them down.
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

from dragoman.engines.local.process_pages import use_large_pages
from dragoman.engines.local.runner import Pulsing, Runner, StepInterrupted
from dragoman.engines.local.scheduler import Scheduler
from dragoman.engines.local.sequence import Group
from dragoman.engines.steps import deliver
from dragoman.errors import Conflict, DragomanError, EngineFailed, Unavailable
from dragoman.types import Step

if TYPE_CHECKING:
    from dragoman.engines.local.pictures import Pictures

# Embeddings, worked off piece by piece between the steps of the scheduler.


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
        self._begin = partial(runner.embed, prompts)
        self._work = self._begin()
        self._found: list[list[float]] = []
        self.retried = False

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
            # The loop is closed: nobody waits any more.
            return


# The thread.


_log = logging.getLogger("dragoman.engine")
Mail: TypeAlias = Callable[[], None]
STOP_S = 10.0
"""A step that cannot be broken off is awaited for so long; a thread that has not ended by then is stuck."""
AGAIN_S = 0.1
QUIET_S = 0.05
"""When nothing has come for so long, what nobody waits for is done."""


class Worker:
    """Owns the runner and the scheduler. All methods but `_...` may be called from any thread."""

    def __init__(self, runner: Runner, scheduler: Scheduler, pictures: "Pictures | None" = None) -> None:
        self._runner = runner
        self._scheduler = scheduler
        if pictures is not None:
            pictures.tell = lambda picture: self._mail.put(partial(scheduler.saw, picture))
        self._mail: SimpleQueue[Mail] = SimpleQueue()
        self._embeddings: deque[Embedding] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopping = False
        self._paused = False
        self._turns = 0
        self._pages: Iterator[int] | None = use_large_pages()
        """As long as there is memory that can be put into larger pages."""
        self.failure: DragomanError | None = None
        """Why the engine takes no more work; None while it lives."""

    @property
    def pulse(self) -> int:
        """Changes with every turn of the thread, and while a step is computed where the runner tells."""
        return self._turns + (self._runner.pulse if isinstance(self._runner, Pulsing) else 0)

    def start(self) -> None:
        with self._lock:
            self.check()
            self._start()

    def check(self) -> None:
        """Raise the reason why the engine takes no more work, if there is one."""
        if self.failure is not None:
            # A new one each time: an error that was raised holds its frames, and with them the weights.
            raise type(self.failure)(self.failure.message)

    def post(self, mail: Mail) -> None:
        """Have something done by the engine's thread before its next step."""
        with self._lock:
            self.check()
            self._start()
            self._mail.put(mail)

    async def do(self, work: Mail) -> None:
        """Have something done, and wait for it. Raises what it raises."""
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
            # What was computed before it, and is read only now, arrives before the answer.
            self._deliver(self._scheduler.take())
            with suppress(RuntimeError):
                # The loop may be closed: then nobody waits any more.
                loop.call_soon_threadsafe(settle, raised)

        self.post(mail)
        await done

    async def pause(self, paused: bool) -> None:
        """Compute nothing once this returns, until it is called with False. What comes meanwhile waits."""

        def hold() -> None:
            self._paused = paused
            self._scheduler.settle()

        await self.do(hold)

    def submit(self, group: Group) -> None:
        self.post(lambda: self._scheduler.add(group))
        self._break_off()

    def embed(self, embedding: Embedding) -> None:
        self.post(lambda: self._add(embedding))
        self._break_off()

    def cancel(self, group: Group, index: int | None) -> None:
        for sequence in [*group.sequences]:
            if index is None or sequence.index == index:
                sequence.cancelled = True
        if self.failure is not None:
            return
        self._mail.put(self._scheduler.drop_cancelled)
        self._break_off()

    def _break_off(self) -> None:
        """Interrupt the running step if it is of no use, or keeps a request waiting for what is not."""
        in_step = self._scheduler.in_step if self._runner.interruptible else []
        if in_step and all(sequence.cancelled or sequence.group.quiet for sequence in in_step):
            self._runner.interrupt()

    def stop(self) -> None:
        """End everything and wait for the thread, which closes the runner. Not for ever: it may be stuck."""
        self._order_end(Unavailable("The engine has been stopped."))
        if self._thread is None:
            self._close_all()
        elif self._has_ended(self._thread):
            # What nobody has read holds this worker, and with it the weights.
            self._read_mail(wait=False)
        else:
            _log.error("The engine's thread has not ended within %.0f seconds; it is left behind.", STOP_S)

    def _has_ended(self, thread: threading.Thread) -> bool:
        """Whether it has ended in time. It may have begun a step just when it was to be broken off."""
        until = time.monotonic() + STOP_S
        while not has_ended(thread, AGAIN_S) and time.monotonic() < until:
            self._runner.interrupt()
        return not thread.is_alive()

    def abandon(self) -> None:
        """Wait no more for a thread that is stuck. If it gets on after all, it ends and closes the runner."""
        self._order_end(EngineFailed("The engine was stuck and has been given up."))

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
        """Take no more mail. What came in before is in the box by then, and will still be read."""
        with self._lock:
            self.failure = self.failure or reason

    def _order_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            with suppress(StepInterrupted):
                # By a stop. What was not tried yet is prepared when it comes.
                self._runner.warm_up()
            while not self._stopping:
                self._turn()
            self._end_all("The engine has been stopped.")
        except Exception as error:
            _log.exception("the engine's thread ended by an error")
            message = "The engine failed and takes no more requests."
            self._close(EngineFailed(error.message if isinstance(error, EngineFailed) else message))
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
            self._scheduler.reread()
        if self._stopping:
            return
        if self._scheduler.busy and not self._paused:
            self._scheduler.step({embedding.owner for embedding in self._embeddings})
        self._deliver(self._scheduler.take())
        if not self._paused and (embedding := self._next_embedding()) is not None:
            self._advance(embedding)

    def check_unused(self, adapter: str) -> None:
        """Raise if a job at work, or one that waits, names it. For the engine's thread."""
        if self._scheduler.names(adapter):
            raise Conflict(f"The adapter {adapter!r} is in use.")

    def _add(self, embedding: Embedding) -> None:
        self._scheduler.account.came(embedding.owner)
        self._scheduler.make_way()
        self._embeddings.append(embedding)

    def _next_embedding(self) -> Embedding | None:
        """The first whose time it is."""
        if not self._embeddings:
            return None
        answering, may = self._scheduler.owners, self._scheduler.account.may_embed
        present = answering | {one.owner for one in self._embeddings}
        return next((one for one in self._embeddings if may(one.owner, answering, present)), None)

    def _comes_mail(self, within: float) -> bool:
        """Whether something comes within so many seconds, which is read then."""
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
        # Only this thread takes anything out.
        while not self._mail.empty():
            self._mail.get_nowait()()

    def _advance(self, embedding: Embedding) -> None:
        began = time.perf_counter()
        try:
            more = embedding.advance()
        except StepInterrupted:
            # Meant for a step that was over just then, or for everything.
            embedding.fail(Unavailable("The embedding was interrupted; try again."))
            more = False
        except Exception as error:
            more = self._scheduler.recover_embedding(error, again=not embedding.retried)
            if more:
                embedding.retry()
            else:
                embedding.fail(EngineFailed("The model could not compute this embedding."))
        if not more:
            self._embeddings.remove(embedding)
        self._scheduler.account.embedded(embedding.owner, time.perf_counter() - began)

    def _deliver(self, out: list[tuple[Group, Step]]) -> None:
        deliver(out, lambda group: self.cancel(group, None))

    def _end_all(self, message: str, failed: bool = False) -> None:
        # What was sent but not read yet has to be told as well.
        self._read_mail(wait=False)
        error = EngineFailed(message) if failed else None
        self._scheduler.end_all("error" if failed else "abort", error)
        self._deliver(self._scheduler.take())
        while self._embeddings:
            self._embeddings.popleft().fail(error or Unavailable(message))


def has_ended(thread: threading.Thread, most: float) -> bool:
    """Whether a thread has ended within so many seconds, or does not run at all any more."""
    until = time.monotonic() + most
    thread.join(most)
    # Python is done with a thread before the system is.
    task = Path(f"/proc/self/task/{thread.native_id}")
    while not thread.is_alive() and task.exists() and time.monotonic() < until:
        time.sleep(0.0005)
    return not thread.is_alive()
