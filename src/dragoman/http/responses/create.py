"""`POST /v1/responses`: made while the client waits, streamed to it, or made in the background.

And the routes that make a conversation short, or only say how long it is.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from functools import partial

from dragoman.api.responses import request as requests
from dragoman.api.responses.compaction import compaction_body
from dragoman.api.responses.tools import offer_tools
from dragoman.errors import BadRequest
from dragoman.http.admission import Visit
from dragoman.http.exchange import Exchange, unless_gone
from dragoman.http.host import Host
from dragoman.http.stream import Sse
from dragoman.responses.beginning import begin_making
from dragoman.responses.context import new_id
from dragoman.responses.making import Making
from dragoman.responses.summary import count_tokens, summarise
from dragoman.turns.outlet import ClientGone, Quiet
from dragoman.turns.turn import note_usage


async def create(host: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(partial(requests.read, limits=host.limits))
    exchange.facts["model"] = request.model or host.card.name
    if not request.background:
        exchange.visit.within(request.timeout)
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(
            host.desk.context(request, exchange.owner, size, exchange.aside)
        )
        making = await begin_making(host.desk, request, context)
        await making.prepare(streams=bool(request.stream))
        if request.background:
            if held := exchange.hand_on():
                stack.callback(held.end)
            await in_background(host, exchange.visit, making, stack)
            if request.stream:
                await follow(exchange, making, host.settings.keep_alive)
            else:
                await exchange.json(making.response.body(), size=making.amount)
        else:
            await in_foreground(host, exchange, making)


async def in_foreground(host: Host, exchange: Exchange, making: Making) -> None:
    """The client waits: if it leaves, the work ends."""
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
        # The stream has said so in its own way, and the log in another.
        pass
    await exchange.end_stream()


async def in_background(host: Host, visit: Visit, making: Making, stack: AsyncExitStack) -> None:
    """It is known before the client is answered, and made whether or not the client stays."""
    making.response.status = "queued"
    await making.context.save(making.response, b"")
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
    """The stream of a response that is being made elsewhere; it goes on if this client leaves."""
    assert making.log is not None
    log = making.log

    async def pass_on() -> None:
        await exchange.start_stream(b"")
        async for events in log.follow(after, keep_alive):
            await exchange.write_stored(events)
        await exchange.end_stream()

    await unless_gone(exchange, pass_on())


async def compact(host: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(partial(requests.read, limits=host.limits))
    if request.model is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    exchange.visit.within(request.timeout)
    async with host.desk.context(request, exchange.owner, size, exchange.aside) as context:
        made, used = await unless_gone(exchange, summarise(host.model, request, context, context.all))
    exchange.facts["model"] = request.model
    note_usage(exchange.facts, used)
    body = compaction_body(new_id("resp_"), int(time.time()), made, used)
    await exchange.json(body, size=context.size)


async def input_tokens(host: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(partial(requests.read, limits=host.limits))
    host.model.planner.adapter(request.model)
    async with host.desk.context(request, exchange.owner, size, exchange.aside) as context:
        offer = await exchange.aside(context.size, partial(offer_tools, request.tools, host.limits))
        counting = partial(count_tokens, host.model, request, context, context.all, offer)
        count = await exchange.aside(context.size, counting)
    await exchange.json({"object": "response.input_tokens", "input_tokens": count})
