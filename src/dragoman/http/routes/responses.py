"""Routes of responses: create, retrieve, cancel and delete them, and compact a conversation.

A response is created while the client waits, streamed, or created in the background.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from functools import partial

import msgspec

from dragoman.api.reply import KEEP_ALIVE
from dragoman.api.responses import request as requests
from dragoman.api.responses.request import check_include
from dragoman.api.responses.response import compaction_body
from dragoman.api.responses.tools import offer_tools
from dragoman.engines.protocol import check_has_ids
from dragoman.errors import BadRequest
from dragoman.http.admission import Visit
from dragoman.http.exchange import Exchange, unless_gone
from dragoman.http.host import Host, ModelHost
from dragoman.http.query_string import QueryString
from dragoman.http.run_turn import Sse
from dragoman.responses.context import new_id
from dragoman.responses.desk import is_underway, place_of, unknown_response, write_underway
from dragoman.responses.making import Making, begin_making, count_tokens, summarise, weigh_counting
from dragoman.turns.tool_loop import ClientGone, Quiet

MADE = b"x-dragoman-response"
"""Header with the id of the response, for proxies that do not parse the body."""
UNFINISHED = frozenset({"queued", "in_progress"})
LOOK_ELSEWHERE_S = 0.5
"""Seconds between checks of whether a response of another server has ended."""


async def create(shared: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(
        partial(requests.read, limits=shared.limits, ignored=exchange.ignored)
    )
    if not request.background:
        exchange.visit.within(request.timeout)
    host = await shared.serving(request.model, exchange, streams=bool(request.stream))
    exchange.facts["model"] = host.model.planner.name(request.model)
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(
            host.desk.context(request, exchange.owner, size, exchange.aside)
        )
        making = await begin_making(host.desk, host.model, request, context)
        exchange.head[MADE] = making.id.encode()
        await making.prepare(streams=bool(request.stream))
        if request.background:
            if held := exchange.hand_on():
                stack.callback(held.end)
            stack.callback(exchange.hand_model_on())
            await in_background(host, exchange.visit, making, stack)
            if request.stream:
                await follow(exchange, making, host.settings.keep_alive)
            else:
                await exchange.json(making.response.body(), size=making.amount)
        else:
            await in_foreground(host, exchange, making)


async def in_foreground(host: ModelHost, exchange: Exchange, making: Making) -> None:
    """Create a response while the client waits; a disconnect ends the work."""
    making.facts, making.reason = exchange.facts, lambda: exchange.visit.error
    if not making.request.stream:
        await unless_gone(exchange, making.make(Quiet()))
        await exchange.json(making.response.body(), size=making.amount)
        return
    outlet = Sse(exchange, host.pump, host.settings.keep_alive)
    try:
        await unless_gone(exchange, making.make(outlet))
    except ClientGone:
        raise
    except asyncio.CancelledError:
        await exchange.end_stream()
        raise
    except Exception:
        # The stream has already reported the error, and the log has its text.
        pass
    await exchange.end_stream()


async def in_background(host: ModelHost, visit: Visit, making: Making, stack: AsyncExitStack) -> None:
    """Create a response in the background: stored before the client gets a reply, and independent of the
    client."""
    making.response.status = "queued"
    await making.context.save(making.response, write_underway(making.request))
    making_it = stack.pop_all()
    visit = visit.handed_on()
    making.reason = lambda: visit.error
    visit.within(making.request.timeout)

    async def work() -> None:
        async with making_it:
            with host.journal.work("BACKGROUND", "/v1/responses") as making.facts, visit:
                making.facts["request_id"] = making.id
                await making.make(Quiet())

    host.desk.run(making, work())


async def follow(exchange: Exchange, making: Making, keep_alive: float, after: int = -1) -> None:
    """Stream a response that another task creates; that task continues if this client disconnects."""
    assert making.log is not None
    log = making.log

    async def pass_on() -> None:
        await exchange.start_stream(b"")
        async for events in log.follow(after, keep_alive):
            await exchange.write_stored(events)
        await exchange.end_stream()

    await unless_gone(exchange, pass_on())


async def compact(shared: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(
        partial(requests.read, limits=shared.limits, ignored=exchange.ignored)
    )
    if request.model is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    exchange.visit.within(request.timeout)
    host = await shared.serving(request.model, exchange)
    async with host.desk.context(request, exchange.owner, size, exchange.aside) as context:
        made, used = await unless_gone(exchange, summarise(host.model, request, context, context.all))
    exchange.facts["model"] = host.model.planner.name(request.model)
    exchange.facts.update(used.facts())
    body = compaction_body(new_id("resp_"), int(time.time()), made.items, used)
    await exchange.json(body, size=context.size)


async def input_tokens(shared: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(
        partial(requests.read, limits=shared.limits, ignored=exchange.ignored)
    )
    host = await shared.serving(request.model, exchange)
    check_has_ids(host.card, "this route")
    host.model.planner.adapter(request.model)
    async with host.desk.context(request, exchange.owner, size, exchange.aside) as context:
        offer = await exchange.aside(context.size, partial(offer_tools, request.tools, host.limits))
        counting = partial(count_tokens, host.model, request, context, context.all, offer)
        count = await exchange.aside(weigh_counting(host.model, context.size), counting)
    await exchange.json({"object": "response.input_tokens", "input_tokens": count})


# Responses that exist or are created in the background.


class _Manner(msgspec.Struct):
    background: bool


_decode = msgspec.json.Decoder(_Manner).decode
FAR = 2**53


async def retrieve(host: Host, exchange: Exchange) -> None:
    """Reply with the object, or with `stream=true` its events after `starting_after`."""
    id_, query = exchange.path_id, QueryString(exchange)
    check_include(query.texts("include"))
    after = query.integer("starting_after", -1, 0, FAR)
    streams = query.flag("stream")
    if after >= 0 and not streams:
        raise BadRequest(
            "starting_after needs stream=true; send both or none.",
            param="starting_after",
            code="invalid_value",
        )
    making = host.desk.making(exchange.owner, id_)
    if making is not None:
        if streams:
            await follow(exchange, making, host.settings.keep_alive, after)
        else:
            await exchange.json(making.response.body(), size=making.amount)
        return
    record = await exchange.loaded(host.desk.stored, exchange.owner, id_)
    if not streams:
        await exchange.reply(record.body, b"application/json")
        return
    if record.status in UNFINISHED:
        await exchange.start_stream(b"")
        await unless_gone(exchange, _wait_elsewhere(host, exchange, id_))
        making = host.desk.making(exchange.owner, id_)
    if making is not None:
        await follow(exchange, making, host.settings.keep_alive, after)
    else:
        await exchange.stream_stored(*await exchange.loaded(_events, host, exchange, id_, after + 1))


async def _wait_elsewhere(host: Host, exchange: Exchange, id_: str) -> None:
    """Wait until the response of another server has ended, or continues here because that server is gone."""
    said = time.monotonic()
    while host.desk.making(exchange.owner, id_) is None:
        if (await host.desk.stored(exchange.owner, id_)).status not in UNFINISHED:
            return
        await asyncio.sleep(LOOK_ELSEWHERE_S)
        if time.monotonic() > said + host.settings.keep_alive:
            said = time.monotonic()
            await exchange.write(KEEP_ALIVE)


async def _events(host: Host, exchange: Exchange, id_: str, number: int) -> tuple[bytes, int]:
    """Return the events of a response, and the offset of the one with this number."""
    events = (await host.desk.stored(exchange.owner, id_, events=True)).events
    if not events or is_underway(events):
        message = "The events of this response were not stored; leave out stream to get the full response."
        raise BadRequest(message, param="stream", code="invalid_value")
    return events, await exchange.aside(len(events), partial(place_of, events, number))


async def delete(host: Host, exchange: Exchange) -> None:
    """Delete a response at once; a running one is cancelled first."""
    id_ = exchange.path_id
    making = host.desk.making(exchange.owner, id_)
    if making is not None:
        await host.desk.cancel(making)
    await host.desk.forget_ids(exchange.owner, id_)
    if not await host.desk.store.delete("response", exchange.owner, id_):
        raise unknown_response(id_)
    await exchange.json({"id": id_, "object": "response", "deleted": True})


async def cancel(host: Host, exchange: Exchange) -> None:
    id_ = exchange.path_id
    making = host.desk.making(exchange.owner, id_)
    if making is not None:
        await host.desk.cancel(making)
        await exchange.json(making.response.body(), size=making.amount)
        return
    record = await exchange.loaded(host.desk.stored, exchange.owner, id_)
    if not _decode(record.body).background:
        message = "Cannot cancel this response; only background responses can be cancelled."
        raise BadRequest(message, param="response_id", code="invalid_value")
    if record.status in UNFINISHED:
        record = await host.desk.cancel_elsewhere(record)
    # Cancelling a response that has already ended changes nothing.
    await exchange.reply(record.body, b"application/json")


async def input_items(host: Host, exchange: Exchange) -> None:
    id_, query = exchange.path_id, QueryString(exchange)
    check_include(query.texts("include"))
    page = await exchange.loaded(
        host.desk.store.inputs,
        "response",
        exchange.owner,
        id_,
        **query.cut("desc"),
    )
    if page is None:
        raise unknown_response(id_)
    await exchange.page(page.data, page.has_more)
