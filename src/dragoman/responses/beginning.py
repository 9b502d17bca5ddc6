"""From a request and what it continues to a response that is about to be made."""

import logging
import time

from dragoman.api.logprobs import Speller
from dragoman.api.responses.request import ResponseRequest
from dragoman.api.responses.response import ResponseObject, describe_response
from dragoman.api.responses.tools import Offer, offer_tools
from dragoman.api.responses.writer import Manner
from dragoman.limits import check_count
from dragoman.responses.context import Context, new_id
from dragoman.responses.desk import Desk
from dragoman.responses.making import Making
from dragoman.responses.offering import Offering
from dragoman.turns.toolbox import Toolbox
from dragoman.turns.trails import recall

logger = logging.getLogger("dragoman.responses")

REPEATED = ("tools", "tool_choice", "text")
"""Fields of a request that are told again, as they came, with each event of a response's life."""


async def begin_making(desk: Desk, request: ResponseRequest, context: Context) -> Making:
    """Raises for what is wrong with the request itself."""
    model, store = desk.model, _keeps(desk, request)
    limits = model.limits

    def work() -> tuple[Offer, ResponseObject]:
        recall(model.planner.trails, context.trails, context.owner)
        name = request.model or model.card.name
        id_, now = new_id("resp_"), int(time.time())
        made = describe_response(request, id_=id_, created_at=now, model=name, store=store, size=context.size)
        for field in REPEATED:
            size = memoryview(made.fields[field]).nbytes
            check_count(size, 2 * limits.tool_bytes, field, "bytes, which events repeat,")
        return offer_tools(request.tools, limits, context.all), made

    offer, response = await context.aside(context.size + sum(map(len, context.trails)), work)
    if offer.hidden:
        logger.info("Tools that this server does not have are left out: %s", ", ".join(offer.hidden))
    most = min(request.max_tool_calls or limits.tool_calls, limits.tool_calls)
    toolbox = Toolbox(desk.mcp, [declared.wish for declared in offer.mcp], most)
    offering = Offering(toolbox, offer, context.all)
    return Making(desk, request, context, offering, _manner(desk, request, context), response)


def _manner(desk: Desk, request: ResponseRequest, context: Context) -> Manner:
    return Manner(
        new_id=new_id,
        summary=request.wants_summary,
        seal=context.seal if request.wants_encrypted_reasoning else None,
        speller=Speller(desk.model.pieces) if request.logprobs is not None else None,
        token_ids=bool(request.return_token_ids),
    )


def _keeps(desk: Desk, request: ResponseRequest) -> bool:
    """Responses are stored unless somebody does not want it."""
    for field in ("store", "background"):
        if getattr(request, field):
            desk.required(field)
    return request.stored and desk.keeps
