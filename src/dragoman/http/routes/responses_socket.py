"""`/v1/responses` as a WebSocket: one response after another, with the last one cached for the next."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Send

from dragoman.api.attachments import MARKS
from dragoman.api.request_decoder import IgnoredFields, check_shape
from dragoman.api.responses import request as requests
from dragoman.api.responses.event_encoder import DATA, END, OutputBytes, one_by_one, unwrap_event
from dragoman.api.responses.response import ERRORS
from dragoman.errors import BadRequest, BodyTooLarge, DragomanError, Overloaded
from dragoman.http.admission import ActiveRequest, ByteReservation
from dragoman.http.app_state import AppState
from dragoman.http.exchange import notice_headers
from dragoman.http.key_file import ANONYMOUS
from dragoman.limits import Limits
from dragoman.responses.context import pack_items
from dragoman.responses.run import ResponseRun, start_response
from dragoman.store import StoredItem
from dragoman.turns.tool_loop import ClientGone, EventEncoder, wait_with_keepalive
from dragoman.turns.turn import Turn

logger = logging.getLogger("dragoman.http")

R = TypeVar("R")
MOST_WAITING = 8
"""Maximum number of queued requests on one socket."""
LONGEST_S = 60 * 60
"""Maximum lifetime of a socket in seconds, as with OpenAI."""
OURS = ("type", "stream", "stream_options", "background", "generate", "stream_id")
"""Fields of a message that do not belong to the response: a socket always streams."""
LONGEST = 1024
"""Maximum bytes of a field that controls how a message is handled."""
NEWS = ("response.processed",)
"""Message types that get no reply."""
NO_MARKS: Mapping[str, Any] = {}
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class SocketMessage:
    """A message on a socket. Its fields stay undecoded until it is processed."""

    def __init__(self, raw: str | bytes, limits: Limits) -> None:
        check_shape(raw if isinstance(raw, bytes) else raw.encode(), limits)
        try:
            self._members = _members(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise BadRequest("The message is not a JSON object.", code="invalid_json") from None
        self.kind = self.said("type")
        self.lane = self.said("stream_id")
        if self.kind != "response.create" and self.kind not in NEWS:
            text = f"'type' must be response.create, not {str(self.kind)[:64]!r}."
            raise BadRequest(text, param="type", code="invalid_value")
        if not isinstance(self.lane, str | None):
            text = f"'stream_id' must be a string of at most {LONGEST} characters."
            raise BadRequest(text, param="stream_id", code="invalid_value")

    def said(self, name: str) -> Any:
        """Return a short field; of a long one the raw JSON, which matches no valid value."""
        value = self._members.get(name)
        if value is None:
            return None
        return bytes(value) if memoryview(value).nbytes > LONGEST else msgspec.json.decode(value)

    def body(self) -> bytes:
        """Return the body of the request."""
        return _encode({name: value for name, value in self._members.items() if name not in OURS})


class ResponsesSocket:
    """One client's connection. `serve()` returns when it is over."""

    def __init__(self, host: AppState, owner: str, receive: Receive, send: Send) -> None:
        self._host = host
        self._owner = owner
        self._receive = receive
        self._send = send
        self._inbox: asyncio.Queue[tuple[SocketMessage, ByteReservation]] = asyncio.Queue()
        self._last: tuple[str, Sequence[StoredItem]] | None = None
        """The last response and all items up to it: it can be continued even if it is not stored."""
        self._held = host.bodies.reserve(owner)
        """The bytes of the last response, held while the client is connected."""
        self._marks: dict[str, Any] = {}
        """Fields added to each event: the `stream_id` of the current request."""
        self._news: dict[str, str] = {}
        """Headers of the equivalent HTTP reply, sent with the first event."""

    async def serve(self) -> None:
        reading = asyncio.create_task(self._read())
        answering = asyncio.create_task(self._answer_all())
        try:
            done, _ = await asyncio.wait(
                {reading, answering}, timeout=LONGEST_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                message = "The connection has reached its limit of 60 minutes; reconnect."
                await self._fail(BadRequest(message, code="websocket_connection_limit_reached"))
                await self._send({"type": "websocket.close", "code": 1000})
        finally:
            reading.cancel()
            answering.cancel()
            for ended in await asyncio.gather(reading, answering, return_exceptions=True):
                if isinstance(ended, Exception) and not isinstance(ended, ClientGone):
                    logger.error("WebSocket failed", exc_info=ended)
            self._held.release()
            while not self._inbox.empty():
                self._inbox.get_nowait()[1].release()

    async def _read(self) -> None:
        """Read messages until the client disconnects, which ends the current response."""
        # Not assigned to a name: while the socket waits for the next message, nothing should keep the last
        # one alive.
        while await self._takes(await self._receive()):
            pass

    async def _takes(self, received: Any) -> bool:
        if received["type"] == "websocket.disconnect":
            return False
        held = self._host.bodies.reserve(self._owner)
        waits = False
        try:
            message = await self._message(received.get("text") or received.get("bytes") or "", held)
            waits = message.kind not in NEWS
            if waits:
                self._inbox.put_nowait((message, held))
        except DragomanError as error:
            await self._fail(error)
        finally:
            if not waits:
                held.release()
        return True

    async def _message(self, raw: str | bytes, held: ByteReservation) -> SocketMessage:
        if len(raw) > self._host.limits.body_bytes:
            raise BodyTooLarge(f"The message is larger than {self._host.limits.body_bytes} bytes.")
        if self._inbox.qsize() >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} requests are queued on this WebSocket; wait for their replies.")
        held.resize(len(raw))
        return await self._host.workers.run(
            self._owner, len(raw), partial(SocketMessage, raw, self._host.limits)
        )

    async def _answer_all(self) -> None:
        with suppress(ClientGone):
            while True:
                await self._answer_next(*await self._inbox.get())

    async def _answer_next(self, message: SocketMessage, held: ByteReservation) -> None:
        self._marks = {} if message.lane is None else {"stream_id": message.lane}
        self._news = {}
        try:
            with (
                self._host.recorder.work("WEBSOCKET", "/v1/responses") as facts,
                self._host.admission.admit(self._owner) as visit,
            ):
                await self._answer(await self._filled(message.body(), held), message, facts, visit)
        except ClientGone:
            raise
        except DragomanError as error:
            self._forget(message.said("previous_response_id"))
            key = self._host.keys.get(self._owner) or ANONYMOUS
            await self._fail(key.redact_error(error), self._marks)
        except Exception:
            logger.exception("Request on a WebSocket failed")
            failed = DragomanError("The server failed; see its log.", code="internal_error")
            await self._fail(failed, self._marks)
        finally:
            held.release()

    async def _filled(self, body: bytes, held: ByteReservation) -> bytes:
        """Return the body with the contents of the files that it names."""
        if MARKS.search(body):
            body = await self._host.documents.fill(self._owner, body, self._aside)
            held.resize(len(body))
        return body

    def _aside(self, size: int, work: Callable[[], R]) -> Coroutine[Any, Any, R]:
        return self._host.workers.run(self._owner, size, work)

    async def _answer(
        self, body: bytes, message: SocketMessage, log_fields: dict[str, Any], visit: ActiveRequest
    ) -> None:
        key = self._host.keys.require(self._owner)
        if key.is_limited:
            self._host.budgets.check(key)
        ignored = IgnoredFields(self._host.settings.unknown_fields)
        reading = partial(requests.read, body, self._host.limits, ignored)
        request = await self._host.workers.run(self._owner, len(body), reading)
        if names := ignored.summary:
            log_fields["ignored"] = names
        visit.set_timeout(request.timeout)
        known = None
        if self._last is not None and request.previous_response_id == self._last[0]:
            known = self._last[1]
        async with AsyncExitStack() as stack:
            self._host.pool.check_started()
            model = await self._host.pool.find_or_discover(request.model)
            key.check_use(request.model if request.model in model.names else model.name)
            self._host.check_may_load(model)
            loaded = await self._host.pool.acquire(model)
            stack.callback(self._host.pool.release, model)
            context = await stack.enter_async_context(
                self._host.responses.context(request, self._owner, len(body), known=known)
            )
            making = await start_response(self._host.responses, loaded.model, request, context)
            making.abort_reason = lambda: visit.error
            log_fields |= {"model": making.response.fields["model"], "request_id": making.id}
            making.generates = message.said("generate") is not False
            await making.prepare(streams=True)
            making.log_fields = log_fields
            self._news = notice_headers(log_fields)
            try:
                await making.run(self)
            except ClientGone:
                log_fields["finish"] = "disconnect"
                raise
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and visit.error is None:
                    raise
                # The events have already reported the error, and the log has its text.
                self._forget(request.previous_response_id)
                return
            await self._keep(making)

    async def _keep(self, making: ResponseRun) -> None:
        context = making.context
        items = partial(pack_items, [*context.all, *making.response.output], context.size)
        kept = await context.offload(context.size, items)
        try:
            self._held.resize(sum(len(item.body) for item in kept))
        except DragomanError:
            # The response is not cached then; if it was stored, it can still be continued.
            self._last = None
            self._held.release()
        else:
            self._last = (making.id, kept)

    def _forget(self, id_: object) -> None:
        """Drop the cached response: after a failed continuation the client sends the full context."""
        if self._last is not None and self._last[0] == id_:
            self._last = None
            self._held.release()

    # Output.

    async def write(self, data: OutputBytes) -> None:
        for pieces in [[data]] if isinstance(data, bytes) else one_by_one(data):
            telling = partial(_payloads, pieces, self._marks, self._news)
            self._news = {}
            for payload in await self._host.workers.run(self._owner, sum(map(len, pieces)), telling):
                await self._put(payload)

    async def run(self, turn: Turn, speaker: EventEncoder) -> None:
        async with turn:
            while not turn.is_over:
                try:
                    async with asyncio.timeout(self._host.settings.keep_alive):
                        events = await turn.next()
                except TimeoutError:
                    await self.write(speaker.idle())
                else:
                    await self.write(speaker.write(events))

    async def wait(self, work: Awaitable[R], speaker: EventEncoder) -> R:
        period = self._host.settings.keep_alive
        return await wait_with_keepalive(work, period, lambda: self.write(speaker.idle()))

    async def _fail(self, error: DragomanError, marks: Mapping[str, Any] = NO_MARKS) -> None:
        error.clear_frames()
        await self._put(_marked(_encode(ERRORS.message(error)), marks))

    async def _put(self, payload: str) -> None:
        try:
            async with asyncio.timeout(self._host.settings.write_timeout):
                await self._send({"type": "websocket.send", "text": payload})
        except (TimeoutError, OSError, RuntimeError):
            raise ClientGone from None


def _payloads(pieces: Sequence[bytes], marks: Mapping[str, Any], news: Mapping[str, str]) -> list[str]:
    """Build the messages; the first includes the headers."""
    first = {**marks, "headers": news} if news else marks
    if len(pieces) == 1:
        payloads = enumerate(unwrap_event(pieces[0]))
        return [_marked(payload, marks if offset else first) for offset, payload in payloads]
    head, *large, tail = pieces
    texts = [_marked(head.partition(DATA)[2], first), *(piece.decode() for piece in large)]
    return ["".join([*texts, tail.removesuffix(END).decode()])]


def _marked(payload: bytes, marks: Mapping[str, Any]) -> str:
    if marks:
        payload = b"".join([_encode(marks)[:-1], b",", payload[1:]])
    return payload.decode()
