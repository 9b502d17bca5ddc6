"""Routes of conversations and their items."""

import time
from functools import partial

from dragoman.api import conversations
from dragoman.api.conversations import check_items, describe_conversation, unknown_conversation, unknown_item
from dragoman.api.responses.request import check_include
from dragoman.errors import BadRequest
from dragoman.http.app_state import AppState
from dragoman.http.exchange import Exchange
from dragoman.http.query_string import QueryString
from dragoman.responses.context import new_id, pack_items
from dragoman.store import StoredConversation, StoredItem


async def create(host: AppState, exchange: Exchange) -> None:
    store = host.responses.require_store()
    request, size = await exchange.read(conversations.read)
    conversation = StoredConversation(
        id=new_id("conv_"), owner=exchange.owner, created_at=time.time(), metadata=request.metadata or {}
    )
    await store.create_conversation(conversation, await _items(host, exchange, request.items or [], size))
    await exchange.json(describe_conversation(conversation))


async def retrieve(host: AppState, exchange: Exchange) -> None:
    await exchange.json(describe_conversation(await _find(host, exchange)))


async def update(host: AppState, exchange: Exchange) -> None:
    new, _ = await exchange.read(conversations.read_metadata)
    if not await host.responses.require_store().set_conversation_metadata(
        exchange.owner, exchange.path_id, new
    ):
        raise unknown_conversation(exchange.path_id)
    await exchange.json(describe_conversation(await _find(host, exchange)))


async def delete(host: AppState, exchange: Exchange) -> None:
    """Delete a conversation with its items; responses generated in it stay."""
    if not await host.responses.require_store().delete_conversation(exchange.owner, exchange.path_id):
        raise unknown_conversation(exchange.path_id)
    await exchange.json(conversations.describe_deleted(exchange.path_id))


async def add_items(host: AppState, exchange: Exchange) -> None:
    _check_include(exchange)
    await _find(host, exchange)
    rows, size = await exchange.read(conversations.read_items)
    items = await _items(host, exchange, rows, size)
    item = host.responses.require_store().conversation_item
    for number, each in enumerate(rows):
        # Ids that the server assigns are always new.
        if "id" in each and await item(exchange.owner, exchange.path_id, items[number].id) is not None:
            message = f"'items[{number}].id' is already in the conversation; send a new id or none."
            raise BadRequest(message, param=f"items[{number}].id", code="invalid_value")
    host.responses.check_free(exchange.owner, exchange.path_id)
    if await host.responses.require_store().add_items(exchange.owner, exchange.path_id, items) is None:
        raise unknown_conversation(exchange.path_id)
    await exchange.page(items, has_more=False)


async def list_items(host: AppState, exchange: Exchange) -> None:
    _check_include(exchange)
    cut = QueryString(exchange).page_params("desc")
    items = host.responses.require_store().conversation_items
    page = await exchange.load_stored(items, exchange.owner, exchange.path_id, **cut)
    if page is None:
        raise unknown_conversation(exchange.path_id)
    await exchange.page(page.data, page.has_more)


async def retrieve_item(host: AppState, exchange: Exchange) -> None:
    _check_include(exchange)
    await _find(host, exchange)
    item_id = exchange.path_params["item_id"]
    item = host.responses.require_store().conversation_item
    stored_item = await exchange.load_stored(item, exchange.owner, exchange.path_id, item_id)
    if stored_item is None:
        raise unknown_item(item_id)
    await exchange.reply(stored_item.body, b"application/json")


async def delete_item(host: AppState, exchange: Exchange) -> None:
    conversation = await _find(host, exchange)
    item_id = exchange.path_params["item_id"]
    host.responses.check_free(exchange.owner, conversation.id)
    if not await host.responses.require_store().delete_item(exchange.owner, conversation.id, item_id):
        raise unknown_item(item_id)
    await exchange.json(describe_conversation(conversation))


async def _find(host: AppState, exchange: Exchange) -> StoredConversation:
    conversation = await host.responses.require_store().conversation(exchange.owner, exchange.path_id)
    if conversation is None:
        raise unknown_conversation(exchange.path_id)
    return conversation


async def _items(
    host: AppState, exchange: Exchange, rows: list[dict[str, object]], size: int
) -> tuple[StoredItem, ...]:
    items = await host.responses.resolve_items(rows, exchange.owner, size, exchange.offload, field="items")
    check_items(items.inputs)
    return await exchange.offload(size + items.size, partial(pack_items, items.inputs, items.size))


def _check_include(exchange: Exchange) -> None:
    """Validate `include`, which has no effect: items are always complete."""
    check_include(QueryString(exchange).texts("include"))
