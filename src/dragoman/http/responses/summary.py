"""The routes that make a conversation short, or only say how long it is."""

import time
from functools import partial

from dragoman.api.responses import request as requests
from dragoman.api.responses.compaction import compaction_body
from dragoman.api.responses.tools import offered
from dragoman.errors import BadRequest
from dragoman.http.exchange import Exchange, unless_gone
from dragoman.http.host import Host
from dragoman.responses.context import new_id
from dragoman.responses.summary import count_tokens, summarised
from dragoman.turns.facts import note_usage


async def compact(host: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(partial(requests.read, limits=host.limits))
    if request.model is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    exchange.visit.within(request.timeout)
    async with host.desk.context(request, exchange.owner, size, exchange.aside) as context:
        made, used = await unless_gone(exchange, summarised(host.model, request, context, context.all))
    exchange.facts["model"] = request.model
    note_usage(exchange.facts, used)
    body = compaction_body(new_id("resp_"), int(time.time()), made, used)
    await exchange.json(body, size=context.size)


async def input_tokens(host: Host, exchange: Exchange) -> None:
    request, size = await exchange.read(partial(requests.read, limits=host.limits))
    host.model.planner.adapter(request.model)
    async with host.desk.context(request, exchange.owner, size, exchange.aside) as context:
        offer = await exchange.aside(context.size, partial(offered, request.tools, host.limits))
        counting = partial(count_tokens, host.model, request, context, context.all, offer)
        count = await exchange.aside(context.size, counting)
    await exchange.json({"object": "response.input_tokens", "input_tokens": count})
