"""The child process: opens the engine, executes the server's commands, and reports the results."""

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec.structs import replace

from dragoman.engines.isolated import wire
from dragoman.engines.isolated.wire import ConstraintFactory, SourceConstraint
from dragoman.engines.protocol import (
    Engine,
    HeartbeatEngine,
    JobHandle,
    LifecycleEngine,
    MediaEngine,
    weights_of,
)
from dragoman.engines.validate import start_job
from dragoman.errors import DragomanError, EngineFailed, Unavailable
from dragoman.media import Media
from dragoman.types import Job, Sink, Step

_log = logging.getLogger("dragoman.engine")
TEXT = "An engine that returns text cannot run in its own process; remove `isolate_engine`."
METHODS = (
    *("embed", "embed_for", "score", "pause", "resume", "update_weights"),
    *("load_adapter", "unload_adapter"),
)


def ignore_stop_signals() -> None:
    """Ignore stop signals sent to all processes: the server acts on them, and stops this one."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def serve(link: socket.socket, open: Callable[[], Engine]) -> int:
    """Open an engine and serve it to the other end of `link`; return the process's exit code."""
    faulthandler.enable()
    try:
        engine = open()
        methods = [name for name in METHODS if hasattr(engine, name)]
        opened = wire.EngineReady(engine.card, methods, wire.digest(engine.tokenizer))
    except Exception as error:
        if not isinstance(error, DragomanError):
            _log.error("Cannot open the engine", exc_info=error)
        link.sendall(wire.frame(wire.EngineOpenError(wire.WireError.of(error))))
        return 1
    link.sendall(wire.frame(opened))
    # The existing objects are permanent: scanning them in each collection would stop everything for
    # milliseconds.
    gc.collect()
    gc.freeze()
    return asyncio.run(ChildServer(engine, link).run())


