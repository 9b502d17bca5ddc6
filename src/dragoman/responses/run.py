"""One running response: turns of the model, tool calls between them, and one exit path.

`start_response` creates a `ResponseRun` from a request and its context. Compaction and token counting need
only a function.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from dragoman.api.reply import KEEP_ALIVE, LogprobSerializer
from dragoman.api.responses.event_encoder import ItemEventEncoder, ResponseEventEncoder
from dragoman.api.responses.history import (
    PREFIX,
    CompactionResult,
    compact,
    compaction_events,
    is_triggered,
    with_summary_request,
)
from dragoman.api.responses.items import show_items
from dragoman.api.responses.request import ResponseRequest, for_summary, spec
from dragoman.api.responses.response import Life, ResponseObject, describe_response, failure
from dragoman.api.responses.tools import ModelTools, offer_tools
from dragoman.api.responses.writer import ItemOptions, ResponseWriter
from dragoman.errors import ContextOverflow, DragomanError
from dragoman.limits import check_count
from dragoman.responses.context import ResponseContext, ToolDiscovery, fit_items, new_id, restore_turns
from dragoman.responses.manager import EventLog, ResponseManager, current_takeover
from dragoman.turns.queue import OFFLOAD_BYTES
from dragoman.turns.served_model import ServedModel
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import (
    CallOutcome,
    ClientGone,
    ClientOutput,
    EventEncoder,
    McpToolset,
    OutputBytes,
    ResultMediaFilter,
    ToolLoop,
    TurnResult,
)
from dragoman.turns.turn import Turn, log_terms
from dragoman.types import Event, TurnRecord, Usage

if TYPE_CHECKING:
    from dragoman.responses.manager import ResponseManager


def count_tokens(
    model: ServedModel,
    request: ResponseRequest,
    context: ResponseContext,
    items: Sequence[dict[str, Any]],
    offer: ModelTools,
) -> int:
    """Count the tokens of the prompt of these items."""
    asked = spec(request, items, offer, first=True, unseal=context.unseal, modalities=model.card.modalities)
    return len(model.planner.render(request.model, asked.prompts[0])[1])


def counting_cost(model: ServedModel, size: int) -> int:
    """Estimate the cost of counting, in bytes of request: media make it slow, because the engine measures
    them.
    """
    return max(size, OFFLOAD_BYTES + 1) if model.card.modalities else size


async def summarise(
    model: ServedModel, request: ResponseRequest, context: ResponseContext, items: Sequence[dict[str, Any]]
) -> tuple[CompactionResult, Usage]:
    """Have the model summarize the items; the oldest are left out if it cannot read them all."""
    plain, nothing = for_summary(request), offer_tools(None, model.limits)
    tell = partial(spec, modalities=model.card.modalities)

    async def planned(some: Sequence[dict[str, Any]]) -> Turn:
        asking = with_summary_request(some, new_id("msg_"))
        telling = partial(tell, plain, asking, nothing, first=True, unseal=context.unseal)
        asked = await context.offload(context.size, telling)
        most = model.card.summary_room(context.size)
        asked = replace(asked, sampling=replace(asked.sampling, max_tokens=most))
        return await model.create_turn(asked, context.owner, context.size)

    async with await fit_items(items, planned) as turn:
        (answer,) = await turn.answers()
    text = answer.text.strip() or answer.reasoning.strip()
    return compact(items, text, context.seal, new_id(PREFIX)), turn.usage


logger = logging.getLogger("dragoman.responses")

R = TypeVar("R")
HEAVY = 64 * 1024
"""Above this many bytes, a response is not repeated as a keep-alive."""
BEFORE_THE_MODEL = ("mcp_list_tools", "compaction")
"""Items of a response that may come before the model's first output."""


