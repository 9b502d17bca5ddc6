"""The routes of responses that were made, or are being made in the background."""

from functools import partial

import msgspec

from dragoman.api.responses.request import check_include
from dragoman.errors import BadRequest
from dragoman.http.exchange import Exchange
from dragoman.http.host import Host
from dragoman.http.responses.create import follow
from dragoman.http.routes.query import QueryString
from dragoman.responses.desk import unknown_response
from dragoman.responses.event_log import place_of


class _Manner(msgspec.Struct):
    background: bool


_decode = msgspec.json.Decoder(_Manner).decode
FAR = 2**53


async def retrieve(host: Host, exchange: Exchange) -> None:
    """The object, or with `stream=true` its events, those after `starting_after`."""
    id_, query = _id(exchange), QueryString(exchange)
    check_include(query.texts("include"))
    after = query.integer("starting_after", -1, 0, FAR)
    streams = query.flag("stream")
    if after >= 0 and not streams:
        raise BadRequest("starting_after needs stream=true.", param="starting_after", code="invalid_value")
    making = host.desk.making(exchange.owner, id_)
    if making is not None:
        if streams:
            await follow(exchange, making, host.settings.keep_alive, after)
        else:
            await exchange.json(making.response.body(), size=making.amount)
        return
    if streams:
        await exchange.stream_stored(*await exchange.loaded(_events, host, exchange, id_, after + 1))
    else:
        record = await exchange.loaded(host.desk.stored, exchange.owner, id_)
        await exchange.reply(record.body, b"application/json")


async def _events(host: Host, exchange: Exchange, id_: str, number: int) -> tuple[bytes, int]:
    """Those of a response, and where the one with this number begins."""
    events = (await host.desk.stored(exchange.owner, id_, events=True)).events
    if not events:
        message = "The events of this response were not kept: leave out stream to get it whole."
        raise BadRequest(message, param="stream", code="invalid_value")
    return events, await exchange.aside(len(events), partial(place_of, events, number))


async def delete(host: Host, exchange: Exchange) -> None:
    """Everything of it is gone at once; what still runs is ended first."""
    id_ = _id(exchange)
    making = host.desk.making(exchange.owner, id_)
    if making is not None:
        await host.desk.cancel(making)
    await host.desk.forget_ids(exchange.owner, id_)
    if not await host.desk.store.delete("response", exchange.owner, id_):
        raise unknown_response(id_)
    await exchange.json({"id": id_, "object": "response", "deleted": True})


async def cancel(host: Host, exchange: Exchange) -> None:
    id_ = _id(exchange)
    making = host.desk.making(exchange.owner, id_)
    if making is not None:
        await host.desk.cancel(making)
        await exchange.json(making.response.body(), size=making.amount)
        return
    record = await exchange.loaded(host.desk.stored, exchange.owner, id_)
    if not _decode(record.body).background:
        message = "Only a response that is made in the background can be cancelled."
        raise BadRequest(message, param="response_id", code="invalid_value")
    # It is over already: to cancel it changes nothing.
    await exchange.reply(record.body, b"application/json")


async def input_items(host: Host, exchange: Exchange) -> None:
    id_, query = _id(exchange), QueryString(exchange)
    check_include(query.texts("include"))
    found = await exchange.loaded(
        host.desk.store.inputs,
        "response",
        exchange.owner,
        id_,
        **query.cut("desc"),
    )
    if found is None:
        raise unknown_response(id_)
    await exchange.page(found.data, found.has_more)


def _id(exchange: Exchange) -> str:
    return exchange.path_params["id"]
