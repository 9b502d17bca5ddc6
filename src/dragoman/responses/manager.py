"""Manages responses, running and stored: finds, runs, cancels and adopts them."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

import msgspec

from dragoman.api import training
from dragoman.api.reply import DONE, KEEP_ALIVE
from dragoman.api.responses.event_encoder import END, OutputBytes
from dragoman.api.responses.items import ContextItems, normalise, references, resolve_references
from dragoman.api.responses.request import ResponseRequest
from dragoman.errors import BadRequest, Conflict, NotFound, RecordNotFound, StoreUnavailable
from dragoman.limits import Limits, check_count
from dragoman.mcp import McpServers
from dragoman.responses.context import ResponseContext, make_record, new_id
from dragoman.responses.seal import Sealer, seal_key
from dragoman.settings import Settings
from dragoman.store import ReadLimits, Record, Store, StoredConversation, StoredItem, StoreLimits, make_store
from dragoman.store.sqlite import SqliteStore
from dragoman.tracing import current
from dragoman.turns.queue import Offloader, WorkerPool
from dragoman.turns.served_model import ServedModel
from dragoman.types import TurnRecord

if TYPE_CHECKING:
    from dragoman.responses.run import ResponseRun


# The events of a running response, for clients that reconnect to its stream.


FEW = 256
"""Log entries that a follower gets at once, unless they have more bytes than:"""
MANY_BYTES = 256 * 1024


class EventLog:
    """The events of a response, which grow while it runs. Any number of followers read from their own
    position.
    """

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self.size = 0
        self._over = False
        self._grown = asyncio.Event()

    def add(self, events: OutputBytes) -> None:
        if events:
            pieces = [events] if isinstance(events, bytes) else events
            self._chunks += pieces
            self.size += sum(map(len, pieces))
            self._wake()

    def close(self) -> None:
        """Mark the log complete."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def whole(self, ending: bytes) -> bytes:
        """Join all events with the last one. Joining releases other threads, which adding would not."""
        return b"".join([*self._chunks, ending])

    async def follow(self, after: int, keep_alive: float) -> AsyncIterator[bytes]:
        """Yield the events after number `after`, including future ones; -1 yields all.

        Without events for `keep_alive` seconds it yields a comment, which is not an event and has no
        number.
        """
        seen, skipped = 0, after + 1
        while True:
            grown, begin, seen = self._grown, seen, self._few(seen)
            fresh = b"".join(self._chunks[begin:seen])
            if skipped and fresh:
                fresh, skipped = from_number(fresh, skipped), max(skipped - _count(fresh), 0)
            if fresh:
                yield fresh
            if seen < len(self._chunks):
                # Let other requests run during a long log.
                await asyncio.sleep(0)
            elif fresh:
                continue
            elif self._over:
                return
            else:
                try:
                    async with asyncio.timeout(keep_alive):
                        await grown.wait()
                except TimeoutError:
                    yield KEEP_ALIVE

    def _few(self, begin: int) -> int:
        """Return the end of the next portion, which is the end of an event."""
        chunks, at, size = self._chunks, begin, 0
        while at < len(chunks) and (
            (at < begin + FEW and size < MANY_BYTES) or not chunks[at - 1].endswith(END)
        ):
            size += len(chunks[at])
            at += 1
        return at


def from_number(events: bytes, number: int) -> bytes:
    """Return the events from this number on; the first has number 0. The end of the stream is always
    included.
    """
    return events[event_offset(events, number) :]


def event_offset(events: bytes, number: int) -> int:
    """Return the offset of the event with this number, or of the end of the stream."""
    at = 0
    for _ in range(number):
        # Found one by one: counting all of them in one call would block the process for as long.
        end = events.find(END, at)
        if end < 0 or events.startswith(DONE, at):
            break
        at = end + len(END)
    return at


def _count(events: bytes) -> int:
    return events.count(END) - events.endswith(DONE)


# While a background response runs, its request is stored, so that another server can run it if this one dies.


