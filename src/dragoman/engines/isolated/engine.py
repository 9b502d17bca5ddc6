"""The server's side of an engine in a process of its own: an Engine like any other."""

import asyncio
import fcntl
import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dragoman.engines.isolated import wire
from dragoman.engines.isolated.wire import constraint_spec
from dragoman.engines.local.options import check_job
from dragoman.engines.protocol import ModelCard, Tokenizer
from dragoman.engines.steps import MOST_APART, iterate
from dragoman.errors import BadRequest, DragomanError, EngineFailed, Unavailable
from dragoman.media import Media
from dragoman.types import FinishReason, Job, Sink, Step

# The process: its start and end, and whether it is stuck.


_CERTAINLY_ALIVE = frozenset("RDt")
"""Process states: running, waiting for a disk, or stopped by a debugger."""


class ChildProcess:
    """A child process with a socket and a lifeline: when the server is gone, for any reason, so is the
    child.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """`command` gets two file descriptor numbers as its last arguments: the socket, and the lifeline.

        `environ` is its environment; by default this process's own.
        """
        self.link, theirs = socket.socketpair()
        held, self._lifeline = os.pipe()
        try:
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno()), str(held)],
                pass_fds=(theirs.fileno(), held),
                env=environ,
                stdin=subprocess.DEVNULL,
                # Output printed by libraries must not mix with the server's.
                stdout=2,
            )
        finally:
            theirs.close()
            os.close(held)
        self._used = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._child.kill()

    def end(self, patience: float) -> str:
        """Wait for the process to end, kill it after `patience` seconds, and describe how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(patience)
        self.kill()
        code = self._child.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def is_still(self) -> bool:
        """Whether no thread of it has run since the last call, or is about to. False if that is unknown."""
        used, states = 0, set()
        try:
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                # The name in parentheses may hold anything, so the fields after the last one are read.
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                states.add(fields[0])
                used += int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):
            return False
        before, self._used = self._used, used
        return bool(states) and used == before and not states & _CERTAINLY_ALIVE


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this child process when the parent's end of the pipe is closed.

    The pipe carries no data, so the only event on it is its end. No code of this process has to run for it,
    so it works even if this process is stuck or stopped. On other systems than Linux the signal is SIGIO,
    which also ends a process, but not one that is stopped.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        # The parent was gone before the signal was set up.
        os._exit(1)


# The engine whose work is done in the child.


_log = logging.getLogger("dragoman.engine")
BEAT_S = 0.15
MAX_IDLE_HEARTBEATS = 3
"""Consecutive heartbeats without a reply and without CPU use after which the process counts as stuck."""
SHOWN_BYTES = 256 * 1024 * 1024
"""Bytes of media that the child caches, so that each is sent once."""
_STOP_S = 10.0
_EXIT_S = 1.0
"""Seconds for the process to end after it has closed its side."""


class _IsolatedJobHandle:
    """Handle of a running job: its sink, and the continuations that are not over."""

    __slots__ = ("_engine", "_id", "open", "sink")

    def __init__(self, engine: "IsolatedEngine", id: int, n: int, sink: Sink) -> None:
        self._engine = engine
        self._id = id
        self.open = set(range(n))
        self.sink = sink

    def cancel(self, index: int | None = None) -> None:
        self._engine.cancel(self._id, index)


