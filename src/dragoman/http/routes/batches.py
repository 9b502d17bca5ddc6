"""The routes of batches."""

from functools import partial

from dragoman.api import batches as bodies
from dragoman.api.batches import KIND, describe_batch
from dragoman.api.files import describe_page
from dragoman.batches.desk import link_file
from dragoman.http.exchange import Exchange, QueryString
from dragoman.http.host import Host

BATCH_BYTES = 1024
"""Of a batch in JSON, about."""


async def create(host: Host, exchange: Exchange) -> None:
    asked, _ = await exchange.read(bodies.read_batch)
    made = await host.batches.create(
        KIND,
        exchange.owner,
        asked.endpoint,
        partial(link_file, host.files, exchange.owner, asked.input_file_id),
        metadata=asked.metadata,
        keep_s=asked.keep_s,
        key=asked.idempotency_key,
    )
    await exchange.json(describe_batch(made))


async def retrieve(host: Host, exchange: Exchange) -> None:
    await exchange.json(describe_batch(await host.batches.get(KIND, exchange.owner, exchange.path_id)))


async def list_all(host: Host, exchange: Exchange) -> None:
    cut = QueryString(exchange).cut("desc")
    found = await exchange.loaded(host.batches.page, KIND, exchange.owner, **cut)
    shown = [describe_batch(batch) for batch in found.data]
    await exchange.json(describe_page(shown, found.has_more), size=BATCH_BYTES * len(shown))


async def cancel(host: Host, exchange: Exchange) -> None:
    await exchange.json(describe_batch(await host.batches.cancel(KIND, exchange.owner, exchange.path_id)))
