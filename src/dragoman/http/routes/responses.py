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
from dragoman.engines.protocol import require_tokenizer
from dragoman.errors import BadRequest
from dragoman.http.admission import ActiveRequest
from dragoman.http.app_state import AppState, ModelServing
from dragoman.http.exchange import Exchange, cancel_on_disconnect
from dragoman.http.query_string import QueryString
from dragoman.http.run_turn import SseOutput
from dragoman.responses.context import new_id
from dragoman.responses.manager import event_offset, is_underway, unknown_response, write_underway
from dragoman.responses.run import ResponseRun, count_tokens, counting_cost, start_response, summarise
from dragoman.turns.tool_loop import ClientGone, NullOutput

RESPONSE_HEADER = b"x-dragoman-response"
"""Header with the id of the response, for proxies that do not parse the body."""
UNFINISHED = frozenset({"queued", "in_progress"})
LOOK_ELSEWHERE_S = 0.5
"""Seconds between checks of whether a response of another server has ended."""


async def create(shared: AppState, exchange: Exchange) -> None:
    request, size = await exchange.read(
        partial(requests.read, limits=shared.limits, ignored=exchange.ignored)
    )
    if not request.background:
        exchange.active.set_timeout(request.timeout)
    host = await shared.acquire_model(request.model, exchange, streams=bool(request.stream))
    exchange.log_fields["model"] = host.model.planner.name(request.model)
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(
            host.desk.context(request, exchange.owner, size, exchange.offload)
        )
        making = await start_response(host.desk, host.model, request, context)
        exchange.head[RESPONSE_HEADER] = making.id.encode()
        await making.prepare(streams=bool(request.stream))
        if request.background:
            if held := exchange.hand_on():
                stack.callback(held.release)
            stack.callback(exchange.hand_model_on())
            await run_in_background(host, exchange.active, making, stack)
            if request.stream:
                await follow(exchange, making, host.settings.keep_alive)
            else:
                await exchange.json(making.response.body(), size=making.amount)
        else:
            await in_foreground(host, exchange, making)


async def in_foreground(host: ModelServing, exchange: Exchange, making: ResponseRun) -> None:
    """Create a response while the client waits; a disconnect ends the work."""
    making.log_fields, making.abort_reason = exchange.log_fields, lambda: exchange.active.error
    if not making.request.stream:
        await cancel_on_disconnect(exchange, making.run(NullOutput()))
        await exchange.json(making.response.body(), size=making.amount)
        return
    outlet = SseOutput(exchange, host.pump, host.settings.keep_alive)
    try:
        await cancel_on_disconnect(exchange, making.run(outlet))
    except ClientGone:
        raise
    except asyncio.CancelledError:
        await exchange.end_stream()
        raise
    except Exception:
        # The stream has already reported the error, and the log has its text.
        pass
    await exchange.end_stream()


async def run_in_background(
    host: ModelServing, visit: ActiveRequest, making: ResponseRun, stack: AsyncExitStack
) -> None:
    """Create a response in the background: stored before the client gets a reply, and independent of the
    client."""
    making.response.status = "queued"
    await making.context.save(making.response, write_underway(making.request))
    making_it = stack.pop_all()
    visit = visit.detach()
    making.abort_reason = lambda: visit.error
    visit.set_timeout(making.request.timeout)

    async def work() -> None:
        async with making_it:
            with host.journal.work("BACKGROUND", "/v1/responses") as making.log_fields, visit:
                making.log_fields["request_id"] = making.id
                await making.run(NullOutput())

    host.desk.start_background(making, work())


async def follow(exchange: Exchange, making: ResponseRun, keep_alive: float, after: int = -1) -> None:
    """Stream a response that another task creates; that task continues if this client disconnects."""
    assert making.log is not None
    log = making.log

    async def pass_on() -> None:
        await exchange.start_stream(b"")
        async for events in log.follow(after, keep_alive):
            await exchange.write_stored(events)
        await exchange.end_stream()

    await cancel_on_disconnect(exchange, pass_on())


async def compact(shared: AppState, exchange: Exchange) -> None:
    request, size = await exchange.read(
        partial(requests.read, limits=shared.limits, ignored=exchange.ignored)
    )
    if request.model is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    exchange.active.set_timeout(request.timeout)
    host = await shared.acquire_model(request.model, exchange)
    async with host.desk.context(request, exchange.owner, size, exchange.offload) as context:
        result, used = await cancel_on_disconnect(
            exchange, summarise(host.model, request, context, context.all)
        )
    exchange.log_fields["model"] = host.model.planner.name(request.model)
    exchange.log_fields.update(used.log_fields())
    body = compaction_body(new_id("resp_"), int(time.time()), result.items, used)
    await exchange.json(body, size=context.size)


