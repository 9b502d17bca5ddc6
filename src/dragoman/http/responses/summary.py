"""Routes and steps that make a conversation short, or only say how long it is."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dragoman.api.responses import request as requests
from dragoman.api.responses.compaction import (
    PREFIX,
    Compacted,
    compacted,
    compaction_body,
    for_summary,
    to_summarise,
)
from dragoman.api.responses.request import ResponseRequest, spec
from dragoman.api.responses.tools import Offer, offered
from dragoman.errors import BadRequest
from dragoman.http.exchange import Exchange, unless_gone
from dragoman.http.responses.context import Context, fitted
from dragoman.http.responses.ids import new_id
from dragoman.http.run_turn import count
from dragoman.turns.turn import Turn
from dragoman.types import Usage

if TYPE_CHECKING:
    from dragoman.http.host import Host


async def compact(host: "Host", exchange: Exchange) -> None:
    request, size = await exchange.read(partial(requests.read, limits=host.limits))
    if request.model is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    exchange.visit.within(request.timeout)
    async with host.desk.context(request, exchange.owner, size, exchange.aside) as context:
        made, used = await unless_gone(exchange, summarised(host, request, context, context.all))
    exchange.facts["model"] = request.model
    count(exchange.facts, used)
    body = compaction_body(new_id("resp_"), int(time.time()), made, used)
    await exchange.json(body, size=context.size)


async def input_tokens(host: "Host", exchange: Exchange) -> None:
    request, size = await exchange.read(partial(requests.read, limits=host.limits))
    host.planner.adapter(request.model)
    async with host.desk.context(request, exchange.owner, size, exchange.aside) as context:
        offer = await exchange.aside(context.size, partial(offered, request.tools, host.limits))
        count = await exchange.aside(
            context.size, partial(_tokens, host, request, context, context.all, offer)
        )
    await exchange.json({"object": "response.input_tokens", "input_tokens": count})


async def count_tokens(
    host: "Host", request: ResponseRequest, context: Context, items: Sequence[dict[str, Any]], offer: Offer
) -> int:
    return await context.aside(context.size, partial(_tokens, host, request, context, items, offer))


def _tokens(
    host: "Host", request: ResponseRequest, context: Context, items: Sequence[dict[str, Any]], offer: Offer
) -> int:
    asked = spec(request, items, offer, first=True, unseal=context.unseal)
    return len(host.prompter.render(asked.prompts[0])[1])


async def summarised(
    host: "Host", request: ResponseRequest, context: Context, items: Sequence[dict[str, Any]]
) -> tuple[Compacted, Usage]:
    """What the model makes of the items; the oldest are left out where it cannot read them all."""
    plain, nothing = for_summary(request), offered(None, host.limits)

    async def planned(some: Sequence[dict[str, Any]]) -> Turn:
        asking = to_summarise(some, new_id("msg_"))
        telling = partial(spec, plain, asking, nothing, first=True, unseal=context.unseal)
        asked = await context.aside(context.size, telling)
        most = max(host.card.max_model_len // 4, 1)
        asked = replace(asked, sampling=replace(asked.sampling, max_tokens=most))
        return await host.turn(asked, context.owner, context.size)

    async with await fitted(items, planned) as turn:
        (answer,) = await turn.answers()
    text = answer.text.strip() or answer.reasoning.strip()
    return compacted(items, context.seal(text), new_id(PREFIX)), turn.usage
