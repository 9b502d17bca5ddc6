"""One response while it is made: turns of the model, calls of tools between them, and one way to an end.

`begin_making` leads from a request and what it continues to a `Making`. Making a conversation short, or
only saying how long it is, takes no more than a function.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from dragoman.api.reply import KEEP_ALIVE, Speller
from dragoman.api.responses.history import (
    PREFIX,
    Compacted,
    compact,
    compaction_events,
    is_triggered,
    to_summarise,
)
from dragoman.api.responses.items import show_items
from dragoman.api.responses.output import ItemPlace, Wire
from dragoman.api.responses.request import ResponseRequest, for_summary, spec
from dragoman.api.responses.response import Life, ResponseObject, describe_response, failure
from dragoman.api.responses.tools import Offer, offer_tools
from dragoman.api.responses.writer import Manner, ResponseWriter
from dragoman.errors import ContextOverflow, DragomanError
from dragoman.limits import check_count
from dragoman.responses.context import Context, Offering, fit_items, new_id, recall
from dragoman.responses.desk import Desk, EventLog, taken_over
from dragoman.turns.queue import MUCH
from dragoman.turns.served import ServedModel
from dragoman.turns.spec import TurnSpec
from dragoman.turns.tool_loop import (
    ClientGone,
    Heard,
    Outcome,
    Outlet,
    Sight,
    Speaker,
    Toolbox,
    ToolLoop,
    Written,
)
from dragoman.turns.turn import Turn, note_terms
from dragoman.types import Event, Traced, Usage

if TYPE_CHECKING:
    from dragoman.responses.desk import Desk


def count_tokens(
    model: ServedModel,
    request: ResponseRequest,
    context: Context,
    items: Sequence[dict[str, Any]],
    offer: Offer,
) -> int:
    """Of the prompt that these items make."""
    asked = spec(request, items, offer, first=True, unseal=context.unseal, modalities=model.card.modalities)
    return len(model.planner.render(request.model, asked.prompts[0])[1])


def weigh_counting(model: ServedModel, size: int) -> int:
    """How much counting is, of a request of so many bytes: pictures are for the engine to measure."""
    return max(size, MUCH + 1) if model.card.modalities else size


async def summarise(
    model: ServedModel, request: ResponseRequest, context: Context, items: Sequence[dict[str, Any]]
) -> tuple[Compacted, Usage]:
    """What the model makes of the items; the oldest are left out where it cannot read them all."""
    plain, nothing = for_summary(request), offer_tools(None, model.limits)
    tell = partial(spec, modalities=model.card.modalities)

    async def planned(some: Sequence[dict[str, Any]]) -> Turn:
        asking = to_summarise(some, new_id("msg_"))
        telling = partial(tell, plain, asking, nothing, first=True, unseal=context.unseal)
        asked = await context.aside(context.size, telling)
        most = model.card.summary_room(context.size)
        asked = replace(asked, sampling=replace(asked.sampling, max_tokens=most))
        return await model.turn(asked, context.owner, context.size)

    async with await fit_items(items, planned) as turn:
        (answer,) = await turn.answers()
    text = answer.text.strip() or answer.reasoning.strip()
    return compact(items, text, context.seal, new_id(PREFIX)), turn.usage


logger = logging.getLogger("dragoman.responses")

R = TypeVar("R")
HEAVY = 64 * 1024
"""Bytes of a response that is not told again and again."""
BEFORE_THE_MODEL = ("mcp_list_tools", "compaction")
"""Items that a response may begin with before the model has said anything."""


class Making:
    """`prepare()` refuses what can be refused; `make(outlet)` runs to the end, whatever that is.

    To the tool loop it is what answers: it plans turns out of items, and writes items of what comes.
    """

    def __init__(
        self,
        desk: "Desk",
        model: ServedModel,
        request: ResponseRequest,
        context: Context,
        offering: Offering,
        manner: Manner,
        response: ResponseObject,
    ) -> None:
        self.request = request
        self.context = context
        self.response = response
        self.log: EventLog | None = EventLog() if response.fields["store"] else None
        self.generates = True
        """If not, the request is a rehearsal: everything is checked, and nothing is asked of the model."""
        self.reason: Callable[[], Exception | None] = lambda: None
        """Why the work was ended from outside; then it has failed, rather than being cancelled."""
        self._desk = desk
        self._model = model
        self._wire = Wire(obfuscates=request.wants_obfuscation)
        self._writer = ResponseWriter(self._wire, manner)
        self._offering = offering
        most = model.planner.defaults(request.model).most_tokens(request.max_output_tokens)
        self._loop = ToolLoop(offering.toolbox, most)
        self._triggered = is_triggered(context.inputs)
        self._first: Turn | None = None
        self._said = context.all
        """What the model is told, before what it says itself."""
        self._since = 0
        """The first item of the answer that is not in `_said`."""
        self._outlet: Outlet
        self._closing: asyncio.Task[None] | None = None
        self._ended = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def facts(self) -> dict[str, Any]:
        """What the access log and the metrics say of it."""
        return self._loop.facts

    @facts.setter
    def facts(self, facts: dict[str, Any]) -> None:
        self._loop.facts = facts
        if self._first is not None:
            note_terms(facts, self._first)

    @property
    def _turns(self) -> list[Traced]:
        return self._loop.traced

    async def prepare(self, *, streams: bool) -> None:
        """What cannot be done is refused before anything is answered.

        The first turn is planned here, if all that the model is to be told is known by now. It is not where
        tools must be listed first, nor in a rehearsal, in which the user may have said nothing yet that a
        template could ask for: then the turn is checked, as far as it is known.
        """
        self._offering.check()
        unknown = self._offering.must_ask or self._triggered
        if unknown or not self.generates:
            # A choice may speak of tools that are not known yet.
            request = replace(self.request, tool_choice=None) if unknown else self.request
            asked = await self._asked(request, self._items())
            await self._model.check(asked, self.context.owner, self.context.size)
            return
        try:
            self._first = await self.plan()
        except ContextOverflow:
            # Codex makes the conversation shorter if a stream says so, and gives up on a status of 400: a
            # stream is let begin, and fails where the turn is planned again.
            if not streams and not self._may_compact:
                raise

    async def make(self, outlet: Outlet) -> None:
        self._outlet = outlet = outlet if self.log is None else _Logged(outlet, self.log)
        try:
            opening = partial(self.response.opening, self._wire)
            await outlet.write(await self.context.aside(self.response.weight, opening))
            if self.response.status == "queued":
                self.response.status = "in_progress"
                await outlet.write(self.response.event(self._wire, "in_progress"))
            if self.generates:
                async with self._offering.toolbox:
                    await self._answer()
            await self._finish()
        except (asyncio.CancelledError, ClientGone):
            error = self.reason()
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

    async def ended(self) -> None:
        """Returns when the response has come to its end, whatever that was."""
        await asyncio.shield(self._ended)

    async def _answer(self) -> None:
        if self._may_compact:
            await self._compact()
        if self._triggered:
            return
        if self._offering.must_ask:
            await self._offering.ask(self._writer, self._outlet, self)
            await self._call_approved()
        await self._loop.run(self, self._outlet, self._first)

    async def _call_approved(self) -> None:
        await self._offering.open_approved(self._writer, self._outlet)
        calls = [call.asked for call in self._writer.for_server]
        if calls:
            await self.tell(await self._outlet.wait(self._offering.toolbox.call(calls), self))

    # What the loop asks

    async def plan(self) -> Turn:
        items, fits = self._items(), self.request.truncation == "auto"
        return await (fit_items(items, self._planned) if fits else self._planned(items))

    async def _planned(self, items: Sequence[dict[str, Any]]) -> Turn:
        asked = await self._asked(self.request, items)
        asked = replace(asked, room=self._loop.room)
        return await self._model.turn(asked, self.context.owner, self.context.size, self.id)

    async def _asked(self, request: ResponseRequest, items: Sequence[dict[str, Any]]) -> TurnSpec:
        first = all(item["type"] in BEFORE_THE_MODEL for item in self._writer.items)
        tell = partial(spec, first=first, unseal=self.context.unseal, modalities=self._model.card.modalities)
        return await self.context.aside(
            self.context.size, partial(tell, request, items, self._offering.offer)
        )

    def _items(self) -> list[dict[str, Any]]:
        """All that was said so far."""
        return [*self._said, *self._writer.items[self._since :]]

    async def hear(self, turn: Turn) -> Heard:
        writer = self._writer
        writer.begin_turn()
        writer.refs = self._offering.offer.refs
        writer.needs_approval = self._offering.needs_approval
        await self._outlet.run(turn, self)
        if writer.error is not None:
            raise writer.error
        return Heard(writer.finish, [call.asked for call in writer.for_server], writer.for_client)

    async def tell(self, outcomes: Sequence[Outcome]) -> None:
        for call, outcome in zip(self._writer.for_server, outcomes, strict=True):
            written, item = call.done(outcome)
            self._writer.finished(call.item.place, item)
            await self._outlet.write(written)
        if self._offering.toolbox.spent:
            self._offering.take_back()

    # Compaction

    @property
    def _may_compact(self) -> bool:
        return self.request.compact_threshold is not None or self._triggered

    async def _compact(self) -> None:
        """What was said becomes a summary, if it is longer than the client wants, or the client says so."""
        if not self._triggered and await self._count() <= (self.request.compact_threshold or 0):
            return
        summing_up = summarise(self._model, self.request, self.context, self._said)
        made, used = await self._outlet.wait(summing_up, self)
        self._loop.used += used
        place = ItemPlace(self._wire, self._writer.place(PREFIX).index, made.item["id"])
        self._writer.finished(place, made.item)
        await self._outlet.write(compaction_events(place, made.item))
        self._first, self._said, self._since = None, made.items, len(self._writer.items)

    async def _count(self) -> int:
        """Tokens of the prompt. One that was planned is counted; it may be the shorter for truncation."""
        if self._first is not None and self.request.truncation != "auto":
            return len(self._first.jobs[0].prompt)
        model, offer = self._model, self._offering.offer
        counting = partial(count_tokens, model, self.request, self.context, self._said, offer)
        return await self.context.aside(weigh_counting(model, self.context.size), counting)

    # Events

    def write(self, events: Sequence[Event]) -> Written:
        return self._logged(self._writer.write(events))

    def idle(self) -> Written:
        """Some clients count only data as a sign of life, not comments; but much is not said for it."""
        if self.response.weight > HEAVY:
            return KEEP_ALIVE
        return self._logged(self.response.event(self._wire, "in_progress"))

    def _logged(self, data: Written) -> Written:
        if self.log is not None:
            self.log.add(data)
        return data

    # Ends

    async def _finish(self) -> None:
        short = self._writer.finish == "length" or (self._loop.room == 0 and bool(self._writer.for_server))
        await self._end("incomplete" if short else "completed")

    async def _end(self, status: Life, error: Exception | None = None) -> None:
        """The first end is the end, and is not cut short. Only what could not be stored fails after all."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(status, error))
        await asyncio.shield(self._closing)

    async def _close(self, status: Life, error: Exception | None) -> None:
        """What was made is stored before anybody is told that it is, or finds it so."""
        if left := self._writer.abandon():
            with suppress(ClientGone):
                await self._outlet.write(left)
        number, response = self._wire.number, self._closed(status, error)
        ending, events = await self.context.aside(self.amount, partial(self._written, response))
        self.facts.update(self._loop.used.facts())
        if response.error is not None:
            self.facts["error"] = response.error["message"]
        try:
            # The conversation goes on with the last of these, so nothing may fail after it.
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
        """How much there is to write. What was written before is only copied, which is quick."""
        written = 0 if self.log is None else self.log.size
        return self.response.weight + written // 16 + sum(turn.count for turn in self._turns)

    def _written(self, response: ResponseObject) -> tuple[bytes, bytes | None]:
        """The last events, and all of them."""
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
        """What was sampled, for those who train on it."""
        await self._desk.keep_ids(
            self.context.owner,
            self.id,
            self._turns,
            asked=self.log is not None and bool(self.request.return_token_ids),
            model=self.response.fields["model"],
            created_at=self.response.fields["created_at"],
            previous=self.request.previous_response_id,
            conversation=self.request.conversation_id,
        )