async def input_tokens(shared: AppState, exchange: Exchange) -> None:
    request, size = await exchange.read(
        partial(requests.read, limits=shared.limits, ignored=exchange.ignored)
    )
    host = await shared.acquire_model(request.model, exchange)
    require_tokenizer(host.card, "this route")
    host.model.planner.resolve_adapter(request.model)
    async with host.desk.context(request, exchange.owner, size, exchange.offload) as context:
        offer = await exchange.offload(context.size, partial(offer_tools, request.tools, host.limits))
        counting = partial(count_tokens, host.model, request, context, context.all, offer)
        count = await exchange.offload(counting_cost(host.model, context.size), counting)
    await exchange.json({"object": "response.input_tokens", "input_tokens": count})


# Responses that exist or are created in the background.


class _BackgroundField(msgspec.Struct):
    background: bool


_decode = msgspec.json.Decoder(_BackgroundField).decode
FAR = 2**53


async def retrieve(host: AppState, exchange: Exchange) -> None:
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
    making = host.responses.find_run(exchange.owner, id_)
    if making is not None:
        if streams:
            await follow(exchange, making, host.settings.keep_alive, after)
        else:
            await exchange.json(making.response.body(), size=making.amount)
        return
    record = await exchange.load_stored(host.responses.get_record, exchange.owner, id_)
    if not streams:
        await exchange.reply(record.body, b"application/json")
        return
    if record.status in UNFINISHED:
        await exchange.start_stream(b"")
        await cancel_on_disconnect(exchange, _wait_elsewhere(host, exchange, id_))
        making = host.responses.find_run(exchange.owner, id_)
    if making is not None:
        await follow(exchange, making, host.settings.keep_alive, after)
    else:
        await exchange.stream_stored(*await exchange.load_stored(_events, host, exchange, id_, after + 1))


async def _wait_elsewhere(host: AppState, exchange: Exchange, id_: str) -> None:
    """Wait until the response of another server has ended, or continues here because that server is gone."""
    value = time.monotonic()
    while host.responses.find_run(exchange.owner, id_) is None:
        if (await host.responses.get_record(exchange.owner, id_)).status not in UNFINISHED:
            return
        await asyncio.sleep(LOOK_ELSEWHERE_S)
        if time.monotonic() > value + host.settings.keep_alive:
            value = time.monotonic()
            await exchange.write(KEEP_ALIVE)


async def _events(host: AppState, exchange: Exchange, id_: str, number: int) -> tuple[bytes, int]:
    """Return the events of a response, and the offset of the one with this number."""
    events = (await host.responses.get_record(exchange.owner, id_, events=True)).events
    if not events or is_underway(events):
        message = "The events of this response were not stored; leave out stream to get the full response."
        raise BadRequest(message, param="stream", code="invalid_value")
    return events, await exchange.offload(len(events), partial(event_offset, events, number))


async def delete(host: AppState, exchange: Exchange) -> None:
    """Delete a response at once; a running one is cancelled first."""
    id_ = exchange.path_id
    making = host.responses.find_run(exchange.owner, id_)
    if making is not None:
        await host.responses.cancel(making)
    await host.responses.delete_token_ids(exchange.owner, id_)
    if not await host.responses.store.delete("response", exchange.owner, id_):
        raise unknown_response(id_)
    await exchange.json({"id": id_, "object": "response", "deleted": True})


async def cancel(host: AppState, exchange: Exchange) -> None:
    id_ = exchange.path_id
    making = host.responses.find_run(exchange.owner, id_)
    if making is not None:
        await host.responses.cancel(making)
        await exchange.json(making.response.body(), size=making.amount)
        return
    record = await exchange.load_stored(host.responses.get_record, exchange.owner, id_)
    if not _decode(record.body).background:
        message = "Cannot cancel this response; only background responses can be cancelled."
        raise BadRequest(message, param="response_id", code="invalid_value")
    if record.status in UNFINISHED:
        record = await host.responses.cancel_elsewhere(record)
    # Cancelling a response that has already ended changes nothing.
    await exchange.reply(record.body, b"application/json")


async def input_items(host: AppState, exchange: Exchange) -> None:
    id_, query = exchange.path_id, QueryString(exchange)
    check_include(query.texts("include"))
    page = await exchange.load_stored(
        host.responses.store.inputs,
        "response",
        exchange.owner,
        id_,
        **query.page_params("desc"),
    )
    if page is None:
        raise unknown_response(id_)
    await exchange.page(page.data, page.has_more)
