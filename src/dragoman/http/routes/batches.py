"""Routes of batches: OpenAI's, and Anthropic's message batches."""

import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from dragoman.api import batches as bodies
from dragoman.api.batches import KIND, describe_batch
from dragoman.api.files import describe_page
from dragoman.api.messages import batches as message_bodies
from dragoman.api.messages.batches import describe_message_batch
from dragoman.batches.manager import TERMINAL_STATES
from dragoman.errors import NotFound
from dragoman.http.app_state import AppState
from dragoman.http.exchange import Exchange
from dragoman.http.query_string import USUAL_PAGE, QueryString
from dragoman.store.files import FileStore
from dragoman.store.records import StoredBatch

LONGEST_LIST = 1000
BATCH_BYTES = 1024
"""Approximate size of a batch as JSON."""


async def create(host: AppState, exchange: Exchange) -> None:
    asked, _ = await exchange.read(bodies.read_batch)
    batch = await host.batches.create(
        KIND,
        exchange.owner,
        asked.endpoint,
        partial(_link_file, host.files, exchange.owner, asked.input_file_id),
        metadata=asked.metadata,
        keep_s=asked.keep_s,
        key=asked.idempotency_key,
    )
    await exchange.json(describe_batch(batch))


async def retrieve(host: AppState, exchange: Exchange) -> None:
    await exchange.json(describe_batch(await host.batches.get(KIND, exchange.owner, exchange.path_id)))


async def list_all(host: AppState, exchange: Exchange) -> None:
    cut = QueryString(exchange).page_params("desc")
    page = await exchange.load_stored(host.batches.page, KIND, exchange.owner, **cut)
    shown = [describe_batch(batch) for batch in page.data]
    await exchange.json(describe_page(shown, page.has_more), size=BATCH_BYTES * len(shown))


async def cancel(host: AppState, exchange: Exchange) -> None:
    await exchange.json(describe_batch(await host.batches.cancel(KIND, exchange.owner, exchange.path_id)))


def _link_file(files: FileStore, owner: str, id_: str, path: Path) -> str:
    """Link the input file, so that the batch survives its deletion. A file that does not exist is reported
    later."""
    with suppress(NotFound):
        files.read_file_metadata(owner, id_)
        source = files.owner_folder(owner) / id_
        try:
            os.link(source, path)
        except OSError:
            # Not every file system has hard links.
            shutil.copyfile(source, path)
    return id_


# Message batches.


async def create_messages(host: AppState, exchange: Exchange) -> None:
    lines, _ = await exchange.read(partial(message_bodies.read_batch, limits=host.limits))
    kind, endpoint = message_bodies.KIND, message_bodies.ENDPOINT
    put = partial(_put_lines, lines)
    batch = await host.batches.create(kind, exchange.owner, endpoint, put, total=len(lines))
    await exchange.json(describe_message_batch(batch))


def _put_lines(lines: list[bytes], path: Path) -> None:
    path.write_bytes(b"".join(lines))


async def _find_messages(host: AppState, exchange: Exchange) -> StoredBatch:
    return await host.batches.get(message_bodies.KIND, exchange.owner, exchange.path_id)


async def retrieve_messages(host: AppState, exchange: Exchange) -> None:
    await exchange.json(describe_message_batch(await _find_messages(host, exchange)))


async def list_messages(host: AppState, exchange: Exchange) -> None:
    """List batches, newest first; `before_id` reverses the direction."""
    query = QueryString(exchange)
    limit = query.integer("limit", USUAL_PAGE, 1, LONGEST_LIST)
    after, before = query.text("after_id"), query.text("before_id")
    result = await exchange.load_stored(
        host.batches.page,
        *(message_bodies.KIND, exchange.owner),
        after=before or after,
        limit=limit,
        descending=before is None,
    )
    shown = [describe_message_batch(batch) for batch in result.data]
    page = message_bodies.describe_message_page(shown if before is None else shown[::-1], result.has_more)
    await exchange.json(page, size=BATCH_BYTES * len(shown))


async def cancel_messages(host: AppState, exchange: Exchange) -> None:
    batch = await host.batches.cancel(message_bodies.KIND, exchange.owner, exchange.path_id)
    await exchange.json(describe_message_batch(batch))


async def delete_messages(host: AppState, exchange: Exchange) -> None:
    batch = await host.batches.delete(message_bodies.KIND, exchange.owner, exchange.path_id)
    if batch.status not in TERMINAL_STATES:
        raise message_bodies.not_ended(batch.id)
    await exchange.json(message_bodies.describe_deleted_batch(batch.id))


async def results(host: AppState, exchange: Exchange) -> None:
    batch = await _find_messages(host, exchange)
    opened = await host.batches.results(exchange.owner, batch.id) if batch.status in TERMINAL_STATES else None
    if opened is None:
        raise message_bodies.not_ended(batch.id)
    size, file = opened
    await exchange.reply_in_pieces(size, host.files.pieces(file), b"application/x-jsonl", {})
