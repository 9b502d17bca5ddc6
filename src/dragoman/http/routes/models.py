"""Routes of models: list them and their states; for administrators, load, unload, fetch and delete them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from dragoman.api import model_admin as bodies
from dragoman.api.messages.reply import HEADER, describe_model, list_page
from dragoman.api.model_admin import ChangeModelRequest
from dragoman.engines.protocol import ModelCard
from dragoman.errors import BadRequest, Conflict, DragomanError, Forbidden, ModelFileError, ModelNotFound
from dragoman.http.app_state import AppState
from dragoman.http.exchange import Exchange, cancel_on_disconnect
from dragoman.http.keys import is_private
from dragoman.http.query_string import QueryString
from dragoman.models import ModelPool, PooledModel

R = TypeVar("R")
POLL_INTERVAL_S = 0.25
"""Seconds between checks of progress."""
QUIET_S = 15.0
"""Seconds without a change after which a stream of states continues its check."""
LONGEST_ALIASES = 64

# Lists of models.


async def list_models(host: AppState, exchange: Exchange) -> None:
    models, may_use = host.pool.models.values(), exchange.key.may_use
    named = [(name, model) for model in models for name in model.names if may_use(name)]
    if HEADER in exchange.headers:
        await exchange.json(_page_for_anthropic(exchange, dict(named)))
        return
    await exchange.json({"object": "list", "data": [_describe(name, model) for name, model in named]})


async def get_model(host: AppState, exchange: Exchange) -> None:
    name = exchange.path_params["model"].rstrip("/")
    if not name:
        await list_models(host, exchange)
        return
    try:
        model = host.pool.get(name)
        exchange.check_model(name if name in model.names else model.name)
        if model.loaded is not None:
            model.loaded.model.planner.resolve_adapter(name)
            name = model.loaded.model.planner.name(name)
        elif name not in model.names:
            raise host.pool.unknown(name)
    except ModelNotFound:
        raise ModelNotFound(
            f"The model '{name}' does not exist; /v1/models lists the models.", param="model"
        ) from None
    describe = _describe_for_anthropic if HEADER in exchange.headers else _describe
    await exchange.json(describe(name, model))


def _page_for_anthropic(exchange: Exchange, named: dict[str, PooledModel]) -> dict[str, Any]:
    """Build Anthropic's page of models, after one name or before another."""
    query, names = QueryString(exchange), list(named)
    most = query.integer("limit", 20, 1, 1000)
    after, before = query.text("after_id"), query.text("before_id")
    if after in names:
        names = names[names.index(after) + 1 :]
    if before in names:
        names = names[: names.index(before)]
    rows = [_describe_for_anthropic(name, named[name]) for name in names[:most]]
    return list_page(rows, more=len(names) > most)


def _describe_for_anthropic(name: str, model: PooledModel) -> dict[str, Any]:
    card = model.loaded.card if model.loaded else None
    return describe_model(name, card.created if card else 0, card.max_model_len if card else None)


def _describe(name: str, model: PooledModel) -> dict[str, Any]:
    """Describe a model; fields that are known only for loaded models are absent for others."""
    fields = {"id": name, "object": "model", "created": 0, "owned_by": "dragoman", "status": model.status}
    if model.loaded is None:
        return {**fields, "root": model.name, "parent": None, "max_model_len": None}
    card, adapter = model.loaded.card, model.loaded.model.planner.adapters.get(name)
    return {
        **fields,
        "created": card.created,
        "root": card.name,
        "parent": card.name if adapter else None,
        # The number by which `lora` may name it, as in llama-server.
        **({"lora_id": adapter.id} if adapter else {}),
        "max_model_len": card.max_model_len,
        "input_modalities": ["text", *sorted(card.modalities, reverse=True)],
        "token_ids": _describe_ids(card),
        **({"modalities": sorted(card.modalities)} if card.modalities else {}),
        "dialect": model.loaded.model.detected_dialect.dialect.name,
    }


def _describe_ids(card: ModelCard) -> str:
    """Return how exact the ids of answers are: sampled, counted by a tokenizer, or none."""
    if card.returns_ids:
        return "sampled"
    return "counted" if card.has_tokenizer else "none"


# Changes are for administrators; without keys, for clients on this machine.


def check_admin(host: AppState, exchange: Exchange) -> None:
    keys = host.keys
    if keys.key_required or keys.has_admin or not is_private(host.settings):
        keys.require_admin(exchange.headers)


async def load(host: AppState, exchange: Exchange) -> None:
    """Start loading a model, and reply at once as llama-server does; with `stream`, report the progress."""
    model, request = await _asked(host, exchange)
    if request.stream:
        await _stream_load(host, exchange, model, bodies.tell_status)
        return
    loading = asyncio.ensure_future(host.pool.load(model))
    loading.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.sleep(0)
    if loading.done():
        loading.result()
    await exchange.json({"success": True})


async def unload(host: AppState, exchange: Exchange) -> None:
    """Unload a model; running answers get the grace period of a shutdown, then an error."""
    model, _ = await _asked(host, exchange)
    await host.pool.unload(model, grace=host.settings.shutdown_grace)
    await exchange.json({"success": True})


async def load_for_tabby(host: AppState, exchange: Exchange) -> None:
    model, _ = await _asked(host, exchange)
    await _stream_load(host, exchange, model, bodies.tell_tabby)