class ResponseRun:
    """One response. `prepare()` rejects what can be rejected; `make(outlet)` runs it to its end.

    It is the `ToolLoopDelegate` of the tool loop: it plans turns from items, and writes items from events.
    """

    def __init__(
        self,
        desk: "ResponseManager",
        model: ServedModel,
        request: ResponseRequest,
        context: ResponseContext,
        offering: ToolDiscovery,
        manner: ItemOptions,
        response: ResponseObject,
    ) -> None:
        self.request = request
        self.context = context
        self.response = response
        self.log: EventLog | None = EventLog() if response.fields["store"] else None
        self.generates = True
        """If False, the request is a dry run: everything is checked, and nothing is generated."""
        self.abort_reason: Callable[[], Exception | None] = lambda: None
        """The reason for which the work was ended from outside; with one, the response has failed, else it
        was cancelled.
        """
        self._desk = desk
        self._model = model
        self._wire = ResponseEventEncoder(obfuscates=request.wants_obfuscation)
        self._writer = ResponseWriter(self._wire, manner)
        self._offering = offering
        most = model.planner.defaults(request.model).max_total_tokens(request.max_output_tokens)
        self._loop = ToolLoop(offering.toolbox, most)
        self._triggered = is_triggered(context.inputs)
        self._first: Turn | None = None
        self._said = context.all
        """The input items of the model, before its own output."""
        self._since = 0
        """Index of the first output item that is not in `_said`."""
        self._outlet: ClientOutput
        self._closing: asyncio.Task[None] | None = None
        self._ended = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def log_fields(self) -> dict[str, Any]:
        """The fields for access log and metrics."""
        return self._loop.log_fields

    @log_fields.setter
    def log_fields(self, facts: dict[str, Any]) -> None:
        self._loop.log_fields = facts
        if self._first is not None:
            log_terms(facts, self._first)

    @property
    def _turns(self) -> list[TurnRecord]:
        return self._loop.records

    async def prepare(self, *, streams: bool) -> None:
        """Reject before the reply begins what cannot be done.

        The first turn is planned here, if all its input is known by now. That is not so if tools must be
        listed first, or in a dry run, whose conversation may not have a user message yet: then the turn is
        only checked as far as it is known.
        """
        self._offering.check()
        unknown = self._offering.needs_servers or self._triggered
        if unknown or not self.generates:
            # `tool_choice` may name tools that are not listed yet.
            request = replace(self.request, tool_choice=None) if unknown else self.request
            asked = await self._asked(request, self._items())
            await self._model.check(asked, self.context.owner, self.context.size)
            return
        try:
            self._first = await self.plan()
        except ContextOverflow:
            # Codex compacts the conversation if a stream fails with this error, and gives up on a 400: a
            # stream may begin, and fails when the turn is planned again.
            if not streams and not self._may_compact:
                raise

    async def run(self, outlet: ClientOutput) -> None:
        self._outlet = outlet = outlet if self.log is None else _LoggedOutput(outlet, self.log)
        try:
            opening = partial(self.response.opening, self._wire)
            await outlet.write(await self.context.offload(self.response.weight, opening))
            if self.response.status == "queued":
                self.response.status = "in_progress"
                await outlet.write(self.response.event(self._wire, "in_progress"))
            if self.generates:
                async with self._offering.toolbox:
                    await self._answer()
            await self._finish()
        except (asyncio.CancelledError, ClientGone):
            error = self.abort_reason()
            await self._end("failed" if error else "cancelled", error)
            raise
        except Exception as error:
            if not isinstance(error, DragomanError):
                logger.exception("A response failed: %s", self.id)
            await self._end("failed", error)
            raise
        finally:
            if self.log is not None:
                self.log.close()
            if not self._ended.done():
                self._ended.set_result(None)

    async def wait_ended(self) -> None:
        """Wait until the response has ended, however it ended."""
        await asyncio.shield(self._ended)

    async def _answer(self) -> None:
        if self._may_compact:
            await self._compact()
        if self._triggered:
            return
        if self._offering.needs_servers:
            await self._offering.list_tools(self._writer, self._outlet, self)
            await self._call_approved()
        await self._loop.run(self, self._outlet, self._first)

    async def _call_approved(self) -> None:
        await self._offering.open_approved(self._writer, self._outlet)
        calls = [call.request for call in self._writer.server_calls]
        if calls:
            await self.add_results(await self._outlet.wait(self._offering.toolbox.call(calls), self))

    # The loop's callbacks.

    async def plan(self) -> Turn:
        items, fits = self._items(), self.request.truncation == "auto"
        return await (fit_items(items, self._planned) if fits else self._planned(items))

    async def _planned(self, items: Sequence[dict[str, Any]]) -> Turn:
        asked = await self._asked(self.request, items)
        asked = replace(asked, remaining_tokens=self._loop.remaining_tokens)
        return await self._model.create_turn(asked, self.context.owner, self.context.size, self.id)

    async def _asked(self, request: ResponseRequest, items: Sequence[dict[str, Any]]) -> TurnSpec:
        first = all(item["type"] in BEFORE_THE_MODEL for item in self._writer.items)
        tell = partial(spec, first=first, unseal=self.context.unseal, modalities=self._model.card.modalities)
        return await self.context.offload(
            self.context.size, partial(tell, request, items, self._offering.offer)
        )

    def _items(self) -> list[dict[str, Any]]:
        """All items so far."""
        return [*self._said, *self._writer.items[self._since :]]

    async def run_turn(self, turn: Turn) -> TurnResult:
        writer = self._writer
        writer.begin_turn()
        writer.refs = self._offering.offer.refs
        writer.needs_approval = self._offering.needs_approval
        await self._outlet.run(turn, self)
        if writer.error is not None:
            raise writer.error
        return TurnResult(writer.finish, [call.request for call in writer.server_calls], writer.for_client)

    async def add_results(self, outcomes: Sequence[CallOutcome]) -> None:
        for call, outcome in zip(self._writer.server_calls, outcomes, strict=True):
            written, item = call.complete(outcome)
            self._writer.add_item(call.item.item_encoder, item)
            await self._outlet.write(written)
        if self._offering.toolbox.is_exhausted:
            self._offering.drop_mcp_tools()

    # Compaction

    @property
    def _may_compact(self) -> bool:
        return self.request.compact_threshold is not None or self._triggered

    async def _compact(self) -> None:
        """Replace the items by a summary, if they exceed the client's threshold, or the client requests
        it.
        """
        if not self._triggered and await self._count() <= (self.request.compact_threshold or 0):
            return
        summing_up = summarise(self._model, self.request, self.context, self._said)
        result, used = await self._outlet.wait(summing_up, self)
        self._loop.used += used
        encoder = ItemEventEncoder(
            self._wire, self._writer.next_item_encoder(PREFIX).index, result.item["id"]
        )
        self._writer.add_item(encoder, result.item)
        await self._outlet.write(compaction_events(encoder, result.item))
        self._first, self._said, self._since = None, result.items, len(self._writer.items)

    async def _count(self) -> int:
        """Count the tokens of the prompt. A planned prompt is counted, unless truncation may have shortened
        it.
        """
        if self._first is not None and self.request.truncation != "auto":
            return len(self._first.jobs[0].prompt)
        model, offer = self._model, self._offering.offer
        counting = partial(count_tokens, model, self.request, self.context, self._said, offer)
        return await self.context.offload(counting_cost(model, self.context.size), counting)

    # Events

    def write(self, events: Sequence[Event]) -> OutputBytes:
        return self._logged(self._writer.write(events))

    def idle(self) -> OutputBytes:
        """Return a keep-alive. Some clients accept only data, not comments, but large responses are not
        repeated.
        """
        if self.response.weight > HEAVY:
            return KEEP_ALIVE
        return self._logged(self.response.event(self._wire, "in_progress"))

    def _logged(self, data: OutputBytes) -> OutputBytes:
        if self.log is not None:
            self.log.add(data)
        return data

    # Ends

    async def _finish(self) -> None:
        short = self._writer.finish == "length" or (
            self._loop.remaining_tokens == 0 and bool(self._writer.server_calls)
        )
        await self._end("incomplete" if short else "completed")

    async def _end(self, status: Life, error: Exception | None = None) -> None:
        """End the response. The first call decides, and is not interrupted; only a failure to store can
        change the status.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(status, error))
        await asyncio.shield(self._closing)

    async def _close(self, status: Life, error: Exception | None) -> None:
        """Store the result before any client is told of it, or can find it."""
        if left := self._writer.abandon():
            with suppress(ClientGone):
                await self._outlet.write(left)
        number, response = self._wire.number, self._closed(status, error)
        ending, events = await self.context.offload(self.amount, partial(self._written, response))
        self.log_fields.update(self._loop.used.log_fields())
        if response.error is not None:
            self.log_fields["error"] = response.error["message"]
        try:
            # Saving the conversation comes last, so nothing may fail after it.
            await self._keep_ids()
            await self.context.save(response, events, self._turns)
        except DragomanError as refused:
            if error is None and status != "cancelled":
                self._closing, self._wire.number = None, number
                raise
            logger.error("The end of a response was not stored: %s: %s", self.id, refused.message)
        self.response = response
        with suppress(ClientGone):
            await self._outlet.write(ending)

    @property
    def amount(self) -> int:
        """Estimate how much is written at the end. Earlier output is only copied, which is quick."""
        written = 0 if self.log is None else self.log.size
        return self.response.weight + written // 16 + sum(turn.total_ids for turn in self._turns)

    def _written(self, response: ResponseObject) -> tuple[bytes, bytes | None]:
        """Return the last events, and all events."""
        ending = response.ending(self._wire)
        return ending, None if self.log is None else self.log.whole(ending)

    def _closed(self, status: Life, error: Exception | None) -> ResponseObject:
        return replace(
            self.response,
            status=status,
            usage=self._loop.used,
            output=self._writer.items,
            error=failure(error) if error else None,
            incomplete="max_output_tokens" if status == "incomplete" else None,
            turns=self._turns if self.request.return_token_ids else None,
            weight_version=self._turns[-1].weight_version if self._turns else None,
            completed_at=int(time.time()) if status == "completed" else None,
        )

    async def _keep_ids(self) -> None:
        """Store the sampled ids, for training."""
        await self._desk.store_token_ids(
            self.context.owner,
            self.id,
            self._turns,
            asked=self.log is not None and bool(self.request.return_token_ids),
            model=self.response.fields["model"],
            created_at=self.response.fields["created_at"],
            previous=self.request.previous_response_id,
            conversation=self.request.conversation_id,
        )


class _LoggedOutput:
    """An output that also logs what is written. Events of turns are logged by the encoder."""

    def __init__(self, outlet: ClientOutput, log: EventLog) -> None:
        self._outlet = outlet
        self._log = log

    async def write(self, data: OutputBytes) -> None:
        self._log.add(data)
        await self._outlet.write(data)

    async def run(self, turn: Turn, speaker: EventEncoder) -> None:
        await self._outlet.run(turn, speaker)

    async def wait(self, work: Awaitable[R], speaker: EventEncoder) -> R:
        return await self._outlet.wait(work, speaker)


# From a request and its context to a `ResponseRun`.


REPEATED = ("tools", "tool_choice", "text")
"""Request fields that the events of a response repeat."""


async def start_response(
    desk: ResponseManager, model: ServedModel, request: ResponseRequest, context: ResponseContext
) -> ResponseRun:
    """Create the response; raises if the request itself is not valid."""
    store = _keeps(desk, request)
    limits, again = model.limits, current_takeover.get()

    def work() -> tuple[ModelTools, ResponseObject]:
        restore_turns(model.planner.turn_cache, context.stored_turns, context.owner)
        name = model.planner.name(request.model)
        id_, now = (again.id, again.created_at) if again else (new_id("resp_"), int(time.time()))
        result = partial(describe_response, request, model.planner.defaults(request.model))
        response_object = result(id_=id_, created_at=now, model=name, store=store, size=context.size)
        for field in REPEATED:
            size = memoryview(response_object.fields[field]).nbytes
            check_count(size, 2 * limits.tool_bytes, field, "bytes, which events repeat,")
        return offer_tools(request.tools, limits, context.all), response_object

    offer, response = await context.offload(context.size + sum(map(len, context.stored_turns)), work)
    if offer.hidden:
        logger.info("Tools not supported by this server are left out: %s", ", ".join(offer.hidden))
    most = min(request.max_tool_calls or limits.tool_calls, limits.tool_calls)
    sight = ResultMediaFilter(model, context.owner, show_items(context.all).media)
    toolbox = McpToolset(desk.mcp, [declared.wish for declared in offer.mcp], most, sight)
    offering = ToolDiscovery(toolbox, offer, context.all)
    return ResponseRun(desk, model, request, context, offering, _manner(model, request, context), response)


def _manner(model: ServedModel, request: ResponseRequest, context: ResponseContext) -> ItemOptions:
    return ItemOptions(
        new_id=new_id,
        summary=request.wants_summary,
        seal=context.seal if request.wants_encrypted_reasoning else None,
        speller=LogprobSerializer(model.pieces) if request.logprobs is not None else None,
        token_ids=bool(request.return_token_ids),
    )


def _keeps(desk: ResponseManager, request: ResponseRequest) -> bool:
    """Whether to store the response, which is the default; raises if the request needs a store and there is
    none.
    """
    for field in ("store", "background"):
        if getattr(request, field):
            desk.require_store(field)
    return request.stored and desk.has_store
