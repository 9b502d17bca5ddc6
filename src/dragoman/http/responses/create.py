"""`POST /v1/responses`: made while the client waits, streamed to it, or made in the background."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from functools import partial

from dragoman.api.logprobs import Speller
from dragoman.api.responses import request as requests
from dragoman.api.responses.request import ResponseRequest
from dragoman.api.responses.response import Response, described
from dragoman.api.responses.tools import Offer, offered
from dragoman.api.responses.writer import Manner
from dragoman.http.admission import Visit
from dragoman.http.exchange import ClientGone, Exchange, unless_gone
from dragoman.http.host import Host
from dragoman.http.responses.context import Context
from dragoman.http.responses.ids import new_id
from dragoman.http.responses.making import Making
from dragoman.http.responses.outlets import Quiet, Sse
from dragoman.http.responses.tool_rounds import ToolRounds
from dragoman.limits import check_count
from dragoman.turns.stored_trails import recall

logger = logging.getLogger("dragoman.http")

REPEATED = ("tools", "tool_choice", "text")
"""Fields of a request that are told again, as they came, with each event of a response's life."""


async def create(host: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(partial(requests.read, limits=host.limits))
    exchange.facts["model"] = request.model or host.card.name
    if not request.background:
        exchange.visit.within(request.timeout)
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(
            host.desk.context(request, exchange.owner, size, exchange.aside)
        )
        making = await prepared(host, request, context)
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


async def prepared(host: Host, request: ResponseRequest, context: Context) -> Making:
    store = keeps(host, request)
    most = request.max_tool_calls or host.limits.tool_calls

    def work() -> tuple[Offer, Response]:
        recall(host.planner.trails, context.trails, context.owner)
        model = request.model or host.card.name
        id_, now = new_id("resp_"), int(time.time())
        made = described(request, id_=id_, created_at=now, model=model, store=store, size=context.size)
        for field in REPEATED:
            size = memoryview(made.fields[field]).nbytes
            check_count(size, 2 * host.limits.tool_bytes, field, "bytes, which events repeat,")
        return offered(request.tools, host.limits, context.all), made

    offer, response = await context.aside(context.size + sum(map(len, context.trails)), work)
    if offer.hidden:
        logger.info("Tools that this server does not have are left out: %s", ", ".join(offer.hidden))
    tools = ToolRounds(host.mcp, offer, context.all, min(most, host.limits.tool_calls))
    return Making(host, request, context, tools, _manner(host, request, context), response)


def _manner(host: Host, request: ResponseRequest, context: Context) -> Manner:
    return Manner(
        new_id=new_id,
        summary=request.wants_summary,
        seal=context.seal if request.wants_encrypted_reasoning else None,
        speller=Speller(host.pieces) if request.logprobs is not None else None,
        token_ids=bool(request.return_token_ids),
    )


def keeps(host: Host, request: ResponseRequest) -> bool:
    """Responses are stored unless somebody does not want it."""
    for field in ("store", "background"):
        if getattr(request, field):
            host.desk.required(field)
    return request.stored and host.desk.keeps


async def in_foreground(host: Host, exchange: Exchange, making: Making) -> None:
    """The client waits: if it leaves, the work ends."""
    making.facts, making.visit = exchange.facts, exchange.visit
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
    making.visit = visit = visit.handed_on()
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