class _Logged:
    """An outlet that has a log of what goes out. What a speaker says of turns, it logs itself."""

    def __init__(self, outlet: Outlet, log: EventLog) -> None:
        self._outlet = outlet
        self._log = log

    async def write(self, data: Written) -> None:
        self._log.add(data)
        await self._outlet.write(data)

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        await self._outlet.run(turn, speaker)

    async def wait(self, work: Awaitable[R], speaker: Speaker) -> R:
        return await self._outlet.wait(work, speaker)


# From a request and what it continues to a response that is about to be made.


REPEATED = ("tools", "tool_choice", "text")
"""Fields of a request that are told again, as they came, with each event of a response's life."""


async def begin_making(desk: Desk, model: ServedModel, request: ResponseRequest, context: Context) -> Making:
    """Raises for what is wrong with the request itself."""
    store = _keeps(desk, request)
    limits, again = model.limits, taken_over.get()

    def work() -> tuple[Offer, ResponseObject]:
        recall(model.planner.trails, context.trails, context.owner)
        name = model.planner.name(request.model)
        id_, now = (again.id, again.created_at) if again else (new_id("resp_"), int(time.time()))
        told = partial(describe_response, request, model.planner.defaults(request.model))
        made = told(id_=id_, created_at=now, model=name, store=store, size=context.size)
        for field in REPEATED:
            size = memoryview(made.fields[field]).nbytes
            check_count(size, 2 * limits.tool_bytes, field, "bytes, which events repeat,")
        return offer_tools(request.tools, limits, context.all), made

    offer, response = await context.aside(context.size + sum(map(len, context.trails)), work)
    if offer.hidden:
        logger.info("Tools that this server does not have are left out: %s", ", ".join(offer.hidden))
    most = min(request.max_tool_calls or limits.tool_calls, limits.tool_calls)
    sight = Sight(model, context.owner, show_items(context.all).media)
    toolbox = Toolbox(desk.mcp, [declared.wish for declared in offer.mcp], most, sight)
    offering = Offering(toolbox, offer, context.all)
    return Making(desk, model, request, context, offering, _manner(model, request, context), response)


def _manner(model: ServedModel, request: ResponseRequest, context: Context) -> Manner:
    return Manner(
        new_id=new_id,
        summary=request.wants_summary,
        seal=context.seal if request.wants_encrypted_reasoning else None,
        speller=Speller(model.pieces) if request.logprobs is not None else None,
        token_ids=bool(request.return_token_ids),
    )


def _keeps(desk: Desk, request: ResponseRequest) -> bool:
    """Responses are stored unless somebody does not want it."""
    for field in ("store", "background"):
        if getattr(request, field):
            desk.required(field)
    return request.stored and desk.keeps
