"""Routes of stored chat completions, and storing them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from dragoman.api import conversations
from dragoman.api.chat.request import ChatRequest
from dragoman.api.chat.stored import describe_deleted, read_calls, record, relabel, unknown_completion
from dragoman.engines.protocol import count_text
from dragoman.http.app_state import AppState, ModelServing
from dragoman.http.exchange import Exchange
from dragoman.http.query_string import QueryString
from dragoman.store import Record
from dragoman.turns.spec import TurnSpec
from dragoman.types import TurnRecord


async def save(
    host: ModelServing,
    exchange: Exchange,
    request: ChatRequest,
    reply: dict[str, Any],
    reply_bytes: int,
    turns: Sequence[TurnRecord],
) -> None:
    """Store the answer; returns when it would survive a crash of the server."""
    if request.store:
        work = partial(record, reply, request, exchange.request_id, exchange.owner)
        stored = await host.workers.run(exchange.owner, exchange.body_bytes + reply_bytes, work)
        await host.desk.require_store("store").save(stored)
    await host.desk.store_token_ids(
        exchange.owner,
        reply["id"],
        turns,
        asked=bool(request.store and request.return_token_ids),
        model=reply["model"],
        created_at=reply["created"],
    )


LATEST = 64
"""Stored answers that are searched for reasoning that this process does not have in memory."""


async def recall(host: ModelServing, exchange: Exchange, spec: TurnSpec) -> None:
    """Load the reasoning of stored tool calls, which a restarted server does not have in memory."""
    planner = host.model.planner
    asked = replace(planner.defaults(spec.model).apply(spec), owner=exchange.owner)
    if asked.cache_salt or not planner.reasoning_memory.has_unknown_calls(asked):
        return
    page = await exchange.load_stored(
        host.desk.require_store().records, "chat", exchange.owner, limit=LATEST, descending=True
    )

    def read() -> None:
        for one in page.data:
            for message in read_calls(one.body):
                tokens = count_text(planner.tokenizer, message.reasoning or "")
                planner.reasoning_memory.recall(asked, one.id, message, tokens)

    await host.workers.run(exchange.owner, sum(len(one.body) for one in page.data), read)


async def list_all(host: AppState, exchange: Exchange) -> None:
    query = QueryString(exchange)
    page = await exchange.load_stored(
        host.responses.require_store().records,
        "chat",
        exchange.owner,
        **query.page_params("asc"),
        model=query.text("model"),
        metadata=query.pairs("metadata"),
    )
    await exchange.page(page.data, page.has_more)


async def retrieve(host: AppState, exchange: Exchange) -> None:
    await exchange.reply((await _find(host, exchange)).body, b"application/json")


async def update(host: AppState, exchange: Exchange) -> None:
    new, _ = await exchange.read(conversations.read_metadata)
    completion = await _find(host, exchange)
    body = await exchange.offload(len(completion.body), partial(relabel, completion.body, new))
    if not await host.responses.require_store().set_metadata(
        "chat", exchange.owner, completion.id, new, body
    ):
        raise unknown_completion(completion.id)
    await exchange.reply(body, b"application/json")


async def delete(host: AppState, exchange: Exchange) -> None:
    await host.responses.delete_token_ids(exchange.owner, exchange.path_id)
    if not await host.responses.require_store().delete("chat", exchange.owner, exchange.path_id):
        raise unknown_completion(exchange.path_id)
    await exchange.json(describe_deleted(exchange.path_id))


async def messages(host: AppState, exchange: Exchange) -> None:
    """List the messages of the request; the answer is in the choices of the object."""
    cut = QueryString(exchange).page_params("asc")
    page = await exchange.load_stored(
        host.responses.require_store().inputs, "chat", exchange.owner, exchange.path_id, **cut
    )
    if page is None:
        raise unknown_completion(exchange.path_id)
    await exchange.page(page.data, page.has_more)


async def _find(host: AppState, exchange: Exchange) -> Record:
    completion = await exchange.load_stored(
        host.responses.require_store().get, "chat", exchange.owner, exchange.path_id
    )
    if completion is None:
        raise unknown_completion(exchange.path_id)
    return completion