TRIES = 3
"""Servers that may die while they run one response."""
POLL_INTERVAL_S = 5.0
"""Seconds between two searches for responses whose server is gone."""
ELSEWHERE_S = 600.0
"""Seconds for which responses of other models are left to servers that have these models."""


class ResumableRequest(msgspec.Struct):
    request: msgspec.Raw
    tries: int = 1


class Takeover(msgspec.Struct, frozen=True):
    """A response of a server that is gone, which this server runs again under the same id."""

    id: str
    created_at: int
    tries: int


current_takeover: ContextVar[Takeover | None] = ContextVar("taken_over", default=None)
_read_underway = msgspec.json.Decoder(ResumableRequest).decode


def write_underway(request: ResponseRequest) -> bytes:
    """Encode the request, stored where the events go once they are complete."""
    again = current_takeover.get()
    raw = msgspec.Raw(msgspec.json.encode(msgspec.structs.replace(request, stream=None)))
    return msgspec.json.encode(ResumableRequest(raw, again.tries if again else 1))


def is_underway(events: bytes) -> bool:
    return events.startswith(b"{")


# The manager.


logger = logging.getLogger("dragoman.responses")

ID_BYTES = 8
"""Approximate bytes of an id in JSON."""
LONGEST_CHAIN = 4096
"""Responses in one chain of continuations."""
_decode = msgspec.json.Decoder().decode


