"""Routes for training the model: changing weights, adapters, and the exact ids of stored answers."""

from functools import partial

from dragoman.api.training import (
    add_rewards,
    describe_engine,
    describe_trajectory,
    read_load,
    read_pause,
    read_resume,
    read_rewards,
    read_scales,
    read_unload,
    unknown_trajectory,
)
from dragoman.engines.protocol import weights_of
from dragoman.errors import TrajectoryTooLarge
from dragoman.http.app_state import AppState, ModelServing
from dragoman.http.exchange import Exchange
from dragoman.http.query_string import QueryString
from dragoman.store import Record, Store


async def pause(host: AppState, exchange: Exchange) -> None:
    """Pause the engine; the reply is sent when nothing is computed any more."""
    host.keys.check_operator(exchange.headers)
    await exchange.read(read_pause)
    model = await _trained(host, exchange)
    await model.pause_control.pause()
    await exchange.json(describe_engine(paused=True, version=weights_of(model.engine)))


async def resume(host: AppState, exchange: Exchange) -> None:
    host.keys.check_operator(exchange.headers)
    request, _ = await exchange.read(read_resume)
    model = await _trained(host, exchange)
    await model.pause_control.resume(request.weight_version)
    await exchange.json(describe_engine(paused=False, version=weights_of(model.engine)))


async def _trained(host: AppState, exchange: Exchange) -> ModelServing:
    """Return the model named by `?model=` in the query, or the default model."""
    return await host.acquire_model(QueryString(exchange).text("model"), exchange)


# Routes of LoRA adapters: vLLM's to load and unload them, and llama-server's to scale them.


async def load_adapter(host: AppState, exchange: Exchange) -> None:
    """Load an adapter; the reply is sent when requests may name it."""
    host.keys.check_operator(exchange.headers)
    request, _ = await exchange.read(read_load)
    adapters = (await _trained(host, exchange)).adapters
    await adapters.load(request.lora_name, request.lora_path, in_place=bool(request.load_inplace))
    await _say(exchange, f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_adapter(host: AppState, exchange: Exchange) -> None:
    """Unload an adapter; running answers that use it finish first."""
    host.keys.check_operator(exchange.headers)
    request, _ = await exchange.read(read_unload)
    await (await _trained(host, exchange)).adapters.unload(request.lora_name)
    await _say(exchange, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


async def list_adapters(host: AppState, exchange: Exchange) -> None:
    model = (await _trained(host, exchange)).model
    rows = [
        {"id": each.id, "path": each.path, "scale": each.scale, "name": each.name}
        for each in model.planner.adapters.all
    ]
    await exchange.json(rows)


async def weigh_adapters(host: AppState, exchange: Exchange) -> None:
    host.keys.check_operator(exchange.headers)
    scales, _ = await exchange.read(read_scales)
    (await _trained(host, exchange)).adapters.set_scales(scales)
    await exchange.json({"success": True})


async def _say(exchange: Exchange, text: str) -> None:
    """Reply with vLLM's text, which some clients compare."""
    await exchange.reply(text.encode(), b"text/plain; charset=utf-8")


# Routes of trajectories: the exact ids of stored answers.


LONGEST = 4096
"""Maximum number of answers in a chain."""
PAGE = 100
MOST_BYTES = 32 * 1024 * 1024
"""Maximum stored size of the answers in one reply, in bytes."""


async def retrieve(host: AppState, exchange: Exchange) -> None:
    id_ = exchange.path_id
    reply = await exchange.load_stored(_describe, exchange, host.responses.require_store(), id_)
    await exchange.reply(reply, b"application/json")


async def reward(host: AppState, exchange: Exchange) -> None:
    """Add rewards to an answer; those with an existing name are replaced."""
    rewards, _ = await exchange.read(read_rewards)
    id_, store = exchange.path_id, host.responses.require_store()
    records = await _records(store, exchange.owner, id_)
    if not records:
        raise unknown_trajectory(id_)
    last = records[-1]
    body = await exchange.offload(len(last.body), partial(add_rewards, last, rewards))
    await store.set_metadata("trajectory", exchange.owner, last.id, last.metadata, body)
    await exchange.reply(await _describe(exchange, store, id_), b"application/json")


async def _describe(exchange: Exchange, store: Store, id_: str) -> bytes:
    records = await _records(store, exchange.owner, id_)
    if not records:
        raise unknown_trajectory(id_)
    size = sum(len(one.body) for one in records)
    return await exchange.offload(size, lambda: exchange.encoder(size)(describe_trajectory(id_, records)))


async def _records(store: Store, owner: str, id_: str) -> list[Record]:
    """Return the records of a conversation, or those leading to an answer, in the order of creation."""
    if id_.startswith("conv_"):
        return await _of_conversation(store, owner, id_)
    return await store.lineage(owner, id_, LONGEST, MOST_BYTES)


async def _of_conversation(store: Store, owner: str, id_: str) -> list[Record]:
    records: list[Record] = []
    after = None
    while len(records) < LONGEST:
        page = await store.records(
            "trajectory", owner, after=after, limit=PAGE, metadata={"conversation": id_}
        )
        records += page.data
        if sum(len(one.body) for one in records) > MOST_BYTES:
            raise TrajectoryTooLarge
        if not page.has_more:
            break
        after = page.data[-1].id
    return records
