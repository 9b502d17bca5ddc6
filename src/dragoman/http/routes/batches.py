"""The routes of batches."""

import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from dragoman.api import batches as bodies
from dragoman.api.batches import KIND, describe_batch
from dragoman.api.files import describe_page
from dragoman.errors import NotFound
from dragoman.http.exchange import Exchange, QueryString
from dragoman.http.host import Host
from dragoman.store.files import FileShelf

BATCH_BYTES = 1024
"""Of a batch in JSON, about."""


async def create(host: Host, exchange: Exchange) -> None:
    asked, _ = await exchange.read(bodies.read_batch)
    made = await host.batches.create(
        KIND,
        exchange.owner,
        asked.endpoint,
        partial(_link_file, host.files, exchange.owner, asked.input_file_id),
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


def _link_file(files: FileShelf, owner: str, id_: str, place: Path) -> str:
    """Another name for a file, so that the batch is made though the file is deleted. It may be unknown."""
    with suppress(NotFound):
        files.found(owner, id_)
        source = files.of(owner) / id_
        try:
            os.link(source, place)
        except OSError:
            # Not every file system has links.
            shutil.copyfile(source, place)
    return id_