class IsolatedEngine:
    """Engine in a child process. Create it with `IsolatedEngine.open(command, first, tokenizer)`.

    `start` must be called before it is used, on the event loop that uses it.
    """

    def __init__(self, process: ChildProcess, opened: wire.EngineReady, tokenizer: Tokenizer) -> None:
        self.card: ModelCard = opened.card
        self.tokenizer = tokenizer
        self.weight_version: str | None = None
        self.failure: DragomanError | None = None
        """Why it takes no more work; None while it runs."""
        self.heartbeat = 0
        self.context = opened.card.context_tokens
        self.vocabulary = len(tokenizer.pieces)
        self.adapters: Sequence[str] = opened.card.adapters
        self._process = process
        self._ids = itertools.count()
        self._takers: dict[int, _IsolatedJobHandle] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._checks: list[asyncio.Future[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._shown = wire.MediaMirror(SHOWN_BYTES)
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = True
        self._stopping = False
        # The server detects what an engine supports by its methods.
        for name in opened.methods:
            setattr(self, name, self._asking(name))

    @classmethod
    def open(
        cls,
        command: Sequence[str],
        first: Any,
        tokenizer: Callable[[], Tokenizer],
        environ: Mapping[str, str] | None = None,
    ) -> "IsolatedEngine":
        """Start a process and wait until it has opened its engine. `first` is the first message to it.

        `tokenizer` is called when the engine is open: if the model's file crashes a parser, that has happened
        in the child by then.
        """
        process = ChildProcess(command, environ)
        try:
            process.link.sendall(wire.frame(first))
            item = wire.news.decode(wire.receive(process.link))
            if isinstance(item, wire.EngineOpenError):
                raise item.error.error()
            if not isinstance(item, wire.EngineReady):
                raise EngineFailed("Unexpected first message from the engine process.")
            result = tokenizer()
            if wire.digest(result) != item.digest:
                raise EngineFailed("The engine process has a different tokenizer than the server.")
            return cls(process, item, result)
        except (EOFError, BrokenPipeError) as error:
            process.link.close()
            how = process.end(_EXIT_S)
            message = f"The engine process {how} while loading the model; the file may be damaged."
            raise EngineFailed(message) from error
        except BaseException:
            process.link.close()
            process.end(0.0)
            raise

    @property
    def pid(self) -> int:
        """Id of the child process."""
        return self._process.pid

    def submit(self, job: Job, sink: Sink) -> _IsolatedJobHandle:
        """Start a job; `sink` is called on the event loop's thread."""
        self._check_failure()
        check_job(job, self, self.card.modalities)
        constraint = job.constraint
        id = next(self._ids)
        order = wire.JobSubmission(id, replace(job, constraint=None), constraint_spec(constraint))
        order.source = constraint.source if constraint is not None else None
        if job.media:
            order.job = wire.spans_with(order.job, wire.without_data)
        self._send_about((span.media for span in job.media), order)
        taker = self._takers[id] = _IsolatedJobHandle(self, id, job.n, sink)
        return taker

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Yield steps until every continuation has finished. Closing the iterator cancels the job."""
        return iterate(self, job)

    def media_token_ids(self, media: Media) -> Sequence[int]:
        """Call the engine's `media_token_ids`. From any thread but the event loop's, which has to receive the
        reply.
        """
        if self._loop is None:
            raise Unavailable("The engine has not been started.")
        if threading.get_ident() == self._thread:
            raise EngineFailed("place was called on the event loop's thread; call it from a worker thread.")
        placed: Sequence[int] = asyncio.run_coroutine_threadsafe(self._place(media), self._loop).result()
        return placed

    async def _place(self, media: Media) -> Any:
        id = next(self._ids)
        return await self._answer(
            id, lambda: self._send_about([media], wire.MethodCall(id, "place", [wire.without_data(media)]))
        )

    def _send_about(self, media: Iterable[Media], order: wire.Command) -> None:
        """Send a command after the media that it refers to."""
        new, old = self._shown.orders(media)
        for each in (*new, order, *old):
            self._send(each)

    def cancel(self, id: int, index: int | None) -> None:
        taker = self._takers.get(id)
        if taker is None:
            return
        taker.open = set() if index is None else taker.open - {index}
        whole = not taker.open
        if whole:
            del self._takers[id]
        if self.failure is None:
            self._send(wire.JobCancellation(id, None if whole else index))

    async def start(self) -> None:
        self._check_failure()
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.link)
        self._loop = loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._tasks = [loop.create_task(self._listen(reader)), loop.create_task(self._beat())]

    async def stop(self) -> None:
        """End all jobs with finish "abort", and the process. The engine cannot be started again."""
        self._stopping = True
        if not self._tasks:
            self.abandon()
        elif self.failure is None:
            self._send(wire.Shutdown())
            if not (await asyncio.wait(self._tasks[:1], timeout=_STOP_S))[0]:
                self._process.kill()
            await asyncio.wait(self._tasks[:1])

    def abandon(self) -> None:
        """Kill the process, whatever it does."""
        self._process.kill()
        if not self._tasks:
            # There is no task that waits for its end.
            self._process.link.close()
            self._process.end(0.0)

    async def check(self) -> None:
        """Return when the engine has given a sign of life; raise EngineFailed when its process is gone."""
        self._check_failure()
        answered = asyncio.get_running_loop().create_future()
        self._checks.append(answered)
        self._send(wire.Ping())
        await answered

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise type(self.failure)(self.failure.message)

    def _send(self, order: wire.Command) -> None:
        if self._writer is None:
            raise Unavailable("The engine has not been started.")
        if not self._writer.is_closing():
            self._writer.write(wire.frame(order))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        frames = wire.FrameReader(reader)
        try:
            while True:
                items = [wire.news.decode(frame) for frame in await frames.read()]
                for item in items if len(items) <= MOST_APART else wire.merge_step_reports(items):
                    self._take(item)
        except EOFError:
            pass
        except Exception:
            _log.exception("Invalid message from the engine process; killing it")
            self._process.kill()
        assert self._writer is not None
        self._writer.close()
        how = await asyncio.to_thread(self._process.end, _EXIT_S)
        if self._stopping:
            self._end(Unavailable("The engine has been stopped."), "abort")
        else:
            self._end(EngineFailed(f"The engine process {how}."), "error")

    def _take(self, item: wire.Report) -> None:
        self._heard = True
        match item:
            case wire.StepReport():
                for id, step in item.steps:
                    self._hand_out(id, step)
            case wire.Pong():
                self._sign(item.pulse)
            case wire.MethodResult():
                self.weight_version = item.weight_version
                future = self._asked.pop(item.id, None)
                if future is not None and not future.done():
                    _settle(future, item)

    def _hand_out(self, id: int, step: Step) -> None:
        taker = self._takers.get(id)
        if taker is None or step.index not in taker.open:
            # The job was cancelled while the step was on its way.
            return
        if step.finish is not None:
            taker.open.discard(step.index)
            if not taker.open:
                del self._takers[id]
        try:
            taker.sink(step)
        except Exception:
            _log.exception("A sink raised; its job is dropped")
            self.cancel(id, None)

    def _sign(self, pulse: int) -> None:
        if pulse == self.heartbeat:
            return
        self.heartbeat = pulse
        for check in self._checks:
            if not check.done():
                check.set_result(None)
        self._checks = []

    async def _beat(self) -> None:
        """Send heartbeats, and kill a process that neither replies nor uses the CPU."""
        still = 0
        while True:
            self._heard = False
            self._send(wire.Ping())
            await asyncio.sleep(BEAT_S)
            still = still + 1 if not self._heard and self._process.is_still() else 0
            if still >= MAX_IDLE_HEARTBEATS:
                _log.error("Engine process stuck: no reply and no CPU use")
                self._process.kill()
                return

    def _end(self, reason: DragomanError, finish: FinishReason) -> None:
        self.failure = self.failure or reason
        for task in self._tasks[1:]:
            task.cancel()
        takers, self._takers = self._takers, {}
        for taker in takers.values():
            for index in sorted(taker.open):
                with suppress(Exception):
                    taker.sink(Step([], index, finish=finish, error=reason if finish == "error" else None))
        for future in (*self._asked.values(), *self._checks):
            if not future.done():
                future.set_exception(type(reason)(reason.message))
        self._asked, self._checks = {}, []

    async def _answer(self, id: int, send: Callable[[], None]) -> Any:
        self._check_failure()
        answered = self._asked[id] = asyncio.get_running_loop().create_future()
        try:
            send()
            return await answered
        finally:
            self._asked.pop(id, None)

    def _asking(self, method: str) -> Callable[..., Any]:
        async def ask(*args: Any) -> Any:
            self._check_failure()
            if method == "update_weights" and args and not isinstance(args[0], str | Path):
                message = "An engine in its own process does not accept tensors; pass a path."
                raise BadRequest(message, code="unsupported_model")
            id = next(self._ids)
            answered = self._asked[id] = asyncio.get_running_loop().create_future()
            try:
                self._send(wire.MethodCall(id, method, list(args)))
                result = await answered
            finally:
                self._asked.pop(id, None)
            if method == "load_adapter":
                self.adapters = [*self.adapters, args[0]]
            elif method == "unload_adapter":
                self.adapters = [name for name in self.adapters if name != args[0]]
            return result

        return ask


def _settle(future: "asyncio.Future[Any]", result: wire.MethodResult) -> None:
    if result.error is not None:
        future.set_exception(result.error.error())
    else:
        future.set_result(result.value)