class ChildServer:
    def __init__(self, engine: Engine, link: socket.socket) -> None:
        self._engine = engine
        self._link = link
        self._kitchen = ConstraintFactory(engine.tokenizer)
        self._handles: dict[int, JobHandle | None] = {}
        """Running jobs; None while the constraint is still being compiled."""
        self._shown: dict[str, bytes] = {}
        self._steps: list[tuple[int, Step]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._checks = 0
        self._checking = False

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_unix_connection(sock=self._link)
        if isinstance(self._engine, LifecycleEngine):
            await self._engine.start()
        frames = wire.FrameReader(reader)
        while True:
            try:
                orders = [wire.orders.decode(frame) for frame in await frames.read()]
            except EOFError:
                # The server is gone.
                os._exit(0)
            for order in orders:
                if isinstance(order, wire.Shutdown):
                    return await self._stop()
                self._obey(order)

    def _obey(self, order: wire.Command) -> None:
        match order:
            case wire.JobSubmission():
                self._submit(order)
            case wire.MediaUpload():
                self._shown[order.digest] = order.data
            case wire.MediaEviction():
                self._shown.pop(order.digest, None)
            case wire.JobCancellation():
                self._cancel(order)
            case wire.MethodCall(method="place"):
                # Looked up now, because the medium may be evicted by the next command.
                media = self._whole(msgspec.convert(order.args[0], Media))
                self._spawn(self._answer(order, asyncio.to_thread(self._place, media)))
            case wire.MethodCall():
                self._spawn(self._answer(order, self._call(order)))
            case wire.Ping():
                self._pong()
                self._spawn(self._check())

    def _whole(self, media: Media) -> Media:
        return replace(media, data=self._shown[media.digest])

    def _place(self, media: Media) -> list[int]:
        assert isinstance(self._engine, MediaEngine)
        return [*self._engine.media_token_ids(media)]

    def _submit(self, order: wire.JobSubmission) -> None:
        if order.job.media:
            order.job = wire.spans_with(order.job, self._whole)
        if order.source is not None:
            order.job = replace(order.job, constraint=SourceConstraint(order.source))
        if order.recipe is None:
            self._start(order)
        else:
            self._handles[order.id] = None
            self._spawn(self._start_constrained(order))

    async def _start_constrained(self, order: wire.JobSubmission) -> None:
        assert order.recipe is not None
        try:
            # In a thread: it may take its whole time budget, while other jobs have steps to report.
            constraint = await asyncio.to_thread(self._kitchen.make, order.recipe)
        except Exception as error:
            self._fail(order, error)
            return
        if order.id in self._handles:
            order.job = replace(order.job, constraint=constraint)
            self._start(order)

    def _start(self, order: wire.JobSubmission) -> None:
        try:
            sink = _JobSink(self, order.id, order.job.n)
            # Our own engines need no validation here: the server does that.
            submit = self._engine.submit if isinstance(self._engine, StepBatchingEngine) else None
            submit_job = partial(start_job, self._engine) if submit is None else submit
            self._handles[order.id] = submit_job(order.job, sink)
        except Exception as error:
            self._fail(order, error)

    def _cancel(self, order: wire.JobCancellation) -> None:
        handle = self._handles.get(order.id)
        if order.index is None:
            self._handles.pop(order.id, None)
        if handle is not None:
            handle.cancel(order.index)

    def ended(self, id: int) -> None:
        self._handles.pop(id, None)

    def _fail(self, order: wire.JobSubmission, error: Exception) -> None:
        self._handles.pop(order.id, None)
        _log.debug("The engine did not accept a job", exc_info=error)
        for index in range(order.job.n):
            self.queue_step(order.id, Step([], index, finish="error", error=error))

    def queue_step(self, id: int, step: Step) -> None:
        """Queue a step; all steps of one turn of the event loop go in one message."""
        if not self._steps:
            asyncio.get_running_loop().call_soon(self._flush)
        self._steps.append((id, step))

    def deliver_batch(self, items: Sequence[tuple["_JobSink", Step]]) -> None:
        """Encode the steps of many jobs on the engine's thread, so that the event loop only sends them;
        both share the CPU.
        """
        frame = wire.frame(wire.StepReport([(sink.id, step) for sink, step in items]))
        ended = [sink for sink, step in items if step.finish is not None]
        self._loop.call_soon_threadsafe(self._send_gathered, frame, ended)

    def _send_gathered(self, frame: bytes, ended: list["_JobSink"]) -> None:
        for sink in ended:
            sink.end_one()
        self._flush()
        self._writer.write(frame)

    def _flush(self) -> None:
        if self._steps:
            steps, self._steps = self._steps, []
            self._send(wire.StepReport(steps))

    def _send(self, message: wire.Report) -> None:
        self._writer.write(wire.frame(message))

    async def _call(self, order: wire.MethodCall) -> Any:
        if order.method not in METHODS:
            raise EngineFailed(f"Unknown engine method {order.method}.")
        return await getattr(self._engine, order.method)(*order.args)

    async def _answer(self, order: wire.MethodCall, asked: Coroutine[Any, Any, Any]) -> None:
        answered = wire.MethodResult(order.id)
        try:
            answered.value = await asked
        except Exception as error:
            answered.error = wire.WireError.of(error)
        answered.weight_version = weights_of(self._engine)
        self._send(answered)

    def _pong(self) -> None:
        # An engine without a pulse at least shows by its CPU time that something is computed.
        engine = self._engine
        pulse = engine.heartbeat if isinstance(engine, HeartbeatEngine) else int(10 * time.process_time())
        self._send(wire.Pong(self._checks + pulse))

    async def _check(self) -> None:
        """Make a round trip through the engine. If it is dead, this process ends."""
        if self._checking:
            return
        self._checking = True
        try:
            if isinstance(self._engine, LifecycleEngine):
                await self._engine.check()
        except Unavailable:
            _log.debug("The engine is alive but cannot serve", exc_info=True)
        except Exception as error:
            _log.error("Engine dead", exc_info=error)
            self._flush()
            await self._writer.drain()
            os._exit(1)
        finally:
            self._checking = False
        self._checks += 1
        self._pong()

    async def _stop(self) -> int:
        if isinstance(self._engine, LifecycleEngine):
            await self._engine.stop()
        await asyncio.sleep(0)
        self._flush()
        self._writer.close()
        await self._writer.wait_closed()
        return 0

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@runtime_checkable
class StepBatchingEngine(Protocol):
    """An engine that hands over the steps of many jobs at once, with `steps.deliver_steps`."""

    batches_steps: bool

    def submit(self, job: Job, sink: Sink) -> JobHandle: ...


class _JobSink:
    """Sink of one job; all sinks share one hub."""

    __slots__ = ("_left", "batch_sink", "id")

    def __init__(self, hub: ChildServer, id: int, n: int) -> None:
        self.batch_sink = hub
        self.id = id
        self._left = n

    def __call__(self, step: Step) -> None:
        if type(step) is not Step:
            step = Step([], step.index, finish="error", error=EngineFailed(TEXT))
        if step.finish is not None:
            self.end_one()
        self.batch_sink.queue_step(self.id, step)

    def end_one(self) -> None:
        self._left -= 1
        if not self._left:
            self.batch_sink.ended(self.id)