async def unload_for_tabby(host: AppState, exchange: Exchange) -> None:
    """Unload a model, or all loaded ones if no name is given."""
    check_admin(host, exchange)
    request, _ = await exchange.read(partial(bodies.read_change, ignored=exchange.ignored))
    all_of_them = [model for model in host.pool.served if model.can_unload]
    if request.meant:
        host.pool.check(request.meant)
    for model in [host.pool.get(request.meant)] if request.meant else all_of_them:
        await host.pool.unload(model, grace=host.settings.shutdown_grace)
    await exchange.json({"success": True})


async def show_default(host: AppState, exchange: Exchange) -> None:
    exchange.check_model(host.pool.default.name)
    await exchange.json(_describe(host.pool.default.name, host.pool.default))


async def _asked(host: AppState, exchange: Exchange) -> tuple[PooledModel, ChangeModelRequest]:
    check_admin(host, exchange)
    request, _ = await exchange.read(partial(bodies.read_named, ignored=exchange.ignored))
    model = await host.pool.find_or_discover(request.meant)
    host.pool.check(request.meant or "")
    return model, request


async def _stream_load(
    host: AppState,
    exchange: Exchange,
    model: PooledModel,
    tell: Callable[[str, Mapping[str, object]], bytes],
) -> None:
    """Stream events until the model is loaded or has failed; loading continues if the client disconnects."""

    async def follow() -> None:
        loading = asyncio.ensure_future(host.pool.load(model))
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(0)
        await exchange.start_stream(tell(model.name, model.status))
        last = dict(model.status)
        while not (await asyncio.wait({loading}, timeout=POLL_INTERVAL_S))[0]:
            if model.status != last:
                last = dict(model.status)
                await exchange.write(tell(model.name, last))
        await exchange.end_stream(tell(model.name, model.status))

    await cancel_on_disconnect(exchange, follow())


async def watch(host: AppState, exchange: Exchange) -> None:
    """Stream the states of all models, and each change, until the client disconnects."""
    may_use = exchange.key.may_use

    async def follow() -> None:
        fields: dict[str, object] = {}
        await exchange.start_stream(b"")
        while not host.admission.draining:
            news = {name: model.status for name, model in host.pool.models.items() if may_use(name)}
            changed = [(name, status) for name, status in news.items() if fields.get(name) != status]
            if changed:
                await exchange.write(b"".join(bodies.tell_status(*each) for each in changed))
                fields = dict(news)
            await _pause(host.pool)
        await exchange.end_stream()

    await cancel_on_disconnect(exchange, follow())


async def _pause(pool: ModelPool) -> None:
    """Wait for a change; while a model is loading, its progress changes often."""
    is_loading = any(model.state == "loading" for model in pool.models.values())
    changed = asyncio.ensure_future(pool.changed.wait())
    try:
        await asyncio.wait({changed}, timeout=POLL_INTERVAL_S if is_loading else QUIET_S)
    finally:
        changed.cancel()


# Aliases, and models on disk.


def copy_model(host: AppState, source: str, destination: str) -> None:
    """Add an alias for a model, until the server stops."""
    model = host.pool.get(source)
    if source not in model.names:
        raise host.pool.unknown(source)
    if destination in model.names:
        return
    if any(destination in other.names for other in host.pool.models.values()):
        raise Conflict(
            f"The model name '{destination}' is already in use; choose another.", param="destination"
        )
    if not destination.isprintable() or len(model.settings.model_alias) >= LONGEST_ALIASES:
        message = f"A model may have at most {LONGEST_ALIASES} aliases, of printable characters."
        raise BadRequest(message, param="destination", code="invalid_value")
    model.settings = replace(model.settings, model_alias=[*model.settings.model_alias, destination])
    if model.loaded is not None:
        planner = model.loaded.model.planner
        planner.names = (*planner.names, destination)


async def pull_model(host: AppState, name: str, function: Callable[[int, int], None]) -> None:
    """Download a model from the hub in a thread, and serve it from then on."""
    from dragoman.hub import parse_name, pull

    assert host.pool.describe is not None
    plain = name.removesuffix(":latest")
    # With a prefix it is a hub name, whatever files are in the server's folder.
    marked = plain if plain.startswith(("hf:", "hf.co/", "https://")) else f"hf:{plain}"
    try:
        meant = parse_name(marked)
    except ModelFileError as error:
        raise BadRequest(error.message, param="model", code="invalid_value") from error
    if meant is None:
        raise host.pool.unknown(name)
    try:
        cached = await asyncio.to_thread(pull, meant, function)
    except ModelFileError as error:
        raise DragomanError(error.message, code="not_fetched") from error
    added = host.pool.describe(cached)
    host.pool.models.setdefault(added.name, added)
    host.pool.notify_change()


async def delete_model(host: AppState, name: str) -> None:
    """Delete a model from the cache; files given in the settings are never deleted."""
    from dragoman.hub.cache import list_cached, remove

    cached = [each for each in await asyncio.to_thread(list_cached) if str(each.name) == name]
    model = host.pool.models.get(name)
    if model is None or not cached:
        message = "Only models in the hub cache can be deleted over HTTP; delete the file on the server."
        raise Forbidden(message, code="not_allowed")
    await host.pool.unload(model, grace=host.settings.shutdown_grace)
    del host.pool.models[name]
    host.pool.notify_change()
    try:
        await asyncio.to_thread(remove, cached[0])
    except ModelFileError as error:
        raise Forbidden(error.message, code="not_allowed") from error


async def tell_meanwhile(work: Awaitable[R], tell: Callable[[], Awaitable[None]]) -> R:
    """Await the work, and call `tell()` repeatedly until it is done."""
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({working}, timeout=POLL_INTERVAL_S))[0]:
            await tell()
        return await working
    finally:
        working.cancel()