class ResponseManager:
    @classmethod
    def of(cls, settings: Settings, workers: WorkerPool, mcp: McpServers) -> Self:
        store = make_store(settings)
        memory = SqliteStore(None, StoreLimits())
        rest = Sealer(seal_key(settings)), settings.limits, workers, mcp
        type_var_type = cls(store or memory, *rest, keeps=store is not None)
        type_var_type.keeps_ids = settings.trajectories
        return type_var_type

    def __init__(
        self,
        store: Store,
        sealer: Sealer,
        limits: Limits,
        workers: WorkerPool,
        mcp: McpServers,
        *,
        keeps: bool,
    ) -> None:
        self.list_models: Callable[[], Sequence[ServedModel]] = lambda: ()
        """The loaded models, which remember the reasoning of answers."""
        self.mcp = mcp
        self.store = store
        self.has_store = keeps
        """Whether responses are stored at all."""
        self.keeps_ids = False
        """Whether the ids of all answers are stored, or only where the client asks for it."""
        self.runs: dict[str, ResponseRun] = {}
        """Responses that run in the background, or will be stored when they are done."""
        self.sealer = sealer
        self.limits = limits
        self._workers = workers
        shown = limits.media_total_bytes // 3 * 4
        self._most = ReadLimits(items=limits.messages, bytes=limits.context_bytes, shown=shown)
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.resubmit: Callable[[str, bytes], Awaitable[int]] | None = None
        """Sends a stored request again as its owner; returns the status of the reply."""
        self.has_model: Callable[[str], bool] = lambda _: True
        """Whether this server has a model of this name."""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.store.open()

    async def watch(self) -> None:
        """Adopt the responses that dead servers have left, now and periodically. Called once models can
        answer.
        """
        await self._take_over()
        if self.has_store:
            self._watching = asyncio.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                await self._take_over()
                await self._heed()
            except StoreUnavailable as error:
                logger.warning("Cannot check for orphaned responses: %s", error.message)

    async def _take_over(self) -> None:
        for orphan in await self.store.adopt_orphans(self._wants):
            kept = await self.store.get(orphan.kind, orphan.owner, orphan.id, events=True)
            left = _read_underway(kept.events) if kept is not None and is_underway(kept.events) else None
            if left is None or self.resubmit is None or left.tries >= TRIES:
                await self._give_up(orphan)
            else:
                task = asyncio.create_task(self._make_again(orphan, left))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _wants(self, model: str, at: float) -> bool:
        return at < time.time() - ELSEWHERE_S or self.has_model(model)

    async def _make_again(self, orphan: Record, left: ResumableRequest) -> None:
        assert self.resubmit is not None
        current_takeover.set(Takeover(orphan.id, int(orphan.created_at), left.tries + 1))
        logger.info("Resuming response %s of a server that is gone", orphan.id)
        status = await self.resubmit(orphan.owner, bytes(left.request))
        if status != 200:
            await self._give_up(orphan)

    async def _give_up(self, orphan: Record) -> None:
        error = {"code": "server_error", "message": "The server was stopped before the response was done."}
        await self._end(orphan, status="failed", error=error)

    async def _end(self, record: Record, **said: Any) -> Record:
        """Store a new status of a response that does not run here."""
        body = _decode(record.body) | said
        over = make_record(body, record.owner, record.inputs, ())
        await self.store.save(over)
        return over

    async def cancel_elsewhere(self, record: Record) -> Record:
        """Cancel a response that another server runs: that server finds the stored status on its next
        check.
        """
        return await self._end(record, status="cancelled")

    async def _heed(self) -> None:
        """Cancel running responses that were cancelled on another server."""
        for making in [each for each in self.runs.values() if each.request.background]:
            record = await self.store.get("response", making.context.owner, making.id)
            if record is not None and record.status == "cancelled":
                await self.cancel(making)

    async def stop(self) -> None:
        """Cancel what still runs in the background."""
        if self._watching is not None:
            self._watching.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()

    def require_store(self, field: str | None = None) -> Store:
        """Return the store, or raise if there is none; `field` is the request field that needs it."""
        if not self.has_store:
            rest = f"; leave out {field}, or send false." if field else ": nothing is stored here."
            message = f"This server was started without a store{rest}"
            raise BadRequest(message, param=field, code="unsupported_field")
        return self.store

    # The context of a request.

    @asynccontextmanager
    async def context(
        self,
        request: ResponseRequest,
        owner: str,
        size: int,
        offload: Offloader | None = None,
        known: Sequence[StoredItem] | None = None,
    ) -> AsyncIterator[ResponseContext]:
        """Yield the context of a request, holding the lock of its conversation.

        `size` is the size of the request. `known` are the items of the previous response, if the caller has
        them.
        """
        offload = offload or partial(self._workers.run, owner)
        if request.conversation_id is None:
            before = known if known is not None else await self._chain(request.previous_response_id, owner)
            yield await self._context(request, owner, size, offload, before)
            return
        if (trace := current.get()) is not None:
            trace.conversation = request.conversation_id
        async with self._lock(owner, request.conversation_id):
            conversation = await self.conversation(owner, request.conversation_id)
            items = await self.store.all_items(owner, conversation.id, self._most)
            if items is None:
                raise _unknown_conversation(conversation.id)
            yield await self._context(request, owner, size, offload, items, conversation)

    def check_free(self, owner: str, conversation: str) -> None:
        """Raise if a response is running in the conversation: it would miss changes, and could not be
        stored.
        """
        if self._lock(owner, conversation).locked():
            message = "A response is being generated in this conversation; retry when it is done."
            raise Conflict(message, param="conversation_id", code="conversation_locked")

    def _lock(self, owner: str, conversation: str) -> asyncio.Lock:
        return self._locks.setdefault(f"{owner}/{conversation}", asyncio.Lock())

    async def _context(
        self,
        request: ResponseRequest,
        owner: str,
        size: int,
        offload: Offloader,
        stored: Sequence[StoredItem],
        conversation: StoredConversation | None = None,
    ) -> ResponseContext:
        about = await self.resolve_items(request.input, owner, size, offload, stored)
        trails = [item.trail for item in stored if item.trail]
        return ResponseContext(self.store, self.sealer, self._workers, owner, about, conversation, trails)

    async def resolve_items(
        self,
        value: str | Sequence[dict[str, Any]] | None,
        owner: str,
        size: int,
        offload: Offloader,
        before: Sequence[StoredItem] = (),
        field: str = "input",
    ) -> ContextItems:
        """Normalize the items of a request: give each an id and replace references by the items they refer
        to.

        Referenced items come from `before` or from the store.
        """
        inputs = await offload(size, partial(normalise, value, new_id, field, self.limits))
        meant = Counter(references(inputs))
        fields = {item.id: item for item in before if item.id in meant}
        missing = {id_: times for id_, times in meant.items() if id_ not in fields}
        if missing:
            fields |= await self.store.find_items(owner, missing, self._most)
        stored = [item.body for item in before]
        counted = [*((item, 1) for item in before), *((item, meant[id_]) for id_, item in fields.items())]
        held = sum(len(item.body) * times for item, times in counted)
        shown = sum(item.shown * times for item, times in counted)
        check_count(held - shown, self._most.bytes, field, "bytes of stored items")
        size += held
        bodies = {id_: item.body for id_, item in fields.items()}
        return await offload(
            size, partial(resolve_references, stored, inputs, bodies, self.limits, field, size)
        )

    async def _chain(self, id_: str | None, owner: str) -> Sequence[StoredItem]:
        if id_ is None:
            return ()
        try:
            chain = await self.store.chain(owner, id_, LONGEST_CHAIN, self._most)
        except RecordNotFound as missing:
            raise _unknown_previous(missing.id) from None
        if chain.status not in ("completed", "incomplete"):
            message = (
                f"The response '{id_}' is {chain.status}; only completed or incomplete ones can be continued."
            )
            raise BadRequest(message, param="previous_response_id", code="invalid_value")
        return chain.items

    async def conversation(self, owner: str, id_: str) -> StoredConversation:
        stored_conversation = await self.store.conversation(owner, id_)
        if stored_conversation is None:
            raise _unknown_conversation(id_)
        return stored_conversation

    # Running and stored responses.

    def start_background(self, making: "ResponseRun", work: Any) -> asyncio.Task[None]:
        """Run a response in its own task, which outlives the client's connection."""
        self.runs[making.id] = making

        async def run() -> None:
            try:
                await work
            except Exception:
                logger.debug("A background response failed: %s", making.id, exc_info=True)
            finally:
                self.runs.pop(making.id, None)

        task = asyncio.create_task(run(), name=making.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def find_run(self, owner: str, id_: str) -> "ResponseRun | None":
        run = self.runs.get(id_)
        return run if run is not None and run.context.owner == owner else None

    async def cancel(self, making: "ResponseRun") -> None:
        """Cancel a response; returns when it has ended and is stored."""
        for task in self._tasks:
            if task.get_name() == making.id:
                task.cancel()
        await making.wait_ended()

    async def get_record(self, owner: str, id_: str, *, events: bool = False) -> Record:
        record = await self.store.get("response", owner, id_, events=events)
        if record is None:
            raise unknown_response(id_)
        return record

    # The ids of answers, for training.

    async def store_token_ids(
        self,
        owner: str,
        id_: str,
        turns: Sequence[TurnRecord],
        *,
        asked: bool,
        model: str,
        created_at: float,
        previous: str | None = None,
        conversation: str | None = None,
    ) -> None:
        """Store the ids of an answer, if the client or the settings ask for it."""
        if turns and (asked or self.keeps_ids):
            work = partial(
                training.record,
                id_,
                owner,
                created_at,
                model,
                turns,
                previous=previous,
                conversation=conversation,
            )
            size = ID_BYTES * sum(turn.total_ids for turn in turns)
            await self.store.save(await self._workers.run(owner, size, work))

    async def delete_token_ids(self, owner: str, id_: str) -> None:
        """Delete the stored ids and the remembered reasoning of an answer."""
        for model in self.list_models():
            model.planner.reasoning_memory.forget(id_, owner)
        await self.store.delete("trajectory", owner, id_)


def unknown_response(id_: str) -> NotFound:
    return NotFound(f"There is no response '{id_[:128]}'.", param="response_id", code="not_found")


def _unknown_conversation(id_: str) -> NotFound:
    return NotFound(f"There is no conversation '{id_[:128]}'.", param="conversation", code="not_found")


def _unknown_previous(id_: str) -> BadRequest:
    # A 404 would mean a wrong path; clients begin a new chain on a 400 with this code.
    return BadRequest(
        f"Previous response with id '{id_[:128]}' not found: it was never stored, or is no longer.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
