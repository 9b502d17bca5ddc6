"""vLLM's core client, read directly: one message for each of its steps, about all requests at once.

`AsyncLLM.generate` has a task, a queue and a detokenizer for every request between this and its caller; none
of them is needed here.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from dragoman.engines.steps import MOST_APART, run_eagerly
from dragoman.engines.vllm.outputs import DEAD, FAILED, error_of, join_outputs
from dragoman.errors import DragomanError, EngineFailed, Unavailable
from dragoman.types import FinishReason, Step

# Messages of vLLM's core, read from its socket, or from its client if that is not possible.
#
# The client has a task and a queue between the socket and its reader, and each of them costs a turn of the
# event loop for every step of the model.


Take: TypeAlias = Callable[[Sequence[Any]], None]
MOST_DELAY_S = 0.01
"""Maximum seconds for which the core's output waits for requests that arrive at the same time."""
MOST_UNSENT = 8
"""Requests that are sent together. Each wake-up of the core costs more than a request does."""


def reader(client: Any, take: Take, crowded: Callable[[], bool]) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return the coroutine function that passes all messages to `take` until the core is dead; then it
    raises.

    `crowded` returns whether requests have arrived since it was last called: they go first. From this call
    on, even before the coroutine runs, the client no longer reads by itself.
    """
    plain = _is_plain(client)
    return _SocketReader(client, take, crowded).run if plain else partial(_read_queue, client, take)


def _is_plain(client: Any) -> bool:
    """Whether the client does nothing with a message but what `_SocketReader` does."""
    resources = getattr(client, "resources", None)
    return (
        getattr(resources, "output_socket", None) is not None
        and getattr(resources, "output_queue_task", client) is None
        and all(hasattr(client, name) for name in ("decoder", "utility_results"))
        # With several cores, or some that may be lost, it handles more than outputs.
        and not hasattr(client, "process_engine_outputs")
        and not getattr(client, "_engine_status", None)
    )


async def _read_queue(client: Any, take: Take) -> None:
    waiting = getattr(client, "outputs_queue", None)
    while True:
        messages = [await client.get_output_async()]
        # The core may have continued while the event loop was busy.
        while waiting is not None and not waiting.empty():
            messages.append(await client.get_output_async())
        take(messages)


class _SocketReader:
    def __init__(self, client: Any, take: Take, crowded: Callable[[], bool]) -> None:
        import zmq

        self._crowded = crowded
        self._latest = 0.0
        """Deadline for reading the pending messages; 0 if there are none."""
        self._resources = client.resources
        self._decode = client.decoder.decode
        self._asked: dict[int, asyncio.Future[Any]] = client.utility_results
        self._take = take
        # The client's own socket is for asyncio; this is the same socket, without futures.
        self._socket = zmq.Socket.shadow(client.resources.output_socket)
        self._now, self._nothing = zmq.NOBLOCK, zmq.Again
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Replaces the client's own reader: as long as it is set the client starts no other, and cancels it
        # when the core is dead.
        self._resources.output_queue_task = self._ended

    async def run(self) -> None:
        loop, number = asyncio.get_running_loop(), self._socket.FD
        loop.add_reader(number, self._came)
        try:
            self._readable()
            await self._ended
        finally:
            loop.remove_reader(number)

    def _came(self) -> None:
        """Handle a readable socket; called in every turn of the loop until it is read.

        While many requests arrive at once, they are sent to the core first: it computes them together, and
        their output is written together.
        """
        if self._crowded():
            now = asyncio.get_running_loop().time()
            self._latest = self._latest or now + MOST_DELAY_S
            if now < self._latest:
                return
        self._latest = 0.0
        self._readable()

    def _readable(self) -> None:
        """Read all messages: the socket signals a change only once."""
        try:
            messages = []
            while (message := self._next()) is not None:
                if message.utility_output:
                    self._answer(message.utility_output)
                elif message.outputs:
                    messages.append(message)
            if messages:
                self._take(messages)
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)

    def _next(self) -> Any:
        try:
            frames = self._socket.recv_multipart(self._now, copy=False)
        except self._nothing:
            return None
        self._resources.validate_alive(frames)
        return self._decode(frames)

    def _answer(self, result: Any) -> None:
        """Resolve a call of the core that is not a request."""
        asked = self._asked.pop(result.call_id, None)
        if asked is None or asked.done():
            return
        if result.failure_message is not None:
            asked.set_exception(RuntimeError(result.failure_message))
        else:
            asked.set_result(result.result.result)


# Sending of requests to the core. The client would create a future and a coroutine for each, and combine
# flags for each frame.


def sender(client: Any) -> Callable[[Any], bool]:
    """Return a function that sends a request at once, or returns False if only the client can. To be
    created before the `reader`.
    """
    # The other client types select a core for each request.
    plain = type(client).__name__ == "AsyncMPClient" and _is_plain(client)
    names = ("encoder", "input_socket", "core_engine", "client_index", "ensure_alive")
    return _SocketSender(client).send if plain and all(hasattr(client, name) for name in names) else _never


def _never(_request: Any) -> bool:
    return False


class _SocketSender:
    def __init__(self, client: Any) -> None:
        import zmq
        from vllm.v1.engine import EngineCoreRequestType

        self._client = client
        self._kind: bytes = EngineCoreRequestType.ADD.value
        self._write = partial(zmq.backend.Socket.send, zmq.Socket.shadow(client.input_socket))
        self._more, self._last, self._full = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK), zmq.Again

    def send(self, request: Any) -> bool:
        if request.mm_features or request.prompt_embeds is not None:
            # Tensors have frames of their own, which are not copied.
            return False
        client, write = self._client, self._write
        client.ensure_alive()
        request.client_index = client.client_index
        frame, *more = client.encoder.encode(request)
        if more:
            return False
        try:
            write(client.core_engine, self._more)
        except self._full:
            return False
        write(self._kind, self._more)
        write(frame, self._last)
        return True


# The core.


logger = logging.getLogger("dragoman.engine")
_CLIENT = ("get_output_async", "add_request_async", "abort_requests_async", "get_supported_tasks_async")
_INPUTS = ("process_inputs",)


def lacking(llm: Any) -> str | None:
    """Return what prevents reading the core directly; None if nothing does."""
    client, inputs = getattr(llm, "engine_core", None), getattr(llm, "input_processor", None)
    missing = [name for name in _CLIENT if not hasattr(client, name)]
    missing += [name for name in _INPUTS if not hasattr(inputs, name)]
    if missing:
        return f"this version has no {missing[0]}"
    return None if llm.output_handler is None else "its outputs are being read already"


class OutputReceiver(Protocol):
    """Receiver of the outputs of a request."""

    def step(self, output: Any, version: str | None) -> Step | None: ...

    def sink(self, step: Step, /) -> None: ...

    def end(self, finish: FinishReason, error: DragomanError | None = None) -> None: ...


class CoreClient:
    """The core client. All methods are for the event loop's thread."""

    def __init__(self, llm: Any) -> None:
        self._client = llm.engine_core
        self._takers: dict[str, OutputReceiver] = {}
        self._reader: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._write: Callable[[Any], bool] = _never
        self._unsent: list[Any] = []
        """Requests of this turn of the event loop."""
        self._has_new_requests = False
        """Whether requests have arrived since the last call of `_crowded`."""
        self.failure: DragomanError | None = None
        """Why it takes no more work; None while it runs."""
        self.kv_usage: float | None = None
        """Used fraction of the KV cache, if statistics are on."""

    def start(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._reader is None:
            self._write = sender(self._client)
            read = reader(self._client, self._hand_out, self._crowded)
            self._reader = asyncio.get_running_loop().create_task(self._read(read))

    def add(self, requests: Sequence[Any], takers: Sequence[OutputReceiver]) -> None:
        self.start()
        for request, taker in zip(requests, takers, strict=True):
            self._takers[request.request_id] = taker
        self._has_new_requests = True
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent += requests
        if len(self._unsent) >= MOST_UNSENT:
            self._send_all()

    def abort(self, ids: Sequence[str]) -> None:
        """Abort requests: their receivers get nothing more, and vLLM drops them before its next step."""
        unsent = {request.request_id for request in self._unsent}
        known = [id for id in ids if self._takers.pop(id, None) is not None and id not in unsent]
        if known and self.failure is None:
            self._send(self._client.abort_requests_async(known))

    async def tasks(self) -> tuple[str, ...]:
        """Return the model's tasks. This is a round trip: the answer comes between two steps."""
        self.start()
        assert self._reader is not None
        asked = asyncio.ensure_future(self._client.get_supported_tasks_async())
        try:
            # A dead core never answers.
            await asyncio.wait({asked, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure.with_traceback(None)
            return tuple(asked.result())
        finally:
            asked.cancel()

    async def stop(self) -> None:
        self.failure = self.failure or Unavailable("The engine has been stopped.")
        self._end_all("abort", None)
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await read()
        except asyncio.CancelledError:
            # Cancelled by `stop`, or by vLLM, which ends the readers of a dead core in this way.
            self._die(None)
            raise
        except Exception as error:
            self._die(error)

    def _die(self, error: Exception | None) -> None:
        if self.failure is None:
            logger.error("vLLM's core is dead", exc_info=error)
            self.failure = EngineFailed(DEAD)
            self._end_all("error", self.failure)

    def _hand_out(self, items: Sequence[Any]) -> None:
        """Pass on steps separately, so that each becomes an event; joined if too many are waiting."""
        for messages in [items] if len(items) > MOST_APART else [[message] for message in items]:
            self._hand_out_joined(messages)

    def _hand_out_joined(self, items: Sequence[Any]) -> None:
        """Call each receiver's sink once for all its outputs."""
        steps: dict[str, tuple[OutputReceiver, Step]] = {}
        for message in items:
            version = getattr(message, "weight_version", None)
            if (told_of := getattr(message, "scheduler_stats", None)) is not None:
                self.kv_usage = told_of.kv_cache_usage
            for output in message.outputs:
                self._read_output(output, None if version == "default" else version, steps)
        for id, (taker, step) in steps.items():
            try:
                taker.sink(step)
            except Exception:
                logger.exception("A sink raised; its job is dropped")
                self.abort([id])

    def _read_output(
        self, output: Any, version: str | None, steps: dict[str, tuple[OutputReceiver, Step]]
    ) -> None:
        id, takers = output.request_id, self._takers
        taker = takers.get(id) if output.finish_reason is None else takers.pop(id, None)
        if taker is None:
            # The request was cancelled while the output was on its way.
            return
        try:
            step = taker.step(output, version)
        except Exception:
            logger.exception("Cannot parse vLLM's output; its job is dropped")
            self.abort([id])
            steps.pop(id, None)
            taker.end("error", EngineFailed(FAILED))
            return
        if step is not None:
            steps[id] = (taker, join_outputs(steps[id][1], step) if id in steps else step)

    def _crowded(self) -> bool:
        crowded, self._has_new_requests = self._has_new_requests, False
        return crowded

    def _send_all(self) -> None:
        if self._unsent:
            requests, self._unsent = self._unsent, []
            self._send(self._add(requests))

    async def _add(self, requests: Sequence[Any]) -> None:
        for request in requests:
            if request.request_id in self._takers:
                # Otherwise it was cancelled meanwhile.
                await self._add_one(request)

    async def _add_one(self, request: Any) -> None:
        try:
            if not self._write(request):
                await self._client.add_request_async(request)
        except Exception as error:
            taker = self._takers.pop(request.request_id, None)
            if taker is not None:
                taker.end("error", error_of(error))

    def _send(self, message: Coroutine[Any, Any, None]) -> None:
        """Send a message at once if the socket accepts it, and in order: an abort never overtakes its
        request.
        """
        self.spawn(_quietly(message))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work at once, and as a task from where it first waits."""
        task = run_eagerly(work)
        if task is not None:
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def _end_all(self, finish: FinishReason, error: DragomanError | None) -> None:
        takers: Mapping[str, OutputReceiver] = self._takers
        self._takers = {}
        for taker in takers.values():
            try:
                taker.end(finish, error)
            except Exception:
                logger.exception("A sink raised at the end of its job")


async def _quietly(message: Coroutine[Any, Any, None]) -> None:
    try:
        await message
    except Exception as error:
        # The reader reports a dead core.
        logger.debug("vLLM's core did not accept a message", exc_info=error)
